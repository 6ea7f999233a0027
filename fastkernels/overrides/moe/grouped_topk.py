"""The k best experts of each token among its best groups of experts (DeepSeek-V2 and V3, arXiv 2412.19437)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.shapes import drawn, varied
from fastkernels.core.spec import Case, OpSpec, Permutable, Target, Tolerance
from fastkernels.overrides.moe.grouped_topk_triton import (
    Pair,
    check,
    empty,
    grouped_topk_triton,
    supports_triton,
)

LEAST_SUM = 1e-20  # what SGLang adds before it divides: where all weights are 0, they stay so


def reference(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> Pair:
    """gating_output: [T, E]. Returns (topk_weights [T, K] in at least float32, topk_ids [T, K] int32), best first.

    Experts are ranked by score ('softmax' or 'sigmoid' of the logits) plus e_score_correction_bias [E]. Of the
    num_expert_group equal groups, the topk_group best ones count: by their best expert or, with a bias, by the sum of
    their two best. Weights are scores without the bias; renormalize: those of a token add up to 1, before
    routed_scaling_factor multiplies them. Of equals the lower id or group comes first; a NaN counts as the lowest.
    """
    acc = torch.promote_types(gating_output.dtype, torch.float32)
    logits = gating_output.to(acc)
    scores = logits.softmax(dim=-1) if scoring_func == "softmax" else logits.sigmoid()
    # Without a bias scores are in the order of the logits, which no rounding makes equal.
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


def _reference(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> Pair:
    groups = (num_expert_group, topk_group, scoring_func, e_score_correction_bias)
    check(gating_output, topk, *groups)
    weights, ids = reference(gating_output, topk, renormalize, *groups, routed_scaling_factor)
    return weights.float(), ids


grouped_topk = define(
    "grouped_topk(Tensor gating_output, int topk, bool renormalize, int num_expert_group=1, int topk_group=1,"
    " str scoring_func='softmax', Tensor? e_score_correction_bias=None, float routed_scaling_factor=1.0)"
    " -> (Tensor, Tensor)",
    fake=lambda gating_output, topk, *_: empty(gating_output, topk),
    providers=(
        Provider("triton", grouped_topk_triton, devices=("cuda",), supports=supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _check_tokens(hidden_states: torch.Tensor, gating_output: torch.Tensor) -> None:
    if hidden_states.shape[0] != gating_output.shape[0]:
        raise ValueError(
            f"hidden_states has {hidden_states.shape[0]} tokens, gating_output {gating_output.shape[0]}"
        )


def vllm_grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> Pair:
    """vllm.model_executor.layers.fused_moe.router.grouped_topk_router.grouped_topk: (weights, ids), each [T, topk]."""
    _check_tokens(hidden_states, gating_output)
    return grouped_topk(
        gating_output, topk, renormalize, num_expert_group, topk_group, scoring_func, e_score_correction_bias,
        routed_scaling_factor,
    )  # fmt: skip


def vllm_fused_grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    e_score_correction_bias: torch.Tensor,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
) -> Pair:
    """vllm.model_executor.layers.fused_moe.router.grouped_topk_router.fused_grouped_topk; see vllm_grouped_topk."""
    groups = (num_expert_group, topk_group, scoring_func, routed_scaling_factor, e_score_correction_bias)
    return vllm_grouped_topk(hidden_states, gating_output, topk, renormalize, *groups)


class VllmGroupedTopk(nn.Module):
    """vllm.model_executor.layers.fused_moe.router.grouped_topk_router.GroupedTopk; see vllm_grouped_topk.

    As in the host on NVIDIA's devices, num_fused_shared_experts is not read.
    """

    def __init__(
        self,
        topk: int,
        renormalize: bool,
        num_expert_group: int = 0,
        topk_group: int = 0,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        num_fused_shared_experts: int = 0,
    ) -> None:
        super().__init__()
        self.topk = topk
        self.renormalize = renormalize
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.scoring_func = scoring_func
        self.routed_scaling_factor = routed_scaling_factor
        self.num_fused_shared_experts = num_fused_shared_experts

    def forward(
        self,
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        e_score_correction_bias: torch.Tensor | None = None,
    ) -> Pair:
        return vllm_grouped_topk(
            hidden_states, gating_output, self.topk, self.renormalize, self.num_expert_group, self.topk_group,
            self.scoring_func, self.routed_scaling_factor, e_score_correction_bias,
        )  # fmt: skip


def _sglang(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    bias: torch.Tensor | None,
    topk: int,
    renormalize: bool,
    groups: int | None,
    topk_group: int | None,
    shared: int,
    factor: float | None,
    scoring_func: str,
) -> Pair:
    _check_tokens(hidden_states, gating_output)
    if shared:
        raise ValueError(f"num_fused_shared_experts={shared} is not supported; use the host's own function")
    return grouped_topk(
        gating_output, topk, renormalize, groups or 1, topk_group or 1, scoring_func, bias,
        1.0 if factor is None else factor,
    )  # fmt: skip


def sglang_grouped_topk_gpu(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
    scoring_func: str = "softmax",
) -> Pair:
    """sglang.srt.layers.moe.topk.grouped_topk_gpu: (weights [T, topk], ids [T, topk] int32).

    routed_scaling_factor counts only with apply_routed_scaling_factor_on_output; before 0.5.23 the host also wants
    renormalize for it, here all do as 0.5.23 does. Raises ValueError for num_fused_shared_experts.
    """
    factor = routed_scaling_factor if apply_routed_scaling_factor_on_output else None
    groups = (num_expert_group, topk_group, num_fused_shared_experts, factor, scoring_func)
    return _sglang(hidden_states, gating_output, None, topk, renormalize, *groups)


def sglang_biased_grouped_topk_gpu(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
) -> Pair:
    """sglang.srt.layers.moe.topk.biased_grouped_topk_gpu, sigmoid scores; see sglang_grouped_topk_gpu."""
    factor = routed_scaling_factor if apply_routed_scaling_factor_on_output else None
    groups = (num_expert_group, topk_group, num_fused_shared_experts, factor, "sigmoid")
    return _sglang(hidden_states, gating_output, correction_bias, topk, renormalize, *groups)


def _margin(
    logits: torch.Tensor, topk: int, groups: int, topk_group: int, scoring_func: str, bias: torch.Tensor
) -> torch.Tensor:
    """[T]: by how much the scores that decide a token's ids differ; float32 cannot tell less than 1e-7 apart."""
    scores = logits.double().softmax(-1) if scoring_func == "softmax" else logits.double().sigmoid()
    rank = (scores + bias.double()).unflatten(-1, (groups, -1))
    best = rank.topk(2, dim=-1).values.sum(dim=-1).sort(dim=-1, descending=True)
    gap = best.values.diff(dim=-1).abs()[:, topk_group - 1 : topk_group].sum(dim=-1)
    gap = torch.where(gap == 0, 1.0, gap) if topk_group == groups else gap
    counts = torch.zeros_like(best.values, dtype=torch.bool).scatter(1, best.indices[:, :topk_group], True)
    kept = torch.where(counts.unsqueeze(-1), rank, -1e9).flatten(1).sort(dim=-1, descending=True).values
    return gap.minimum(kept[:, : topk + 1].diff(dim=-1).abs().amin(dim=-1))


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    tokens, experts, topk = d["tokens"], d["experts"], d["topk"]
    groups, topk_group = d.get("groups", 1), d.get("topk_group", 1)
    scoring_func, dtype = d.get("scoring", "softmax"), getattr(torch, case.dtype)

    def logits() -> torch.Tensor:
        wide = torch.randn(tokens, experts + d.get("pad", 0), generator=generator, device=device)
        return (2 * wide).to(dtype)[:, :experts]

    x, bias = logits(), None
    if d.get("bias"):
        spread = 0.2 if scoring_func == "sigmoid" else 0.02
        bias = spread * (torch.rand(experts, generator=generator, device=device) - 0.5)
        for _ in range(20):  # no token so near to a tie that rounding decides
            near = _margin(x, topk, groups, topk_group, scoring_func, bias) < 2e-6
            if not bool(near.any()):
                break
            x[near] = logits()[near]
    factor = d.get("factor", 1.0)
    return [x, topk, d.get("renormalize", True), groups, topk_group, scoring_func, bias, factor]


def _dims_of(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> dict[str, Any]:
    dims = {"tokens": gating_output.shape[0], "experts": gating_output.shape[1], "topk": topk}
    more = {
        "groups": num_expert_group,
        "topk_group": topk_group,
        "scoring": scoring_func,
        "renormalize": renormalize,
    }
    return {**dims, **more, "bias": e_score_correction_bias is not None, "factor": routed_scaling_factor}


def _vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        groups, members = rng.choice((1, 2, 4, 6, 8)), rng.randint(4, 32)
        topk_group = rng.randint(1, groups)
        topk = rng.randint(1, min(topk_group * members, 12))
        sizes = {"experts": groups * members, "topk": topk, "groups": groups, "topk_group": topk_group}
        return {**drawn(case, rng, ("tokens",)), **sizes}

    return varied(case, draw, _bytes, _flops)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, topk, renormalize, groups, topk_group, scoring_func, bias, factor = args
    module = cls(topk, renormalize, groups, topk_group, scoring_func, factor)
    return lambda: module(x, x, bias)


def _one_expert(args: list[Any]) -> None:
    """All other logits are -inf."""
    if args[6] is None:
        args[0].fill_(-math.inf)
        args[0][:, -1] = 1.0


def _equal_logits(args: list[Any]) -> None:
    """Ids alone decide, or the bias."""
    args[0].fill_(0.5)


def _bytes(case: Case) -> int:
    d = case.dims
    size = torch.finfo(getattr(torch, case.dtype)).bits // 8
    return d["tokens"] * (d["experts"] * size + d["topk"] * 8) + (4 * d["experts"] if d.get("bias") else 0)


def _flops(case: Case) -> int:
    return 8 * case.dims["tokens"] * case.dims["experts"]


def _case(
    name: str, tag: str, tokens: int, experts: int, topk: int, dtype: str = "float32", **more: Any
) -> Case:
    return Case(name, {"tokens": tokens, "experts": experts, "topk": topk, **more}, dtype, tags=(tag,))


def _deepseek(name: str, tokens: int) -> Case:
    v3: dict[str, Any] = {"groups": 8, "topk_group": 4, "scoring": "sigmoid", "bias": True, "factor": 2.5}
    return _case(name, "model", tokens, 256, 8, **v3)


_NOTE = "the hosts' routers bind the function, or make the module where no instance is found: for forks and our engine"
_VLLM = "vllm.model_executor.layers.fused_moe.router.grouped_topk_router:"
_SGLANG = "sglang.srt.layers.moe.topk:"

SPEC = OpSpec(
    name="grouped_topk",
    level=1,
    reference=reference,
    op=grouped_topk,
    cases=(
        _deepseek("deepseek_1", 1),
        _deepseek("deepseek_32", 32),
        _deepseek("deepseek_4k", 4096),
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
    inputs=_inputs,
    bytes_moved=_bytes,
    flops=_flops,
    # In any dtype of the logits the weights are float32, and the ids exact.
    tolerance=dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(1e-6, 1e-5)),
    dims_of=_dims_of,
    vary=_vary,
    permutable=lambda x, topk, renormalize, groups, *more: Permutable((0,), (0, 6), x.shape[1] // groups),
    extremes={"one_expert": _one_expert, "equal_logits": _equal_logits},
    build=_build,
    targets=(
        Target("vllm", _VLLM + "GroupedTopk", "VllmGroupedTopk", "standalone", note=_NOTE),
        Target("vllm", _VLLM + "grouped_topk", "vllm_grouped_topk", "function", note=_NOTE),
        Target("vllm", _VLLM + "fused_grouped_topk", "vllm_fused_grouped_topk", "function", note=_NOTE),
        Target("sglang", _SGLANG + "grouped_topk_gpu", "sglang_grouped_topk_gpu", "function", note=_NOTE),
        Target(
            "sglang",
            _SGLANG + "biased_grouped_topk_gpu",
            "sglang_biased_grouped_topk_gpu",
            "function",
            note=_NOTE,
        ),
    ),
)
