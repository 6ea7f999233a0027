"""Budgets of time: a slow candidate loses its case, then its op, and the next candidate is judged."""

from __future__ import annotations

import dataclasses
import socket
import time
from pathlib import Path
from typing import Any, cast

import pytest
from fk_bench.core.rows import Row, Status
from fk_bench.kernels.judge import Judge, Options
from fk_bench.kernels.judge.processes.protocol import Channel
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess, TimeBudget

SLEEPS = "import time\nimport torch\ndef relu2(x):\n    time.sleep(0.8)\n    return torch.relu(x).square()\n"
# Cases of both ops that take no time
SMALL = ("one", "odd_63", "odd_1128", "odd_1025", "batched", "batched_half", "wide")
HONEST = "import torch\ndef quick_gelu(x):\n    return x * torch.sigmoid(1.702 * x)\n"


def ran(rows: list[Row], op: str) -> list[Row]:
    return [r for r in rows if r.kind == "case" and r.subject.op == op and r.status is not Status.SKIPPED]


def test_slow_calls_use_up_case_then_op(tmp_path: Path) -> None:
    """No single call is slow enough for --timeout."""
    files = {"relu2": tmp_path / "relu2.py", "quick_gelu": tmp_path / "quick_gelu.py"}
    for op, source in (("relu2", SLEEPS), ("quick_gelu", HONEST)):
        files[op].write_text(source)
    options = Options(
        cases=("random",), names=SMALL, timed=False, scan=False, timeout=60.0, case_budget=1.5, op_budget=4.0
    )
    with Judge(files, options) as judge:
        start = time.monotonic()
        judge.op("relu2")
        spent = time.monotonic() - start
        judge.options = dataclasses.replace(options, case_budget=300.0, op_budget=3600.0)
        judge.op("quick_gelu")
    slow = ran(judge.rows, "relu2")
    assert len(slow) > 4
    assert {r.status for r in slow} == {Status.TIMEOUT}, [
        (r.case, r.reason) for r in slow if r.status is Status.OK
    ]
    assert "it used its 1.5 s for one case" in slow[0].reason
    assert any("4 s" in r.reason for r in slow) or "not restarted" in slow[-1].reason
    assert min(r.metrics["wall_s"] for r in slow[-2:]) < 1.5  # without running
    assert spent < 120
    good = ran(judge.rows, "quick_gelu")
    assert good and {r.status for r in good} == {Status.OK}, [r.reason for r in good]


class Slow:
    """A child that answers after `delay` seconds, or never."""

    def __init__(self) -> None:
        self.channel, self.other = socket.socketpair()

    def resume(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def output_tail(self, limit: int) -> str:
        return ""


@pytest.mark.parametrize("left", [0.05, 0.0, -5.0])
def test_wait_ends_with_the_shortest_budget(left: float) -> None:
    child = Slow()
    with child.channel, child.other:
        side = RunnerProcess(child, "candidate", 60.0, False)
        side.budgets = (TimeBudget(3600.0, "op"), TimeBudget(10.0, "case", 10.0 - left))
        start = time.monotonic()
        with pytest.raises(RunnerError, match="it used its 10 s for one case") as error:
            side.ask("copy")
        assert error.value.status is Status.TIMEOUT and error.value.fatal and not side.alive
        spent = time.monotonic() - start
        assert spent < 10.0 * 6  # the op's budget and the command's timeout are longer
        assert min(left, 0.0) <= side.budgets[0].used <= spent + 0.01


def test_timeout_of_a_command_is_shorter_than_budgets() -> None:
    child = Slow()
    with child.channel, child.other:
        side = RunnerProcess(child, "candidate", 0.05, False)
        side.budgets = (TimeBudget(10.0, "case"),)
        with pytest.raises(RunnerError, match=r"no answer in 0\.05 s"):
            side.ask("copy")


def test_waits_are_counted_once_for_each_budget() -> None:
    child = Slow()
    with child.channel, child.other:
        side = RunnerProcess(child, "candidate", 5.0, False)
        side.budgets = (TimeBudget(10.0, "op", 1.0), TimeBudget(5.0, "case"))
        for _ in range(2):
            side.begin("copy")
            nonce = Channel(child.other).receive(1.0)["nonce"]
            Channel(child.other).send({"nonce": nonce})
            side.end()
        op, case = side.budgets
        assert 0 < case.used == pytest.approx(op.used - 1.0) == pytest.approx(side.busy_s)


@pytest.mark.parametrize("reports", [True, False])
def test_reply_is_early_only_without_a_report(reports: bool) -> None:
    """On a busy machine, a side may report its last call and answer while the judge looks away."""

    class Gate:
        looks = 0

        def passed(self, ticket: int, seconds: float, nap: float = 0.0) -> bool:
            self.looks += 1
            return reports and self.looks > 1

    child, gate = Slow(), Gate()
    with child.channel, child.other:
        side = RunnerProcess(child, "candidate", 1.0, False, cast(Any, gate))
        child.other.sendall(b"a reply")
        if reports:
            side.arrived(1)
            assert gate.looks == 3 and side.alive
        else:
            with pytest.raises(RunnerError):
                side.arrived(1)
