"""Modules that vLLM's compiler fuses with their neighbours: our ops are opaque to it and would prevent the fusion.

Before FP8 linear layers of ours the quantization is ours, too, and our compiler pass fuses it with our norms and
activations (fx_fusions.py). All other fused modules stay vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.reasons import Kind, Reason
from fastkernels.overrides.linear.kernels.linear_fp8_scales import holder_of
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fk_integrations.core.journal import Journal

ALL_REDUCE = "vLLM adds it to the all-reduce before it, which our op would prevent"
QUANTIZED = "vLLM's compiler fuses it with the FP8 quantization after it, which our op would prevent"
ADDED = "vLLM's compiler fuses it with the addition or rotation next to it in transformers' code"
NORMS = ("rms_norm", "gemma_rms_norm")
TRANSFORMERS = "vllm.model_executor.models.transformers"  # the package of vLLM's Transformers backend


def install(config: Any) -> None:
    """Add our pass to vLLM's compiler. Call before the model is built, which copies these settings."""
    if not config.compilation_config.mode:
        return
    from vllm.platforms import current_platform

    from fk_integrations.vllm.passes.compiler_pass import RewriteOps

    config.compilation_config.inductor_compile_config.setdefault(
        current_platform.pass_key, RewriteOps(quantization=True)
    )


def rewriting(config: Any, journal: Journal | None = None) -> Any:
    """Our pass, for code that is compiled from now on; None where vLLM runs a pass of the user in its place.

    With a journal it is added to a live engine, without the fusion: the quantization stays the host's there.
    """
    from vllm.platforms import current_platform

    settings, key = config.compilation_config.inductor_compile_config, current_platform.pass_key
    if journal is not None and settings.get(key) is None:
        from fk_integrations.vllm.passes.compiler_pass import RewriteOps

        journal.add(lambda: settings.pop(key, None))
        settings[key] = RewriteOps(quantization=False)
    found = settings.get(key)
    return found if hasattr(found, "quantization") else None


def fuse_sums(config: Any, model: Any, communicators: list[Any], journal: Journal) -> None:
    """Have our pass fuse the sums of these communicators that are ours with our norms, in code compiled from now on."""
    from fk_integrations.vllm.passes.fx_sums import Sums

    ours = {
        c.unique_name: vars(c)["fastkernels_collective"]
        for c in communicators
        if "fastkernels_collective" in vars(c)
    }
    if (
        not ours
        or not compiled_parts(config, model)
        or config.compilation_config.pass_config.fuse_allreduce_rms
    ):
        return
    found = rewriting(config, journal)
    if found is None:
        return

    def back() -> None:
        found.sums = {}
        found.unchanged.clear()

    journal.add(back)
    found.sums = {name: Sums(each.group, each.most) for name, each in ours.items()}


def taken(config: Any) -> bool:
    """Whether vLLM runs a pass of the user, and so none of ours."""
    from vllm.platforms import current_platform

    found = config.compilation_config.inductor_compile_config.get(current_platform.pass_key)
    return found is not None and not hasattr(found, "quantization")


def fuses(config: Any) -> bool:
    """Whether our pass fuses our ops with our quantization, or nothing is compiled."""
    settings = config.compilation_config.inductor_compile_config
    return not config.compilation_config.mode or any(
        getattr(value, "quantization", False) for value in settings.values()
    )


def quantize_tokens(
    x: torch.Tensor, scale: None = None, scale_ub: torch.Tensor | None = None, use_triton: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize like QuantFP8 with a scale per token: x [tokens, K] in float8 e4m3, and scales [tokens, 1]."""
    return quantize_fp8(x, None, -1, scale_ub)


def take_quantization(config: Any, kernel: Any) -> None:
    """Have our kernel object quantize with our op if it uses a scale per token."""
    key = getattr(getattr(kernel, "config", None), "activation_quant_key", None)
    if not hasattr(kernel, "quant_fp8") or key is None or not fuses(config):
        return
    if not key.scale.static and key.scale.group_shape.is_per_token():
        kernel.quant_fp8 = quantize_tokens


def compiled_parts(config: Any, model: Any) -> list[Any]:
    """The modules of a model that vLLM compiles. Some files of models have none, whatever the configuration says."""
    if not config.compilation_config.mode or not hasattr(model, "modules"):
        return []
    return [m for m in model.modules() if getattr(m, "do_not_compile", True) is False]


def fused(config: Any, model: Any, op: str, module: Any) -> Reason | None:
    """Why this module of a compiled model is faster with the host's code, or None.

    Norms before linear layers are as wide as those layers' input; norms of queries and keys are not, and become ours.
    In the Transformers backend norms do not add the residual themselves: ours would be a second kernel next to it.
    """
    if op not in (*NORMS, "layer_norm", "silu_and_mul") or not compiled_parts(config, model):
        return None
    if op in (*NORMS, "layer_norm") and of_transformers(model):
        return Reason(Kind.LEFT_TO_HOST, ADDED)
    if op == "layer_norm":
        return None
    width = module.weight.numel() if op in NORMS and getattr(module, "weight", None) is not None else None
    ranks, hidden = config.parallel_config.tensor_parallel_size, config.model_config.get_hidden_size()
    if config.compilation_config.pass_config.fuse_allreduce_rms and ranks > 1 and width == hidden:
        return Reason(Kind.LEFT_TO_HOST, ALL_REDUCE)
    widths = quantized(model)
    if width in widths if op in NORMS else bool(widths):
        return Reason(Kind.LEFT_TO_HOST, QUANTIZED)
    return None


def of_transformers(model: Any) -> bool:
    """Whether vLLM's Transformers backend runs the model."""
    return any(cls.__module__.startswith(TRANSFORMERS) for cls in type(model).__mro__)


def quantized(model: Any) -> set[int]:
    """Input widths of all linear layers that quantize to float8 with vLLM's code."""
    kernels = ((m, getattr(holder_of(m), "fp8_linear", None)) for m in model.modules())
    theirs = ((m, getattr(kernel, "quant_fp8", quantize_tokens)) for m, kernel in kernels)
    return {m.input_size_per_partition for m, quantize in theirs if quantize is not quantize_tokens}
