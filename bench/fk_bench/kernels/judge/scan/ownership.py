"""The op that a dotted name under fastkernels.overrides belongs to, resolved through the registry."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from enum import Enum

from fastkernels.core import registry

_OVERRIDES = registry.OPS_PACKAGE.split(".")


class Kind(Enum):
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

    kind: Kind
    family: str = ""
    module: str = ""
    name: str = ""

    @property
    def ops(self) -> set[str]:
        """The ops that can be reached through this place."""
        if self.kind is Kind.OP:
            return {self.module}
        if self.kind is Kind.PACKAGE:
            return {op for op in registry.op_modules() if self.family in ("", _family(op))}
        if self.kind is not Kind.HOST:
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
        if self.kind not in (Kind.OP, Kind.HOST) or not self.name:
            return False
        module = importlib.import_module(".".join((*_OVERRIDES, self.family, self.module)))
        found = getattr(module, self.name, None)
        return isinstance(found, type) and dataclasses.is_dataclass(found)


def locate(dotted: str) -> Place:
    """Resolve a dotted name by the existing files, without importing them."""
    parts = dotted.split(".")
    if parts[: len(_OVERRIDES)] != _OVERRIDES:
        return Place(Kind.OUTSIDE)
    family, module, name, *_ = (*parts[len(_OVERRIDES) :], "", "", "")
    folder = registry.OPS_ROOT / family
    file = folder / f"{module}.py"
    if family == "kit":
        return Place(Kind.PRODUCTION if module == "libraries" else Kind.KIT)
    if not folder.is_dir():
        return Place(Kind.OUTSIDE)
    if module in ("", "*"):
        return Place(Kind.PACKAGE, family)
    if module == "production":
        return Place(Kind.PRODUCTION, family)
    if not file.is_file():
        return Place(Kind.OUTSIDE)
    if registry.op_modules().get(module) == ".".join((*_OVERRIDES, family, module)):
        kind = Kind.OP
    elif ".".join((*_OVERRIDES, family, module)) in registry.host_modules().get(family, ()):
        kind = Kind.HOST
    else:
        kind = Kind.HELPER
    return Place(kind, family, module, name)


def _family(op: str) -> str:
    return registry.op_modules()[op].split(".")[-2]
