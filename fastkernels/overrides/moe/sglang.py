"""SGLang's classes and functions for mixtures of experts: experts and Mixtral's block."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastkernels.core.dispatch import Op
from fastkernels.core.spec import Target
from fastkernels.overrides.linear.sglang import SGLangReplicatedLinear
from fastkernels.overrides.moe.fused_experts import fused_experts
from fastkernels.overrides.moe.fused_experts_fp8 import fused_experts_fp8
from fastkernels.overrides.moe.sparse_moe import Experts, SparseMoE
from fastkernels.overrides.routing.arguments import refuse, unsupported_argument

# Fields of a MoeRunnerConfig and the values that our kernels support.
_RUNNER = {
    "activation": ("silu",), "is_gated": (True,), "no_combine": (False,), "gemm1_alpha": (None,),
    "gemm1_beta": (None,), "gemm1_clamp_limit": (None,), "swiglu_limit": (None,),
}  # fmt: skip
# Fields of a TritonMoeQuantInfo: those of float8, under the names of fused_experts' arguments, and unsupported ones.
_FP8 = {
    "per_channel_quant": "per_channel_quant", "w1_scale": "w13_scale", "w2_scale": "w2_scale", "a1_scale": "a13_scale",
    "a2_scale": "a2_scale", "block_shape": "block_shape",
}  # fmt: skip
_OTHERS = (
    "b13", "b2", "use_mxfp8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "w13_zp", "w2_zp",
    "fuse_swiglu_interleaved",
)  # fmt: skip


def unsupported_config(config: Any) -> str | None:
    """Return a reason for a MoeRunnerConfig with values that our kernels do not support."""
    for name, supported in _RUNNER.items():
        value = getattr(config, name, supported[0])
        if value not in supported:
            return f"fused_experts: moe_runner_config.{name}={value!r} is not supported; use the host's own function"
    return None


def unsupported_quant(quant_info: Any) -> str | None:
    """Return a reason for quantization info other than a TritonMoeQuantInfo of float8 or no scheme, without biases."""
    if (kind := type(quant_info).__name__).endswith("QuantInfo") and kind != "TritonMoeQuantInfo":
        return f"fused_experts: {kind} is not TritonMoeQuantInfo: its weights are in another order"
    return unsupported_argument(
        "fused_experts", **{f"quant_info.{n}": getattr(quant_info, n, None) for n in _OTHERS}
    )


def quant_of(quant_info: Any) -> tuple[bool, dict[str, Any]]:
    """Return (is it float8, its scales) of a TritonMoeQuantInfo. Raises ValueError for other schemes and biases."""
    if (reason := unsupported_quant(quant_info)) is not None:
        raise ValueError(reason)
    return bool(quant_info.use_fp8_w8a8), {ours: getattr(quant_info, name) for ours, name in _FP8.items()}


def _fused_experts(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, config: Any, fp8: bool,
    quant: dict[str, Any], **others: Any,
) -> torch.Tensor:  # fmt: skip
    """Compute the experts; with config.inplace, the default, hidden_states is overwritten with the result."""
    out = _computed(hidden_states, w1, w2, topk_output, config, fp8, quant, **others)
    return hidden_states.copy_(out) if getattr(config, "inplace", True) else out


def _computed(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, config: Any, fp8: bool,
    quant: dict[str, Any], **others: Any,
) -> torch.Tensor:  # fmt: skip
    """quant: arguments that only float8 (use_fp8_w8a8) may set; others: unsupported arguments, which must be unset."""
    refuse("fused_experts", **others, **({} if fp8 else quant))
    if (reason := unsupported_config(config)) is not None:
        raise ValueError(reason)
    topk_weights, topk_ids, _ = topk_output
    on_input = getattr(config, "apply_router_weight_on_input", False)
    op, args = call_of(hidden_states, w1, w2, topk_weights, topk_ids, fp8, quant, on_input)
    return scaled(op(*args), config)


def call_of(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, fp8: bool, quant: dict[str, Any], on_input: bool = False,
) -> tuple[Op, tuple[Any, ...]]:  # fmt: skip
    """Return (op, its arguments) for a call whose arguments are supported; fp8, quant: see `quant_of`."""
    if not fp8:
        return fused_experts, (hidden_states, w1, w2, topk_weights, topk_ids, None, on_input)
    return fused_experts_fp8, (
        hidden_states, w1, w2, quant["w1_scale"], quant["w2_scale"], topk_weights, topk_ids, quant["a1_scale"],
        quant["a2_scale"], bool(quant["per_channel_quant"]), quant["block_shape"], False, None, on_input,
    )  # fmt: skip


def scaled(out: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the experts' sum times the runner's factor."""
    factor = getattr(config, "routed_scaling_factor", None)
    return out if factor in (None, 1.0) else out * factor


class Combined(NamedTuple):
    """SGLang's StandardCombineInput."""

    hidden_states: torch.Tensor


class SGLangMoeRunner:
    """sglang.srt.layers.moe.moe_runner.runner.MoeRunner: computes the experts of a layer.

    The layer passes its weights and the router's choice; routing, token exchange and the final all-reduce stay in the
    layer. `combine` builds the object that `run` returns.
    """

    live_methods = ("run",)
    combine: Any = Combined

    def __init__(self, runner_backend: Any, config: Any, lora_enabled: bool = False) -> None:
        self.runner_backend, self.config, self.lora_enabled = runner_backend, config, lora_enabled

    def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        """dispatch_output: hidden_states and topk_output; quant_info: weights and scales (TritonMoeQuantInfo).

        The hidden_states of the result are always new memory; config.inplace is ignored. Raises ValueError for
        unsupported arguments.
        """
        topk = dispatch_output.topk_output
        fp8, quant = quant_of(quant_info)
        out = _computed(
            dispatch_output.hidden_states, quant_info.w13_weight, quant_info.w2_weight,
            (topk.topk_weights, topk.topk_ids, None), self.config, fp8, quant, lora_info=lora_info,
        )  # fmt: skip
        return self.combine(out)


def sglang_fused_experts_0_5_16(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts of 0.5.16; see sglang_fused_experts."""
    quant = {
        "per_channel_quant": per_channel_quant, "w1_scale": w1_scale, "w2_scale": w2_scale, "a1_scale": a1_scale,
        "a2_scale": a2_scale, "block_shape": block_shape,
    }  # fmt: skip
    return _fused_experts(
        hidden_states, w1, w2, topk_output, moe_runner_config, use_fp8_w8a8, quant, b1=b1, b2=b2,
        use_int8_w8a8=use_int8_w8a8, use_int8_w8a16=use_int8_w8a16, use_int4_w4a16=use_int4_w4a16, w1_zp=w1_zp,
        w2_zp=w2_zp,
    )  # fmt: skip


def sglang_fused_experts_0_5_17(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    a1_q: torch.Tensor | None = None,
) -> torch.Tensor:
    """sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts of 0.5.17; see sglang_fused_experts."""
    quant = {
        "per_channel_quant": per_channel_quant, "w1_scale": w1_scale, "w2_scale": w2_scale, "a1_scale": a1_scale,
        "a2_scale": a2_scale, "block_shape": block_shape,
    }  # fmt: skip
    return _fused_experts(
        hidden_states, w1, w2, topk_output, moe_runner_config, use_fp8_w8a8, quant, b1=b1, b2=b2,
        use_int8_w8a8=use_int8_w8a8, use_int8_w8a16=use_int8_w8a16, use_int4_w4a16=use_int4_w4a16, w1_zp=w1_zp,
        w2_zp=w2_zp, a1_q=a1_q,
    )  # fmt: skip


def sglang_fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    a1_q: torch.Tensor | None = None,
    fuse_swiglu_interleaved: bool = False,
) -> torch.Tensor:
    """sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts, unquantized or in float8 e4m3.

    topk_output: (topk_weights, topk_ids, router_logits), the last ignored. With use_fp8_w8a8 the scales are those of
    the op `fused_experts_fp8`. With moe_runner_config.inplace, the default, hidden_states is overwritten with the
    result and returned. Raises ValueError for biases and other quantization schemes.
    """
    quant = {
        "per_channel_quant": per_channel_quant, "w1_scale": w1_scale, "w2_scale": w2_scale, "a1_scale": a1_scale,
        "a2_scale": a2_scale, "block_shape": block_shape,
    }  # fmt: skip
    return _fused_experts(
        hidden_states, w1, w2, topk_output, moe_runner_config, use_fp8_w8a8, quant, b1=b1, b2=b2,
        use_int8_w8a8=use_int8_w8a8, use_int8_w8a16=use_int8_w8a16, use_int4_w4a16=use_int4_w4a16, w1_zp=w1_zp,
        w2_zp=w2_zp, a1_q=a1_q, fuse_swiglu_interleaved=fuse_swiglu_interleaved,
    )  # fmt: skip


class SGLangMixtralMoE_0_5_17(SparseMoE):
    """sglang.srt.models.mixtral.MixtralMoE before 0.5.23; see SparseMoE. tp_size is ignored, as in SGLang."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size, self.top_k = hidden_size, top_k
        self.gate = SGLangReplicatedLinear(
            hidden_size, num_experts, bias=False, params_dtype=params_dtype, prefix=f"{prefix}.gate"
        )
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, params_dtype, quant_config, None, f"{prefix}.experts"
        )  # fmt: skip

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._forward(hidden_states)


class SGLangMixtralMoE(SGLangMixtralMoE_0_5_17):
    """sglang.srt.models.mixtral.MixtralMoE since 0.5.23; see SparseMoE."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__(
            num_experts, top_k, hidden_size, intermediate_size, layer_id, params_dtype, quant_config, None, prefix
        )  # fmt: skip


_MOE = "sglang.srt.layers.moe"
_FUSED = f"{_MOE}.moe_runner.triton_utils.fused_moe:fused_experts"
_MIXTRAL = "sglang.srt.models.mixtral:MixtralMoE"
_EXPERTS_NOTE = "SGLang calls it through objects that bind it at construction: for forks and for our engine"
_MIXTRAL_NOTE = (
    "in a live host the experts are the host's own layer, which keeps its weights in its kernel's layout"
)
_EXPERTS = (
    Target("sglang", f"{_MOE}.moe_runner.runner:MoeRunner", "SGLangMoeRunner", "experts", default=False),
    Target("sglang", _FUSED, "sglang_fused_experts_0_5_16", "function", "<0.5.17", note=_EXPERTS_NOTE),
    Target(
        "sglang", _FUSED, "sglang_fused_experts_0_5_17", "function", ">=0.5.17,<0.5.23", note=_EXPERTS_NOTE
    ),
    Target("sglang", _FUSED, "sglang_fused_experts", "function", ">=0.5.23", note=_EXPERTS_NOTE),
)


TARGETS = {
    "fused_experts": _EXPERTS,
    "fused_experts_fp8": _EXPERTS,
    "sparse_moe": (
        Target("sglang", _MIXTRAL, "SGLangMixtralMoE_0_5_17", "standalone", "<0.5.23", note=_MIXTRAL_NOTE),
        Target("sglang", _MIXTRAL, "SGLangMixtralMoE", "standalone", ">=0.5.23", note=_MIXTRAL_NOTE),
    ),
}
