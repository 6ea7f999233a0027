"""FP8 linear layers, through the kernel object that their method or scheme holds as `fp8_linear`."""

from __future__ import annotations

from typing import Any

from fastkernels.core.reasons import Reason
from fastkernels.overrides.linear.kernels.linear_fp8_scales import holder_of
from fk_integrations.core.adapter import Adapter
from fk_integrations.live.live_class import replace_attribute
from fk_integrations.patching.seam_interface import Seam, Swap


class Kernel(Seam):
    """Replaces the kernel object. First, because norms before such layers may be left to the host's compiler."""

    order = -1

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: type) -> list[Any]:
        holders = ((m, holder_of(m)) for m in adapter.modules(model))
        return [m for m, holder in holders if holder is not None and type(holder.fp8_linear) is host_class]

    def swap(self, swap: Swap) -> Reason | None:
        methods = ("apply_scaled_mm", "apply_weights")
        reason = replace_attribute(holder_of(swap.module), "fp8_linear", swap.ours, methods, swap.journal)
        if reason is None:
            swap.adapter.of(swap.op).swapped(swap.module)
        return reason
