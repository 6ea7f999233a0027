"""What vLLM's compiler fuses with its neighbours: an op of ours there is opaque to it and would switch that off.

Before FP8 linear layers that are ours the quantization is ours, too, and a pass of ours fuses it with our norms and
activations (fx_fusions.py). Where that cannot be, they stay vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.overrides.linear.linear_fp8_layers import holder_of
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8

ALL_REDUCE = "vLLM adds it to the all-reduce before it, which an op of ours would prevent"
QUANTIZED = "vLLM's compiler fuses it with the FP8 quantization behind it, which an op of ours would prevent"
NORMS = ("rms_norm", "gemma_rms_norm")


def install(config: Any) -> None:
    """Have vLLM's compiler run our pass. Before the model is built, which copies these settings. config: VllmConfig."""
    if not config.compilation_config.mode:
        return
    from vllm.platforms import current_platform

    from fk_integrations.vllm.compiler_pass import FuseQuantization

    config.compilation_config.inductor_compile_config.setdefault(
        current_platform.pass_key, FuseQuantization()
    )


def fuses(config: Any) -> bool:
    """Whether an op of ours before our quantization is one kernel with it, or nothing is compiled anyway."""
    settings = config.compilation_config.inductor_compile_config
    return not config.compilation_config.mode or any(
        type(value).__name__ == "FuseQuantization" for value in settings.values()
    )


def quantize_tokens(
    x: torch.Tensor, scale: None = None, scale_ub: torch.Tensor | None = None, use_triton: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As QuantFP8 with a scale a token: x [tokens, K] in float8 e4m3, and scales [tokens, 1]."""
    return quantize_fp8(x, None, -1, scale_ub)


def take_quantization(config: Any, kernel: Any) -> None:
    """Have a kernel object of ours quantize with our op, if it makes a scale a token."""
    key = getattr(getattr(kernel, "config", None), "activation_quant_key", None)
    if not hasattr(kernel, "quant_fp8") or key is None or not fuses(config):
        return
    if not key.scale.static and key.scale.group_shape.is_per_token():
        kernel.quant_fp8 = quantize_tokens


def fused(config: Any, model: Any, op: str, module: Any) -> str | None:
    """Why this module of a compiled model is faster as it is, or None.

    Norms before linear layers are as wide as their input; those of a head's queries and keys are not, and stay ours.
    """
    compilation = config.compilation_config
    if not compilation.mode or op not in (*NORMS, "silu_and_mul"):
        return None
    width = module.weight.numel() if op in NORMS and getattr(module, "weight", None) is not None else None
    ranks, hidden = config.parallel_config.tensor_parallel_size, config.model_config.get_hidden_size()
    if compilation.pass_config.fuse_allreduce_rms and ranks > 1 and width == hidden:
        return ALL_REDUCE
    widths = quantized(model)
    return QUANTIZED if (width in widths if op in NORMS else bool(widths)) else None


def quantized(model: Any) -> set[int]:
    """The widths of the inputs of all linear layers that quantize them to float8 themselves, not by our op."""
    kernels = ((m, getattr(holder_of(m), "fp8_linear", None)) for m in model.modules())
    theirs = ((m, getattr(kernel, "quant_fp8", quantize_tokens)) for m, kernel in kernels)
    return {m.input_size_per_partition for m, quantize in theirs if quantize is not quantize_tokens}
