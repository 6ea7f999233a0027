"""Experts of our own engine: measured on their layers' weights, and run with the measured parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations.core import expert_layers
from fk_integrations.core.expert_layers import live_calls
from fk_integrations.fastkernels.host import FastKernelsAdapter
from fk_integrations.patching import choose
from torch import nn

from fastkernels.core import registry, tuning
from fastkernels.core.dispatch import Provider
from fastkernels.models.common.descriptions.description import Experts
from fastkernels.models.common.layers.decoder import DecoderExperts
from fastkernels.overrides.linear.parallel_linear import weights_as
from fastkernels.overrides.moe.cases import router_choice
from fastkernels.overrides.moe.quantized import Fp8ExpertsMethod
from fastkernels.patch import Request
from fastkernels.verify import cache, measure
from fastkernels.verify.measure import Point

CPU, TOP_K = torch.device("cpu"), 2
KINDS = {
    "float32": (None, "fused_experts", ("float32",)),
    "rows": (Fp8ExpertsMethod(), "fused_experts_fp8", (1, 1, "float32")),
    "static": (Fp8ExpertsMethod(static=True), "fused_experts_fp8", (1, 0, "float32")),
    "blocks": (Fp8ExpertsMethod(block=True), "fused_experts_fp8", (128, 128, "float32")),
}


class Runner:
    """As much of our engine's runner as the adapter reads."""

    config = SimpleNamespace(num_ranks=1, max_num_batched_tokens=2048, max_num_seqs=8)


def layers(method: Any, count: int = 2) -> nn.ModuleList:
    """Experts of a model, each layer with weights of its own."""
    with weights_as((lambda prefix: method if prefix.endswith("experts") else None) if method else None):
        made = nn.ModuleList(DecoderExperts(Experts(4, TOP_K, 128), 128, f"layers.{i}") for i in range(count))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        values = torch.rand(parameter.shape, generator=generator) / 8
        parameter.data.copy_(values.clamp(0.01).to(parameter.dtype))
    return made


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    cache.compile_cache.folder.cache_clear()
    yield
    tuning.set_verified("cpu", ())
    for name in ("fused_experts", "fused_experts_fp8"):
        registry.get(name).op.reset()
    cache.compile_cache.folder.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_own_engine_measures_its_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, name, rest = KINDS[kind]
    op = registry.get(name).op
    usual = op.providers[-1]
    # The same kernel with other parameters is a choice, too.
    tiled = Provider("usual", lambda *args, tile=1: usual.fn(*args), devices=("cpu",), params=({"tile": 4},))
    monkeypatch.setattr(op, "providers", (tiled, usual))
    key = replace(op.key, propose=lambda *_: [("usual", {"tile": 4})], points=((1,), (8,), (5000,)))
    monkeypatch.setattr(op, "key", key)
    op.reset()
    model, seen = layers(method), []

    def interleaved(subjects: Any, calls: Any, *others: Any) -> list[list[float]]:
        seen.append((len(calls[0][0]), {c[1].data_ptr() for c in calls}))
        return [[1.0] * 60] + [[0.5 if len(calls[0][0]) == 8 else 2.0] * 60 for _ in subjects[1:]]

    monkeypatch.setattr(measure, "interleaved", interleaved)
    runner = Runner()
    found = choose.verify(FastKernelsAdapter(runner), model, Request("patch"), CPU)
    weights = {m.experts.w13_weight.data_ptr() for m in model}  # type: ignore[union-attr]
    assert seen == [(1, weights), (8, weights)]
    entry = next(e for e in tuning.verified("cpu") if e.sizes["tokens"] == 8)
    assert tuple(entry.shape.values()) == (4, 4, TOP_K, 128, 128, *rest)
    assert (entry.provider, entry.params, entry.chosen, entry.faster) == ("usual", {"tile": 4}, True, False)
    lines = "\n".join(found.measured[name])
    assert "tokens=8: usual (usual tile=4: 2.0" in lines and "tokens=1: usual, as usual" in lines
    layer: Any = model[0]
    choice = router_choice(8, 4, TOP_K, False, torch.Generator().manual_seed(0), CPU)
    args = layer.experts.quant_method.arguments(layer.experts, torch.randn(8, 128), *choice)
    assert op._pick("cpu", args, {}).fn.keywords == {"tile": 4}


def test_calls_alternate_between_uniform_and_skewed_routing() -> None:
    def arguments(module: Any, *call: Any) -> Any:
        return (call[0], module.w13_weight, *call[1:])

    modules: Any = [SimpleNamespace(w13_weight=torch.zeros(1)) for _ in range(3)]
    shape = (64, 64, 8, 16, 8, torch.float32)
    live = live_calls(shape, modules, arguments)
    assert live.host is None and live.calls is not None
    point = Point("fused_experts", shape, (512,), (), live)
    found = live.calls(point, CPU, torch.Generator().manual_seed(0), 1 << 20)
    assert found is not None
    check, calls = found
    assert check is calls[0] and [c[1] is modules[i % 3].w13_weight for i, c in enumerate(calls)] == [
        True
    ] * len(calls)
    most = [int(torch.bincount(c[3].flatten(), minlength=64).max()) / 64 for c in calls]  # of a mean of 64
    assert max(most[::2]) < 1.6 < min(most[1::2])
    assert all(c[3].dtype == torch.int32 and bool((c[2].sum(1) - 1).abs().max() < 1e-5) for c in calls)


def test_memory_of_a_call_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(expert_layers, "leave_room", lambda device, needed: asked.append(needed))
    shape = (8, 8, 2, 4096, 14336, torch.bfloat16)
    modules: Any = [SimpleNamespace(w13_weight=torch.zeros(1))]
    live = live_calls(shape, modules, lambda module, *call: call)
    point, generator = Point("fused_experts", shape, (1,), (), live), torch.Generator()
    # One token reads two experts, 0.7 GB: more than is cold, so the fewest calls.
    for cold, calls in ((100 << 20, measure.LEAST_CALLS), (0, 1)):
        assert len(measure.checked_and_timed(point, CPU, generator, cold)[1]) == calls
    assert max(asked) < 1.5e6  # of activations: the weights are there
    asked.clear()
    many = Point("fused_experts", shape, (512,), (), live)
    measure.checked_and_timed(many, CPU, generator, 0)
    assert 2 * 512 * 2 * 3 * 14336 * 4 < asked[0] < 5e8  # gate, up and their product of two experts a token


def test_reference_is_no_production_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.get("fused_experts").op
    monkeypatch.setattr(
        op, "providers", tuple(replace(p, devices=("cuda",), module=None) for p in op.providers)
    )
    assert measure.production("fused_experts", "cuda") is None  # a host's layer is what counts
    assert measure.usual("fused_experts", "cuda", own=True).name == "triton"  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfloat16", "rows", "blocks"])
def test_gpu_measures_all_points_in_time(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    method = None if kind == "bfloat16" else KINDS[kind][0]
    name = "fused_experts" if method is None else KINDS[kind][1]
    # A shape that no table lists
    described = Experts(40, 8, 512)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"), weights_as(lambda prefix: method if prefix.endswith("experts") else None):
            model = nn.ModuleList(DecoderExperts(described, 1536, f"layers.{i}") for i in range(4))
    finally:
        torch.set_default_dtype(before)
    for key, parameter in model.named_parameters():
        values = torch.rand_like(parameter, dtype=torch.float32)
        small = 1e-3 * (values + 0.5) if "scale" in key else 0.1 * (values - 0.5)
        parameter.data.copy_(
            (100 * small if parameter.dtype == torch.float8_e4m3fn else small).to(parameter.dtype)
        )
    found = choose.verify(FastKernelsAdapter(Runner()), model, Request("patch"), torch.device("cuda"))
    lines = found.measured[name]
    with capsys.disabled():
        print(kind, found.seconds, *lines, sep="\n  ")
    assert len(lines) == 6 and not any("not measured" in line or "differs" in line for line in lines)
    assert sum(found.seconds.values()) < 90
