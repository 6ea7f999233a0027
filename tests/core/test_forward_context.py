"""Values that the layers of a step share."""

from __future__ import annotations

import pytest
import torch
from support import modules

from fastkernels.core.forward_context import AttentionMetadata, forward_context, once_per_step

CALLS = []


def total(tensor: torch.Tensor, times: int) -> int:
    CALLS.append(times)
    return int(tensor.sum()) * times


def metadata() -> AttentionMetadata:
    one = torch.zeros(1, dtype=torch.int32)
    return AttentionMetadata(one.long(), one, one, one[None], 1, 1)


def test_value_is_kept_for_one_step() -> None:
    CALLS.clear()
    numbers = torch.arange(6)
    with forward_context(metadata()):
        assert [once_per_step(total, numbers, 2) for _ in range(3)] == [30] * 3 and len(CALLS) == 1
        assert once_per_step(total, numbers, 3) == 45
        assert once_per_step(total, numbers[:3], 2) == 6 and once_per_step(total, numbers[::2], 2) == 12
        assert len(CALLS) == 4
    numbers += 1
    with forward_context(metadata()):
        assert once_per_step(total, numbers, 2) == 42
    assert [once_per_step(total, numbers, 2) for _ in range(2)] == [42] * 2 and len(CALLS) == 7


def test_temporary_tensors_are_not_mixed_up() -> None:
    """A freed tensor's address may belong to the next one."""
    with forward_context(metadata()):
        found = [once_per_step(total, torch.full((64,), n), 1) for n in range(20)]
    assert found == [64 * n for n in range(20)]


@pytest.mark.parametrize(("queries", "decodes"), [([1, 1, 1], True), ([1, 1, 0], False), ([1, 2, 1], False)])
def test_decode_has_one_query_per_sequence(queries: list[int], decodes: bool) -> None:
    step = modules.metadata(queries, [4, 3, 2], 8)
    assert step.decode_only is decodes
