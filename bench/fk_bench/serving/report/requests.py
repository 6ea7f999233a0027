"""The requests of a run by outcome: completed, failed with which error, ended by length or by a stop.

Counts are from the rows. Errors by kind and reasons to finish are from RUN/requests/ where the run has it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fk_bench.core.rows import Row
from fk_bench.serving.config import Level
from fk_bench.serving.summary import latest, level_of

_NUMBER = re.compile(r"\b(0x[0-9a-f]+|[0-9a-f]{8,}|\d+)\b")  # what differs between two errors of one kind
_ERROR = 160  # characters of an error that are shown


@dataclass
class Outcomes:
    """The requests of a lane at one load, in all measured rounds; the warm-up is not counted."""

    lane: str
    level: Level
    sent: int = 0
    failed: int = 0
    rounds: Counter[str] = field(default_factory=Counter)  # by the status of their row
    finished: Counter[str] = field(default_factory=Counter)  # by finish_reason
    errors: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    e2el_s: list[float] = field(default_factory=list)

    @property
    def completed(self) -> int:
        return self.sent - self.failed


def measured_rounds(found: Sequence[Row]) -> list[Row]:
    """The last row of each round, whatever its status."""
    return [r for r in latest(found) if r.kind == "round" and r.subject.lane]


def outcomes(found: Sequence[Row], run: Path | None = None) -> list[Outcomes]:
    """One for each lane and load."""
    made: dict[tuple[str, Level], Outcomes] = {}
    for row in measured_rounds(found):
        key = (str(row.subject.lane), level_of(row))
        one = made.setdefault(key, Outcomes(*key))
        one.sent += int(row.metrics.get("requests", 0))
        one.failed += int(row.metrics.get("requests_failed", 0))
        one.rounds[row.status.value] += 1
        file = None if run is None else run / "requests" / f"{key[0]}.{key[1].label}.r{row.round}.jsonl"
        requests = _read(file)
        for request in requests:
            _count(one, request)
        if not requests and row.metrics.get("requests_failed"):
            one.errors[_kind(row.reason)] += int(row.metrics["requests_failed"])
    return sorted(made.values(), key=lambda o: o.level.order)


def _read(file: Path | None) -> list[dict[str, Any]]:
    if file is None or not file.is_file():
        return []
    try:
        return [json.loads(line) for line in file.read_text(errors="replace").splitlines() if line.strip()]
    except json.JSONDecodeError:  # a run that was killed while it wrote
        return []


def _count(one: Outcomes, request: dict[str, Any]) -> None:
    error, chunks = request.get("error"), request.get("chunks_s") or []
    if error:
        one.errors[_kind(str(error))] += 1
        return
    one.finished[str(request.get("finish_reason") or "no reason")] += 1
    if chunks:
        one.ttft_s.append(float(chunks[0]))
        one.e2el_s.append(float(chunks[-1]))


def _kind(error: str) -> str:
    """An error without its numbers, so that equal ones are counted together; the HTTP status stays."""
    text = " ".join(error.split())
    head, rest = (text[:8], text[8:]) if re.match(r"HTTP \d{3}", text) else ("", text)
    shown = head + _NUMBER.sub("N", rest)
    return shown if len(shown) <= _ERROR else shown[: _ERROR - 1] + "…"
