"""vLLM's mixtures of experts: the object that runs the experts is replaced inside layers that stay vLLM's.

A layer's router, shared experts and all-reduce stay vLLM's. So does the op torch.ops.vllm.moe_forward, which contains
all of them: a swap inside it does not change a compiled model. The object that the layer's method calls with the
weights becomes an instance of a subclass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fastkernels.core import registry
from fastkernels.core.reasons import Kind, Reason
from fastkernels.overrides.moe.fused_experts_fp8 import kind_of, unsupported_scales
from fastkernels.overrides.moe.vllm import (
    VllmFusedMoEKernel,
    call_of,
    in_fp8,
    unsupported_activation,
    unsupported_quant,
)
from fastkernels.verify.measure import Live
from fk_integrations.core import versions
from fk_integrations.core.expert_layers import by_weights, in_float8, live_calls, method_of, path_of, unusual
from fk_integrations.core.journal import Journal

_MOE = "vllm.model_executor.layers.fused_moe"
KERNEL = f"{_MOE}.modular_kernel:FusedMoEKernelModularImpl"
ALONE = f"{_MOE}.prepare_finalize.no_dp_ep:MoEPrepareAndFinalizeNoDPEPModular"
# Kernels that read weights in the checkpoint's order: [E, 2 I, H] with the gates first, and [E, H, I]
PLAIN = {
    f"{_MOE}.experts.triton_moe:TritonExperts", f"{_MOE}.experts.triton_cutlass_moe:TritonOrCutlassExperts",
}  # fmt: skip
NOT_FASTER = "a number of tokens that no table lists as faster"


def experts(module: Any) -> Any:
    """The object that runs a RoutedExperts layer's experts: its method's kernel, or the method itself; else None."""
    method = method_of(module)
    if not hasattr(method, "moe_kernel"):
        return None
    return getattr(method.moe_kernel, "impl", None) or method


def shape(op: Any, module: Any) -> tuple[Any, ...] | Reason:
    """The values of op.key.shape for a layer's calls, or why they are unsupported."""
    if (text := unsupported(module)) is not None:
        return Reason(Kind.UNSUPPORTED, text)
    w1, w2, expert_map = module.w13_weight, module.w2_weight, module.expert_map
    here, hidden, inner = w2.shape
    everywhere = here if expert_map is None else expert_map.numel()
    sizes = (everywhere, here, module.top_k, hidden, inner)
    kind: tuple[int, ...] = ()
    if in_float8(module):
        config = experts(module).fused_experts.quant_config
        kind = kind_of(w1, config.w1_scale, config.a1_scale, config.per_act_token_quant, config.block_shape)
    return (*sizes, *kind, module.moe_config.in_dtype)


def live(op: Any, shape: tuple[Any, ...], modules: Sequence[Any]) -> Live:
    """The calls of these layers, next to vLLM's own kernels with the configuration that it has for them."""
    layer_of = by_weights(modules)

    def arguments(module: Any, x: Any, weights: Any, ids: Any) -> tuple[Any, ...]:
        kernel = experts(module)
        return call_of(
            x, module.w13_weight, module.w2_weight, weights, ids, -1, module.expert_map, False,
            kernel.fused_experts.quant_config, _powers_of_two(kernel),
        )[1]  # fmt: skip

    def host(x: Any, w1: Any, w2: Any, *others: Any) -> Any:
        module = layer_of(w1)
        weights, ids = others[2:4] if in_float8(module) else others[:2]
        kernel = experts(module)
        everywhere = w1.shape[0] if module.expert_map is None else module.expert_map.numel()
        # of the class: an instance of ours would choose
        own: Any = next(c for c in type(kernel).__mro__ if path_of(c) == KERNEL)
        return own.apply(kernel, x, w1, w2, ids, weights, module.activation, everywhere, module.expert_map)

    return live_calls(shape, modules, arguments, "vllm", host)


def swap_experts(module: Any, ours: Any, version: str, journal: Journal, by_table: bool) -> Reason | None:
    """Have a layer's experts run ours, on its own weights. None, or why not.

    by_table: see HostOp.swap. A captured graph replays the choice that was made at its capture.
    """
    if (text := unsupported(module)) is not None:
        return Reason(Kind.UNSUPPORTED, text)
    kernel = experts(module)
    host_class: Any = type(kernel)
    reason = versions.unknown("vllm", version, KERNEL, host_class)
    if reason is None and "apply" in vars(kernel):
        reason = Reason(Kind.REPLACED, "the apply of its kernel was replaced by other code")
    if reason is None:
        journal.set_class(kernel, _implementation(host_class, ours, by_table, _powers_of_two(kernel)))
    return reason


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
    reason = unsupported_activation(module.activation) or unsupported_quant(config)
    if reason is None and in_fp8(config):
        reason = unsupported_scales(
            module.w13_weight, module.w2_weight, config.w1_scale, config.w2_scale, config.a1_scale,
            config.a2_scale, config.per_act_token_quant, config.block_shape, False,
        )  # fmt: skip
    return reason or unusual(module, module.moe_config.in_dtype, in_fp8(config))


@cache
def _implementation(host: type, ours: Any, by_table: bool, ue8m0: bool) -> type:
    """A subclass of the host's kernel with the apply of `ours`; by table, only for calls listed as faster."""
    host_class: Any = host
    bf16, fp8 = (registry.get(name).op for name in ("fused_experts", "fused_experts_fp8"))

    def apply(
        self: Any, hidden_states: Any, w1: Any, w2: Any, topk_ids: Any, topk_weights: Any, activation: Any,
        global_num_experts: int = -1, expert_map: Any = None, apply_router_weight_on_input: bool = False,
        shared_experts: Any = None, shared_experts_input: Any = None,
    ) -> Any:  # fmt: skip
        args = (
            self, hidden_states, w1, w2, topk_ids, topk_weights, activation, global_num_experts, expert_map,
            apply_router_weight_on_input, shared_experts, shared_experts_input,
        )  # fmt: skip
        if by_table and not (bf16.requested == "named" or fp8.requested == "named"):
            op, call = call_of(
                hidden_states, w1, w2, topk_weights, topk_ids, global_num_experts, expert_map,
                apply_router_weight_on_input, self.fused_experts.quant_config, ue8m0, True,
            )  # fmt: skip
            if not op.faster(*call):
                op.leave(NOT_FASTER)
                return host_class.apply(*args)
            if ours is VllmFusedMoEKernel:  # its apply would make the same call
                return op(*call)
        return ours.apply(*args)

    body = {
        "apply": apply, "scale_ue8m0": ue8m0, "checked": True, "__module__": host_class.__module__,
        "__qualname__": host_class.__qualname__, "fastkernels": ours,
    }  # fmt: skip
    return type(host_class.__name__, (host_class,), body)


def _powers_of_two(kernel: Any) -> bool:
    """Whether vLLM rounds the scales of groups to powers of two here."""
    if kernel.fused_experts.quant_config.block_shape is None:
        return False
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return bool(is_deep_gemm_e8m0_used())
