"""Which graphs of a forward pass are kept, without a GPU: a stand-in for a graph runs the function on its inputs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.graphs import stand_in

from fastkernels.core.runtime import ahead
from fastkernels.engine.execution.forward import forward_graphs
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of inputs that were captured, in order; -1 of those that failed."""
    return stand_in(monkeypatch)


def run(graphs: ForwardGraphs, *sizes: int) -> None:
    for size in sizes:
        given = torch.randn(size)
        assert torch.equal(graphs("double", lambda x: 2 * x, [given]), 2 * given)


def test_new_shape_replaces_the_graph_that_is_used_least(captured: list[int]) -> None:
    graphs = ForwardGraphs(torch.device("cpu"), 2)
    run(graphs, 1, 1, 1, 2, 2)
    assert captured == [1, 2] and len(graphs) == 2 and graphs.replays == 3
    run(graphs, *[3] * (2 + forward_graphs.GAIN))  # 2 has come twice
    assert captured == [1, 2, 3] and len(graphs) == 2 and graphs.replays == 4
    run(graphs, 1, 2, 3)
    assert captured == [1, 2, 3] and graphs.replays == 6, "2 runs eagerly, and is no new shape"


def test_more_shapes_than_graphs_capture_none_in_turn(captured: list[int]) -> None:
    graphs = ForwardGraphs(torch.device("cpu"), 3)
    run(graphs, *[1, 2, 3, 4, 5] * 40)
    assert captured == [1, 2, 3] and graphs.replays == 3 * 39


def test_shapes_of_new_clients_get_graphs(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "HALVED", 16)
    graphs = ForwardGraphs(torch.device("cpu"), 2)
    run(graphs, *[1, 2] * 100)
    run(graphs, *[3, 4] * 50)
    assert captured == [1, 2, 3, 4] and len(graphs) == 2


def test_forgotten_shapes_leave_nothing(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "SEEN", 2)
    graphs = ForwardGraphs(torch.device("cpu"))
    run(graphs, 6, 6, 6)
    assert captured == [-1], "a shape that cannot be captured is tried once"
    run(graphs, 1, 2, 3, 4)
    assert len(graphs._shapes) == 2 and len(graphs) == 0


def test_convolutions_are_compiled_and_chosen_in_a_first_run(captured: list[int]) -> None:
    """Each new shape runs twice: to compile its kernels, and eagerly. cuDNN times its algorithms in these runs only."""
    seen: list[tuple[bool, bool]] = []

    def run_once(x: torch.Tensor) -> torch.Tensor:
        seen.append((ahead.active(), torch.backends.cudnn.benchmark))
        return x

    for convolves in (True, False):
        graphs = ForwardGraphs(torch.device("cpu"), convolves=convolves)
        assert not torch.backends.cudnn.benchmark
        for size in (2, 3, 2):
            graphs("", run_once, [torch.ones(size)])
        assert not torch.backends.cudnn.benchmark and not ahead.active()
        first = [(True, True), (False, True)] * 2 if convolves else [(False, False)] * 2
        assert seen[: len(first)] == first and set(seen[len(first) :]) == {(False, False)}
        seen.clear()


def test_benchmark_mode_of_the_process_survives_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = ForwardGraphs(torch.device("cpu"), convolves=True)
    with pytest.raises(ZeroDivisionError):
        graphs("", lambda x: 1 // 0, [torch.ones(1)])
    assert not torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    graphs("", lambda x: x, [torch.ones(2)])
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(("left", "eager"), [([0], 1), ([3, 1, 0], 3), ([3, 3, 0], 2), ([2, 5], 2)])
def test_runs_measure_what_the_first_had_no_time_for(
    captured: list[int], monkeypatch: pytest.MonkeyPatch, left: list[int], eager: int
) -> None:
    """A graph is captured when all is measured, or when a run brought nothing."""
    runs = iter([*map(range, left), *[range(9)] * 9])
    monkeypatch.setattr(forward_graphs, "measuring", lambda: contextlib.nullcontext(next(runs)))
    graphs = ForwardGraphs(torch.device("cpu"))
    run(graphs, *[4] * eager)
    assert captured == []
    run(graphs, 4, 4)
    assert captured == [4] and graphs.replays == 2


@pytest.mark.gpu
def test_graphs_follow_each_other_while_an_output_is_held() -> None:
    """The only graph makes room for the next one, whose pool has memory that a caller still reads."""
    graphs, held = ForwardGraphs(torch.device("cuda"), 1), []
    for size in (64, 128, 256):
        given = torch.randn(size, device="cuda")
        for _ in range(2 + forward_graphs.GAIN + 2):
            held.append(graphs("double", lambda x: 2 * x, [given]))
            assert torch.equal(held[-1], 2 * given)
        assert len(graphs) == 1 and not any(shape.eager for shape in graphs._shapes.values())
