"""Blocks of a model in our engine: attention, MLPs, layers, at their places in this model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastkernels.core.reasons import Reason
from fastkernels.models.common.plans import block_tasks
from fk_integrations.patching.seam_interface import Seam, Swap, set_live_class


class Block(Seam):
    """Swaps `__class__` of the modules that a block names; other modules of that class stay."""

    order = 1  # after ops, whose targets are found by the class that a module has without a candidate
    every_step = True
    counted = True

    def modules(self, adapter: Any, model: Any, op: str, host_class: type) -> list[Any]:
        known = dict(model.named_modules())
        found = (known.get(path) for path in block_tasks.block(op).paths)
        return [module for module in found if type(module) is host_class]

    def passed_over(self, model: Any, host_class: type, known: Callable[[str], bool]) -> list[Reason]:
        return []

    def swap(self, swap: Swap) -> Reason | None:
        if issubclass(swap.ours, swap.host_class):  # it may call super(), which needs its own class
            made: Any = type(swap.host_class.__name__, (swap.ours,), {"fastkernels": swap.ours})
            swap.journal.set_class(swap.module, made)
        else:
            set_live_class(swap)
        return None
