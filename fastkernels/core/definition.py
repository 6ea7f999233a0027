"""An op as a Definition of the FlashInfer-Trace schema, and as a table of its arguments."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.case import Case
from fastkernels.core.declaration import REQUIRED, Axis, Scalar, Sizes, Tensor
from fastkernels.core.spec import OpSpec

NUMBERS = {bool: "bool", int: "int64", float: "float32"}
CONSTANT = "constant:"  # the beginning of a tag NAME=JSON: an argument that is a constant of `run`


def definition(spec: OpSpec, case: Case | None = None) -> dict[str, Any]:
    """The op as a FlashInfer-Trace Definition (https://bench.flashinfer.ai), with a self-contained reference.

    Axes that are constants of a model have the values of `case`, by default the op's first case of a model. Options and
    absent tensors of that case are constants of `run`; a tag `constant:NAME=JSON` has each option. The name has all in
    which the op's definitions differ. Raises ValueError for an op without a declaration.
    """
    if spec.ranks:
        raise ValueError(f"{spec.name} is a collective: a definition is of one process")
    if not spec.arguments:
        raise ValueError(f"{spec.name} has no declared arguments")
    case = case or next((c for c in spec.cases if "model" in c.tags), spec.cases[0])
    sizes = spec.declaration.sizes(case.dims, case.dtype)
    found = _Axes(spec, sizes)
    inputs: dict[str, Any] = {}
    given: list[str] = []
    tags = [f"level:{spec.level}"]
    for argument in spec.arguments:
        if isinstance(argument, Scalar):
            value = argument.of(sizes)
            if type(value) not in NUMBERS:
                given.append(repr(value))
                if value is not None:
                    plain = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
                    tags.append(f"{CONSTANT}{argument.name}={json.dumps(plain)}")
                continue
            inputs[argument.name] = {"shape": None, "dtype": NUMBERS[type(value)]}
        elif not argument.there(sizes):
            given.append("None")
            continue
        else:
            inputs[argument.name] = found.described(argument)
        given.append(argument.name)
    outputs = {t.name: found.described(t) for t in spec.outputs if t.there(sizes)}
    outputs |= {
        f"new_{t.name}": found.described(t)
        for t in spec.declaration.tensors.values()
        if t.mutated and t.there(sizes)
    }
    return {
        "name": "_".join([spec.name, *_facts(spec, case, found.axes, set(inputs))]),
        "op_type": spec.name,
        "description": _first_line(registry.op_module(spec.name).__doc__),
        "tags": tags,
        "axes": found.axes,
        "constraints": [*found.constraints, *(c for c in spec.constraints if _names(c) <= set(found.axes))],
        "inputs": inputs,
        "outputs": outputs,
        "reference": _run(spec.reference, list(inputs), given),
    }


def axis_values(spec: OpSpec, case: Case) -> dict[str, int]:
    """The values in a case of the variable axes of its definition: what a Workload states."""
    found = _Axes(spec, spec.declaration.sizes(case.dims, case.dtype))
    for tensor in (*spec.declaration.tensors.values(), *spec.outputs):
        if tensor.there(found.sizes):
            found.described(tensor)
    return {name: value for name, value in found.values.items() if found.axes[name]["type"] == "var"}


def table(spec: OpSpec) -> str:
    """The op's arguments and outputs as a Markdown table: name, axes, dtype, notes."""
    sizes = spec.declaration.sizes(spec.cases[0].dims, spec.cases[0].dtype)
    rows = [("argument", "axes", "dtype", "notes"), ("---",) * 4]
    for argument in (*spec.arguments, *spec.outputs):
        if isinstance(argument, Scalar):
            default = spec.defaults.get(argument.name, inspect.Parameter.empty)
            notes = [] if default is inspect.Parameter.empty else [f"default {default!r}"]
            rows.append(
                (
                    argument.name,
                    "",
                    type(argument.of(sizes)).__name__,
                    "; ".join([*notes, *filter(None, [argument.doc])]),
                )
            )
            continue
        axes = argument.axes
        shapes = [axes] if isinstance(axes, str) else [f"{a} if {c}" if c else a for c, a in axes.items()]
        notes = [f"if {argument.when}"] if argument.when else []
        notes += ["overwritten"] * argument.mutated + ["output"] * (argument in spec.outputs)
        notes += filter(None, [argument.doc])
        text = " or ".join(f"[{', '.join(s.split())}]" for s in shapes)
        rows.append((argument.name, text, argument.dtype or "the case's", "; ".join(notes)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class _Read(Sizes):
    """Sizes that list the axes that are read."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def _computed_from(sizes: Sizes, name: str) -> set[str]:
    """The axes that the default of an axis is computed from."""
    axis = sizes.axes.get(name)
    if axis is None or not callable(axis.default):
        return set()
    read = _Read(sizes.axes, sizes.dims, sizes["dtype"])
    axis.default(read)
    return read.names - {name}


def _varies(spec: OpSpec, sizes: Sizes, name: str) -> bool:
    """Whether an axis, or one that its default is computed from, differs between calls of one model."""
    axis = spec.declaration.axes.get(name, Axis())
    return axis.varies or any(_varies(spec, sizes, n) for n in _computed_from(sizes, name))


class _Axes:
    """The axes of the definition; a size that is an expression gets an axis of its own, and a constraint."""

    def __init__(self, spec: OpSpec, sizes: Sizes):
        self.spec, self.sizes = spec, sizes
        self.axes: dict[str, dict[str, Any]] = {}
        self.values: dict[str, int] = {}
        self.constraints: list[str] = []

    def described(self, tensor: Tensor) -> dict[str, Any]:
        dims = next(dims for condition, dims in tensor.shapes if condition(self.sizes))
        shape: list[str] = []
        for dim in dims:
            if dim.star:
                name = str(dim.expr.name)
                shape += [self._add(f"{name}_{i}", n, True) for i, n in enumerate(self.sizes[name])]
            elif not dim.optional or any(n in self.sizes.dims for n in dim.expr.names):
                varies = any(_varies(self.spec, self.sizes, n) for n in dim.expr.names)
                name = dim.expr.name or re.sub(r"\W+", "_", f"size_{dim.expr.text}").strip("_")
                shape.append(self._add(name, dim.expr(self.sizes), varies))
                rule = f"{name} == {dim.expr.text}"
                if (
                    dim.expr.name is None
                    and dim.expr.names <= set(self.axes)
                    and rule not in self.constraints
                ):
                    self.constraints.append(rule)
        return {"shape": shape, "dtype": str(tensor.torch_dtype(self.sizes)).removeprefix("torch.")}

    def _add(self, name: str, value: int, varies: bool) -> str:
        self.axes[name] = {"type": "var"} if varies else {"type": "const", "value": value}
        self.values[name] = value
        return name


def _facts(spec: OpSpec, case: Case, axes: dict[str, dict[str, Any]], inputs: set[str]) -> Iterator[str]:
    """The parts of a definition's name after the op: constant sizes, options, and a dtype other than bfloat16."""
    declared = spec.declaration.axes
    tensors = [a for a in (*spec.arguments, *spec.outputs) if isinstance(a, Tensor)]
    scalars = [a for a in spec.arguments if isinstance(a, Scalar)]
    conditions = {name for t in tensors for condition, _ in t.shapes for name in condition.names}
    passed = {a.axis for a in scalars if a.name in inputs} - conditions
    used = {name for t in tensors for e in t.expressions for name in e.names} | {t.dtype for t in tensors}
    used |= {a.axis for a in scalars if not a.value}
    sizes = Sizes(declared, case.dims, case.dtype)
    used |= {other for name in used for other in _computed_from(sizes, name)}
    # An argument is a part of the name if a constant size follows from it
    fixed = {name for t in tensors for _, dims in t.shapes for d in dims for name in d.expr.names
             if not any(_varies(spec, sizes, n) for n in d.expr.names)}  # fmt: skip
    fixed |= {other for name in fixed for other in _computed_from(sizes, name)}

    def is_usual(name: str, value: Any) -> bool:
        others = Sizes(declared, {k: v for k, v in case.dims.items() if k != name}, case.dtype)
        return declared[name].default is not REQUIRED and _plain(value) == _plain(others[name])

    for name, axis in axes.items():
        if axis["type"] == "const" and name in declared and not is_usual(name, axis["value"]):
            yield f"{name}{axis['value']}"
    for name in (n for n in declared if n in case.dims and n in used):  # others are about memory layout
        value = case.dims[name]
        if f"{name}_1" in axes:  # the number of leading sizes
            yield f"{name}{len(value)}d"
            continue
        optional = name in spec.declaration.optional and axes.get(name, {}).get("type") == "var"
        if optional or (name in passed and value is not None and declared[name].default is None):
            yield name
        elif not (name in axes or name in passed - fixed or declared[name].varies or is_usual(name, value)):
            yield _word(name, value)
    if case.dtype != "bfloat16":
        yield case.dtype


def _plain(value: Any) -> Any:
    """The value, with a list, as JSON has it, as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _word(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return name if value else f"no_{name}"
    text = "x".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
    return f"{name}_{text}" if isinstance(value, str) else f"{name}{text}"


def _names(expression: str) -> set[str]:
    return {n.id for n in ast.walk(ast.parse(expression)) if isinstance(n, ast.Name)}


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0]


def _run(reference: Callable[..., Any], inputs: list[str], given: list[str]) -> str:
    """Python source that defines `run(inputs)`: the reference and all that it uses."""
    call = f"{reference.__name__}({', '.join(given)})"
    run = f"def run({', '.join(inputs)}):\n    found = {call}\n"
    run += "    found = [t for t in found if t is not None] if isinstance(found, tuple) else [found]\n"
    run += "    return found[0] if len(found) == 1 else tuple(found)\n"
    imports, parts = standalone(reference)
    lines = "from __future__ import annotations\n\n" + "\n".join(imports)
    return "\n\n\n".join([lines, *parts, run])


@cache
def standalone(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(lines of import, definitions) of a function and all of fastkernels that it uses; its own definition is last."""
    imports: dict[str, None] = {"import torch": None}
    parts: dict[str, str] = {}
    _collect(function, imports, parts)
    return tuple(sorted(imports)), tuple(parts.values())


def _collect(function: Any, imports: dict[str, None], parts: dict[str, str], own: str = "") -> None:
    """Add the source of a function, after that of everything global that it uses. own: the name that it gets."""
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    used = [
        n.id
        for child in (*tree.body, *tree.args.defaults)
        for n in ast.walk(child)
        if isinstance(n, ast.Name)
    ]
    for name in dict.fromkeys(used):
        if name not in function.__globals__ or name in parts:
            continue
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            plain = value.__name__ == name
            imports[f"import {value.__name__}" if plain else f"import {value.__name__} as {name}"] = None
        elif isinstance(value, FunctionType) and value.__module__.startswith("fastkernels."):
            _collect(value, imports, parts, name)  # which may be another one than in its module
        elif isinstance(value, (bool, int, float, str, torch.dtype, tuple, dict)):
            parts[name] = f"{name} = {value!r}"
        elif getattr(value, "__module__", None):
            imports[f"from {value.__module__} import {value.__name__} as {name}"] = None
    tree.returns = None
    for argument in (*tree.args.args, *tree.args.kwonlyargs):
        argument.annotation = None
    tree.name = own or tree.name
    parts[tree.name] = ast.unparse(tree)
