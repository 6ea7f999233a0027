"""What vLLM's compiler fuses with its neighbours: an op of ours there is opaque to it and would switch that off."""

from __future__ import annotations

from typing import Any

from fastkernels.overrides.l1._linear_fp8_scales import holder_of

ALL_REDUCE = "vLLM adds it to the all-reduce before it, which an op of ours would prevent"
QUANTIZED = "vLLM's compiler fuses it with the FP8 quantization behind it, which an op of ours would prevent"
NORMS = ("rms_norm", "gemma_rms_norm")


def fused(config: Any, model: Any, op: str, module: Any) -> str | None:
    """Why this module of a compiled model is faster as it is, or None. config: vLLM's VllmConfig.

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
    """The widths of the inputs of all linear layers that quantize them to float8 themselves, on this rank."""
    holders = ((m, holder_of(m)) for m in model.modules())
    return {
        m.input_size_per_partition for m, h in holders if hasattr(getattr(h, "fp8_linear", None), "quant_fp8")
    }
