"""Decode attention: query starts, which are cached between calls, and the long calls of a patch's measurement."""

from __future__ import annotations

import pytest
import torch

from fastkernels.overrides.attention import attention_decode
from fastkernels.verify.measure import Point, case_of

GIB = 1 << 30


def test_query_starts_are_cached_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "_STARTS", {})
    cpu = torch.device("cpu")
    for batch in (1, 63, 1024, 1025, 5000, 7):
        found = attention_decode._starts(batch, cpu)
        assert found.dtype is torch.int32 and found.tolist() == list(range(batch + 1))
    assert attention_decode._starts(7, cpu).data_ptr() == attention_decode._starts(5000, cpu).data_ptr()


@pytest.mark.gpu
def test_query_starts_of_a_capture_are_not_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_decode, "_STARTS", {})
    graph, gpu = torch.cuda.CUDAGraph(), torch.device("cuda", 0)
    with torch.cuda.graph(graph):
        found = attention_decode._starts(63, gpu)
    assert not attention_decode._STARTS
    graph.replay()
    assert found.tolist() == list(range(64))


@pytest.mark.parametrize(
    ("batch", "context", "window", "keys"),
    [
        (1, 131072, 0, 131072), (1, 1 << 20, 0, 131072), (1, 40960, 0, 40960), (8, 131072, 0, 32768),
        (32, 131072, 0, 8192), (64, 131072, 0, None), (8, 4096, 0, None), (8, 131072, 4096, None),
    ],
)  # fmt: skip
def test_graphs_of_long_contexts_are_timed_with_many_keys(
    batch: int, context: int, window: int, keys: int | None
) -> None:
    point = Point("attention_decode", (32, 8, 128, 16, window, torch.bfloat16), (batch, context), longer=True)
    assert (point.dims and point.dims["seq_lens"]) == (keys and [keys] * batch)
    if keys is not None:
        assert attention_decode.SPEC.bytes_moved(case_of(point)) < 1.1 * GIB


def test_cases_have_up_to_128k_keys_within_a_gib() -> None:
    cases = attention_decode.SPEC.cases
    assert {32768, 131072} <= {max(case.dims["seq_lens"]) for case in cases}
    assert max(map(attention_decode.SPEC.bytes_moved, cases)) < 0.6 * GIB
