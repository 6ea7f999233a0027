"""The product of gate and up with SwiGLU: arguments, choice by sizes, and the tiled kernel on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastkernels.core import registry, tuning
from fastkernels.core.tuning import Chip, Entry
from fastkernels.overrides.linear import linear_silu_and_mul as file
from fastkernels.overrides.linear.linear_silu_and_mul import activated, fuses, linear_silu_and_mul, reference
from fastkernels.verify import measure

T = torch.Tensor
# gate and up of models from 3B to 14B, with 72 columns more in the last
SHAPES = {"llama3b": (3072, 8192), "llama8b": (4096, 14336), "qwen7b": (3584, 18944), "odd": (3080, 8224)}


def made(m: int, k: int, i: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[T]:
    generator = torch.Generator(device).manual_seed(m)

    def normal(*shape: int, scale: float = 1.0) -> T:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    return [normal(m, k), normal(2 * i, k, scale=k**-0.5), normal(2 * i, scale=0.1)]


def test_gate_is_the_first_half() -> None:
    x, weight, bias = made(5, 24, 10)
    gate, up = F.linear(x, weight[:10], bias[:10]), F.linear(x, weight[10:], bias[10:])
    torch.testing.assert_close(linear_silu_and_mul(x, weight, bias), F.silu(gate) * up)
    torch.testing.assert_close(linear_silu_and_mul(x.view(5, 1, 24), weight, bias)[:, 0], F.silu(gate) * up)


@pytest.mark.parametrize(
    ("weight", "bias", "text"),
    [
        ((7, 24), None, r"weight \(7, 24\) is not \[2 I, 24\]"),
        ((8, 23), None, "is not"),
        ((8, 24), (4,), r"bias \(4,\)"),
    ],
)
def test_wrong_shapes_are_named(weight: Any, bias: Any, text: str) -> None:
    given = torch.zeros(3, 24), torch.zeros(weight), None if bias is None else torch.zeros(bias)
    with pytest.raises(ValueError, match=text):
        linear_silu_and_mul(*given)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table in which ours is faster at 512 tokens and at 8,192 for one shape, and not at 2,048."""
    shape = {"N": 20, "K": 24, "dtype": "float32"}
    entries = [
        Entry(
            "linear_silu_and_mul", shape, {"M": m}, "reference" if m != 2048 else "onednn", "onednn", "r", speedup=1.5,
            ci95=(1.4, 1.6),
        )
        for m in (512, 2048, 8192)
    ]  # fmt: skip
    monkeypatch.setattr(tuning, "entries", lambda op, chip: entries if op == "linear_silu_and_mul" else [])
    linear_silu_and_mul.forget()
    yield
    monkeypatch.undo()
    linear_silu_and_mul.forget()


def layer(weight: T, bias: T | None) -> Any:
    class UnquantizedLinearMethod: ...

    class Layer(SimpleNamespace):
        def __call__(self, x: T) -> tuple[T, None]:
            return F.linear(x, weight, bias), None

    return Layer(weight=weight, bias=bias, quant_method=UnquantizedLinearMethod())


def test_op_runs_at_sizes_where_it_won(listed: None) -> None:
    _, weight, bias = made(1, 24, 10)
    sizes = {64: False, 128: True, 512: True, 513: False, 2048: False, 2049: True, 8192: True, 20000: True}
    assert {m: fuses(layer(weight, bias), torch.empty(m, 24)) for m in sizes} == sizes


def test_activated_runs_the_op_or_the_layer(listed: None) -> None:
    for m, calls in ((64, 0), (200, 1)):
        x, weight, bias = made(m, 24, 10)
        before = linear_silu_and_mul.calls
        torch.testing.assert_close(activated(layer(weight, bias), x), reference(x, weight, bias))
        assert linear_silu_and_mul.calls - before == calls
    x, weight, bias = made(200, 24, 10)
    wrapped = layer(weight, bias)
    wrapped.base_layer = None
    before = linear_silu_and_mul.calls
    activated(wrapped, x)
    assert linear_silu_and_mul.calls == before


# On a GPU


def tiled(x: T, weight: T, bias: T | None, **params: Any) -> T:
    assert file._supports_tiled(x, weight, bias) is None
    return file._tiled(x, weight, bias, **params)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("m", [512, 1000, 2048, 8192])
def test_tiles_equal_the_reference_at_sizes_of_models(name: str, m: int) -> None:
    k, i = SHAPES[name]
    x, weight, bias = made(m, k, i, "cuda", torch.bfloat16)
    rows = torch.randperm(m, device="cuda")[:128]
    for added in (None, bias):
        want = reference(x[rows].double(), weight.double(), None if added is None else added.double())
        for _, params in file._propose((2 * i, k, x.dtype), (m,), Chip.of("cuda")):
            got = tiled(x, weight, added, **params)
            torch.testing.assert_close(got[rows].double(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_a_graph_replays_the_proposal() -> None:
    x, weight, _ = made(2048, 4096, 14336, "cuda", torch.bfloat16)
    want = F.silu(F.linear(x, weight[:14336])) * F.linear(x, weight[14336:])
    params = file._propose((28672, 4096, x.dtype), (2048,), Chip.of("cuda"))[0][1]
    tiled(x, weight, None, **params)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tiled(x, weight, None, **params)
    for _ in range(3):
        got.fill_(float("nan"))
        graph.replay()
    spec = registry.get("linear_silu_and_mul")
    assert measure.close(got, want, spec.tolerance["bfloat16"])


@pytest.mark.gpu
def test_measurement_of_an_8b_model_stays_within_its_time() -> None:
    """Prints what was measured: five sizes of Llama-3.1-8B's gate and up, kernels compiled before."""
    key = (28672, 4096, torch.bfloat16)
    modules = tuple(
        SimpleNamespace(weight=made(1, 4096, 14336, "cuda", torch.bfloat16)[1], bias=None) for _ in range(4)
    )
    points = [
        measure.Point("linear_silu_and_mul", key, sizes, modules) for sizes in linear_silu_and_mul.key.points
    ]
    device = torch.device("cuda")
    for _ in range(2):
        found = measure.measure(points, "r", device, Chip.of("cuda"), 85.0)
    for entry in found.entries:
        print(entry, entry.provider, entry.params, entry.speedup, entry.ci95)
    print(found.seconds)
    assert found.stopped is None and len(found.entries) == 5 and sum(found.seconds.values()) < 8
