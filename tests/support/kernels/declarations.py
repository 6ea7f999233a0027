"""Find where an op's declaration contradicts its reference or the schema of its functional op."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from support.kernels.op_cases import make_args

from fastkernels.core.case import Case
from fastkernels.core.declaration import Tensor
from fastkernels.core.spec import OpSpec


def contradictions(spec: OpSpec) -> list[str]:
    """Each names the op and the argument."""
    found = _signature(spec)
    if not found:
        for case in (c for c in spec.cases if "odd" in c.tags):
            found += _call(spec, case)
    return list(dict.fromkeys(found))


def _signature(spec: OpSpec) -> list[str]:
    """Names, presence and mutation, against the reference's parameters and the op's schema."""
    found = []
    parameters = list(inspect.signature(spec.reference).parameters.values())
    names = [a.name for a in spec.arguments]
    for i, name in enumerate(names):
        if i >= len(parameters) or parameters[i].name != name:
            given = parameters[i].name if i < len(parameters) else "nothing"
            found.append(
                f"{spec.name}: argument {name} is declared at position {i}, the reference has {given} there"
            )
    for parameter in parameters[len(names) :]:
        if parameter.default is parameter.empty:
            found.append(f"{spec.name}: argument {parameter.name} of the reference is not declared")
    if spec.op is None:
        return found
    schema = spec.op.overload._schema.arguments
    if len(schema) != len(names):
        found.append(f"{spec.name}: {len(names)} arguments are declared, the schema has {len(schema)}")
    for declared, argument in zip(spec.arguments, schema, strict=False):
        where = f"{spec.name}: argument {declared.name}"
        kind = str(argument.type)
        if declared.name != argument.name:
            found.append(f"{where} is called {argument.name} in the schema")
        if isinstance(declared, Tensor) != ("Tensor" in kind):
            found.append(f"{where} is declared as a {type(declared).__name__}, the schema has {kind}")
            continue
        mutated = argument.alias_info is not None and argument.alias_info.is_write
        if isinstance(declared, Tensor) and declared.mutated != mutated:
            found.append(f"{where}: mutated={declared.mutated} is declared, the schema has {mutated}")
        if isinstance(declared, Tensor) and declared.when and "Optional" not in kind:
            found.append(f"{where} is declared as optional, the schema has {kind}")
    return found


def _call(spec: OpSpec, case: Case) -> list[str]:
    """Axes and dtypes of outputs, and which arguments change, in one call of the reference."""
    declaration, sizes = spec.declaration, spec.declaration.sizes(case.dims, case.dtype)
    where = f"{spec.name}: case {case.name}"
    found = [f"{where}: constraint {r.text} does not hold" for r in declaration.rules if not r(sizes)]
    unknown = set(case.dims) - set(declaration.axes)
    found += [f"{where}: {name} is no axis of the op" for name in sorted(unknown)]
    try:
        args = make_args(spec, case)
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        out = spec.reference(*args)
    except Exception as error:
        shapes = ", ".join(
            f"{t.name} {list(t.shape(sizes))} {t.torch_dtype(sizes)}"
            for t in declaration.tensors.values()
            if t.there(sizes)
        )
        return [*found, f"{where}: the reference rejects {shapes}: {type(error).__name__}: {error}"]
    for argument, new, old in zip(spec.arguments, args, before, strict=True):
        if isinstance(new, torch.Tensor) and not torch.equal(_bits(new), _bits(old)):
            found.append(f"{where}: the reference changes argument {argument.name}")
    mutated = [t for t in declaration.tensors.values() if t.mutated]
    expected = [*spec.outputs, *mutated]
    values: list[Any] = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(values) != len(expected):
        names = ", ".join(t.name for t in expected)
        return [*found, f"{where}: the reference returns {len(values)} values, declared are {names}"]
    for tensor, value in zip(expected, values, strict=True):
        what = f"new value of argument {tensor.name}" if tensor in mutated else f"output {tensor.name}"
        if (value is not None) != tensor.there(sizes):
            found.append(f"{where}: {what} is {'there' if value is not None else 'None'}, unlike declared")
        elif value is not None:
            want = list(tensor.shape(sizes)), tensor.torch_dtype(sizes)
            if (list(value.shape), value.dtype) != want:
                found.append(
                    f"{where}: {what} is {value.dtype} {list(value.shape)}, declared as {want[1]} {want[0]}"
                )
    return found


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself."""
    return value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
