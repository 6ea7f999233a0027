"""The k best experts of each token among its best groups of experts (DeepSeek-V2 and V3, arXiv 2412.19437)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Permutable, Scalar, Tensor, Tolerance
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

MAX_EXPERTS, MAX_TOPK = 1024, 32
# Added to the sum of weights before the division, as in SGLang: weights that are all 0 stay 0.
LEAST_SUM = 1e-20
WeightsAndIds = tuple[torch.Tensor, torch.Tensor]


def reference(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> WeightsAndIds:
    """gating_output: [T, E]. Returns (topk_weights [T, K] in at least float32, topk_ids [T, K] int32), best first.

    Experts are ranked by score ('softmax' or 'sigmoid' of the logits) plus e_score_correction_bias [E]. Experts are
    chosen from the topk_group best of num_expert_group equal groups; a group's rank is that of its best expert or, with
    a bias, the sum of its two best. Weights are scores without the bias; with renormalize they add up to 1 for each
    token. routed_scaling_factor multiplies them last. Among equals the lower id or group wins; NaN ranks lowest.
    """
    acc = torch.promote_types(gating_output.dtype, torch.float32)
    logits = gating_output.to(acc)
    scores = logits.softmax(dim=-1) if scoring_func == "softmax" else logits.sigmoid()
    # Without a bias, rank by logits: scores have the same order, but rounding can make them equal.
    rank = logits if e_score_correction_bias is None else scores + e_score_correction_bias.to(acc)
    rank = torch.where(rank.isnan(), -math.inf, rank)
    groups = rank.unflatten(-1, (num_expert_group, -1))
    best = groups.topk(1 if e_score_correction_bias is None else 2, dim=-1).values.sum(dim=-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
    counts = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
    counts = counts.repeat_interleave(groups.shape[-1], dim=1)
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    left = (~counts).gather(1, order).to(torch.int8).sort(dim=-1, stable=True).indices
    ids = order.gather(1, left)[:, :topk]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return weights * routed_scaling_factor, ids.to(torch.int32)


@triton.jit(do_not_specialize=["T"])
def _grouped_topk_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, stride, factor, T, E, G, S, TOPK: tl.constexpr,
    TOPK_GROUP: tl.constexpr, SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # A tile is [tokens, groups, experts per group], padded to powers of two.
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
    # The rank of a group is the number of groups ahead of it: a higher score, or an equal score and a lower index.
    ahead = (best[:, None, :] > best[:, :, None]) | (
        (best[:, None, :] == best[:, :, None]) & (group[None, :] < group[:, None])[None, :, :]
    )
    chosen = tl.sum(ahead.to(tl.int32), axis=2) < TOPK_GROUP
    counts = chosen[:, :, None] & exists[None, :, :]
    bits = tl.where(counts, ranked, float("-inf")).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers ordered like the floats
    # One maximum finds the best score and its lowest id: the low half holds the id, counted down, or 0 for padding.
    low = tl.where(counts, (E - expert)[None, :, :], 0)
    keys = (bits.to(tl.int64) << 32) | low.to(tl.int64)
    choice = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    for k in tl.static_range(TOPK):
        # Not of a reshaped tile: Triton 3.6 reduces the rows of such a layout with the wrong threads.
        found = E - (tl.max(tl.max(keys, axis=2), axis=1) & 0xFFFFFFFF).to(tl.int32)
        ids = tl.where(choice[None, :] == k, found[:, None], ids)
        keys = tl.where(expert[None, :, :] == found[:, None, None], -0x8000000000000000, keys)
    mask = (rows < T)[:, None] & (choice < TOPK)[None, :]
    # Read the chosen logits again: the row is in the cache, and the loop carries no values.
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


def _check(
    gating_output: torch.Tensor,
    topk: int,
    groups: int,
    topk_group: int,
    scoring_func: str,
    bias: torch.Tensor | None,
) -> None:
    if gating_output.dim() != 2:
        raise ValueError(f"gating_output must be [tokens, experts], got shape {tuple(gating_output.shape)}")
    count = gating_output.shape[1]
    if groups < 1 or count % groups:
        raise ValueError(f"{count} experts cannot form {groups} equal groups (num_expert_group)")
    if not 1 <= topk_group <= groups:
        raise ValueError(f"topk_group {topk_group} is not in 1 .. {groups}, the number of groups")
    if not 1 <= topk <= topk_group * (count // groups):
        raise ValueError(
            f"topk {topk} is not in 1 .. {topk_group * (count // groups)}, the experts of the chosen groups"
        )
    if scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func {scoring_func!r} is neither 'softmax' nor 'sigmoid'")
    if bias is not None and (bias.shape != (count,) or count < 2 * groups):
        raise ValueError(
            f"e_score_correction_bias {tuple(bias.shape)} must be [{count}], with two or more experts per group"
        )


def _supports_triton(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    *_: Any,
) -> str | None:
    if gating_output.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {gating_output.dtype} is not float32, float16 or bfloat16"
    if gating_output.shape[-1] > MAX_EXPERTS or topk > MAX_TOPK or num_expert_group > 64:
        return f"{topk} of {gating_output.shape[-1]} experts in {num_expert_group} groups exceed the limits"
    if gating_output.stride(-1) != 1:
        return f"gating_output has strides {tuple(gating_output.stride())}: experts must be contiguous"
    if e_score_correction_bias is not None and not e_score_correction_bias.is_contiguous():
        return f"e_score_correction_bias has strides {e_score_correction_bias.stride()}, not contiguous"
    return None


def _empty(gating_output: torch.Tensor, topk: int) -> WeightsAndIds:
    shape, device = (gating_output.shape[0], topk), gating_output.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    return weights, torch.empty(shape, dtype=torch.int32, device=device)


def _triton(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> WeightsAndIds:
    bias = e_score_correction_bias
    _check(gating_output, topk, num_expert_group, topk_group, scoring_func, bias)
    tokens, experts = gating_output.shape
    weights, ids = _empty(gating_output, topk)
    if tokens == 0:
        return weights, ids
    members = experts // num_expert_group
    block_g, block_s = next_power_of_2(num_expert_group), next_power_of_2(members)
    # 1024 keys of eight bytes take 16 registers per thread of 4 warps; a decode step has few rows to distribute.
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


def _reference(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> WeightsAndIds:
    groups = (num_expert_group, topk_group, scoring_func, e_score_correction_bias)
    _check(gating_output, topk, *groups)
    weights, ids = reference(gating_output, topk, renormalize, *groups, routed_scaling_factor)
    return weights.float(), ids


grouped_topk = define(
    "grouped_topk(Tensor gating_output, int topk, bool renormalize, int num_expert_group=1, int topk_group=1,"
    " str scoring_func='softmax', Tensor? e_score_correction_bias=None, float routed_scaling_factor=1.0)"
    " -> (Tensor, Tensor)",
    fake=lambda gating_output, topk, *_: _empty(gating_output, topk),
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _margin(
    logits: torch.Tensor, topk: int, groups: int, topk_group: int, scoring_func: str, bias: torch.Tensor
) -> torch.Tensor:
    """Return [T]: the smallest score difference that decides a token's ids; float32 resolves about 1e-7."""
    scores = logits.double().softmax(-1) if scoring_func == "softmax" else logits.double().sigmoid()
    rank = (scores + bias.double()).unflatten(-1, (groups, -1))
    best = rank.topk(2, dim=-1).values.sum(dim=-1).sort(dim=-1, descending=True)
    gap = best.values.diff(dim=-1).abs()[:, topk_group - 1 : topk_group].sum(dim=-1)
    gap = torch.where(gap == 0, 1.0, gap) if topk_group == groups else gap
    counts = torch.zeros_like(best.values, dtype=torch.bool).scatter(1, best.indices[:, :topk_group], True)
    kept = torch.where(counts.unsqueeze(-1), rank, -1e9).flatten(1).sort(dim=-1, descending=True).values
    return gap.minimum(kept[:, : topk + 1].diff(dim=-1).abs().amin(dim=-1))


def _values(call: Call) -> Mapping[str, torch.Tensor]:
    logits = call.tensor("gating_output")
    if not call["bias"]:
        return {"gating_output": logits}
    bias = (0.2 if call["scoring"] == "sigmoid" else 0.02) * (call.rand(call["experts"]) - 0.5)
    for _ in range(20):  # redraw tokens whose choice depends on rounding
        near = _margin(logits, call["topk"], call["groups"], call["topk_group"], call["scoring"], bias) < 2e-6
        if not bool(near.any()):
            break
        logits[near] = call.tensor("gating_output")[near]
    return {"gating_output": logits, "e_score_correction_bias": bias}


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, topk, renormalize, groups, topk_group, scoring_func, bias, factor = args
    module = cls(topk, renormalize, groups, topk_group, scoring_func, factor)
    return lambda: module(x, x, bias)


def _one_expert(args: list[Any]) -> None:
    """One finite logit per token."""
    if args[6] is None:
        args[0].fill_(-math.inf)
        args[0][:, -1] = 1.0


def _equal_logits(args: list[Any]) -> None:
    """Equal logits: ids decide, or the bias."""
    args[0].fill_(0.5)


def _case(
    name: str, tag: str, tokens: int, experts: int, topk: int, dtype: str = "float32", **more: Any
) -> Case:
    return Case(name, {"tokens": tokens, "experts": experts, "topk": topk, **more}, dtype, tags=(tag,))


def _deepseek(name: str, tokens: int, dtype: str = "float32") -> Case:
    v3: dict[str, Any] = {"groups": 8, "topk_group": 4, "scoring": "sigmoid", "bias": True, "factor": 2.5}
    return _case(name, "model", tokens, 256, 8, dtype, **v3)


SPEC = OpSpec(
    name="grouped_topk",
    level=1,
    by_default=True,
    reference=reference,
    op=grouped_topk,
    cases=(
        _deepseek("deepseek_1", 1),
        _deepseek("deepseek_32", 32),
        _deepseek("deepseek_4k", 4096),
        _deepseek("deepseek_bf16_512", 512, "bfloat16"),
        _case("deepseek_v2_32", "model", 32, 160, 6, groups=8, topk_group=3, renormalize=False, factor=16.0),
        _case("odd_63", "odd", 63, 60, 4, "bfloat16", groups=5, topk_group=2),
        _case("one", "odd", 1, 1, 1),
        _case("bias", "odd", 33, 64, 8, groups=8, topk_group=4, scoring="sigmoid", bias=True, factor=2.5),
        _case("bias_16", "odd", 7, 48, 5, "float16", groups=4, topk_group=3, scoring="sigmoid", bias=True),
        _case("soft_bias", "odd", 9, 96, 6, groups=6, topk_group=2, bias=True, renormalize=False),
        _case("sigmoid", "odd", 5, 160, 6, "bfloat16", groups=8, topk_group=3, scoring="sigmoid"),
        _case("all_groups", "odd", 3, 40, 9, groups=4, topk_group=4, renormalize=False, factor=0.5),
        _case("one_group", "odd", 5, 384, 8, scoring="sigmoid", bias=True),
        _case("strided", "odd", 5, 32, 4, "float16", groups=4, topk_group=2, pad=3),
        _case("no_token", "odd", 0, 16, 2, groups=4, topk_group=2),
    ),
    arguments=(
        Tensor("gating_output", "tokens experts", std=2.0, pad="pad"),
        Scalar("topk"),
        Scalar("renormalize", default=True, stated=True),
        Scalar("num_expert_group", "groups"),
        Scalar("topk_group"),
        Scalar("scoring_func", "scoring", default="softmax", stated=True),
        Tensor("e_score_correction_bias", "experts", "float32", when="bias"),
        Scalar("routed_scaling_factor", "factor", default=1.0, stated=True),
    ),
    outputs=(Tensor("topk_weights", "tokens topk", "float32"), Tensor("topk_ids", "tokens topk", "int32")),
    axes={
        "tokens": Axis.per_call(),
        "experts": Axis.count(),
        "topk": Axis.count(),
        "groups": Axis.option(1, choices=(1, 2, 4, 6, 8), stated=True),
        "topk_group": Axis.count(1, stated=True),
        "bias": Axis.option(False, stated=True),
    },
    constraints=(
        "experts % groups == 0",
        "experts >= 2 * groups or not bias",
        "topk_group <= groups",
        "topk <= topk_group * (experts // groups)",
    ),
    values=_values,
    flops="8 * tokens * experts",
    # Weights are float32 and ids are exact for every dtype of the logits.
    tolerance=dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(1e-6, 1e-5)),
    permutable=lambda x, topk, renormalize, groups, *more: Permutable((0,), (0, 6), x.shape[1] // groups),
    extremes={"one_expert": _one_expert, "equal_logits": _equal_logits},
    build=_build,
)
