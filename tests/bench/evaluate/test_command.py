"""`fk-bench eval`: bad input is an error before anything runs, and a finished evaluation is only shown again."""

from __future__ import annotations

import json
import sys

import pytest
from fk_bench.cli import main
from fk_bench.core import machine, rows
from fk_bench.evaluate import suites
from fk_bench.evaluate.adapters.sets import read_set
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run import command, results
from fk_bench.evaluate.run.items import Measured
from fk_bench.info.stubs import source

SUITE = suites.load("smoke")


@pytest.fixture
def candidates(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "gelu.py").write_text("def gelu(x, approximate='none'):\n    raise RuntimeError\n")
    return folder


def run(capsys, *words) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, words)])
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out.splitlines()[-1])


def test_estimate_gives_minutes_of_each_item(capsys):
    status, found = run(capsys, "smoke", "--estimate")
    assert status == 0
    assert found["minutes"] == {e.name: e.minutes for e in SUITE.entries}
    assert found["minutes_of_kernels"] == {}


def test_estimate_counts_the_kernels_of_a_set(capsys, candidates):
    """With `default`, a set of one primitive takes less than a minute on a GPU, next to items below ten minutes."""
    status, found = run(capsys, "default", "--estimate", "--set", f"mine={candidates}")
    assert status == 0 and max(found["minutes"].values()) < 10 and sum(found["minutes"].values()) < 240
    assert 0.1 < found["minutes_of_kernels"]["mine"] < 1.5
    assert not run(capsys, "default", "--estimate", "--no-kernels", "--set", f"a={candidates}")[1][
        "minutes_of_kernels"
    ]


def test_smoke_suite_takes_under_ten_minutes_by_its_estimate(capsys, tmp_path):
    for op in ("gelu", "layer_norm", "linear", "rms_norm", "silu_and_mul"):
        (tmp_path / f"{op}.py").write_text(source(op))
    found = run(capsys, "smoke", "--estimate", "--set", f"mine={tmp_path}")[1]
    assert found["minutes_of_kernels"]["mine"] > 0
    assert sum(found["minutes"].values()) + found["minutes_of_kernels"]["mine"] < 10


def test_estimate_is_of_the_chosen_items(capsys):
    timm = {e.name: e.minutes for e in SUITE.entries if e.item.host == "timm"}
    one = next(iter(timm))
    assert run(capsys, "smoke", "--host", "timm", "--estimate")[1]["minutes"] == timm
    assert run(capsys, "smoke", "--item", one, "--estimate")[1]["minutes"] == {one: timm[one]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["smok", "--estimate"], "smoke"),
        (["smoke"], "--set NAME=DIR"),
        (["smoke", "--set", "folder"], "NAME=DIR"),
        (["smoke", "--set", "a=/no/such/folder"], "/no/such/folder"),
        (["smoke", "--model", "tiny-lama", "--estimate"], "tiny-llama"),
        (["smoke", "--host", "vlm", "--estimate"], "transformers"),
        (["smoke", "--host", "vlm", "--item", SUITE.entries[0].name], "transformers"),
        (["smoke", "--host", "timm", "--item", SUITE.entries[0].name], "leave one of them out"),
        (["smoke", "--python", "vlm=python", "--estimate"], "vllm"),
        (["smoke", "--python", "timm=/no/such/python", "--estimate"], "no such interpreter: /no/such/python"),
        (["smoke", "--python", f"vllm={sys.executable}", "--estimate"], "vllm is not installed"),
        (["smoke", "--selftest", "--set", "a=/no/such/folder"], "/no/such/folder"),
        (["smoke", "--set", "../mine=folder"], "at most 64 letters"),
        (["smoke", "--set", f"{'a' * 65}=folder"], "at most 64 letters"),
        (["smoke", "--set", "do-nothing=folder"], "choose another name"),
        (["smoke", "--selftest", "--out", __file__], "give a folder"),
    ],
)
def test_bad_input_names_what_is_accepted(capsys, words, told):
    status, found = run(capsys, *words)
    assert status == 2 and told in found["error"]


def test_file_without_an_op_is_an_error(capsys, candidates):
    (candidates / "rms_nrm.py").write_text("")
    status, found = run(capsys, "smoke", "--set", f"a={candidates}")
    assert status == 2 and "did you mean rms_norm.py?" in found["error"]


def test_selftest_gives_its_files_to_the_cage(tmp_path, monkeypatch):
    given = []

    class ItemRun:
        def __init__(self, *_):
            pass

        def measure(self, files, readable):
            given.append((set(files.values()), set(readable)))
            raise KeyboardInterrupt

    monkeypatch.setattr("fk_bench.evaluate.run.items.ItemRun", ItemRun)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["eval", "smoke", "--selftest", "--out", str(tmp_path)])
    ((files, readable),) = given
    assert files and files <= readable


def test_selftest_is_measured_before_the_sets(capsys, candidates, tmp_path, monkeypatch):
    class ItemRun:
        def __init__(self, entry, *_):
            self.entry = entry

        def measure(self, files, readable):
            return Measured(self.entry, reason=Reason.UNUSED)

    monkeypatch.setattr("fk_bench.evaluate.run.items.ItemRun", ItemRun)
    words = [
        "smoke",
        "--selftest",
        "--set",
        f"a={candidates}",
        "--host",
        "timm",
        "--no-kernels",
        "--out",
        tmp_path,
    ]
    status, found = run(capsys, *words)
    made, _ = rows.read(tmp_path / "rows.jsonl")
    assert [r.case["set"] for r in made if r.kind == results.ITEM] == ["do-nothing", "a"]
    verdicts = next(r.case["selftest"] for r in made if r.kind == results.SCORE and r.case["set"] == "a")
    assert verdicts == found["selftest"] and verdicts["timm"].startswith("failed") and status == 1
    assert verdicts["transformers"] == "not run"


def test_interrupted_run_says_how_to_continue(candidates, tmp_path, monkeypatch, capsys):
    class ItemRun:
        def __init__(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr("fk_bench.evaluate.run.items.ItemRun", ItemRun)
    words = ["eval", "smoke", "--set", f"a={candidates}", "--no-kernels", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 130
    assert f"continue with --out {tmp_path / 'run'}" in capsys.readouterr().err


def context(candidates) -> results.Context:
    made = command.Evaluation(SUITE, [read_set("a", candidates)], candidates, {}, True, False, False)
    return made.context


def test_run_of_other_files_is_refused_without_force(capsys, candidates, tmp_path):
    row = context(candidates).row("a", {"kind": results.OP, "how": "independent"}, rows.Subject(op="gelu"))
    rows.append(tmp_path / "rows.jsonl", [row])
    (candidates / "gelu.py").write_text("def gelu(x, approximate='none'):\n    return x\n")
    status, found = run(capsys, "smoke", "--set", f"a={candidates}", "--out", tmp_path)
    assert status == 2 and "files of the set a" in found["error"] and "--force" in found["error"]


def item_row(shared: results.Context, entry, status=rows.Status.SKIPPED, **metrics: float) -> rows.Row:
    """The row of an item that is done: without metrics, one of a model that calls no op of the set."""
    case = {"kind": results.ITEM, "variant": "record", "ranks": 1, "level": 4, "kept": [], "dropped": []}
    case |= {"category": entry.item.category, "workload": entry.item.workload, "unused": ["gelu"], "live": {}}
    subject = rows.Subject(model=entry.item.model, host=entry.item.host)
    return shared.row("a", case, subject, status=status, metrics=metrics)


def test_finished_evaluation_runs_nothing_again(capsys, candidates, tmp_path, monkeypatch):
    monkeypatch.setattr("fk_bench.evaluate.run.items.ItemRun", None)  # would fail if it were called
    shared = context(candidates)
    rows.append(tmp_path / "rows.jsonl", [item_row(shared, entry) for entry in SUITE.entries])
    status, found = run(capsys, "smoke", "--set", f"a={candidates}", "--out", tmp_path, "--no-kernels")
    assert (status, found["ok"]) == (0, True)
    assert found["results"][0]["score"] == 0.0
    assert shared.machine == machine.machine()
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("status", "ended"), [(rows.Status.OK, 0), (rows.Status.SKIPPED, 0), (rows.Status.WRONG, 1)]
)
def test_exit_status_is_that_of_the_chosen_items(capsys, candidates, tmp_path, status, ended):
    """The others count as not run in the score, and are no failure of this run."""
    entry = SUITE.entries[-1]
    row = item_row(
        context(candidates), entry, status, throughput_speedup=1.1, latency_speedup=1.1, correctness=1.0
    )
    rows.append(tmp_path / "rows.jsonl", [row])
    words = ["smoke", "--set", f"a={candidates}", "--out", tmp_path, "--no-kernels"]
    for chosen in (["--item", entry.name], ["--item", entry.name, "--host", entry.item.host]):
        assert run(capsys, *words, *chosen)[0] == ended
    found = run(capsys, *words, "--item", entry.name)[1]
    assert found["results"][0]["coverage"] < 1
