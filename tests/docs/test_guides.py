"""Each guide, followed literally in a copy of the checkout, ends with passing tests."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support import guides
from support.commands import fk_bench_here, last_json
from support.guides import of, starting

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
OP_GUIDE, MODEL_GUIDE, TUNE_GUIDE, EVALUATE, AGENTS, JUDGE, PROFILE, PARALLEL, CAPTURE, TRACE = (
    ROOT / "docs" / f"{page}.md"
    for page in (
        "add-an-op", "add-a-model", "tune", "evaluate", "agents", "judge", "profile", "parallel", "capture",
        "flashinfer-trace",
    )
)  # fmt: skip
FAST = "fk-bench export"
RECORDER = "fk_integrations.signatures.recorder"


@pytest.fixture(scope="module")
def with_op(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = guides.copy(tmp_path_factory.mktemp("op"))
    written = guides.write_code(OP_GUIDE, checkout)
    assert written[0] == "fastkernels/overrides/activation/mish.py" and len(written) == 5
    return checkout


@pytest.fixture(scope="module")
def recorded(with_op: Path) -> Path:
    """The same after the command that records all signatures of a host, for 30 s of CPU."""
    (record,) = (line for line in guides.commands(OP_GUIDE) if RECORDER in line)
    guides.run(record, with_op)
    return with_op


def test_op_guide_names_the_declared_tests() -> None:
    lines = guides.commands(OP_GUIDE)
    assert any(line.startswith("pytest tests/core/test_spec.py") for line in lines)
    assert sum(line.startswith(("pytest tests/overrides/", "fk-bench kernels")) for line in lines) == 3


def test_new_op_of_the_guide_is_exported(with_op: Path) -> None:
    (line,) = (line for line in guides.commands(OP_GUIDE) if line.startswith(FAST))
    exported = guides.run(line, with_op)
    assert "class MishActivation(" in exported and "import fastkernels" not in exported


@pytest.mark.slow
def test_op_guide_with_its_long_commands(recorded: Path) -> None:
    lines = [line for line in guides.commands(OP_GUIDE) if not line.startswith(FAST) and RECORDER not in line]
    found = {line: guides.run(line, recorded) for line in lines}
    signatures = json.loads(found["fk-bench list ops --signatures"].splitlines()[-1])["signatures"]
    mine = [row for row in signatures if row["op"] == "mish"]
    assert mine and all(row["exact"] for row in mine)
    assert "`mish`" in (recorded / "docs" / "reference" / "ops.md").read_text()
    judged = json.loads(found["fk-bench kernels mish"].splitlines()[-1])
    assert judged["failed"] == 0 and judged["cases"] > 20


OFF = """
import torch
from torch import nn
from transformers.activations import MishActivation
import fastkernels

model = nn.Sequential(MishActivation(), nn.Linear(3, 3), MishActivation())
report = fastkernels.patch(model)
assert type(model[0]) is MishActivation, report
report.undo()
with fastkernels.patch(model, ops=["mish"]) as report:
    assert type(model[0]) is not MishActivation, report
"""


@pytest.mark.slow
def test_new_op_of_the_guide_is_off_until_requested(recorded: Path) -> None:
    (recorded / "off.py").write_text(OFF)
    guides.run("python off.py", recorded)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_model_guide_is_followed_to_a_green_end(tmp_path: Path) -> None:
    """All its commands, with random weights for the checkpoint; then the tests that cover every model."""
    checkout = guides.copy(tmp_path / "checkout")
    words = {"CHECKPOINT": "my_folder/checkpoint", "SOURCE": "random weights"}
    for line in guides.commands(MODEL_GUIDE):
        if line.startswith("python tests/support/recorded_names.py"):
            assert guides.write_code(MODEL_GUIDE, checkout) == ["tests/support/tiny.py"] * 2
            guides.run("python tests/support/tiny.py my_folder/checkpoint hyperclovax", checkout)
        output = guides.run(line, checkout, words)
        assert "hyperclovax" in output.lower() or line.startswith(
            ("mv", "python", "pytest", "fk-bench stubs")
        ), line
    for rest in (
        "tests/models/test_foreign_fields.py -k every",
        "tests/models/test_in_transformers.py -k classes",
    ):
        guides.run(f"pytest {rest}", checkout)


@pytest.mark.slow
def test_tunable_op_of_the_guide_is_tuned(tmp_path: Path) -> None:
    """`Make an op tunable` ends with a table."""
    section = tmp_path / "section.md"
    section.write_text(TUNE_GUIDE.read_text().partition("## Make an op tunable")[2])
    checkout = guides.copy(tmp_path / "checkout")
    assert len(guides.write_code(section, checkout)) == 2
    for line in guides.commands(section):
        output = guides.run(line, checkout)
    result = json.loads(output.splitlines()[-1])
    assert result["command"] == "tune", result
    assert json.loads((checkout / "mine.json").read_text())["entries"]


def test_readme_patches_and_restores(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps of README in our engine; tests/integrations/vllm/check_guides.py runs them in vLLM."""
    (steps,) = guides.blocks(README, "python")
    name, host = '"meta-llama/Llama-3.1-8B-Instruct"', "from vllm import LLM"
    assert steps.count(name) == steps.count(host) == 1
    scope: dict[str, Any] = {}
    exec(
        steps.replace(name, f"{str(tiny)!r}, device='cpu'").replace(host, "from fastkernels import LLM"),
        scope,
    )
    assert "modules patched in 1 process" in capsys.readouterr().out and not scope["report"].verified
    assert scope["llm"].generate("a", use_tqdm=False)


def test_evaluate_guide_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, *evals = starting(EVALUATE, "fk-bench stubs", "fk-bench eval smoke", "fk-bench eval default")
    assert last_json(fk_bench_here(*shlex.split(first)[1:]))["files"] == 2
    for line in evals:
        if "--python" in line and not all((ROOT / f".venv-{host}").exists() for host in ("vllm", "sglang")):
            continue  # `make setup` makes them
        words = shlex.split(re.sub(r"(\w+)=PATH/", rf"\1={ROOT}/.venv-\1/", line))
        estimate = last_json(fk_bench_here(*words[1:], "--estimate"))
        assert estimate["ok"] and estimate["suite"] == line.split()[2] and estimate["minutes"], estimate


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_evaluate_guide_scores_a_set(tmp_path: Path) -> None:
    for line in starting(EVALUATE, "fk-bench stubs", "fk-bench eval smoke"):
        output = guides.run(line, tmp_path)
    (result,) = of(output)["results"]
    assert result["set"] == "mine" and result["score"] > 0 and Path(tmp_path, of(output)["report"]).is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_agents_guide_runs_its_tuner(tmp_path: Path) -> None:
    assert guides.write_code(AGENTS, tmp_path) == ["my_tuner.py"]
    loop, *_ = starting(AGENTS, 'fk-bench agent-loop --command "python $PWD/my_tuner.py"')
    output = guides.run(loop, tmp_path)
    (task,) = of(output)["tasks"]
    assert task["status"] == "ok" and task["metrics"]["attempts"] >= 2, task
    assert (tmp_path / of(output)["transcript"]).is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_judge_and_profile_guides_on_a_cpu(tmp_path: Path) -> None:
    """Lines that judge the stub of one op, and what profiles show of it."""
    judged = []
    for line in starting(JUDGE, "fk-bench stubs --op silu_and_mul", "fk-bench kernels silu_and_mul"):
        if "--against" in line:
            (tmp_path / "old").mkdir()
            (tmp_path / "old" / "silu_and_mul.py").write_text(
                (tmp_path / "candidates/silu_and_mul.py").read_text()
            )
        last = of(guides.run(line, tmp_path))
        if " kernels " in line:
            assert last["failed"] == 0 and last["cases"] > 0, line
            judged.append(str(Path(last["rows"]).parent))
    (compare,) = starting(JUDGE, "fk-bench diff RUN_A RUN_B")
    guides.run(compare, tmp_path, {"RUN_A": judged[0], "RUN_B": judged[0]})
    guides.run("fk-bench stubs --op rms_norm --out my-set", tmp_path)
    for line in starting(PROFILE, "fk-bench profile rms_norm", "fk-bench profile fk-bench-runs/kernels-1"):
        assert of(guides.run(line, tmp_path, {"fk-bench-runs/kernels-1": judged[0]}))["ok"], line


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_collectives_guide_on_a_cpu(tmp_path: Path) -> None:
    for line in starting(PARALLEL, "fk-bench kernels all_reduce", "fk-bench stubs --op all_reduce"):
        if not line.endswith("--device cuda"):
            last = of(guides.run(line, tmp_path))
            assert last.get("failed", 0) == 0 and last["ok"], last


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_capture_guide_on_a_cpu(tiny: Path, tmp_path: Path) -> None:
    first, *sampled = starting(
        CAPTURE,
        "fk-bench capture MODEL --scenario",
        "fk-bench capture MODEL --values",
        "fk-bench kernels rms_norm",
    )
    words = {"MODEL": str(tiny)}
    assert of(guides.run(first, tmp_path, words))["out"] == f"captures/{tiny.name}-chat-fastkernels".lower()
    for line in sampled:
        last = of(guides.run(line, tmp_path, words))
        assert last["ok"], (line, last)
    assert last["cases"] > 0
    _, replay = guides.blocks(CAPTURE, "python")
    exec(replay, {})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trace_guide_on_a_cpu(tmp_path: Path) -> None:
    guides.run("fk-bench stubs --op rms_norm --out my-set", tmp_path)
    judged = of(guides.run("fk-bench kernels rms_norm --case odd_63 --candidate my-set/ --no-time", tmp_path))
    words = {"fk-bench-runs/kernels-1": str(Path(judged["rows"]).parent)}
    for line in starting(
        TRACE, "fk-bench trace export", "fk-bench trace import", "fk-bench kernels rms_norm"
    ):
        last = of(guides.run(line, tmp_path, words))
        assert last["ok"] and last.get("failed", 0) == 0, (line, last)
