"""timm: norms, activations, MLPs and attention of a live model, or of each model that create_model builds."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from fastkernels.core.reasons import Reason
from fastkernels.patch import Request
from fk_integrations.core import versions
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.journal import Journal
from fk_integrations.core.lookalikes import PACKAGES, first_package, lookalikes, uncovered
from fk_integrations.patching.in_process import InProcessHost
from fk_integrations.patching.later import Later

# {op: parts of the names of classes that may compute it}
LOOKS_LIKE = {"attention_dense": ("Attention", "Attn"), "rms_norm": ("RmsNorm",)}


class TimmAdapter(Adapter):
    """Targets are timm's shared layers, the classes of single models, and torch's."""

    host = "timm"
    first_call = True
    trained = True
    several = True
    shapes_together = True  # those of the images

    def __init__(self) -> None:
        self.version = versions.installed("timm") or ""

    def unrecognized(self, op: str, model: Any) -> dict[Reason, int]:
        return lookalikes(self.host, op, model, LOOKS_LIKE)

    def uncovered(self, model: Any) -> dict[Reason, int]:
        return {} if model is None else uncovered(self.host, model)


class TimmHost(InProcessHost):
    """fastkernels.patch.Host for a timm model, or a torch module that contains one."""

    name = "timm"

    def __init__(self) -> None:
        self.later = Later(self, _hook)

    def version(self) -> str | None:
        return versions.installed("timm")

    def matches(self, target: Any) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(target, torch.nn.Module):
            return False
        return first_package(target, PACKAGES) == "timm"

    def adapter(self) -> Adapter:
        return TimmAdapter()

    def before_construction(self, request: Request) -> list[dict[str, Any]]:
        return self.later.call(request)


def _hook(built: Callable[[Any], None], journal: Journal) -> None:
    """Call built(model) after each timm.create_model. Names that were imported from timm before stay as they are."""
    theirs = importlib.import_module("timm").create_model

    @functools.wraps(theirs)
    def create_model(*args: Any, **kwargs: Any) -> Any:
        model = theirs(*args, **kwargs)
        built(model)
        return model

    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "timm"]:
        if vars(module).get("create_model") is theirs:
            journal.set_attribute(module, "create_model", create_model)


HOST = TimmHost()
