"""Functions of a model's own file, which its modules call by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.live.decorated import host_function
from fk_integrations.live.live_class import called, callers, calling_class, inference_only, until_replaced
from fk_integrations.patching.seam_interface import Seam, Swap


class CalledFunction(Seam):
    """Gives the modules that call the function, in forward or another method, a method that calls ours.

    The function itself stays: other models of the same file share it. `host_class` is that function. It comes last,
    because other ops replace modules whole, by their class.
    """

    order = 1
    every_step = True

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: Any) -> list[Any]:
        kinds = {kind for kind in {type(m) for m in adapter.modules(model)} if host_class in callers(kind)}
        return [m for m in adapter.modules(model) if type(m) in kinds]

    def passed_over(self, model: Any, host_class: Any, known: Callable[[str], bool]) -> list[Reason]:
        ours = [kind for m in model.modules() if hasattr(kind := type(m), "fastkernels")]
        calling = {kind for kind in set(ours) if host_class in callers(kind.__mro__[1])}
        return [Reason(Kind.FUSED, f"our {kind.__name__} computes it") for kind in ours if kind in calling]

    def swap(self, swap: Swap) -> Reason | None:
        cls: Any = type(swap.module)
        theirs: Any = swap.host_class
        ours: Any = swap.ours
        method = callers(cls)[theirs]
        if op := swap.differentiable:
            name = next(n for n, function in called(cls, method).items() if function is theirs)
            file = host_function(getattr(cls, method)).__globals__["__name__"]
            ours = until_replaced(theirs, inference_only(theirs, ours, op), op, name, file)
        counts = swap.tally is not None
        swap.journal.set_class(swap.module, calling_class(cls, theirs, ours, method, counts))
        if swap.tally is not None:
            swap.tally.add(swap.module, swap.module, swap.journal)
        swap.adapter.repin(swap.module, swap.journal)
        return None
