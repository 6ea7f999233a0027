"""The wgmma kernel of `linear`: how it divides its work, unsupported calls, and compilation of all sets."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit import hopper
from fastkernels.overrides.linear.kernels import wgmma_linear_cuda as wgmma
from fastkernels.overrides.linear.linear import linear

NO_NVRTC = cuda_rtc.unavailable()
# Llama-3.1-8B's: N, K
SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "lm_head": (128256, 4096),
}  # fmt: skip


def shares(p: wgmma.Plan, n: int, k: int) -> list[list[tuple[int, int]]]:
    """Return the (tile, unit of block_k) pairs that each block reads, in order, as in csrc/wgmma_linear.cu."""
    units = -(-k // p.block_k)
    items = -(-n // p.rows) * p.splits
    found = []
    for block in range(p.grid):
        mine = range(block * items // p.grid, (block + 1) * items // p.grid)
        found.append(
            [
                (item // p.splits, unit)
                for item in mine
                for unit in range(
                    item % p.splits * units // p.splits, (item % p.splits + 1) * units // p.splits
                )
            ]
        )
    return found


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(1, 64), n=st.integers(1, 9000), k=st.integers(1, 600).map(lambda i: 8 * i),
    params=st.sampled_from(wgmma.PARAMS), sms=st.sampled_from([1, 7, 78, 114, 132]),
)  # fmt: skip
def test_every_unit_is_read_once(m: int, n: int, k: int, params: dict[str, int], sms: int) -> None:
    p = wgmma.plan(m, n, k, **params, sms=sms)
    found = shares(p, n, k)
    assert len(found) == p.grid <= sms and all(found)  # no block is idle, no split is empty
    tiles, units = -(-n // p.rows), -(-k // p.block_k)
    assert Counter(w for share in found for w in share) == Counter(
        (t, u) for t in range(tiles) for u in range(units)
    )
    assert p.items == tiles * p.splits and p.splits <= units


@settings(max_examples=300, deadline=None)
@given(
    m=st.integers(1, 64), n=st.integers(1, 200_000), k=st.integers(1, 4000).map(lambda i: 8 * i),
    params=st.sampled_from(wgmma.PARAMS),
)  # fmt: skip
def test_plan_fits_shared_memory(m: int, n: int, k: int, params: dict[str, int]) -> None:
    p = wgmma.plan(m, n, k, **params)
    assert p.rows % 8 == 0 and 8 <= p.rows <= 256 and p.block_k in (64, 128, 256) and p.tokens >= m
    static = 3 * 8 * wgmma.MAX_STAGES + 16
    assert p.shared + static <= 227 * 1024 and 3 <= p.stages <= wgmma.MAX_STAGES
    assert 1 <= p.ahead <= p.stages
    # wgmma reads 64 rows of x: past the last chunk of x, it reads the weights' ring
    assert p.stages * 2 * p.block_k * p.rows + 128 * p.tokens >= 8192
    assert wgmma.choose(m, n, k) in [q for q in wgmma.PARAMS if wgmma.fits(q, m, k)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_default_is_balanced(name: str, m: int) -> None:
    """No SM reads over 3.2% more of the weight than the mean."""
    n, k = SHAPES[name]
    p = wgmma.plan(m, n, k, **wgmma.choose(m, n, k))
    most = max(len(share) for share in shares(p, n, k)) * p.rows * p.block_k
    assert most <= 1.032 * n * k / 132, (p, 132 * most / (n * k))


def test_instruction_has_all_operands() -> None:
    for rows in (8, 248, 256):
        text = wgmma.multiply(rows, "bf16")
        assert f"m64n{rows}k16.f32.bf16.bf16" in text and text.count('"+f"(c[') == rows // 2
        assert f"%{rows // 2 + 2}, 0;" in text and f"%{rows // 2 + 3}" not in text
    assert "m64n8k16.f32.f16.f16" in wgmma.multiply(8, "f16")


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("params", wgmma.PARAMS, ids=str)
def test_every_set_compiles(params: dict[str, int]) -> None:
    for m, n, bf16 in ((16, 4096, True), (64, 6144, False)):
        p = wgmma.plan(m, n, 14336, **params)
        told = ("--gpu-architecture=sm_90a", *wgmma.options(p, bf16))
        assert cuda_rtc.cubin(wgmma.source(p, bf16), told)[:4] == b"\x7fELF"


def args(m: int = 32, n: int = 48, k: int = 72) -> list[torch.Tensor]:
    return [torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()]


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = wgmma.supports_wgmma(*args())
    assert reason is not None and (reason == NO_NVRTC or "Hopper" in reason)
    # The other reasons, on a simulated Hopper GPU
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    x, w = args()
    assert wgmma.supports_wgmma(x, w) is None and wgmma.supports_wgmma(x.view(4, 8, 72), w) is None
    assert wgmma.supports_wgmma(*args(m=64)) is None and wgmma.supports_wgmma(*args(m=0)) is None
    refused = {
        "more than 64 tokens": args(m=65),
        "K = 68 is not": args(k=68),
        "K = 56 is under 64": args(k=56),
        "rows must start at 16 bytes": [torch.randn(32, 76).bfloat16()[:, :72], w],
        r"weight has strides \(0, 1\): its rows must not overlap": [x, w[:1].expand(48, 72)],
        "bias is torch.float32": [x, w, torch.randn(48)],
    }
    for reason, case in refused.items():
        with pytest.raises(RuntimeError, match=reason):
            raise RuntimeError(wgmma.supports_wgmma(*case))
    monkeypatch.setattr(hopper, "_capability", lambda device: (10, 0))
    assert "this GPU has 10.0" in str(wgmma.supports_wgmma(x, w))


def test_kernel_is_neither_first_nor_last_provider() -> None:
    names = [p.name for p in linear.providers]
    assert 0 < names.index("cuda-wgmma") < len(names) - 1


@pytest.mark.gpu
@pytest.mark.parametrize("params", wgmma.PARAMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_result_matches_reference(params: dict[str, int], dtype: torch.dtype) -> None:
    k = 2056
    x, weight, bias = (torch.randn(*size, device="cuda").to(dtype) for size in ((64, k), (1001, k), (1001,)))
    if (reason := wgmma.supports_wgmma(x, weight, bias)) is not None:
        pytest.skip(reason)
    want = x.double() @ weight.double().t() + bias.double()
    limit = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    for m in (1, 8, 9, 17, 33, 64):
        got = wgmma.linear_wgmma(x[:m], weight, bias, **params)
        assert torch.equal(got, wgmma.linear_wgmma(x[:m], weight, bias, **params))
        torch.testing.assert_close(got.double(), want[:m], rtol=limit, atol=limit * k**0.5)
    one = x[:1].expand(20, k)
    got = wgmma.linear_wgmma(one, weight, **params)
    torch.testing.assert_close(got, wgmma.linear_wgmma(one.contiguous(), weight, **params), rtol=0, atol=0)
