"""Tests of fk_bench.batch.queue with sleeping commands and made-up GPU numbers."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from fk_bench.batch import queue as batch
from fk_bench.batch.queue import Batch, Part, Queue, chosen, predicted
from fk_bench.core.gpus import cores_of, placed, visible
from fk_bench.core.terminal.flags import ConfigError

# writes when it began and ended, on which GPUs and cores, to FOLDER/NAME.json
NOTE = """
import json, os, sys, time
name, seconds = sys.argv[1], float(sys.argv[2])
begin = time.monotonic()
time.sleep(seconds)
found = [begin, time.monotonic(), os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0))]
open(name, "w").write(json.dumps(found))
"""


def python(code: str, *args: object) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, *map(str, args))


def part(name: str, seconds: float = 1.0, **more: object) -> Part:
    return Part(name, (("true",),), seconds, **more)  # type: ignore[arg-type]


def noting(folder: Path, name: str, takes: float, seconds: float, **more: object) -> Part:
    return Part(name, (python(NOTE, folder / f"{name}.json", takes),), seconds, **more)  # type: ignore[arg-type]


def run(
    folder: Path, parts: list[Part], gpus: str, limit: float | None = None
) -> tuple[list[str], list[str]]:
    """Return the names of failed parts, and the printed lines without their times."""
    said: list[str] = []
    failed = Batch(parts, gpus.split(","), folder, folder, limit, said.append).run()
    return failed, [" ".join(line.split()[2:]) for line in said]


def order(parts: list[Part], gpus: str) -> list[tuple[float, str, str]]:
    return [(begin, p.name, ",".join(mine)) for begin, p, mine in predicted(parts, gpus.split(","))[0]]


# -- the order


def test_longest_chain_starts_first() -> None:
    parts = [
        part("short", 1),
        part("long", 9),
        part("middle", 5),
        part("after", 8, after=("made",)),
        part("made", 2),
    ]
    assert order(parts, "0,1") == [
        (0, "made", "0"), (0, "long", "1"), (2, "after", "0"), (9, "middle", "1"), (10, "short", "0"),
    ]  # fmt: skip
    assert predicted(parts, ["0", "1"])[1] == 14
    assert order([part("idle", 90, last=True), *parts], "0")[-1] == (25, "idle", "0")


def test_two_gpu_part_is_backfilled_not_starved() -> None:
    parts = [
        part("made", 2),
        part("two", 5, gpus=2, after=("made",)),
        part("long", 6),
        part("a", 3),
        part("b", 4),
    ]
    # GPU 0 is free at 2, GPU 1 at 6: 'b' fills the gap, and 'a' would not end in time
    assert order(parts, "0,1") == [
        (0, "made", "0"), (0, "long", "1"), (2, "b", "0"), (6, "two", "0,1"), (11, "a", "0"),
    ]  # fmt: skip


def test_part_without_gpu_never_waits() -> None:
    assert order([part("x", 5), part("text", 9, gpus=0)], "0") == [(0, "x", "0"), (0, "text", "")]


def test_plan_leaves_out_parts_with_too_many_gpus() -> None:
    assert order([part("two", 1, gpus=2), part("needs", 1, after=("two",)), part("one", 1)], "0") == [
        (0, "one", "0")
    ]


def test_only_includes_prerequisites() -> None:
    parts = [
        part("a"),
        part("b", after=("a",)),
        part("c", after=("b",)),
        part("d"),
        part("servers-x"),
        part("servers-y"),
    ]
    assert [p.name for p in chosen(parts, ["c"])] == ["a", "b", "c"]
    assert [p.name for p in chosen(parts, ["servers*", "d"])] == ["d", "servers-x", "servers-y"]
    assert chosen(parts, []) == parts
    with pytest.raises(ConfigError, match=r"ONLY=d,linears: no part 'linears'; parts: a, b, c, d"):
        chosen(parts, ["d", "linears"])


def test_failure_removes_all_dependents() -> None:
    queue = Queue([part("a"), part("b", after=("a",)), part("c", after=("b",)), part("d")])
    first = queue.next(1, 0, [])
    assert first is not None and first.name == "a"
    assert {p.name for p in queue.ended(first, False)} == {"b", "c"}
    assert [p.name for p in queue.waiting] == ["d"]


# -- where


def test_gpus_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8, 17)))
    cores = cores_of(["4", "6"])
    assert cores == {"4": [8, 9, 10, 11], "6": [12, 13, 14, 15]}
    env, command = placed(("run", "x"), ["6"], cores)
    assert env == {"CUDA_VISIBLE_DEVICES": "6"} and command == ("taskset", "-c", "12,13,14,15", "run", "x")
    assert placed(("run",), ["4", "6"], cores)[1][2] == "8,9,10,11,12,13,14,15"
    assert placed(("run",), [], cores) == ({"CUDA_VISIBLE_DEVICES": "-1"}, ("run",))
    # Fewer cores than GPUs
    assert placed(("run",), ["0"], cores_of([str(i) for i in range(10)]))[1] == ("run",)


def test_parts_never_share_a_gpu_and_use_all(tmp_path: Path) -> None:
    parts = [noting(tmp_path, f"p{i}", 0.5, 0.5 + i / 100) for i in range(5)]
    parts += [noting(tmp_path, "two", 0.5, 0.5, gpus=2), noting(tmp_path, "none", 0.1, 0.1, gpus=0)]
    failed, said = run(tmp_path, parts, "3,5,7")
    assert failed == []
    found = {p.name: json.loads((tmp_path / f"{p.name}.json").read_text()) for p in parts}
    for gpu in "357":
        held = sorted((b, e) for b, e, gpus, _ in found.values() if gpu in gpus.split(","))
        assert len(held) >= 2 and all(a[1] <= b[0] for a, b in itertools.pairwise(held)), gpu
    begins = sorted((b, e) for b, e, gpus, _ in found.values() if gpus != "-1")
    assert begins[1][0] < begins[0][1]  # two at once
    assert found["two"][2] == "3,5" and found["none"][2] == "-1"
    cores = len(os.sched_getaffinity(0)) // 3
    if cores:
        assert len(found["p0"][3]) == cores and len(found["two"][3]) == 2 * cores
    began = [line.split()[1] for line in said if line.startswith("begins")]
    assert began[:2] == ["two", "p4"] and len([x for x in said if x.startswith("ends")]) == 7
    assert any("p4 on GPU 7, about 1 s, 121 at most; " in x and x.endswith("logs/p4.log") for x in said)


# -- what goes wrong


def test_failed_part_is_reported_and_others_run(tmp_path: Path) -> None:
    bad = python("import sys; print('so it is'); sys.exit(3)")
    parts = [
        Part("bad", (bad, python(NOTE, tmp_path / "second.json", 0)), 9),
        Part("missing", (("/no/such/program",),), 8),
        part("needs", after=("bad",)), part("more", after=("needs",)), noting(tmp_path, "good", 0, 1),
    ]  # fmt: skip
    failed, said = run(tmp_path, parts, "0")
    assert failed == ["bad", "needs", "more", "missing"]
    # the second command of the failed part runs too
    assert (tmp_path / "good.json").is_file() and (tmp_path / "second.json").is_file()
    assert any(x.startswith("FAILED bad exit status 3, after ") for x in said)
    assert "out needs bad failed" in [x.removeprefix("left ") for x in said]
    assert any("missing" in x and ("No such file" in x or "127" in x) for x in said if x.startswith("FAILED"))
    log = (tmp_path / "logs/bad.log").read_text()
    assert "so it is" in log and log.startswith("$ env CUDA_VISIBLE_DEVICES=0 ")
    ended = [json.loads(x) for x in (tmp_path / "logs/parts.jsonl").read_text().splitlines()]
    assert {x["part"]: x["status"] for x in ended} == {
        "bad": "FAILED", "needs": "left out", "more": "left out", "missing": "FAILED", "good": "ok",
    }  # fmt: skip


@pytest.mark.slow
def test_part_over_its_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    stuck = python(
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(p.pid)); time.sleep(60)",
        child,
    )
    parts = [
        Part("stuck", (stuck, python(NOTE, tmp_path / "not.json", 0)), 9),
        noting(tmp_path, "good", 0, 1),
    ]
    begin = time.monotonic()
    failed, said = run(tmp_path, parts, "0", limit=3.0)
    assert failed == ["stuck"] and time.monotonic() - begin < 30
    assert any(x.startswith("FAILED stuck time limit of 3 s exceeded, after ") for x in said)
    assert (tmp_path / "good.json").is_file() and not (tmp_path / "not.json").exists()
    pid = int(child.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_part_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "GRACE_S", 0.5)
    deaf = python("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    begin = time.monotonic()
    failed, _ = run(tmp_path, [Part("deaf", (deaf,), 9)], "0", limit=1.0)
    assert failed == ["deaf"] and time.monotonic() - begin < 30


def test_running_parts_end_with_the_batch(tmp_path: Path) -> None:
    """An exception, here from `say`, stops the running parts."""
    child = tmp_path / "child"
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"

    def say(line: str) -> None:
        if "second" in line:
            while not (child.is_file() and child.read_text()):
                time.sleep(0.05)
            raise KeyboardInterrupt

    parts = [Part("first", (python(code, child),), 9), part("second")]
    with pytest.raises(KeyboardInterrupt):
        Batch(parts, ["0", "1"], tmp_path, tmp_path, None, say).run()
    assert not psutil.pid_exists(int(child.read_text()))


def test_parts_that_succeeded_before_are_skipped(tmp_path: Path) -> None:
    made, bad = noting(tmp_path, "made", 0, 1), Part("bad", (("false",),), 1)
    assert run(tmp_path, [made, bad], "0")[0] == ["bad"]
    (tmp_path / "made.json").unlink()
    failed, said = run(tmp_path, [made, bad, noting(tmp_path, "needs", 0, 1, after=("made",))], "0")
    assert failed == ["bad"] and (tmp_path / "needs.json").is_file() and not (tmp_path / "made.json").exists()
    assert "made already done in this folder" in said
    failed, said = run(tmp_path, [noting(tmp_path, "made", 0.5, 1)], "0")
    assert not failed and not (tmp_path / "made.json").exists()
    assert said == ["made already done in this folder with another command; choose another OUT to run it"]


def test_part_with_too_many_gpus_is_left_out(tmp_path: Path) -> None:
    parts = [part("two", gpus=2), part("needs", after=("two",)), noting(tmp_path, "one", 0, 1)]
    failed, said = run(tmp_path, parts, "0")
    assert failed == ["two", "needs"] and (tmp_path / "one.json").is_file()
    assert "out two needs 2 GPUs" in [x.removeprefix("left ") for x in said]


def test_visible_gpus_are_those_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1")
    assert visible(8) == ["3", "GPU-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible(8) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible(2) == ["0", "1"]
