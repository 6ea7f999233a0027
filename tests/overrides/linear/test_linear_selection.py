"""Proposals for linear layers without a tuned table: valid for every model, deterministic, and quick."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.selection.models import linear_shapes

from fastkernels.core.tuning import Chip
from fastkernels.overrides.linear import selection
from fastkernels.overrides.linear.kernels import wgmma_linear_cuda as wgmma
from fastkernels.overrides.linear.kernels import wgmma_linear_fp8_cuda as wgmma_fp8
from fastkernels.overrides.linear.linear import linear

H200 = Chip("NVIDIA H200", 132, 4.917e12, 50 << 20)
AMPERE = Chip("made-up Ampere", 108, 2e12, 40 << 20, (8, 0))
CHIPS = (H200, Chip("unknown", 40, 0.0, 1 << 20), Chip("one SM", 1, 1e11, 1 << 20), AMPERE)
TOKENS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_proposals_fit_every_model(chip: Chip) -> None:
    providers = {p.name: p for p in linear.providers}
    assert linear.key is not None and linear.key.propose is not None
    for n, k in linear_shapes():
        weight = torch.empty(n, k, dtype=torch.bfloat16, device="meta")
        for m in TOKENS:
            found = linear.key.propose((n, k, torch.bfloat16), (m,), chip)
            assert 1 <= len(found) <= 3
            assert {name for name, _ in found} <= (
                {"triton-skinny"} if chip is AMPERE else {"cuda-skinny", "cuda-wgmma"}
            )
            x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
            for name, params in found:
                provider = providers[name]
                assert params in provider.params and provider.fits(params, x, weight)
            plans = [wgmma.plan(m, n, k, **p, sms=chip.sms) for name, p in found if name == "cuda-wgmma"]
            assert len(set(plans)) == len(plans)  # no kernel twice


@pytest.mark.parametrize("block", [0, 1, 128])
def test_fp8_proposals_fit_every_model(block: int) -> None:
    for n, k in linear_shapes(head=False):
        for m in TOKENS:
            found = selection.propose_linear_fp8((n, k, block, "bfloat16"), (m,), H200)
            assert 1 <= len(found) <= 3
            assert all(p in wgmma_fp8.PARAMS and wgmma_fp8.fits(p, m, k) for _, p in found)
            plans = [wgmma_fp8.plan(m, n, k, **p, blocks=block == 128, sms=132) for _, p in found]
            assert len(set(plans)) == len(plans)  # no kernel twice
    assert selection.propose_linear_fp8((4096, 4096, block, "bfloat16"), (65,), H200) == ()
    assert selection.propose_linear_fp8((4096, 4096, block, "bfloat16"), (8,), AMPERE) == ()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_parts_of_tensor_parallel_layers_get_proposals(ranks: int) -> None:
    for (n, k), layers in linear_shapes(head=False).items():
        columns = layers[0].endswith((":o", ":down"))
        if k % ranks or n % ranks:
            continue
        shape = (n, k // ranks) if columns else (n // ranks, k)
        for m in (1, 8, 64):
            assert selection.propose_linear((*shape, torch.bfloat16), (m,), H200), (shape, m)


@pytest.mark.parametrize(
    "shape, m",
    [
        ((4096, 4096, torch.bfloat16), 65), ((4096, 4096, torch.float32), 8), ((4096, 4100, torch.bfloat16), 8),
        ((0, 4096, torch.bfloat16), 8), ((4096, 4096, torch.bfloat16), 0), ((8, 32, torch.bfloat16), 17),
    ],
)  # fmt: skip
def test_calls_without_kernels_get_no_proposals(shape: tuple[int, int, torch.dtype], m: int) -> None:
    assert selection.propose_linear(shape, (m,), H200) == ()


def test_proposals_are_equal_every_time() -> None:
    first = selection.propose_linear((3584, 18944, torch.bfloat16), (8,), H200)
    for cache in (selection._linear, selection.linear_candidates, wgmma.plan, wgmma.tile_rows):
        cache.cache_clear()
    assert selection.propose_linear((3584, 18944, torch.bfloat16), (8,), H200) == first


def test_proposals_take_microseconds() -> None:
    def seconds(n: int) -> float:
        begin = time.perf_counter()
        selection.propose_linear((n, 3584, torch.bfloat16), (8,), H200)
        return time.perf_counter() - begin

    sizes = range(1000, 9000, 8)
    new, known = [seconds(n) for n in sizes], [seconds(n) for n in sizes]
    assert min(known) < 50e-6 and min(new) < 500e-6


def test_more_sms_change_the_plan_not_the_code() -> None:
    few, many = (
        selection.linear_candidates(8, 4096, 4096, Chip(str(sms), sms, 4e12, 1 << 20)) for sms in (20, 160)
    )
    assert [c.params for c in few] == [c.params for c in many]
    assert [c.terms for c in few] != [c.terms for c in many]


@pytest.mark.parametrize("sms", [1, 20, 78, 132, 192])
def test_tile_rows_are_the_best_multiple_of_8(sms: int) -> None:
    def work(size: int, n: int, splits: int) -> int:
        return (size + 16) * -(-(-(-n // size) * splits) // sms)

    for n in (1, 7, 130, 896, 1152, 4608, 28672, 49155, 152064):
        for splits in (1, 2, 4, 8):
            for most in (64, 128, 256):
                best = min(range(most, 0, -8), key=lambda size: work(size, n, splits))
                assert wgmma.tile_rows(n, splits, most, sms) == best
