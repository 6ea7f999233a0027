"""Tasks of the levels 2 to 4, and winners of lower levels inside the ops that call them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.agents.conftest import CASE
from fk_bench.agents import tasks
from fk_bench.agents.mcp_server import Tasks, server_of
from fk_bench.agents.session import INDEPENDENT, SEQUENTIAL, Session, Settings
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.core.small_model import small_model
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
