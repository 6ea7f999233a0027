"""The FlashInfer provider without a GPU: unsupported calls, plans, and their reuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastkernels.overrides.attention import flashinfer


class Recorder:
    """Replaces FlashInfer's wrapper, which needs a GPU: records its plans."""

    def __init__(self) -> None:
        self.plans: list[tuple[list[list[int]], dict[str, Any]]] = []

    def plan(self, *args: torch.Tensor, **kwargs: Any) -> None:
        self.plans.append(([a.tolist() for a in args], kwargs))


def batch() -> tuple[torch.Tensor, ...]:
    table = torch.tensor([[7, 8, 0], [0, 0, 0], [3, 5, 9]], dtype=torch.int32)
    starts = torch.tensor([0, 4, 4, 6], dtype=torch.int32)
    return starts, torch.tensor([20, 0, 33], dtype=torch.int32), table


def test_plan_lists_the_used_blocks() -> None:
    wrapper = Recorder()
    plans = flashinfer.Plans(wrapper, {"page_size": 16})
    assert plans.planned(*batch()) == (wrapper, 6)
    args, kwargs = wrapper.plans[0]
    assert args == [[0, 4, 4, 6], [0, 2, 2, 5], [7, 8, 3, 5, 9], [4, 0, 1]]
    assert kwargs["causal"] and kwargs["seq_lens"].tolist() == [20, 0, 33]


def test_plan_is_reused_for_unwritten_tensors_only() -> None:
    wrapper = Recorder()
    plans, tensors = flashinfer.Plans(wrapper, {"page_size": 16}), batch()
    for _ in range(3):
        plans.planned(*tensors)
    assert len(wrapper.plans) == 1
    tensors[1][0] = 17
    plans.planned(*tensors)
    assert wrapper.plans[1][0][3] == [1, 0, 1]
    plans.planned(*tensors[:2], tensors[2].clone())
    plans.planned(*tensors)
    assert len(wrapper.plans) == 4
    with torch.inference_mode():
        uncounted = batch()
        plans.planned(*uncounted)
        uncounted[1][0] = 16
        plans.planned(*uncounted)
    assert wrapper.plans[5][0][3] == [16, 0, 1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"softcap": 2.0}, "soft cap"), ({"block_size": 8}, "block size of 16"), ({"heads": 66}, "66 heads of 64 on 2")],
)  # fmt: skip
def test_unsupported_decode_has_a_reason(change: dict[str, Any], reason: str) -> None:
    cache = torch.zeros(3, change.get("block_size", 16), 2, 64, dtype=torch.bfloat16)
    q, _, table = torch.zeros(3, change.get("heads", 4), 64, dtype=torch.bfloat16), *batch()[1:]
    found = flashinfer.supports_decode(
        q, cache, cache, batch()[1], table, 33, 0.1, -1, change.get("softcap", 0.0)
    )
    assert found is not None and reason in found


def test_prefill_does_not_support_head_size_80() -> None:
    cache = torch.zeros(3, 16, 2, 80)
    assert "80" in str(flashinfer.supports_prefill(torch.zeros(6, 2, 80), cache, cache, *batch(), 4, 33, 0.1))
