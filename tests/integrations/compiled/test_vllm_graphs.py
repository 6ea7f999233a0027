"""The sizes of CUDA graphs for longer prompts; vllm/check_graphs.py checks them in vLLM."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from fk_integrations.vllm import kept
from fk_integrations.vllm.graphs import sizes_above

from fastkernels.core.env import Environment


def test_sizes_above_vllms_last() -> None:
    assert sizes_above(512, 2048) == [*range(576, 1024, 64), *range(1024, 2049, 128)]
    assert sizes_above(2048, 4096) == [*range(2304, 4097, 256)]
    assert sizes_above(512, 1000) == [576, 640, 704, 768, 832, 896, 960, 1000]
    assert sizes_above(512, 512) == sizes_above(1024, 512) == []


@pytest.mark.parametrize("last", [1, 5, 8, 32, 300, 512, 520])
def test_no_prompt_is_padded_by_much(last: int) -> None:
    found = [last, *sizes_above(last, 4096)]
    assert found[-1] == 4096 and found == sorted(set(found))
    for below, size in itertools.pairwise(found):
        assert size - below <= max(16, below / 8)


def test_graph_tokens_variable() -> None:
    assert Environment.read({}).graph_tokens is Environment().graph_tokens is None  # default: by the model
    assert Environment.read({"FASTKERNELS_GRAPH_TOKENS": "0"}).graph_tokens == 0
    assert Environment.read({"FASTKERNELS_GRAPH_TOKENS": " 1024 "}).graph_tokens == 1024
    for value in ("-1", "many", "1.5"):
        with pytest.raises(ValueError, match=f"FASTKERNELS_GRAPH_TOKENS: .*0 or more, got '{value}'"):
            Environment.read({"FASTKERNELS_GRAPH_TOKENS": value})


def test_graphs_of_a_gpu_are_kept_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    worker = SimpleNamespace(vllm_config=config, device="cuda", peak_activation_memory=0)
    monkeypatch.setattr(kept, "_workspaces", list)
    assert kept.refusal(worker) == "FASTKERNELS_KEEP_GRAPHS=1 is not set"
    monkeypatch.setenv("FASTKERNELS_KEEP_GRAPHS", "1")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (kept.SPARE, 2 * kept.SPARE))
    assert kept.refusal(worker) is None
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (kept.SPARE - 1, 2 * kept.SPARE))
    assert "1023 MiB are free, and 1024 MiB are needed" in str(kept.refusal(worker))
