"""Proposals for decode attention without a tuned table: valid for every model, chip and size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.selection.models import attention_shapes

from fastkernels.core.tuning import Chip
from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.attention import attention_decode_split as split
from fastkernels.overrides.attention import selection
from fastkernels.overrides.attention.attention_decode import attention_decode

H200 = Chip("NVIDIA H200", 132, 4.917e12, 50 << 20)
AMPERE = Chip("made-up Ampere", 108, 2e12, 40 << 20, (8, 0))
SETS = {"cuda-split": cuda, "triton-split": split}


@pytest.mark.parametrize(
    "chip", [H200, AMPERE, Chip("unknown", 40, 0.0, 1 << 20)], ids=lambda chip: chip.name
)
def test_proposals_fit_every_model(chip: Chip) -> None:
    key = attention_decode.key
    assert key is not None and key.propose is not None
    for heads, kv_heads, head_size in attention_shapes():
        cache = torch.empty(1, 16, kv_heads, head_size, dtype=torch.bfloat16, device="meta")
        for batch in (1, 7, 64, 300):
            q = torch.empty(batch, heads, head_size, dtype=torch.bfloat16, device="meta")
            for context, window in ((17, 0), (300, 0), (8192, 0), (131072, 0), (8192, 1024)):
                shape = (heads, kv_heads, head_size, 16, window, torch.bfloat16)
                found = key.propose(shape, (batch, context), chip)
                assert 1 <= len(found) <= 3
                assert {name for name, _ in found} == {"triton-split" if chip is AMPERE else "cuda-split"}
                for name, params in found:
                    assert params in SETS[name].PARAMS and SETS[name].fits(params, q, cache)


@pytest.mark.parametrize(
    "shape, batch",
    [
        ((32, 8, 128, 16, 0, torch.float32), 1), ((32, 8, 520, 16, 0, torch.float8_e4m3fn), 1),
        ((32, 8, 520, 16, 0, torch.bfloat16), 1), ((32, 8, 128, 16, 0, torch.bfloat16), 0),
        ((128, 1, 128, 16, 0, torch.bfloat16), 1),
    ],
)  # fmt: skip
def test_other_calls_get_the_triton_kernels(shape: tuple[object, ...], batch: int) -> None:
    assert selection.propose_decode(shape, (batch, 1024), H200) == (("triton-split", {}), ("triton", {}))


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (28, 4), (64, 8), (16, 1)])
def test_long_contexts_get_sets_that_suit_them(heads: int, kv_heads: int, head_size: int) -> None:
    """A graph for 128K keys keeps its choice for all lengths: no large clusters, and enough reads in flight."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for batch in (1, 8, 32):
            found = selection.propose_decode(
                (heads, kv_heads, head_size, 16, 0, dtype), (batch, 131072), H200
            )
            assert found and found[0][0] == "cuda-split"
            assert dtype != torch.bfloat16 or all(params["cluster"] <= 2 for _, params in found)
            q = torch.empty(batch, heads, head_size, dtype=torch.bfloat16, device="meta")
            cache = torch.empty(1, 16, kv_heads, head_size, dtype=dtype, device="meta")
            first = dict(found[0][1])
            assert cuda.fits(first, q, cache), first
            assert first in cuda.PAIRED or cuda.suits_long(first, cuda.plan(first, q, cache)), first
    pairs = selection.propose_decode((16, 1, 128, 16, 0, torch.bfloat16), (1, 131072), H200)
    assert pairs[0][1] == cuda.PAIRED[0]


def test_fp8_caches_on_other_chips_get_the_triton_kernels() -> None:
    shape = (32, 8, 128, 16, 0, torch.float8_e4m3fn)
    assert selection.propose_decode(shape, (1, 1024), AMPERE) == selection.UNMEASURED


def test_wide_heads_get_sets_of_their_own() -> None:
    found = selection.propose_decode((16, 2, 512, 16, 0, torch.bfloat16), (32, 1024), H200)
    assert found and all(name == "triton-split" and params in split.WIDE for name, params in found)


def test_one_short_sequence_is_given_to_a_cluster() -> None:
    """Llama-3.1-8B, one sequence of 512 keys: 3.8 us in clusters of 8, 4.9 us without (H200)."""
    shape = (32, 8, 128, 16, 0, torch.bfloat16)
    (_, first), *_ = selection.propose_decode(shape, (1, 512), H200)
    (_, longer), *_ = selection.propose_decode(shape, (32, 4096), H200)
    assert first["cluster"] == 8 and longer["cluster"] == 1
