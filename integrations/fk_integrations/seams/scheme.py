"""Quantized linear layers, through the scheme that computes them."""

from __future__ import annotations

from typing import Any

from fastkernels.core.reasons import Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.live.live_class import replace_attribute
from fk_integrations.patching.seam_interface import Seam, Swap


class Scheme(Seam):
    """Replaces `scheme`."""

    short = True

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: type) -> list[Any]:
        return [m for m in adapter.modules(model) if host_class in (type(m), type(vars(m).get("scheme")))]

    def swap(self, swap: Swap) -> Reason | None:
        return replace_attribute(
            swap.module,
            "scheme",
            swap.ours,
            ("apply_weights",),
            swap.journal,
            swap.by_table,
            captures=swap.captures,
        )
