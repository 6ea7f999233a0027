"""Routers of experts: objects that a layer holds as `router`, which call a function of their own file."""

from __future__ import annotations

from typing import Any

from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.live.live_class import called, calling_class
from fk_integrations.patching.seam_interface import Seam, Swap

METHOD = "_compute_routing"
SCORES = {"grouped_topk": ("softmax", "sigmoid"), "fused_topk": ("softmax",)}  # that our functions compute


class Router(Seam):
    """Gives the router a METHOD that calls our function; what the host does before and after it stays.

    The function itself stays: other models share it. `host_class` is that function.
    """

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: Any) -> list[Any]:
        """Layers whose router calls the function. Routers of other files call it in rare cases only."""
        found = []
        for module in adapter.modules(model):
            kind = type(vars(module).get("router"))
            if kind.__module__ == host_class.__module__ and host_class in called(kind, METHOD).values():
                found.append(module)
        return found

    def swap(self, swap: Swap) -> Reason | None:
        router = vars(swap.module)["router"]
        if METHOD in vars(router):
            return Reason(Kind.REPLACED, f"its router.{METHOD} was replaced by other code")
        if (score := router.scoring_func) not in SCORES[swap.host_class.__name__]:
            return Reason(Kind.UNSUPPORTED, f"scoring_func={score!r} of its router is not supported")
        cls: Any = type(router)
        swap.journal.set_class(router, calling_class(cls, swap.host_class, swap.ours, (METHOD,)))
        return None
