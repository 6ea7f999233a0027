"""Each guide, followed literally in a copy of the checkout, ends with passing tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import guides

ROOT = Path(__file__).parents[2]
OP_GUIDE, MODEL_GUIDE, TUNE_GUIDE = (
    ROOT / "docs" / f"{page}.md" for page in ("add-an-op", "add-a-model", "tune")
)
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
