"""Ops whose CPU code takes fewer steps than their reference compute the same values, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastkernels.overrides.norm.rms_norm import reference, rms_norm
from fastkernels.overrides.rope import rotary_emb, rotary_emb_cpp

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_equals_its_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = (None, torch.randn(96).to(dtype), torch.randn(96))
    for weight, adds, width, first in itertools.product(weights, (True, False), (None, 64), (True, False)):
        x, residual = torch.randn(5, 3, 96).to(dtype), torch.randn(5, 3, 96).to(dtype) if adds else None
        want, new = reference(x, weight, 1e-6, residual, width, first)
        assert torch.equal(rms_norm(x, weight, 1e-6, residual, width, first), want)
        assert residual is None or torch.equal(residual, new)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("rotate", [rotary_emb.rotate_in_place, rotary_emb._rotate_cpp], ids=["torch", "cpp"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_emb_equals_its_reference(
    dtype: torch.dtype, rotate: Callable[..., None], truncates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query and key are slices of one tensor; some channels do not rotate."""
    torch.manual_seed(0)
    monkeypatch.setattr(rotary_emb, "host_truncates", lambda: truncates)
    for rotary_dim, cast in itertools.product((64, 32), (True, False)):
        positions, table = torch.randint(0, 100, (7,)), torch.randn(100, rotary_dim)
        query, key, _ = torch.randn(7, 64 * 10).to(dtype).split((64 * 6, 64 * 2, 64 * 2), dim=1)
        want = rotary_emb.reference(
            positions, query, key, 64, table, True, cast, truncates=truncates and dtype == torch.bfloat16
        )
        rotate(positions, query, key, 64, table, True, cast)
        assert torch.equal(query, want[0]) and torch.equal(key, want[1])


def test_rotary_emb_runs_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op, where a compiler is found; other styles are PyTorch's."""
    calls: list[int] = []
    kernel = rotary_emb_cpp._kernel()

    def counted(call: Any, dtype: int) -> None:
        calls.append(dtype)
        kernel(call, dtype)

    monkeypatch.setattr(rotary_emb_cpp, "_kernel", lambda: counted)
    table, positions = torch.randn(9, 64), torch.arange(5)
    for neox, count in ((True, 1), (False, 1), (True, 2)):
        query, key = torch.randn(5, 128), torch.randn(5, 64)
        want = rotary_emb.reference(positions, query, key, 64, table, neox)
        rotary_emb.rotary_emb(positions, query, key, 64, table, neox)
        assert torch.equal(query, want[0]) and torch.equal(key, want[1]) and len(calls) == count
