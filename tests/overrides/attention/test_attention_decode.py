"""Query starts of decode attention, which are cached between calls."""

from __future__ import annotations

import pytest
import torch

from fastkernels.overrides.attention import attention_decode


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
