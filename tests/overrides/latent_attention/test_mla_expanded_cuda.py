"""mla_expanded with csrc/attention_dense.cu: emulated against float64, its machine code, unsupported calls."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention import emulated_dense

from fastkernels.core import cuda_rtc
from fastkernels.overrides.dense_attention import attention_dense_cuda as dense
from fastkernels.overrides.kit import hopper
from fastkernels.overrides.latent_attention import mla_expanded


def arguments(heads: int, nope: int, rope: int, value: int, device: str = "cpu") -> list[Any]:
    """A prompt, a chunk, a sequence without keys and one with fewer keys than queries; NaN between their keys."""
    g = torch.Generator().manual_seed(0)
    q_lens, lens = [130, 70, 3, 5], [130, 150, 0, 3]
    starts = [7, 140, 300, 290]
    q, kv, k_rope = (
        torch.randn(*s, generator=g).bfloat16()
        for s in ((sum(q_lens), heads, nope + rope), (304, heads, nope + value), (304, rope))
    )
    used = torch.zeros(304, dtype=torch.bool)
    for start, n in zip(starts, lens, strict=True):
        used[start : start + n] = True
    kv[~used], k_rope[~used] = torch.nan, torch.nan
    cu = torch.tensor([0, *q_lens]).cumsum(0).int()
    tensors = [q, kv, k_rope, cu, torch.tensor(starts).int(), torch.tensor(lens).int()]
    return [*(t.to(device) for t in tensors), max(q_lens), (nope + rope) ** -0.5, False]


def assert_right(got: torch.Tensor, args: list[Any]) -> None:
    wide = [t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in args]
    torch.testing.assert_close(got.double(), mla_expanded.reference(*wide), atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("sizes", "keys"),
    [((1, 64, 64, 64), 64), pytest.param((2, 128, 64, 128), 128, marks=pytest.mark.slow)],
)
def test_emulated_kernel_matches_float64(sizes: tuple[int, ...], keys: int, tmp_path: Path) -> None:
    args = arguments(*sizes)
    p = mla_expanded.plan(*args[:3])._replace(keys=keys)
    assert_right(emulated_dense.attend_ragged(p, *args[:6], args[7], tmp_path), args)


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("sizes", [(128, 64, 128), (192, 64, 256)])
def test_products_are_not_waited_for_one_by_one(sizes: tuple[int, ...]) -> None:
    p, said = mla_expanded.plan(*arguments(1, *sizes)[:3]), []
    told = ("--gpu-architecture=sm_90a", *p.options)
    assert cuda_rtc.nvrtc_compile(dense.source(p), told, hear=said.append)[:4] == b"\x7fELF"
    assert p.shared <= 227 * 1024 and "Performance Loss" not in "".join(said)


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(1, 64, 64, 64)
    assert mla_expanded.supports_cuda(*args) is not None  # no GPU
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    assert mla_expanded.supports_cuda(*args) is None
    for text, i, value in (
        ("not all float16 or all bfloat16", 0, args[0].float()),
        ("no multiples of 64", 2, args[2][:, :32]),
        ("is not positive", 7, 0.0),
        ("must be contiguous int32", 4, args[4].long()),
        ("k_rope has strides", 2, args[2].t().contiguous().t()),
    ):
        assert text in str(mla_expanded.supports_cuda(*args[:i], value, *args[i + 1 :])), text


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(3, 128, 64, 128), (2, 192, 64, 256), (1, 64, 64, 64)])
def test_kernel_matches_float64(sizes: tuple[int, ...]) -> None:
    args = arguments(*sizes, device="cuda")
    assert_right(mla_expanded._cuda(*args), args)
