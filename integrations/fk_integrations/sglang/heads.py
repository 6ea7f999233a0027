"""SGLang's logits processor, which multiplies by the LM head's weight itself: the product through our op.

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


def is_processor(module: Any) -> bool:
    return class_path(type(module)) == PROCESSOR


def head(model: Any) -> Any:
    """The model's LM head; None if it has none, or several."""
    found = {id(part): part for m in model.modules() if (part := m._modules.get("lm_head")) is not None}
    return next(iter(found.values())) if len(found) == 1 else None


def unsupported(found: Any) -> str | None:
    """Why our op does not compute the product of this head; None if it does."""
    if found is None:
        return "the model has no LM head, or several"
    method, weight = type(getattr(found, "quant_method", None)).__name__, getattr(found, "weight", None)
    if method not in UNQUANTIZED or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return f"the LM head's quant_method is {method}, not one of {', '.join(UNQUANTIZED)}"
    if hasattr(found, "set_lora"):
        return "an LM head with LoRA is not supported"
    return "the host packed its weight for AMX" if getattr(found, "use_intel_amx_backend", False) else None


def swap(processor: Any, found: Any, version: str, journal: Journal, by_table: bool) -> Reason | None:
    """Have a processor run our op for this head; None, or why not. by_table: see HostOp.swap."""
    on = next((f"{name} is on" for name in SWITCHES if getattr(processor, name, None)), None)
    if (text := unsupported(found) or on) is not None:
        return Reason(Kind.UNSUPPORTED, text)
    host_class: Any = type(processor)
    if "_compute_lm_head" in vars(processor):
        return Reason(Kind.REPLACED, "its _compute_lm_head was replaced by other code")
    reason = versions.unknown("sglang", version, PROCESSOR, host_class)
    if reason is None:
        journal.set_class(processor, _implementation(host_class, found, by_table))
    return reason


def _implementation(host_class: Any, found: Any, by_table: bool) -> type:
    from fastkernels.overrides.embedding.logits_processor import logits_processor
    from fastkernels.overrides.linear.linear import linear

    def _compute_lm_head(self: Any, hidden_states: Any, lm_head: Any, *more: Any, **named: Any) -> Any:
        weight = lm_head.weight if lm_head is found else None
        if weight is None or hidden_states.dtype != weight.dtype:
            return host_class._compute_lm_head(self, hidden_states, lm_head, *more, **named)
        choosy = by_table and "named" not in (linear.requested, logits_processor.requested)
        rows = hidden_states.numel() // weight.shape[1]
        if choosy and linear.winner(weight.device.type, (*weight.shape, weight.dtype), (rows,)) is None:
            logits_processor.leave(NOT_FASTER)
            return host_class._compute_lm_head(self, hidden_states, lm_head, *more, **named)
        return logits_processor(hidden_states, weight)

    body = {
        "_compute_lm_head": _compute_lm_head,
        "__module__": host_class.__module__,
        "__qualname__": host_class.__qualname__,
        "fastkernels": logits_processor,
    }
    return type(host_class.__name__, (host_class,), body)
