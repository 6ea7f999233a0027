"""A patch before construction sets the environment or refuses; undo restores the environment."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from fk_integrations.core import reports
from fk_integrations.patching.construction import BeforeConstruction

from fastkernels.patch import PatchError, Request

HOSTS = [("vllm", "VLLM_PLUGINS", "0.32.0"), ("sglang", "SGLANG_PLUGINS", "0.5.23")]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("FASTKERNELS") and n != "FASTKERNELS_CACHE"]:
        monkeypatch.delenv(name)
    for _, allowed, _ in HOSTS:
        monkeypatch.delenv(allowed, raising=False)


@pytest.mark.parametrize(("host", "allowed", "version"), HOSTS)
def test_patch_sets_the_environment_and_undo_restores_it(
    host: str, allowed: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("norm.py").touch()
    looks: list[str | None] = []
    before = BeforeConstruction(
        host, host, allowed, lambda: version, lambda: looks.append(os.environ.get("FASTKERNELS"))
    )
    os.environ["FASTKERNELS_OPS"] = "linear"
    candidates = {"rms_norm": "norm.py"}
    request = Request("patch", ("rms_norm", "silu_and_mul"), candidates, ("silu_and_mul",), True)
    (reply,) = before.call(request)
    assert {(r["op"], r["state"]) for r in reply["rows"]} == {
        ("rms_norm", "planned"),
        ("silu_and_mul", "off"),
    }
    assert (reply["host"], reply["version"], reply["error"]) == (host, version, None)
    assert os.environ["FASTKERNELS"] == "1" and os.environ["FASTKERNELS_STRICT"] == "1"
    assert Request.from_environment() == Request(
        "patch", request.ops, {"rms_norm": os.path.abspath("norm.py")}, request.disable, True
    )
    with pytest.raises(PatchError, match="undo"):
        before.call(request)
    before.call(Request("undo"))
    assert os.environ.pop("FASTKERNELS_OPS") == "linear"
    assert not [n for n in os.environ if n.startswith("FASTKERNELS") and n != "FASTKERNELS_CACHE"]
    assert looks == ["1", None]


@pytest.mark.parametrize(("host", "allowed", "version"), HOSTS)
def test_hosts_that_would_stay_unpatched_are_refused(
    host: str, allowed: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PatchError, match="not installed"):
        BeforeConstruction(host, host, allowed, lambda: None).call(Request("patch"))
    before = BeforeConstruction(host, host, allowed, lambda: version)
    with pytest.raises(PatchError, match="live engine"):
        before.call(Request("reset"))
    monkeypatch.setenv(allowed, "another")
    with pytest.raises(PatchError, match="keeps our plugin out"):
        before.call(Request("patch"))
    monkeypatch.setenv(allowed, "another,fastkernels")
    before.call(Request("patch"))
    before.call(Request("undo"))
    assert "FASTKERNELS" not in os.environ


def test_report_of_a_dropped_worker_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file stays as it was, and its reply is not called again."""
    monkeypatch.setenv("FASTKERNELS_REPORT", str(tmp_path))
    worker: list[dict[str, Any]] = [{"rank": 0, "pid": os.getpid()}]
    called: list[bool] = []

    def reply() -> dict[str, Any] | None:
        called.append(bool(worker))
        return dict(worker[0]) if worker else None

    reports.start("dropped", 0, reply)
    assert reports.read(str(tmp_path), "dropped") == worker
    kept = worker.pop()
    for _ in range(4):
        assert reports.read(str(tmp_path), "dropped") == [kept]
    assert 1 <= called.count(False) <= 2  # the thread may have called it, too


BUSY = """
import os, sys, time
from fk_integrations.core import reports
counted, seconds = {"rank": 0, "pid": os.getpid(), "calls": 0}, [0]
reports.start("busy", 0, lambda: time.sleep(seconds[0]) or dict(counted))
counted["calls"], seconds[0] = 5, 1
print("counted", flush=True)
sys.stdin.read()
"""


def test_report_waits_for_a_busy_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "FASTKERNELS_REPORT": str(tmp_path)}
    command = [sys.executable, "-c", BUSY]
    with Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "counted\n"
        assert [reply["calls"] for reply in reports.read(str(tmp_path), "busy")] == [5]
        process.kill()
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a wait for a process that has ended"))
    assert [reply["calls"] for reply in reports.read(str(tmp_path), "busy")] == [5]
