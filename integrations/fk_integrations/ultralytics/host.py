"""ultralytics: the torch module of a model, or a `YOLO` whose `predict` has run. Training stays the library's."""

from __future__ import annotations

from typing import Any

from fastkernels.patch import PatchError
from fk_integrations.patching.module_host import ModuleHost


class UltralyticsHost(ModuleHost):
    """A module, or the object around it: its `predict` runs a fused copy, which the first call makes."""

    def model(self, target: Any) -> Any:
        if not hasattr(target, "predictor"):
            return target
        holder = getattr(target.predictor, "model", None)  # in 8.3 it has the module itself
        found = getattr(getattr(holder, "backend", holder), "model", None)
        if not hasattr(found, "named_modules"):
            raise PatchError(
                "predict() copies the model at its first call, and for other arguments such as `device` again: call it"
                " once with yours, then patch; or patch the torch module, `.model`, and call that"
            )
        return found


HOST = UltralyticsHost("ultralytics")
