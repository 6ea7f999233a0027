"""The page of a run: every task with its attempts, their changes, the judge's answers, and the agent's output."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fk_bench.agents.session import ATTEMPT, COMMAND, TASK, failure
from fk_bench.core import pages, rows
from fk_bench.core.rows import Row, Status
from fk_bench.core.terminal.text import printable

COLUMNS = (
    "op",
    "level",
    "status",
    "attempts",
    "best",
    "stub",
    "seen",
    "final (95%)",
    "seconds",
    "tokens",
    "ended",
)
MOST_TEXT = 64 << 10


def cells(row: Row) -> list[str]:
    """A task's row as cells of COLUMNS."""
    m, case = row.metrics, row.case
    return [
        str(row.subject.op), str(case.get("level", "")), row.status.value, f"{m.get('attempts', 0):.0f}",
        "" if case.get("best") is None else str(case["best"]),
        *(_number(m.get(k)) for k in ("stub_speedup", "seen_speedup")),
        _number(m.get("speedup_geomean")) + _interval(row), f"{m.get('seconds', 0):.0f}", f"{m.get('tokens', 0):.0f}",
        str(case.get("ended", "")),
    ]  # fmt: skip


def line(row: Row) -> str:
    """A task in one line."""
    m = row.metrics
    count = f"{m.get('attempts', 0):.0f}"
    said = f"{row.status.value}, {count} attempt{'' if count == '1' else 's'} in {m.get('seconds', 0):.0f} s"
    if "speedup_geomean" in m:
        said += f", speedup {_number(m['speedup_geomean'])}{_interval(row)} on cases that no attempt saw"
    return said + (f": {printable(row.reason)}" if row.reason else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _interval(row: Row) -> str:
    found = row.ci95.get("speedup_geomean")
    return "" if found is None else f" [{found[0]:.3f}, {found[1]:.3f}]"


def write(run: Path) -> Path:
    """Write RUN/transcript.html from the rows and files of the run; returns its path."""
    found, _ = rows.read(run / "rows.jsonl")
    own = [r for r in found if r.command == COMMAND]
    done = [r for r in own if r.kind == TASK]
    path = run / "transcript.html"
    label = own[0].case if own else {}
    text = pages.render(
        "transcript.html", title=f"Agent: {printable(str(label.get('agent', '')))}", rows=done,
        first=own[0] if own else None, when=pages.period(own) if own else "", columns=COLUMNS,
        label={k: printable(str(v)) for k, v in label.items() if k in ("command", "mode", "suffix")},
        tasks=[_task(run, r, own) for r in done], lines=[cells(r) for r in done],
        cpu=bool(own) and own[0].machine.gpus == 0,
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")
    return path


def _task(run: Path, row: Row, own: Sequence[Row]) -> dict[str, Any]:
    mine = [r for r in own if r.kind == ATTEMPT and r.subject.op == row.subject.op]
    log = run / "tasks" / str(row.subject.op) / "agent.log"
    said = (
        printable(log.read_text(errors="replace")[-MOST_TEXT:], MOST_TEXT, lines=True)
        if log.is_file()
        else ""
    )
    return {
        "op": row.subject.op, "row": row, "line": line(row), "best": row.case.get("best"), "log": said,
        "attempts": [_attempt(run, r) for r in mine], "cage": row.case.get("agent_cage") or {},
        "final": json.dumps(row.case.get("feedback", {}), indent=1), "failed": printable(failure(row.case)),
        "tail": printable(str(row.case.get("tail", "")), MOST_TEXT, lines=True),
    }  # fmt: skip


def _attempt(run: Path, row: Row) -> dict[str, Any]:
    number, op = row.case.get("attempt"), str(row.subject.op)
    found: dict[str, Any] = {
        "number": number, "status": row.status.value, "ok": row.status is Status.OK, "reason": row.reason,
        "speedup": _number(row.metrics.get("speedup_geomean")), "time": row.time, "parent": row.case.get("parent"),
        "digest": row.case.get("digest", ""), "diff": "", "feedback": "",
    }  # fmt: skip
    if number is None:
        return found
    folder = run / "tasks" / op / "attempts"
    parent = row.case.get("parent")
    before = _text(folder / f"{parent:03d}" / f"{op}.py") if isinstance(parent, int) else ""
    after = _text(folder / f"{number:03d}" / f"{op}.py")
    changed = difflib.unified_diff(
        before.splitlines(), after.splitlines(), str(parent), str(number), lineterm="", n=2
    )
    found["diff"] = printable("\n".join(changed) if before else after, MOST_TEXT, lines=True)
    found["feedback"] = printable(_text(folder / f"{number:03d}" / "feedback.json"), MOST_TEXT, lines=True)
    return found


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.is_file() else ""
