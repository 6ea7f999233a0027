"""The CUDA C++ kernel of mla_decode: emulated against float64, its machine code, unsupported calls."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import emulated_mla

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit import hopper
from fastkernels.overrides.latent_attention import mla_decode_cuda as cuda
from fastkernels.overrides.latent_attention import mla_sparse
from fastkernels.overrides.latent_attention.mla_decode import reference

NO_NVRTC = cuda_rtc.unavailable()
SLOW = pytest.mark.slow
SCALE = 192**-0.5


def arguments(lens: list[int], heads: int, size: int, dtype: torch.dtype) -> list[Any]:
    """Queries, a cache whose free slots are NaN, lengths, and a table whose unused entries must not be read."""
    g = torch.Generator().manual_seed(sum(lens))
    blocks = [-(-n // size) for n in lens]
    order, at = torch.randperm(sum(blocks), generator=g).int(), 0
    table = torch.full((len(lens), max(*blocks, 1) + 1), 1 << 30, dtype=torch.int32)
    cache = torch.randn(sum(blocks) + 1, size, cuda.SIZE, generator=g).to(dtype)
    for i, n in enumerate(blocks):
        table[i, :n] = order[at : at + n]
        at += n
        if n:
            cache[order[at - 1], lens[i] - (n - 1) * size :] = math.nan
    q = (torch.randn(len(lens), heads, cuda.SIZE, generator=g) * 2).to(dtype)
    return [q, cache, torch.tensor(lens, dtype=torch.int32), table]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("lens", "heads", "size", "workers", "parts", "params"),
    [
        # Equal parts: a tile each; one sequence with more, whose last tile is not full
        ([130, 60], 16, 64, 4, [3, 1], {"least": 1}),
        # Equal ranges of all tiles: sequences that begin and end within a worker's range, or have no keys
        ([0, 130, 64, 1, 300], 16, 64, 3, [1, 2, 1, 1, 1], {"least": 1, "slack": 0}),
        # Whole sequences: two for each worker
        pytest.param([70, 64, 0, 130], 16, 64, 2, [1] * 4, {}, marks=SLOW),
        # Threads of a block in groups, each of which adds up some of the parts
        pytest.param([600], 20, 64, 10, [10], {"least": 1}, marks=SLOW),
        pytest.param([700, 40, 150, 64, 3, 200], 70, 32, 2, [1] * 6, {"extra": 1, "slack": 0}, marks=SLOW),
        pytest.param([1000, 1, 65], 5, 128, 3, [2, 1, 1], {"least": 1}, marks=SLOW),
        pytest.param([0, 130, 64, 1, 300], 130, 16, 4, [1, 2, 1, 1, 2], {"slack": 0, "extra": 1}, marks=SLOW),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)])
@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=SLOW)])
def test_emulated_kernel_matches_float64(
    lens: list[int], heads: int, size: int, workers: int, parts: list[int], params: dict[str, int], dtype: torch.dtype,
    waits: bool, tmp_path: Path,
) -> None:  # fmt: skip
    """Runs the CUDA text with CPU lanes and emulated PTX: workers, barriers, swizzle, softmax, combination.

    waits: all blocks run at once, and each adds up its share of a sequence's channels. Otherwise, they run one after
    another, and the last one adds up everything.
    """
    q, cache, seq_lens, table = arguments(lens, heads, size, dtype)
    blocks = workers * -(-heads // cuda.HEADS)
    got, counts = emulated_mla.decode(
        q, cache, seq_lens, table, SCALE, workers, tmp_path, 0.5, at_once=blocks if waits else 1, **params
    )
    used = torch.where(table == 1 << 30, 0, table)
    want = reference(q.double(), cache.double(), seq_lens, used, max(lens), SCALE, cuda.RANK, 0.5)
    error = (got.double() - want).abs()
    assert counts == parts
    assert float(error.max()) < (8e-3 if dtype == torch.bfloat16 else 1e-3)
    assert float(error.square().mean().sqrt()) < 4e-3 * float(want.square().mean().sqrt())


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("lens", "heads", "topk", "workers"),
    [([400, 90, 30, 0], 16, 150, 5), pytest.param([400, 30, 99, 0, 1], 70, 100, 3, marks=SLOW)],
)
def test_emulated_sparse_kernel_matches_float64(
    lens: list[int], heads: int, topk: int, workers: int, tmp_path: Path
) -> None:
    """The first sequence attends to some keys, the third one to none."""
    q, cache, seq_lens, table = arguments(lens, heads, 16, torch.bfloat16)
    indices = torch.full((len(lens), topk), -1, dtype=torch.int32)
    for i, n in enumerate(lens):
        chosen = torch.randperm(n, generator=torch.Generator().manual_seed(i))[:topk].sort().values
        indices[i, : len(chosen) if i != 2 else 0] = chosen.int() if i != 2 else chosen[:0].int()
    got, _ = emulated_mla.decode(q, cache, seq_lens, table, SCALE, workers, tmp_path, indices=indices)
    used, starts = torch.where(table == 1 << 30, 0, table), torch.arange(len(lens) + 1, dtype=torch.int32)
    want = mla_sparse.reference(
        q.double(), cache.double(), indices, starts, seq_lens, used, 1, SCALE, cuda.RANK
    )
    assert float((got.double() - want).abs().max()) < 1.6e-2


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize(("box", "params"), [(64, {"pairs": 1}), (16, {}), (64, {"sparse": 1})])
def test_kernel_compiles(box: int, params: dict[str, int], bf16: bool) -> None:
    """The compiler does not wait after each product, which it does to all of a kernel for one that is misused."""
    said = []
    p = cuda.Plan(box, bf16, **params)  # type: ignore[arg-type]
    options = ("--gpu-architecture=sm_90a", "--ptxas-options=-v", *p.options)
    assert cuda_rtc.nvrtc_compile(cuda.source(p), options, said.append)[:4] == b"\x7fELF"
    assert "Used 128 registers" in said[0] and "serialized" not in said[0]


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache, lens, table = arguments([40, 70], 16, 64, torch.bfloat16)
    rest = [lens, table, 70, SCALE, cuda.RANK]
    reason = cuda.supports(q, cache, *rest)
    assert reason is not None and (reason == NO_NVRTC or "Hopper" in reason)
    # The other reasons, on a simulated Hopper GPU
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cuda.supports(q, cache, *rest) is None
    refused: dict[str, list[Any]] = {
        "not both bfloat16 or float16": [q.float(), cache, *rest],
        "are not 512 + 64": [q, cache, *rest[:4], 500],
        "blocks of 40 tokens": [q, cache[:, :40], *rest],
        "is not positive": [q, cache, *rest[:3], -1.0, cuda.RANK],
        "not int32": [q, cache, lens.long(), *rest[1:]],
        "must be contiguous": [q, cache, lens, table.t().contiguous().t(), *rest[2:]],
        "rows must be contiguous and start": [q.transpose(1, 2).contiguous().transpose(1, 2), cache, *rest],
    }
    for text, args in refused.items():
        assert text in str(cuda.supports(*args)), text
    indices, starts = torch.zeros(2, 8, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    sparse = [q, cache, indices, starts, lens, table, 1, SCALE, cuda.RANK]
    assert cuda.supports_sparse(*sparse) is None
    assert "one query per sequence" in str(cuda.supports_sparse(*sparse[:6], 2, *sparse[7:]))
    assert "not contiguous int32" in str(cuda.supports_sparse(*sparse[:2], indices.long(), *sparse[3:]))
    assert "not 512 + 64" in str(cuda.supports_sparse(*sparse[:8], 500))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("lens", [[5000], [0, 1, 63, 64, 65, 700, 1025], [600] * 32, [1100] * 150])
def test_kernel_matches_float64(lens: list[int], heads: int) -> None:
    q, cache, seq_lens, table = (t.cuda() for t in arguments(lens, heads, 64, torch.bfloat16))
    got = cuda.decode(q, cache, seq_lens, table, max(lens), SCALE, cuda.RANK)
    used = torch.where(table == 1 << 30, 0, table)
    want = reference(q.double(), cache.double(), seq_lens, used, max(lens), SCALE, cuda.RANK)
    torch.testing.assert_close(got.double(), want, atol=8e-3, rtol=8e-3)
