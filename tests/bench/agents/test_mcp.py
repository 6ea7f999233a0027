"""The MCP server, with the client of the official SDK."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.agents.conftest import BLOCKS, CASE, CHEATS, OP
from fk_bench.agents.mcp_server import TOOLS, Tasks, server_of
from fk_bench.agents.session import Session, Settings
from fk_bench.core.checkout import checkout_path
from fk_bench.core.rows import read
from mcp import Client, StdioServerParameters, stdio_client


def value(answer: Any) -> Any:
    """The result of a tool, as the client sees it."""
    assert not answer.is_error, answer.content
    found = answer.structured_content
    return found.get("result", found) if isinstance(found, dict) else json.loads(answer.content[0].text)


@pytest.mark.slow
def test_client_submits_profiles_and_finishes(tmp_path: Path, settings: Callable[..., Settings]) -> None:
    """A right source, five cheats that gain nothing, the history, and the score on cases that no attempt saw."""

    async def talk(found: Tasks) -> None:
        async with Client(server_of(found)) as client:
            assert {t.name for t in (await client.list_tools()).tools} == set(TOOLS)
            listed = value(await client.call_tool("list_tasks", {}))
            assert listed == [{"op": OP, "level": 1, "started": False}]
            task = value(await client.call_tool("get_task", {"op": OP}))
            assert CASE in task["statement"] and "def reference" in task["reference"] and OP in task["stub"]
            good = value(await client.call_tool("profile", {"op": OP, "source": BLOCKS.format(block=4096)}))
            assert (good["attempt"], good["verdict"]) == (1, "ok") and "profile" in good
            for name in CHEATS:
                source = (checkout_path("tests/cheats") / f"{name}.py").read_text()
                answer = value(await client.call_tool("submit", {"op": OP, "source": source}))
                assert answer["verdict"] != "ok" and answer["best"]["attempt"] in (0, 1)
            last = value(await client.call_tool("submit", {"op": OP, "source": "def ("}))
            assert last["verdict"] in ("rejected", "compile_error") and last["left"]["attempts"] == 0
            over = value(await client.call_tool("submit", {"op": OP, "source": "x = 1"}))
            assert over["verdict"] == "not judged" and "7 attempts" in over["reason"]
            history = value(await client.call_tool("history", {"op": OP}))
            assert [h["attempt"] for h in history] == list(range(8))
            final = value(await client.call_tool("finish", {"op": OP}))
            assert final["best"] in (None, 1)
            closed = await client.call_tool("submit", {"op": OP, "source": "x = 2"})
            assert closed.is_error and "is finished" in closed.content[0].text
            unknown = await client.call_tool("get_task", {"op": "rms_nrm"})
            assert unknown.is_error and OP in unknown.content[0].text

    with Session(tmp_path, settings(attempts=7)) as session:
        found = Tasks(session, [OP])
        asyncio.run(talk(found))
        found.close()
    rows, _ = read(tmp_path / "rows.jsonl")
    assert [r.kind for r in rows if r.command == "agent-loop"] == ["attempt"] * 8 + ["task"]


def test_command_serves_on_standard_streams(tmp_path: Path) -> None:
    """Nothing but the protocol is on standard output."""
    words = ["-m", "fk_bench.cli", "mcp", "--ops", f"{OP},rms_norm", "--out", str(tmp_path / "run")]
    server = StdioServerParameters(command=sys.executable, args=words)

    async def talk() -> list[str]:
        async with Client(stdio_client(server)) as client:
            return [t["op"] for t in value(await client.call_tool("list_tasks", {}))]

    assert sorted(asyncio.run(talk())) == ["rms_norm", OP]


@pytest.mark.slow
def test_command_serves_http_and_scores_when_it_is_ended(tmp_path: Path) -> None:
    """SIGTERM, with which supervisors end a server, does not cost the final score."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "fk_bench.cli", "mcp", "--ops", OP, "--case", CASE, "--final", "random", "--rounds", "3"]
    more = ["--device", "cpu", "--port", str(port), "--out", str(tmp_path / "run")]
    server = subprocess.Popen([sys.executable, *words, *more], stderr=subprocess.DEVNULL)

    async def talk() -> str:
        while server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            await asyncio.sleep(0.2)
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            source = BLOCKS.format(block=4096)
            return value(await client.call_tool("submit", {"op": OP, "source": source}))["verdict"]

    try:
        assert asyncio.run(talk()) == "ok"
    finally:
        server.terminate()
        assert server.wait(300) == 0
    kinds = [r.kind for r in read(tmp_path / "run" / "rows.jsonl")[0]]
    assert kinds.count("task") == 1 and (tmp_path / "run" / "transcript.html").exists()


def test_missing_sdk_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from fk_bench.cli import main

    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(SystemExit):
        main(["mcp", "--ops", OP, "--out", str(tmp_path)])
    assert 'pip install "fastkernels[mcp]"' in capsys.readouterr().err
