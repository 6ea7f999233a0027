"""Functions of SGLang's Mamba 2 layers against its Triton kernels, in the interpreter: no CPU build has the layers."""

import contextlib

import pytest
import torch

from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recurrence import sglang as ours

SLOTS = torch.tensor([4, -1, 2], dtype=torch.int32)  # -1: padding of a captured graph


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """SGLang's kernels in Triton's interpreter, which NumPy 2.4 needs numbers for, not arrays of one."""
    from triton.runtime import interpreter

    stock = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(torch.cpu, "device", lambda index: contextlib.nullcontext(), raising=False)


def same(found, want, states, theirs):
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, theirs, atol=1e-5, rtol=1e-5)


def test_state_update_equals_sglangs():
    from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update

    torch.manual_seed(0)
    state, x, b, c = (
        torch.randn(6, 4, 8, 16),
        torch.randn(3, 4, 8),
        torch.randn(3, 2, 16),
        torch.randn(3, 2, 16),
    )
    dt = torch.randn(3, 4)[..., None].expand(3, 4, 8)
    rate = (-torch.rand(4))[:, None, None].expand(4, 8, 16)
    skip, bias = (torch.randn(4)[:, None].expand(4, 8) for _ in range(2))
    theirs, states, out, want = state.clone(), state.clone(), torch.zeros(3, 4, 8), torch.zeros(3, 4, 8)
    selective_state_update(theirs, x, dt, rate, b, c, skip, None, bias, True, SLOTS, out=want)
    ours.sglang_selective_state_update(states, x, dt, rate, b, c, skip, None, bias, True, SLOTS, out=out)
    same(out[[0, 2]], want[[0, 2]], states, theirs)
    with pytest.raises(UnsupportedArgument, match="disable_state_update=True"):
        given = (states, x, dt, rate, b, c, skip, None, bias, True, SLOTS)
        ours.sglang_selective_state_update(*given, out=out, disable_state_update=True)


def test_convolutions_equal_sglangs():
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update

    torch.manual_seed(0)
    pool, weight, bias, x = torch.randn(6, 8, 3), torch.randn(8, 4), torch.randn(8), torch.randn(3, 8)
    theirs, states = pool.clone(), pool.clone()
    want = causal_conv1d_update(x.clone(), theirs, weight, bias, "silu", conv_state_indices=SLOTS)
    out = ours.sglang_causal_conv1d_update(x, states, weight, bias, "silu", conv_state_indices=SLOTS)
    same(out[[0, 2]], want[[0, 2]], states, theirs)
    prompts, slots, has = torch.randn(7, 8).t(), SLOTS[[0, 2]], torch.tensor([True, False])
    borders, (theirs, states) = torch.tensor([0, 3, 7], dtype=torch.int32), (pool.clone(), pool.clone())
    want = causal_conv1d_fn(prompts, weight, bias, theirs, borders, [3, 4], slots, has, "silu")
    given = (prompts, weight, bias, borders, slots, has, states, "silu")
    same(ours.sglang_causal_conv1d_fn(*given, seq_lens_cpu=[3, 4]), want, states, theirs)
