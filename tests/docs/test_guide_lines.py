"""Every command line and every block of Python in the guides is run by a test, or has a reason why none runs it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import guides

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages of which these tests run all lines and all blocks
WHOLE = {
    "add-an-op": "tests/docs/test_guides.py",
    "add-a-model": "tests/docs/test_guides.py",
    "serve": "tests/docs/test_serve_guide.py",
}
# Pages with blocks of Python: the test that runs them, and a text in it
PYTHON = {
    "README": ("tests/docs/test_guides.py", "guides.blocks(README"),
    "start": ("tests/integrations/vllm/check_guides.py", "docs/start.md"),
    "agents": ("tests/docs/test_guides.py", "guides.write_code(AGENTS"),
    "capture": ("tests/docs/test_guides.py", "guides.blocks(CAPTURE"),
    "patch": ("tests/docs/test_host_guides.py", "guides.blocks(PATCH"),
    "tune": ("tests/docs/test_guides.py", "TUNE_GUIDE"),
    "explain": ("tests/docs/test_host_guides.py", "guides.blocks(EXPLAIN"),
    "parallel": ("tests/integrations/vllm/check_tensor_parallel.py", 'ops=["all_reduce"]'),
    "what-works": ("tests/integrations/rendering/check_gsplat.py", "fastkernels.patch(gsplat, ops=OPS)"),
}
# Beginnings of lines that another test runs with made rows, or in parts: its file, and a text in it
ELSEWHERE = {
    "fk-bench explain llama-3.1-": ("tests/bench/explain/test_explain.py", "def test_page_tables_match"),
    "fk-bench explain MODEL": ("tests/docs/test_host_guides.py", "fk-bench explain PATH"),
    "fk-bench explain mixtral": ("tests/bench/explain/test_explain.py", "def test_page_tables_match"),
    "fk-bench board": ("tests/bench/board/test_board.py", '"board"'),
    "fk-bench submit-check": ("tests/bench/board/test_board.py", '"submit-check"'),
    "fk-bench agents-table": ("tests/bench/board/test_board.py", '"agents-table"'),
    "fk-bench study": ("tests/bench/board/test_study.py", '"study"'),
    "fk-bench track": ("tests/bench/track/test_track.py", '"track"'),
    "fk-bench agent-loop --command": ("tests/bench/track/test_track.py", '"agent-loop"'),
    "fk-bench e2e MODEL --hosts fastkernels,vllm": ("tests/docs/test_host_guides.py", "fk-bench e2e MODEL --candidate"),
    "fk-bench serve-compare --model MODEL --lanes fastkernels": (
        "tests/bench/serving/test_caches.py",
        "--speculative-config",
    ),
    "fk-bench tune softsign": ("tests/docs/test_guides.py", "## Make an op tunable"),
    "pytest tests/core/": ("tests/docs/test_guides.py", "## Make an op tunable"),
    "fk-bench tune FOLDER": ("tests/bench/tune/test_tune.py", '"tune"'),
    "fk-bench tune linear --": ("tests/bench/tune/test_tune.py", '"--shape"'),
    "fk-bench tune attention_decode": ("tests/bench/tune/test_tune.py", '"tune"'),
    "fk-bench tune qwen3-8b": ("tests/bench/tune/test_tune.py", '"tune"'),
    "fk-bench quality": ("tests/bench/quality/test_quality_command.py", '"quality"'),
    "fk-bench patch-compare llama-3.1-8b qwen3-8b": ("tests/bench/e2e/test_patch_compare.py", '`fk-bench patch'),
    "fk-bench mcp": ("tests/bench/agents/test_mcp.py", '"mcp"'),
    "fk-bench routing": ("tests/bench/routing/test_study.py", '"routing"'),
    "fk-bench kernels --cheats": ("tests/bench/kernels/test_identity.py", '"--cheats"'),
    "fk-bench kernels --identity": ("tests/bench/kernels/test_identity.py", '"--identity"'),
    "fk-bench kernels --task": ("tests/bench/kernels/test_tasks.py", '"--task"'),
    "fk-bench kernels --level": ("tests/bench/kernels/test_kernels.py", '"--level"'),
    "fk-bench kernels --family": ("tests/bench/kernels/test_ranks.py", '"--family"'),
    "fk-bench kernels --cases captured": ("tests/bench/capture/test_captures.py", '"captured"'),
    "fk-bench kernels --candidate candidates/": ("tests/bench/kernels/test_kernels.py", '"--candidate"'),
    "fk-bench kernels --model llama": ("tests/bench/kernels/test_levels.py", '"llama.model"'),
    "fk-bench kernels llama.mlp": ("tests/bench/kernels/test_levels.py", "llama.mlp"),
    "fk-bench stubs --model llama": ("tests/bench/info/test_stubs.py", '"--model"'),
    "fk-bench stubs --op llama.mlp": ("tests/bench/kernels/test_levels.py", "llama.mlp"),
    "python tasks/rms_norm.py": ("tests/bench/scaffold/test_scaffold.py", "tasks"),
    "fk-bench capture MODEL --host vllm": ("tests/bench/capture/test_captures.py", '"capture"'),
    "fk-bench profile llama": ("tests/bench/profile/test_profile.py", '"profile"'),
    "fk-bench profile PATH": ("tests/bench/profile/test_profile.py", '"--phase"'),
    "fk-bench patch-compare llama-3.1-8b --with-engine": ("tests/bench/e2e/test_patch_compare.py", '"--with-engine"'),
    "fk-bench patch-compare bge-m3": ("tests/bench/e2e/test_served_media.py", '"embed"'),
    "fk-bench patch-compare qwen3-vl": ("tests/bench/e2e/test_served_media.py", '"--images"'),
    "fk-bench patch-compare whisper": ("tests/bench/e2e/test_served_media.py", '"--audio"'),
    "fk-bench serve MODEL --tensor": ("tests/engine/execution/test_several_nodes.py", "nnodes"),
    "python bench/experiments/works_with/works_with.py": ("tests/bench/experiments/test_works_with.py", "works_with"),
    "python bench/experiments/quality/quality_noise.py": (
        "tests/bench/experiments/test_quality_noise.py",
        "quality_noise",
    ),
    "FASTKERNELS=1 FASTKERNELS_CANDIDATES": ("tests/integrations/check_server.py", "FASTKERNELS_CANDIDATES"),
}  # fmt: skip
NOT_RUN = {
    "pip install": "the environments of the tests are installed in this way",
    "make ": "the tests themselves, and a demonstration that installs the hosts",
    "fk-bench agent-loop --agent": "calls the agents of other companies",
    "fk-bench e2e flux.1": "real sizes: 24 GB of weights on a GPU",
    "fk-bench e2e siglip2": "real sizes on a GPU",
    "fk-bench patch-compare mamba2-2.7b": "real sizes on a GPU",
    "fk-bench patch-compare qwen3-8b phi-4": "`--gpus all` needs GPUs",
    "fk-bench patch-compare all": "14 models of real sizes on a GPU",
    "fk-bench coverage --paper": "45 minutes",
    "fk-bench coverage": "45 minutes; make test-slow judges forty of the files",
    "fk-bench kernels --candidate liger": "Liger's kernels need a GPU",
    "fk-bench tune all": "hours on a CPU",
    "fk-bench tune linear --provider triton": "Triton needs a GPU",
    "fk-bench quality SmolLM2": "minutes of vLLM with 135 million weights; the quality page has the tiny form",
}
# The same lines as on the pages of which a test runs them
SHORT = {"README", "index"}


def test_line_of_a_guide_is_run_or_has_a_reason() -> None:
    run, unknown, used = beginnings(), [], set()
    anywhere = {beginning for lines in run.values() for beginning in lines}
    for page in PAGES:
        if page.stem in WHOLE:
            continue
        for line in guides.commands(page):
            if line.startswith(tuple(anywhere if page.stem in SHORT else run.get(page.stem, ()))):
                continue
            known = [beginning for beginning in (*ELSEWHERE, *NOT_RUN) if line.startswith(beginning)]
            used |= {*known}
            if not known:
                unknown.append(f"{page.name}: {line}")
    assert not unknown, "no test runs these:\n" + "\n".join(unknown)
    assert used == {*ELSEWHERE, *NOT_RUN}


def test_page_with_python_has_a_test() -> None:
    with_blocks = {page.stem for page in PAGES if guides.blocks(page, "python")}
    assert with_blocks == {*WHOLE, *PYTHON}


def beginnings() -> dict[str, list[str]]:
    """{page: beginnings of the lines that tests run}, from their calls of `starting(PAGE, ...)`."""
    found: dict[str, list[str]] = {}
    for file in HERE.glob("test_*guides.py"):
        tree = ast.parse(file.read_text())
        pages = dict(constants(tree))
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "starting":
                page, *rest = call.args
                assert isinstance(page, ast.Name)
                found.setdefault(pages[page.id], []).extend(map(ast.literal_eval, rest))
    return found


def constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, page) of `A, B = (ROOT / ... for page in ("a", "b"))` and of `A = ROOT / "a.md"`."""
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        (target,), value = node.targets, node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.GeneratorExp):
            names = [ast.unparse(name) for name in target.elts]
            yield from zip(names, ast.literal_eval(value.generators[0].iter), strict=True)
        elif isinstance(target, ast.Name) and isinstance(value, ast.BinOp):
            yield target.id, Path(str(getattr(value.right, "value", ""))).stem


@pytest.mark.parametrize(("file", "text"), [*ELSEWHERE.values(), *PYTHON.values()])
def test_line_that_runs_elsewhere_is_in_that_test(file: str, text: str) -> None:
    assert text in (ROOT / file).read_text()
