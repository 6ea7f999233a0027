"""The matrix of what is measured, and the tables and plots of docs/models.md."""

from __future__ import annotations

import re
from pathlib import Path

from fk_bench.core.rows import Machine, Row, Status, Subject
from fk_bench.offline.host import make_row
from fk_bench.tables import measured, model_plot
from fk_bench.tables.command import MARKER

ROOT = Path(__file__).parents[3]
H100 = Machine(gpu="NVIDIA H100 80GB HBM3", gpus=1, cpu="cpu", cores=2)


def row(model: str, load: str, day: int, **metrics: float) -> Row:
    case = {"load": load, "state": "patched", "dtype": "bfloat16"}
    made = make_row("vllm", case, metrics, command="patch-compare", subject=Subject(model=model, host="vllm"))
    return made.model_copy(update={"machine": H100, "time": f"2026-11-0{day}"})


def test_matrix_names_what_was_not_measured() -> None:
    rows = [row("a", "1x512+64", 1, tpot_ms=1.0), row("b", "8x512+64", 3, tpot_ms=1.0)]
    rows.append(row("c", "8x512+64", 4, tpot_ms=1.0).model_copy(update={"status": Status.WRONG}))
    ((_, columns, cells),) = measured.table({"a": rows})
    lines = {tuple(line[:3]): line[3:] for line in cells}
    assert columns == ["host", "format", "load", "H100"]
    assert lines["vLLM", "bfloat16", "decode"] == ["2, 2026-11-03"]
    assert lines["vLLM", "bfloat16", "long context"] == lines["SGLang", "FP8 weights", "servers over HTTP"] == [
        "not measured"
    ]  # fmt: skip


def test_prompts_count_with_input_tokens_only() -> None:
    old, new = (
        row("a", "8x512+8", 1, output_tokens_per_s=1.0),
        row("b", "8x2048+8", 2, input_tokens_per_s=1.0),
    )
    ((_, _, cells),) = measured.table({"a": [old, new]})
    assert ["vLLM", "bfloat16", "prompts", "1, 2026-11-02"] in cells


def test_cells_of_models_md_have_one_number() -> None:
    text = (ROOT / "docs/models.md").read_text()
    lines = [line for found in MARKER.finditer(text) for line in found["body"].splitlines()]
    rows = [line for line in lines if line.startswith("| ") and re.search(r"\| \d", line)]
    assert len(rows) > 100 and not [line for line in rows if " / " in line]


def test_each_table_of_models_md_has_a_plot() -> None:
    """Above it, or that of the marker's first table; the matrix of what is measured has no ratio."""
    before = ""
    for part in re.split(r"^<!-- end -->$", (ROOT / "docs/models.md").read_text(), flags=re.MULTILINE)[:-1]:
        before, _, marker = part.partition("<!-- table: ")
        assert "](assets/" in before or marker.startswith("measured "), marker.splitlines()[0]


def test_axis_is_logarithmic_for_distant_values() -> None:
    x, ticks = model_plot.axis([0.2, 15.0])
    assert ticks[0] <= 0.2 and ticks[-1] >= 15.0 and len(ticks) < 10
    assert abs((x(4.0) - x(2.0)) - (x(2.0) - x(1.0))) < 1e-6
    x, ticks = model_plot.axis([0.9, 1.3])
    assert 1.0 in [round(tick, 6) for tick in ticks] and abs((x(1.2) - x(1.1)) - (x(1.1) - x(1.0))) < 1e-6
