"""Leaf modules: norms, activations, rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastkernels.core.reasons import Reason
from fk_integrations.patching.seam_interface import Seam, Swap, other_classes, set_live_class


class Leaf(Seam):
    """Swaps `__class__` of the instance for a subclass of the host's class with our forward."""

    every_step = True
    decided = True
    short = True

    def passed_over(self, model: Any, host_class: type, known: Callable[[str], bool]) -> list[Reason]:
        return other_classes(model, host_class, known)

    def swap(self, swap: Swap) -> Reason | None:
        set_live_class(swap)
        swap.adapter.repin(swap.module, swap.journal)
        return None
