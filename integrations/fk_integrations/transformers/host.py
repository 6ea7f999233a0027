"""transformers: norms, gated MLPs and activations of a live model.

transformers repeats the same few lines under hundreds of class names. Norms and MLPs are therefore recognized by what
their forward computes: each listed target is an example, whose semantics are recorded with its signature. An activation
is one class that all models share, recognized by its path and the fingerprint of its source, as in other hosts.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

from fastkernels.core import registry
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.spec import OpSpec, Target
from fastkernels.overrides.block.gated_gelu_mlp import GatedGeluMLP
from fk_integrations.core import versions
from fk_integrations.core.adapter import Adapter, class_path
from fk_integrations.core.in_process import InProcessHost
from fk_integrations.core.lookalikes import PACKAGES, first_package

MODELS = "transformers.models."
# {op: (end of the name, attributes)} of classes that may compute it
LOOKS_LIKE = {
    "rms_norm": ("RMSNorm", ("weight",)),
    "gated_mlp": ("MLP", ("gate_proj", "up_proj", "down_proj")),
}


def installed_version() -> str | None:
    return versions.installed("transformers")


def _semantics(cls: type) -> str:
    """Semantics of the current forward of a class, as recorded for targets; '' if its source cannot be read."""

    def method(name: str) -> ast.FunctionDef | None:
        return _parsed(getattr(vars(cls).get(name), "__code__", None))

    return versions.semantics(method) if method("forward") is not None else ""


@cache
def _parsed(code: Any) -> ast.FunctionDef | None:
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError):  # not of the function, which may be a wrapper's
        return None
    return node if isinstance(node, ast.FunctionDef) else None


@cache
def _known(path: str) -> frozenset[str]:
    """Semantics of the forward of a target's class, in all recorded versions."""
    recorded = (data["classes"].get(path, {}) for data in versions.recorded("transformers").values())
    return frozenset(entry["semantics"] for entry in recorded if "semantics" in entry)


@cache
def _listed() -> set[str]:
    """The paths of all listed targets."""
    targets = (registry.get(name).targets_for("transformers") for name in registry.op_names())
    return {target.path for several in targets for target in several}


class TransformersAdapter(Adapter):
    """Targets are the model's classes that compute what a listed class does, and torch's."""

    host = "transformers"

    def __init__(self) -> None:
        self.version = installed_version() or ""

    def targets(self, spec: OpSpec, model: Any) -> list[Target]:
        listed = spec.targets_for(self.host, self.version)
        found = []
        for cls, module in {type(m): m for m in model.modules()}.items():
            path = class_path(cls)
            if path.startswith(MODELS):
                same = (t for t in listed if _semantics(cls) in _known(t.path) and _is_for(t, module))
                found += [replace(t, path=path, note="") for t in islice(same, 1)]
            else:
                found += [t for t in (*listed, *self.torch_targets(spec)) if t.path == path]
        return found

    def unrecognized(self, op: str, model: Any) -> dict[Reason, int]:
        """Modules that look like a norm or MLP of the op by name and attributes, and that no op replaces."""
        found: Counter[Reason] = Counter()
        for module in model.modules() if op in LOOKS_LIKE else ():
            cls: Any = type(module)
            (end, attributes), path = LOOKS_LIKE[op], f"{cls.__module__}:{cls.__qualname__}"
            theirs = cls.__module__.startswith("transformers.") and not hasattr(cls, "fastkernels")
            if (
                not theirs
                or not cls.__name__.endswith(end)
                or not all(hasattr(module, a) for a in attributes)
            ):
                continue
            if path not in _listed() and not any(_semantics(cls) in _known(listed) for listed in _listed()):
                name = path.replace(":", ".")
                found[Reason(Kind.OTHER_CLASS, f"{name}, whose forward is not one that {op} replaces")] += 1
        return dict(found)

    def unknown(self, target: Target, host_class: Any) -> Reason | None:
        # `targets` has compared what a model's class computes.
        return None if target.path.startswith(MODELS) else super().unknown(target, host_class)

    def fused(self, model: Any, op: str, module: Any) -> Reason | None:
        if op != "gelu":
            return None
        mlps = (
            m for m in model.modules() if getattr(m, "act_fn", getattr(m, "activation_fn", None)) is module
        )
        if not any(issubclass(getattr(type(m), "fastkernels", object), GatedGeluMLP) for m in mlps):
            return None
        return Reason(Kind.LEFT_TO_HOST, "our gated_gelu_mlp computes it with the product after it")


def _is_for(target: Target, module: Any) -> bool:
    """Whether the op is what this module computes: that of an MLP depends on its activation, not on its class."""
    test = getattr(registry.target_class(target), "is_for", None)
    return test is None or test(module)


class TransformersHost(InProcessHost):
    """fastkernels.patch.Host for a transformers model, or a torch module that contains parts of one."""

    name = "transformers"

    def version(self) -> str | None:
        return installed_version()

    def matches(self, target: Any) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(target, torch.nn.Module):
            return False
        return first_package(target, PACKAGES) == "transformers"

    def adapter(self) -> Adapter:
        return TransformersAdapter()


HOST = TransformersHost()
