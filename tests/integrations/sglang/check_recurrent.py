"""SGLang's functions for recurrent layers against its kernels, in Triton's interpreter: no CPU build has the layers."""

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
    from sglang.kernels.ops.attention.fla import fused_recurrent
    from triton import language as tl

    monkeypatch.setattr(fused_recurrent, "exp", lambda x: tl.exp(x))  # the interpreter replaces tl.exp alone
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


class Backend:
    """Holds a kernel object as SGLang's backends of linear attention do."""

    __module__ = "sglang.srt.layers.attention.linear.tests"

    def __init__(self, kernel):
        self.kernel_dispatcher = kernel

    def init_cuda_graph_state(self):
        raise NotImplementedError


def patched_backend(backend, ops):
    from types import SimpleNamespace

    from fk_integrations.patching.apply import apply
    from fk_integrations.sglang.scheduler import SglangAdapter

    from fastkernels.patch import Request

    arguments = SimpleNamespace(pp_size=1, tp_size=1)
    runner = SimpleNamespace(attn_backend=backend, server_args=arguments, device="cpu")
    return apply(SglangAdapter(runner), torch.nn.Linear(1, 1), Request("patch", ops=ops))


def patched(kernel, ops):
    return patched_backend(Backend(kernel), ops)


HEADS, SIZE = 2, 16


def drawn(channels, batch=3):
    torch.manual_seed(0)
    width = HEADS * SIZE
    a = torch.randn(batch, width if channels else HEADS)
    rates = {"A_log": torch.rand(HEADS), "dt_bias": torch.randn(width if channels else HEADS)}
    return (
        torch.randn(batch, 3 * width),
        a,
        torch.randn(batch, HEADS),
        rates,
        torch.randn(6, HEADS, SIZE, SIZE),
    )


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_kernel_object_is_patched_proved_and_undone(op):
    """A packed decode of SGLang's own kernel, patched and after undo, on a pool with a padded row."""
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    kind = TritonKDAKernel if op == "kda" else TritonGDNKernel
    kernel = kind()
    mixed, a, b, rates, pool = drawn(op == "kda")

    def decode(states):
        sizes = {"num_v_heads": HEADS, "head_v_dim": SIZE}
        given = {**rates, **sizes, "scale": SIZE**-0.5, "ssm_states": states, "cache_indices": SLOTS}
        return kernel.packed_decode(mixed, a, b, **given)[0]

    theirs, states, again = pool.clone(), pool.clone(), pool.clone()
    want = decode(theirs)
    report = patched(kernel, (op,))
    found = decode(states)
    same(found[[0, 2]], want[[0, 2]], states, theirs)
    rows = {r["host_class"]: r for r in report.report() if r["modules"]}
    row = next(r for name, r in rows.items() if name.endswith("packed_decode"))
    assert (row["calls"], row["proof"], row["fallbacks"]) == (1, "calls", {})
    report.undo()
    assert type(kernel) is kind and torch.equal(decode(again)[[0, 2]], want[[0, 2]])


def test_prompts_of_kda_equal_its_decodes():
    """A prompt of a patched kernel object against one of SGLang's own decodes after another."""
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    kernel = TritonKDAKernel()
    mixed, a, b, rates, pool = drawn(True, batch=9)
    q, k, v = (x.unflatten(1, (HEADS, SIZE))[None] for x in mixed.split(HEADS * SIZE, 1))
    theirs, states, want = pool.clone(), pool.clone(), []
    one = {"cache_indices": SLOTS[:1], "ssm_states": theirs, "query_start_loc": torch.tensor([0, 1])}
    for t in range(9):
        parts = [x[:, t : t + 1] for x in (q, k, v)]
        want.append(kernel.decode(*parts, a[t : t + 1], b[t : t + 1], **rates, **one)[0])
    given = {**rates, "ssm_states": states, "cache_indices": SLOTS[:1], "beta_is_raw": True}
    gates = a.unflatten(1, (HEADS, SIZE))[None], b[None]
    report = patched(kernel, ("kda",))
    found = kernel.extend(q, k, v, *gates, query_start_loc=torch.tensor([0, 9]), **given)
    row = next(r for r in report.report() if r["host_class"] == "chunk_kda")
    assert (row["calls"], row["fallbacks"]) == (1, {})
    report.undo()
    same(found[0], torch.cat(want), states, theirs)


def test_prompts_of_the_gated_rule_equal_its_decodes():
    """Two prompts against SGLang's own decodes, with the states before chunks that a kept prefix needs."""
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    kernel, total, first = TritonGDNKernel(), 75, 70
    mixed, _, b, _, pool = drawn(False, batch=total)
    a = torch.randn(total, HEADS)
    rates = {"A_log": torch.rand(HEADS), "dt_bias": torch.randn(HEADS)}
    q, k, v = (x.unflatten(1, (HEADS, SIZE))[None] for x in mixed.split(HEADS * SIZE, 1))
    theirs, states, want, inside = pool.clone(), pool.clone(), [], []
    for t in range(total):
        one = {"cache_indices": SLOTS[[0 if t < first else 2]], "query_start_loc": torch.tensor([0, 1])}
        parts = [x[:, t : t + 1] for x in (q, k, v)]
        want.append(kernel.decode(*parts, a[t : t + 1], b[t : t + 1], **rates, ssm_states=theirs, **one)[0])
        inside += [theirs[4].clone()] if t == 63 else []
    decays = -rates["A_log"].exp() * torch.nn.functional.softplus(a + rates["dt_bias"])
    given = {
        "ssm_states": states,
        "cache_indices": SLOTS[[0, 2]],
        "query_start_loc": torch.tensor([0, first, total]),
    }
    report = patched(kernel, ("gated_delta_rule",))
    found, last, before = kernel.extend(q, k, v, decays[None], b.sigmoid()[None], **given)
    row = next(r for r in report.report() if r["host_class"] == "chunk_gated_delta_rule")
    assert (row["calls"], row["fallbacks"], last) == (1, {}, None)
    report.undo()
    assert type(kernel) is TritonGDNKernel
    same(found[0], torch.cat(want), states, theirs)
    read = before.squeeze(0)[
        torch.tensor([1, 2])
    ]  # before the second chunk of one, and the only one of the other
    torch.testing.assert_close(read, torch.stack([inside[0], pool[2]]), atol=1e-5, rtol=1e-5)
    refused = {
        "initial_state": states,
        "initial_state_indices": SLOTS[:1],
        "cu_seqlens": torch.tensor([0, total]),
    }
    with pytest.raises(UnsupportedArgument, match="states_that_stay"):
        ours.sglang_chunk_gated_delta_rule(q, k, v, decays[None], b[None], **refused, inplace_update=False)


def test_lightning_attention_equals_sglangs():
    """Prompts and decodes of a patched backend against SGLang's kernels."""
    from sglang.kernels.ops.attention.linear.seg_la import SegLaMeta, seg_la_fwd

    torch.manual_seed(0)
    heads, size = 2, 128
    pool, slopes = torch.randn(6, heads, size, size), torch.rand(heads, 1, 1)
    for lengths in ([5, 40], [1, 1, 1]):
        borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        q, k, v = (torch.randn(sum(lengths), heads, size) * 0.3 for _ in range(3))
        slots = torch.tensor([3, 1, 5][: len(lengths)], dtype=torch.int32)
        meta = SegLaMeta(
            batch_size=len(lengths), max_q_length=None, q_offsets=borders, s_offsets=slots, q_lengths=borders.diff(),
            s_scales=torch.tensor([False, True, True][: len(lengths)]),
        )  # fmt: skip
        theirs, states = pool.clone(), pool.clone()
        want = seg_la_fwd(q, k, v, theirs, slopes, meta, softmax_scale=0.2)
        found = ours.sglang_seg_la_fwd(q, k, v, states, slopes, meta, softmax_scale=0.2)
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(states, theirs, atol=1e-4, rtol=1e-4)
    with pytest.raises(UnsupportedArgument, match="track_lens"):
        ours.sglang_seg_la_fwd(q, k, v, states, slopes, meta, track_lens=slots)


def test_lightning_backend_is_patched_proved_and_undone():
    """SGLang's own backend computes a prompt and a decode, patched and after undo."""
    from types import SimpleNamespace

    from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend

    torch.manual_seed(0)
    heads, size = 2, 128
    backend = object.__new__(LightningAttentionBackend)  # its constructor needs a model runner
    backend.tp_slope, layer = [torch.rand(heads, 1, 1)], SimpleNamespace(layer_id=0, scaling=0.2)
    pool = torch.randn(6, heads, size, size)

    def step(states, *lengths):
        torch.manual_seed(len(lengths))
        q, k, v = (torch.randn(sum(lengths), heads, size) * 0.3 for _ in range(3))
        known = torch.tensor([False, True, True][: len(lengths)])
        meta = SimpleNamespace(
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), batch_size=len(lengths),
            has_initial_states=known,
        )  # fmt: skip
        slots = torch.tensor([3, 1, 5][: len(lengths)], dtype=torch.int32)
        return backend._linear_attention_entry(q, k, v, states, slots, meta, layer)

    def steps():
        states = pool.clone()
        return step(states, 5, 40), step(states, 1, 1, 1), states

    want = steps()
    report = patched_backend(backend, ("gated_linear_attention",))
    for ours_, theirs in zip(steps(), want, strict=True):
        torch.testing.assert_close(ours_, theirs, atol=1e-4, rtol=1e-4)
    row = next(r for r in report.report() if r["modules"])
    assert (row["calls"], row["proof"], row["fallbacks"]) == (2, "calls", {})
    report.undo()
    assert type(backend) is LightningAttentionBackend
    assert all(torch.equal(after, before) for after, before in zip(steps(), want, strict=True))


def test_scan_of_prompts_equals_decodes():
    torch.manual_seed(0)
    x, b, c = torch.randn(1, 7, 4, 8), torch.randn(1, 7, 2, 16), torch.randn(1, 7, 2, 16)
    dt, rate, skip, bias = torch.randn(1, 7, 4), -torch.rand(4), torch.randn(4), torch.randn(4)
    borders, out = torch.tensor([0, 3, 7]), torch.empty_like(x)
    more = {"D": skip, "dt_bias": bias, "cu_seqlens": borders, "dt_softplus": True, "out": out}
    _, last, _ = ours.sglang_mamba_chunk_scan_combined(
        x, dt, rate, b, c, 256, **more, return_varlen_states=True, return_track_states=True,
        state_dtype=torch.float32,
    )  # fmt: skip
    states, want = torch.zeros(3, 4, 8, 16), torch.zeros(7, 4, 8)
    wide = rate[:, None, None].expand(4, 8, 16), skip[:, None].expand(4, 8), bias[:, None].expand(4, 8)
    for t in range(7):
        slot = torch.tensor([1 if t < 3 else 2], dtype=torch.int32)
        steps = dt[0, t : t + 1, :, None].expand(1, 4, 8)
        ours.sglang_selective_state_update(
            states, x[0, t : t + 1], steps, wide[0], b[0, t : t + 1], c[0, t : t + 1], wide[1], None, wide[2],
            True, slot, out=want[t : t + 1],
        )  # fmt: skip
    same(out[0], want, last, states[1:])
    with pytest.raises(UnsupportedArgument, match="track_seq_idx"):
        ours.sglang_mamba_chunk_scan_combined(x, dt, rate, b, c, 256, **more, track_seq_idx=borders)
