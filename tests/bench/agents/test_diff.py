"""`fk-bench diff` of two runs of agents: task by task, also where one of them has no winner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fk_bench.cli import main
from fk_bench.core.rows import Machine, Row, Status, Subject, append


def run(folder: Path, suffix: str, **tasks: tuple[float, float, float] | None) -> Path:
    """A run with these tasks: {op: speedup with its interval, or None without a winner}."""
    rows = [
        Row(
            run_id=suffix, command="agent-loop", status=Status.OK, subject=Subject(op=op), machine=Machine(gpu="H200"),
            metrics={"attempts": 3.0, "tokens": 40.0, "seconds": 9.0} | ({"speedup_geomean": won[0]} if won else {}),
            ci95={"speedup_geomean": won[1:]} if won else {},
            case={"kind": "task", "best": 1 if won else None, "agent": "codex", "suffix": suffix},
        )
        for op, won in tasks.items()
    ]  # fmt: skip
    (folder / suffix).mkdir()
    append(folder / suffix / "rows.jsonl", rows)
    return folder / suffix


def diff(capsys: pytest.CaptureFixture[str], status: int, *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["diff", *words])
    assert (ended.value.code or 0) == status
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_settings_of_an_agent_are_compared_by_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = run(tmp_path, "a", rms_norm=(1.2, 1.1, 1.3), gelu=None, linear=(1.0, 0.9, 1.1), silu_and_mul=None)
    b = run(
        tmp_path,
        "b",
        rms_norm=(1.8, 1.6, 2.0),
        gelu=(1.5, 1.4, 1.6),
        linear=(1.05, 0.95, 1.2),
        silu_and_mul=None,
    )
    found = diff(capsys, 0, str(a), str(b))
    assert {x["op"]: x["verdict"] for x in found["tasks"]} == {
        "rms_norm": "better", "gelu": "only B", "linear": "agree", "silu_and_mul": "no winner in either",
    }  # fmt: skip
    assert found["tasks"][0]["ratio"] == pytest.approx(1.5)
    assert [label["suffix"] for label in found["labels"]] == ["a", "b"]
    lost = diff(capsys, 1, str(b), str(a))
    assert not lost["ok"] and "gelu: only A" in lost["problems"]
    assert (
        "rms_norm: 0.667 is below 0.9" in diff(capsys, 1, str(b), str(a), "--fail-under", "0.9")["problems"]
    )


def test_missing_tasks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run(tmp_path, "a", gelu=(1.0, 0.9, 1.1), linear=None), run(tmp_path, "b", gelu=(1.0, 0.9, 1.1))
    assert diff(capsys, 1, str(a), str(b))["problems"] == ["linear: not in B"]
    assert diff(capsys, 0, str(b), str(a))["problems"] == ["linear: not in A"]
