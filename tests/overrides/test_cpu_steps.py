"""Ops whose CPU code takes fewer steps than their reference compute the same values, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastkernels.overrides.norm.rms_norm import reference, rms_norm
from fastkernels.overrides.rope import rotary_emb

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_emb_equals_its_reference(dtype: torch.dtype) -> None:
    """Query and key are slices of one tensor; some channels do not rotate."""
    torch.manual_seed(0)
    for rotary_dim, cast in itertools.product((64, 32), (True, False)):
        positions, table = torch.randint(0, 100, (7,)), torch.randn(100, rotary_dim)
        query, key, _ = torch.randn(7, 64 * 10).to(dtype).split((64 * 6, 64 * 2, 64 * 2), dim=1)
        want = rotary_emb.reference(positions, query, key, 64, table, True, cast)
        rotary_emb.rotary_emb(positions, query, key, 64, table, True, cast)
        assert torch.equal(query, want[0]) and torch.equal(key, want[1])
