"""The choices of a point, timed in this process: in CUDA graphs, cold L2, interleaved with production's kernel."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from fastkernels.core.tuning import Chip
from fastkernels.verify import measure
from fastkernels.verify.measure import Point, Ratio
from fk_bench.core import machine, rows
from fk_bench.core.rows import Row, Subject
from fk_bench.tune.choice import Choice, point_of, subject_of
from fk_bench.tune.compile import Compiling, Ready

ROUNDS, FIRST_ROUNDS = 15, 4  # clear losers run in the first ones only
WORTH = 1.02  # the interval of the judge is wider than a smaller gain: it would not confirm one


@dataclass(frozen=True)
class Screened:
    """A correct choice with its time, and how many times as fast as production it is; None without a kernel of it."""

    choice: Choice
    us: float
    ratio: Ratio | None

    @property
    def faster(self) -> bool:
        """Whether it is worth the judge's time."""
        return self.ratio is None or (self.ratio.low > 1 and self.ratio.value >= WORTH)


class Screen:
    """Times choices on one device.

    compile_s  the limit for compiling the kernels of all points; ready: processes for it that have been started
    """

    def __init__(self, device: str, run_id: str, compile_s: float = 120.0, ready: Ready | None = None):
        self.device, self.run_id, self.compile_s = torch.device(device), run_id, compile_s
        self.chip, self._ready = Chip.of(device), ready
        self._failed: dict[tuple[Point, str], str] = {}
        self._versions = machine.interpreter(sys.executable).versions

    @contextmanager
    def compiling(
        self, points: Sequence[tuple[str, Mapping[str, Any], Mapping[str, int], Sequence[Choice]]]
    ) -> Iterator[None]:
        """Compile the kernels of these points (op, shape, sizes, choices); the block runs meanwhile.

        On a GPU those of Triton in processes of their own, which take seconds to start, and others in threads here.
        """
        several = {point_of(name, shape, sizes): choices for name, shape, sizes, choices in points}
        end, apart = time.monotonic() + self.compile_s, None
        if self.device.type == "cuda":
            of_triton = {point: [c for c in own if "triton" in c.provider] for point, own in several.items()}
            asked = {p: own for p, own in of_triton.items() if own}
            apart = Compiling(asked, self.device.type, end, ready=self._ready)
            several = {p: [c for c in own if c not in of_triton[p]] for p, own in several.items()}
        subjects = {point: [subject_of(point.op, c) for c in choices] for point, choices in several.items()}

        def here() -> dict[tuple[Point, str], str]:
            with torch.inference_mode():
                return measure.compiled(subjects, self.device, self._generator(), end)

        with ThreadPoolExecutor(1) as pool:
            compiling = pool.submit(here)
            yield
            self._failed |= compiling.result()
        if apart is not None:
            self._failed |= apart.wait()

    def time(
        self,
        name: str,
        shape: Mapping[str, Any],
        sizes: Mapping[str, int],
        several: Sequence[Choice],
        longer: bool = False,
    ) -> tuple[list[Screened], Row]:
        """The correct choices, fastest first, and a row with all times and the reasons against the others.

        longer: in the longer calls of the point, for which there may be no room: NoRoom, OutOfMemoryError.
        """
        point, usual = point_of(name, shape, sizes, longer), measure.production(name, self.device.type)
        found: list[Screened] = []
        said: dict[str, str] = {}
        with torch.inference_mode():
            cold = measure.COLD * self.chip.l2_bytes
            calls = measure.arguments(point, self.device, self._generator(), cold)
            host = None if usual is None else measure.Subject(usual, {})
            right = []
            for choice in several:
                subject = subject_of(name, choice)
                if subject.provider is usual and not choice.params:  # production itself
                    continue
                reason = self._failed.get((point, subject.name)) or self._wrong(
                    point, subject, host, calls[0]
                )
                if reason is None:
                    right.append((choice, subject))
                else:
                    said[str(choice)] = reason
            every = [*([] if host is None else [host]), *(subject for _, subject in right)]
            times = measure.interleaved(every, calls, self.device, ROUNDS, FIRST_ROUNDS) if right else []
        theirs = times[0] if host is not None and times else None
        for (choice, _), ours in zip(right, times[len(times) - len(right) :], strict=True):
            ratio = None if theirs is None else Ratio.of(ours, theirs[: len(ours)])
            found.append(Screened(choice, 1e6 * median(ours) / len(calls), ratio))
        found.sort(key=lambda one: one.us)
        metrics = {f"us {one.choice}": one.us for one in found}
        if usual is not None and theirs is not None:
            metrics[f"us {usual.name}, production"] = 1e6 * median(theirs) / len(calls)
        case = {
            "kind": "screened",
            "shape": dict(shape),
            "sizes": dict(sizes),
            "rejected": said,
            "longer": longer,
        }
        row = Row(
            run_id=self.run_id, command="tune", commit=machine.commit(), machine=machine.machine(),
            versions=self._versions, subject=Subject(op=name), case=case, metrics=metrics,
            baseline=None if usual is None else usual.name, status=rows.Status.OK if found else rows.Status.SKIPPED,
            reason="" if found else "; ".join(dict.fromkeys(said.values())),
        )  # fmt: skip
        return found, row

    def _wrong(self, point: Point, subject: Any, host: Any, args: list[Any]) -> str | None:
        if host is None:
            reason: str | None = subject.unsupported(args)
            return reason
        try:
            return measure.wrong(point, subject, host, args)
        except Exception as error:  # of a kernel: the choice is left out
            return f"{type(error).__name__}: {error}".splitlines()[0]

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)
