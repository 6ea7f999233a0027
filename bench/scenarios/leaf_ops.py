"""gemma_rms_norm, layer_norm and gelu_and_mul on this GPU, beside the kernels that production runs.

    python bench/scenarios/leaf_ops.py --out rows.jsonl [--no-time]

check_ops.py with further providers: FlashInfer's kernels (SGLang's), vLLM's and torch's, each where it is installed
and takes the case. FlashInfer may compile at its first call, which is not timed; its fused norm writes over x.
"""

from __future__ import annotations

import sys

import check_ops
import torch
import torch.nn.functional as F

from fastkernels.dispatch import OPS, Provider
from fastkernels.registry import op_module

T = torch.Tensor
NAMES = ("gemma_rms_norm", "layer_norm", "gelu_and_mul")


def flashinfer_gemma(x: T, weight: T, eps: float, residual: T | None = None) -> T:
    from flashinfer.norm import gemma_fused_add_rmsnorm, gemma_rmsnorm

    if residual is None:
        return gemma_rmsnorm(x.view(-1, x.shape[-1]), weight, eps).view(x.shape)
    gemma_fused_add_rmsnorm(x, residual, weight, eps)
    return x


def half(x: T, *_: object) -> str | None:
    return None if x.dtype in (torch.float16, torch.bfloat16) else f"dtype {x.dtype}"


def flashinfer_layer_norm(x: T, weight: T | None, bias: T | None, eps: float) -> T:
    from flashinfer.norm import layernorm

    return layernorm(x.view(-1, x.shape[-1]), weight, bias, eps).view(x.shape)


def float32_parameters(x: T, weight: T | None, bias: T | None, eps: float) -> str | None:
    wide = all(t is not None and t.dtype == torch.float32 for t in (weight, bias))
    return None if wide and x.dtype == torch.bfloat16 else "FlashInfer takes bfloat16 with float32 parameters"


def torch_layer_norm(x: T, weight: T | None, bias: T | None, eps: float) -> T:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def same_dtype(x: T, weight: T | None, bias: T | None, eps: float) -> str | None:
    mixed = [t for t in (weight, bias) if t is not None and t.dtype != x.dtype]
    return "torch takes parameters of x's dtype" if mixed else None


def flashinfer_gelu(x: T, approximate: str) -> T:
    from flashinfer.activation import gelu_and_mul, gelu_tanh_and_mul

    return (gelu_tanh_and_mul if approximate == "tanh" else gelu_and_mul)(x)


def vllm_gelu(x: T, approximate: str) -> T:
    import vllm._custom_ops  # noqa: F401 - loads torch.ops._C

    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    op = torch.ops._C.gelu_tanh_and_mul if approximate == "tanh" else torch.ops._C.gelu_and_mul
    op(out, x)
    return out


PRODUCTION = {
    "gemma_rms_norm": (Provider("flashinfer", flashinfer_gemma, module="flashinfer", supports=half),),
    "layer_norm": (
        Provider("torch", torch_layer_norm, supports=same_dtype),
        Provider("flashinfer", flashinfer_layer_norm, module="flashinfer", supports=float32_parameters),
    ),
    "gelu_and_mul": (
        Provider("flashinfer", flashinfer_gelu, module="flashinfer", supports=half),
        Provider("vllm", vllm_gelu, module="vllm"),
    ),
}


if __name__ == "__main__":
    for name in NAMES:
        op_module(name)  # defines the op
        OPS[name].providers = (*OPS[name].providers, *PRODUCTION[name])
    sys.argv += ["--ops", ",".join(NAMES)]
    check_ops.main()
