"""The selection model: order, distinct kernels, files that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastkernels.core.tuning import Chip
from fastkernels.overrides.kit import selection
from fastkernels.overrides.kit.selection import Candidate, Model, ModelError

MODEL = Model("test", {"a": (1.0, 2.0), "b": (0.5,)}, {"points": 3})


def candidate(name: str, kind: str, *terms: float, kernel: str = "") -> Candidate:
    return Candidate("ours", {"name": name}, kind, terms, kernel or name)


def names(found: tuple[tuple[str, dict[str, str]], ...]) -> list[str]:
    return [params["name"] for _, params in found]


def test_proposals_are_ordered_by_weighted_terms() -> None:
    slow, fast, middle = candidate("x", "a", 1, 4), candidate("y", "a", 2, 1), candidate("z", "b", 10)
    assert [MODEL.us(c) for c in (slow, fast, middle)] == [9, 4, 5]
    assert names(MODEL.proposals([slow, fast, middle])) == ["y", "z", "x"]
    assert names(MODEL.proposals([slow, fast, middle], most=1)) == ["y"]


def test_equal_kernels_are_proposed_once() -> None:
    several = [
        candidate(n, "a", 1, cost, kernel=k) for n, cost, k in (("x", 1, "k"), ("y", 1, "k"), ("z", 2, "l"))
    ]
    assert names(MODEL.proposals(several)) == ["x", "z"]


def test_kinds_without_points_are_not_proposed() -> None:
    assert names(MODEL.proposals([candidate("new", "c", 0.0), candidate("known", "b", 9.0)])) == ["known"]


def test_file_round_trip_keeps_the_model(tmp_path: Path) -> None:
    path = tmp_path / "test.json"
    path.write_text(MODEL.to_json())
    assert selection.read(path) == MODEL


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"schema": "other"}', "its schema is 'other'"),
        (json.dumps({"schema": selection.SCHEMA, "op": "x", "fitted": {}}), "'weights'"),
        (
            json.dumps({"schema": selection.SCHEMA, "op": "x", "fitted": {}, "weights": {"a": ["?"]}}),
            "could not",
        ),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"broken\.json") as error:
        selection.read(path)
    assert said in str(error.value)


def test_unknown_memory_speed_scales_with_sms() -> None:
    known, unknown = Chip("known", 132, 4.917e12, 0), Chip("unknown", 66, 0.0, 0)
    assert selection.memory_us(1 << 20, unknown) == pytest.approx(2 * selection.memory_us(1 << 20, known))
