"""Run ops on their cases and compare with the float64 reference.

As a script: interpret the Triton kernels of cases OP-CASE, of all odd ones without arguments.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.dispatch import Op
from fastkernels.core.spec import Case, OpSpec


def odd_cases(names: Iterable[str] | None = None) -> list[tuple[str, Case]]:
    """(op name, case) for every 'odd' case of every op that is a functional op."""
    specs = [registry.get(n) for n in names or registry.op_names()]
    return [(s.name, c) for s in specs if s.op is not None for c in s.cases if "odd" in c.tags]


def make_args(spec: OpSpec, case: Case, device: str = "cpu", seed: int = 0) -> list[Any]:
    return spec.inputs(case, device, torch.Generator(device).manual_seed(seed))


def over(cases: Mapping[str, list[Case]]) -> Callable[[Callable[[str, Case], None]], Callable[[str], None]]:
    """Make a test of one op and case a test of an op, which takes its cases in turn; an error names its case.

    A test for each of the 1,000 cases costs more in pytest than in most ops.
    """

    def of_op(test: Callable[[str, Case], None]) -> Callable[[str], None]:
        def cases_of(name: str) -> None:
            assert cases[name], f"{name} has no case"
            for case in cases[name]:
                try:
                    test(name, case)
                except Exception as error:
                    error.add_note(f"case {case.name} of {name}")
                    raise

        cases_of.__doc__ = test.__doc__
        return cases_of

    return of_op


def mutated(op: Op) -> list[int]:
    """Positions of the arguments that the op writes to."""
    arguments = enumerate(op.overload._schema.arguments)
    return [i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def call(op: Op, fn: Callable[..., Any], args: list[Any]) -> list[torch.Tensor]:
    """fn's outputs, with the mutated arguments after them."""
    out = fn(*args)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    return [t for t in (*outs, *(args[i] for i in mutated(op))) if t is not None]


def oracle(spec: OpSpec, args: list[Any]) -> list[torch.Tensor]:
    """The reference in float64."""
    out = spec.reference(*[_double(a) for a in args])
    return [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if t is not None]


def _double(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    return value


def mismatch(spec: OpSpec, case: Case, got: list[torch.Tensor], want: list[torch.Tensor]) -> str | None:
    """None if every output is within the op's tolerance (OpSpec.tolerance_for), else the first difference."""
    if len(got) != len(want):
        return f"{len(got)} outputs, the reference has {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape:
            return f"output {i} has shape {tuple(a.shape)}, the reference {tuple(b.shape)}"
        tolerance = spec.tolerance_for(case, a.dtype)
        error = (a.double() - b.double()).abs()
        equal = a.double() == b.double()  # infinities of a mask
        bad = ~(equal | (error <= tolerance.atol + tolerance.rtol * b.double().abs()))
        if bad.any():
            return (
                f"output {i}: {int(bad.sum())} of {bad.numel()} values wrong, largest error {error.max():.3g}"
            )
    return None


def poison() -> None:
    """Make torch.empty return NaN from here on, which reveals unwritten outputs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def interpreted(name: str, case: Case) -> str | None:
    """Check the op's Triton provider on the CPU under TRITON_INTERPRET=1: None if correct, else the difference."""
    spec = registry.get(name)
    provider = next((p for p in spec.op.providers if p.name == "triton"), None)
    if provider is None:
        return None
    if (
        case.dtype == "bfloat16"
    ):  # the interpreter truncates bfloat16, and multiplies its matrices as integers
        case = dataclasses.replace(case, dtype="float16")
    args = make_args(spec, case)
    reason = provider.supports(*args) if provider.supports is not None else None
    if reason is not None:
        return f"not supported: {reason}"
    want = oracle(spec, args)
    return mismatch(spec, case, call(spec.op, provider.fn, args), want)


def main(chosen: list[str]) -> None:
    poison()
    for name, case in odd_cases():
        if chosen and f"{name}-{case.name}" not in chosen:
            continue
        try:
            problem = interpreted(name, case)
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps({"op": name, "case": case.name, "problem": problem}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
