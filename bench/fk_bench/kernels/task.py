"""Task files: one kernel of one model, with its sizes inlined, for `fk-bench kernels --task FILE`.

Only the literal TASK of a file is read; its code is never run. A task chooses an op and calls of it. The
reference, the tolerance and the values come from the op's SPEC alone.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels.core import registry
from fastkernels.core.case import Case
from fastkernels.core.declaration import REQUIRED, Scalar
from fastkernels.core.spec import OpSpec

KEYS = {"op", "model", "mutated", "tolerance", "cases"}
CASE_KEYS = {"name", "dims", "dtype", "weight", "arguments"}


class TaskError(ValueError):
    """A file that is no task, or contradicts the op's declaration. The message names the file and the place."""


@dataclass(frozen=True)
class Task:
    """The op of a task file, the model that its sizes are of, and its cases."""

    op: str
    model: str
    cases: tuple[Case, ...]


def read(file: Path) -> Task:
    """Read a task file without running it. Raises TaskError, UnknownName."""
    found = _literal(file)
    spec = registry.get(_text(file, found, "op"))
    entries = found.get("cases")
    if not isinstance(entries, (list, tuple)) or not entries:
        raise TaskError(f"{file}: TASK has no list of cases")
    cases = tuple(_case(file, spec, entry) for entry in entries)
    names = [c.name for c in cases]
    if again := sorted({n for n in names if names.count(n) > 1}):
        raise TaskError(f"{file}: two cases have the name {again[0]!r}")
    return Task(spec.name, _text(file, found, "model"), cases)


def _literal(file: Path) -> dict[str, Any]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise TaskError(f"--task {file}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise TaskError(f"{file} is not a Python file: {error}") from error
    values = [
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["TASK"]
    ]  # fmt: skip
    if len(values) != 1:
        raise TaskError(
            f"{file} is no task file: its top level must assign TASK once; `fk-bench scaffold` writes some"
        )
    try:
        found = ast.literal_eval(values[0])
    except ValueError as error:
        raise TaskError(f"{file}: TASK is not a literal") from error
    if not isinstance(found, dict) or not set(found) <= KEYS:
        raise TaskError(f"{file}: TASK must be a dict with the keys {', '.join(sorted(KEYS))}")
    return found


def _text(file: Path, found: Mapping[str, Any], key: str) -> str:
    if not isinstance(found.get(key), str):
        raise TaskError(f"{file}: TASK[{key!r}]={found.get(key)!r} is not a text")
    return found[key]


def _case(file: Path, spec: OpSpec, entry: Any) -> Case:
    """A case that the op's declaration allows."""
    name = entry.get("name") if isinstance(entry, dict) else None
    where = f"{file}: case {name!r}"
    if not isinstance(name, str) or not set(entry) <= CASE_KEYS or not isinstance(entry.get("dims"), dict):
        raise TaskError(
            f"{where} must be a dict with a name, dims and the keys {', '.join(sorted(CASE_KEYS))}"
        )
    dtype, weight = entry.get("dtype", "bfloat16"), entry.get("weight", 1.0)
    if dtype not in spec.tolerance:
        raise TaskError(
            f"{where}: {spec.name} is not judged in dtype {dtype!r}, only in {', '.join(spec.tolerance)}"
        )
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight >= 0:
        raise TaskError(f"{where}: weight {weight!r} is not a number from 0 on")
    case = Case(name, entry["dims"], dtype, float(weight), ("model",))
    if spec.arguments:
        _check_dims(where, spec, case)
        _check_arguments(where, spec, case, entry.get("arguments") or {})
    return case


def _check_dims(where: str, spec: OpSpec, case: Case) -> None:
    axes = spec.declaration.axes
    if unknown := sorted(set(case.dims) - set(axes)):
        raise TaskError(f"{where}: {spec.name} has no axis {unknown[0]!r}, only {', '.join(axes)}")
    missing = [n for n, axis in axes.items() if axis.default is REQUIRED and n not in case.dims]
    if missing:
        raise TaskError(f"{where}: dims lack {', '.join(missing)}")
    sizes = spec.declaration.sizes(case.dims, case.dtype)
    for text, rule in zip(spec.constraints, spec.declaration.rules, strict=True):
        if not rule(sizes):
            raise TaskError(f"{where}: {spec.name} needs {text}, but dims are {dict(case.dims)}")


def _check_arguments(where: str, spec: OpSpec, case: Case, stated: Any) -> None:
    """The arguments that the task shows are those that the dims mean."""
    sizes = spec.declaration.sizes(case.dims, case.dtype)
    declared = {a.name: a for a in spec.arguments}
    for name, given in stated.items():
        if name not in declared:
            raise TaskError(f"{where}: {spec.name} has no argument {name!r}, only {', '.join(declared)}")
        argument = declared[name]
        try:
            if isinstance(argument, Scalar):
                want: Any = argument.of(sizes)
                want = str(want) if argument.dtype and want is not None else want
            elif not argument.there(sizes):
                want = None
            else:
                want = (str(argument.torch_dtype(sizes)).removeprefix("torch."), tuple(argument.shape(sizes)))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TaskError(f"{where}: dims {dict(case.dims)} give no {name}: {error}") from error
        got = (given.get("dtype"), tuple(given.get("shape", ()))) if isinstance(given, dict) else given
        if got != want:
            raise TaskError(f"{where}: {name} is {got}, but {spec.name} with these dims takes {want}")
