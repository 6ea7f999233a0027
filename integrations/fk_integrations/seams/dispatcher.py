"""The objects through which ranks of a host bring tokens to each other's experts, and the results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core import collectives
from fk_integrations.core.adapter import Adapter
from fk_integrations.live.live_class import live_class
from fk_integrations.patching.seam_interface import Seam, Swap


class Dispatcher(Seam):
    """Swaps `__class__` in all ranks of the group or in none; its sums may be ours already, by the seam communicator.

    Ranks of several engines meet again at the undo, so that none sends words for which another one does not wait.
    """

    every_step = True
    order = 1

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: type) -> list[Any]:
        found = []
        for dispatcher in adapter.dispatchers():
            kind: Any = type(dispatcher)
            if kind is host_class or (hasattr(kind, "fastkernels") and kind.__base__ is host_class):
                found.append(dispatcher)
        return found

    def passed_over(self, model: Any, host_class: type, known: Callable[[str], bool]) -> list[Reason]:
        return []

    def swap(self, swap: Swap) -> Reason | None:
        everywhere = swap.op in Environment.read().provider
        joined = collectives.join_experts(swap.module, swap.host_class, everywhere)
        if isinstance(joined, str):
            return Reason(Kind.LEFT_TO_HOST, joined)
        made, ours = joined
        swap.journal.add(made.close)
        swap.journal.set_attribute(swap.module, "fastkernels_dispatcher", made)
        swap.journal.set_attribute(swap.module, "fastkernels_experts", ours)
        swap.journal.set_class(swap.module, live_class(type(swap.module), swap.ours))
        swap.journal.add(lambda: collectives.leave_together(swap.module))
        return None
