"""Plain modules of several parts: MLPs, decoder layers."""

from __future__ import annotations

from fastkernels.core.reasons import Reason
from fk_integrations.core.live_class import live_class
from fk_integrations.core.seam import Seam, Swap


class Module(Seam):
    """Swaps `__class__` of the instance; its parts stay, and may have seams of their own."""

    def swap(self, swap: Swap) -> Reason | None:
        swap.journal.set_class(swap.module, live_class(swap.host_class, swap.ours))
        swap.adapter.repin(swap.module, swap.journal)
        return None
