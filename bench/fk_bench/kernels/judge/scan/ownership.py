"""The op that a dotted name under fastkernels.overrides belongs to, resolved through the registry."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from enum import Enum
from functools import cache

from fastkernels.core import registry

_OVERRIDES = registry.OPS_PACKAGE.split(".")
MODULE_CALLS = frozenset(("forward", "apply", "apply_scaled_mm", "apply_weights", "embedding", "__call__"))


class PlaceKind(Enum):
    """The kind of place that a dotted name leads to."""

    OUTSIDE = "outside"  # not in fastkernels.overrides, or no existing file
    KIT = "kit"  # shared tools of all kernels
    PACKAGE = "package"  # fastkernels.overrides itself, or a family
    OP = "op"  # an op's module, or a name in it
    HOST = "host"  # a family's classes for one host, or a name in that file
    PRODUCTION = "production"  # the baselines of a family, and the loaders of the libraries that they call
    HELPER = "helper"  # a part of a family's kernels


@dataclass(frozen=True)
class Place:
    """A resolved name. `family` and `module` are folder and file stem, `name` the first attribute behind them."""

    kind: PlaceKind
    family: str = ""
    module: str = ""
    name: str = ""

    @property
    def ops(self) -> set[str]:
        """The ops that can be reached through this place."""
        if self.kind is PlaceKind.OP:
            return {self.module}
        if self.kind is PlaceKind.PACKAGE:
            return {op for op in registry.op_modules() if self.family in ("", _family(op))}
        if self.kind is not PlaceKind.HOST:
            return set()
        module = ".".join((*_OVERRIDES, self.family, self.module))
        classes = {
            op: {t.cls for t in registry.get(op).targets if t.module == module}
            for op in registry.op_modules()
            if _family(op) == self.family
        }
        named = {op for op, names in classes.items() if self.name in names}
        return named or {
            op for op, names in classes.items() if names
        }  # any of them may be called by a helper in the file

    @property
    def is_record(self) -> bool:
        """Whether the name is a dataclass, such as what a host's class returns."""
        return (found := self._class()) is not None and dataclasses.is_dataclass(found)

    @property
    def calls(self) -> frozenset[str]:
        """The methods that make a module's call; those that replace a live object's are named by its class."""
        return MODULE_CALLS | set(getattr(self._class(), "live_methods", ()))

    def _class(self) -> type | None:
        if self.kind not in (PlaceKind.OP, PlaceKind.HOST) or not self.name:
            return None
        module = importlib.import_module(".".join((*_OVERRIDES, self.family, self.module)))
        found = getattr(module, self.name, None)
        return found if isinstance(found, type) else None


@cache
def _exists(name: str) -> bool:
    """Whether OPS_ROOT has this file or folder. A candidate may use names that no file system has."""
    try:
        return (registry.OPS_ROOT / name).exists()
    except OSError:
        return False


def locate(dotted: str) -> Place:
    """Resolve a dotted name by the existing files, without importing them."""
    parts = dotted.split(".")
    if parts[: len(_OVERRIDES)] != _OVERRIDES:
        return Place(PlaceKind.OUTSIDE)
    family, module, name, *_ = (*parts[len(_OVERRIDES) :], "", "", "")
    if family == "kit":
        return Place(PlaceKind.PRODUCTION if module == "libraries" else PlaceKind.KIT)
    if not _exists(f"{family}/"):
        return Place(PlaceKind.OUTSIDE)
    if module in ("", "*"):
        return Place(PlaceKind.PACKAGE, family)
    if module == "production":
        return Place(PlaceKind.PRODUCTION, family)
    if not _exists(f"{family}/{module}.py"):
        return Place(PlaceKind.OUTSIDE)
    if registry.op_modules().get(module) == ".".join((*_OVERRIDES, family, module)):
        kind = PlaceKind.OP
    elif ".".join((*_OVERRIDES, family, module)) in registry.host_modules().get(family, ()):
        kind = PlaceKind.HOST
    else:
        kind = PlaceKind.HELPER
    return Place(kind, family, module, name)


def _family(op: str) -> str:
    return registry.op_modules()[op].split(".")[-2]
