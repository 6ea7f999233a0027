"""The objects through which tensor-parallel ranks of a host add tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core import collectives
from fk_integrations.core.adapter import Adapter
from fk_integrations.live.live_class import live_class
from fk_integrations.patching.seam_interface import Seam, Swap


class Communicator(Seam):
    """Swaps `__class__` in all ranks or in none: each rank learns what the others have found before it changes."""

    every_step = True

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: type) -> list[Any]:
        return [c for c in adapter.communicators() if type(c) is host_class]

    def passed_over(self, model: Any, host_class: type, known: Callable[[str], bool]) -> list[Reason]:
        return []

    def swap(self, swap: Swap) -> Reason | None:
        everywhere = swap.op in Environment.read().provider
        in_place = getattr(swap.ours, "host_sums_in_place", True)
        joined = collectives.join(swap.module, swap.host_class, swap.op, everywhere, in_place)
        if isinstance(joined, str):
            return Reason(Kind.LEFT_TO_HOST, joined)
        made, ours = joined
        swap.journal.add(made.close)
        swap.journal.set_attribute(swap.module, "fastkernels_communicator", made)
        swap.journal.set_attribute(swap.module, "fastkernels_collective", ours)
        swap.journal.set_class(swap.module, live_class(swap.host_class, swap.ours))
        return None
