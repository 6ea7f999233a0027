"""`linear_int4` in CUDA C++: the emulated kernel against float64, its machine code, plans, unsupported calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fk_bench.core.rows import Status, read
from support.kernels import emulated_int4

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.linear.kernels import int4_linear_cuda as few
from fastkernels.overrides.linear.linear_int4 import linear_int4, reference, tiled, untiled

ROOT = Path(__file__).resolve().parents[3]


SETS = [
    (5, 80, 640, 128, torch.bfloat16, {"warps": 2, "parts": 1, "splits": 2, "ahead": 3}),
    (13, 48, 384, 32, torch.float16, {"warps": 4, "parts": 2, "splits": 1, "ahead": 2}),
    # tiles of 32 rows, the last of which has 16, more parts than steps, splits of different lengths, one group
    (19, 112, 640, 640, torch.bfloat16, {"warps": 8, "parts": 4, "splits": 3, "height": 2, "ahead": 2}),
    # one slot of many tiles: its warps take turns to add, each with a buffer that was used before
    (3, 208, 1024, 128, torch.bfloat16, {"warps": 8, "parts": 8, "splits": 1, "ahead": 2}),
    (11, 160, 1024, 256, torch.float16, {"warps": 4, "parts": 2, "splits": 2, "ahead": 1}),
    # warps that begin within tiles, fewer steps than warps, tiles of several warps and warps of several tiles
    (3, 208, 640, 128, torch.bfloat16, {"warps": 4, "stream": 1, "ahead": 3}),
    (5, 80, 640, 128, torch.bfloat16, {"warps": 8, "stream": 1, "ahead": 2, "splits": 2}),
    (13, 48, 384, 32, torch.float16, {"warps": 4, "stream": 1, "ahead": 2, "height": 2}),
    (11, 160, 1152, 384, torch.float16, {"warps": 2, "stream": 1, "ahead": 1, "splits": 2}),
    # chosen
    (7, 176, 1152, 128, torch.bfloat16, {"warps": 2}),
    (33, 48, 256, 64, torch.bfloat16, {"warps": 2, "ahead": 1}),
]
# Each set of parameters runs with zero points or with a bias; the other is slow.
PRODUCTS = [
    pytest.param(*case, zeros, marks=pytest.mark.slow if zeros is bool(number % 2) or case[0] == 33 else [])
    for number, case in enumerate(SETS)
    for zeros in (True, False)
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(("m", "n", "k", "group", "dtype", "params", "zeros"), PRODUCTS)
def test_emulated_int4_product_matches_float64(
    m: int,
    n: int,
    k: int,
    group: int,
    dtype: torch.dtype,
    params: dict[str, int],
    zeros: bool,
    tmp_path: Path,
) -> None:
    g = torch.Generator().manual_seed(m)
    x = torch.randn(m, k + 8, generator=g).to(dtype)[:, :k]
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    scale = (torch.rand(n, k // group, generator=g) * k**-0.5).to(torch.float16 if m == 5 else dtype)
    zero = torch.randint(0, 16, (n, k // group), dtype=torch.uint8, generator=g)
    bias = torch.randn(n, generator=g).to(dtype)
    half = scale.dtype != dtype  # of checkpoints of GPTQ and AWQ
    p = few.plan(m, n, k, group, zeros, not zeros, dtype == torch.bfloat16, half, sms=3, **params)
    got = emulated_int4.product(x, weight, scale, zero, bias, p, tmp_path)
    want = reference(
        x.double(), weight, scale.double(), zero if zeros else None, None if zeros else bias.double()
    )
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("n", [1, 48, 4096, 6144, 28672, 152064])
@pytest.mark.parametrize("k", [128, 896, 4096, 14336, 18944, 28672])
def test_plans_fit_shared_memory(n: int, k: int) -> None:
    for m in (1, 8, 9, 32, 64):
        for params in ({}, *(p for p in few.PARAMS if few.fits(p, m, n, k)), {"height": 1, "ahead": 2}):
            p = few.plan(m, n, k, 128, **params)
            assert p.shared <= few.SHARED and p.warps % p.parts == 0 and p.splits <= k // few.STEP
            assert 8 * p.tiles >= m and 0 < p.grid <= 132 and p.grid % p.splits == 0


@pytest.mark.parametrize(
    ("m", "n", "k", "stream"),
    [
        (1, 28672, 4096, 1),
        (32, 28672, 4096, 1),
        (33, 28672, 4096, 0),  # too many tokens
        (8, 8192, 28672, 1),
        (8, 12288, 2048, 0),  # too few steps
        (8, 10240, 8192, 1),
    ],
)
def test_plans_stream_large_weights_for_few_tokens(m: int, n: int, k: int, stream: int) -> None:
    assert few.plan(m, n, k, 128).stream == stream
    # tuning tries the other one where it may win
    others = [p["stream"] for p in few.PARAMS if few.fits(p, m, n, k)]
    assert others == ([1 - stream] if m <= 32 else [])
    for asked in (0, 1):
        assert few.plan(m, n, k, 128, stream=asked).stream == asked
    for params in ({"height": 1}, {"ahead": 2}, {"parts": 4}, {"splits": 8}):
        assert few.plan(m, n, k, 128, **params).stream == 0


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("m", "stream"), [(1, 0), (32, 0), (64, 0), (16, 1)])
def test_int4_kernels_compile_for_hopper(m: int, stream: int) -> None:
    p = few.plan(m, 4096, 4096, 128, True, stream=stream)
    assert (
        cuda_rtc.nvrtc_compile(text(few.SOURCE), (*p.options, "--gpu-architecture=sm_90a"))[:4] == b"\x7fELF"
    )


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "no_hopper", lambda source, device: None)
    x, weight, scale = (
        torch.ones(4, 256).bfloat16(),
        torch.zeros(16, 128).byte(),
        torch.ones(16, 2).bfloat16(),
    )
    assert few.supports_cuda(x, weight, scale, torch.zeros(16, 2).byte(), torch.ones(16).bfloat16()) is None
    assert few.supports_cuda(x, weight, scale.half()) is None
    refused = {
        "dtype torch.float32": (x.float(), weight, scale),
        "K = 96 is not": (x[:, :96], weight[:, :48], scale),
        "N = 15 is not": (x, weight[:15], scale[:15]),
        "groups of 192 columns": (torch.ones(4, 384).bfloat16(), torch.zeros(16, 192).byte(), scale),
        "more than 64 tokens": (torch.ones(65, 256).bfloat16(), weight, scale),
        "weight_scale is torch.float32": (x, weight, scale.float()),
        "bias is torch.float32": (x, weight, scale, None, torch.ones(16)),
        "weight_scale .* at a multiple of 16 bytes": (x, weight, torch.ones(34).bfloat16()[2:].view(16, 2)),
        r"weight_zero has strides \(1, 16\)": (x, weight, scale, torch.zeros(2, 16).byte().t()),
        "x, .* at a multiple of 16 bytes": (torch.ones(4, 257).bfloat16()[:, 1:], weight, scale),
    }
    for reason, call in refused.items():
        with pytest.raises(RuntimeError, match=reason):
            raise RuntimeError(few.supports_cuda(*call))
    assert [p.name for p in linear_int4.providers][:2] == ["cuda", "triton"]


@pytest.mark.parametrize(
    ("n", "c", "columns"), [(33, 560, 64), (16, 128, 64), (15, 16, 64), (40, 9, 1), (0, 64, 64)]
)
def test_tiles_are_adjacent(n: int, c: int, columns: int) -> None:
    matrix = torch.arange(n * c).view(n, c)
    order = [
        matrix[row, j : j + columns]
        for i in range(0, n, 16) for j in range(0, c, columns) for row in range(i, min(i + 16, n))
    ]  # fmt: skip
    found = tiled(matrix, columns)
    assert found.shape == matrix.shape and found.flatten().tolist() == [
        v for part in order for v in part.tolist()
    ]
    assert torch.equal(untiled(found, columns), matrix)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "groups"), [(("--groups", "128,64", "--zeros"), (128, 64)), (("--nvfp4",), (32,))]
)
def test_experiment_runs_on_the_cpu(tmp_path: Path, more: tuple[str, ...], groups: tuple[int, ...]) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(ROOT / "bench/experiments/linear/linear_int4.py"), "--device", "cpu", "--quick",
               "--tokens", "1,5", *more, "--out", str(out)]  # fmt: skip
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows, warnings = read(out)
    assert not warnings and {(r.case["tokens"], r.case["group"]) for r in rows} == {
        (m, group) for m in (1, 5) for group in groups
    }
    for r in rows:
        assert r.status == Status.OK and r.metrics["us"] > 0
        if r.subject.provider != "producer":
            assert (
                r.subject.provider == "triton" and 0 < r.metrics["error"] < 6e-3 and r.metrics["us_after"] > 0
            )
    assert len({r.subject.provider for r in rows}) == 2
