"""Mixtures of experts, through the object that runs them on the host's own weights and routing."""

from __future__ import annotations

from typing import Any

from fastkernels.core.reasons import Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.expert_layers import in_float8
from fk_integrations.patching.seam_interface import Seam, Swap


class Experts(Seam):
    """The host makes the change (HostOp.swap)."""

    optional = True

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: type) -> list[Any]:
        """All layers of experts with weights in the op's number format, whatever class runs them."""
        here = adapter.of(op)
        found = [m for m in adapter.modules(model) if here.runner(m) is not None]
        return [m for m in found if in_float8(m) == op.endswith("_fp8")]

    def swap(self, swap: Swap) -> Reason | None:
        return swap.adapter.of(swap.op).swap(swap.module, swap.ours, swap.journal, swap.by_table)
