"""Find ops, host classes and baselines by name.

An op is a file `overrides/FAMILY/NAME.py` whose top level assigns SPEC. A host file (`FAMILY/vllm.py`) assigns
`TARGETS = {op: (Target, ...)}`. Both are found from their text and imported on first use.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastkernels.core.baseline import Baseline
    from fastkernels.core.spec import OpSpec, Target


MANY = 20  # names that a message lists next to the closest one


class UnknownName(LookupError):
    """A name that is not registered. The message lists the known names; of many, only the closest if there is one.

    more: what to do about it, at the end of the message
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], more: str = ""):
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        names = "" if close and len(known) > MANY else f" Known: {', '.join(known)}."
        super().__init__(f"unknown {kind} {name!r}.{hint}{names}{f' {more}' if more else ''}")

    def __str__(self) -> str:  # a subclass of KeyError would quote the message
        return str(self.args[0])


class DuplicateName(ValueError):
    """Two files claim one name. The message names both."""


# the note of a host class whose op was never measured in a host
NOT_MEASURED = "off by default: its op has no `by_default` yet, which follows a measurement in a host"
# Functional ops of this process without a file in `overrides/`, such as those of a plugin.
defined: set[str] = set()
OPS_ROOT = Path(__file__).resolve().parents[1] / "overrides"
OPS_PACKAGE = "fastkernels.overrides"
COLLECTIVES = ("collective", "expert_parallel")  # the families of ops over several ranks
# An assignment at the start of a line is at the top level.
_ASSIGNS_SPEC = re.compile(rb"^SPEC\b[^=\n]*=", re.MULTILINE)
_ASSIGNS_TARGETS = re.compile(rb"^TARGETS\b[^=\n]*=", re.MULTILINE)


@cache
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
    """The ops of one process; for those of several ranks see `collective_names`."""
    return [name for name, module in op_modules().items() if module.split(".")[-2] not in COLLECTIVES]


def collective_names() -> list[str]:
    """The ops of COLLECTIVES, whose calls need all ranks of a group."""
    return [name for name, module in op_modules().items() if module.split(".")[-2] in COLLECTIVES]


def op_module(name: str) -> ModuleType:
    """The op's module. Raises UnknownName."""
    if name not in op_modules():
        raise UnknownName("op", name, op_modules())
    return importlib.import_module(op_modules()[name])


@cache
def host_modules() -> dict[str, tuple[str, ...]]:
    """{family: modules of its host files}, from the files' text: a host file assigns TARGETS."""
    found: dict[str, list[str]] = {}
    # vLLM's file comes first: the judge builds the class of an op's first target.
    for file in sorted(OPS_ROOT.glob("*/*.py"), key=lambda file: (file.stem != "vllm", file)):
        if _ASSIGNS_TARGETS.search(file.read_bytes()):
            found.setdefault(file.parent.name, []).append(f"{OPS_PACKAGE}.{file.parent.name}.{file.stem}")
    return {family: tuple(modules) for family, modules in found.items()}


def family(name: str) -> str:
    """The folder of the op's file; '' for a spec without one. Raises UnknownName."""
    if name in _added:
        return ""
    return op_modules()[check_names([name])[0]].split(".")[-2]


_added: dict[str, OpSpec] = {}


def add(*specs: OpSpec) -> None:
    """Let `get` know specs without a file, such as those of a model's blocks; later ones replace earlier ones."""
    _added.update({spec.name: spec for spec in specs})


def known(name: str) -> bool:
    """Whether `get` knows this name."""
    return name in _added or name in op_modules()


def get(name: str) -> OpSpec:
    """The op's SPEC, with the targets that the host files of its family list. Raises UnknownName."""
    return _added[name] if name in _added else _from_file(name)


@cache
def _from_file(name: str) -> OpSpec:
    spec, targets = op_module(name).SPEC, []
    for host in host_modules().get(family(name), ()):
        listed = importlib.import_module(host).TARGETS.get(name, ())
        for target in listed:
            unmeasured = target.default and not spec.by_default
            note = target.note or (NOT_MEASURED if unmeasured else "")
            targets.append(replace(target, module=host, default=target.default and not unmeasured, note=note))
    return replace(spec, targets=tuple(targets))


def target_class(target: Target) -> Any:
    """Our class (or function) for a target of `get(op).targets`."""
    return getattr(importlib.import_module(target.module), target.cls)


def op_class(name: str, cls: str) -> Any:
    """Our class (or function) with that name among the op's targets. Raises UnknownName."""
    found = {target.cls: target for target in get(name).targets}
    if cls not in found:
        raise UnknownName(f"class of {name}", cls, found)
    return target_class(found[cls])


def op_of_class(cls: type) -> str | None:
    """The op whose file defines this class, or whose host file lists it; None for any other class."""
    name = cls.__module__.rpartition(".")[2]
    if op_modules().get(name) == cls.__module__:
        return name
    if not any(cls.__module__ in modules for modules in host_modules().values()):
        return None
    listed = importlib.import_module(cls.__module__).TARGETS
    return next((op for op, targets in listed.items() if any(t.cls == cls.__name__ for t in targets)), None)


def baselines(name: str) -> list[Baseline]:
    """The baselines that the op's family lists in its production.py. Only the benchmark calls this."""
    module = f"{OPS_PACKAGE}.{family(name)}.production"
    if not (OPS_ROOT / family(name) / "production.py").is_file():
        return []
    return list(importlib.import_module(module).BASELINES.get(name, ()))


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple. Raises UnknownName for the first that is not an op."""
    names = tuple(names)
    for name in names:
        if not known(name):
            block = (
                "Blocks of a model, MODEL.KIND, exist in our engine with that model." if "." in name else ""
            )
            raise UnknownName("op", name, [*op_modules(), *_added], block)
    return names


def reached(name: str, parts: bool = False) -> set[str]:
    """All ops that run inside the op's modules: those they call by name, transitively.

    parts  include the ops whose modules they are built from
    """

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
