"""The CUDA C++ kernel of attention_dense: emulated against float64, its machine code, unsupported calls."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.kernels import emulated_dense

from fastkernels.overrides.attention.attention_dense import reference


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "size", "params"),
    [
        (70, 150, 2, 1, 64, {"groups": 1, "keys": 64, "stages": 2}),
        (5, 48, 1, 1, 72, {"groups": 1, "keys": 96, "stages": 2}),
        (140, 100, 1, 1, 64, {"groups": 2, "keys": 48, "stages": 2}),
        (70, 70, 1, 1, 128, {"groups": 1, "keys": 48, "stages": 2}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_emulated_kernel_matches_float64(
    queries: int, keys: int, heads: int, kv_heads: int, size: int, params: dict[str, int], dtype: torch.dtype,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Runs the CUDA text with CPU lanes and emulated PTX: the ring, its barriers, swizzle, softmax, the last tile."""
    g = torch.Generator().manual_seed(keys)
    q = (3 * torch.randn(2, queries, heads, size, generator=g)).to(dtype)
    k, v = (torch.randn(2, keys, kv_heads, size, generator=g).to(dtype) for _ in range(2))
    got = emulated_dense.attend(q, k, v, 0.125, queries > keys, tmp_path, **params)
    want = reference(q.double(), k.double(), v.double(), 0.125)
    error = (got.double() - want).abs()
    assert float(error.max()) < (1.6e-2 if dtype == torch.bfloat16 else 2e-3)
    assert float(error.square().mean().sqrt()) < 4e-3 * float(want.square().mean().sqrt())
