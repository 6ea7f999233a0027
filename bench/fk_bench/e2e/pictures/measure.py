"""Lanes of one model in one process: the host, the host compiled, and both patched, measured in interleaved rounds."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import fastkernels
from fastkernels.patch import Report
from fk_bench.core import machine
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.e2e.host import make_row
from fk_bench.e2e.pictures import subjects
from fk_bench.e2e.pictures.costs import costs

LANES = ("stock", "compiled", "patched", "patched-compiled")
SHORTEST = 0.2  # seconds of a round
MOST_CALLS = 200
ALLOWED = 2.0  # times the host's own distance from float32
ROUNDING = 1e-6  # of a cosine: two float32 results that sum in another order


@dataclass
class Lane:
    """One way of running the model.

    outputs  {batch: result of the checked call}
    costs    {batch: {kind of kernel: milliseconds of a call}}
    """

    name: str
    subject: subjects.Subject
    report: Report | None = None
    compile_s: float = 0.0
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    costs: dict[int, dict[str, float]] = field(default_factory=dict)

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
    """The settings of a run. ops: as in fastkernels.patch; None: its default."""

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


@torch.inference_mode()
def measure(
    subject: subjects.Subject, settings: Settings, say: Callable[[str], None]
) -> tuple[list[Row], list[Lane]]:
    """Rows of all lanes and rounds, and the lanes with their outputs, after one in float32. Raises PatchError."""
    reference, lanes = Lane("reference", subject.copy(wide=True)), []
    try:
        for name in settings.lanes:
            lanes.append(_lane(name, subject.copy(), settings))
        for lane in lanes:  # after all patches: one of them may reset the compiler
            if lane.name.endswith("compiled"):
                cuda, how = torch.cuda.is_available(), settings.compiler
                lane.subject.compile(how.mode if cuda else None, how.blocks)
                if how.graphs and cuda:
                    lane.subject.capture()
        made = [row for batch in settings.batches for row in _rounds(batch, reference, lanes, settings, say)]
    finally:
        for lane in reversed(lanes):
            if lane.report is not None:
                lane.report.undo()
    return made, [reference, *lanes]


def _rounds(
    batch: int, reference: Lane, lanes: list[Lane], settings: Settings, say: Callable[[str], None]
) -> Iterator[Row]:
    """Yield the rows of one batch size."""
    reference.outputs[batch] = reference.subject.result(batch, settings.seed)
    for lane in lanes:
        say(f"batch {batch}, {lane.name}: first calls")
        began = time.perf_counter()
        lane.subject.result(batch, settings.seed)
        lane.compile_s = time.perf_counter() - began
        for _ in range(2):  # CUDA graphs are captured in the second call
            lane.outputs[batch] = lane.subject.result(batch, settings.seed)
    calls = _calls_of_a_round(lanes[0], batch, settings.seed)
    checks = {lane.name: _check(lane, reference, lanes[0], batch) for lane in lanes}
    for r in range(settings.rounds):
        for i in range(len(lanes)):
            lane = lanes[(i + r) % len(lanes)]
            seconds = _timed(lane, batch, calls, settings.seed + r)
            yield _row(lane, settings, batch, r, seconds, checks[lane.name])
    if settings.costs:
        for lane in lanes:
            lane.costs[batch] = costs(lane.subject, batch, settings.seed)


def _lane(name: str, subject: subjects.Subject, settings: Settings) -> Lane:
    lane = Lane(name, subject)
    if lane.patched:
        ops = list(settings.ops) if settings.ops else None
        lane.report = fastkernels.patch(subject.target, ops=ops, candidates=settings.candidates)
    return lane


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
    a, b = (t.double().flatten().cpu() for t in (found, wanted))
    return float(torch.dot(a, b) / (a.norm() * b.norm()).clamp_min(1e-300))


def psnr(found: torch.Tensor, wanted: torch.Tensor, peak: float | None = None) -> float:
    """Peak signal-to-noise ratio in dB, at most 200; peak: by default the largest magnitude wanted."""
    a, b = (t.double().cpu() for t in (found, wanted))
    top = peak if peak is not None else float(b.abs().max())
    error = float((a - b).square().mean())
    return 200.0 if error == 0 else min(200.0, 10 * float(torch.log10(torch.tensor(top**2 / error))))


def _check(lane: Lane, reference: Lane, stock: Lane, batch: int) -> dict[str, Any]:
    """Compare with float32: as near as ALLOWED times the first lane, which is the host's own distance."""
    wanted, found = reference.outputs[batch], lane.outputs[batch]
    peak = 1.0 if lane.subject.kind == "images" else None
    metrics = {"cosine_to_float32": cosine(found, wanted), "psnr_to_float32_db": psnr(found, wanted, peak)}
    metrics["psnr_to_stock_db"] = psnr(found, stock.outputs[batch], peak)
    distance, own = 1 - metrics["cosine_to_float32"], 1 - cosine(stock.outputs[batch], wanted)
    wrong = not bool(found.isfinite().all()) or distance > ALLOWED * own + ROUNDING
    return {
        "metrics": metrics,
        "wrong": f"cosine to float32 is 1 - {distance:.2g}, the host's 1 - {own:.2g}" * wrong,
    }


def _row(lane: Lane, settings: Settings, batch: int, r: int, seconds: float, check: dict[str, Any]) -> Row:
    status, reason = Status.OK, ""
    if check["wrong"]:
        status, reason = Status.WRONG, check["wrong"]
    elif lane.report is not None and not lane.report.refresh().verified and lane.name == "patched":
        status, reason = Status.FAILED, "none of the replaced ops ran"
    metrics = {
        "images_per_s": batch / seconds, "latency_ms": 1000 * seconds, "first_call_s": lane.compile_s,
        **check["metrics"],
    }  # fmt: skip
    subject = lane.subject
    case = {
        "kind": "pictures", "result": subject.kind, "batch": batch, "dtype": settings.dtype,
        "image_size": subject.image_size,
    }  # fmt: skip
    if lane.name.endswith("compiled"):
        case["compiler"] = asdict(settings.compiler)
    if subject.kind == "images":
        case["steps"] = subject.steps
    if lane.report is not None:
        case["modules"] = {row.op: row.modules for row in lane.report.active}
    return make_row(
        settings.host, case, metrics, round=r, status=status, reason=reason,
        subject=Subject(model=settings.model, host=settings.host, lane=lane.name),
        baseline=None if lane.name == settings.lanes[0] else settings.lanes[0],
        versions=machine.interpreter(sys.executable).versions,
    )  # fmt: skip


def cost_rows(lanes: Sequence[Lane], settings: Settings) -> list[Row]:
    """A row for the profile of each lane and batch."""
    return [
        make_row(
            settings.host, {"kind": "picture_costs", "batch": batch, "dtype": settings.dtype},
            {f"{kind}_ms".replace(" ", "_"): ms for kind, ms in parts.items()},
            subject=Subject(model=settings.model, host=settings.host, lane=lane.name),
            versions=machine.interpreter(sys.executable).versions,
        )
        for lane in lanes
        for batch, parts in lane.costs.items()
    ]  # fmt: skip


def summary(made: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians of each lane and batch, with the speedup over the first lane and the fastest host lane."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in made:
        groups.setdefault((row.case["batch"], str(row.subject.lane)), []).append(row)
    medians = {
        key: {m: statistics.median(r.metrics[m] for r in group) for m in group[0].metrics}
        for key, group in groups.items()
    }
    lines = []
    for (batch, lane), metrics in medians.items():
        host = [
            m["latency_ms"] for (b, n), m in medians.items() if b == batch and not n.startswith("patched")
        ]
        line: dict[str, Any] = {"batch": batch, "lane": lane, **metrics}
        if lane.startswith("patched") and host:
            line["speedup_over_host"] = min(host) / metrics["latency_ms"]
        line["status"] = groups[batch, lane][-1].status.value
        lines.append(line)
    return lines
