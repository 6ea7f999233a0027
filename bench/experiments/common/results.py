"""Shared by the GPU checks: float64 arguments, outputs in the reference's order, and rows written as they are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fk_bench.core import machine as machine_module
from fk_bench.core.rows import Row, Status, Subject, append
from fk_bench.kernels.judge.memory.slots import written_arguments

from fastkernels.core.spec import Case, OpSpec


def mapped(args: list[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    return [change(a) if isinstance(a, torch.Tensor) else a for a in args]


def precise(args: list[Any]) -> list[Any]:
    """Copy the arguments to float64, or to float32 if float64 is too large."""
    size = sum(a.numel() for a in args if isinstance(a, torch.Tensor))
    exact = torch.float64 if size < 1 << 24 else torch.float32
    return mapped(args, lambda t: t.to(exact) if t.is_floating_point() else t.clone())


def outputs(spec: OpSpec, args: list[Any]) -> list[torch.Tensor]:
    """Return the reference's outputs, then the new values of mutated arguments."""
    found = spec.reference(*args)
    found = found if isinstance(found, (tuple, list)) else (found,)
    return [t for t in found if isinstance(t, torch.Tensor)]


def produced(spec: OpSpec, args: list[Any], result: Any) -> list[torch.Tensor]:
    """Return the op's outputs and mutated arguments in the reference's order."""
    results = [] if result is None else list(result) if isinstance(result, (tuple, list)) else [result]
    changed = [
        args[i] for i in written_arguments(spec) if i < len(args) and isinstance(args[i], torch.Tensor)
    ]
    return [*results, *changed]


def check(spec: OpSpec, case: Case, provider: Any, args: list[Any], want: list[torch.Tensor]) -> str:
    """Return '' if the outputs are right, else the problem."""
    used = mapped(args, torch.clone)
    got = produced(spec, used, provider.fn(*used))
    torch.cuda.synchronize()
    if len(got) != len(want):
        return f"{len(got)} outputs, the reference has {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if not g.is_floating_point():
            if not torch.equal(g, w.to(g.dtype)):
                return f"output {i} differs"
            continue
        limit = spec.tolerance_for(case, g.dtype)
        gap = (g.double() - w.double()).abs() - limit.rtol * w.double().abs()
        if not bool((gap <= limit.atol).all()):
            return f"output {i}: error {(g.double() - w.double()).abs().max().item():.3g} over {limit}"
    return ""


def described(case: Case) -> dict[str, Any]:
    """Return a case as plain JSON."""
    dims = {k: v if isinstance(v, (int, float, bool)) else str(v) for k, v in case.dims.items()}
    return {"name": case.name, **dims, "dtype": case.dtype}


class Results:
    """Writes rows to the file as they are made; `wrong` counts the wrong ones."""

    def __init__(self, command: str, out: Path, baseline: str | None = None) -> None:
        self.command, self.out, self.baseline, self.wrong = command, out, baseline, 0
        self.machine, self.commit = machine_module.machine(), machine_module.commit()
        self.versions = {"torch": str(torch.__version__)}

    def add(
        self, op: str, provider: str, case: dict[str, Any], problem: str = "", status: Status | None = None,
        **metrics: float,
    ) -> None:  # fmt: skip
        """Write a row. The default status is OK, or WRONG with a problem."""
        status = status or (Status.WRONG if problem else Status.OK)
        self.wrong += status in (Status.WRONG, Status.FAILED)
        row = Row(
            run_id=self.command, command=self.command, machine=self.machine, versions=self.versions,
            commit=self.commit, status=status, reason=problem, subject=Subject(op=op, provider=provider), case=case,
            metrics=metrics, baseline=self.baseline,
        )  # fmt: skip
        append(self.out, [row])

    def say(
        self, op: str, provider: str, case: dict[str, Any], problem: str = "", status: Status | None = None,
        **metrics: float,
    ) -> None:  # fmt: skip
        """Write a row and print it."""
        self.add(op, provider, case, problem, status, **metrics)
        where = " ".join(str(v) for v in case.values())[:60]
        values = " ".join(f"{k}={v:.4g}" for k, v in metrics.items())
        said = "ok" if not problem else f"{(status or Status.WRONG).value.upper()} {problem}"
        print(f"{op:<18} {where:<24} {provider:<12} {said} {values}", flush=True)
