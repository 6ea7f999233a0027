"""Tests of fused_experts_int4: dequantized weights, expert parallelism, errors that name the tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastkernels.core.spec import Case
from fastkernels.overrides.linear.linear_int4 import pack_int4
from fastkernels.overrides.moe.fused_experts_int4 import SPEC, fused_experts_int4

T = torch.Tensor
E, H, INNER, TOPK = 4, 64, 96, 2


def matrix(n: int, k: int, group: int, zeros: bool) -> tuple[T, T, T | None, T]:
    """Packed integers, scales, zero points and the floats that they stand for, of E experts."""
    q, scale = torch.randint(0, 16, (E, n, k)), torch.rand(E, n, k // group) / k**0.5
    zero = torch.randint(0, 16, scale.shape) if zeros else torch.full(scale.shape, 8)
    wide = (t.repeat_interleave(group, 2) for t in (zero, scale))
    floats = (q - next(wide)) * next(wide)
    return pack_int4(q.to(torch.uint8)), scale, zero.to(torch.uint8) if zeros else None, floats


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, None])
def test_experts_equal_dequantized_ones(group: int | None, zeros: bool) -> None:
    torch.manual_seed(0)
    w1, s1, z1, gate_up = matrix(2 * INNER, H, group or H, zeros)
    w2, s2, z2, down = matrix(H, INNER, group or INNER, zeros)
    x, weights = torch.randn(9, H), torch.rand(9, TOPK)
    ids = torch.randint(0, E, (9, TOPK), dtype=torch.int32)
    ids[3] = torch.tensor([-1, E])  # a padded token
    want = torch.zeros_like(x)
    for t in range(9):
        for e, share in zip(ids[t].tolist(), weights[t], strict=True):
            if 0 <= e < E:
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                want[t] += share * (down[e] @ (F.silu(gate) * up))
    found = fused_experts_int4(x, w1, w2, s1, s2, weights, ids, z1, z2)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    parts = torch.zeros_like(x)
    for rank in range(2):
        here, mine = torch.full((E,), -1, dtype=torch.int32), slice(2 * rank, 2 * rank + 2)
        here[mine] = torch.arange(2, dtype=torch.int32)
        own = (None if t is None else t[mine] for t in (w1, w2, s1, s2, z1, z2))
        first = [next(own) for _ in range(4)]
        parts += fused_experts_int4(x, *first, weights, ids, *own, here)
    torch.testing.assert_close(parts, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (1, lambda t: t.float(), r"w1 \(3, 192, 32\) \(torch.float32\) must be uint8 \(3, 192, 32\)"),
        (2, lambda t: t[:, :, :32], r"w2 \(3, 64, 32\) \(torch.uint8\) must be uint8 \(3, 64, 48\)"),
        (3, lambda t: t[:, :5], r"w1_scale \(3, 5, 2\) must be \[3, 192, G\]"),
        (4, lambda t: t[:, :, :2], r"w2_scale \(3, 64, 2\) must be \[3, 64, G\], one for each group of 96 / G"),
        (5, lambda t: t[:4], r"topk_weights \(4, 2\) and topk_ids \(9, 2\) must both be \[9, experts per token\]"),
        (7, lambda t: t[:1], r"w1_zero \(1, 192, 2\) \(torch.uint8\) must be uint8 \(3, 192, 2\)"),
    ],
)  # fmt: skip
def test_wrong_tensor_is_named(at: int, change: Any, message: str) -> None:
    sizes = {
        "tokens": 9,
        "experts": 3,
        "topk": 2,
        "hidden": 64,
        "intermediate": 96,
        "group": 32,
        "zeros": True,
    }
    args = SPEC.inputs(Case("c", sizes, "float32"), "cpu", torch.Generator().manual_seed(0))
    args[at] = change(args[at])
    with pytest.raises(ValueError, match=message):
        fused_experts_int4(*args)
