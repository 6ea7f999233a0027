"""README and docs name only commands, flags, imports, files, variables, routes and metrics that exist."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from fk_bench import cli

from fastkernels.core.env import Environment

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {DOCS / "reference" / name for name in ("ops.md", "models.md", "commands.md", "environment.md")}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(set(DOCS.rglob("*.md")) - GENERATED)]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
OURS = ("fastkernels", "fk_bench", "fk_integrations")
PATHS = re.compile(
    r"(?<![\w:])(?:fastkernels|integrations|bench|tests|docs|tools)/[\w./-]*\w\.(?:py|md|json|jsonl|jsonl\.xz|toml|txt|svg)\b(?!\.xz)"
)


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced code blocks of these languages; indented ones, which have none, too."""
    text = page.read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    found = [block.strip("\n") for language, block in fenced if language in languages]
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", text, re.MULTILINE)
    return found + ["\n".join(line[4:] for line in block.strip("\n").split("\n")) for block in indented]


def shell_lines(page: Path) -> list[str]:
    """Command lines of shell blocks, and inline code that looks like one, without comments and redirections."""
    joined = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    inline = re.findall(r"`((?:\w+=\S+ )*(?:fk-bench|make|python|vllm) [^`]*)`", page.read_text())
    return [line.split(" #")[0].split(" > ")[0].strip() for line in [*joined.splitlines(), *inline]]


def command_lines() -> list[Any]:
    found = [line for page in PAGES for line in shell_lines(page)]
    return [pytest.param(line, id=line) for line in dict.fromkeys(found) if line.startswith("fk-bench ")]


def python_blocks() -> list[Any]:
    return [
        pytest.param(block, id=f"{page.name}-{i}")
        for page in PAGES
        for i, block in enumerate(blocks(page, "python"))
        if re.match(r"(import|from) ", block)
    ]


@cache
def command_of(name: str) -> Any:
    command: Any = typer.main.get_command(cli.build(name))
    return getattr(command, "commands", {name: command})[name]


@cache
def flags(name: str) -> set[str]:
    """Flags of a command, from the command line itself."""
    return {flag for p in command_of(name).params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("line", command_lines())
def test_commands_parse(line: str) -> None:
    """Options exist and take these values, and no argument is too many. Nothing runs."""
    name, *words = shlex.split(line)[1:]
    assert name in cli.COMMANDS
    assert {w.partition("=")[0] for w in words if w.startswith("--")} <= flags(name)
    try:
        command_of(name).make_context(name, words)
    except Exception as error:
        assert type(error).__name__ in ("MissingParameter", "Exit"), f"{line}: {error}"  # a mention; --help


@pytest.mark.parametrize("block", python_blocks())
def test_python_blocks_parse_and_import(block: str) -> None:
    compiled = compile(block, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(compiled):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            for name in node.names:  # a module's own, or a submodule that is not imported yet
                assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), name.name
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "fastkernels":
            assert hasattr(importlib.import_module("fastkernels"), node.attr)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        target = (page.parent / link).resolve()
        assert target.exists(), link
        # the site contains docs/ only: a page of it cannot link to a file outside
        assert page.parent == ROOT or target.is_relative_to(DOCS), link
    for path in PATHS.findall(re.sub(r"\]\([^)]*\)", "", text)):
        if any(part.partition(".")[0].isupper() for part in path.split("/") if part != "README.md"):
            continue  # a placeholder: overrides/FAMILY/NAME.py
        created = f"```python\n# {path}\n" in text  # by a reader who follows the guide
        assert created or (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_make_targets_and_variables_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shell_lines(page):
        if line.startswith("make "):
            assert {w for w in line.split()[1:] if "=" not in w and w != "..."} <= targets, line
    assert set(re.findall(r"\bFASTKERNELS(?:_[A-Z]+)*\b", page.read_text())) <= variables()


def test_sources_name_existing_pages() -> None:
    missing = []
    for folder in ("fastkernels", "integrations", "bench", "tools"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".md", ".cu", ".cpp") and file.is_file():
                for path in re.findall(r"\bdocs/[\w./-]+\.md\b", file.read_text()):
                    if not (ROOT / path).exists():
                        missing.append(f"{file.relative_to(ROOT)}: {path}")
    assert not missing


def test_json_blocks_parse() -> None:
    found = [block for page in PAGES for block in blocks(page, "json") if block.startswith("{")]
    assert found and all(json.loads(block) for block in found)


def variables() -> set[str]:
    return set(re.findall(r"\bFASTKERNELS(?:_[A-Z]+)*\b", Environment.__doc__ or ""))


def test_every_variable_in_the_sources_is_documented() -> None:
    used: set[str] = set()
    for folder in ("fastkernels", "integrations", "bench/fk_bench"):
        for file in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"[\"'](FASTKERNELS(?:_[A-Z]+)*)[\"']", file.read_text()))
    assert "FASTKERNELS_OPS" in used and used <= variables()


def test_site_navigation_names_exactly_the_pages() -> None:
    named = set(re.findall(r'= "([\w/-]+\.md)" \}', (ROOT / "zensical.toml").read_text()))
    reports = {page.name for page in (DOCS / "reports").glob("*.md")}
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert named == there - {f"reports/{name}" for name in reports}
    text = (DOCS / "reports.md").read_text()
    assert sorted(re.findall(r"\]\(reports/([\w-]+\.md)\)", text)) == sorted(reports)
    lists = [re.findall(r"^\| (\d{4}-\d\d-\d\d) ", part, re.MULTILINE) for part in text.split("\n## ")]
    assert sum(map(len, lists)) == len(reports) and all(d == sorted(d, reverse=True) for d in lists)


@pytest.mark.parametrize(
    ("page", "limit"), [("README.md", 150), ("docs/performance.md", 200), ("CONTRIBUTING.md", 100)]
)
def test_pages_stay_short(page: str, limit: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= limit


def test_install_page_names_every_extra() -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    extras = re.findall(r"^([a-z0-9-]+) = \[", section.partition("\n[")[0], re.MULTILINE)
    cells = re.findall(r"^\| (`.*?) \|", (DOCS / "start.md").read_text(), re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([a-z0-9-]+)`", cell)]
    assert len(extras) > 15 and sorted(named) == sorted(extras)


def test_glossary_has_at_most_40_words() -> None:
    rows = re.findall(r"^\| (?!word |---)", (DOCS / "concepts.md").read_text(), re.MULTILINE)
    assert 20 <= len(rows) <= 40


def test_engine_page_names_files_of_every_folder() -> None:
    engine = ROOT / "fastkernels" / "engine"
    named = set(re.findall(r"`([\w/]+\.py)`", (DOCS / "engine.md").read_text()))
    there = {name for name in named if (engine / name).is_file()}
    assert all((engine / name).is_file() or (ROOT / name).is_file() for name in named)
    folders = {f.name for f in engine.iterdir() if f.is_dir() and (f / "__init__.py").is_file()}
    assert {name.partition("/")[0] for name in there if "/" in name} >= folders


def test_judge_page_names_every_status_source_and_metric() -> None:
    from fk_bench.core.rows import Status
    from fk_bench.kernels.judge.correctness.cases import SOURCES

    text, judge = (DOCS / "judge.md").read_text(), ROOT / "bench" / "fk_bench" / "kernels" / "judge"
    first = {part for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for part in cell.split(", ")}
    assert {f"`{s.value}`" for s in Status if s is not Status.DIED} <= first
    assert {f"`{s}`" for s in SOURCES} <= first
    metrics = text[text.index("| metric |") : text.index("The last line of output")]
    code = re.sub(r"_\{k\}", "", "".join(f.read_text() for f in judge.rglob("*.py")))
    for metric in re.findall(r"`([a-z]\w+)`", metrics):
        name = re.sub(r"^trace_|_p\d0$", "", metric)
        assert f'"{name}"' in code or name == "ci95", metric
    assert set(re.findall(r"`(--[a-z][\w-]+)", text)) <= flags("kernels")


def test_serve_page_names_every_route_flag_field_and_metric() -> None:
    from fastkernels.engine.cache.blocks import BlockManager
    from fastkernels.engine.execution.forward.startup import Phases
    from fastkernels.engine.http.answers.metrics import Metrics
    from fastkernels.engine.http.anthropic_api.protocol import MessagesRequest
    from fastkernels.engine.http.audio_api.protocol import TranscriptionRequest
    from fastkernels.engine.http.requests import protocol
    from fastkernels.engine.http.requests.config import ServerConfig
    from fastkernels.engine.http.responses_api.protocol import ResponsesRequest
    from fastkernels.engine.http.routes.pictures import ImageGenerationRequest
    from fastkernels.engine.http.server import ROUTES, Server
    from fastkernels.engine.http.sglang_api.protocol import SglangRequest, SglangSampling
    from fastkernels.engine.options.config import EngineConfig
    from fastkernels.engine.options.speculation import Speculation
    from fastkernels.engine.scheduling.payoff import Payoff
    from fastkernels.engine.scheduling.scheduler import Scheduler

    text = (DOCS / "serve.md").read_text()
    routes: set[str] = set()
    for kind in ROUTES:
        server = Server.__new__(Server)  # its routes need no engine but its kind
        server.llm, server.context = SimpleNamespace(engine=SimpleNamespace(kind=kind)), None  # type: ignore[assignment]
        server.config = ServerConfig(enable_tokenizer_info_endpoint=True)
        found = [r.path for r in server._routes().routes if "{path" not in r.path]
        routes |= {path.replace("{model:path}", "NAME") for path in found}
    own = {"/docs", "/docs/oauth2-redirect", "/redoc"}  # FastAPI's
    assert routes - own == set(re.findall(r"`(?:GET|POST) (/[^`]*)`", text))
    assert set(re.findall(r"`(--[\w-]+)`", text)) <= flags("serve")
    fields = {
        **protocol.UnmaskCompletionRequest.model_fields,
        **protocol.UnmaskChatCompletionRequest.model_fields,
        **protocol.EmbeddingRequest.model_fields,
        **SglangRequest.model_fields,
        **SglangSampling.model_fields,
        **ResponsesRequest.model_fields,
        **MessagesRequest.model_fields,
        **TranscriptionRequest.model_fields,
        **ImageGenerationRequest.model_fields,
    }
    implied = {"model", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert {f for f in fields if f"`{f}`" not in text} <= implied
    blocks = BlockManager(2, 16)
    forced = Speculation(2, rejection_sample_method="synthetic", synthetic_acceptance_length=2)
    scheduler = Scheduler([blocks], 1, 1, 1, speculation=forced)
    scheduler.payoff = Payoff({1: 1.5}, 3)
    engine: Any = SimpleNamespace(
        kind="Generate",
        audio=object(),
        scheduler=scheduler,
        blocks=blocks,
        max_model_len=16,
        phases=Phases(),
        config=EngineConfig("m"),
    )
    others = [
        SimpleNamespace(**{**vars(engine), "kind": kind, "steps_left": 0})
        for kind in ("Denoise", "DenoiseVideo", "Rollout", "Speak")
    ]
    found = [Metrics("m", one).text().decode() for one in (engine, *others)]
    names = re.findall(r"# TYPE (\w+:\w+) ", "".join(found))
    assert set(re.findall(r"`((?:vllm|fastkernels):\w+)`", text)) == set(names)


def test_readme_range_of_image_models_is_that_of_their_rows() -> None:
    section = (DOCS / "models.md").read_text().partition("## Image models\n")[2].partition("\n## ")[0]
    found, columns = [], list[str]()
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "model":
            columns = cells
        elif line.startswith("|"):
            ratios = [
                c
                for n, c in zip(columns, cells, strict=True)
                if n.startswith("batch ") or n == "host / patched"
            ]
            found += [float(ratio) for ratio in ratios if ratio.strip("-")]
    stated = re.search(r"#image-models\) run at ([\d.]+) to ([\d.]+) times", (ROOT / "README.md").read_text())
    assert found and stated
    assert stated.groups() == (f"{min(found):.2f}", f"{max(found):.2f}")
