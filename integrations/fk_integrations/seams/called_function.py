"""Functions of a model's own file, which its modules call by name."""

from __future__ import annotations

from typing import Any

from fastkernels.core.reasons import Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.live_class import callers, calling_class
from fk_integrations.core.seam import Seam, Swap


class CalledFunction(Seam):
    """Gives the modules that call the function, in forward or another method, a method that calls ours.

    The function itself stays: other models of the same file share it. `host_class` is that function.
    """

    every_step = True

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: Any) -> list[Any]:
        kinds = {kind for kind in {type(m) for m in model.modules()} if host_class in callers(kind)}
        return [m for m in model.modules() if type(m) in kinds]

    def swap(self, swap: Swap) -> Reason | None:
        cls: Any = type(swap.module)
        theirs: Any = swap.host_class
        swap.journal.set_class(swap.module, calling_class(cls, theirs, swap.ours, callers(cls)[theirs]))
        swap.adapter.repin(swap.module, swap.journal)
        return None
