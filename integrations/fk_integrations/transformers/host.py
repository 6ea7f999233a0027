"""transformers: norms, gated MLPs, rotations and activations of a live model.

transformers repeats the same few lines under hundreds of class names. Norms and MLPs are therefore recognized by what
their forward computes, rotations by what the function computes that an attention module's forward calls: each listed
target is an example, whose semantics are recorded with its signature. An activation
is one class that all models share, recognized by its path and the fingerprint of its source, as in other hosts.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from types import FunctionType
from typing import Any

from fastkernels.core.baseline import Baseline, refusing
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.spec import OpSpec, Target
from fastkernels.overrides.block.gated_gelu_mlp import GatedGeluMLP
from fk_integrations.core.adapter import Adapter, class_path
from fk_integrations.core.lookalikes import PACKAGES, first_package, no_op
from fk_integrations.live.live_class import called_function_of, callers, calls
from fk_integrations.patching.in_process import InProcessHost
from fk_integrations.transformers.architectures import needs
from fk_integrations.transformers.recognition import (
    MODELS,
    function_semantics,
    installed_version,
    is_for,
    is_listed,
    known,
    repeats,
    semantics,
)

# {op: (end of the name, attributes)} of classes that may compute it
LOOKS_LIKE = {
    "rms_norm": ("RMSNorm", ("weight",)),
    "gated_mlp": ("MLP", ("gate_proj", "up_proj", "down_proj")),
}
# {op: parts of the names of classes that may compute it} in encoders of images and videos
VISUAL = {"attention_dense": ("Attention",), "layer_norm": ("Norm",), "gated_residual": ("LayerScale",)}


# Functions that read tables in which neighbouring channels have the same frequency.
OF_PAIRS = ("transformers_cohere_apply_rotary_pos_emb",)


# Names of functions that rotate queries and keys
ROTATES = re.compile(r"^apply_\w*rotary|^rotate_queries|^apply_\w*rope")


class TransformersAdapter(Adapter):
    """Targets are the model's classes that compute what a listed class does, and torch's."""

    host = "transformers"
    first_call = True
    trained = True
    several = True

    def __init__(self) -> None:
        self.version = installed_version() or ""

    def targets(self, spec: OpSpec, model: Any) -> list[Target]:
        listed = spec.targets_for(self.host, self.version)
        found = []
        for cls, module in {type(m): m for m in model.modules()}.items():
            path = class_path(cls)
            if path.startswith(MODELS):
                same = (t for t in listed if semantics(cls) in known(t.path) and is_for(t, module))
                found += [replace(t, path=path) for t in islice(same, 1)]
                found += [t for t in self._called(spec.name, cls, listed, model) if t not in found]
            else:
                found += [t for t in (*listed, *self.torch_targets(spec)) if t.path == path]
        return found

    def _called(self, op: str, cls: Any, listed: list[Target], model: Any) -> list[Target]:
        """Targets for the functions that the class's methods call."""
        listed = [t for t in listed if t.seam == "called_function"]
        if not listed:
            return []
        kinds: set[Any] = {type(m) for m in model.modules()}
        tables = [k for k in kinds if k.__module__ == cls.__module__ and "RotaryEmbedding" in k.__name__]
        layouts = {repeats(k) for k in tables}
        found: dict[str, Target] = {}
        for method in dict.fromkeys(name for names in callers(cls).values() for name in names):
            for file, name, function in calls(cls, method):
                for target in listed:
                    fits = op != "rotary_emb" or layouts == {"pairs" if target.cls in OF_PAIRS else "halves"}
                    if fits and function_semantics(function) in known(target.path):
                        found.setdefault(name, replace(target, path=f"{file}:{name}"))
        return list(found.values())

    def unrecognized(self, op: str, model: Any) -> dict[Reason, int]:
        """Modules that look like what the op computes by name and attributes, and that no op replaces."""
        found: Counter[Reason] = Counter(
            _rotations(model) if op == "rotary_emb" and model is not None else ()
        )
        for module in self._lookalikes(op, model) if model is not None else ():
            cls: Any = type(module)
            theirs = cls.__module__.startswith("transformers.") and not hasattr(cls, "fastkernels")
            if theirs and not is_listed(module):
                name = f"{cls.__module__}.{cls.__qualname__}"
                found[Reason(Kind.OTHER_CLASS, f"{name}, whose forward is not one that {op} replaces")] += 1
        return dict(found)

    def _lookalikes(self, op: str, model: Any) -> Iterator[Any]:
        if op in LOOKS_LIKE:
            end, attributes = LOOKS_LIKE[op]
            for module in model.modules():
                if type(module).__name__.endswith(end) and all(hasattr(module, a) for a in attributes):
                    yield module
        for module in _uncovered(model) if op in VISUAL else ():
            inside = (type(m).__name__ for m in module.modules() if m is not module)
            whole = not any(
                part in name for name in inside for part in VISUAL[op]
            )  # no part of it computes the op
            if whole and any(part in type(module).__name__ for part in VISUAL[op]) and not _other(op, module):
                yield module

    def uncovered(self, model: Any) -> dict[Reason, int]:
        return {} if model is None else no_op(_uncovered(model))

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


def _rotations(model: Any) -> Iterator[Reason]:
    """A reason for each module that rotates queries and keys, by the names in its code, and has no code of ours.

    Where tables of positions exist, but no code that reads them was found: one for each table.
    """
    visual, tables, rotating = {*visual_modules(model)}, [], False
    names = {cls: rotation_of(cls) for cls in {type(m) for m in model.modules()}}
    for module in model.modules():
        cls: Any = type(module)
        ours = hasattr(cls, "fastkernels") or called_function_of(cls) is not None
        name = names[cls]
        rotating = rotating or ours or bool(name)
        if ours or module in visual or not cls.__module__.startswith("transformers."):
            continue
        where = f"{cls.__module__}.{cls.__qualname__}"
        if name:
            yield Reason(Kind.OTHER_CLASS, f"{where}, whose {name} is not one that rotary_emb replaces")
        elif "RotaryEmbedding" in cls.__name__:
            tables.append(where)
    for where in () if rotating else tables:
        yield Reason(Kind.OTHER_CLASS, f"{where}, whose tables no code reads that rotary_emb knows")


def rotation_of(cls: Any) -> str:
    """The name of the function with which a class of transformers rotates queries and keys; '' for others."""
    for base in cls.__mro__:
        for value in vars(base).values() if base.__module__.startswith("transformers.") else ():
            code = (
                getattr(inspect.unwrap(value), "__code__", None) if isinstance(value, FunctionType) else None
            )
            found = [name for name in (code.co_names if code is not None else ()) if ROTATES.search(name)]
            if found:
                return found[0]
    return ""


def visual_modules(model: Any) -> list[Any]:
    """The modules inside transformers' models of images and videos, without those of text models in them."""
    kinds: dict[Any, Any] = {}
    for outer in model.modules():  # from the outside in
        if (kind := getattr(type(outer), "input_modalities", None)) is not None:
            kinds.update(dict.fromkeys(outer.modules(), kind))
    return [
        m for m, kind in kinds.items()
        if ("image" in kind or "video" in kind) and not hasattr(type(m), "input_modalities")
    ]  # fmt: skip


def _uncovered(model: Any) -> list[Any]:
    """The visual modules without a target; a LayerScale is part of a layer that has one."""
    visual = visual_modules(model)
    replaced = {m for m in visual if is_listed(m) or hasattr(type(m), "fastkernels")}
    scales = {c for m in replaced for c in m.children() if type(c).__name__.endswith("LayerScale")}
    return [m for m in visual if m not in replaced and m not in scales]


def _other(op: str, module: Any) -> bool:
    """Whether the module's name states another op's norm."""
    return op == "layer_norm" and "RMSNorm" in type(module).__name__


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

    def needs(self, config: Any, architecture: str) -> dict[str, list[str]] | None:
        """{primitive or difference: classes} of the modules of an architecture for which no op is known.

        None if the installed transformers cannot build it from this config.
        """
        return needs(config, architecture) if installed_version() else None

    def block_baselines(self, name: str) -> tuple[Baseline, ...]:
        """The judge's baselines of a block of a model; see fk_integrations.transformers.blocks."""
        from fk_integrations.transformers import blocks

        if installed_version() is None:
            return (refusing(self.name, "transformers is not installed: pip install transformers"),)
        return blocks.baselines(name)


HOST = TransformersHost()
