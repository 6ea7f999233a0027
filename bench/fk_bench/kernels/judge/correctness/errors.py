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
# Beyond the relative tolerance of its own size a value may be off by so many times the rms error that is allowed.
LOCAL = 8.0
ROW = 32  # values of a row that show its scale
QUIET = 64.0  # a row with a so much smaller scale than the tensor's may have the errors of the others
CONTRACTS = 64  # operations per result, from which on an op sums products
RELATIVE = 2.0  # other ops may have so much smaller errors in results that are small
BINS, FEW_IN_BIN = 16, 16  # powers of two of values that are compared among each other
FEW = 4.0  # the mean square of honest errors may vary by this over the square root of their number


@dataclass
class Expected:
    """Expected outputs and new values of written arguments, as float64 (or exact integers).

    run     computes the same by the reference in the arguments' own dtypes
    dtypes  of the outputs and written arguments; None: unknown, so that `native` is always needed
    score   score(ids) -> exact scores of the ids of a ranking, and whether each may be chosen; see Ranking
    """

    outputs: list[torch.Tensor]
    written: dict[int, torch.Tensor]
    run: Callable[[], list[torch.Tensor]]
    dtypes: Sequence[torch.dtype] | None = None
    score: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
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
    ranking = spec.ranking
    score = None if ranking is None else lambda ids: ranking.score(ids, *precise)
    return Expected(outputs, written, native, every, score)


@dataclass
class Errors:
    """How far outputs are from the oracle; `problem` is empty if they are correct."""

    problem: str = ""
    rms: float = 0.0  # of the error, relative to the rms of the expected values; the largest of all outputs
    max: float = 0.0  # largest |error| of all outputs
    excess: float = 0.0  # largest |error| beyond the relative tolerance, relative to the row's rms
    bins: tuple[float, ...] = ()  # rms of the errors by the size of the expected values, see _Near.bins

    def worse(self, other: Errors) -> Errors:
        bins = tuple(map(max, self.bins, other.bins)) if self.bins and other.bins else ()
        return Errors(
            self.problem or other.problem, max(self.rms, other.rms), max(self.max, other.max),
            max(self.excess, other.excess), bins or self.bins or other.bins,
        )  # fmt: skip


@PHASES.of("compare")
def compare(
    spec: OpSpec,
    case: Case,
    got: list[torch.Tensor],
    want: Expected,
    allowed: float | None = None,
    unchecked: Container[int] = (),
    baseline: Errors | None = None,
    nonfinite: bool = False,
) -> Errors:
    """Compare outputs (and written arguments behind them) with the oracle.

    unchecked  positions that are not compared (a baseline whose correct outputs may differ)
    allowed    the baseline's own rms error, which a candidate may exceed by FACTOR; None: only the reference's counts,
               and errors are not compared with the size of each value
    nonfinite  whether NaN and infinity are the same: formulas of equal values differ in which of them they give. Of
               an op that contains them, results for which the oracle has one are unspecified
    baseline   the baseline's errors in `excess` and `bins`, of which a candidate may have twice as large ones

    Where the dtypes are known, the error of an honest kernel is first taken to be that of rounding. It has no smaller
    one, so what passes then would pass in any case; all else is compared with the reference in the same dtypes.
    """

    def all_of(native: list[torch.Tensor], finite: bool) -> Errors:
        total = Errors()
        for i, (a, b, n) in enumerate(zip(got, want.all(), native, strict=True)):
            if i not in unchecked:
                output = i if i < len(want.outputs) else None
                label = f"output {i}" if output is not None else "a written argument"
                limits = allowed, baseline or Errors(), finite, nonfinite
                if spec.ranking is not None and output == spec.ranking.ids and _differ(a, b, n):
                    total = total.worse(_compare_ids(spec, case, label, a, want, native, *limits))
                else:
                    total = total.worse(_compare(spec, case, label, a, b, n, *limits, output))
        return total

    if want.dtypes is not None:
        first = all_of(want.rounded(), True)
        if not first.problem:
            return first
    return all_of(want.native, False)


def _differ(got: torch.Tensor, want: torch.Tensor, native: torch.Tensor) -> bool:
    """Whether only values differ."""
    return got.shape == want.shape and got.dtype == native.dtype and not torch.equal(got, want.to(got.dtype))


def _compare_ids(
    spec: OpSpec,
    case: Case,
    label: str,
    got: torch.Tensor,
    want: Expected,
    native: list[torch.Tensor],
    allowed: float | None,
    baseline: Errors,
    finite_only: bool,
    nonfinite: bool,
) -> Errors:
    """Compare the ids of a ranking that are not the expected ones: by their scores, see Ranking."""
    ranking = spec.ranking
    assert ranking is not None and want.score is not None
    ids, best = want.outputs[ranking.ids], want.outputs[ranking.scores]

    def scores_of(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of these ids, with those that were expected for the expected ids; and the wrong ids."""
        scores, may = want.score(found.to(ids.dtype))  # type: ignore[misc]
        other = found != ids
        return torch.where(other, scores.to(best.dtype), best), other & ~may

    def problem(wrong: torch.Tensor, what: str) -> Errors:
        at = int(wrong.flatten().int().argmax())
        values = (
            f"at {_index(at, got.shape)} expected {ids.flatten()[at].item()}, got {got.flatten()[at].item()}"
        )
        return Errors(f"{label}: {int(wrong.sum())} of {got.numel()} ids {what}; {values}")

    scores, forbidden = scores_of(got)
    if forbidden.any():
        return problem(forbidden, "do not exist or may not be chosen")
    ordered, places = got.sort(-1)
    again = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if again.any():
        twice = torch.zeros_like(got, dtype=torch.bool).scatter_(-1, places[..., 1:], again)
        return problem(twice, "occur twice in their row")
    dtype = native[ranking.scores].dtype
    own = scores_of(native[ranking.ids])[0]
    return _compare(
        spec, case, f"{label} (exact scores of its ids)", scores.to(dtype), best, own.to(dtype), allowed, baseline,
        finite_only, nonfinite, ranking.scores,
    )  # fmt: skip


def _compare(
    spec: OpSpec,
    case: Case,
    label: str,
    got: torch.Tensor,
    want: torch.Tensor,
    native: torch.Tensor,
    allowed: float | None,
    baseline: Errors,
    finite_only: bool = False,
    nonfinite: bool = False,
    output: int | None = None,
) -> Errors:
    """Compare one tensor: an output of that number, or a written argument.

    finite_only: infinite values and NaN in `native` are a problem.
    """
    if got.shape != want.shape:
        return Errors(f"{label} has shape {tuple(got.shape)} instead of {tuple(want.shape)}")
    if got.dtype != native.dtype:
        return Errors(f"{label} is {got.dtype} instead of {native.dtype}")
    if not got.numel():
        return Errors()
    if not got.is_floating_point():
        differ = got != want
        wrong = int(differ.sum())
        if not wrong:
            return Errors()
        at = int(differ.flatten().int().argmax())
        values = (
            f"at {_index(at, got.shape)} expected {want.flatten()[at].item()}, got {got.flatten()[at].item()}"
        )
        return Errors(f"{label}: {wrong} of {got.numel()} values differ, but all must be exact; {values}")
    tolerance = spec.tolerance_for(case, got.dtype)
    count, wide = got.numel(), torch.float64 if got.numel() < LARGE else torch.float32
    w = want.to(wide)
    # Each number that is read waits for a GPU, so they are read together.
    scale = torch.where(w.isfinite(), w, 0.0).pow(2).mean().sqrt()
    g, n = got.to(wide), native.to(wide)
    own = torch.where((n == w) | (n.isnan() & w.isnan()), 0.0, (n - w).abs())
    products = spec.flops(case) > CONTRACTS * count
    near = _Near.of(w, own, scale, row_of(spec, output, w.dim()) if products else -1)
    place = None
    if count >= SPARSE:  # perhaps a cache, of which little is written
        inexact = (g != w) | (n != w)
        many = int(inexact.sum())
        if not many:
            return Errors()
        if 4 * many < count:
            g, w, n, own, near = g[inexact], w[inexact], n[inexact], own[inexact], near.only(inexact)
            place = inexact
    # Values beyond the dtype's range are infinite, also in the reference.
    same = (g == w) | (g.isnan() & (w.isnan() | n.isnan())) | (n.isinf() & (g == n))
    if nonfinite:
        same = same | ~(w.isfinite() if spec.contained is not None else g.isfinite() | w.isfinite())
    error = torch.where(same, 0.0, (g - w).abs())
    finite = w.isfinite()
    magnitude = torch.where(finite, w.abs(), 0.0)
    bound = tolerance.atol + tolerance.rtol * magnitude
    factor = FACTOR * spec.level  # parts of a module round their results
    bound = torch.maximum(bound, factor * torch.where(own.isfinite(), own, 0.0).max())
    bad = ~same & ~(error <= bound)
    known, known_own = (torch.where(e.isfinite(), e, 0.0) for e in (error, own))
    squares, squares_own = known.pow(2).sum(), known_own.pow(2).sum()
    # Lower bound of the error: one rounding of the result, uniform over a unit in the last place. In float32, fast
    # exponentials and other orders of sums cost more units (PyTorch's attention on an H200, 2026-11-28: 15), and
    # TF32 would cost 10,000. The mean of few values is uncertain.
    floor = torch.finfo(got.dtype).eps / 12**0.5 * (16 if got.dtype is torch.float32 else 1)
    factor_rms = factor * (1 + FEW / count**0.5)
    limit = factor_rms * torch.clamp(
        (squares_own / count).sqrt() / scale.clamp(min=1e-300), min=max(allowed or 0.0, floor)
    )
    step = torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps  # the distance of the smallest numbers
    beyond = (error - tolerance.rtol * magnitude - step).clamp(min=0) / near.scale.clamp(min=1e-300)
    # Only sums of products have errors that do not shrink with their result.
    contracts = spec.level > 1 or products
    around = limit if contracts else limit / RELATIVE
    bins = near.bins(w, known, known_own, factor)
    theirs = torch.tensor(baseline.bins or (0.0,) * BINS, dtype=bins.mine.dtype, device=w.device)
    relative = limit * 2.0 ** torch.arange(2 - BINS, 2, device=w.device).clamp(
        max=0
    )  # to the size of a bin's values
    most = torch.maximum(torch.maximum(bins.theirs, factor * theirs), torch.maximum(relative, around))
    times = bins.mine / most
    worst = times.argmax()
    if allowed is not None:
        local = torch.maximum(
            factor * near.own / near.scale.clamp(min=1e-300),
            torch.clamp(LOCAL * around, min=2 * baseline.excess),
        )
        bad = bad | (~same & (beyond > local))
    unwritten = g.isnan() & ~w.isnan()
    if finite_only:
        bad = bad | ~n.isfinite()
    where = torch.where(bad, torch.nan_to_num(error, nan=torch.inf), -1.0).flatten().argmax()
    found = (
        scale, known.max(), bad.sum(), unwritten.sum(), squares, squares_own, limit,
        beyond.nan_to_num(0.0, 0.0, 0.0).max(), times[worst], worst + 1 - BINS, where, w.flatten()[where],
        g.flatten()[where],
    )  # fmt: skip
    (
        scale_s, largest, wrong_values, nan, squares_s, own_s, limit_s, excess_s, small_s, bin_s, where_s, wanted,
        given,
    ) = torch.stack([f.to(torch.float64) for f in found]).tolist()  # fmt: skip
    if wrong_values:
        why = f"{nan:.0f} of them not written or NaN" if nan else f"the largest error is {largest:.3g}"
        at = int(where_s) if place is None else int(place.flatten().nonzero()[int(where_s)])
        why += f"; at {_index(at, got.shape)} expected {wanted:.6g}, got {given:.6g}"
        return Errors(f"{label}: {wrong_values:.0f} of {count} values wrong, {why}", max=largest)
    if not scale_s:
        return Errors(max=largest)
    rms, rms_own = ((e / count) ** 0.5 / scale_s for e in (squares_s, own_s))
    problem = ""
    if rms > limit_s:
        problem = (
            f"{label}: relative rms error {rms:.3g}, more than {factor_rms:.3g} times that of the baseline "
            f"({allowed or 0.0:.3g}), the reference ({rms_own:.3g}) or one rounding ({floor:.3g})"
        )
    elif allowed is not None and small_s > 1:
        problem = (
            f"{label}: the values of about {2.0**bin_s * scale_s:.2g} have a rms error {small_s:.3g} times as large as "
            "allowed for values of that size"
        )
    return Errors(problem, rms, largest, excess_s, tuple(bins.mine.tolist()) if allowed is None else ())


def row_of(spec: OpSpec, output: int | None, dims: int) -> int:
    """The dimension of an output that is a row of sums of products: the last one whose size is a constant of a model.

    Of an image [B, C, H, W] these are its channels: they are sums of the same values with other weights, so that all
    may have the errors of the largest. The columns of an equal image are all the same, perhaps a small difference of
    large products.
    """
    if output is None or output >= len(spec.outputs):
        return -1
    for _, shape in spec.outputs[output].shapes:
        if len(shape) == dims and not any(d.star for d in shape):
            for i in range(1, dims + 1):
                names = [n for n in shape[-i].expr.names if n in spec.axes]
                if names and not any(spec.axes[n].varies for n in names):
                    return -i
    return -1


@dataclass
class _Near:
    """The surroundings of each value: the rms of the expected values, and the reference's largest error, in its row.

    See `row_of`. Rows of fewer than ROW values say too little: there both are the whole tensor's.
    """

    scale: torch.Tensor
    own: torch.Tensor

    @classmethod
    def of(cls, w: torch.Tensor, own: torch.Tensor, scale: torch.Tensor, dim: int = -1) -> _Near:
        known_own = torch.where(own.isfinite(), own, 0.0)
        if not w.dim() or w.shape[dim] < ROW:
            return cls(scale.expand(w.shape), known_own.max().expand(w.shape))
        rms = torch.where(w.isfinite(), w, 0.0).pow(2).mean(dim, keepdim=True).sqrt()
        return cls(
            torch.maximum(rms, scale / QUIET).expand(w.shape),
            known_own.amax(dim, keepdim=True).expand(w.shape),
        )

    def only(self, chosen: torch.Tensor) -> _Near:
        return _Near(self.scale[chosen], self.own[chosen])

    def bins(self, w: torch.Tensor, error: torch.Tensor, own: torch.Tensor, factor: float) -> _Bins:
        """Rms errors of values of similar size, relative to their surroundings or, if they are larger, to themselves.

        So small results may be lost in the error of an honest kernel, but not ignored.
        """
        around = self.scale.clamp(min=1e-300)
        usable = w.isfinite() & (w != 0)
        unit = torch.where(usable, torch.maximum(w.abs(), around), 1.0)
        size = torch.where(usable, (w.abs() / around).log2().floor().clamp(1 - BINS, 0), 1.0)
        which = size.long().flatten() + BINS - 1
        sums = torch.zeros(3, BINS + 1, dtype=w.dtype, device=w.device)
        for row, v in zip(sums, (torch.ones_like(w), (error / unit) ** 2, (own / unit) ** 2), strict=True):
            row.index_add_(0, which, v.flatten())
        number, mine, theirs = sums[:, :BINS]
        many = number.clamp(min=1)
        mine = torch.where(number >= FEW_IN_BIN, (mine / many).sqrt(), 0.0)
        return _Bins(mine, factor * (1 + FEW / many.sqrt()) * (theirs / many).sqrt())


@dataclass
class _Bins:
    """The rms errors in each bin, and those that are allowed by the reference's own."""

    mine: torch.Tensor
    theirs: torch.Tensor


def _index(at: int, shape: torch.Size) -> list[int]:
    """The index of the element with this number."""
    return [int(i) for i in torch.unravel_index(torch.tensor(at), shape)]
