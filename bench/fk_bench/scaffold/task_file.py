"""The text of a task file: one op at the sizes of one model, which runs without fastkernels."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.case import Case
from fastkernels.core.declaration import Call, Scalar, Tensor
from fastkernels.core.definition import standalone
from fastkernels.core.spec import OpSpec
from fk_bench.info.stub_source import WIDTH, Stub

FEW = 64  # integers that are written out
SAMPLE_ROWS = 64  # of a tensor, to see how its values are distributed

HEAD = '''"""Task: {op} at the sizes of {model}.

{about}

Write a faster {op}: a file {op}.py that defines the function below, with the same arguments and results.

    python {file}                     # the function below against the reference
    python {file} MINE/{op}.py        # your file against the reference: a quick check
    fk-bench kernels --task {file} --candidate MINE/{op}.py     # the judge: correctness and speed

The judge takes the reference, the tolerance and the values from the registered op, not from this file. The calls are in
TASK; their weights say how often a step of the model makes each.
"""

from __future__ import annotations

import math
import runpy
import sys

{imports}

TASK = {task}


{reference}


{function}
'''

RUNNER = '''

def task_make(argument, device, generator):
    """One argument of a case: a random tensor, or the value itself."""
    if not isinstance(argument, dict):
        return getattr(torch, argument[6:]) if str(argument).startswith("torch.") else argument
    dtype, shape = getattr(torch, argument["dtype"]), argument["shape"]
    if "values" in argument:
        made = torch.tensor(argument["values"], dtype=dtype).reshape(shape)
    elif "distinct" in argument:
        count = math.prod(shape)
        order = torch.randperm(max(argument["high"] + 1, count), generator=generator)[:count]
        made = order.reshape(shape).to(dtype)
    elif "std" in argument:
        made = (torch.randn(shape, generator=generator) * argument["std"] + argument["mean"]).to(dtype)
    else:
        low, high = argument["low"], argument["high"]
        if dtype.is_floating_point:
            made = (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype)
        else:
            made = torch.randint(int(low), int(high) + 1, shape, generator=generator).to(dtype)
    return made.to(device)


def task_flat(found):
    found = found if isinstance(found, (tuple, list)) else (found,)
    return [t for t in found if t is not None]


def task_check(function, case, device):
    """Compare one call with the reference; returns what is wrong, or an empty text."""
    generator = torch.Generator().manual_seed(0)
    args = {name: task_make(a, device, generator) for name, a in case["arguments"].items()}
    copies = {name: a.clone() if isinstance(a, torch.Tensor) else a for name, a in args.items()}
    expected = task_flat(reference(**copies))
    got = task_flat(function(*args.values())) + [args[name] for name in TASK["mutated"] if args[name] is not None]
    if len(got) != len(expected):
        return f"{len(got)} results, expected {len(expected)}"
    atol, rtol = TASK["tolerance"][case["dtype"]]
    for i, (a, b) in enumerate(zip(got, expected)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i} is {a.dtype} {list(a.shape)}, expected {b.dtype} {list(b.shape)}"
        error = (a.double() - b.double()).abs()
        error[a == b] = 0  # infinities
        if not bool((error <= atol + rtol * b.double().abs()).all()):
            return f"result {i} differs by up to {float(error.max()):.3g}"
    return ""


def task_size(case):
    return max([math.prod(a["shape"]) for a in case["arguments"].values() if isinstance(a, dict)], default=0)


def task_main(path=""):
    function = runpy.run_path(path)[TASK["op"]] if path else globals()[TASK["op"]]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failed = 0
    for case in TASK["cases"]:
        if device == "cpu" and task_size(case) > 1 << 24:
            print(f"{case['name']:<40} skipped: too large for a CPU")
            continue
        problem = task_check(function, case, device)
        failed += bool(problem)
        print(f"{case['name']:<40} {'WRONG: ' + problem if problem else 'ok'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(task_main(*sys.argv[1:2]))
'''


class NoTask(ValueError):
    """An op whose call cannot be written as a standalone file; the message says why."""


def text(op: str, model: str, cases: Sequence[Case], file: str) -> str:
    """The whole task file of an op. Raises NoTask."""
    spec = registry.get(op)
    if spec.op is None or not spec.arguments:
        raise NoTask(f"{op} has no function with declared arguments")
    imports, parts = standalone(spec.reference)
    wide = [line for line in imports if "fastkernels" in line]
    if wide:
        raise NoTask(f"the reference of {op} needs {wide[0].removeprefix('from ').partition(' import')[0]}")
    about = (registry.op_module(op).__doc__ or op).strip().partition("\n\n")[0]
    shown = dataclasses.replace(spec, cases=tuple(_tagged(c) for c in cases))
    function = Stub(shown, registry.op_module(op)).function().replace("ours_op.reference(", "reference(")
    reference = "\n\n\n".join(parts)
    if spec.reference.__name__ != "reference":
        reference += f"\n\n\nreference = {spec.reference.__name__}"
    head = HEAD.format(
        op=op, model=model, file=file, about=textwrap.fill(" ".join(about.split()), WIDTH), imports="\n".join(imports),
        task=_task(spec, model, cases), reference=reference, function=function,
    )  # fmt: skip
    return head + RUNNER


def _tagged(case: Case) -> Case:
    return dataclasses.replace(case, tags=("model", "odd"))


def _task(spec: OpSpec, model: str, cases: Iterable[Case]) -> str:
    mutated = [a.name for a in spec.arguments if isinstance(a, Tensor) and a.mutated]
    tolerance = {k: (t.atol, t.rtol) for k, t in spec.tolerance.items()}

    def q(value: Any) -> str:
        return repr(value).replace("'", '"')

    lines = [
        "{", f'    "op": "{spec.name}",', f'    "model": "{model}",', f'    "mutated": {q(mutated)},',
        f'    "tolerance": {q(tolerance)},', '    "cases": [',
    ]  # fmt: skip
    seen: dict[Any, dict[str, Any]] = {}
    for case in cases:
        lines += [
            "        {",
            f'            "name": "{case.name}", "dtype": "{case.dtype}", "weight": {case.weight!r},',
            f'            "dims": {q(dict(case.dims))},',
            '            "arguments": {',
        ]
        for name, value in _arguments(spec, case, seen).items():
            lines.append(f"                {q(name)}: {q(value)},")
        lines += ["            },", "        },"]
    return "\n".join([*lines, "    ],", "}"])


def _arguments(spec: OpSpec, case: Case, seen: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The arguments of a case by name: a number, None, or a tensor's dtype, shape and distribution."""
    sizes = spec.declaration.sizes(case.dims, case.dtype)
    call = Call(spec.declaration, sizes, "cpu", torch.Generator().manual_seed(0))
    given = dict(spec.declaration.values(call)) if spec.declaration.values is not None else {}
    found: dict[str, Any] = {}
    for argument in spec.arguments:
        if isinstance(argument, Scalar):
            value = argument.of(sizes)
            found[argument.name] = str(value) if argument.dtype and value is not None else value
        elif not argument.there(sizes):
            found[argument.name] = None
        else:
            shape, dtype = argument.shape(sizes), argument.torch_dtype(sizes)
            about = {"dtype": str(dtype).removeprefix("torch."), "shape": tuple(shape)}
            found[argument.name] = about | _values(argument, call, shape, dtype, given, seen)
    return found


def _values(
    argument: Tensor,
    call: Call,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    given: dict[str, Any],
    seen: dict[Any, Any],
) -> dict[str, Any]:
    """How the values of a tensor are drawn in a quick check."""
    if argument.name in given:
        return _like(given[argument.name])
    if argument.values is None:
        return {"mean": float(argument.mean), "std": float(argument.std)}
    if not dtype.is_floating_point:
        return _like(argument.values(call, shape, dtype))
    key = argument.name, shape[-1:], dtype
    if key not in seen:
        some = (*(min(n, SAMPLE_ROWS) for n in shape[:-1]), *shape[-1:])
        seen[key] = _like(argument.values(call, some, dtype))
    return seen[key]


def _like(t: torch.Tensor) -> dict[str, Any]:
    """The distribution of a tensor's values, as entries of an argument."""
    if not t.dtype.is_floating_point:
        if t.numel() <= FEW:
            return {"values": t.reshape(-1).tolist()}
        ends = {"low": int(t.min()), "high": int(t.max())}
        distinct = ends["low"] >= 0 and t.unique().numel() == t.numel()
        return {**ends, **({"distinct": True} if distinct else {})}
    wide = t.float()
    low, high, std = float(wide.min()), float(wide.max()), float(wide.std()) if wide.numel() > 1 else 0.0
    if low >= 0 or high <= 0 or std == 0.0:  # of one sign: a scale, a probability, a temperature
        return {"low": round(low, 6), "high": round(high, 6)}
    return {"mean": round(float(wide.mean()), 4), "std": float(f"{std:.4g}")}
