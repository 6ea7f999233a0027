"""The baseline against itself: `fk-bench kernels --identity`, and the seconds by phase that every row has."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from fk_bench.core.rows import Row, Status, Subject, read
from fk_bench.core.wall_time import OTHER, Phases
from fk_bench.kernels import identity
from support.commands import fk_bench_here, last_json


def row(speedup: float | None, interval: tuple[float, float] = (0.9, 1.1), status: Status = Status.OK) -> Row:
    made = Row(run_id="r", command="kernels", status=status, subject=Subject(op="gelu"), case={"name": "one"})
    if speedup is not None:
        made.metrics["speedup"], made.ci95["speedup"] = speedup, interval
    return made


def test_identity_counts_intervals_and_unsteady_cases() -> None:
    good, off, busy = row(1.02), row(0.8, (0.7, 0.9)), row(None)
    found = identity.summary([good] * 38 + [off] * 2)
    assert found["ok"] and (found["timed"], found["inside"], len(found["outside"])) == (40, 38, 2)
    assert found["mean"] == pytest.approx(math.exp((38 * math.log(1.02) + 2 * math.log(0.8)) / 40), abs=1e-4)
    assert found["low"] == 0.8 and found["high"] == 1.02
    assert not identity.summary([good] * 37 + [off] * 3)["ok"]
    assert identity.summary([good] * 9 + [busy])["ok"] and not identity.summary([good] * 8 + [busy] * 2)["ok"]
    wrong = identity.summary([good, row(None, status=Status.WRONG)])
    assert (wrong["left_out"], wrong["unsteady"], wrong["ok"]) == (1, 0, True)
    assert not identity.summary([])["ok"] and not identity.summary([busy])["ok"]


def test_identity_runs_the_baseline_on_both_sides(tmp_path: Path) -> None:
    ops = ("gelu", "rms_norm")
    result = fk_bench_here(
        "kernels",
        *ops,
        "--identity",
        "--against",
        "reference",
        "--device",
        "cpu",
        "--json",
        "--out",
        tmp_path / "run",
    )
    line, status = last_json(result), result.returncode
    rows, _ = read(tmp_path / "run" / "rows.jsonl")
    assert [r.subject.op for r in rows] == list(ops) and line["cases"] == 2
    assert {(r.baseline, r.status) for r in rows} == {("reference", Status.OK)}
    assert status == (0 if line["ok"] else 1) and line["identity"] and line["timed"] + line["unsteady"] == 2
    for found in rows:
        seconds = found.case["seconds"]
        assert {"inputs", "oracle", "calls", "stop"} <= set(seconds)
        assert sum(seconds.values()) == pytest.approx(found.metrics["wall_s"], rel=0.05, abs=0.01)
    assert all(0.2 < r.metrics.get("speedup", 1.0) < 5 for r in rows)


@pytest.mark.parametrize("other", [("--cheats",), ("--no-time",), ("--candidate", "x.py")])
def test_identity_refuses_what_it_does_not_compare(
    other: tuple[str, ...],
) -> None:
    result = fk_bench_here("kernels", "gelu", "--identity", "--device", "cpu", *other)
    assert result.returncode != 0 and "--identity" in result.stderr


def test_phases_count_inner_phases_once() -> None:
    phases, start = Phases(), time.perf_counter()
    phases.take()
    with phases.of("outer"):
        time.sleep(0.02)
        with phases.of("inner"):
            time.sleep(0.5)
        with pytest.raises(ValueError), phases.of("inner"):
            raise ValueError
    found = phases.take()
    assert found["inner"] >= 0.5 and found["outer"] >= 0.02
    assert sum(found.values()) <= time.perf_counter() - start  # "outer" does not contain "inner"
    assert set(phases.take()) == {OTHER}
