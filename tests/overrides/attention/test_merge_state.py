"""merge_state beyond its cases: against whole attention, sides without keys, tiles, errors."""

from __future__ import annotations

import math
import os

import pytest
import torch
from support.kernels import warm

from fastkernels.overrides.attention import merge_state, sglang, vllm
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8

FP8 = torch.float8_e4m3fn


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp [T, Q]) of queries [T, Q, D] over keys and values [S, Q, D]."""
    scores = torch.einsum("tqd,sqd->tqs", q, k)
    return torch.einsum("tqs,sqd->tqd", scores.softmax(-1), v), scores.logsumexp(-1)


def test_merged_halves_equal_the_whole() -> None:
    q, k, v = randn(9, 3, 16), randn(21, 3, 16, seed=1), randn(21, 3, 16, seed=2)
    first, second, (whole, lse) = attend(q, k[:8], v[:8]), attend(q, k[8:], v[8:]), attend(q, k, v)
    out, out_lse = sglang.sglang_merge_state(*first, *second)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(out_lse, lse)
    theirs, theirs_lse = torch.empty_like(whole), torch.empty(3, 9)
    vllm.vllm_merge_attn_states(
        theirs, first[0], first[1].t().contiguous(), second[0], second[1].t().contiguous(), theirs_lse, 5
    )
    torch.testing.assert_close(theirs[:5], whole[:5])
    torch.testing.assert_close(theirs_lse[:, :5], lse.t()[:, :5])
    assert torch.equal(theirs[5:], second[0][5:]) and torch.equal(theirs_lse[:, 5:], second[1].t()[:, 5:])
    small, scale = torch.zeros(9, 3, 16).to(FP8), torch.tensor([0.01])
    merge_state.merge_state(*first, *second, small, None, None, scale)
    assert torch.equal(small.float(), quantize_fp8(out, scale)[0].float())


def test_side_without_keys_is_ignored() -> None:
    p, s = torch.full((4, 1, 8), math.nan), randn(4, 1, 8)
    p_lse = torch.tensor([[-math.inf], [math.inf], [-math.inf], [0.5]])
    s_lse = torch.tensor([[1.0], [2.0], [-math.inf], [-math.inf]])
    p[3], s[2:] = 1.0, math.nan
    out, lse = sglang.sglang_merge_state(p, p_lse, s, s_lse)
    assert torch.equal(out[:2], s[:2]) and (out[2] == 0).all() and (out[3] == 1).all()
    assert lse.flatten().tolist() == [1, 2, -math.inf, 0.5]


# Large calls use tiles, and the last one is partial: every pair of token and head is computed, and the values of a side
# without keys, though loaded, are ignored.
TILES = """
import math
import torch
from fastkernels.core import registry
from fastkernels.overrides.attention import merge_state
from fastkernels.core.spec import Case

seen = []
launch = merge_state.launch_kernel
merge_state.launch_kernel = lambda *a, **rest: (seen.append((a[1], rest["ROWS"], rest["HEADS"])), launch(*a, **rest))
for heads_first, grid, heads_of in ((True, 8 * 36, 2), (False, 31 * 9, 8)):
    dims = {"tokens": 61, "heads": 72, "head_size": 16, "heads_first": heads_first, "empty": True, "context": 50}
    args = merge_state.SPEC.inputs(Case("", dims, "float32"), "cpu", torch.Generator().manual_seed(0))
    for side in (0, 2):
        args[side][args[side + 1].abs() == math.inf] = math.nan
    args[4].fill_(math.nan), args[5].fill_(math.nan)
    out, lse = merge_state.reference(*args)
    merge_state._triton(*args)
    assert seen.pop() == ((grid,), 16, heads_of)
    torch.testing.assert_close(args[4], out, equal_nan=True)
    torch.testing.assert_close(args[5], lse)
    assert not args[4][:50].isnan().any()
"""


def test_tiles_cover_every_token_and_head() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = warm.run(["-c", TILES], env)
    assert done.returncode == 0, done.stderr


def test_bad_shape_is_named() -> None:
    x = torch.ones(4, 64)
    with pytest.raises(ValueError, match=r"must be \[T, Q, D\], got shape \(4, 64\)"):
        merge_state.merge_state(x, x, x, x, x)
