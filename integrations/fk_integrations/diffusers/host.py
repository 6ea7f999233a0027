"""diffusers: a pipeline with all its models (transformer or UNet, VAE, text encoders), or one of its models."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from fastkernels.core import registry
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.spec import OpSpec, Target
from fastkernels.patch import PatchError, Request
from fk_integrations.core import versions
from fk_integrations.core.adapter import Adapter, class_path
from fk_integrations.core.journal import Journal
from fk_integrations.core.lookalikes import PACKAGES, first_package, lookalikes, uncovered
from fk_integrations.diffusers.layout import keep_channels_last
from fk_integrations.diffusers.offload import search_quickly
from fk_integrations.patching.in_process import InProcessHost
from fk_integrations.patching.later import Later
from fk_integrations.transformers.host import TransformersAdapter

# {op: parts of the names of classes that may compute it}
LOOKS_LIKE = {"rms_norm": ("RMSNorm",), "layer_norm": ("FP32LayerNorm",)}
_PIPELINE = "diffusers.pipelines.pipeline_utils:DiffusionPipeline"


class DiffusersAdapter(Adapter):
    """Targets are diffusers' layers and processors, torch's classes, and transformers' in text encoders."""

    host = "diffusers"
    first_call = True
    trained = True
    several = True

    def __init__(self) -> None:
        self.version = versions.installed("diffusers") or ""
        self.texts = TransformersAdapter()

    def targets(self, spec: OpSpec, model: Any) -> list[Target]:
        found = super().targets(spec, model)
        texts = self.texts.targets(spec, model) if model is not None else []
        return [*found, *(t for t in texts if t not in found)]

    def unknown(self, target: Target, host_class: Any) -> Reason | None:
        texts = target.host == self.texts.host
        return self.texts.unknown(target, host_class) if texts else super().unknown(target, host_class)

    def fused(self, model: Any, op: str, module: Any) -> Reason | None:
        return self.texts.fused(model, op, module)

    def unrecognized(self, op: str, model: Any) -> dict[Reason, int]:
        if model is None:
            return {}
        found = Counter(lookalikes(self.host, op, model, LOOKS_LIKE))
        found.update(self.texts.unrecognized(op, model))
        if op == "attention_dense":
            found.update(_other_processors(model))
        return dict(found)

    def uncovered(self, model: Any) -> dict[Reason, int]:
        return {} if model is None else uncovered(self.host, model)


def _other_processors(model: Any) -> Counter[Reason]:
    """Attention layers whose processor no target names."""
    listed = {t.path for t in registry.get("attention_dense").targets_for("diffusers")}
    found: Counter[Reason] = Counter()
    for module in model.modules():
        processor = getattr(module, "processor", None)
        cls: Any = type(processor)
        if processor is None or hasattr(cls, "fastkernels") or class_path(cls) in listed:
            continue
        if type(module).__module__.startswith("diffusers."):
            name = f"{cls.__module__}.{cls.__qualname__}"
            why = f"the processor {name}, which is not one that attention_dense replaces"
            found[Reason(Kind.OTHER_CLASS, why)] += 1
    return found


class DiffusersHost(InProcessHost):
    """fastkernels.patch.Host for a DiffusionPipeline, a diffusers model, or a torch module that contains one."""

    name = "diffusers"

    def __init__(self) -> None:
        self.later = Later(self, _hook)

    def version(self) -> str | None:
        return versions.installed("diffusers")

    def matches(self, target: Any) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or "diffusers" not in sys.modules:
            return False
        if isinstance(target, torch.nn.Module):
            return first_package(target, PACKAGES) == "diffusers"
        return any(class_path(cls) == _PIPELINE for cls in type(target).__mro__)

    def adapter(self) -> Adapter:
        return DiffusersAdapter()

    def model(self, target: Any) -> Any:
        """A pipeline's models as parts of one module."""
        from torch import nn

        if isinstance(target, nn.Module):
            return target
        parts = {name: part for name, part in vars(target).items() if isinstance(part, nn.Module)}
        if not parts:
            raise PatchError(f"{type(target).__name__} has no models to patch")
        return nn.ModuleDict(parts)

    def around(self, target: Any, journal: Journal) -> None:
        from torch import nn

        parts = [target] if isinstance(target, nn.Module) else vars(target).values()
        models = [m for m in parts if isinstance(m, nn.Module)]
        search_quickly(models, journal)
        keep_channels_last(models, journal)

    def before_construction(self, request: Request) -> list[dict[str, Any]]:
        return self.later.call(request)


def _hook(built: Callable[[Any], None], journal: Journal) -> None:
    """Call built(pipeline) once a pipeline has its models, whichever way it is made."""
    base = importlib.import_module("diffusers.pipelines.pipeline_utils").DiffusionPipeline
    theirs = base.register_modules

    @functools.wraps(theirs)
    def register_modules(self: Any, **kwargs: Any) -> None:
        theirs(self, **kwargs)
        built(self)

    journal.set_attribute(base, "register_modules", register_modules)


HOST = DiffusersHost()
