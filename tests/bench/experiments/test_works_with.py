"""Tests of works_with.py: blame for a failed sleep, rows of lost cells, the cells of each host."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fk_integrations.core.collectives import NOT_FASTER
from fk_integrations.vllm.fusions import ALL_REDUCE

import fastkernels
from fastkernels.patch import PatchError, Row

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.works_with import works_hosts, works_with

TEXTS = [[5, 6, 7], [8, 9]]


class Host:
    """An engine whose log-probabilities are `values`; a sleep costs `unpatched` or `patched` nats, or raises."""

    def __init__(self, unpatched: Any = 0.0, patched: Any = 0.0, refuses: bool = True) -> None:
        self.cost, self.refuses, self.engine = {False: unpatched, True: patched}, refuses, self
        self.lost, self.asleep, self.ours, self.sleeps = 0.0, False, False, 0
        self.rounding, self.requested = 0.0, [""]  # error of a patch, and the requested ops

    def tokens(self, prompts: list[list[int]], n: int) -> list[list[int]]:
        return [[1] * n for _ in prompts]

    def forced(self, texts: list[list[int]]) -> list[list[tuple[float, float]]]:
        assert not self.asleep
        return [[(-1.0 - self.lost, -1.0)] * (len(t) - 1) for t in texts]

    def sleep(self) -> None:
        self.asleep, self.sleeps = True, self.sleeps + 1

    def wake(self) -> None:
        self.asleep, cost = False, self.cost[self.ours]
        if isinstance(cost, Exception):
            raise cost
        self.lost += cost

    def reload(self) -> None:
        """Restore the weights."""

    def patch(self, engine: Any, ops: list[str] | None) -> Host:
        self.ours, self.requested, self.lost = True, ops, self.lost + self.rounding
        return self

    def undo(self) -> None:
        if self.asleep and self.refuses:
            raise PatchError("the engine is asleep")
        self.ours, self.lost = False, self.lost - self.rounding

    def refresh(self) -> argparse.Namespace:
        return argparse.Namespace(rows=[])


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return (the live cell of a feature, the error that ended it) for a host."""

    def run(
        host: Host, feature: str = "sleep", name: str = "sglang"
    ) -> tuple[works_with.Cell, Exception | None]:
        monkeypatch.setattr(works_with, "SGLang", lambda *_: host)
        monkeypatch.setattr(works_with, "Vllm", lambda *_: host)
        monkeypatch.setattr(works_with, "made", lambda *_: (tmp_path, None))
        monkeypatch.setattr(fastkernels, "patch", host.patch)
        monkeypatch.setattr(works_with.Cell, "rows", lambda *_: None)
        args = argparse.Namespace(host=name, child=feature, way="live", work=tmp_path)
        made = works_with.Cell(args)
        try:
            made.live()
        except RuntimeError as error:
            return made, error
        return made, None

    return run


def stages(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line[3:] for line in capsys.readouterr().out.splitlines() if line.startswith("AT ")]


def test_sleep_runs_unpatched_first_then_patched(cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    host = Host()
    made, error = cell(host)
    assert error is None and not made.problems and host.sleeps == 2
    assert made.lines == ["refused: the engine is asleep"]
    assert stages(capsys)[2:5] == [
        "the host sleeps and wakes without a patch", "the host is patched live",
        "the patched host sleeps and wakes, with an undo that must be refused",
    ]  # fmt: skip


def test_unpatched_sleep_error_is_not_blamed_on_patch(cell: Any) -> None:
    theirs, _ = cell(Host(unpatched=1.0))
    assert theirs.problems[0].startswith("stock_awake: log-probabilities are 1.000 apart")
    ours, _ = cell(Host(patched=1.0))
    assert [p.partition(":")[0] for p in ours.problems] == ["awake", "reloaded", "undone"]
    unrefused, _ = cell(Host(refuses=False))
    assert unrefused.problems == ["an undo while the engine sleeps was not refused"]


@pytest.mark.parametrize(
    ("feature", "name", "named"),
    [("tp", "vllm", False), ("tp", "sglang", True), ("tp_norms", "vllm", True)],
)
def test_two_vllm_ranks_are_patched_without_op_list(
    cell: Any, feature: str, name: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requested norms are patched even if the host fuses them; by default they stay with its all-reduce."""
    host = Host()
    made, error = cell(host, feature, name)
    assert error is None and not made.problems
    assert host.requested == (works_with.OPS if named else None)
    environments = []

    def started(command: list[str], env: dict[str, str], **_: Any) -> Any:
        environments.append(env)
        return argparse.Namespace(wait=lambda timeout: None)

    monkeypatch.setenv("FASTKERNELS_OPS", "linear")  # set by the user, not by the cell
    monkeypatch.setattr(works_with.subprocess, "Popen", started)
    monkeypatch.setattr(works_with, "_end", lambda _: None)
    args = argparse.Namespace(host=name, work=tmp_path, out=tmp_path / "rows.jsonl", timeout=1)
    for way in ("live", "start"):
        works_with.run(args, feature, way)
    live, start = environments
    assert "FASTKERNELS" not in live and "FASTKERNELS_OPS" not in live
    assert start["FASTKERNELS"] == "1"
    assert start.get("FASTKERNELS_OPS") == (",".join(works_with.OPS) if named else None)


def test_default_patch_leaves_norms_to_the_all_reduce() -> None:
    def said(norms: str) -> list[str]:
        made = works_with.Cell.__new__(works_with.Cell)
        made.args, made.problems = argparse.Namespace(child="tp", host="vllm"), []
        made.expected = works_with.EXPECTED["tp", "vllm"]
        of_shape = "left to the host: N=768 K=1024 dtype=bfloat16 is not tuned on NVIDIA H200"
        reasons = {"rms_norm": norms, "linear": f"16 {of_shape}", "attention": f"4 {of_shape}"}
        rows = [Row(0, op, "Theirs", 0, "off", reason=why) for op, why in reasons.items()]
        rows += [Row(0, op, "Theirs", 1, "active", calls=3) for op in ("rotary_emb", "embedding")]
        made.rows(rows)
        return made.problems

    assert said(f"9 left to the host: {ALL_REDUCE}") == []
    (problem,) = said("")
    assert problem.startswith(
        "rms_norm expected 'left to the host: vLLM adds it to the all-reduce before it'"
    )


@pytest.mark.parametrize(("feature", "op"), [("tp_sums", "all_reduce"), ("ep_dispatch", "ep_dispatch")])
@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_exchanges_are_ours_or_not_faster(feature: str, op: str, host: str) -> None:
    assert op in (works_with.named(feature, host) or ()) and feature in works_with.TWO
    always = ("rms_norm", "rotary_emb", "embedding", "linear", "attention")

    def said(row: Row) -> list[str]:
        made = works_with.Cell.__new__(works_with.Cell)
        made.args, made.problems = argparse.Namespace(child=feature, host=host), []
        made.expected = {}
        made.rows([row, *(Row(0, other, "Theirs", 1, "active", calls=3) for other in always)])
        return made.problems

    assert said(Row(0, op, "Group", 1, "active", calls=3)) == []
    assert said(Row(0, op, "Group", 0, "off", reason=f"left to the host: {NOT_FASTER}")) == []
    (problem,) = said(Row(0, op, "Group", 0, "off", reason="rank 1: no peer access"))
    assert problem == f"{op} did not run: rank 1: no peer access"
    assert said(Row(0, op, "Group", 1, "active", calls=0)) == [f"{op} did not run: "]


def test_data_parallel_ranks_of_vllm_are_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, str]] = []

    def started(command: list[str], env: dict[str, str], stdout: Any, **_: Any) -> Any:
        found = {"problems": ["wrong"] if begun else [], "metrics": {"start_s": 1.0}, "lines": []}
        stdout.write("CELL " + json.dumps(found))
        begun.append(env)
        return argparse.Namespace(wait=lambda timeout: None)

    monkeypatch.setattr(works_with.subprocess, "Popen", started)
    monkeypatch.setattr(works_with, "_end", lambda _: None)
    args = argparse.Namespace(host="vllm", work=tmp_path, out=tmp_path / "rows.jsonl", timeout=1)
    status, result = works_with.run(args, "ep_dispatch", "live")
    assert (
        status == "wrong"
        and result["problems"] == ["rank 1: wrong"]
        and result["metrics"] == {"start_s": 1.0}
    )
    assert [(env["VLLM_DP_RANK"], env["VLLM_DP_SIZE"]) for env in begun] == [("0", "2"), ("1", "2")]
    assert len({env["VLLM_DP_MASTER_PORT"] for env in begun}) == 1
    assert all(env["NCCL_NVLS_ENABLE"] == "0" for env in begun)
    begun.clear()
    works_with.run(args, "tp_sums", "live")
    assert len(begun) == 1 and "VLLM_DP_RANK" not in begun[0]


@pytest.mark.parametrize(("feature", "allowed"), [("moe", 0.15), ("moe_fp8", 0.495)])
def test_fp8_experts_have_a_larger_tolerance(cell: Any, feature: str, allowed: float) -> None:
    for far, wrong in ((allowed - 0.01, False), (allowed + 0.01, True)):
        host = Host()
        host.rounding = far
        made, _ = cell(host, feature)
        assert [p.partition(":")[0] for p in made.problems] == (["patched"] if wrong else [])


@pytest.mark.parametrize("patched", [False, True])
def test_row_of_a_dead_cell_names_its_stage(
    cell: Any, patched: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dying scheduler ends all processes, so only the log is left."""
    failed = RuntimeError("no such memory")
    _, error = cell(Host(patched=failed) if patched else Host(unpatched=failed))
    assert error is failed
    log = tmp_path / "cell.log"
    log.write_text(capsys.readouterr().out + "ValueError: Pointer argument (at 0)\nSIGQUIT received\n")
    status, result = works_with.outcome("crash", log)
    wanted = "the patched host sleeps and wakes" if patched else "the host sleeps and wakes without a patch"
    (problem,) = result["problems"]
    assert status == "crash" and problem.startswith(f"crash while {wanted}")
    assert "ValueError: Pointer argument (at 0)" in problem
    said = {"problems": ["RuntimeError: lost"], "metrics": {"start_s": 1.0}, "lines": [], "crash": True}
    log.write_text(f"AT the patch is undone\nCELL {json.dumps(said)}\n")
    status, result = works_with.outcome("crash", log)
    assert status == "crash" and result["problems"] == ["RuntimeError: lost while the patch is undone"]
    assert result["metrics"] == {"start_s": 1.0}


def test_feature_of_other_host_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(works_with, "run", lambda *_: pytest.fail("a cell was run"))
    for host, feature in (("sglang", "tp_norms"), ("vllm", "gptq_marlin")):
        args = argparse.Namespace(host=host, ways="live", out=tmp_path / "rows.jsonl", work=tmp_path)
        assert works_with.cells(args, feature) == 0
        assert f"{host} {feature} live: skipped" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [r["reason"] for r in rows] == ["no feature of sglang", "no feature of vllm"]


def test_start_without_live_reference_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(works_with, "made", lambda _, feature: begun.append(feature))
    monkeypatch.setattr(works_with, "cells", lambda *_: 0)
    requested = ["--host", "vllm", "--features", "plain,window", "--ways", "start", "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["works_with.py", *requested])
    (tmp_path / "vllm-plain.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        works_with.main()
    assert ended.value.code == 2 and begun == []
    assert "--work lacks ['window']: add live" in capsys.readouterr().err
    (tmp_path / "vllm-window.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        works_with.main()
    assert ended.value.code == 0 and begun == ["plain", "window"]


def test_prebuild_runs_in_parallel_and_counts_failures(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(works_hosts.KERNELS, "sglang", {"json": "nothing()", "time": "sleep(0)"})
    assert works_hosts.prebuild("sglang") == 1
    said = capfd.readouterr().out
    assert "time: compiled" in said and "json: not compiled, exit status 1" in said


@pytest.mark.parametrize(
    ("feature", "requested", "seconds"),
    [("plain", None, 300), ("tp", None, 420), ("plain", 240, 240), ("tp", 240, 240)],
)
def test_given_limit_applies_to_every_cell(
    feature: str, requested: float | None, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    started = argparse.Namespace(wait=lambda timeout: limits.append(timeout))
    monkeypatch.setattr(works_with.subprocess, "Popen", lambda *_, **__: started)
    monkeypatch.setattr(works_with, "_end", lambda _: None)
    args = argparse.Namespace(host="vllm", work=tmp_path, out=tmp_path / "rows.jsonl", timeout=requested)
    works_with.run(args, feature, "live")
    assert limits == [pytest.approx(seconds, abs=5)]
