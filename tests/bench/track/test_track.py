"""Runs in a local store of MLflow: lineage of candidates, the best one, differences, and stores that are down."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fk_bench.cli import main
from fk_bench.core.rows import Machine, Row, Status, Subject, append
from fk_bench.track import store
from fk_bench.track.store import Store, TrackError

OP = "rms_norm"


def row(command: str, kind: str, status: Status = Status.OK, file: Path | None = None, **more: Any) -> Row:
    metrics = more.pop("metrics", {})
    return Row(
        run_id="r1", command=command, status=status, machine=Machine(cpu="cpu"), metrics=metrics,
        subject=Subject(op=OP, candidate=None if file is None else str(file)), case={"kind": kind, "level": 1, **more},
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An agent's run: a stub, a faster attempt, a wrong one made from it, and the final score of the faster one."""
    folder = tmp_path / "run"
    files = []
    for n in range(3):
        files.append(folder / "attempts" / str(n) / f"{OP}.py")
        files[-1].parent.mkdir(parents=True)
        files[-1].write_text(f"BLOCK = {n}\n")
    tried = [
        (0, None, "aaa0", Status.OK, 0.5),
        (1, 0, "bbb1", Status.OK, 2.0),
        (2, 1, "ccc2", Status.WRONG, 9.0),
    ]
    rows = [
        row(
            "agent-loop", "attempt", status, files[n], attempt=n, parent=parent, digest=digest, stub=n == 0,
            metrics={"speedup_geomean": speedup}, agent="tuner",
        )
        for n, parent, digest, status, speedup in tried
    ]  # fmt: skip
    rows += [
        row("agent-loop", "attempt", Status.FAILED, lost=True),
        row("agent-loop", "task", file=files[1], best=1, digest="bbb1", metrics={"speedup_geomean": 1.8}),
        row("agent-loop", "run", metrics={"tasks": 1.0}),
    ]
    append(folder / "rows.jsonl", rows)
    return folder


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(store.VARIABLE, raising=False)
    return (tmp_path / "mlflow").as_uri()


def track(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main_status = 0
    try:
        main(["track", *words, "--json"])
    except SystemExit as ended:
        main_status = int(ended.code or 0)
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (main_status == 0) is out["ok"]
    return out


def test_lineage_leads_from_the_best_to_the_stub(
    run: Path, uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = track([str(run), "--uri", uri], capsys)["logged"]
    assert logged == {str(run): 5}
    assert track([str(run), "--uri", uri], capsys)["logged"] == {str(run): 0}  # once is enough
    shown = track(["show", OP, "--uri", uri], capsys)["candidates"]
    assert [(c["digest"], c["parent"], c["stage"]) for c in shown] == [
        ("aaa0", "", "stub"), ("bbb1", "aaa0", "attempt"), ("ccc2", "bbb1", "attempt"), ("bbb1", "bbb1", "final"),
    ]  # fmt: skip
    best = track(["best", OP, "--uri", uri], capsys)
    assert best["best"]["speedup"] == 1.8  # the final score, not that of an attempt or of a wrong one
    assert best["lineage"] == ["bbb1", "bbb1", "aaa0"]
    changed = track(["diff", "aaa", "ccc", "--uri", uri], capsys)
    assert changed["changed_lines"] == 5 and [s["digest"] for s in changed["sides"]] == ["aaa0", "ccc2"]


def evaluated() -> list[Row]:
    """Rows of a set's evaluation: an op alone, a block with the op inside, an item in a host, and one that is wrong."""
    digests = {OP: "bbb1"}
    item = {"kept": [OP], "variant": "record", "set": "mine", "digests": digests}
    right = {"throughput_speedup": 1.21, "latency_speedup": 1.0, "correctness": 0.99}
    made = [
        row("eval", "op", how="independent", set="mine", digests=digests, metrics={"speedup_geomean": 1.7}),
        row("eval", "op", how="composed", set="mine", digests=digests, metrics={"speedup_geomean": 1.3}),
        row("eval", "item", metrics=right, **item),
        row("eval", "item", metrics={**right, "correctness": 0.2}, **item),
        row("eval", "item", metrics=right, **{**item, "kept": []}),
        row("eval", "score", set="mine", metrics={"score": 0.9}),
    ]
    made[1].subject.op = "llama.mlp"
    for one, model in zip(made[2:5], ("llama", "wrong", "without"), strict=True):
        one.subject = Subject(model=model, host="vllm")
    return made


def test_lineage_has_scores_at_every_level(
    run: Path, uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = evaluated()
    for name in ("eval", "whole"):
        (tmp_path / name).mkdir()
    append(tmp_path / "eval" / "rows.jsonl", rows[:2])
    append(tmp_path / "whole" / "rows.jsonl", rows)
    track([str(run), str(tmp_path / "eval"), "--uri", uri], capsys)
    assert track([str(tmp_path / "whole"), "--uri", uri], capsys)["logged"] == {str(tmp_path / "whole"): 2}
    best = track(["best", OP, "--uri", uri], capsys)
    assert (best["best"]["digest"], best["best"]["speedup"]) == ("bbb1", 1.8)
    assert best["levels"] == pytest.approx(
        {"independent": 1.7, "composed_llama.mlp": 1.3, "host_vllm_llama": 1.1}
    )
    assert best["lineage"][-2:] == ["bbb1", "aaa0"]


def test_best_candidate_is_of_one_chip(
    run: Path, uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = row("agent-loop", "task", file=run / "attempts" / "1" / f"{OP}.py", digest="ddd3")
    task.machine, task.run_id, task.metrics = Machine(gpu="NVIDIA H200"), "r2", {"speedup_geomean": 1.2}
    task.provisional = "production's libraries are missing"
    (tmp_path / "gpu").mkdir()
    append(tmp_path / "gpu" / "rows.jsonl", [task])
    track([str(run), str(tmp_path / "gpu"), "--uri", uri], capsys)
    said = track(["best", OP, "--uri", uri], capsys)["error"]
    assert "several chips" in said and "NVIDIA H200, cpu" in said
    for chip, digest, speedup in (("h200", "ddd3", 1.2), ("cpu", "bbb1", 1.8)):
        best = track(["best", OP, "--chip", chip, "--uri", uri], capsys)["best"]
        assert (best["digest"], best["speedup"]) == (digest, speedup)
    assert track(["best", OP, "--chip", "H200", "--uri", uri], capsys)["best"]["provisional"]
    with pytest.raises(SystemExit):
        main(["track", "best", OP, "--chip", "H200", "--uri", uri])
    assert "1.200 (provisional)" in " ".join(capsys.readouterr().out.split())


def test_source_is_kept(run: Path, uri: str) -> None:
    kept = Store(uri)
    kept.log(run)
    assert {kept.source(c) for c in kept.candidates(OP)} == {"BLOCK = 0\n", "BLOCK = 1\n", "BLOCK = 2\n"}


def test_unknown_names_are_errors(run: Path, uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    Store(uri).log(run)
    assert "no single digest" in track(["diff", "aaa", "zzz", "--uri", uri], capsys)["error"]
    assert "no right candidate of silu" in track(["best", "silu", "--uri", uri], capsys)["error"]
    assert "takes DIGEST DIGEST" in track(["diff", "aaa", "--uri", uri], capsys)["error"]
    assert "no such run: nothing" in track(["nothing", "--uri", uri], capsys)["error"]


def test_server_that_is_down_is_said_once(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that logs itself goes on."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    said = store.track(run, "http://127.0.0.1:9")
    assert "127.0.0.1:9" in said
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(TrackError, match=r"fastkernels\[mlflow\]"):
        Store(uri)


def test_variable_or_flag_starts_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.VARIABLE, raising=False)
    assert not store.wanted(False) and store.wanted(True)
    monkeypatch.setenv(store.VARIABLE, "file:///somewhere")
    assert store.wanted(False)


def test_eval_logs_its_scores(tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finished:
        """An evaluation whose items have all been measured."""

        def __init__(self, suite: Any, sets: Any, run: Path, *_: Any) -> None:
            self.run_folder = run

        def resume(self, force: bool) -> None: ...

        def run(self, *_: Any) -> None: ...

        def finish(self, *_: Any) -> bool:
            score = row("eval", "score", set="mine", metrics={"score": 0.9})
            append(self.run_folder / "rows.jsonl", [score])
            return True

    monkeypatch.setattr("fk_bench.evaluate.run.command.Evaluation", Finished)
    monkeypatch.setenv(store.VARIABLE, uri)
    candidates = tmp_path / "mine"
    candidates.mkdir()
    (candidates / f"{OP}.py").write_text(f"def {OP}(x, weight, eps):\n    return x\n")
    with pytest.raises(SystemExit) as ended:
        main(["eval", "smoke", "--set", f"mine={candidates}", "--out", str(tmp_path / "out"), "--track"])
    assert ended.value.code == 0
    (logged,) = Store(uri)._search("tags.`fk.command` = 'eval'")
    assert logged.data.tags["fk.set"] == "mine" and logged.data.metrics["score"] == 0.9
