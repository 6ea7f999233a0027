"""Which graphs of a forward pass are kept, without a GPU: a stand-in for a graph runs the function on its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastkernels.engine.execution.forward import forward_graphs
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs

Function = Callable[..., Any]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of inputs that were captured, in order; -1 of those that failed."""
    sizes: list[int] = []

    def capture(self: ForwardGraphs, function: Function, inputs: Sequence[torch.Tensor]) -> Any:
        if len(inputs[0]) > 5:
            sizes.append(-1)
            raise RuntimeError("not permitted when stream is capturing")
        sizes.append(len(inputs[0]))
        static, output = tuple(t.clone() for t in inputs), torch.empty_like(inputs[0])
        graph = SimpleNamespace(replay=lambda: output.copy_(function(*static)))
        return forward_graphs._Graph(graph, static, output, function)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(ForwardGraphs, "_capture", capture)
    return sizes


def run(graphs: ForwardGraphs, *sizes: int) -> None:
    for size in sizes:
        given = torch.randn(size)
        assert torch.equal(graphs("double", lambda x: 2 * x, [given]), 2 * given)


def test_least_recently_used_graph_goes_first(captured: list[int]) -> None:
    graphs = ForwardGraphs(torch.device("cpu"), 2)
    run(graphs, 1, 1, 2, 2, 1, 3, 3)
    assert captured == [1, 2, 3] and len(graphs) == 2 and graphs.replays == 4
    run(graphs, 1, 2)
    assert captured == [1, 2, 3] and graphs.replays == 5, "1 is replayed, and 2 is a new shape again"


def test_forgotten_shapes_leave_nothing(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "SEEN", 2)
    graphs = ForwardGraphs(torch.device("cpu"))
    run(graphs, 6, 6, 6)
    assert captured == [-1], "a shape that cannot be captured is tried once"
    run(graphs, 1, 2, 3, 4)
    assert len(graphs._graphs) == 2 and not graphs._eager
