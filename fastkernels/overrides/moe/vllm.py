"""vLLM's classes and functions for mixtures of experts: experts and Mixtral's block."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from fastkernels.core.dispatch import Op
from fastkernels.core.spec import Target
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear
from fastkernels.overrides.moe.fused_experts import fused_experts
from fastkernels.overrides.moe.fused_experts_fp8 import fused_experts_fp8
from fastkernels.overrides.moe.sparse_moe import Experts, SparseMoE
from fastkernels.overrides.routing.arguments import unsupported_argument


class MoEActivation(Enum):
    """The activations of vLLM's enum that our kernels compute."""

    SILU = "silu"


# Fields of a FusedMoEQuantConfig: unsupported ones, and those that only float8 weights may set.
_QUANT = (
    "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "ocp_mx_scheme", "w1_zp", "w2_zp", "w1_bias", "w2_bias",
    "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit",
)  # fmt: skip
_FP8 = ("quant_dtype", "w1_scale", "w2_scale", "a1_scale", "a2_scale", "block_shape", "per_act_token_quant")


def vllm_fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any = MoEActivation.SILU,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    quant_config: Any = None,
) -> torch.Tensor:
    """vllm.model_executor.layers.fused_moe.fused_moe.fused_experts; the ops' references document the shapes.

    quant_config: None, or a FusedMoEQuantConfig with float8 e4m3 weights and activations (use_fp8_w8a8). Raises
    ValueError for other activations, other quantization schemes and biases.
    """
    _raise_if(unsupported_activation(activation))
    op, args = call_of(
        hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map, apply_router_weight_on_input,
        quant_config,
    )  # fmt: skip
    return op(*args)


def unsupported_activation(activation: Any) -> str | None:
    """Return a reason unless the activation is silu."""
    name = getattr(activation, "value", activation)
    return unsupported_argument("fused_experts", activation=None if name == "silu" else name)


def in_fp8(quant_config: Any) -> bool:
    """Return whether a FusedMoEQuantConfig (or None) means float8 weights and activations."""
    return bool(getattr(quant_config, "use_fp8_w8a8", False))


def unsupported_quant(quant_config: Any) -> str | None:
    """Return a reason for a FusedMoEQuantConfig with biases or with a scheme other than float8."""
    if quant_config is None:
        return None
    names = _QUANT if in_fp8(quant_config) else (*_QUANT, *_FP8)
    return unsupported_argument(
        "fused_experts", **{f"quant_config.{n}": getattr(quant_config, n, None) for n in names}
    )


def _raise_if(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


def call_of(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, global_num_experts: int, expert_map: torch.Tensor | None, on_input: bool,
    quant_config: Any, scale_ue8m0: bool = False, checked: bool = False,
) -> tuple[Op, tuple[Any, ...]]:  # fmt: skip
    """Return (op, arguments of the op) for a call of vLLM's fused_experts. Raises ValueError for unsupported calls.

    scale_ue8m0: the scales of activation groups are powers of two. checked: the quant_config is known to be supported.
    """
    if expert_map is not None and global_num_experts not in (-1, expert_map.numel()):
        raise ValueError(f"expert_map has {expert_map.numel()} entries for {global_num_experts} experts")
    if not checked:
        _raise_if(unsupported_quant(quant_config))
    if not in_fp8(quant_config):
        args: tuple[Any, ...] = (hidden_states, w1, w2, topk_weights, topk_ids, expert_map, on_input)
        return fused_experts, args
    given = {n: getattr(quant_config, n, None) for n in _FP8}
    args = (
        hidden_states, w1, w2, given["w1_scale"], given["w2_scale"], topk_weights, topk_ids, given["a1_scale"],
        given["a2_scale"], bool(given["per_act_token_quant"]), given["block_shape"],
        scale_ue8m0 and given["block_shape"] is not None, expert_map, on_input,
    )  # fmt: skip
    return fused_experts_fp8, args


# vLLM's experts that read weights in the checkpoint's order ([E, 2 I, H] with the gates first, [E, H, I]), and the
# exchange of tokens that leaves them where they are
_PLAIN = ("TritonExperts", "TritonOrCutlassExperts", "MoEPrepareAndFinalizeNoDPEPModular")


def refuse_parts(*parts: Any) -> None:
    """Raise ValueError for experts that order their weights in another way, or for an exchange between ranks."""
    for name in (type(part).__name__ for part in parts):
        if name not in _PLAIN:
            raise ValueError(f"fused_experts: {name} is not one of {', '.join(_PLAIN)}")


class VllmFusedMoEKernel:
    """vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEKernelModularImpl: computes the experts of a layer.

    The layer passes its weights and the router's choice; routing, shared experts and the final all-reduce stay in the
    layer. scale_ue8m0: the scales of activation groups are powers of two, a setting of the whole vLLM process.
    """

    live_methods = ("apply",)
    scale_ue8m0 = False

    def __init__(self, prepare_finalize: Any, fused_experts: Any) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        activation: Any = MoEActivation.SILU,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `fused_experts`; on a single rank the layer itself runs the shared experts.

        Raises ValueError for unsupported activations, biases, quantization schemes and orders of the weights.
        """
        checked = getattr(self, "checked", False)  # by a live patch: the whole layer
        if not checked:
            _raise_if(unsupported_activation(activation))
            refuse_parts(self.fused_experts, self.prepare_finalize)
        op, args = call_of(
            hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map,
            apply_router_weight_on_input, self.fused_experts.quant_config,
            getattr(self, "scale_ue8m0", False),  # in a fork, the host's constructor sets none
            checked,
        )  # fmt: skip
        return op(*args)


class VllmMixtralMoE(SparseMoE):
    """vllm.model_executor.models.mixtral.MixtralMoE; see SparseMoE.

    Raises ValueError for dp_size over 1 and enable_eplb, which need vLLM's own expert parallelism.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        dp_size: int | None = None,
        prefix: str = "",
        enable_eplb: bool = False,
    ) -> None:
        super().__init__()
        if dp_size not in (None, 1) or enable_eplb:
            raise ValueError(f"{prefix}: dp_size={dp_size} and enable_eplb={enable_eplb} are not supported")
        self.hidden_size, self.top_k = hidden_size, top_k
        self.gate = VllmReplicatedLinear(
            hidden_size, num_experts, bias=False, params_dtype=params_dtype, prefix=f"{prefix}.gate"
        )
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, params_dtype, quant_config, tp_size, f"{prefix}.experts"
        )  # fmt: skip

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._forward(hidden_states)


_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_MIXTRAL = "vllm.model_executor.models.mixtral:MixtralMoE"
_EXPERTS_NOTE = "vLLM calls it through objects that bind it at construction: for forks and for our engine"
_MIXTRAL_NOTE = (
    "in a live host the experts are the host's own layer, which keeps its weights in its kernel's layout"
)
_EXPERTS = (
    Target(
        "vllm",
        f"{_FUSED_MOE}.modular_kernel:FusedMoEKernelModularImpl",
        "VllmFusedMoEKernel",
        "experts",
        default=False,
    ),
    Target(
        "vllm", f"{_FUSED_MOE}.fused_moe:fused_experts", "vllm_fused_experts", "function", note=_EXPERTS_NOTE
    ),
)

TARGETS = {
    "fused_experts": _EXPERTS,
    "fused_experts_fp8": _EXPERTS,
    "sparse_moe": (Target("vllm", _MIXTRAL, "VllmMixtralMoE", "standalone", note=_MIXTRAL_NOTE),),
}
