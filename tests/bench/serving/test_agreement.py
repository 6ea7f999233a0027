"""Token agreement: the mean of common prefix / length."""

from __future__ import annotations

from pathlib import Path

import pytest
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.serving.agreement import Outputs, agreement, common_prefix, fill, with_base


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix("abc", "abc") == 3


def test_agreement() -> None:
    # Tokens after the first difference do not count
    assert agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert agreement([[1, 2], [5]], [[1, 2], [6]]) == 0.5
    assert agreement([[1, 2]], [[1, 2, 3, 4]]) == 0.5  # one ended early: the longer one is the length
    assert agreement([[]], [[]]) == 1.0
    with pytest.raises(ValueError, match="got 1 and 2"):
        agreement([[1]], [[1], [2]])
    with pytest.raises(ValueError, match="got 0 and 0"):
        agreement([], [])


def test_base_agreement_is_mean_of_both_runs() -> None:
    base = Outputs("tokens", [[1, 2]], [[1, 3]])
    assert base.self_agreement == 0.5
    assert with_base(Outputs("tokens", [[1, 2]], [[1, 2]]), base) == 0.75
    assert with_base(Outputs("characters", [["a"]], [["a"]]), base) is None


def lane_row(lane: str) -> Row:
    return Row(run_id="r", command="c", subject=Subject(lane=lane))


def test_fill() -> None:
    base, same, other = (
        Outputs("tokens", [ids], [ids]) for ids in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 9, 9])
    )
    row = lane_row("vllm+fk")
    fill(row, same, "vllm", base, 0.5)
    assert row.metrics == {"self_agreement": 1.0, "token_agreement": 1.0}
    assert (row.status, row.baseline) == (Status.OK, "vllm")
    row = lane_row("vllm+fk")
    fill(row, other, "vllm", base, 0.5)
    assert row.status is Status.WRONG
    assert "0.250, below 0.500" in row.reason
    row = lane_row("vllm+fk")
    fill(row, same, "vllm", None, 0.5)
    assert "token_agreement" not in row.metrics and "it has no output" in row.reason


def test_half_written_outputs_are_redone(tmp_path: Path) -> None:
    file = tmp_path / "a" / "vllm.json"
    outputs = Outputs("tokens", [[1]], [[1]], "/flush_cache")
    outputs.save(file)
    assert Outputs.load(file) == outputs
    file.write_text(file.read_text()[:20])
    assert Outputs.load(file) is None
    assert Outputs.load(tmp_path / "none.json") is None
