"""transformers: norms, gated MLPs, rotations and activations of a live model.

transformers repeats the same few lines under hundreds of class names. Norms and MLPs are therefore recognized by what
their forward computes, rotations by what the function computes that an attention module's forward calls: each listed
target is an example, whose semantics are recorded with its signature. An activation
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
from types import FunctionType
from typing import Any

from fastkernels.core import registry
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.spec import OpSpec, Target
from fastkernels.overrides.block.gated_gelu_mlp import GatedGeluMLP
from fk_integrations.core import versions
from fk_integrations.core.adapter import Adapter, class_path
from fk_integrations.core.in_process import InProcessHost
from fk_integrations.core.live_class import called
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


def _function_semantics(function: FunctionType) -> str:
    """Semantics of a function, as recorded for targets; '' if its source cannot be read."""
    node = _parsed(function.__code__)
    return versions.semantics({node.name: node}.get, node.name) if node is not None else ""


@cache
def _halves_repeat(source: type) -> bool:
    """Whether a class of rotary embeddings gives every frequency to channel j and to j + rotary_dim / 2."""
    try:
        return "torch.cat((freqs, freqs), dim=-1)" in inspect.getsource(source)
    except (OSError, TypeError):
        return False


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


@cache
def _by_semantics() -> dict[str, list[tuple[str, Target]]]:
    """{what a forward computes: (op, target)} of the targets that are classes of a model."""
    found: dict[str, list[tuple[str, Target]]] = {}
    for op in registry.op_names():
        for target in registry.get(op).targets_for("transformers", installed_version()):
            if target.path.startswith(MODELS) and target.seam != "function":
                for semantics in _known(target.path):
                    found.setdefault(semantics, []).append((op, target))
    return found


@cache
def _by_path() -> dict[str, tuple[str, Target]]:
    """{path: (op, target)} of the targets outside models: of transformers, and of torch."""
    found: dict[str, tuple[str, Target]] = {}
    for op in registry.op_names():
        spec = registry.get(op)
        for host in ("transformers", "torch"):
            for target in spec.targets_for(host, versions.installed(host)):
                if not target.path.startswith(MODELS):
                    found[target.path] = (op, target)
    return found


def target_of(module: Any) -> tuple[str, Target] | None:
    """(op, target) of the listed class that this module's class is, or whose forward computes the same; or None."""
    cls = type(module)
    path = class_path(cls)
    if not path.startswith(MODELS):
        return _by_path().get(path)
    same = _by_semantics().get(_semantics(cls), [])
    return next(((op, target) for op, target in same if _is_for(target, module)), None)


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
                found += [t for t in self._called(cls, listed, model) if t not in found]
            else:
                found += [t for t in (*listed, *self.torch_targets(spec)) if t.path == path]
        return found

    def _called(self, cls: Any, listed: list[Target], model: Any) -> list[Target]:
        """Targets for the functions that the class's forward calls."""
        listed = [t for t in listed if t.seam == "called_function"]
        if not listed:
            return []
        kinds: set[Any] = {type(m) for m in model.modules()}
        tables = [k for k in kinds if k.__module__ == cls.__module__ and "RotaryEmbedding" in k.__name__]
        if not tables or not all(_halves_repeat(k) for k in tables):
            return []
        return [
            replace(t, path=f"{cls.__module__}:{name}", note="")
            for name, function in called(cls).items()
            for t in listed
            if _function_semantics(function) in _known(t.path)
        ][:1]

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
