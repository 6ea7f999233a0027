"""Plain modules of several parts: MLPs, decoder layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastkernels.core.reasons import Reason
from fk_integrations.patching.seam_interface import Seam, Swap, other_classes, set_live_class


class Module(Seam):
    """Swaps `__class__` of the instance; its parts stay, and may have seams of their own."""

    every_step = True
    decided = True
    short = True

    def passed_over(self, model: Any, host_class: type, known: Callable[[str], bool]) -> list[Reason]:
        return other_classes(model, host_class, known)

    def swap(self, swap: Swap) -> Reason | None:
        set_live_class(swap)
        swap.adapter.repin(swap.module, swap.journal)
        return None
