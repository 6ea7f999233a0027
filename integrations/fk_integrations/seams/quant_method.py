"""Linear and embedding layers, through the method object that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.live.live_class import replace_attribute
from fk_integrations.patching.seam_interface import Seam, Swap


class QuantMethod(Seam):
    """Replaces `quant_method`; bias, gather and all-reduce stay the host's."""

    short = True

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: type) -> list[Any]:
        """Modules of the class, or with a method object of it that is their own (a LoRA wrapper shows another's)."""
        return [
            m for m in adapter.modules(model) if host_class in (type(m), type(vars(m).get("quant_method")))
        ]

    def passed_over(self, model: Any, host_class: type, known: Callable[[str], bool]) -> list[Reason]:
        """Linear layers with another method of the same family: quantized ones."""
        family = host_class.__base__
        if family is None or family.__name__ != "LinearMethodBase":
            return []
        methods = [type(vars(m).get("quant_method")) for m in model.modules()]
        return [
            Reason(
                Kind.UNSUPPORTED,
                f"quant_method is {m.__module__}.{m.__qualname__}, not {host_class.__qualname__}",
            )
            for m in methods
            if issubclass(m, family) and m is not host_class
        ]

    def swap(self, swap: Swap) -> Reason | None:
        by_table = swap.by_table and hasattr(swap.ours, "by_table")
        return replace_attribute(
            swap.module, "quant_method", swap.ours, ("apply",), swap.journal, by_table, captures=swap.captures
        )
