"""Softmax over a router's logits and the k largest probabilities of each token (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.shapes import drawn, varied
from fastkernels.core.spec import Case, OpSpec, Permutable, Target, Tolerance
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

MAX_EXPERTS, MAX_TOPK = 1024, 32


def reference(
    gating_output: torch.Tensor, topk: int, renormalize: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gating_output: [T, E]. Returns (topk_weights [T, K], topk_ids [T, K] int32, token_expert_indices [T, K] int32).

    The weights are probabilities in at least float32, largest first; renormalize: those of a token add up to 1.
    Of equal logits the lower id comes first; a NaN counts as the lowest logit, and makes its row's weights NaN.
    token_expert_indices[t, k] is k * T + t, vLLM's number of a (token, choice) pair.
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
    return chosen / total, ids.to(torch.int32), pairs.contiguous()


@triton.jit(do_not_specialize=["T"])
def _topk_softmax_kernel(
    logits_ptr, weights_ptr, ids_ptr, pairs_ptr, stride, T, E,
    TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    at = logits_ptr + rows.to(tl.int64)[:, None] * stride + experts[None, :]
    inside = (rows < T)[:, None] & (experts < E)[None, :]
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    # A NaN must not win, and must not decide by its sign bit either; -0 and 0 are the same logit.
    ranked = tl.where(x != x, float("-inf"), tl.where(x == 0.0, 0.0, x))
    bits = ranked.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    # One maximum finds the logit and its lowest id: the id counts down in the low half. Columns behind E come last.
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
    # The chosen logits, read again: the row is in the cache, and no value has to be carried through the loop.
    chosen = tl.load(logits_ptr + rows.to(tl.int64)[:, None] * stride + ids, mask=mask, other=float("-inf"))
    chosen = chosen.to(tl.float32)
    top = tl.max(ranked, axis=1)
    total = tl.sum(tl.where(inside, tl.exp(x - top[:, None]), 0.0), axis=1)
    weights = tl.exp(chosen - top[:, None])
    if RENORMALIZE:
        part = tl.sum(tl.where(choice[None, :] < TOPK, weights, 0.0), axis=1)
        total = tl.where(total != total, total, part)
    weights = weights / total[:, None]
    to = rows.to(tl.int64)[:, None] * TOPK + choice[None, :]
    tl.store(weights_ptr + to, weights, mask=mask)
    tl.store(ids_ptr + to, ids, mask=mask)
    tl.store(pairs_ptr + to, choice[None, :] * T + rows[:, None], mask=mask)


def _check(gating_output: torch.Tensor, topk: int) -> None:
    if gating_output.dim() != 2:
        raise ValueError(f"gating_output must be [tokens, experts], got shape {tuple(gating_output.shape)}")
    if not 1 <= topk <= gating_output.shape[1]:
        raise ValueError(f"topk {topk} is not in 1 .. {gating_output.shape[1]}, the number of experts")


def _supports_triton(gating_output: torch.Tensor, topk: int, renormalize: bool = False) -> str | None:
    if gating_output.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {gating_output.dtype} is not float32, float16 or bfloat16"
    if gating_output.shape[-1] > MAX_EXPERTS or topk > MAX_TOPK:
        return f"{topk} of {gating_output.shape[-1]} experts: more than {MAX_TOPK} of {MAX_EXPERTS}"
    if gating_output.stride(-1) != 1:
        return f"gating_output has strides {tuple(gating_output.stride())}: experts must be contiguous"
    return None


def _empty(gating_output: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, device = (gating_output.shape[0], topk), gating_output.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    ids, pairs = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
    return weights, ids, pairs


def _triton(
    gating_output: torch.Tensor, topk: int, renormalize: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(gating_output, topk)
    tokens, experts = gating_output.shape
    outs = _empty(gating_output, topk)
    if tokens == 0:
        return outs
    block_e = next_power_of_2(experts)
    # 1024 keys of eight bytes are 16 registers a thread of 4 warps; a decode step has few rows to spread.
    block_t = max(1, min(1024 // block_e, 16, next_power_of_2(cdiv(tokens, 128))))
    grid = (cdiv(tokens, block_t),)
    launch_kernel(
        _topk_softmax_kernel, grid,
        gating_output, *outs, gating_output.stride(0), tokens, experts, TOPK=topk, RENORMALIZE=renormalize,
        BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=next_power_of_2(topk),
        num_warps=4 if block_t * block_e >= 512 else 1,
    )  # fmt: skip
    return outs


def _reference(
    gating_output: torch.Tensor, topk: int, renormalize: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(gating_output, topk)
    weights, ids, pairs = reference(gating_output, topk, renormalize)
    return weights.float(), ids, pairs


topk_softmax = define(
    "topk_softmax(Tensor gating_output, int topk, bool renormalize=False) -> (Tensor, Tensor, Tensor)",
    fake=lambda gating_output, topk, renormalize=False: _empty(gating_output, topk),
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _check_tokens(hidden_states: torch.Tensor, gating_output: torch.Tensor) -> None:
    if hidden_states.shape[0] != gating_output.shape[0]:
        raise ValueError(
            f"hidden_states has {hidden_states.shape[0]} tokens, gating_output {gating_output.shape[0]}"
        )


def _refuse(**given: Any) -> None:
    """Raise ValueError for the first argument that asks for what softmax routing does not do."""
    for name, value in given.items():
        if value is not None and value is not False and value != 0:
            raise ValueError(f"fused_topk: {name}={value!r} is not supported; use the host's own function")


def vllm_fused_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    scoring_func: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vllm.model_executor.layers.fused_moe.router.fused_topk_router.fused_topk, softmax only.

    hidden_states [T, H] (only T counts), gating_output [T, E]. Returns (weights, ids in indices_type or int32,
    token_expert_indices), each [T, topk]. Raises ValueError for another scoring_func.
    """
    _check_tokens(hidden_states, gating_output)
    _refuse(scoring_func=None if scoring_func == "softmax" else scoring_func)
    weights, ids, pairs = topk_softmax(gating_output, topk, renormalize)
    return weights, ids if indices_type is None else ids.to(indices_type), pairs


def sglang_fused_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
    scoring_func: str = "softmax",
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
    num_fused_shared_experts: int = 0,
    packed_out: torch.Tensor | None = None,
    num_token_non_padded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sglang.srt.layers.moe.topk.fused_topk, softmax only: (weights [T, topk], ids [T, topk] int32).

    As in the host, softmax routing reads neither the correction bias nor the scaling factor. Raises ValueError for
    another scoring_func and for packed_out, the output of a LoRA kernel.
    """
    _check_tokens(hidden_states, gating_output)
    _refuse(scoring_func=None if scoring_func == "softmax" else scoring_func, packed_out=packed_out)
    weights, ids, _ = topk_softmax(gating_output, topk, renormalize)
    return weights, ids


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    logits = 2 * torch.randn(d["tokens"], d["experts"], generator=generator, device=device)
    return [logits.to(getattr(torch, case.dtype)), d["topk"], d.get("renormalize", True)]


def _dims(gating_output: torch.Tensor, topk: int, renormalize: bool = False) -> dict[str, Any]:
    tokens, experts = gating_output.shape
    return {"tokens": tokens, "experts": experts, "topk": topk, "renormalize": renormalize}


def _bytes(case: Case) -> int:
    d = case.dims
    size = torch.finfo(getattr(torch, case.dtype)).bits // 8
    return d["tokens"] * (d["experts"] * size + d["topk"] * 12)


def _case(
    name: str, tokens: int, experts: int, topk: int, tag: str, dtype: str = "bfloat16", **more: bool
) -> Case:
    return Case(name, {"tokens": tokens, "experts": experts, "topk": topk, **more}, dtype, tags=(tag,))


def _vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        new = drawn(case, rng, ("tokens", "experts", "topk"))
        return {**new, "topk": min(new["topk"], new["experts"], MAX_TOPK)}

    return varied(case, draw, SPEC.bytes_moved, SPEC.flops)


def _equal(args: list[Any]) -> None:
    args[0].fill_(0.5)


def _masked(args: list[Any]) -> None:
    if args[0].shape[1] > 1:  # a row without any logit has no probabilities
        args[0][:, 0] = -math.inf


_NOTE = "the hosts' routers bind the function by name when they are imported: for forks and for our engine"
_VLLM = "vllm.model_executor.layers.fused_moe.router.fused_topk_router:fused_topk"

SPEC = OpSpec(
    name="topk_softmax",
    level=1,
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
        _case("all_of_5", 7, 5, 5, "odd", "float32", renormalize=False),
        _case("odd_160", 130, 160, 6, "odd", "float16"),
        _case("most", 5, 512, 16, "odd"),
        _case("most_odd", 3, 511, 15, "odd", renormalize=False),
    ),
    inputs=_inputs,
    dims_of=_dims,
    vary=_vary,
    permutable=lambda *args: Permutable(rows=(0,), columns=(0,)),
    extremes={"equal_logits": _equal, "one_masked": _masked},
    bytes_moved=_bytes,
    flops=lambda case: 5 * case.dims["tokens"] * case.dims["experts"],
    # In any dtype of the logits the weights are float32, and the ids exact.
    tolerance=dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(1e-5, 1e-5)),
    targets=(
        Target("vllm", _VLLM, "vllm_fused_topk", "function", note=_NOTE),
        Target(
            "sglang", "sglang.srt.layers.moe.topk:fused_topk", "sglang_fused_topk", "function", note=_NOTE
        ),
    ),
)
