"""Describe the call that an op makes of a case: arguments, dims, bytes and operations, as compact JSON.

tests/core/recorded_calls.json.xz has the calls of all ops from before they had declarations. As a script: print those
of today, `python tests/support/kernels/recorded_calls.py [OP...]`, for an op whose calls change on purpose.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec

LARGE = 1 << 23  # bytes moved, from which a case is made of tensors without memory
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


def described(value: Any) -> Any:
    """A tensor as 'bfloat16 [32, 4096]', with its strides where it is not contiguous; other values as JSON has them."""
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return text if value.is_contiguous() else f"{text} by {list(value.stride())}"
    if isinstance(value, torch.dtype):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def filled(spec: OpSpec, args: list[Any]) -> list[Any]:
    """All arguments: those that were left out have their defaults."""
    rest = list(inspect.signature(spec.reference).parameters.values())[len(args) :]
    return [*args, *(p.default for p in rest if p.default is not p.empty and p.name != "truncates")]


def small(case: Case) -> Case:
    """The case with few channels: cheap enough to be made with its values."""
    widths = {name: 16 for name in ("hidden", "intermediate", "head_size", "dim") if name in case.dims}
    return dataclasses.replace(case, dims={**case.dims, **widths})


def call_of(spec: OpSpec, case: Case, shrunk: bool = False) -> dict[str, Any]:
    """The call of this case. Where values decide about a large one, its arguments or dims are those of `small`.

    shrunk: the arguments of a large one are those of `small` in any case
    """
    if spec.bytes_moved(case) <= LARGE:
        args = make(spec, case)
        dims = dims_of(spec, args)
    else:
        try:
            with FakeTensorMode():
                args = make(spec, small(case) if shrunk else case)
        except UNKNOWN:
            args = make(spec, small(case))
        try:
            dims = dims_of(spec, args)
        except UNKNOWN:
            dims = dims_of(spec, make(spec, small(case)))
    costs = {"bytes": spec.bytes_moved(case), "flops": spec.flops(case)}
    return json.loads(json.dumps({"args": [described(a) for a in filled(spec, args)], **costs, "dims": dims}))


def make(spec: OpSpec, case: Case) -> list[Any]:
    return spec.inputs(case, "cpu", torch.Generator().manual_seed(0))


def dims_of(spec: OpSpec, args: list[Any]) -> dict[str, Any]:
    found = spec.case_of(args, "")
    return {name: described(value) for name, value in sorted({**found.dims, "dtype": found.dtype}.items())}


def main() -> None:
    calls = {}
    for name in sys.argv[1:] or registry.op_names():
        spec = registry.get(name)
        calls[name] = {case.name: call_of(spec, case) for case in spec.cases}
        print(name, len(calls[name]), file=sys.stderr)
    print(
        "{"
        + ",\n".join(f"{json.dumps(n)}: {json.dumps(c, separators=(',', ':'))}" for n, c in calls.items())
        + "}"
    )


if __name__ == "__main__":
    main()
