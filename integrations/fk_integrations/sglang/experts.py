"""SGLang's mixtures of experts: the object that runs the experts is replaced inside layers that stay SGLang's.

A layer's router, the exchange of tokens and the all-reduce stay SGLang's. The runner that the layer's method calls
with the weights becomes an instance of a subclass. Without a request for the op, this happens where a measurement on
the layer's own weights found ours faster than SGLang's kernels with their configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fastkernels.core import registry, tuning
from fastkernels.core.reasons import Kind, Reason
from fastkernels.overrides.moe.fused_experts_fp8 import unsupported_scales
from fastkernels.overrides.moe.sglang import call_of, quant_of, unsupported_config, unsupported_quant
from fastkernels.overrides.routing.arguments import unsupported_argument
from fastkernels.verify.measure import Live, named_shape
from fk_integrations.core import versions
from fk_integrations.core.expert_layers import (
    by_weights,
    in_float8,
    live_calls,
    method_of,
    path_of,
    shape_of,
    unusual,
)
from fk_integrations.core.journal import Journal

_MOE = "sglang.srt.layers.moe"
RUNNER = f"{_MOE}.moe_runner.runner:MoeRunner"
# The function of runners with weights in the checkpoint's order: [E, 2 I, H] with the gates first, and [E, H, I]
PLAIN = f"{_MOE}.moe_runner.triton:fused_experts_none_to_triton"
NAME = "sglang"  # of its kernels, as the baseline of a choice
NOT_FASTER = "a number of tokens at which ours was not measured to be faster"
NOT_MEASURED = "ours was not measured next to SGLang's kernels at this shape; the tables compare with vLLM's"
FACTOR = "SGLang's kernels multiply by routed_scaling_factor, which ours would need a launch for"


def experts(module: Any) -> Any:
    """The object that runs a FusedMoE layer's experts: its method's runner, or the method itself; else None."""
    if not hasattr(module, "moe_runner_config"):
        return None
    method = method_of(module)
    return getattr(method, "runner", None) or method


def quant_info_of(module: Any) -> Any:
    """The weights and scales that a layer's method hands to its runner."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    runner, w, found = experts(module), module.w2_weight, []
    x = torch.empty(1, w.shape[1], dtype=module.moe_runner_config.params_dtype, device=w.device)

    def run(dispatched: Any, info: Any, *others: Any) -> Any:
        found.append(info)
        return StandardCombineInput(x)

    choice = torch.ones(1, 1, device=w.device), torch.zeros(1, 1, dtype=torch.int32, device=w.device)
    runner.run = run
    try:
        method_of(module).apply(module, _dispatched(x, *choice))
    finally:
        del runner.run
    if not found:
        raise RuntimeError("it called no runner")
    return found[0]


def _dispatched(x: torch.Tensor, weights: torch.Tensor | None = None, ids: torch.Tensor | None = None) -> Any:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, None))


def _arguments(module: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
    """The op's arguments for a call of a layer."""
    info = quant_info_of(module)
    return call_of(x, info.w13_weight, info.w2_weight, weights, ids, *quant_of(info))[1]


def shape(op: Any, module: Any) -> tuple[Any, ...] | Reason:
    """The values of op.key.shape for a layer's calls, or why they stay the host's."""
    if (text := unsupported(module)) is not None:
        return Reason(Kind.LEFT_TO_HOST, text)
    config = module.moe_runner_config
    if config.routed_scaling_factor not in (None, 1.0):
        return Reason(Kind.LEFT_TO_HOST, FACTOR)
    try:
        info = quant_info_of(module)
    except Exception as error:  # of the host's code; the other ops are measured all the same
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Reason(Kind.LEFT_TO_HOST, f"its method could not be called for a measurement: {text}")
    text = unsupported_call(_dispatched(module.w2_weight), info, None)
    if text is not None:
        return Reason(Kind.LEFT_TO_HOST, text)
    return shape_of(op, module, _arguments, config.top_k, config.params_dtype)


def measured(op: Any, shape: tuple[Any, ...], device: str) -> bool:
    """Whether a patch has compared the kernels with SGLang's own at this shape."""
    named = named_shape(op.name, shape)
    entries = tuning.verified(tuning.chip_of(device))
    return any((e.op, e.baseline, dict(e.shape)) == (op.name, NAME, named) for e in entries)


def live(op: Any, shape: tuple[Any, ...], modules: Sequence[Any]) -> Live:
    """The calls of these layers, next to SGLang's own kernels with the configuration that it has for them."""
    layer_of = by_weights(modules)
    runners, infos = {}, {id(m): quant_info_of(m) for m in modules}
    for module in modules:
        runner = copy(experts(module))
        runner.config = replace(runner.config, inplace=False)  # or a measurement would overwrite its input
        runners[id(module)] = runner

    def host(x: Any, w1: Any, w2: Any, *others: Any) -> Any:
        module = layer_of(w1)
        weights, ids = others[2:4] if in_float8(module) else others[:2]
        runner = runners[id(module)]
        own: Any = next(c for c in type(runner).__mro__ if path_of(c) == RUNNER)
        return own.run(runner, _dispatched(x, weights, ids), infos[id(module)]).hidden_states

    return live_calls(shape, modules, _arguments, NAME, host)


def swap_experts(module: Any, ours: Any, version: str, journal: Journal, by_table: bool) -> Reason | None:
    """Have a layer's experts run ours, on its own weights. None, or why not. by_table: see HostOp.swap."""
    if (text := unsupported(module)) is not None:
        return Reason(Kind.UNSUPPORTED, text)
    runner = experts(module)
    host_class: Any = type(runner)
    reason = versions.unknown("sglang", version, RUNNER, host_class)
    if reason is None and "run" in vars(runner):
        reason = Reason(Kind.REPLACED, "the run of its runner was replaced by other code")
    if reason is None:
        op = registry.get("fused_experts_fp8" if in_float8(module) else "fused_experts").op
        journal.set_class(runner, _implementation(host_class, ours, op.name, by_table))
    return reason


def unsupported(module: Any) -> str | None:
    """Why a layer's experts stay the host's, or None."""
    runner, config = experts(module), module.moe_runner_config
    if path_of(runner) != RUNNER:
        return f"its experts are run by {path_of(runner)}"
    if runner.lora_enabled:
        return "adapters (LoRA) of experts are not supported"
    if runner.fused_func is None or path_of(runner.fused_func) != PLAIN:
        run = runner.runner_core if runner.fused_func is None else runner.fused_func
        return f"its experts are run by {path_of(run)}, whose weights may be in an order of its own"
    if config.num_experts != config.num_local_experts:
        here = f"{config.num_local_experts} of {config.num_experts} experts"
        return f"only {here} are here: expert parallelism is not supported"
    if config.apply_router_weight_on_input:
        return "the router's weights on the input of experts are not supported"
    if (reason := unsupported_config(config)) is not None:
        return reason
    method = method_of(module)
    way = getattr(getattr(method, "_forward_method", None), "__name__", "forward_cuda")
    if way != "forward_cuda":
        return f"its method runs {way}, which calls no runner"
    if getattr(method, "w13_swiglu_interleaved", False):
        return "rows of gates and up are interleaved"
    return unusual(module, config.params_dtype, in_float8(module))


def unsupported_call(dispatch_output: Any, quant_info: Any, lora_info: Any) -> str | None:
    """Why one call is the host's, or None."""
    if getattr(dispatch_output, "hidden_states_pre_quant", None) is not None:
        return "hidden states that are quantized already"
    if not hasattr(dispatch_output.topk_output, "topk_ids"):
        return f"a router's choice in the form of {type(dispatch_output.topk_output).__name__}"
    reason = unsupported_argument(
        "fused_experts", lora_info=lora_info, hidden_states_scale=dispatch_output.hidden_states_scale
    ) or unsupported_quant(quant_info)
    if reason is not None:
        return reason
    fp8, quant = quant_of(quant_info)
    if not fp8:
        return None
    return unsupported_scales(
        quant_info.w13_weight, quant_info.w2_weight, quant["w1_scale"], quant["w2_scale"], quant["a1_scale"],
        quant["a2_scale"], quant["per_channel_quant"], quant["block_shape"], False,
    )  # fmt: skip


@cache
def _implementation(host: type, ours: Any, name: str, by_table: bool) -> type:
    """A subclass of the host's runner with the run of `ours`; by table, only for calls listed as faster.

    The op `name` counts calls that stay the host's.
    """
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    host_class: Any = host
    op = registry.get(name).op

    def run(self: Any, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        reason = unsupported_call(dispatch_output, quant_info, lora_info)
        if reason is not None:
            op.note(reason)
            return host_class.run(self, dispatch_output, quant_info, lora_info)
        if by_table and op.requested != "named":
            topk = dispatch_output.topk_output
            _, args = call_of(
                dispatch_output.hidden_states, quant_info.w13_weight, quant_info.w2_weight, topk.topk_weights,
                topk.topk_ids, *quant_of(quant_info),
            )  # fmt: skip
            if not op.faster(*args):
                op.leave(NOT_FASTER)
                return host_class.run(self, dispatch_output, quant_info, lora_info)
        return ours.run(self, dispatch_output, quant_info, lora_info)

    body = {
        "run": run, "combine": StandardCombineInput, "__module__": host_class.__module__,
        "__qualname__": host_class.__qualname__, "fastkernels": ours,
    }  # fmt: skip
    return type(host_class.__name__, (host_class,), body)
