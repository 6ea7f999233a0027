"""Traces: the time in which the GPU was busy."""

from __future__ import annotations

import pytest
from fk_integrations.patching.proof import covered


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0.0),
        ([(5.0, 7.0), (0.0, 2.0)], 4.0),
        (
            [(0.0, 5.0), (3.0, 8.0), (4.0, 6.0), (9.0, 10.0)],
            9.0,
        ),  # kernels that start before the last one ends
    ],
)
def test_overlapping_kernels_count_once(spans: list[tuple[float, float]], length: float) -> None:
    assert covered(spans) == length
