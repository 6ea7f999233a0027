"""Triton kernels for experts of very few tokens: two launches, in which every (token, expert) pair reads its own rows.

The first has the SwiGLU as its epilogue, the second adds up the experts of a token, so that nothing is sorted and no
result of a single expert is stored. Products are sums on CUDA cores: memory is the limit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import ForOthers
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

MOST_TOKENS = 8
# columns: outputs of a program of the first product, of the second half as many; depth: of its sums
PARAMS: tuple[dict[str, int], ...] = (
    {"columns": 16, "depth": 256, "num_warps": 4}, {"columns": 8, "depth": 512, "num_warps": 4},
    {"columns": 16, "depth": 512, "num_warps": 8}, {"columns": 32, "depth": 256, "num_warps": 8},
)  # fmt: skip


@triton.jit
def _expert_of(ids_ptr, map_ptr, pair, E, EVERYWHERE, HAS_MAP: tl.constexpr):
    """The local index of a pair's expert, and whether it is on this rank."""
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    there = (expert >= 0) & (expert < EVERYWHERE)
    expert = tl.where(there, expert, 0)
    if HAS_MAP:
        expert = tl.load(map_ptr + expert).to(tl.int64)
        there = there & (expert >= 0) & (expert < E)
        expert = tl.where(there, expert, 0)
    return expert, there


# N: the intermediate size
@triton.jit
def gate_up_kernel(
    x_ptr, w_ptr, ids_ptr, map_ptr, scale_ptr, out_ptr, N, E, EVERYWHERE, x_row, w_expert, w_row,
    K: tl.constexpr, TOPK: tl.constexpr, HAS_MAP: tl.constexpr, ON_INPUT: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    pair = tl.program_id(1)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < N
    expert, there = _expert_of(ids_ptr, map_ptr, pair, E, EVERYWHERE, HAS_MAP)
    if there:
        ks = tl.arange(0, DEPTH)
        x_at = x_ptr + (pair // TOPK).to(tl.int64) * x_row + ks
        gate_at = w_ptr + expert * w_expert + cols.to(tl.int64)[:, None] * w_row + ks[None, :]
        up_at = w_ptr + expert * w_expert + (cols + N).to(tl.int64)[:, None] * w_row + ks[None, :]
        gate = tl.zeros((COLUMNS, DEPTH), dtype=tl.float32)
        up = tl.zeros((COLUMNS, DEPTH), dtype=tl.float32)
        for k in tl.range(0, K, DEPTH, num_stages=STAGES):
            left = ks < K - k
            both = inside[:, None] & left[None, :]
            x = tl.load(x_at + k, mask=left, other=0.0).to(tl.float32)[None, :]
            gate += tl.load(gate_at + k, mask=both, other=0.0).to(tl.float32) * x
            up += tl.load(up_at + k, mask=both, other=0.0).to(tl.float32) * x
        g, u = tl.sum(gate, axis=1), tl.sum(up, axis=1)
        if ON_INPUT:
            factor = tl.load(scale_ptr + pair).to(tl.float32)
            g, u = g * factor, u * factor
        # As in production, gate, up and the activation are rounded to the output's dtype.
        g = g.to(out_ptr.dtype.element_ty).to(tl.float32)
        u = u.to(out_ptr.dtype.element_ty).to(tl.float32)
        act = (g / (1 + tl.exp(-g))).to(out_ptr.dtype.element_ty).to(tl.float32)
        tl.store(out_ptr + pair.to(tl.int64) * N + cols, (act * u).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def down_kernel(
    a_ptr, w_ptr, ids_ptr, map_ptr, scale_ptr, out_ptr, H, E, EVERYWHERE, w_expert, w_row,
    K: tl.constexpr, TOPK: tl.constexpr, HAS_MAP: tl.constexpr, ON_INPUT: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    token = tl.program_id(1)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < H
    ks = tl.arange(0, DEPTH)
    acc = tl.zeros((COLUMNS, DEPTH), dtype=tl.float32)
    PARTS: tl.constexpr = (K + DEPTH - 1) // DEPTH
    # One loop over all experts, so that the loads of the next one are under way while one ends.
    for step in tl.range(0, TOPK * PARTS, num_stages=STAGES):
        pair = token * TOPK + step // PARTS
        k = step % PARTS * DEPTH + ks
        expert, there = _expert_of(ids_ptr, map_ptr, pair, E, EVERYWHERE, HAS_MAP)
        left = (k < K) & there
        a = tl.load(a_ptr + pair.to(tl.int64) * K + k, mask=left, other=0.0).to(tl.float32)
        if not ON_INPUT:
            a *= tl.load(scale_ptr + pair).to(tl.float32)
        w_at = w_ptr + expert * w_expert + cols.to(tl.int64)[:, None] * w_row + k[None, :]
        w = tl.load(w_at, mask=inside[:, None] & left[None, :], other=0.0).to(tl.float32)
        acc += w * a[None, :]
    out = tl.sum(acc, axis=1).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * H + cols, out, mask=inside)


def unsupported_few(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor) -> str | None:
    """Return why this call is for other kernels, None if it is for these."""
    if not 0 < ids.shape[0] <= MOST_TOKENS:
        return ForOthers(f"{ids.shape[0]} tokens, not 1 to {MOST_TOKENS}")
    if min(*w1.shape, *w2.shape) == 0:
        return ForOthers("experts of size 0")
    for name, w in (("w1", w1), ("w2", w2)):
        if w.dtype != x.dtype or w.stride(-1) != 1:
            return ForOthers(f"{name} is {w.dtype} with strides {tuple(w.stride())}, hidden_states {x.dtype}")
    return None


def few_pairs(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
    expert_map: torch.Tensor | None, on_input: bool, columns: int, depth: int, num_warps: int,
) -> torch.Tensor:  # fmt: skip
    """x: [T, H]; w1: [E, 2 I, H]; w2: [E, H, I]; weights, ids: [T, K]. Returns [T, H]; see `fused_experts`."""
    (tokens, topk), (here, hidden, inner) = ids.shape, w2.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    everywhere = here if expert_map is None else expert_map.numel()
    between = torch.empty((tokens * topk, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    same: dict[str, Any] = {
        "TOPK": topk, "HAS_MAP": expert_map is not None, "ON_INPUT": on_input, "num_warps": num_warps, "STAGES": 3,
    }  # fmt: skip
    launch_kernel(
        gate_up_kernel, (cdiv(inner, columns), tokens * topk), x, w1, ids, expert_map, weights, between, inner, here,
        everywhere, x.stride(0), w1.stride(0), w1.stride(1), K=hidden, COLUMNS=columns,
        DEPTH=min(depth, next_power_of_2(hidden)), **same,
    )  # fmt: skip
    # A program of the second product reads the rows of all experts of a token: fewer programs, so smaller ones.
    few = max(columns // 2, 1)
    launch_kernel(
        down_kernel, (cdiv(hidden, few), tokens), between, w2, ids, expert_map, weights, out, hidden, here, everywhere,
        w2.stride(0), w2.stride(1), K=inner, COLUMNS=few, DEPTH=min(2 * depth, next_power_of_2(inner)), **same,
    )  # fmt: skip
    return out
