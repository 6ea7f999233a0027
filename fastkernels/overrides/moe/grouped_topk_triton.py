"""The Triton kernel of grouped_topk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

MAX_EXPERTS, MAX_TOPK = 1024, 32
Pair = tuple[torch.Tensor, torch.Tensor]


@triton.jit(do_not_specialize=["T"])
def _grouped_topk_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, stride, factor, T, E, G, S, TOPK: tl.constexpr,
    TOPK_GROUP: tl.constexpr, SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # A tile is [tokens, groups, experts of a group], padded to powers of two.
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    expert = group[:, None] * S + member[None, :]
    exists = (group < G)[:, None] & (member < S)[None, :]
    inside = (rows < T)[:, None, None] & exists[None, :, :]
    at = logits_ptr + rows.to(tl.int64)[:, None, None] * stride + expert[None, :, :]
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    ranked = tl.where(x != x, float("-inf"), x)
    top = tl.max(tl.max(ranked, axis=2), axis=1)
    total = tl.sum(tl.sum(tl.where(inside, tl.exp(x - top[:, None, None]), 0.0), axis=2), axis=1)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
        if SOFTMAX:
            scores = tl.exp(x - top[:, None, None]) / total[:, None, None]
        else:
            scores = 1.0 / (1.0 + tl.exp(-x))
        ranked = scores + bias[None, :, :]
        ranked = tl.where((ranked != ranked) | (inside == 0), float("-inf"), ranked)
    ranked = tl.where(ranked == 0.0, 0.0, ranked)  # -0 is 0
    best = tl.max(ranked, axis=2)
    if HAS_BIAS:
        at_best = ranked == best[:, :, None]
        second = tl.max(tl.where(at_best, float("-inf"), ranked), axis=2)
        best += tl.where(tl.sum(at_best.to(tl.int32), axis=2) > 1, best, second)
    # A group's place is the number of groups before it: of higher score, or as high with a lower number.
    ahead = (best[:, None, :] > best[:, :, None]) | (
        (best[:, None, :] == best[:, :, None]) & (group[None, :] < group[:, None])[None, :, :]
    )
    chosen = tl.sum(ahead.to(tl.int32), axis=2) < TOPK_GROUP
    counts = chosen[:, :, None] & exists[None, :, :]
    bits = tl.where(counts, ranked, float("-inf")).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    # One maximum finds the score and its lowest id: the id counts down in the low half, which is 0 for all others.
    low = tl.where(counts, (E - expert)[None, :, :], 0)
    BLOCK: tl.constexpr = BLOCK_G * BLOCK_S
    keys = tl.reshape((bits.to(tl.int64) << 32) | low.to(tl.int64), (BLOCK_T, BLOCK))
    number = tl.reshape(expert, (BLOCK,))
    choice = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    for k in tl.static_range(TOPK):
        found = E - (tl.max(keys, axis=1) & 0xFFFFFFFF).to(tl.int32)
        ids = tl.where(choice[None, :] == k, found[:, None], ids)
        keys = tl.where(number[None, :] == found[:, None], -0x8000000000000000, keys)
    mask = (rows < T)[:, None] & (choice < TOPK)[None, :]
    # The chosen logits, read again: the row is in the cache, and no value has to be carried through the loop.
    weights = tl.load(logits_ptr + rows.to(tl.int64)[:, None] * stride + ids, mask=mask, other=0.0).to(
        tl.float32
    )
    if SOFTMAX:
        weights = tl.exp(weights - top[:, None]) / total[:, None]
    else:
        weights = 1.0 / (1.0 + tl.exp(-weights))
    if RENORMALIZE:
        part = tl.sum(tl.where(choice[None, :] < TOPK, weights, 0.0), axis=1)
        weights = weights / (part + 1e-20)[:, None]
    to = rows.to(tl.int64)[:, None] * TOPK + choice[None, :]
    tl.store(weights_ptr + to, weights * factor, mask=mask)
    tl.store(ids_ptr + to, ids, mask=mask)


def check(
    gating_output: torch.Tensor,
    topk: int,
    groups: int,
    topk_group: int,
    scoring_func: str,
    bias: torch.Tensor | None,
) -> None:
    if gating_output.dim() != 2:
        raise ValueError(f"gating_output must be [tokens, experts], got shape {tuple(gating_output.shape)}")
    experts = gating_output.shape[1]
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts cannot be {groups} equal groups (num_expert_group)")
    if not 1 <= topk_group <= groups:
        raise ValueError(f"topk_group {topk_group} is not in 1 .. {groups}, the number of groups")
    if not 1 <= topk <= topk_group * (experts // groups):
        raise ValueError(
            f"topk {topk} is not in 1 .. {topk_group * (experts // groups)}, the experts that count"
        )
    if scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func {scoring_func!r} is neither 'softmax' nor 'sigmoid'")
    if bias is not None and (bias.shape != (experts,) or experts < 2 * groups):
        raise ValueError(
            f"e_score_correction_bias {tuple(bias.shape)} must be [{experts}], of two or more a group"
        )


def supports_triton(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> str | None:
    if gating_output.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {gating_output.dtype} is not float32, float16 or bfloat16"
    if gating_output.shape[-1] > MAX_EXPERTS or topk > MAX_TOPK or num_expert_group > 64:
        return f"{topk} of {gating_output.shape[-1]} experts in {num_expert_group} groups are too many"
    if gating_output.stride(-1) != 1:
        return f"gating_output has strides {tuple(gating_output.stride())}: experts must be contiguous"
    if e_score_correction_bias is not None and not e_score_correction_bias.is_contiguous():
        return f"e_score_correction_bias has strides {e_score_correction_bias.stride()}, not contiguous"
    return None


def empty(gating_output: torch.Tensor, topk: int) -> Pair:
    shape, device = (gating_output.shape[0], topk), gating_output.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    return weights, torch.empty(shape, dtype=torch.int32, device=device)


def grouped_topk_triton(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> Pair:
    bias = e_score_correction_bias
    check(gating_output, topk, num_expert_group, topk_group, scoring_func, bias)
    tokens, experts = gating_output.shape
    weights, ids = empty(gating_output, topk)
    if tokens == 0:
        return weights, ids
    members = experts // num_expert_group
    block_g, block_s = next_power_of_2(num_expert_group), next_power_of_2(members)
    # 1024 keys of eight bytes are 16 registers a thread of 4 warps; a decode step has few rows to spread.
    block_t = max(1, min(1024 // (block_g * block_s), 8, next_power_of_2(cdiv(tokens, 128))))
    grid = (cdiv(tokens, block_t),)
    launch_kernel(
        _grouped_topk_kernel, grid,
        gating_output, bias, weights, ids, gating_output.stride(0), routed_scaling_factor, tokens, experts,
        num_expert_group, members, TOPK=topk, TOPK_GROUP=topk_group, SOFTMAX=scoring_func == "softmax",
        HAS_BIAS=bias is not None, RENORMALIZE=renormalize, BLOCK_T=block_t, BLOCK_G=block_g, BLOCK_S=block_s,
        BLOCK_K=next_power_of_2(topk), num_warps=4 if block_t * block_g * block_s >= 512 else 1,
    )  # fmt: skip
    return weights, ids
