"""Rows of one lane: `add` measures the calls of a case, prints their time, and writes its row at once."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from experiments.architectures.subjects import Case
from fk_bench.core import machine
from fk_bench.core.rows import Row, Status, Subject, append, read
from fk_bench.core.terminal.text import printable

COMMAND = "architectures"
WARM_UP = 3  # torch.compile captures a graph in the second call, and replays it in the third
REASON = 500  # characters of a failed row
LIMIT = "limit_s"  # the metric of a failed row whose lane was ended
LEAST, MOST, EACH = 3, 20, 2.0  # calls of a case, and the seconds that they may take
PACKAGES = ("torch", "triton", "transformers", "timm", "diffusers", "vllm", "fla-core", "gsplat", "torch-geometric",
            "torchrec", "ultralytics", "openfold3")  # fmt: skip
Call = Callable[[Any], Any]


def key(row: Row) -> tuple[str, str, str]:
    """The architecture of a row, its lane, and its case without the dtype."""
    case = {k: v for k, v in row.case.items() if k not in ("kind", "dtype")}
    return str(row.subject.model), str(row.subject.provider), json.dumps(case, sort_keys=True)


@cache
def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def ended_at(row: Row) -> float:
    """Seconds after which the lane of a failed row was ended; 0: it did not end by its limit."""
    return row.metrics.get(LIMIT, 0.0) if row.status is Status.FAILED else 0.0


def described(error: BaseException) -> str:
    """An error, and the first one of those that it hides: the end of a failed CUDA graph has an error of its own."""
    first = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    said = [f"{type(e).__name__}: {e}" for e in dict.fromkeys((first, error))]
    return "; then ".join(text[: REASON // len(said)] for text in said)


class Times:
    """The rows of a lane in the file `out`. lane: the provider of its rows; cuda: calls end on the device.

    more  metrics of each row that is measured from now on
    """

    def __init__(self, out: Path, name: str, lane: str, dtype: str = "auto", cuda: bool = False) -> None:
        self.out, self.name, self.lane, self.dtype, self.cuda = out, name, lane, dtype, cuda
        self.more: dict[str, float] = {}
        found = read(out)[0] if out.exists() else []
        self.done = {key(r) for r in found if not ended_at(r)}

    def row(self, case: Case, lane: str = "") -> Row:
        return Row(
            run_id=COMMAND, command=f"{COMMAND}.py", machine=machine.machine(), commit=machine.commit(),
            versions=versions(), subject=Subject(model=self.name, provider=lane or self.lane),
            case={"kind": "call", "dtype": self.dtype, **case},
        )  # fmt: skip

    def left(self, cases: Iterable[Case]) -> list[Case]:
        """The cases that have no row of this lane."""
        return [case for case in cases if key(self.row(case)) not in self.done]

    def add(self, case: Case, prepare: Callable[[], tuple[Callable[[], Any], Call]], lane: str = "",
            warm_up: int = WARM_UP) -> None:  # fmt: skip
        """Measure the calls of a case.

        prepare  returns make and call: make() gives what one call is called with, outside of the clock
        lane     the provider of the row, if it is not the lane's own
        """
        row = self.row(case, lane)
        if key(row) in self.done:
            return
        try:
            took = self._clock(*prepare(), warm_up)
            median = statistics.median(took)
            row.metrics = {"call_ms_p50": median, "call_ms_least": min(took), "calls": len(took)}
            row.metrics |= {"per_s": 1e3 * case["batch"] / median, **self.more}
        except Exception as error:
            row.status, row.reason = Status.FAILED, described(error)
        append(self.out, [row])
        said = f"{row.metrics['call_ms_p50']:.3f} ms" if row.metrics else printable(row.reason[:200])
        print(f"{self.name} {case} {lane or self.lane}: {said}", flush=True)
        gc.collect()

    def fail(self, cases: Iterable[Case], reason: str) -> None:
        """Write failed rows of the cases that have none."""
        for case in self.left(cases):
            row = self.row(case)
            row.status, row.reason = Status.FAILED, reason[:REASON]
            append(self.out, [row])
            print(f"{self.name} {case} {self.lane}: {printable(row.reason[:200])}", flush=True)

    def _clock(self, make: Callable[[], Any], call: Call, warm_up: int) -> list[float]:
        """Milliseconds of each call, the device included."""
        import torch

        def once() -> float:
            given = make()
            if self.cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            call(given)
            if self.cuda:
                torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - began)

        for _ in range(warm_up):
            once()
        took = list[float]()
        while len(took) < LEAST or (len(took) < MOST and sum(took) < 1e3 * EACH):
            took.append(once())
        return took
