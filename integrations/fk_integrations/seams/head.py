"""Modules that compute the product of an LM head without a call of the head."""

from __future__ import annotations

from fastkernels.core.reasons import Reason
from fk_integrations.patching.seam_interface import Seam, Swap


class Head(Seam):
    """The host makes the change (HostOp.swap)."""

    optional = True

    def swap(self, swap: Swap) -> Reason | None:
        return swap.adapter.of(swap.op).swap(swap.module, swap.ours, swap.journal, swap.by_table)
