"""Functions that modules of a host call by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.live.live_class import (
    callers,
    calling_class,
    calls,
    inference_only,
    or_theirs,
    until_replaced,
)
from fk_integrations.live.tally import counted_function
from fk_integrations.patching.seam_interface import Seam, Swap


class CalledFunction(Seam):
    """Gives the modules that call the function, in any of their methods, methods that call ours.

    A method may call it as a global name, or import it when it runs. A call that ours refuses runs the host's, a
    fallback. The function itself stays: other callers share it. `host_class` is that function. It comes last, because
    other ops replace modules whole, by their class.
    """

    order = 1
    every_step = True
    tallies = True

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: Any) -> list[Any]:
        found = list(adapter.callers(model))
        kinds = {kind for kind in {type(m) for m in found} if host_class in callers(kind)}
        return [m for m in found if type(m) in kinds]

    def passed_over(self, model: Any, host_class: Any, known: Callable[[str], bool]) -> list[Reason]:
        ours = [kind for m in model.modules() if hasattr(kind := type(m), "fastkernels")]
        calling = {kind for kind in set(ours) if host_class in callers(kind.__mro__[1])}
        return [Reason(Kind.FUSED, f"our {kind.__name__} computes it") for kind in ours if kind in calling]

    def swap(self, swap: Swap) -> Reason | None:
        cls: Any = type(swap.module)
        theirs: Any = swap.host_class
        ours: Any = or_theirs(theirs, swap.ours, swap.op)
        methods = callers(cls)[theirs]
        if op := swap.differentiable:
            file, name = next((f, n) for f, n, function in calls(cls, methods[0]) if function is theirs)
            ours = until_replaced(theirs, inference_only(theirs, ours, op), op, name, file)
        if swap.tally is not None:
            ours = counted_function(ours)
            swap.tally.add_function(swap.module, ours.__name__, swap.journal)
        functions = "" if swap.tally is None else swap.tally.scope.candidates
        swap.journal.set_class(swap.module, calling_class(cls, theirs, ours, methods, functions))
        swap.adapter.repin(swap.module, swap.journal)
        return None
