"""Finds the fastest provider at each shape with the judge of `fk-bench kernels`: the entries of tuned tables."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.dispatch import Op
from fastkernels.core.spec import Case, OpSpec
from fastkernels.core.tuning import REACH, Entry, Key
from fastkernels.verify import measure
from fastkernels.verify.phases import Seconds, timed
from fk_bench.core.baselines import baselines
from fk_bench.core.rows import Row, Status
from fk_bench.kernels.judge import Judge, Options
from fk_bench.kernels.judge.correctness.cases import Trial
from fk_bench.kernels.judge.processes.sides import Sides
from fk_bench.tune.choice import NOTHING, Choice, point_of
from fk_bench.tune.model_shapes import distinct, named
from fk_bench.tune.screen import Screen

SCREEN_ROUNDS, SCREEN_S = 3, 0.1  # to rank the choices; entries are judged in full
STAGES = ("screen", "final", "control", "low end", "longer")


def key_of(name: str) -> tuple[OpSpec, Op, Key]:
    """The op and its key. Raises UnknownName, and ValueError for an op that is dispatched without tables."""
    spec = registry.get(name)
    if spec.op is None or spec.op.key is None:
        raise ValueError(
            f"{name} is not dispatched by shape (it has no key); ops with a key: {', '.join(tunable())}"
        )
    return spec, spec.op, spec.op.key


def is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def tunable() -> list[str]:
    return [n for n in registry.op_names() if getattr(registry.get(n).op, "key", None) is not None]


# -- what is judged


def shapes_of_cases(spec: OpSpec, key: Key, device: str) -> list[dict[str, Any]]:
    """The shapes of the op's model cases; on a CPU those of the first two that it can run."""
    if device == "cpu":
        found = [c for c in spec.cases if _trial(spec, c).gpu_only(spec) is None and spec.flops(c) > 1000][:2]
    else:
        found = [c for c in spec.cases if "model" in c.tags]
    return distinct(_shape_of_case(spec, key, c) for c in found)


def _shape_of_case(spec: OpSpec, key: Key, case: Case) -> dict[str, Any]:
    return named(key, key.of(*spec.declaration.blank(case))[0])


def grid(key: Key, sizes: Sequence[Sequence[int]]) -> list[tuple[dict[str, int], dict[str, int] | None]]:
    """[(sizes, the smallest sizes that the entry will apply to, None if there are no smaller ones)]."""
    found = []
    ordered = [sorted(set(several)) for several in sizes[: len(key.sizes)]]
    for values in itertools.product(*ordered):
        low = []
        for value, several in zip(values, ordered, strict=True):
            at = several.index(value)
            least = several[at - 1] + 1 if at else 0
            low.append(max(least, -(-value // REACH)))
        here = dict(zip(key.sizes, values, strict=True))
        found.append((here, None if tuple(low) == values else dict(zip(key.sizes, low, strict=True))))
    return found


def choices(op: Op, device: str, only: Sequence[str] = ()) -> list[Choice]:
    """Every provider that runs on that device, with each of its sets of parameters.

    On a GPU without the plain reference, and without baselines of the judge. Raises UnknownName for an unknown provider
    in `only`.
    """
    names = [p.name for p in op.providers]
    if unknown := [n for n in only if n not in names]:
        raise registry.UnknownName(f"provider of {op.name}", unknown[0], names)
    known = (
        {b.name for b in baselines(op.name, "production", device)} if device == "cuda" and not only else set()
    )
    found = []
    for provider in op.providers:
        if (
            provider.unavailable(device) is None
            and provider.name not in known
            and (not only or provider.name in only)
        ):
            sets = [NOTHING, *(p for p in provider.params if p)]
            found += [Choice(provider.name, dict(params)) for params in sets]
    return found


def fitting(several: Sequence[Choice], spec: OpSpec, case: Case) -> list[Choice]:
    """The choices whose parameters are meant for calls like this case."""
    args, fits = spec.declaration.blank(case), {p.name: p.fits for p in spec.op.providers}

    def meant(choice: Choice) -> bool:
        asked = fits.get(choice.provider)
        return asked is None or not choice.params or asked(choice.params, *args)

    return [c for c in several if meant(c)]


def trial_of(
    spec: OpSpec, key: Key, shape: Mapping[str, Any], sizes: Mapping[str, int], tag: str, longer: bool = False
) -> Trial:
    """The case of a shape at these sizes. longer: that of its longer calls, which there must be."""
    dims = point_of(spec.name, shape, sizes, longer).dims
    assert dims is not None
    name = " ".join(f"{n}={v}" for n, v in {**shape, **sizes}.items()) + (" longer" if longer else "")
    return _trial(spec, Case(name, dims, str(shape.get("dtype", spec.cases[0].dtype)), tags=(tag,)))


def _trial(spec: OpSpec, case: Case) -> Trial:
    return Trial("random", case, lambda device, generator: spec.inputs(case, device, generator))


# -- what is written


def beats(row: Row) -> bool:
    """Whether a row is correct and faster: its whole interval is above 1, by more than the baseline against itself.

    A provider that is the baseline itself, under another name, is never faster.
    """
    if row.baseline == row.subject.provider:
        return False
    interval = row.ci95.get("speedup")
    faster = interval is not None and interval[0] > 1 and row.metrics["speedup"] > 1
    return row.status is Status.OK and faster and bool(row.case.get("significant"))


def ranked(rows: Sequence[tuple[Choice, Row]]) -> list[Choice]:
    """The correct choices, fastest first; rejected times are good enough for the ranking."""
    timed = (Status.OK, Status.INVALID)
    right = [(c, r) for c, r in rows if r.status in timed and r.metrics.get("time_us_p50", 0.0) > 0]
    return [c for c, _ in sorted(right, key=lambda found: found[1].metrics["time_us_p50"])]


class Tuner:
    """Judges points (a shape at sizes) one by one; a context manager, because its judge owns processes.

    on_row  called with each judged row; row.case has the `stage` (one of STAGES), shape and sizes
    screen  times the choices in this process, so that only those which are faster there are judged, at one size
    sides    processes for the judge that have been started
    seconds  {'screened', 'judged'}: what points took so far
    """

    def __init__(
        self, options: Options, finalists: int, run: str, on_row: Callable[[Row], None],
        screen: Screen | None = None, on_screen: Callable[[Row], None] = lambda row: None, sides: Sides | None = None,
    ) -> None:  # fmt: skip
        self._screen, self._on_screen = screen, on_screen
        self.final, self.finalists, self.run, self._on_row = options, finalists, run, on_row
        self.screen = dataclasses.replace(options, rounds=SCREEN_ROUNDS, seconds=SCREEN_S)
        self.judge = Judge({}, options, self._row, sides=sides)
        self._about: dict[str, Any] = {}
        self.seconds: Seconds = {}

    def __enter__(self) -> Tuner:
        self.judge.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self.judge.__exit__(*problem)
        self.judge.sides.close()

    def warm(
        self, points: Sequence[tuple[str, Mapping[str, Any], Mapping[str, int], Sequence[Choice]]]
    ) -> None:
        """Start the judge's processes, and let them import and compile what the first point of each op needs."""
        for who in ("candidate", "baseline"):
            self.judge.sides.trusted(who)
        for name, (shape, sizes, several) in {p[0]: p[1:] for p in reversed(points) if p[3]}.items():
            spec, _, key = key_of(name)
            self.judge.prepare(name, trial_of(spec, key, shape, sizes, "tune"), several[0].provider)

    def _row(self, row: Row) -> None:
        row.command, row.case = "tune", {**row.case, **self._about}
        self._on_row(row)

    def point(
        self,
        name: str,
        shape: Mapping[str, Any],
        sizes: Mapping[str, int],
        low: Mapping[str, int] | None,
        several: Sequence[Choice],
    ) -> Entry | None:
        """The entry of one point; None if nothing could be judged there.

        All choices are ranked in a few rounds, and the best are judged in full. The entry names the fastest that beats
        production, also at the smallest sizes that it will apply to; otherwise production, if it is one of the
        op's providers, or none. Production is also judged in place of a choice; a choice must exceed the gain that
        production seems to have over itself there.
        """
        spec, _, key = key_of(name)
        several = fitting(several, spec, trial_of(spec, key, shape, sizes, "tune").case)
        if self._screen is not None:
            return self._screened(self._screen, name, shape, sizes, low, several)
        rows, best = [], list(several)
        if len(several) > self.finalists:
            rows = [(c, self._judged(name, c, shape, sizes, "screen")) for c in several]
            best = ranked(rows)[: self.finalists]
        finals = [(c, self._judged(name, c, shape, sizes, "final")) for c in best]
        entry = self._lost(name, shape, sizes, [r for _, r in finals] or [r for _, r in rows])
        faster = sorted((f for f in finals if beats(f[1])), key=lambda f: -f[1].metrics["speedup"])
        bar = 1.0
        if faster and entry is not None and entry.provider is not None:
            control = self._judged(name, Choice(entry.provider), shape, sizes, "control")
            bar = max(bar, control.metrics.get("speedup", 1.0))
        for choice, row in (f for f in faster if f[1].ci95["speedup"][0] > bar):
            low_end = [] if low is None else [self._judged(name, choice, shape, low, "low end")]
            if not all(map(beats, low_end)):
                continue
            slower, longer = self._longer(name, choice, shape, sizes)
            if not slower:
                return self._won(name, shape, sizes, choice, row, longer)
        return entry

    def _longer(
        self, name: str, choice: Choice, shape: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> tuple[bool, float | None]:
        """Whether a choice is wrong or slower than production in the point's longer calls, and its speedup there.

        Without room for such calls it is not.
        """
        spec, _, key = key_of(name)
        if point_of(name, shape, sizes, longer=True).dims is None:
            return False, None
        if (
            trial_of(spec, key, shape, sizes, "tune", longer=True).gpu_only(spec)
            and self.final.device == "cpu"
        ):
            return False, None
        if self._screen is None:
            row = self._judged(name, choice, shape, sizes, "longer")
            interval = row.ci95.get("speedup")
            if row.status in (Status.SKIPPED, Status.OOM):
                return False, None
            if row.status is not Status.OK or interval is None:
                return True, None
            return interval[1] < 1, round(row.metrics["speedup"], 4)
        try:
            with timed(self.seconds, "screened"):
                found, row = self._screen.time(name, shape, sizes, [choice], longer=True)
        except (measure.NoRoom, torch.OutOfMemoryError):
            return False, None
        self._on_screen(row)
        if not found:
            return True, None
        ratio = found[0].ratio
        return (False, None) if ratio is None else (ratio.high < 1, round(ratio.value, 4))

    def _screened(
        self, screen: Screen, name: str, shape: Mapping[str, Any], sizes: Mapping[str, int],
        low: Mapping[str, int] | None, several: Sequence[Choice],
    ) -> Entry | None:  # fmt: skip
        """As `point`: of those that are faster here, also at the smallest sizes, the fastest valid one is judged."""
        with timed(self.seconds, "screened"):
            found, row = screen.time(name, shape, sizes, several)
        self._on_screen(row)
        faster = [one.choice for one in found if one.faster]
        firsts = {choice.provider: choice for choice in reversed(faster)}
        best = [c for i, c in enumerate(faster) if i < self.finalists or c is firsts[c.provider]]
        if best and low is not None:
            with timed(self.seconds, "screened"):
                at_low, row = screen.time(name, shape, low, best)
            self._on_screen(row)
            kept = {str(one.choice) for one in at_low if one.faster}
            best = [choice for choice in best if str(choice) in kept]
        judged: list[Row] = []
        for choice in best:
            # Times are invalid because of how a kernel works, such as calls that overlap: with other parameters, too.
            if any(r.status is Status.INVALID and r.subject.provider == choice.provider for r in judged):
                continue
            if len(judged) == self.finalists:
                break
            slower, longer = self._longer(name, choice, shape, sizes)
            if slower:
                continue
            judged.append(self._judged(name, choice, shape, sizes, "final"))
            if beats(judged[-1]):
                return self._won(name, shape, sizes, choice, judged[-1], longer)
            if judged[-1].status is Status.OK:  # the others were slower here
                break
        if judged:
            return self._lost(name, shape, sizes, judged)
        return Entry(name, shape, sizes, row.baseline, row.baseline, self.run) if row.baseline else None

    def _won(
        self, name: str, shape: Mapping[str, Any], sizes: Mapping[str, int], choice: Choice, row: Row,
        longer: float | None,
    ) -> Entry:  # fmt: skip
        low, high = row.ci95["speedup"]
        return Entry(
            name, shape, sizes, choice.provider, str(row.baseline), self.run, choice.params,
            round(row.metrics["speedup"], 4), (round(low, 4), round(high, 4)), longer,
        )  # fmt: skip

    def _judged(
        self, name: str, choice: Choice, shape: Mapping[str, Any], sizes: Mapping[str, int], stage: str
    ) -> Row:
        spec, _, key = key_of(name)
        self.judge.options = self.screen if stage == "screen" else self.final
        self._about = {"stage": stage, "shape": dict(shape), "sizes": dict(sizes)}
        # Compilers take seconds for each shape: they are baselines where the number of points is small.
        quick = stage == "screen" or self._screen is not None
        trial = trial_of(spec, key, shape, sizes, "tune" if quick else "model", stage == "longer")
        with timed(self.seconds, "judged"):
            return self.judge.provider(name, [trial], choice.provider, choice.params)[0]

    def _lost(
        self, name: str, shape: Mapping[str, Any], sizes: Mapping[str, int], rows: Sequence[Row]
    ) -> Entry | None:
        if all(r.status is Status.SKIPPED for r in rows):
            return None
        known = Counter(r.baseline for r in rows if r.baseline)
        baseline = known.most_common(1)[0][0] if known else ""
        op = registry.get(name).op
        there = [p.name for p in op.providers if p.unavailable(self.final.device) is None]
        return Entry(name, shape, sizes, baseline if baseline in there else None, baseline, self.run)


def written(path: Path, text: str) -> None:
    """Write a file atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
