"""Softmax over router logits and the k largest probabilities of each token (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Permutable, Scalar, Tensor, Tolerance
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import unsupported_vector

MAX_EXPERTS, MAX_TOPK = 1024, 32


def reference(
    gating_output: torch.Tensor, topk: int, renormalize: bool = False, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gating_output: [T, E]. Returns (topk_weights [T, K], topk_ids [T, K] int32, token_expert_indices [T, K] int32).

    The weights are probabilities in at least float32, largest first; with renormalize they add up to 1 for each token.
    scales: [E], a factor of each expert's weights, after that (Gemma 4).
    Among equal logits the lower id comes first. NaN ranks lowest and makes all weights of its row NaN.
    token_expert_indices[t, k] is k * T + t, vLLM's index of a (token, choice) pair.
    """
    tokens = gating_output.shape[0]
    logits = gating_output.to(torch.promote_types(gating_output.dtype, torch.float32))
    ranked = torch.where(logits.isnan(), -math.inf, logits).sort(dim=-1, descending=True, stable=True)
    ids = ranked.indices[:, :topk]
    parts = (logits - ranked.values[:, :1]).exp()
    chosen, total = parts.gather(1, ids), parts.sum(dim=-1, keepdim=True)
    if renormalize:
        total = torch.where(total.isnan(), total, chosen.sum(dim=-1, keepdim=True))
    pairs = torch.arange(topk * tokens, dtype=torch.int32, device=ids.device).view(topk, tokens).t()
    weights = chosen / total
    if scales is not None:
        weights = weights * scales.to(weights.dtype)[ids]
    return weights, ids.to(torch.int32), pairs.contiguous()


@triton.jit(do_not_specialize=["T"])
def _topk_softmax_kernel(
    logits_ptr, weights_ptr, ids_ptr, pairs_ptr, scale_ptr, stride, T, E, SCALED: tl.constexpr,
    TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    at = logits_ptr + rows.to(tl.int64)[:, None] * stride + experts[None, :]
    inside = (rows < T)[:, None] & (experts < E)[None, :]
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    # NaN must not win, whatever its sign bit is; -0 and 0 are equal.
    ranked = tl.where(x != x, float("-inf"), tl.where(x == 0.0, 0.0, x))
    bits = ranked.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers ordered like the floats
    # One maximum finds the largest logit and its lowest id: the low half is the id, counted down. Padding ranks last.
    low = tl.where(experts < E, BLOCK_E + E - experts, BLOCK_E - experts)
    keys = (bits.to(tl.int64) << 32) | low[None, :].to(tl.int64)
    choice = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    for k in tl.static_range(TOPK):
        best = tl.max(keys, axis=1)
        found = BLOCK_E + E - (best & 0xFFFFFFFF).to(tl.int32)
        ids = tl.where(choice[None, :] == k, found[:, None], ids)
        keys = tl.where(experts[None, :] == found[:, None], -0x8000000000000000, keys)
    mask = (rows < T)[:, None] & (choice < TOPK)[None, :]
    # Read the chosen logits again: the row is in the cache, and the loop carries no values.
    chosen = tl.load(logits_ptr + rows.to(tl.int64)[:, None] * stride + ids, mask=mask, other=float("-inf"))
    chosen = chosen.to(tl.float32)
    top = tl.max(ranked, axis=1)
    total = tl.sum(tl.where(inside, tl.exp(x - top[:, None]), 0.0), axis=1)
    weights = tl.exp(chosen - top[:, None])
    if RENORMALIZE:
        part = tl.sum(tl.where(choice[None, :] < TOPK, weights, 0.0), axis=1)
        total = tl.where(total != total, total, part)
    weights = weights / total[:, None]
    if SCALED:
        weights *= tl.load(scale_ptr + ids, mask=mask, other=0.0).to(tl.float32)
    to = rows.to(tl.int64)[:, None] * TOPK + choice[None, :]
    tl.store(weights_ptr + to, weights, mask=mask)
    tl.store(ids_ptr + to, ids, mask=mask)
    tl.store(pairs_ptr + to, choice[None, :] * T + rows[:, None], mask=mask)


def _check(gating_output: torch.Tensor, topk: int, scales: torch.Tensor | None = None) -> None:
    if gating_output.dim() != 2:
        raise ValueError(f"gating_output must be [tokens, experts], got shape {tuple(gating_output.shape)}")
    if not 1 <= topk <= gating_output.shape[1]:
        raise ValueError(f"topk {topk} is not in 1 .. {gating_output.shape[1]}, the number of experts")
    if scales is not None and scales.shape != gating_output.shape[1:]:
        raise ValueError(f"scales {tuple(scales.shape)} are not for {gating_output.shape[1]} experts")


def _supports_triton(
    gating_output: torch.Tensor, topk: int, renormalize: bool = False, scales: torch.Tensor | None = None
) -> str | None:
    if gating_output.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {gating_output.dtype} is not float32, float16 or bfloat16"
    if gating_output.shape[-1] > MAX_EXPERTS or topk > MAX_TOPK:
        return f"{topk} of {gating_output.shape[-1]} experts exceed the limit of {MAX_TOPK} of {MAX_EXPERTS}"
    if gating_output.stride(-1) != 1:
        return f"gating_output has strides {tuple(gating_output.stride())}: experts must be contiguous"
    return unsupported_vector(scales, "scales")


def _empty(gating_output: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, device = (gating_output.shape[0], topk), gating_output.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    ids, pairs = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
    return weights, ids, pairs


def _triton(
    gating_output: torch.Tensor, topk: int, renormalize: bool = False, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(gating_output, topk, scales)
    tokens, experts = gating_output.shape
    outs = _empty(gating_output, topk)
    if tokens == 0:
        return outs
    block_e = next_power_of_2(experts)
    # 1024 keys of eight bytes take 16 registers per thread of 4 warps; a decode step has few rows to distribute.
    block_t = max(1, min(1024 // block_e, 16, next_power_of_2(cdiv(tokens, 128))))
    grid = (cdiv(tokens, block_t),)
    launch_kernel(
        _topk_softmax_kernel, grid,
        gating_output, *outs, scales, gating_output.stride(0), tokens, experts, SCALED=scales is not None,
        TOPK=topk, RENORMALIZE=renormalize,
        BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=next_power_of_2(topk),
        num_warps=4 if block_t * block_e >= 512 else 1,
    )  # fmt: skip
    return outs


def _reference(
    gating_output: torch.Tensor, topk: int, renormalize: bool = False, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(gating_output, topk, scales)
    weights, ids, pairs = reference(gating_output, topk, renormalize, scales)
    return weights.float(), ids, pairs


topk_softmax = define(
    "topk_softmax(Tensor gating_output, int topk, bool renormalize=False, Tensor? scales=None)"
    " -> (Tensor, Tensor, Tensor)",
    fake=lambda gating_output, topk, *_, **__: _empty(gating_output, topk),
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, tokens: int, experts: int, topk: int, tag: str, dtype: str = "bfloat16", **more: bool
) -> Case:
    return Case(name, {"tokens": tokens, "experts": experts, "topk": topk, **more}, dtype, tags=(tag,))


def _equal(args: list[Any]) -> None:
    args[0].fill_(0.5)


def _masked(args: list[Any]) -> None:
    if args[0].shape[1] > 1:  # a row without any logit has no probabilities
        args[0][:, 0] = -math.inf


SPEC = OpSpec(
    name="topk_softmax",
    level=1,
    by_default=True,
    reference=reference,
    op=topk_softmax,
    cases=(
        _case("decode_1", 1, 8, 2, "model"),
        _case("decode_32", 32, 8, 2, "model"),
        _case("prefill_4k", 4096, 8, 2, "model"),
        _case("qwen3_32", 32, 128, 8, "model"),
        _case("qwen3_4k", 4096, 128, 8, "model"),
        _case("odd_63", 63, 60, 4, "odd", renormalize=False),
        _case("one", 1, 1, 1, "odd", "float32"),
        _case("scaled_7", 7, 12, 3, "odd", scaled=True),
        _case("all_of_5", 7, 5, 5, "odd", "float32", renormalize=False),
        _case("odd_160", 130, 160, 6, "odd", "float16"),
        _case("most", 5, 512, 16, "odd"),
        _case("most_odd", 3, 511, 15, "odd", renormalize=False),
    ),
    arguments=(
        Tensor("gating_output", "tokens experts", std=2.0),
        Scalar("topk"),
        Scalar("renormalize", default=True, stated=True),
        Tensor("scales", "experts", when="scaled", mean=1, std=0.1),
    ),
    outputs=(
        Tensor("topk_weights", "tokens topk", "float32"),
        Tensor("topk_ids", "tokens topk", "int32"),
        Tensor("token_expert_indices", "tokens topk", "int32"),
    ),
    axes={
        "tokens": Axis.per_call(),
        "experts": Axis.count(),
        "topk": Axis.count(),
        "scaled": Axis.option(False),
    },
    constraints=("topk <= experts",),
    permutable=lambda *args: Permutable(
        rows=(0,), columns=(0, 3) if args[3:] and args[3] is not None else (0,)
    ),
    extremes={"equal_logits": _equal, "one_masked": _masked},
    flops="5 * tokens * experts",
    # Weights are float32 and ids are exact for every dtype of the logits.
    tolerance=dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(1e-5, 1e-5)),
)
