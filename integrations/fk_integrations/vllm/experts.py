"""vLLM's mixtures of experts: what runs them inside a layer that stays the host's.

A layer's router, shared experts and all-reduce stay vLLM's, and so does the op torch.ops.vllm.moe_forward, in which all
of it is: a compiled model does not see what is swapped. The object that the layer's method calls with its weights
becomes an instance of a subclass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fastkernels.core import registry
from fastkernels.overrides.moe.fused_experts_fp8 import check_scales, kind_of
from fastkernels.overrides.moe.vllm import call_of, refuse_activation, refuse_quant
from fk_integrations.core import versions as compat
from fk_integrations.core.adapter import Journal
from fk_integrations.seams.expert_layers import in_float8, method_of, path_of, unusual

_MOE = "vllm.model_executor.layers.fused_moe"
KERNEL = f"{_MOE}.modular_kernel:FusedMoEKernelModularImpl"
ALONE = f"{_MOE}.prepare_finalize.no_dp_ep:MoEPrepareAndFinalizeNoDPEPModular"
# Kernels that read weights as a checkpoint has them, [E, 2 I, H] with the gates first and [E, H, I]
PLAIN = {
    f"{_MOE}.experts.triton_moe:TritonExperts", f"{_MOE}.experts.triton_cutlass_moe:TritonOrCutlassExperts",
}  # fmt: skip
NOT_FASTER = "a number of tokens where no table says that ours is faster"


def experts(module: Any) -> Any:
    """What runs a RoutedExperts layer's experts: its method's kernel, or the method where that has none; else None."""
    method = method_of(module)
    if not hasattr(method, "moe_kernel"):
        return None
    return getattr(method.moe_kernel, "impl", None) or method


def shape(op: Any, module: Any) -> tuple[Any, ...] | str:
    """The values of op.key.shape of a layer's calls, or why they are not ours."""
    reason = unsupported(module)
    if reason is not None:
        return reason
    w1, w2, expert_map = module.w13_weight, module.w2_weight, module.expert_map
    here, hidden, inner = w2.shape
    everywhere = here if expert_map is None else expert_map.numel()
    sizes = (everywhere, here, module.top_k, hidden, inner)
    kind: tuple[int, ...] = ()
    if in_float8(module):
        config = experts(module).fused_experts.quant_config
        kind = kind_of(w1, config.w1_scale, config.a1_scale, config.per_act_token_quant, config.block_shape)
    return (*sizes, *kind, module.moe_config.in_dtype)


def swap_experts(module: Any, ours: Any, version: str, journal: Journal, by_table: bool) -> str | None:
    """Have a layer's experts run ours, on its own weights. None, or why not.

    by_table: see Adapter.swap_experts. What a captured graph replays is what its capture decided.
    """
    reason = unsupported(module)
    if reason is not None:
        return reason
    kernel = experts(module)
    host_class: Any = type(kernel)
    reason = compat.unknown("vllm", version, KERNEL, host_class)
    if reason is None and "apply" in vars(kernel):
        reason = "the apply of its kernel was replaced by somebody else"
    if reason is not None:
        return reason
    kernel.__class__ = _implementation(host_class, ours, by_table, _powers_of_two(kernel))
    journal.add(lambda: setattr(kernel, "__class__", host_class))
    return None


def unsupported(module: Any) -> str | None:
    """Why a layer's experts stay the host's, or None."""
    kernel = experts(module)
    if path_of(kernel) != KERNEL:
        return f"its experts are run by {path_of(kernel)}, which takes no choice of a router"
    if path_of(kernel.prepare_finalize) != ALONE:
        return f"its tokens are exchanged by {type(kernel.prepare_finalize).__name__}"
    if path_of(kernel.fused_experts) not in PLAIN:
        return f"its experts are {path_of(kernel.fused_experts)}, whose weights are in an order of its own"
    if module.moe_config.is_lora_enabled:
        return "adapters (LoRA) of experts are not supported"
    if module.apply_router_weight_on_input:
        return "the router's weights on the input of experts are not supported"
    config = kernel.fused_experts.quant_config
    try:
        refuse_activation(module.activation)
        fp8 = refuse_quant(config)
        if fp8:
            check_scales(
                module.w13_weight, module.w2_weight, config.w1_scale, config.w2_scale, config.a1_scale,
                config.a2_scale, config.per_act_token_quant, config.block_shape, False,
            )  # fmt: skip
    except ValueError as error:
        return str(error)
    return unusual(module, module.moe_config.in_dtype, fp8)


@cache
def _implementation(host: type, ours: Any, by_table: bool, ue8m0: bool) -> type:
    """A subclass of the host's kernel with the apply of `ours`; by table only where that is known to be faster."""
    host_class: Any = host
    named = [registry.get(name).op for name in ("fused_experts", "fused_experts_fp8")]

    def apply(
        self: Any, hidden_states: Any, w1: Any, w2: Any, topk_ids: Any, topk_weights: Any, activation: Any,
        global_num_experts: int = -1, expert_map: Any = None, apply_router_weight_on_input: bool = False,
        shared_experts: Any = None, shared_experts_input: Any = None,
    ) -> Any:  # fmt: skip
        args = (
            self, hidden_states, w1, w2, topk_ids, topk_weights, activation, global_num_experts, expert_map,
            apply_router_weight_on_input, shared_experts, shared_experts_input,
        )  # fmt: skip
        if by_table and not any(op.asked == "named" for op in named):
            op, call = call_of(
                hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map,
                apply_router_weight_on_input, self.fused_experts.quant_config, ue8m0,
            )  # fmt: skip
            if not op.faster(*call):
                op.leave(NOT_FASTER)
                return host_class.apply(*args)
        return ours.apply(*args)

    body = {
        "apply": apply, "scale_ue8m0": ue8m0, "__module__": host_class.__module__,
        "__qualname__": host_class.__qualname__, "fastkernels": ours,
    }  # fmt: skip
    return type(host_class.__name__, (host_class,), body)


def _powers_of_two(kernel: Any) -> bool:
    """Whether vLLM's scales of groups are powers of two here."""
    if kernel.fused_experts.quant_config.block_shape is None:
        return False
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return bool(is_deep_gemm_e8m0_used())
