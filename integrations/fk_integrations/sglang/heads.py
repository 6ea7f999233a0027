"""SGLang's logits processor, which multiplies by the LM head's weight itself: the product through our op `linear`.

`__class__` of the live processor is swapped. Gather, scale, soft cap and the copy to float32 stay SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core import versions
from fk_integrations.core.adapter import class_path
from fk_integrations.core.journal import Journal

PROCESSOR = "sglang.srt.layers.logits_processor:LogitsProcessor"
UNQUANTIZED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
SWITCHES = ("use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target")  # of other products
NOT_FASTER = "a product of an LM head that no table lists as faster"


def products(model: Any) -> list[tuple[Any, Any]]:
    """(logits processor, LM head) of a model with one head."""
    modules = list(model.modules())
    heads = {id(head): head for m in modules if (head := m._modules.get("lm_head")) is not None}
    if len(heads) != 1:
        return []
    (head,) = heads.values()
    return [(m, head) for m in modules if class_path(type(m)) == PROCESSOR]


def unsupported(processor: Any, head: Any) -> str | None:
    """Why our op does not compute this head's product; None if it does."""
    method, weight = type(getattr(head, "quant_method", None)).__name__, getattr(head, "weight", None)
    if method not in UNQUANTIZED or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return f"the LM head's quant_method is {method}, not one of {', '.join(UNQUANTIZED)}"
    if hasattr(head, "set_lora"):
        return "an LM head with LoRA is not supported"
    if getattr(head, "use_intel_amx_backend", False):
        return "the host packed its weight for AMX"
    on = next((name for name in SWITCHES if getattr(processor, name, None)), None)
    return None if on is None else f"{on} is on"


def swap(processor: Any, head: Any, version: str, journal: Journal, by_table: bool) -> Reason | None:
    """Have a processor run our op; None, or why not. by_table: see HostOp.swap."""
    if (text := unsupported(processor, head)) is not None:
        return Reason(Kind.UNSUPPORTED, text)
    host_class: Any = type(processor)
    if "_compute_lm_head" in vars(processor):
        return Reason(Kind.REPLACED, "its _compute_lm_head was replaced by other code")
    reason = versions.unknown("sglang", version, PROCESSOR, host_class)
    if reason is None:
        journal.set_class(processor, _implementation(host_class, head, by_table))
    return reason


def _implementation(host_class: Any, head: Any, by_table: bool) -> type:
    from fastkernels.overrides.linear.linear import linear

    def compute_lm_head(self: Any, hidden_states: Any, lm_head: Any, *more: Any, **named: Any) -> Any:
        host = host_class._compute_lm_head
        weight = lm_head.weight if lm_head is head else None
        if weight is None or hidden_states.dtype != weight.dtype:
            return host(self, hidden_states, lm_head, *more, **named)
        key = (*weight.shape, weight.dtype), (hidden_states.numel() // weight.shape[1],)
        if by_table and linear.requested != "named" and linear.winner(weight.device.type, *key) is None:
            linear.leave(NOT_FASTER)
            return host(self, hidden_states, lm_head, *more, **named)
        return linear(hidden_states, weight)

    def _compute_lm_head(self: Any, *args: Any, **named: Any) -> Any:
        return self.compute_lm_head(*args, **named)  # a public name, whose calls rows count

    body = {
        "_compute_lm_head": _compute_lm_head,
        "compute_lm_head": compute_lm_head,
        "__module__": host_class.__module__,
        "__qualname__": host_class.__qualname__,
        "fastkernels": linear,
    }
    return type(host_class.__name__, (host_class,), body)
