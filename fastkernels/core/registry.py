"""Ops by name: an op is a file fastkernels/overrides/FAMILY/NAME.py that assigns SPEC. Imported on first use."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastkernels.core.dispatch import Op
    from fastkernels.core.spec import OpSpec


class UnknownName(LookupError):
    """A name that is not in a registry. The message names it and lists what exists."""

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")

    def __str__(self) -> str:  # LookupError's own would be fine, KeyError's would quote the text
        return str(self.args[0])


class DuplicateName(ValueError):
    """Two files claim one name. The message names both."""


OPS_ROOT = Path(__file__).resolve().parents[1] / "overrides"
OPS_PACKAGE = "fastkernels.overrides"
_ASSIGNS_SPEC = re.compile(rb"^SPEC\b[^=\n]*=", re.MULTILINE)  # at the start of a line: the top level


@lru_cache(maxsize=1)
def op_modules() -> dict[str, str]:
    """{op name: module path}, from the files' text: nothing is imported. Raises DuplicateName."""
    found: dict[str, Path] = {}
    for file in sorted(OPS_ROOT.glob("*/*.py")):
        if not _ASSIGNS_SPEC.search(file.read_bytes()):
            continue
        if (other := found.setdefault(file.stem, file)) != file:
            raise DuplicateName(
                f"two files define the op {file.stem!r}: {other} and {file}. Rename one of them"
            )
    return {name: f"{OPS_PACKAGE}.{found[name].parent.name}.{name}" for name in sorted(found)}


def op_names() -> list[str]:
    return list(op_modules())


def op_module(name: str) -> ModuleType:
    """The op's module. Raises UnknownName."""
    if name not in op_modules():
        raise UnknownName("op", name, op_modules())
    return importlib.import_module(op_modules()[name])


def get(name: str) -> OpSpec:
    """The op's SPEC. Raises UnknownName."""
    return op_module(name).SPEC


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names, or UnknownName for the first that is not an op."""
    names = tuple(names)
    for name in names:
        if name not in op_modules():
            raise UnknownName("op", name, op_modules())
    return names


def counted(name: str) -> list[Op]:
    """The functional ops whose counters prove that the op of this name runs: its own, or those that it calls."""
    from fastkernels.core.dispatch import OPS

    names = [name] if name in OPS else get(name).calls
    return [OPS[n] for n in names if n in OPS]


def standing_in(name: str) -> list[Op]:
    """The functional ops, of those that are loaded, that are run in the place of this one; see OpSpec.stands_for."""
    from fastkernels.core.dispatch import OPS

    return [OPS[n] for n in op_modules() if n in OPS and name in get(n).stands_for]


def reached(name: str, parts: bool = False) -> set[str]:
    """The ops that the modules of this op call by name, and what those call; with parts, what its parts call, too."""

    def inside(op: str) -> tuple[str, ...]:
        return get(op).calls + (get(op).parts if parts else ())

    found: set[str] = set()
    todo = list(inside(name))
    while todo:
        called = todo.pop()
        if called not in found:
            found.add(called)
            todo += inside(called)
    return found
