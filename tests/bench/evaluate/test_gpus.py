"""Items on all GPUs of a machine: each has GPUs and cores of its own, and its rows arrive once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fk_bench.core.rows import Row
from fk_bench.evaluate.run import cluster, gpus
from fk_bench.evaluate.run.cluster import Job, Lost


def job(item: str, count: int = 1) -> Job:
    return Job(item, "no-such-suite", "", "", {}, "", (), 1, count)


def test_items_share_no_gpu_and_arrive_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, busy, seen = threading.Lock(), set[str](), list[str]()
    both = threading.Barrier(2)

    def measured(one: Job, env: dict[str, str], cores: set[int]) -> list[str]:
        mine = set(env["CUDA_VISIBLE_DEVICES"].split(","))
        with lock:
            assert not mine & busy and len(mine) == one.gpus and cores
            busy.update(mine)
            seen.append(one.item)
        if one.item in ("a", "b"):
            both.wait(60)  # two run at once
        with lock:
            busy.difference_update(mine)
        if one.item == "b":
            raise Lost("it ended")
        return []

    monkeypatch.setattr(gpus, "measured", measured)
    arrived: dict[str, list[Row] | Lost] = {}
    jobs = [job("a"), job("b"), job("whole", 2), job("too large", 3)]
    gpus.run(jobs, ["4", "7"], lambda one, found: arrived.__setitem__(one.item, found))
    assert seen[0] == "whole" and sorted(seen[1:]) == ["a", "b"]
    assert arrived["a"] == arrived["whole"] == []
    assert str(arrived["b"]) == "it ended"
    assert "needs 3 GPUs, and this machine has 2" in str(arrived["too large"])


def test_item_that_cannot_run_is_lost_with_its_message() -> None:
    arrived: list[list[Row] | Lost] = []
    gpus.run([job("a")], ["0"], lambda _, found: arrived.append(found))
    (found,) = arrived
    assert isinstance(found, Lost) and "no-such-suite" in str(found)


def test_cores_are_shared_out_or_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {8, 1, 2, 3, 5})
    assert gpus.shares(2) == [{1, 2}, {3, 5}]
    assert gpus.shares(6) == [{1, 2, 3, 5, 8}] * 6


def test_set_of_a_job_is_written_for_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Done(Exception):
        pass

    def run(command: list[str], env: dict[str, str], **_: object) -> None:
        folder = Path(next(w for w in command if w.startswith("mine=")).partition("=")[2])
        assert (folder / "sub" / "gelu.py").read_bytes() == b"x" and env["CUDA_VISIBLE_DEVICES"] == "1"
        raise Done

    monkeypatch.setattr(cluster.subprocess, "run", run)
    one = Job("i", "smoke", "", "mine", {"sub/gelu.py": b"x"}, "", (), 1, 1)
    with pytest.raises(Done):
        cluster.measured(one, {"CUDA_VISIBLE_DEVICES": "1"}, {0})
