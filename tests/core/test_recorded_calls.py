"""Compare derived calls with those that hand-written functions made of the same cases (recorded_calls.json.xz)."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from support.kernels.recorded_calls import call_of

from fastkernels.core import registry
from fastkernels.core.spec import OpSpec

RECORDED = json.loads(lzma.decompress((Path(__file__).parent / "recorded_calls.json.xz").read_bytes()))


def comparable(spec: OpSpec, call: dict[str, Any]) -> dict[str, Any]:
    """The call without counted values, which depend on the random numbers that a case drew."""
    return {**call, "dims": {k: k in spec.counted or v for k, v in call["dims"].items()}}


@pytest.mark.parametrize("name", RECORDED)
def test_derived_calls_equal_recorded_ones(name: str) -> None:
    spec = registry.get(name)
    cases = {case.name: case for case in spec.cases}
    assert set(RECORDED[name]) <= set(cases)
    for case, call in RECORDED[name].items():
        found = call_of(spec, cases[case])
        if (
            found["args"] != call["args"]
        ):  # recorded with few channels, when making the arguments needed values
            found = call_of(spec, cases[case], shrunk=True)
        assert comparable(spec, found) == comparable(spec, call), case
