"""An op as a Definition of the FlashInfer-Trace schema, and as a table of its arguments."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Scalar, Sizes, Tensor
from fastkernels.core.spec import OpSpec

NUMBERS = {bool: "bool", int: "int64", float: "float32"}


def definition(spec: OpSpec, case: Case | None = None) -> dict[str, Any]:
    """The op as a FlashInfer-Trace Definition (https://bench.flashinfer.ai), with a self-contained reference.

    Axes that are constants of a model have the values of `case`, by default the op's first case of a model. Options and
    absent tensors of that case are constants of `run`. Raises ValueError for an op without a declaration.
    """
    if not spec.arguments:
        raise ValueError(f"{spec.name} has no declared arguments")
    case = case or next((c for c in spec.cases if "model" in c.tags), spec.cases[0])
    sizes = spec.declaration.sizes(case.dims, case.dtype)
    found = _Axes(spec, sizes)
    inputs: dict[str, Any] = {}
    given: list[str] = []
    for argument in spec.arguments:
        if isinstance(argument, Scalar):
            value = argument.of(sizes)
            if type(value) not in NUMBERS:
                given.append(repr(value))
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
    constants = {name: axis["value"] for name, axis in found.axes.items() if axis["type"] == "const"}
    shown = "_".join(f"{name}{value}" for name, value in constants.items() if name in case.dims)
    return {
        "name": f"{spec.name}_{shown}" if shown else spec.name,
        "op_type": spec.name,
        "description": _first_line(registry.op_module(spec.name).__doc__),
        "tags": [f"level:{spec.level}"],
        "axes": found.axes,
        "constraints": [*found.constraints, *(c for c in spec.constraints if _names(c) <= set(found.axes))],
        "inputs": inputs,
        "outputs": outputs,
        "reference": _run(spec.reference, list(inputs), given),
    }


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


class _Axes:
    """The axes of the definition; a size that is an expression gets an axis of its own, and a constraint."""

    def __init__(self, spec: OpSpec, sizes: Sizes):
        self.spec, self.sizes = spec, sizes
        self.axes: dict[str, dict[str, Any]] = {}
        self.constraints: list[str] = []

    def described(self, tensor: Tensor) -> dict[str, Any]:
        dims = next(dims for condition, dims in tensor.shapes if condition(self.sizes))
        shape: list[str] = []
        for dim in dims:
            if dim.star:
                name = str(dim.expr.name)
                shape += [self._add(f"{name}_{i}", n, True) for i, n in enumerate(self.sizes[name])]
            elif not dim.optional or any(n in self.sizes.dims for n in dim.expr.names):
                varies = any(self.spec.declaration.axes.get(n, Axis()).varies for n in dim.expr.names)
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
        return name


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


def standalone(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """(lines of import, definitions) of a function and all of fastkernels that it uses; its own definition is last."""
    imports: dict[str, None] = {"import torch": None}
    parts: dict[str, str] = {}
    _collect(function, imports, parts)
    return sorted(imports), list(parts.values())


def _collect(function: Any, imports: dict[str, None], parts: dict[str, str]) -> None:
    """Add the source of a function, after that of everything global that it uses."""
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
            own = value.__name__.rpartition(".")[2] == name and "." not in value.__name__
            imports[f"import {value.__name__}" if own else f"import {value.__name__} as {name}"] = None
        elif isinstance(value, FunctionType) and value.__module__.startswith("fastkernels."):
            _collect(value, imports, parts)
            if value.__name__ != name:
                parts[name] = f"{name} = {value.__name__}"
        elif isinstance(value, (bool, int, float, str, torch.dtype, tuple, dict)):
            parts[name] = f"{name} = {value!r}"
        elif getattr(value, "__module__", None):
            imports[f"from {value.__module__} import {value.__name__} as {name}"] = None
    tree.returns = None
    for argument in (*tree.args.args, *tree.args.kwonlyargs):
        argument.annotation = None
    parts[function.__name__] = ast.unparse(tree)
