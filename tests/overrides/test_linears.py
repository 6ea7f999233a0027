"""Products of several layers as one op, and the streams on which a CUDA graph runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastkernels.overrides.kit import streams
from fastkernels.overrides.kit.modules import linears

OP = torch.ops.fastkernels.linears.default


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Doubled(nn.Linear):
    """A user's layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Ran(TorchDispatchMode):
    """The ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["plain", "float64", "class", "hook"])
def test_linears_give_what_the_layers_give(kind: str) -> None:
    layers = [nn.Linear(8, 6), nn.Linear(5, 7, bias=False), nn.Linear(8, 3)]
    if kind == "class":
        layers[1] = Doubled(5, 7)
    elif kind == "hook":
        layers[2].register_forward_hook(lambda m, args, out: out + 1)
    elif kind == "float64":
        layers = [layer.double() for layer in layers]
    x, y = (draw(2, 9, n).to(layers[0].weight.dtype) for n in (8, 5))
    pairs = [(layers[0], x), (layers[1], y), (layers[2], x[:, 2:5])]
    with torch.no_grad():
        with Ran() as ran:
            found = linears(pairs)
        assert (OP in ran.ops) == (kind in ("plain", "float64"))
        for out, (layer, given) in zip(found, pairs, strict=True):
            torch.testing.assert_close(out, layer(given))
            assert out.is_contiguous()


def test_dtypes_that_differ_are_for_the_layers() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4).double()
    with torch.no_grad(), Ran() as ran:
        found = linears([(first, draw(2, 4)), (second, draw(3, 4).double())])
    assert OP not in ran.ops and [out.dtype for out in found] == [torch.float32, torch.float64]


@pytest.mark.parametrize("joined", [False, True])
def test_shapes_without_values_are_the_ops(joined: bool) -> None:
    xs = [draw(2, 3, 8), draw(2, 5, 8), draw(2, 7, 8)]
    weights, biases = [draw(6, 8) for _ in xs], [draw(6), None, draw(6)]
    for check in ("test_schema", "test_faketensor"):
        torch.library.opcheck(OP, (xs, weights, biases, joined), test_utils=check)


class Stream:
    """A stream that notes what it does."""

    def __init__(self, number: int, log: list[tuple[Any, ...]]):
        self.cuda_stream, self.log = number, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.cuda_stream, "waits for", other.cuda_stream))


def faked(monkeypatch: pytest.MonkeyPatch, main: int, capturing: bool = True) -> list[tuple[Any, ...]]:
    """Replace CUDA's streams: current is number `main`, the pool has 1, 2 and 3."""
    log: list[tuple[Any, ...]] = []
    current = [Stream(main, log)]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(streams, "_sides", lambda device: tuple(Stream(i, log) for i in (1, 2, 3)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return log


def work(log: list[tuple[Any, ...]], costs: list[int]) -> list[tuple[int, Any]]:
    def run(i: int) -> None:
        log.append((torch.cuda.current_stream().cuda_stream, "runs", i))

    return [(cost, partial(run, i)) for i, cost in enumerate(costs)]


@pytest.mark.parametrize("main", [0, 1, 2])
def test_side_streams_start_after_and_end_before_the_current_one(
    main: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SIDES", 2)
    log = faked(monkeypatch, main)
    streams.at_once(work(log, [4, 1, 9, 1, 5]), torch.device("cuda"))
    a, b = [n for n in (1, 2, 3) if n != main][:2]
    assert log[:2] == [(a, "waits for", main), (b, "waits for", main)]
    assert log[-2:] == [(main, "waits for", a), (main, "waits for", b)]
    # The longest first, each on the stream that has the least: 9, then 5, then 4 and both of 1.
    assert log[2:-2] == [
        (main, "runs", 2), (a, "runs", 4), (b, "runs", 0), (b, "runs", 1), (a, "runs", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("costs", "capturing", "sides"), [([1], True, 2), ([1, 2], False, 2), ([1, 2, 3], True, 0)]
)
def test_work_stays_on_one_stream(
    costs: list[int], capturing: bool, sides: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SIDES", sides)
    log = faked(monkeypatch, 0, capturing)
    streams.at_once(work(log, costs), torch.device("cuda"))
    assert sorted(log) == [(0, "runs", i) for i in range(len(costs))]
