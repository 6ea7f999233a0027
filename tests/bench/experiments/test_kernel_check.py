"""Tests of kernel_check.py: errors are found; graphs run on a CPU and refill a call's output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from experiments.common import kernel_check


class Graph:
    """Launches of its capture."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.launched: list[Callable[[], object]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for launch in self.launched:
            launch()


@contextlib.contextmanager
def capture(graph: Graph) -> Iterator[None]:
    Graph.capturing = graph
    yield
    Graph.capturing = None


def launched(write: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """A call whose single kernel writes its output, [4]."""
    assert Graph.capturing is not None
    out = torch.empty(4)
    Graph.capturing.launched.append(lambda: write(out))
    return out


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {"CUDAGraph": Graph, "graph": capture, "Stream": object, "stream": contextlib.nullcontext}
    for name, fake in {**fakes, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def test_each_graph_replays_with_its_own_bits() -> None:
    wanted = [torch.full((4,), 1.0), torch.full((4,), 2.0)]
    calls = [lambda w=w: launched(lambda out: out.copy_(w)) for w in wanted]
    graphs = kernel_check.SideBySide(calls)
    graphs.replay(3)
    assert [graph.replays for graph in graphs.graphs] == [3, 3]
    assert all(torch.equal(out, want) for out, want in zip(graphs.outs, wanted, strict=True))
    assert kernel_check.other_bits(calls, wanted) == ""
    assert "have other bits" in kernel_check.other_bits(calls, wanted[::-1])


def test_unwritten_output_is_found() -> None:
    def once(out: torch.Tensor) -> None:
        if not written:
            out.fill_(1.0)
        written.append(out)

    written: list[torch.Tensor] = []
    assert "have other bits" in kernel_check.other_bits([lambda: launched(once)], [torch.ones(4)])
    assert len(written) == 2 * 5  # right once, and NaN after that
    written.clear()

    def part(out: torch.Tensor) -> None:
        out[:3] = 1.0

    assert "have other bits" in kernel_check.other_bits([lambda: launched(part)], [torch.ones(4)])


def test_problem_names_the_error() -> None:
    want = torch.linspace(-2, 2, 64).double()

    def said(change: Callable[[torch.Tensor], torch.Tensor], **how: Any) -> str:
        return kernel_check.problem(lambda: change(want.clone()).half(), want, **how)

    assert said(lambda t: t) == "" and said(lambda t: t, rms=1e-3) == ""
    assert said(lambda t: t + 0.001) == ""
    assert said(lambda t: t + 0.001, rms=1e-4).startswith("largest error 0.00")
    assert said(lambda t: t + 0.01).startswith("largest error 0.01")
    assert said(lambda t: t + 0.01, limits={torch.float16: 0.02}) == ""
    assert said(lambda t: t / t.clamp(min=0)) == "32 values are not finite"
    assert said(torch.rand_like) == "two equal calls have other bits"
    assert said(lambda t: t[:, 9]).startswith("IndexError: too many indices")
