"""Modules that look like what an op computes, but are of a class that no target names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fastkernels.core import registry
from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core.adapter import class_path

_IDLE = ("Identity", "Dropout", "DropPath", "ModuleList", "Sequential")  # nothing to compute in inference
PACKAGES = (
    "timm",
    "transformers",
    "diffusers",
    "fla",
    "torchrec",
    "torch_geometric",
    "openfold3",
    "ultralytics",
    "diffusion_policy_3d",
)  # hosts whose models may contain each other's


def with_reason(cls: Any, host: str, reason: str) -> str:
    """A class with a reason why it stays: another one if it is of another package of models than its host.

    host: the package of the class that an op replaces
    """
    package = cls.__module__.partition(".")[0]
    if package in PACKAGES and host not in (package, "torch"):
        reason = f"a class of {package}, which {host} runs as it is"
    return f"{cls.__module__}.{cls.__qualname__}, {reason}"


def lookalikes(
    host: str, op: str, model: Any, parts: Mapping[str, tuple[str, ...]], package: str = ""
) -> dict[Reason, int]:
    """{reason: modules} of the host's classes whose name contains one of these parts, without a target of any op.

    parts    {op: parts of class names}
    package  whose classes they are; by default the host's
    """
    listed = {t.path for name in registry.op_names() for t in registry.get(name).targets_for(host)}
    found: Counter[Reason] = Counter()
    for module in model.modules() if model is not None and op in parts else ():
        cls: Any = type(module)
        theirs = cls.__module__.startswith(f"{package or host}.") and not hasattr(cls, "fastkernels")
        theirs = theirs and "Block" not in cls.__name__  # attention is a part of it
        if theirs and any(part in cls.__name__ for part in parts[op]) and class_path(cls) not in listed:
            text = with_reason(cls, host, f"which is not one that {op} replaces")
            found[Reason(Kind.OTHER_CLASS, text)] += 1
    return dict(found)


def uncovered(host: str, model: Any) -> dict[Reason, int]:
    """{reason: modules} of leaf modules, and others with weights of their own, whose class no target names."""
    names = {host, "torch"}
    listed = {
        t.path: getattr(registry.target_class(t), "applies", None)
        for op in registry.op_names() for name in names for t in registry.get(op).targets_for(name)
    }  # fmt: skip

    def covered(module: Any) -> bool:
        path = class_path(type(module))
        applies = listed.get(path)
        return path in listed and (applies is None or applies(module))

    return no_op(m for m in model.modules() if m is not model and not covered(m))


def no_op(modules: Iterable[Any]) -> dict[Reason, int]:
    """{reason: modules} of those that have weights of their own or no parts, and that compute something."""
    found: Counter[str] = Counter()
    for module in modules:
        cls: Any = type(module)
        own = any(p is not None for p in module._parameters.values()) or next(module.children(), None) is None
        if own and not hasattr(cls, "fastkernels") and not cls.__name__.endswith(_IDLE):
            found[cls.__name__] += 1
    if not found:
        return {}
    counts = ", ".join(f"{name} {n}" for name, n in found.most_common())
    return {Reason(Kind.NO_OP, f"no op replaces them ({counts})"): found.total()}


def first_package(target: Any, packages: tuple[str, ...]) -> str | None:
    """The first of these packages that a module of `target` belongs to, from the outside in."""
    for module in target.modules():
        package = type(module).__module__.partition(".")[0]
        if package in packages:
            return package
    return None
