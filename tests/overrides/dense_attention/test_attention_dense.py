"""attention_dense beyond its cases: arguments that it refuses, and agreement with PyTorch's own attention."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.kernels import warm

from fastkernels.overrides.dense_attention.attention_dense import attention_dense, misaligned

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


WIDE = """
import torch
from fastkernels.overrides.dense_attention import wide_heads as wide
from fastkernels.overrides.dense_attention.attention_dense import reference

torch.manual_seed(0)
for queries, keys, heads, kv_heads, size, dtype, scores, weights in (
    (37, 37, 1, 1, 512, torch.float32, 2000, 3000),  # bytes for 13 rows of scores, 20 of weights
    (20, 77, 4, 2, 320, torch.float16, 1 << 20, 1 << 20),
    (300, 9, 1, 1, 257, torch.float32, 150 * 9 * 8, 280 * 9 * 8),
):
    k, v = (torch.randn(2, keys, kv_heads, size).to(dtype) for _ in range(2))
    q = (100 * torch.randn(2, queries, heads, size)).to(dtype)  # scores of some hundreds
    got = wide.attend(q, k, v, size**-0.5, scores=scores, weights=weights)
    want = reference(q.double(), k.double(), v.double(), size**-0.5)
    error = 1e-4 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(got.double(), want, rtol=error, atol=error)
    assert got.is_contiguous() and got.dtype == dtype
assert not wide.attend(q, k[:, :0], v[:, :0], 1.0).any()
rows, out = 1e4 * torch.randn(2, 3, 1000), torch.empty(2, 3, 1000)
wide.softmax(rows, out, -0.001)
torch.testing.assert_close(out, torch.softmax(rows * -0.001, -1))
"""


def test_wide_heads_in_chunks_equal_the_reference() -> None:
    done = warm.run(["-c", WIDE], {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("size", "more", "name"),
    [(64, (), "sdpa"), (256, (), "sdpa"), (257, (), "gemm"), (512, (None,), "gemm"),
     (512, (torch.ones(1, 1, 1, 7),), "sdpa")],
)  # fmt: skip
def test_gpu_runs_head_sizes_over_256_as_products(size: int, more: tuple[Any, ...], name: str) -> None:
    args = torch.ones(1, 5, 1, size), *(torch.ones(1, 7, 1, size),) * 2, 1.0, *more
    attention_dense.reset()
    assert attention_dense._pick("cuda", args, {}).name == name
    assert attention_dense.fallbacks == {}
    attention_dense.reset()


@pytest.mark.parametrize(("dtype", "offset", "declined"), [
    (torch.float16, 0, False), (torch.float16, 2, True), (torch.bfloat16, 1, True), (torch.float16, 8, False),
    (torch.float32, 1, False),
])  # fmt: skip
def test_cudnn_needs_sixteen_byte_alignment(dtype: torch.dtype, offset: int, declined: bool) -> None:
    memory = torch.empty(64 + offset, dtype=dtype)
    assert not memory.data_ptr() % 16
    moved = memory[offset:].view(1, 2, 2, 16)
    assert (misaligned(memory[:64], moved) is not None) == declined
