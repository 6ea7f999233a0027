"""Baselines of this family: the kernels that production runs, called with the ops' arguments."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, Function, dense, filled, first, half, inductor, same
from fastkernels.overrides.kit.libraries import (
    GPU_AND_CPU,
    T,
    empty_as,
    from_flashinfer,
    from_sgl_kernel,
    from_torch,
    from_vllm,
    vllm_ops,
    whole_vectors,
)


def _vllm_rms_norm() -> Function:
    c = vllm_ops()

    def rms_norm(x: T, weight: T | None, eps: float, residual: T | None = None, *_: Any) -> T:
        if residual is not None:
            c.fused_add_rms_norm(x, residual, weight, eps)
            return x
        out = empty_as(x)
        c.rms_norm(out, x, weight, eps)
        return out

    return rms_norm


def _no_rms_norm(
    x: T, weight: T | None, eps: float, residual: T | None = None, var_hidden_size: int | None = None, *_: Any
) -> str | None:
    if var_hidden_size is not None:
        return "vLLM uses plain PyTorch for a variance over some of the channels"
    if weight is None and x.device.type == "cpu":
        return "vLLM's CPU kernel needs a weight"
    return first(
        same(x, weight, residual), dense(x, weight, residual), filled(x), whole_vectors(x, x.shape[-1])
    )


def _vllm_t5_layer_norm() -> Function:
    kernel = _vllm_rms_norm()
    return lambda x, weight, eps: kernel(x, weight, eps)


def _kernels() -> Any:
    import sgl_kernel  # noqa: F401 - loads torch.ops.sgl_kernel

    return torch.ops.sgl_kernel


def _sglang_rms_norm(plain: str, fused: str) -> Any:
    """sgl_kernel's kernels, called directly: its Python functions prefer FlashInfer's if that is installed."""

    def make() -> Function:
        ops = _kernels()
        alone, add = getattr(ops, plain).default, getattr(ops, fused).default

        def rms_norm(x: T, weight: T, eps: float, residual: T | None = None, *_: Any) -> T:
            if residual is not None:
                add(x, residual, weight, eps, True)
                return x
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            alone(out.view(-1, x.shape[-1]), x.view(-1, x.shape[-1]), weight, eps, True)
            return out

        return rms_norm

    return make


_NORM = {"overwrites": (0,)}


def _flashinfer_rms_norm(plain: str, fused: str) -> Any:
    def make() -> Function:
        import flashinfer.norm as norm

        alone, add = getattr(norm, plain), getattr(norm, fused)

        def rms_norm(x: T, weight: T, eps: float, residual: T | None = None, *_: Any) -> T:
            if residual is not None:
                add(x, residual, weight, eps)
                return x
            return alone(x.view(-1, x.shape[-1]), weight, eps).view(x.shape)

        return rms_norm

    return make


def no_rms_norm(
    x: T, weight: T | None, eps: float, residual: T | None = None, var_hidden_size: int | None = None, *_: Any
) -> str | None:
    if weight is None or var_hidden_size is not None:
        return "needs a weight, and a variance over all channels"
    if residual is not None and x.dim() != 2:
        return f"the fused norm takes two dimensions, got {x.dim()}"
    return first(half(x, weight, residual), same(x, weight, residual), dense(x, weight, residual), filled(x))


def _flashinfer_layer_norm() -> Function:
    from flashinfer.norm import layernorm

    def layer_norm(x: T, weight: T, bias: T, eps: float) -> T:
        return layernorm(x.view(-1, x.shape[-1]), weight, bias, eps).view(x.shape)

    return layer_norm


def _flashinfer_no_layer_norm(x: T, weight: T | None, bias: T | None, eps: float) -> str | None:
    wide = all(t is not None and t.dtype == torch.float32 for t in (weight, bias))
    if not wide or x.dtype != torch.bfloat16:
        return "takes bfloat16 with parameters in float32"
    return first(dense(x), filled(x))


def _torch_layer_norm(x: T, weight: T | None, bias: T | None, eps: float) -> T:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _torch_no_layer_norm(x: T, weight: T | None, bias: T | None, eps: float) -> str | None:
    return same(x, weight, bias)


def _vllm_rms_norm_gated() -> Function:
    from vllm.third_party.flash_linear_attention.ops.layernorm_guard import rmsnorm_fn

    def rms_norm_gated(
        x: T, weight: T, gate: T | None, eps: float, group_size: int | None = None,
        norm_before_gate: bool = True, activation: str = "silu", *_: Any,
    ) -> T:  # fmt: skip
        return rmsnorm_fn(
            x, weight, None, z=gate, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate,
            activation=activation,
        )  # fmt: skip

    return rms_norm_gated


def _vllm_no_rms_norm_gated(x: T, weight: T | None, gate: T | None, eps: float, *_: Any) -> str | None:
    return "needs a weight" if weight is None else first(dense(x, weight, gate), filled(x))


def _l2_norm(module: str) -> Any:
    def make() -> Function:
        l2norm_fwd = importlib.import_module(module).l2norm_fwd

        def l2_norm(x: T, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> T:
            found = l2norm_fwd(x, eps, output_dtype)
            return found[0] if isinstance(found, tuple) else found  # FLA also returns what its backward needs

        return l2_norm

    return make


def _dense(x: T, *_: Any) -> str | None:
    return first(dense(x), filled(x))


def _torch_t5_layer_norm() -> Function:
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    def t5_layer_norm(x: T, weight: T, eps: float) -> T:
        if (x.shape[-1], eps) not in norms:
            norms[x.shape[-1], eps] = T5LayerNorm(x.shape[-1], eps)
        module = norms[x.shape[-1], eps]
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        return module(x)

    norms: dict[tuple[int, float], torch.nn.Module] = {}
    return t5_layer_norm


_VLLM_FLA = "vllm.third_party.flash_linear_attention.ops"


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "gemma_rms_norm": (
        from_sgl_kernel(_sglang_rms_norm("gemma_rmsnorm", "gemma_fused_add_rmsnorm"), no_rms_norm, **_NORM),
        from_flashinfer(
            _flashinfer_rms_norm("gemma_rmsnorm", "gemma_fused_add_rmsnorm"), no_rms_norm, **_NORM
        ),
        inductor("gemma_rms_norm"),
    ),
    "l2_norm": (
        Baseline("fla", "library", _l2_norm("fla.modules.l2norm"), ("fla",), refuses=_dense),
        Baseline("vllm", "host", _l2_norm(f"{_VLLM_FLA}.l2norm"), ("vllm",), refuses=_dense),
        inductor("l2_norm"),
    ),
    "layer_norm": (
        from_flashinfer(_flashinfer_layer_norm, _flashinfer_no_layer_norm),
        *from_torch(_torch_layer_norm, _torch_no_layer_norm),
        inductor("layer_norm"),
    ),
    "rms_norm": (
        from_vllm(_vllm_rms_norm, _no_rms_norm, overwrites=(0,), devices=GPU_AND_CPU),
        from_sgl_kernel(_sglang_rms_norm("rmsnorm", "fused_add_rmsnorm"), no_rms_norm, **_NORM),
        from_flashinfer(_flashinfer_rms_norm("rmsnorm", "fused_add_rmsnorm"), no_rms_norm, **_NORM),
        inductor("rms_norm"),
    ),
    "rms_norm_grad": (inductor("rms_norm_grad"),),
    "rms_norm_gated": (
        from_vllm(_vllm_rms_norm_gated, _vllm_no_rms_norm_gated),
        inductor("rms_norm_gated"),
    ),
    "t5_layer_norm": (
        from_vllm(_vllm_t5_layer_norm, _no_rms_norm),
        Baseline("transformers", "host", _torch_t5_layer_norm, ("transformers",), GPU_AND_CPU),
        inductor("t5_layer_norm"),
    ),
}
