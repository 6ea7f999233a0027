"""Products of prompts: what a patch proposes for them, and on a GPU their results and the time of a measurement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastkernels.core import registry
from fastkernels.core.dispatch import ForOthers
from fastkernels.core.tuning import Chip
from fastkernels.overrides.linear.kernels import tiled_linear_cuda as tiled
from fastkernels.overrides.linear.linear import MOST, linear
from fastkernels.overrides.linear.selection import PROMPTS, propose_linear
from fastkernels.verify import measure

H200 = Chip("NVIDIA H200", 132, 4.9e12, 50 << 20, (9, 0))
BF16 = torch.bfloat16
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336), "qwen3-4b o": (2560, 4096)}
SQUARE = {"rows": 128, "columns": 192, "cooperate": False, "shares": "wx", "cluster": 4}


@pytest.mark.parametrize("m", [512, 1000, 2048, 8192])
@pytest.mark.parametrize("shape", SHAPES.values())
def test_proposals_of_prompts_are_tiles(shape: tuple[int, int], m: int) -> None:
    found = propose_linear((*shape, BF16), (m,), H200)
    assert 1 < len(found) <= measure.MOST_PROPOSALS and found[0] == ("cuda-tiled", tiled.TALL)
    assert all(name == "cuda-tiled" and params in PROMPTS for name, params in found)
    assert len({str(params) for _, params in found}) == len(found)


def test_others_have_no_proposal() -> None:
    assert not propose_linear((6144, 4096, BF16), (2048,), Chip("A100", 108, 2e12, 40 << 20, (8, 0)))
    assert not propose_linear((6144, 4096, torch.float32), (2048,), H200)
    assert not propose_linear((6144, 4096, BF16), (100,), H200)
    assert not propose_linear((6100, 4096, BF16), (2048,), H200) and not propose_linear(
        (6144, 4100, BF16), (2048,), H200
    )
    assert {name for name, _ in propose_linear((6144, 4096, BF16), (64,), H200)} <= {
        "cuda-wgmma",
        "cuda-skinny",
    }


def test_longer_prompts_have_the_choice_of_8192_tokens() -> None:
    key, weight = linear.key, torch.zeros(8, 16)
    assert key is not None and (MOST,) in key.points
    assert key.of(torch.zeros(3, MOST, 16, device="meta"), weight) == ((8, 16, torch.float32), (MOST,))
    assert key.of(torch.zeros(7, 16), weight)[1] == (7,)


def test_few_tokens_are_for_others() -> None:
    provider = next(p for p in linear.providers if p.name == "cuda-tiled")
    assert provider.supports is not None
    assert isinstance(provider.supports(torch.zeros(9, 64), torch.zeros(32, 64)), ForOthers)
    assert isinstance(
        provider.supports(torch.zeros(200, 64), torch.zeros(32, 64)), str
    )  # no CUDA here, or float32


def test_clusters_of_four_share_both() -> None:
    plan = tiled.plan(1000, 1000, **SQUARE)
    assert plan.sharing == (2, 2) and plan.boxes == (64, 96) and plan.tiles == 4 * 3
    gated = tiled.plan(1000, 1000, **SQUARE, f=tiled.SWIGLU, parts=2)
    assert gated.boxes == (64, 96)
    assert "-DSHARING_W=2" in plan.options(True) and "-DCLUSTERED=__cluster_dims__(4,1,1)" in plan.options(
        True
    )


def made(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    return (
        x,
        torch.randn(n, k, device="cuda", dtype=BF16) * k**-0.5,
        torch.randn(n, device="cuda", dtype=BF16),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("m", [512, 1000, 2081, 8192])
def test_tiles_equal_float64_at_sizes_of_models(name: str, m: int) -> None:
    x, weight, bias = made(m, *SHAPES[name])
    rows = torch.randperm(m, device="cuda")[:128]
    for added in (None, bias):
        want = F.linear(x[rows].double(), weight.double(), None if added is None else added.double())
        for params in (*PROMPTS, SQUARE):
            got = tiled.linear_tiled(x, weight, added, **params)
            torch.testing.assert_close(got[rows].double(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_clusters_of_four_replay_in_a_graph() -> None:
    x, weight, _ = made(2048, 4096, 4096)
    tiled.linear_tiled(x, weight, **SQUARE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tiled.linear_tiled(x, weight, **SQUARE)
    for _ in range(3):
        got.fill_(float("nan"))
        graph.replay()
    spec = registry.get("linear")
    assert measure.close(got, F.linear(x, weight), spec.tolerance["bfloat16"])


@pytest.mark.gpu
def test_measurement_of_an_8b_model_stays_within_its_time() -> None:
    """Prints what was measured: products of Llama-3.1-8B's prompts, kernels compiled before."""
    assert linear.key is not None
    points = []
    for name in ("qkv", "o", "down"):
        n, k = SHAPES[name]
        modules: Any = tuple(SimpleNamespace(weight=made(1, n, k)[1], bias=None) for _ in range(4))
        sizes = [each for each in linear.key.points if each[0] > 64]
        points += [measure.Point("linear", (n, k, BF16), each, modules) for each in sizes]
    device = torch.device("cuda")
    for _ in range(2):
        found = measure.measure(points, "r", device, Chip.of("cuda"), 85.0)
    for entry in found.entries:
        print(entry, entry.provider, entry.params, entry.speedup, entry.ci95)
    print(found.seconds)
    assert found.stopped is None and len(found.entries) == len(points) and sum(found.seconds.values()) < 10
