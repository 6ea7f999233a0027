"""Attention, through the backend's implementation on the host's own KV layout."""

from __future__ import annotations

from typing import Any

from fastkernels.core.reasons import Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.patching.seam_interface import Seam, Swap


class Attention(Seam):
    """The host makes the change (HostOp.swap)."""

    optional = True

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: type) -> list[Any]:
        """Layers of the class, or whose `impl` is of it, and those that the host serves in the same way."""
        return [
            m for m in adapter.modules(model)
            if host_class in (type(m), type(vars(m).get("impl"))) or adapter.of(op).serves(m)
        ]  # fmt: skip

    def swap(self, swap: Swap) -> Reason | None:
        return swap.adapter.of(swap.op).swap(swap.module, swap.ours, swap.journal, swap.by_table)
