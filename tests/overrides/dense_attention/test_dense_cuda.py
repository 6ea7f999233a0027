"""The CUDA C++ kernel of attention_dense: emulated against float64, its machine code, unsupported calls."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention import emulated_dense

from fastkernels.core import cuda_rtc
from fastkernels.overrides.dense_attention import attention_dense_cuda as cuda
from fastkernels.overrides.dense_attention.attention_dense import reference
from fastkernels.overrides.kit import hopper

NO_NVRTC = cuda_rtc.unavailable()


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


@pytest.mark.parametrize("size", [64, 72, 128])
@pytest.mark.parametrize("tokens", [1, 197, 1029, 8192])
@pytest.mark.parametrize("batch", [1, 64])
def test_chosen_plans_fit_in_shared_memory(batch: int, tokens: int, size: int) -> None:
    p = cuda.Plan(**cuda.choose(batch, 12, tokens, tokens, size), bf16=True, channels=size)
    assert p.shared <= 227 * 1024 and p.keys % 16 == 0


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "size", "faster"),
    [(1, 1029, 16, 64, True), (8, 1029, 16, 64, True), (32, 197, 12, 64, False), (32, 257, 12, 64, True),
     (1, 1374, 12, 64, True), (4, 1374, 12, 64, False), (1, 2048, 16, 64, False), (1, 256, 16, 72, True),
     (8, 256, 16, 72, False), (1, 256, 16, 128, False)],
)  # fmt: skip
def test_measured_shapes_run_the_faster_kernel(
    batch: int, tokens: int, heads: int, size: int, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 132)
    q = torch.empty(batch, tokens, heads, size, device="meta")
    assert cuda.is_faster(q, q) == faster


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("size", [64, 72, 128])
@pytest.mark.parametrize("batch", [1, 64])
def test_kernel_compiles(batch: int, size: int) -> None:
    p = cuda.Plan(**cuda.choose(batch, 12, 1029, 1029, size), bf16=True, channels=size)
    assert cuda_rtc.cubin(cuda.source(p), ("--gpu-architecture=sm_90a", *p.options))[:4] == b"\x7fELF"


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.zeros(2, 200, 3, 4, 64, dtype=torch.bfloat16).unbind(2)
    reason = cuda.supports(q, k, v, 0.1)
    assert reason is not None and (reason == NO_NVRTC or "Hopper" in reason)
    # The other reasons, on a simulated Hopper GPU
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 132)
    assert cuda.supports(q, k, v, 0.1) is None
    refused: dict[str, list[Any]] = {
        "takes no mask": [q, k, v, 0.1, torch.ones(1, 1, 1, 200)],
        "not all float16 or all bfloat16": [q.float(), k, v, 0.1],
        "is not a multiple of 8 up to 128": [q[..., :60], k[..., :60], v[..., :60], 0.1],
        "is not positive": [q, k, v, 0.0],
        "no keys": [q, k[:, :0], v[:, :0], 0.1],
        "as fast": [torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 2048, 16, 64).contiguous()] * 3
        + [0.1],
        "k has strides": [q, k[:1].expand(2, -1, -1, -1), v, 0.1],
        "v has strides": [q, k, v.transpose(2, 3).contiguous().transpose(2, 3), 0.1],
    }
    for text, args in refused.items():
        assert text in str(cuda.supports(*args)), text


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 72, 128])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1029), (2, 197), (64, 130), (1, 1)])
def test_kernel_matches_float64(batch: int, tokens: int, size: int) -> None:
    q, k, v = torch.randn(batch, tokens, 3, 12, size, device="cuda", dtype=torch.bfloat16).unbind(2)
    got, want = cuda.attend(q, k, v, 0.1), reference(q.double(), k.double(), v.double(), 0.1)
    torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=1e-2)
