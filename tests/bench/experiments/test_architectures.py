"""Plan, resumption and table of the times of nine models; the models themselves run in `--tiny`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import Row, Status, Subject, append, read
from fk_bench.evaluate.run.hosts.libraries import MODELS
from support.h200_plan import ROOT

from fastkernels.core import registry

sys.path.insert(0, str(ROOT / "bench"))
from experiments.nine_models import nine_models as nine


def row(name: str, lane: str, case: dict[str, int], ms: float | None) -> Row:
    metrics = {} if ms is None else {"call_ms_p50": ms}
    return Row(
        run_id="nine_models", command="nine_models.py", subject=Subject(model=name, provider=lane),
        case={"kind": "call", **case}, metrics=metrics, status=Status.OK if ms else Status.FAILED,
    )  # fmt: skip


def options(out: Path, **more: Any) -> argparse.Namespace:
    given = {"out": out, "seconds": 500.0, "limit": 100.0, "only": None, "tiny": False, **more}
    return argparse.Namespace(**given)


def test_models_are_those_of_the_suite() -> None:
    known = nine.subjects()
    assert len(known) == 9
    for name, subject in known.items():
        assert nine.declared(name).config, name
        if subject.other:
            assert nine.declared(subject.other).library in MODELS
    assert len(nine.criteo()) == 26


def test_provider_of_each_op_is_one_that_it_has() -> None:
    for pair in nine.plain_ops().split(","):
        name, _, provider = pair.partition(":")
        assert provider in [p.name for p in registry.get(name).op.providers], pair


def test_table_has_the_fastest_reference() -> None:
    case = {"batch": 1, "points": 100_000}
    rows = [
        row("ptv3", "fastkernels", case, 4.0),
        row("ptv3", nine.PLAIN, case, 9.0),
        row("ptv3", "library", case, 6.0),
        row("ptv3", nine.COMPILED, case, None),
    ]
    last = nine.summary(rows).splitlines()[-1]
    assert (
        last
        == "| ptv3 | batch 1, points 100000 | 4.000 | library | 6.000 | 1.50 | 1.00 | library, compiled |"
    )


def test_full_sizes_without_a_gpu_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nine.machine, "machine", lambda: argparse.Namespace(gpus=[]))
    monkeypatch.setattr(nine, "run_all", lambda options: 0)
    monkeypatch.setattr(sys, "argv", ["nine_models", "--out", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit):
        nine.main()
    assert "there is no GPU" in capsys.readouterr().err


def test_lanes_end_on_their_own_and_are_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, started, run = tmp_path / "rows.jsonl", [], subprocess.run

    def child(words: list[str], **more: Any) -> Any:
        if "--child" not in words:  # of the rows' commit and machine
            return run(words, **more)
        name, lane = words[words.index("--child") + 1 :][:2]
        started.append((name, lane))
        if lane == nine.PLAIN:
            raise subprocess.TimeoutExpired(words, more["timeout"])
        if lane == nine.OURS:
            append(out, [row(name, lane, case, 2.0) for case in nine.subjects()[name].cases])
        return argparse.Namespace(returncode=0 if lane == nine.OURS else 3)

    monkeypatch.setattr(nine.subprocess, "run", child)
    assert nine.run_all(options(out, only="gaussians")) == 1
    assert started == [("gaussians", lane) for lane in (nine.OURS, nine.PLAIN, nine.LIBRARY)]
    reasons = {str(r.subject.provider): r.reason for r in read(out)[0]}
    assert reasons == {
        nine.OURS: "",
        nine.PLAIN: "not done within 100 s",
        nine.LIBRARY: "the process ended with status 3",
    }
    assert nine.run_all(options(out, only="gaussians")) == 0 and len(started) == 3
    assert (
        nine.run_all(options(tmp_path / "more.jsonl", only="gaussians", seconds=5.0)) == 0
        and len(started) == 3
    )
    assert nine.run_all(options(out, only="nothing")) == 2
