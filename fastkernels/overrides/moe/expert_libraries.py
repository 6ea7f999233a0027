"""vLLM's kernels for fused_experts and fused_experts_fp8, called with the ops' arguments: Triton, CUTLASS, and DeepGEMM
as vLLM 0.26 calls it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK

T = torch.Tensor
FEWEST, NARROWEST = 128, 512  # tokens from which, and intermediate size above which, vLLM uses DeepGEMM


@triton.jit(do_not_specialize=["n"])
def _known_kernel(
    ids_ptr, weights_ptr, ids_out_ptr, weights_out_ptr, n, E, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    follow(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < n, other=0)
    weights = tl.load(weights_ptr + at, mask=at < n, other=0.0)
    known = (ids >= 0) & (ids < E)
    tl.store(ids_out_ptr + at, tl.where(known, ids, 0), mask=at < n)
    tl.store(weights_out_ptr + at, tl.where(known, weights, 0.0), mask=at < n)


def known(weights: T, ids: T, experts: int) -> tuple[T, T]:
    """Return (topk_weights, topk_ids) with expert 0 and weight 0 for invalid ids: the libraries' kernels would read
    memory behind the weights.
    """
    n, block = ids.numel(), min(next_power_of_2(ids.numel()), 1024)
    outs = torch.empty_like(ids), torch.empty_like(weights)
    launch_kernel(
        _known_kernel, (cdiv(n, block),), ids, weights, *outs, n, experts, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return outs[1], outs[0]


def for_any_ids(call: Callable[..., T], weights_at: int) -> Callable[..., T]:
    """Wrap `call` as a provider that accepts invalid ids. weights_at: position of topk_weights, before topk_ids."""

    @wraps(call)
    def run(*args: Any) -> T:
        weights, ids = known(args[weights_at], args[weights_at + 1], args[1].shape[0])
        return call(*args[:weights_at], weights, ids, *args[weights_at + 2 :])

    return run


def _unusual(x: T, w1: T, w2: T, weights: T, ids: T, expert_map: T | None) -> str | None:
    """Return why no library supports this call, or None."""
    if expert_map is not None:
        return "vLLM's kernels are called without an expert_map: all experts must be on this rank"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, got {x.dtype}"
    if any(t.numel() == 0 for t in (x, w1, w2, ids)):
        return "an empty tensor"
    if not all(t.is_contiguous() for t in (x, w1, w2, weights, ids)):
        return "needs contiguous tensors"
    for name, t in (("w1", w1), ("w2", w2)):
        if (row := t.shape[-1] * t.element_size()) % 16:
            return f"needs rows of a multiple of 16 bytes, {name} has {row}"
    return None


def supports_vllm(
    x: T, w1: T, w2: T, weights: T, ids: T, expert_map: T | None = None, on_input: bool = False
) -> str | None:
    """Return why vLLM's fused_experts does not support this call, or None."""
    if x.dtype != w1.dtype or x.dtype != w2.dtype:
        return f"needs one dtype, got {x.dtype}, {w1.dtype} and {w2.dtype}"
    return _unusual(x, w1, w2, weights, ids, expert_map)


_MOE = "vllm.model_executor.layers.fused_moe"


@lru_cache
def _library(name: str) -> Any:
    return importlib.import_module(name)


def fused_experts_vllm(
    x: T, w1: T, w2: T, weights: T, ids: T, expert_map: T | None = None, on_input: bool = False
) -> T:
    return _library(f"{_MOE}.fused_moe").fused_experts(
        x, w1, w2, weights, ids, apply_router_weight_on_input=on_input
    )


# The functions below take the arguments of fused_experts_fp8.


@lru_cache
def _powers_of_two() -> bool:
    """Return whether vLLM rounds group scales to powers of two: with DeepGEMM, and unless VLLM_USE_DEEP_GEMM_E8M0=0."""
    return bool(_library("vllm.utils.deep_gemm").is_deep_gemm_e8m0_used())


def _unusual_fp8(
    x: T, w1: T, w2: T, weights: T, ids: T, block: bool, ue8m0: bool, expert_map: T | None
) -> str | None:
    if w1.dtype != torch.float8_e4m3fn or w2.dtype != torch.float8_e4m3fn:
        return f"weights are {w1.dtype} and {w2.dtype}, not float8_e4m3fn"
    if (reason := _unusual(x, w1, w2, weights, ids, expert_map)) is not None:
        return reason
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] != 9:
        return "these calls are for Hopper GPUs"
    if block and ue8m0 != _powers_of_two():
        return f"vLLM's group scales are {'' if _powers_of_two() else 'not '}powers of two (VLLM_USE_DEEP_GEMM_E8M0)"
    return None


def supports_vllm_fp8(
    x: T, w1: T, w2: T, w1_scale: T, w2_scale: T, weights: T, ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_token: bool = False, block_shape: list[int] | None = None, ue8m0: bool = False,
    expert_map: T | None = None, on_input: bool = False,
) -> str | None:  # fmt: skip
    """Return why vLLM's Triton kernels do not support this call of `fused_experts_fp8`, or None."""
    channels = w1_scale.numel() != w1.shape[0]
    if block_shape is None and per_token != channels:
        return "vLLM's Triton kernel needs scales per token and per channel, or neither"
    return _unusual_fp8(x, w1, w2, weights, ids, block_shape is not None, ue8m0, expert_map)


def fused_experts_fp8_vllm(
    x: T, w1: T, w2: T, w1_scale: T, w2_scale: T, weights: T, ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_token: bool = False, block_shape: list[int] | None = None, ue8m0: bool = False,
    expert_map: T | None = None, on_input: bool = False,
) -> T:  # fmt: skip
    return _library(f"{_MOE}.fused_moe").fused_experts_impl(
        x, w1, w2, weights, ids, apply_router_weight_on_input=on_input, use_fp8_w8a8=True, per_channel_quant=per_token,
        w1_scale=w1_scale, w2_scale=w2_scale, a1_scale=a1_scale, a2_scale=a2_scale, block_shape=block_shape,
    )  # fmt: skip


def supports_cutlass(
    x: T, w1: T, w2: T, w1_scale: T, w2_scale: T, weights: T, ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_token: bool = False, block_shape: list[int] | None = None, ue8m0: bool = False,
    expert_map: T | None = None, on_input: bool = False,
) -> str | None:  # fmt: skip
    """Return why vLLM's CUTLASS kernels do not support this call of `fused_experts_fp8`, or None."""
    if block_shape is not None:
        return "vLLM's CUTLASS kernels for Hopper do not support scales of blocks"
    if on_input:
        return "the kernels apply the router's weights to the output"
    if per_token != (w1_scale.numel() != w1.shape[0]):
        return "vLLM uses them with scales per token and per channel, or neither"
    return _unusual_fp8(x, w1, w2, weights, ids, False, ue8m0, expert_map)


@lru_cache(maxsize=16)
def _cutlass(
    experts: int, hidden: int, inner: int, tokens: int, topk: int, device: torch.device
) -> tuple[Any, ...]:
    """Return the strides and the sorting memory that vLLM keeps per layer."""
    wide, narrow, both = (
        torch.full((experts,), n, device=device, dtype=torch.int64) for n in (hidden, inner, 2 * inner)
    )
    permute = _library(f"{_MOE}.moe_permute_unpermute")
    return (wide, narrow, both, wide), permute.MoEPermuteScratch(tokens, topk, experts, experts, device)


def fused_experts_fp8_cutlass(
    x: T, w1: T, w2: T, w1_scale: T, w2_scale: T, weights: T, ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_token: bool = False, block_shape: list[int] | None = None, ue8m0: bool = False,
    expert_map: T | None = None, on_input: bool = False,
) -> T:  # fmt: skip
    (e, h, i), (tokens, topk) = w2.shape, ids.shape
    most = next_power_of_2(max(tokens, 4096))
    strides, scratch = _cutlass(e, h, i, most, topk, x.device)
    silu = _library(f"{_MOE}.activation").MoEActivation.SILU
    quantize = _library(f"{_MOE}.utils").moe_kernel_quantize_input
    q, a_scale = quantize(x, a1_scale, torch.float8_e4m3fn, per_token, None)
    channels = w1_scale.numel() != e
    shape = (e, -1, 1) if channels else (e,)
    workspaces = (torch.empty(tokens * topk, max(n, h), dtype=x.dtype, device=x.device) for n in (2 * i, i))
    out = torch.empty_like(x)
    _library(f"{_MOE}.experts.cutlass_moe").run_cutlass_moe_fp8(
        out, q, w1, w2, ids, silu, e, None, w1_scale.view(shape), w2_scale.view(shape), a_scale, a2_scale, *strides,
        *workspaces, None, x.dtype, per_token, channels, False, weights, scratch,
    )  # fmt: skip
    return out


def supports_deepgemm(
    x: T, w1: T, w2: T, w1_scale: T, w2_scale: T, weights: T, ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_token: bool = False, block_shape: list[int] | None = None, ue8m0: bool = False,
    expert_map: T | None = None, on_input: bool = False,
) -> str | None:  # fmt: skip
    """Return why vLLM does not use DeepGEMM for this call of `fused_experts_fp8`, or None."""
    if block_shape is None:
        return "DeepGEMM needs scales of blocks"
    if x.dtype != torch.bfloat16 or on_input:
        return "vLLM calls it for bfloat16 and applies the router's weights to the output"
    if x.shape[0] < FEWEST or w2.shape[2] <= NARROWEST or w2.shape[2] % BLOCK or w2.shape[1] % BLOCK:
        return (
            f"vLLM calls it for at least {FEWEST} tokens, an intermediate size above {NARROWEST}, multiples of {BLOCK}:"
            f" got {x.shape[0]} tokens and {tuple(w2.shape)}"
        )
    return _unusual_fp8(x, w1, w2, weights, ids, True, ue8m0, expert_map)


def fused_experts_fp8_deepgemm(
    x: T, w1: T, w2: T, w1_scale: T, w2_scale: T, weights: T, ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_token: bool = False, block_shape: list[int] | None = None, ue8m0: bool = False,
    expert_map: T | None = None, on_input: bool = False,
) -> T:  # fmt: skip
    moe, gemm = _library(f"{_MOE}.deep_gemm_utils"), _library("vllm.utils.deep_gemm")
    fp8 = _library("vllm.model_executor.layers.quantization.utils.fp8_utils")
    (e, h, i), (tokens, topk) = w2.shape, ids.shape
    align = gemm.get_mk_alignment_for_contiguous_layout()[0]
    rows, _ = moe.compute_aligned_M_and_alignment(tokens, topk, e, align, None)

    def empty(columns: int, dtype: torch.dtype) -> T:
        return torch.empty(rows, columns, dtype=dtype, device=x.device)

    q, q_scale = fp8.per_token_group_quant_fp8(x, BLOCK, use_ue8m0=ue8m0)
    q, q_scale, of_rows, back, used = moe.deepgemm_moe_permute(
        aq=q, aq_scale=q_scale, topk_ids=ids, local_num_experts=e, expert_map=None, expert_tokens_meta=None,
        aq_out=empty(h, torch.float8_e4m3fn),
    )  # fmt: skip
    gate_up, down = empty(2 * i, x.dtype), empty(h, x.dtype)
    with gemm.mk_alignment_scope(used):
        gemm.m_grouped_fp8_gemm_nt_contiguous((q, q_scale), (w1, w1_scale), gate_up, of_rows)
        inner, inner_scale = fp8.silu_mul_per_token_group_quant_fp8_colmajor(
            input=gate_up, output=empty(i, torch.float8_e4m3fn), use_ue8m0=ue8m0, group_size=BLOCK
        )
        gemm.m_grouped_fp8_gemm_nt_contiguous((inner, inner_scale), (w2, w2_scale), down, of_rows)
    out = torch.empty_like(x)
    moe.deepgemm_unpermute_and_reduce(
        a=down, topk_ids=ids, topk_weights=weights, inv_perm=back, expert_map=None, output=out
    )
    return out
