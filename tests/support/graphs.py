"""A stand-in for CUDA graphs of forward passes: it runs the function on the inputs of the capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastkernels.engine.execution.forward import forward_graphs
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs

LARGEST = 5  # rows of the first input, by default; more cannot be captured


def stand_in(monkeypatch: pytest.MonkeyPatch, largest: int = LARGEST) -> list[int]:
    """Let ForwardGraphs work without a GPU. Returns the sizes of inputs that were captured; -1 of those that failed.

    As in a graph, other tensors that the function reads are those of the capture, and the output's memory is reused.
    """
    sizes: list[int] = []

    def capture(
        self: ForwardGraphs, function: Callable[..., Any], inputs: Sequence[torch.Tensor]
    ) -> forward_graphs._Graph:
        if len(inputs[0]) > largest:
            sizes.append(-1)
            raise RuntimeError("not permitted when stream is capturing")
        sizes.append(len(inputs[0]))
        static = tuple(t.clone() for t in inputs)
        output = torch.empty_like(function(*static))
        graph = SimpleNamespace(replay=lambda: output.copy_(function(*static)))
        return forward_graphs._Graph(graph, static, output, function)  # type: ignore[arg-type]

    monkeypatch.setattr(ForwardGraphs, "_capture", capture)
    return sizes
