"""Attention of diffusers, through the processor that a layer holds and calls with itself as the first argument."""

from __future__ import annotations

from typing import Any

from fastkernels.core.reasons import Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.live.live_class import replace_attribute
from fk_integrations.patching.seam_interface import Seam, Swap


class Processor(Seam):
    """Replaces `processor`; layers may share one, and each gets its own."""

    every_step = True
    decided = True

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: type) -> list[Any]:
        return [m for m in adapter.modules(model) if type(vars(m).get("processor")) is host_class]

    def swap(self, swap: Swap) -> Reason | None:
        return replace_attribute(
            swap.module, "processor", swap.ours, ("__call__",), swap.journal, trial=swap.trial,
            differentiable=swap.differentiable, tally=swap.tally,
        )  # fmt: skip
