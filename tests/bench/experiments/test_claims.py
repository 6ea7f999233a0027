"""The page of published claims, from recorded verdicts and rows of an evaluation."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import sys
from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.evaluate.adapters.sets import SetFile

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/experiments/foreign_candidates"))
import claims
import judge_sets

PUBLISHED = {("a", "gelu"): 1.5, ("a", "rms_norm"): 1.2, ("a", "linear"): 0.99, ("b", "gelu"): 2.0}


def judged(name: str, op: str, **more: Any) -> dict[str, Any]:
    row = {"set": name, "op": op, "own": {"ok": 4}, "held_out": {"ok": 4}, "deployed": "", "serving": ""}
    return {**row, "speedup": 1.3, "ci95": [1.2, 1.4], "held_out_speedup": 1.1, **more}


def item(host: str, kept: list[str], low: float, **more: Any) -> Row:
    case = {"kind": "item", "set": "a", "kept": kept, "dropped": [], **more}
    ci95 = {f"{phase}_speedup": (low, 1.5) for phase in ("throughput", "latency")}
    status = Status.OK if kept else Status.FAILED
    return Row(run_id="r", command="eval", status=status, subject=Subject(host=host), case=case, ci95=ci95)


ROWS = [
    item("vllm", ["gelu"], 1.01, dropped=[{"op": "rms_norm", "reason": "incorrect", "text": ""}]),
    item("sglang", ["gelu", "rms_norm"], 0.98),
    item("sglang", ["gelu"], 3.0, variant="best"),  # unranked
]
JUDGED = [
    judged("a", "gelu", deployed="not deployed: under torch.compile the candidate runs no kernel of its own"),
    judged("a", "rms_norm", ci95=[0.9, 1.4], held_out_speedup=None),
    judged("a", "linear"),
    judged("b", "gelu", held_out={"ok": 3, "wrong": 1}),
    {"set": "b", "file": "L1/silu.py", "declined": "no op"},
]


def test_claims_of_recorded_rows() -> None:
    gelu, linear, norm, wrong = claims.claims(JUDGED, PUBLISHED, ROWS)
    assert (gelu.on_this_chip, gelu.at_other_sizes, gelu.hosts) == (
        "yes",
        "yes",
        {"vllm": "yes", "sglang": "no"},
    )
    assert (norm.on_this_chip, norm.at_other_sizes, norm.hosts["vllm"]) == ("no", "-", "no")
    assert not linear.claims and linear.hosts == {"vllm": "-", "sglang": "-"}
    assert (wrong.right, wrong.on_this_chip, wrong.at_other_sizes) == (False, "no", "no")


def test_page_counts_only_files_that_claim_a_speedup() -> None:
    text = claims.page(claims.claims(JUDGED, PUBLISHED, ROWS))
    assert "4 files, 3 right in all cases, 3 claim a speedup." in text
    assert "| on this chip | 1 | 2 | 0 |" in text and "| in vllm | 1 | 1 | 1 |" in text
    assert (
        "| a | gelu | 1.500 | 1.300 (1.200 to 1.400) | 1.100 | yes | no | not deployed | nothing compiled |"
        in text
    )
    assert "| b | gelu | 2.000 | wrong |" in text


@pytest.mark.parametrize(
    ("own", "held_out", "right"),
    [({"ok": 4}, {"ok": 4}, True), ({"ok": 3, "skipped": 1}, {}, True), ({"ok": 4}, {"timeout": 1}, False),
     ({"ok": 2, "absent": 2}, {"absent": 4}, True), ({"skipped": 4}, {}, False), ({}, {}, False)],
)  # fmt: skip
def test_a_file_passes_if_no_case_fails(own: dict[str, int], held_out: dict[str, int], right: bool) -> None:
    assert judge_sets.passes({"own": own, "held_out": held_out}) is right


def test_files_take_turns_by_op_and_by_set() -> None:
    def one(name: str, op: str) -> Any:
        return name, SetFile(op, Path(f"{name}/{op}.py"), Path(f"{op}.py"), "published"), "digest"

    files = [one(name, op) for op in ("gelu", "linear", "rms_norm") for name in ("a", "b")]
    turns = judge_sets.in_turns(files, ["rms_norm"])
    assert [(name, file.op) for name, file, _ in turns] == [
        ("a", "rms_norm"), ("b", "rms_norm"), ("a", "gelu"), ("b", "linear"), ("b", "gelu"), ("a", "linear"),
    ]  # fmt: skip
    parts = [turns[judge_sets._part(f"{k}/2")] for k in range(2)]
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, files))


@pytest.mark.parametrize("text", ["2/2", "-1/2", "1", "a/b", "0/0"])
def test_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give K/N"):
        judge_sets._part(text)


def test_runs_that_share_a_gpu_take_turns(tmp_path: Path) -> None:
    with (tmp_path / "gpu").open("a") as mine, (tmp_path / "gpu").open("a") as other:
        turns = judge_sets.Turns(mine)

        def free() -> bool:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.flock(other, fcntl.LOCK_UN)
            return True

        seen: list[bool] = []
        with turns.held():
            seen.append(free())
            for phase in ("wait: load", "wait: call", "wait: call", "batches"):
                with turns.around(phase):
                    seen.append(free())
        assert seen == [False, True, True, False, False] and free()


def test_a_part_goes_on_with_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        for op in ("gelu", "silu_and_mul"):
            (tmp_path / "sets" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "sets" / name / f"{op}.py").write_text(f"def {op}(x):\n    return x\n")
    judged: list[tuple[str, str]] = []

    def judge(file: SetFile, *given: Any) -> dict[str, Any]:
        if len(judged) == stop:
            raise KeyboardInterrupt
        judged.append((file.path.parent.name, file.op))
        return {"own": {"wrong": 1}, "held_out": {}, "scan": [], "deployed": "", "serving": ""}

    monkeypatch.setattr(judge_sets, "judged", judge)
    for part, stop in (("0/2", 1), ("1/2", 2), ("0/2", 9), ("1/2", 9)):  # noqa: B007, which `judge` reads
        monkeypatch.setattr(
            sys,
            "argv",
            ["", str(tmp_path / "sets"), str(tmp_path / part[0]), "--device", "cpu", "--part", part],
        )
        with contextlib.suppress(KeyboardInterrupt):
            judge_sets.main()
    assert len(judged) == 6 == len(set(judged))
