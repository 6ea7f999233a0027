"""CUDA graphs of a model's forward, and compilation of its repeated blocks alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

LEAST = 4  # blocks of one class
SHARE = 0.8  # of the weights that the class with most of them holds
WITH_THEM = ("ResnetBlock2D",)  # blocks that diffusers' models do not list in _repeated_blocks
VARIANTS = 512  # of the code of a block: sizes of images and batches, in the host's modules and in ours


class Graphed:
    """Calls `fn` by replaying CUDA graphs, one for each set of shapes and other arguments."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.graphs: dict[Any, tuple[Any, list[torch.Tensor], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        device = next(t.device for t in leaves if isinstance(t, torch.Tensor) and t.is_cuda)
        leaves = [t.to(device) if isinstance(t, torch.Tensor) else t for t in leaves]
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        key = (str(tree), *((t.shape, t.dtype) if isinstance(t, torch.Tensor) else repr(t) for t in leaves))
        if key not in self.graphs:
            self.graphs[key] = self._capture(leaves, tree)
        graph, given, out = self.graphs[key]
        for static, t in zip(given, tensors, strict=True):
            static.copy_(t)
        graph.replay()
        return tree_map_only(torch.Tensor, torch.clone, out)

    def _capture(self, leaves: list[Any], tree: Any) -> tuple[Any, list[torch.Tensor], Any]:
        leaves = [t.clone() if isinstance(t, torch.Tensor) else t for t in leaves]
        args, kwargs = tree_unflatten(leaves, tree)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compile, and let libraries choose their kernels
                self.fn(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.fn(*args, **kwargs)
        return graph, [t for t in leaves if isinstance(t, torch.Tensor)], out


def compile_blocks(model: torch.nn.Module, mode: str | None) -> int:
    """Compile the blocks that hold most of a model's weights, each class once; returns their number."""
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, VARIANTS)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, VARIANTS)
    names = getattr(model, "_repeated_blocks", None) or [_largest(model)]
    blocks = [m for m in model.modules() if type(m).__name__ in (*names, *WITH_THEM)]
    for block in blocks:
        block.compile(mode=mode, dynamic=False)
    return len(blocks)


def _largest(model: torch.nn.Module) -> str:
    """The name of the innermost class with at least LEAST instances that hold most of the weights.

    Stages that hold such blocks are left out: each would be compiled as a whole, all its blocks after each other.
    """
    counts: Counter[str] = Counter(type(m).__name__ for m in model.modules())
    held: Counter[str] = Counter()
    for module in model.modules():
        name = type(module).__name__
        container = isinstance(module, (torch.nn.Sequential, torch.nn.ModuleList))
        if counts[name] >= LEAST and not container and any(True for _ in module.children()):
            held[name] += sum(p.numel() for p in module.parameters())
    if not held:
        raise ValueError(f"{type(model).__name__} has no class with {LEAST} blocks to compile")
    most = max(held.values())
    return max((n for n in held if held[n] >= SHARE * most), key=lambda n: (counts[n], held[n]))
