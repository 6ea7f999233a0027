"""Plain modules of several parts: MLPs, decoder layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastkernels.core.reasons import Reason
from fk_integrations.core.live_class import live_class
from fk_integrations.core.seam import Seam, Swap, other_classes


class Module(Seam):
    """Swaps `__class__` of the instance; its parts stay, and may have seams of their own."""

    every_step = True

    def passed_over(self, model: Any, host_class: type, known: Callable[[str], bool]) -> list[Reason]:
        return other_classes(model, host_class, known)

    def swap(self, swap: Swap) -> Reason | None:
        swap.journal.set_class(swap.module, live_class(swap.host_class, swap.ours))
        swap.adapter.repin(swap.module, swap.journal)
        return None
