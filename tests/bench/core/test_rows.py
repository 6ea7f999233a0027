"""The row schema, and files of a killed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fk_bench.core.rows import Machine, Row, Status, Subject, append, read, read_text, stem, write_compressed
from pydantic import ValidationError

FIELDS = {
    "schema",
    "run_id",
    "time",
    "commit",
    "command",
    "machine",
    "versions",
    "status",
    "reason",
    "subject",
    "case",
    "round",
    "provisional",
    "metrics",
    "baseline",
    "ci95",
}


def row(n: int = 0) -> Row:
    return Row(
        run_id="r",
        command="serve-compare",
        machine=Machine(gpu="H200", gpus=1, cpu="c", cores=2),
        versions={"vllm": "0.32.0"},
        status=Status.FAILED,
        reason="why",
        subject=Subject(model="m", lane="vllm+fk", host="vllm"),
        case={"kind": "round", "n": n},
        round=n,
        metrics={"ttft_ms_p50": 1.25},
        baseline="vllm",
        ci95={"ttft_ms_p50": (1.0, 1.5)},
    )


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    append(file, [row(0), row(1)])
    append(file, [row(2)])
    found, warnings = read(file)
    assert found == [row(n).model_copy(update={"time": found[n].time}) for n in range(3)]
    assert warnings == []
    assert set(json.loads(file.read_text().splitlines()[0])) == FIELDS


def test_compressed_rows_are_read_and_not_appended_to(tmp_path: Path) -> None:
    file, packed, again = (tmp_path / name for name in ("a.jsonl", "a.jsonl.xz", "b.jsonl.xz"))
    append(file, [row(0), row(1)])
    for path in (packed, again):
        write_compressed(path, file.read_text())
    assert read(packed) == read(file) and read_text(packed) == file.read_text()
    assert packed.read_bytes() == again.read_bytes() and stem(packed) == stem(file) == "a"
    with pytest.raises(ValueError, match=r"a\.jsonl\.xz: rows are appended to \.jsonl files"):
        append(packed, [row(2)])


def test_half_written_lines_are_skipped_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    append(file, [row(0)])
    with file.open("a") as f:
        f.write(row(1).to_json()[:60])
    found, warnings = read(file)
    assert len(found) == 1
    assert warnings == [f"{file}:2: half-written line, skipped"]
    append(file, [row(2)])  # must not be glued to the half line
    found, warnings = read(file)
    assert [r.round for r in found] == [0, 2]
    assert len(warnings) == 1


def test_foreign_lines_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"run_id": "x"}\n[1]\n' + row().to_json() + "\n")
    found, warnings = read(file)
    assert len(found) == 1
    assert "command" in warnings[0] and len(warnings) == 2


def test_schema_forbids_extra_fields() -> None:
    with pytest.raises(ValidationError):
        Row(run_id="r", command="c", nonsense=1)
    with pytest.raises(ValidationError):
        Row(run_id="r", command="c", status="fine")
    with pytest.raises(ValidationError):
        Row(run_id="r", command="c", metrics={"x": "fast"})
