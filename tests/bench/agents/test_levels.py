"""Tasks of the levels 2 to 4, and winners of lower levels inside the ops that call them."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.agents.conftest import CASE
from fk_bench.agents import tasks
from fk_bench.agents.mcp_server import Tasks, server_of
from fk_bench.agents.session import INDEPENDENT, SEQUENTIAL, Session, Settings
from fk_bench.core.rows import Row, Status, Subject, read
from fk_bench.core.small_model import small_model
from fk_bench.info import stubs
from mcp import Client

from fastkernels.core import registry
from fastkernels.core.registry import UnknownName

BELOW, ABOVE = "silu_and_mul", "gated_mlp"


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """[(op, candidates below it)] of each judged attempt; the verdict is always right."""
    found: list[tuple[str, dict[str, Any]]] = []

    def rows(self: Session, task: Any, file: Path, options: Any) -> list[Row]:
        found.append((task.op, dict(task.below)))
        case = {
            "kind": "case",
            "name": CASE,
            "source": "random",
            "dtype": "float32",
            "dims": {},
            "weight": 1.0,
        }
        row = Row(run_id="r", command="kernels", status=Status.OK, subject=Subject(op=task.op), case=case)
        self._judge.rows.append(row)
        return [row]

    monkeypatch.setattr(Session, "_judged", rows)
    return found


def session_of(run: Path, settings: Settings, mode: str) -> Session:
    return Session(run, replace(settings, label={**settings.label, "mode": mode}))


def work(session: Session, op: str) -> Row:
    """One task with one attempt."""
    below = session.below(op)
    folder = session.run / "tasks" / op / "work"
    stub = tasks.write(op, folder, session.settings.budget, "cpu", (), below)
    session.start(op, registry.get(op).level, stub, below)
    stub.write_text(stub.read_text() + "\n# faster\n")
    session.submit(op, stub)
    return session.finish(op, {"ended": "test"})


@pytest.mark.parametrize(("mode", "inside"), [(SEQUENTIAL, [BELOW]), (INDEPENDENT, [])])
def test_winners_run_inside_ops_above_in_sequential_mode(
    mode: str, inside: list[str], tmp_path: Path, settings: Callable[..., Settings], judged: list[Any]
) -> None:
    session = session_of(tmp_path, settings(attempts=3), mode)
    for op in (BELOW, ABOVE):
        assert work(session, op).status is Status.OK
    assert {op for op, below in judged if below} == ({ABOVE} if inside else set())
    folder = tmp_path / "tasks" / ABOVE / "work"
    assert [f.stem for f in sorted((folder / "below").glob("*.py"))] == inside
    assert ("below/*.py" in (folder / tasks.STATEMENT).read_text()) is bool(inside)
    of_last = [list(below) for op, below in judged if op == ABOVE]
    assert of_last == [inside] * 3  # the stub, the attempt, and the final score


def test_client_works_in_sequential_mode_and_reports_tokens(
    tmp_path: Path, settings: Callable[..., Settings], judged: list[Any]
) -> None:
    async def talk(found: Tasks) -> None:
        async with Client(server_of(found)) as client:
            stub = (await client.call_tool("get_task", {"op": BELOW})).structured_content["stub"]
            await client.call_tool("submit", {"op": BELOW, "source": f"{stub}\n# faster\n"})
            await client.call_tool("finish", {"op": BELOW})
            task = (await client.call_tool("get_task", {"op": ABOVE})).structured_content
            assert "below/*.py" in task["statement"] and task["left"]["tokens"] == 100
            used = await client.call_tool("usage", {"op": ABOVE, "tokens": 70, "cost_usd": 0.5})
            assert not used.is_error
            await client.call_tool("usage", {"op": ABOVE, "tokens": 40})
            over = (await client.call_tool("submit", {"op": ABOVE, "source": "x = 1"})).structured_content
            assert over["verdict"] == "not judged" and "100 tokens" in over["reason"]
            wrong = await client.call_tool("usage", {"op": ABOVE, "tokens": -1})
            assert wrong.is_error and "tokens and cost_usd are 0 to" in wrong.content[0].text

    session = session_of(tmp_path, settings(tokens=100), SEQUENTIAL)
    asyncio.run(talk(Tasks(session, [BELOW, ABOVE])))
    assert session.tasks[ABOVE].spent.cost_usd == 0.5
    assert any(op == ABOVE and list(below) == [BELOW] for op, below in judged)


@pytest.mark.parametrize("level", [2, 3, 4])
def test_blocks_and_models_are_tasks_with_stubs(
    level: int, tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    names, text = tasks.chosen((), level, str(small_model()))
    blocks = [n for n in names if "." in n]
    assert text and blocks and {registry.get(n).level for n in names} == {level}
    folder = tmp_path / "work"
    stub = tasks.write(blocks[0], folder, settings(attempts=1).budget, "cpu")
    compile(stub.read_text(), str(stub), "exec")
    assert f'"level": {level}' in (folder / tasks.FACTS).read_text()
    assert blocks[0] in (folder / tasks.STATEMENT).read_text()


def test_level_4_needs_a_model() -> None:
    with pytest.raises(ValueError, match="--level 4 is a whole model: name it with --model"):
        tasks.chosen((), 4, "")
    with pytest.raises(UnknownName):
        tasks.chosen(("no_such_op",), None, "")


# The agent sees its task folder alone: it tries a wrong result, and then computes once.
SCRIPT = r"""
import json, pathlib, re, subprocess

def check(text):
    file.write_text(text)
    return json.loads(subprocess.run(["./check"], capture_output=True, text=True).stdout)

(file,) = [f for f in pathlib.Path(".").glob("*.py") if f.stem != "reference"]
slow = file.read_text()
wrong = check(slow.replace("return out ", "return out * 1.5 "))
assert wrong["verdict"] == "wrong" and "expected" in wrong["first_failure"], wrong
right = check(re.sub(r"PASSES = \d+", "PASSES = 1", slow))
assert right["verdict"] == "ok" and right["cases"] == 1, right
"""
SLOW = """

    def forward(self, {arguments}):
        for _ in range(PASSES):
            out = self.once({arguments})
        return out  # of the last pass


PASSES = 8
"""
LOWER, UPPER = "llama.mlp", "llama.model"
ARGUMENTS = {LOWER: "x", UPPER: "input_ids, positions"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_block_and_a_whole_model_are_judged_end_to_end(tmp_path: Path) -> None:
    """Levels 2 and 4 of a tiny Llama: slow stubs, a wrong attempt, a fast one, and the final score."""
    begin, out = tmp_path / "begin", tmp_path / "run"
    begin.mkdir()
    tasks.chosen((), 4, str(small_model()))
    for op, arguments in ARGUMENTS.items():
        text = stubs.source(op).replace("def forward(", "def once(").rstrip()
        (begin / f"{op}.py").write_text(text + SLOW.format(arguments=arguments))
    done = subprocess.run(
        [
            sys.executable, "-m", "fk_bench.cli", "agent-loop", "--command", f"python3 -c {shlex.quote(SCRIPT)}",
            "--model", str(small_model()), "--ops", ",".join(ARGUMENTS), "--begin", str(begin), "--attempts", "2",
            "--case", "small_7", "--case", "small_decode", "--final", "held-out", "--rounds", "3", "--mode", SEQUENTIAL,
            "--device", "cpu", "--out", str(out), "--json",
        ],
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, _ = read(out / "rows.jsonl")
    for op in ARGUMENTS:
        own = [r for r in rows if r.subject.op == op]
        tried = [r for r in own if r.kind == "attempt"]
        assert [r.status for r in tried] == [Status.OK, Status.WRONG, Status.OK], [r.reason for r in tried]
        (task,) = [r for r in own if r.kind == "task"]
        assert task.status is Status.OK and task.case["exit_code"] == 0, task.reason
        assert task.case["level"] == registry.get(op).level
        final = [r for r in own if r.command == "kernels" and r.kind == "case"]
        if not all("speedup_geomean" in tried[i].metrics for i in (0, 2)):
            continue  # a busy machine may leave a case without a time
        assert tried[2].metrics["speedup_geomean"] > tried[0].metrics["speedup_geomean"]
        assert task.case["best"] == 2 and "PASSES = 1\n" in (out / "set" / f"{op}.py").read_text()
        assert final and all(r.status is Status.OK and r.case["source"] == "held-out" for r in final)
    won = (out / "set" / f"{LOWER}.py").is_file()
    assert (out / "tasks" / UPPER / "work" / "below" / f"{LOWER}.py").is_file() is won
