"""Whether outputs are correct: compared with the reference in float64, and with the errors of honest kernels."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastkernels.core.spec import Case, OpSpec
from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.slots import split

LARGE, LARGE_FLOPS = 1 << 27, 10**11  # elements, operations; beyond, the oracle is computed in float32
SPARSE = (
    1 << 20
)  # elements, from which on values that are exact on both sides are left out if they are the most
# A candidate's error may exceed the reference's worst error by so much, and its rms the larger of the reference's and
# the baseline's.
FACTOR = 2.0
FEW = 4.0  # the mean square of honest errors may vary by this over the square root of their number


@dataclass
class Expected:
    """Expected outputs and new values of written arguments, as float64 (or exact integers).

    run     computes the same by the reference in the arguments' own dtypes
    dtypes  of the outputs and written arguments; None: unknown, so that `native` is always needed
    """

    outputs: list[torch.Tensor]
    written: dict[int, torch.Tensor]
    run: Callable[[], list[torch.Tensor]]
    dtypes: Sequence[torch.dtype] | None = None
    needed: bool = False  # whether `native` was computed

    def all(self) -> list[torch.Tensor]:
        return [*self.outputs, *self.written.values()]

    @cached_property
    def native(self) -> list[torch.Tensor]:
        """Results of the reference in the arguments' own dtypes: the error of an honest kernel."""
        self.needed = True
        return self.run()

    def rounded(self) -> list[torch.Tensor]:
        """The values rounded to their dtypes: no kernel's error is smaller."""
        return [t.to(dtype) for t, dtype in zip(self.all(), self.dtypes or (), strict=True)]


@PHASES.of("oracle")
def expect(
    spec: OpSpec, case: Case, args: list[Any], mode: str, dtypes: Sequence[torch.dtype] | None = None
) -> Expected:
    """Run the oracle on copies of the arguments, which must not change while the result is in use.

    dtypes  of the call's outputs; with them `compare` needs the reference in these dtypes only for larger errors
    """
    size = sum(t.numel() for t in layout.tensors(args))
    large = size >= LARGE or spec.flops(case) >= LARGE_FLOPS
    wide = torch.float32 if large else torch.float64
    precise = layout.mapped(args, lambda t: t.to(wide, copy=True) if t.is_floating_point() else t.clone())
    outputs, written = split(spec, spec.reference(*precise), args, mode)

    @PHASES.of("oracle")
    def native() -> list[torch.Tensor]:
        out, changed = split(spec, spec.reference(*layout.mapped(args, torch.clone)), args, mode)
        return [*out, *changed.values()]

    every = None if dtypes is None else [*dtypes, *(args[i].dtype for i in written)]
    return Expected(outputs, written, native, every)


@dataclass
class Errors:
    """How far outputs are from the oracle; `problem` is empty if they are correct."""

    problem: str = ""
    rms: float = 0.0  # of the error, relative to the rms of the expected values; the largest of all outputs
    max: float = 0.0  # largest |error| of all outputs

    def worse(self, other: Errors) -> Errors:
        return Errors(self.problem or other.problem, max(self.rms, other.rms), max(self.max, other.max))


@PHASES.of("compare")
def compare(
    spec: OpSpec,
    case: Case,
    got: list[torch.Tensor],
    want: Expected,
    allowed: float | None = None,
    unchecked: Container[int] = (),
) -> Errors:
    """Compare outputs (and written arguments behind them) with the oracle.

    unchecked  positions that are not compared (a baseline whose correct outputs may differ)
    allowed    the baseline's own rms error, which a candidate may exceed by FACTOR; None: only the reference's counts

    Where the dtypes are known, the error of an honest kernel is first taken to be that of rounding. It has no smaller
    one, so what passes then would pass in any case; all else is compared with the reference in the same dtypes.
    """

    def all_of(native: list[torch.Tensor], finite: bool) -> Errors:
        total = Errors()
        for i, (a, b, n) in enumerate(zip(got, want.all(), native, strict=True)):
            if i not in unchecked:
                label = f"output {i}" if i < len(want.outputs) else "a written argument"
                total = total.worse(_compare(spec, case, label, a, b, n, allowed, finite))
        return total

    if want.dtypes is not None:
        first = all_of(want.rounded(), True)
        if not first.problem:
            return first
    return all_of(want.native, False)


def _compare(
    spec: OpSpec,
    case: Case,
    label: str,
    got: torch.Tensor,
    want: torch.Tensor,
    native: torch.Tensor,
    allowed: float | None,
    finite_only: bool = False,
) -> Errors:
    """Compare one tensor. finite_only: infinite values and NaN in `native` are a problem."""
    if got.shape != want.shape:
        return Errors(f"{label} has shape {tuple(got.shape)} instead of {tuple(want.shape)}")
    if got.dtype != native.dtype:
        return Errors(f"{label} is {got.dtype} instead of {native.dtype}")
    if not got.numel():
        return Errors()
    if not got.is_floating_point():
        wrong = int((got != want).sum())
        return Errors(
            f"{label}: {wrong} of {got.numel()} values differ, but all must be exact" if wrong else ""
        )
    tolerance = spec.tolerance_for(case, got.dtype)
    count, wide = got.numel(), torch.float64 if got.numel() < LARGE else torch.float32
    w = want.to(wide)
    # Each number that is read waits for a GPU, so they are read together.
    scale = torch.where(w.isfinite(), w, 0.0).pow(2).mean().sqrt()
    g, n = got.to(wide), native.to(wide)
    if count >= SPARSE:  # perhaps a cache, of which little is written
        inexact = (g != w) | (n != w)
        many = int(inexact.sum())
        if not many:
            return Errors()
        if 4 * many < count:
            g, w, n = g[inexact], w[inexact], n[inexact]
    # Values beyond the dtype's range are infinite, also in the reference.
    same = (g == w) | (g.isnan() & (w.isnan() | n.isnan())) | (n.isinf() & (g == n))
    error = torch.where(same, 0.0, (g - w).abs())
    own = torch.where((n == w) | (n.isnan() & w.isnan()), 0.0, (n - w).abs())
    finite = w.isfinite()
    bound = tolerance.atol + tolerance.rtol * torch.where(finite, w.abs(), 0.0)
    factor = FACTOR * spec.level  # parts of a module round their results
    bound = torch.maximum(bound, factor * torch.where(own.isfinite(), own, 0.0).max())
    bad = ~same & ~(error <= bound)
    known, known_own = (torch.where(e.isfinite(), e, 0.0) for e in (error, own))
    unwritten = g.isnan() & ~w.isnan()
    if finite_only:
        bad = bad | ~n.isfinite()
    found = (scale, known.max(), bad.sum(), unwritten.sum(), known.pow(2).sum(), known_own.pow(2).sum())
    scale_s, largest, wrong_values, nan, squares, squares_own = torch.stack(
        [f.to(wide) for f in found]
    ).tolist()
    if wrong_values:
        why = f"{nan:.0f} of them not written or NaN" if nan else f"the largest error is {largest:.3g}"
        return Errors(f"{label}: {wrong_values:.0f} of {count} values wrong, {why}", max=largest)
    if not scale_s:
        return Errors(max=largest)
    rms, rms_own = ((e / count) ** 0.5 / scale_s for e in (squares, squares_own))
    # Lower bound of the error: one rounding of the result, uniform over a unit in the last place; float32 kernels
    # approximate square roots and exponentials to a few units. The mean of few values is uncertain.
    floor = torch.finfo(got.dtype).eps / 12**0.5 * (4 if got.dtype is torch.float32 else 1)
    factor *= 1 + FEW / count**0.5
    limit = factor * max(rms_own, allowed or 0.0, floor)
    problem = ""
    if rms > limit:
        problem = (
            f"{label}: relative rms error {rms:.3g}, more than {factor:.3g} times that of the baseline "
            f"({allowed or 0.0:.3g}), the reference ({rms_own:.3g}) or one rounding ({floor:.3g})"
        )
    return Errors(problem, rms, largest)
