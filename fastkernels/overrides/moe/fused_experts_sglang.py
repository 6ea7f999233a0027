"""SGLang's fused_experts in its three signatures, and the runner that its layers call; they compute `fused_experts` or
`fused_experts_fp8`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastkernels.core import registry

_REFUSED = "fused_experts: {} is not supported; use the host's own function"


def refuse(**given: Any) -> None:
    """Raise ValueError for the first argument that asks for what we have no kernel for."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(_REFUSED.format(f"{name}={value!r}"))


# What a MoeRunnerConfig may ask for, and the values that ask for nothing.
_RUNNER = {
    "activation": ("silu",), "is_gated": (True,), "no_combine": (False,), "gemm1_alpha": (None,),
    "gemm1_beta": (None,), "gemm1_clamp_limit": (None,), "swiglu_limit": (None,),
}  # fmt: skip


def refuse_config(config: Any) -> None:
    """Raises ValueError for a MoeRunnerConfig that asks for what we have no kernel for."""
    for name, plain in _RUNNER.items():
        value = getattr(config, name, plain[0])
        if value not in plain:
            raise ValueError(_REFUSED.format(f"moe_runner_config.{name}={value!r}"))


def _sglang(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, config: Any, fp8: bool,
    quant: dict[str, Any], **others: Any,
) -> torch.Tensor:  # fmt: skip
    """As `_computed`, in the place of hidden_states where the config says so."""
    out = _computed(hidden_states, w1, w2, topk_output, config, fp8, quant, **others)
    return hidden_states.copy_(out) if getattr(config, "inplace", True) else out


def _computed(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, config: Any, fp8: bool,
    quant: dict[str, Any], **others: Any,
) -> torch.Tensor:  # fmt: skip
    """fp8: use_fp8_w8a8; quant: what only that has a use for; others: arguments that must ask for nothing."""
    refuse(**others, **({} if fp8 else quant))
    refuse_config(config)
    topk_weights, topk_ids, _ = topk_output
    factor = getattr(config, "routed_scaling_factor", None)
    on_input = getattr(config, "apply_router_weight_on_input", False)
    if fp8:
        out = registry.get("fused_experts_fp8").op(
            hidden_states, w1, w2, quant["w1_scale"], quant["w2_scale"], topk_weights, topk_ids, quant["a1_scale"],
            quant["a2_scale"], quant["per_channel_quant"], quant["block_shape"], False, None, on_input,
        )  # fmt: skip
    else:
        out = registry.get("fused_experts").op(hidden_states, w1, w2, topk_weights, topk_ids, None, on_input)
    return out if factor in (None, 1.0) else out * factor


class Combined(NamedTuple):
    """SGLang's StandardCombineInput."""

    hidden_states: torch.Tensor


# Fields of a TritonMoeQuantInfo: those that float8 has a use for, by their names above, and those that ask for more.
_FP8 = {
    "per_channel_quant": "per_channel_quant", "w1_scale": "w13_scale", "w2_scale": "w2_scale", "a1_scale": "a13_scale",
    "a2_scale": "a2_scale", "block_shape": "block_shape",
}  # fmt: skip
_OTHERS = (
    "b13", "b2", "use_mxfp8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "w13_zp", "w2_zp",
    "fuse_swiglu_interleaved",
)  # fmt: skip


def quant_of(quant_info: Any) -> tuple[bool, dict[str, Any]]:
    """(whether a TritonMoeQuantInfo is of float8, its scales). Raises ValueError for what we have no kernel for."""
    refuse(**{f"quant_info.{name}": getattr(quant_info, name, None) for name in _OTHERS})
    return bool(quant_info.use_fp8_w8a8), {ours: getattr(quant_info, name) for ours, name in _FP8.items()}


class SGLangMoeRunner:
    """sglang.srt.layers.moe.moe_runner.runner.MoeRunner: what a layer calls with its weights, as they are, and its
    router's choice. Routing, exchange and the all-reduce after it are the layer's. `combine` makes what run returns.
    """

    live_methods = ("run",)
    combine: Any = Combined

    def __init__(self, runner_backend: Any, config: Any, lora_enabled: bool = False) -> None:
        self.runner_backend, self.config, self.lora_enabled = runner_backend, config, lora_enabled

    def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        """dispatch_output: hidden_states and topk_output; quant_info: weights and scales (TritonMoeQuantInfo). What is
        returned has hidden_states, new memory whatever the config says of `inplace`. Raises ValueError for what we
        have no kernel for.
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
    return _sglang(
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
    return _sglang(
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
    """sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts without biases, unquantized or in
    float8 e4m3 (use_fp8_w8a8; its scales are those of the op `fused_experts_fp8`).

    topk_output: (topk_weights, topk_ids, anything); moe_runner_config: the host's. Where its `inplace` is set, as
    it is by default, hidden_states is overwritten with the result and returned. Raises ValueError for the rest.
    """
    quant = {
        "per_channel_quant": per_channel_quant, "w1_scale": w1_scale, "w2_scale": w2_scale, "a1_scale": a1_scale,
        "a2_scale": a2_scale, "block_shape": block_shape,
    }  # fmt: skip
    return _sglang(
        hidden_states, w1, w2, topk_output, moe_runner_config, use_fp8_w8a8, quant, b1=b1, b2=b2,
        use_int8_w8a8=use_int8_w8a8, use_int8_w8a16=use_int8_w8a16, use_int4_w4a16=use_int4_w4a16, w1_zp=w1_zp,
        w2_zp=w2_zp, a1_q=a1_q, fuse_swiglu_interleaved=fuse_swiglu_interleaved,
    )  # fmt: skip
