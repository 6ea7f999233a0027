"""attention_dense beyond its cases: arguments that it refuses, and agreement with PyTorch's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastkernels.overrides.attention.attention_dense import attention_dense

Q, K = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
STARTS = torch.tensor([0, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((Q[0], K[0], K[0], 1.0), r"q must be \[B, Sq, Hq, D\]"),
        ((Q, K[:1], K[:1], 1.0), r"got q \(2, 5, 4, 8\), k \(1, 7, 2, 8\)"),
        ((Q[:, :, :3], K, K, 1.0), "query heads must be a multiple of key heads"),
        ((Q, K, K, 1.0, torch.zeros(5, 7)), r"attn_mask must be .* with \(2, 4, 5, 7\), got \(5, 7\)"),
        ((Q, K, K, 1.0, torch.zeros(2, 2, 5, 7)), r"got \(2, 2, 5, 7\)"),
        ((Q, K, K, 1.0, None, STARTS), "give cu_seqlens_q and cu_seqlens_k, or neither"),
        ((Q, K, K, 1.0, None, STARTS, STARTS, 5, 5), "concatenated sequences have B = 1 and no attn_mask"),
    ],
)
def test_wrong_arguments_are_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_dense(*args)


def test_concatenated_sequences_equal_separate_calls() -> None:
    starts = [torch.tensor(s, dtype=torch.int32) for s in ([0, 5, 7, 11], [0, 7, 14, 15])]
    q, k, v = (torch.randn(1, n, 4, 8) for n in (11, 15, 15))
    got = attention_dense(q, k, v, 0.3, None, *starts, 5, 7)
    for i in range(3):
        at_q, at_k = (slice(int(s[i]), int(s[i + 1])) for s in starts)
        parts = (t[:, at].transpose(1, 2) for t, at in ((q, at_q), (k, at_k), (v, at_k)))
        want = F.scaled_dot_product_attention(*parts, scale=0.3).transpose(1, 2)
        torch.testing.assert_close(got[:, at_q], want)
