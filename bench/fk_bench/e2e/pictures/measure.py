"""Lanes of one model in one process: the host, the host compiled, and both patched, measured in interleaved rounds."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

import fastkernels
from fastkernels.patch import Report
from fk_bench.core import machine
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.e2e.pictures import subjects
from fk_bench.e2e.pictures.costs import costs
from fk_bench.offline.host import OMNI, make_row

LANES = ("stock", "compiled", OMNI, "patched", "patched-compiled")
GRAPHS = "FASTKERNELS_GRAPHS"
SHORTEST = 0.2  # seconds of a round
MOST_CALLS = 200
ALLOWED = 2.0  # times the host's own distance from float32
COSTS = "picture_costs"  # kind of the rows of profiles
MOST_DB = 200.0  # of a signal-to-noise ratio: equal results
ROUNDING = 1e-6  # of a cosine: two float32 results that sum in another order


@dataclass
class Measured:
    """The results of another process for one batch size. seconds, request_s: of a call, for each round."""

    images: torch.Tensor
    latents: torch.Tensor
    first_call_s: float
    seconds: list[float]
    request_s: list[float]
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Lane:
    """One way of running the model.

    outputs    {batch: result of the checked call}
    latents    {batch: what the decoder made this result of}, of a pipeline that shows its latents
    costs      {batch: {kind of kernel: milliseconds of a call}}
    failed     why the lane cannot run at all
    elsewhere  {batch: results of another process, or why there are none}, if the lane does not run here
    """

    name: str
    subject: subjects.Subject
    report: Report | None = None
    compile_s: float = 0.0
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    latents: dict[int, torch.Tensor] = field(default_factory=dict)
    costs: dict[int, dict[str, float]] = field(default_factory=dict)
    failed: str = ""
    elsewhere: Mapping[int, Measured | str] | None = None

    def measured(self, batch: int) -> Measured | None:
        found = (self.elsewhere or {}).get(batch)
        return found if isinstance(found, Measured) else None

    def keep_result(self, batch: int, seed: int) -> None:
        """Run the checked call."""
        self.outputs[batch] = self.subject.result(batch, seed)
        if self.subject.latents is not None:
            self.latents[batch] = self.subject.latents

    def free(self) -> None:
        """Drop the model and its graphs; the outputs stay."""
        vars(self.subject).clear()

    @property
    def patched(self) -> bool:
        return self.name.startswith("patched")


@dataclass(frozen=True)
class Compiler:
    """The way of the compiled lanes.

    mode    of torch.compile
    blocks  compile the repeated blocks only, which takes seconds instead of minutes
    graphs  run them in CUDA graphs captured here; mode max-autotune has its own
    """

    mode: str = "max-autotune"
    blocks: bool = False
    graphs: bool = False


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    ops   as in fastkernels.patch; None: its default
    skip  {batch: lanes that failed in an earlier run}
    """

    host: str
    model: str
    dtype: str
    batches: tuple[int, ...]
    rounds: int
    seed: int
    lanes: tuple[str, ...]
    ops: tuple[str, ...] | None
    candidates: dict[str, str] | None
    compiler: Compiler = Compiler()
    costs: bool = False
    skip: Mapping[int, Collection[str]] = field(default_factory=dict)


class DeviceLost(RuntimeError):
    """The GPU refuses all further work of this process, after an illegal access for example."""


@torch.inference_mode()
def measure(
    subject: subjects.Subject, settings: Settings, say: Callable[[str], None],
    keep: Callable[[list[Row]], None] = lambda made: None,
    elsewhere: Mapping[str, Mapping[int, Measured | str]] | None = None,
) -> tuple[list[Row], list[Lane]]:  # fmt: skip
    """Rows of all lanes and rounds, and the lanes with their outputs, after one in float32.

    A lane that fails gets a row with the reason, and the others go on. `keep` receives each row as soon as it exists.
    `elsewhere` has the results of lanes that ran in a process of their own.
    Raises DeviceLost, after the row of the lane that lost it.
    """
    made: list[Row] = []

    def add(rows: list[Row]) -> None:
        made.extend(rows)
        keep(rows)

    reference, lanes = Lane("reference", subject.copy(wide=True)), []
    for batch in settings.batches:
        say(f"batch {batch}: in float32")
        reference.keep_result(batch, settings.seed)
    reference.free()  # before the lanes need memory of their own
    try:
        for name in settings.lanes:
            lane = Lane(name, subject.copy(), elsewhere=(elsewhere or {}).get(name))
            lanes.append(lane)
            lane.failed = _failure(partial(_patch, lane, settings)) or ""
        for lane in lanes:  # after all patches: one of them may reset the compiler
            if lane.name.endswith("compiled") and not lane.failed:
                lane.failed = _failure(partial(_compile, lane, settings.compiler)) or ""
        with _captured_by_hand(settings.compiler):
            for batch in settings.batches:
                _measure_batch(batch, reference, lanes, settings, say, add)
    finally:
        for lane in reversed(lanes):
            if lane.report is not None:
                lane.report.undo()
    return made, [reference, *lanes]


@torch.inference_mode()
def run_compiled(subject: subjects.Subject, settings: Settings, name: str, batch: int) -> None:
    """Run one call of a compiled lane, without CUDA graphs."""
    lane = Lane(name, subject.copy())
    with _captured_by_hand(settings.compiler):
        _patch(lane, settings)
        _compile(lane, replace(settings.compiler, graphs=False))
        lane.keep_result(batch, settings.seed)
    _synchronize()


@contextmanager
def _captured_by_hand(how: Compiler) -> Iterator[None]:
    """Tell a patch that graphs will be captured of what is compiled here, which no mode of the compiler says."""
    before = os.environ.get(GRAPHS)
    if how.graphs:
        os.environ[GRAPHS] = "1"
    try:
        yield
    finally:
        if how.graphs:
            os.environ.pop(GRAPHS) if before is None else os.environ.update({GRAPHS: before})


def _failure(work: Callable[[], Any]) -> str | None:
    """Do it; None, or the first line of the error."""
    try:
        work()
        _synchronize()
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return _first_line(error)
    except Exception as error:  # whatever a host, a compiler or a kernel raises
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    lost = "lost: " if isinstance(error, getattr(torch, "AcceleratorError", ())) else ""
    return f"{lost}{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _measure_batch(
    batch: int, reference: Lane, lanes: list[Lane], settings: Settings, say: Callable[[str], None],
    add: Callable[[list[Row]], None],
) -> None:  # fmt: skip
    """Measure one batch size."""
    running = []

    def fail(lane: Lane, why: str) -> None:
        say(f"batch {batch}, {lane.name}: failed: {why}")
        add([_row(lane, settings, batch, None, None, {}, why)])
        if why.startswith("lost: "):
            raise DeviceLost(f"{lane.name}: {why}; run the command again with this --out for the other lanes")

    for lane in lanes:
        if lane.name in settings.skip.get(batch, ()):
            continue
        say(f"batch {batch}, {lane.name}: first calls")
        found = (lane.elsewhere or {}).get(batch)
        if isinstance(found, Measured):
            device = reference.outputs[batch].device
            lane.outputs[batch], lane.latents[batch] = found.images.to(device), found.latents.to(device)
            lane.compile_s, why = found.first_call_s, ""
        else:
            why = found or lane.failed or _failure(partial(_first_calls, lane, batch, settings.seed)) or ""
        if why:
            fail(lane, why)
        else:
            running.append(lane)
    if lanes[0] not in running:
        return
    calls = _calls_of_a_round(lanes[0], batch, settings.seed)
    checks = {lane.name: _check(lane, reference, lanes[0], batch) for lane in running}
    for r in range(settings.rounds):
        for i in range(len(lanes)):
            lane = lanes[(i + r) % len(lanes)]
            if lane in running:
                timed: list[float] = []
                if found := lane.measured(batch):
                    timed, why = [found.seconds[r]], ""
                else:
                    why = _failure(partial(_time, lane, batch, calls, settings.seed + r, timed)) or ""
                if why:
                    running.remove(lane)
                    fail(lane, why)
                else:
                    add([_row(lane, settings, batch, r, timed[0], checks[lane.name])])
    for lane in [lane for lane in running if settings.costs and lane.elsewhere is None]:
        say(f"batch {batch}, {lane.name}: profile")
        if why := _failure(partial(_profile, lane, batch, settings.seed)) or "":
            say(f"batch {batch}, {lane.name}: no profile: {why}")
        else:
            add([cost_row(lane, batch, settings)])


def _first_calls(lane: Lane, batch: int, seed: int) -> None:
    began = time.perf_counter()
    lane.subject.result(batch, seed)
    lane.compile_s = time.perf_counter() - began
    for _ in range(2):  # CUDA graphs are captured in the second call
        lane.keep_result(batch, seed)


def _time(lane: Lane, batch: int, calls: int, seed: int, found: list[float]) -> None:
    found.append(_timed(lane, batch, calls, seed))


def _profile(lane: Lane, batch: int, seed: int) -> None:
    lane.costs[batch] = costs(lane.subject, batch, seed)


def _compile(lane: Lane, how: Compiler) -> None:
    cuda = torch.cuda.is_available()
    lane.subject.compile(how.mode if cuda else None, how.blocks)
    if how.graphs and cuda:
        lane.subject.capture()


def _patch(lane: Lane, settings: Settings) -> None:
    if lane.patched:
        ops = list(settings.ops) if settings.ops else None
        lane.report = fastkernels.patch(lane.subject.target, ops=ops, candidates=settings.candidates)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _timed(lane: Lane, batch: int, calls: int, seed: int) -> float:
    """Seconds of one call, the mean of `calls`. The inputs are made before, and no call repeats the one before it."""
    inputs = [lane.subject.inputs(batch, seed + i) for i in range(min(calls, 2))]
    _synchronize()
    began = time.perf_counter()
    for i in range(calls):
        lane.subject.run(inputs[i % len(inputs)])
    _synchronize()
    return (time.perf_counter() - began) / calls


def _calls_of_a_round(lane: Lane, batch: int, seed: int) -> int:
    return max(1, min(MOST_CALLS, round(SHORTEST / max(_timed(lane, batch, 1, seed), 1e-6))))


def cosine(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The cosine of the angle between two results, as vectors of all their values."""
    a, b = (t.double().flatten() for t in (found, wanted))
    return float(torch.dot(a, b) / (a.norm() * b.norm()).clamp_min(1e-300))


def psnr(found: torch.Tensor, wanted: torch.Tensor, peak: float | None = None) -> float:
    """Peak signal-to-noise ratio in dB, at most MOST_DB; peak: by default the largest magnitude wanted."""
    a, b = (t.double() for t in (found, wanted))
    top = peak if peak is not None else float(b.abs().max())
    error = float((a - b).square().mean())
    return MOST_DB if error == 0 else min(MOST_DB, 10 * float(torch.log10(torch.tensor(top**2 / error))))


def _check(lane: Lane, reference: Lane, stock: Lane, batch: int) -> dict[str, Any]:
    """Compare with float32: as near as ALLOWED times the first lane, which is the host's own distance."""
    wanted, found = reference.outputs[batch], lane.outputs[batch]
    peak = 1.0 if lane.subject.kind == "images" else None
    metrics = {"cosine_to_float32": cosine(found, wanted), "psnr_to_float32_db": psnr(found, wanted, peak)}
    metrics["psnr_to_stock_db"] = psnr(found, stock.outputs[batch], peak)
    if batch in reference.latents and batch in lane.latents:
        wanted_latents, latents = reference.latents[batch], lane.latents[batch]
        metrics["latents_cosine_to_float32"] = cosine(latents, wanted_latents)
        metrics["latents_psnr_to_float32_db"] = psnr(latents, wanted_latents)
        metrics["latents_psnr_to_stock_db"] = psnr(latents, stock.latents[batch])
    distance, own = 1 - metrics["cosine_to_float32"], 1 - cosine(stock.outputs[batch], wanted)
    wrong = not bool(found.isfinite().all()) or distance > ALLOWED * own + ROUNDING
    return {
        "metrics": metrics,
        "wrong": f"cosine to float32 is 1 - {distance:.2g}, the host's 1 - {own:.2g}" * wrong,
    }


def _row(
    lane: Lane, settings: Settings, batch: int, r: int | None, seconds: float | None, check: dict[str, Any],
    failed: str = "",
) -> Row:  # fmt: skip
    status, reason, metrics = Status.OK, "", {}
    if seconds is None:
        status, reason = Status.FAILED, failed
    else:
        metrics = {
            "images_per_s": batch / seconds, "latency_ms": 1000 * seconds, "first_call_s": lane.compile_s,
            **check["metrics"],
        }  # fmt: skip
        if check["wrong"]:
            status, reason = Status.WRONG, check["wrong"]
        elif lane.name == "patched" and lane.report is not None and _ran_nothing(lane.report.refresh()):
            status, reason = Status.FAILED, "none of the replaced ops ran"
    subject, measured = lane.subject, lane.measured(batch)
    case = {
        "kind": "pictures", "result": subject.kind, "batch": batch, "dtype": settings.dtype,
        "image_size": subject.image_size,
    }  # fmt: skip
    if lane.name.endswith("compiled"):
        case["compiler"] = asdict(settings.compiler)
    if subject.kind == "images":
        case["steps"] = subject.steps
    if measured is not None:
        case["interleaved"] = False
    if measured is not None and r is not None:
        metrics["request_ms"] = 1000 * measured.request_s[r]
    if lane.report is not None:
        modules: Counter[str] = Counter()
        for active in lane.report.active:
            modules[active.op] += active.modules
        case["modules"] = dict(modules)
    return make_row(
        settings.host, case, metrics, round=r, status=status, reason=reason,
        subject=Subject(model=settings.model, host=settings.host, lane=lane.name),
        baseline=None if lane.name == settings.lanes[0] else settings.lanes[0],
        versions=measured.versions if measured is not None else machine.interpreter(sys.executable).versions,
    )  # fmt: skip


def _ran_nothing(report: Report) -> bool:
    """Whether replaced modules exist and none ran; first calls may have left all of them to the host."""
    return bool(report.active) and not report.verified


def failed_row(settings: Settings, reason: str) -> Row:
    """The row of a model that could not be measured at all."""
    case = {"kind": "pictures", "dtype": settings.dtype}
    subject = Subject(model=settings.model, host=settings.host)
    return make_row(settings.host, case, {}, status=Status.FAILED, reason=reason, subject=subject)


def cost_row(lane: Lane, batch: int, settings: Settings) -> Row:
    """The row for the profile of a lane."""
    return make_row(
        settings.host, {"kind": COSTS, "batch": batch, "dtype": settings.dtype},
        {f"{kind}_ms".replace(" ", "_"): ms for kind, ms in lane.costs[batch].items()},
        subject=Subject(model=settings.model, host=settings.host, lane=lane.name),
        versions=machine.interpreter(sys.executable).versions,
    )  # fmt: skip


def summary(made: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians of each lane and batch, with the speedup over the first lane and the fastest host lane."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in made:
        if row.kind == COSTS or row.subject.lane is None:
            continue
        groups.setdefault((row.case["batch"], str(row.subject.lane)), []).append(row)
    medians = {
        key: {m: statistics.median(r.metrics[m] for r in group if r.metrics) for m in group[0].metrics}
        for key, group in groups.items()
    }
    lines = []
    for (batch, lane), metrics in sorted(medians.items(), key=lambda m: (m[0][0], LANES.index(m[0][1]))):
        host = [
            m["latency_ms"]
            for (b, n), m in medians.items()
            if b == batch and m and not n.startswith("patched")
        ]
        line: dict[str, Any] = {"batch": batch, "lane": lane, **metrics}
        if lane.startswith("patched") and host and metrics:
            line["speedup_over_host"] = min(host) / metrics["latency_ms"]
        line["status"] = groups[batch, lane][-1].status.value
        lines.append(line)
    return lines
