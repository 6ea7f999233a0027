"""What README and docs name exists: commands with their flags, imports, files, routes, metrics."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from fk_bench import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("fastkernels", "fk_bench", "fk_integrations")


def blocks(page: Path) -> list[str]:
    """Indented code blocks."""
    found = re.findall(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", page.read_text(), re.MULTILINE)
    return ["\n".join(line[4:] for line in block.strip("\n").split("\n")) for block in found]


def command_lines() -> list[Any]:
    """Every `fk-bench ...` line of a block, and every `fk-bench ...` in running text."""
    found = []
    for page in PAGES:
        joined = "\n".join(blocks(page)).replace("\\\n", " ")
        lines = [line.split(" #")[0].split(" > ")[0] for line in joined.splitlines()]
        lines += re.findall(r"`(fk-bench [^`]*)`", page.read_text())
        found += [pytest.param(line, id=line) for line in lines if line.startswith("fk-bench ")]
    return found


def python_blocks() -> list[Any]:
    return [
        pytest.param(block, id=f"{page.name}-{i}")
        for page in PAGES
        for i, block in enumerate(blocks(page))
        if re.match(r"(import|from) ", block)
    ]


def flags(name: str) -> set[str]:
    """Of a command, from the command line itself."""
    command: Any = typer.main.get_command(cli.build(name))
    params = getattr(command, "commands", {name: command})[name].params
    return {flag for p in params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("line", command_lines())
def test_commands_and_flags_exist(line: str) -> None:
    words = shlex.split(line)[1:]
    assert words[0] in cli.COMMANDS
    assert {w for w in words if w.startswith("--")} <= flags(words[0])


@pytest.mark.parametrize("block", python_blocks())
def test_python_parses_and_its_imports_are_there(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            for name in node.names:  # a module's own, or one of its modules that nothing has imported yet
                assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), name.name
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "fastkernels":
            assert hasattr(importlib.import_module("fastkernels"), node.attr)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"(?:fastkernels|bench|tests|docs)/[\w/]+\.(?:py|md)", text):
        assert (ROOT / path).is_file(), path


def test_the_engines_page_names_every_file_and_no_other() -> None:
    engine = ROOT / "fastkernels" / "engine"
    there = {str(f.relative_to(engine)) for f in engine.rglob("*.py") if f.name != "__init__.py"}
    named = {
        name for name in re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "engine.md").read_text())
        if not (ROOT / name).is_file()
    }  # fmt: skip
    assert named == there


def test_the_judges_page_names_every_file_status_field_and_source() -> None:
    from fk_bench.core.rows import Status
    from fk_bench.kernels.judge.correctness.cases import SOURCES

    from fastkernels.core.spec import OpSpec

    text, judge = (ROOT / "docs" / "judge.md").read_text(), ROOT / "bench" / "fk_bench" / "judge"
    there = {f.name for f in judge.glob("*.py") if f.name != "__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", text)) == there
    first = {part for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for part in cell.split(", ")}
    assert {f"`{s.value}`" for s in Status if s is not Status.DIED} <= first
    assert {f"`{s}`" for s in SOURCES} <= first
    asked = {f.name for f in dataclasses.fields(OpSpec)} - {
        "name",
        "level",
        "op",
        "baseline",
        "batch_invariant",
        "stands_for",
        "by_table",
    }
    assert {f"`{f}`" for f in asked} <= first
    metrics = text[text.index("| metric |") : text.index("Rows of an op")]
    files = (judge / name for name in ("judge.py", "pair.py", "starts.py"))
    code = re.sub(r"_\{k\}", "", "".join(f.read_text() for f in files))
    for metric in re.findall(r"`([a-z]\w+)`", metrics):
        name = re.sub(r"^trace_|_p\d0$", "", metric)
        assert f'"{name}"' in code or name == "ci95", metric
    assert set(re.findall(r"`(--[a-z][\w-]+)", text)) <= flags("kernels")


def test_the_servers_page_names_every_route_flag_field_and_metric() -> None:
    from fastkernels.engine.cache.blocks import BlockManager
    from fastkernels.engine.execution.startup import Phases
    from fastkernels.engine.http import protocol
    from fastkernels.engine.http.metrics import Metrics
    from fastkernels.engine.http.server import Server
    from fastkernels.engine.scheduling.scheduler import Scheduler

    text = (ROOT / "docs" / "server.md").read_text()
    server = Server.__new__(Server)  # its routes need no engine
    server.context = None  # type: ignore[assignment]
    found = [r for r in server._routes("Generate").routes if r.include_in_schema and "{path" not in r.path]
    routes = {r.path.replace("{model:path}", "NAME") for r in found}
    assert routes | {"/openapi.json"} == set(re.findall(r"`(?:GET|POST) (/[^`]*)`", text))
    assert set(re.findall(r"`(--[\w-]+)`", text)) <= flags("serve")
    fields = protocol.CompletionRequest.model_fields | protocol.ChatCompletionRequest.model_fields
    implied = {"model", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert {f for f in fields if f"`{f}`" not in text} <= implied
    blocks = BlockManager(2, 16)
    scheduler = Scheduler(blocks, 1, 1, 1)
    engine: Any = SimpleNamespace(scheduler=scheduler, blocks=blocks, max_model_len=16, phases=Phases())
    names = re.findall(r"# TYPE (\w+:\w+) ", Metrics("m", engine).text().decode())
    assert set(re.findall(r"`((?:vllm|fastkernels):\w+)`", text)) == set(names)
