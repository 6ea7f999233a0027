"""The rows of one run, in memory and in RUN/rows.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from fk_bench.core import machine, rows
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.serving import summary
from fk_bench.serving.config import Level
from fk_bench.serving.lanes import Lane


class Record:
    """Reads the rows of an earlier, unfinished run (`warnings` are about broken lines), and appends to them."""

    def __init__(self, out: Path, command: str, model: str):
        self.path, self.command, self.model = out / "rows.jsonl", command, model
        self.rows: list[Row] = []
        self.warnings: list[str] = []
        if self.path.is_file():
            self.rows, self.warnings = rows.read(self.path)
        self.run_id = self.rows[0].run_id if self.rows else uuid4().hex[:12]

    def row(self, lane: Lane, status: Status, reason: str, case: dict[str, Any]) -> Row:
        if lane.synthetic_acceptance:
            case = {**case, summary.SYNTHETIC: lane.synthetic_acceptance}
        return Row(
            run_id=self.run_id,
            commit=machine.commit(),
            command=self.command,
            machine=machine.machine(),
            versions=machine.interpreter(lane.python).versions if lane.url is None else {},
            status=status,
            reason=reason,
            case=case,
            subject=Subject(
                model=self.model,
                lane=lane.name,
                host=lane.host,
                provider=lane.provider,
            ),
        )

    def add(self, row: Row) -> None:
        self.rows.append(row)
        rows.append(self.path, [row])

    def finished(self) -> set[tuple[str | None, Level, int | None]]:
        """(lane, level, round) of every finished round."""
        last = summary.latest(self.rows)
        done = [r for r in last if r.kind == "round" and r.status is Status.OK]
        return {(r.subject.lane, summary.level_of(r), r.round) for r in done}

    def lane_ok(self, name: str) -> bool:
        """Whether the lane's server ran to the end the last time."""
        mine = [r for r in summary.latest(self.rows) if r.kind == "lane" and r.subject.lane == name]
        return bool(mine) and mine[-1].status is Status.OK
