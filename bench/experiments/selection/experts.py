"""Calls of experts for sweep.py and experts_check.py: points, candidates, arguments with cold weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from experiments.common.graph_clock import Run
from experiments.selection.models import MIXTURES

from fastkernels.core.dispatch import Op
from fastkernels.core.tuning import Chip
from fastkernels.overrides.kit.selection import Candidate
from fastkernels.overrides.moe import selection as moe
from fastkernels.overrides.moe.cases import router_choice
from fastkernels.overrides.moe.fused_experts import fused_experts
from fastkernels.overrides.moe.fused_experts_fp8 import fused_experts_fp8

SCALES = {
    "tensor": (0, 2),
    "row": (1, 1),
    "block": (128, 128),
}  # of weights and of activations, as in the op's key
COLD = 256 << 20  # bytes that the calls of a graph read
MEMORY = 16 << 30  # bytes of the weights of all calls


class Point(NamedTuple):
    """A call to measure, without its tensors."""

    shape: dict[str, Any]
    sizes: dict[str, int]
    models: list[str]


def points(tokens: list[int], scales: list[str] | None = None) -> Iterator[Point]:
    """Return the points of float8 with these scales; None: of bfloat16. The first tokens come first, for all models."""
    for m in tokens:
        for name, (experts, topk, hidden, inner) in MIXTURES.items():
            for kind in scales or [""]:
                if kind == "block" and (hidden % 128 or inner % 128):
                    continue
                of_scales = {"block": SCALES[kind][0], "act": SCALES[kind][1]} if kind else {}
                shape = {
                    "experts": experts, "here": experts, "topk": topk, "hidden": hidden, "intermediate": inner,
                    **of_scales, "dtype": "bfloat16",
                }  # fmt: skip
                yield Point(shape, {"tokens": m}, [f"{name}:experts"])


def op_of(point: Point) -> Op:
    return fused_experts_fp8 if "block" in point.shape else fused_experts


def candidates(point: Point, chip: Chip) -> tuple[Candidate, ...]:
    """Return the sets with one tile for both products: the model has the times of others."""
    block = point.shape.get("block")
    where = list(point.shape.values())[:5]
    call = moe.Call(*where, point.sizes["tokens"], 2 if block is None else 1, block == 128)
    found = moe.candidates(call, chip)
    return tuple(c for c in found if c.provider != moe.TRITON or c.params["gate_up"] == c.params["down"])


def kernel_of(point: Point, candidate: Candidate) -> Any:
    """Return `Subject.kernel`: it depends on whether pairs are sorted, not on their number."""
    experts, topk = point.shape["experts"], point.shape["topk"]
    is_sorted = 4 * point.sizes["tokens"] * topk > experts
    return candidate.provider, candidate.kernel, tuple(point.shape.values()), is_sorted


def calls(run: Run, point: Point) -> list[tuple[Any, ...]]:
    """Return calls with uniform and with skewed routing by turns, on different weights where memory allows."""
    experts, _, topk, hidden, inner, *scales, _ = point.shape.values()
    tokens, size = point.sizes["tokens"], 3 * experts * hidden * inner * (1 if scales else 2)
    count = min(max(-(-COLD // (size * min(tokens * topk, experts) // experts)), 4), 16)
    layers = [weights(run, point) for _ in range(max(min(count, MEMORY // size), 1))]
    made = []
    for i in range(count):
        choice = router_choice(tokens, experts, topk, bool(i % 2), run.generator, run.device)
        made.append(arguments(point, run.randn(tokens, hidden), layers[i % len(layers)], *choice))
    return made


def _shapes(point: Point) -> list[tuple[int, int, int]]:
    """Return the shapes of both weights."""
    experts, _, _, hidden, inner = list(point.shape.values())[:5]
    return [(experts, 2 * inner, hidden), (experts, hidden, inner)]


def _scale_shape(point: Point, n: int, k: int) -> tuple[int, ...]:
    experts, block = point.shape["experts"], point.shape["block"]
    return (experts, *{0: (), 1: (n,), 128: (-(-n // 128), -(-k // 128))}[block])


def weights(run: Run, point: Point) -> list[torch.Tensor]:
    """Return both weights of a layer and, in float8, their scales."""
    shapes = _shapes(point)
    if "block" not in point.shape:
        return [run.randn(*shape, scale=shape[2] ** -0.5) for shape in shapes]
    made = [run.randn(*shape, scale=100).clamp_(-448, 448).to(torch.float8_e4m3fn) for shape in shapes]
    for _, n, k in shapes:
        values = run.randn(*_scale_shape(point, n, k), dtype=torch.float32)
        made.append((values.abs() + 0.5) * 0.01 * k**-0.5)
    return made


def arguments(
    point: Point, x: torch.Tensor, layer: list[torch.Tensor], topk_weights: torch.Tensor, ids: torch.Tensor
) -> tuple[Any, ...]:
    """Return the arguments of the op."""
    if "block" not in point.shape:
        return x, *layer, topk_weights, ids
    block = [128, 128] if point.shape["block"] == 128 else None
    powers_of_two = block is not None  # as in vLLM
    return x, *layer, topk_weights, ids, None, None, point.shape["act"] == 1, block, powers_of_two


def compiled(point: Point, candidate: Candidate) -> None:
    """Compile by a call in which all experts have the same zeros. Large calls run the same kernels as 64 tokens."""
    if candidate.provider == moe.TILED:  # reads contiguous weights, whatever their strides
        return
    topk, tokens, device = point.shape["topk"], min(point.sizes["tokens"], 64), torch.device("cuda", 0)
    dtype = torch.float8_e4m3fn if "block" in point.shape else torch.bfloat16
    layer = [torch.zeros(1, *shape[1:], dtype=dtype, device=device).expand(shape) for shape in _shapes(point)]
    if "block" in point.shape:
        layer += [torch.ones(_scale_shape(point, n, k), device=device) for _, n, k in _shapes(point)]
    x = torch.zeros(tokens, point.shape["hidden"], dtype=torch.bfloat16, device=device)
    ids = torch.zeros(tokens, topk, dtype=torch.int32, device=device)
    args = arguments(point, x, layer, torch.ones(tokens, topk, device=device), ids)
    provider(op_of(point), candidate.provider).fn(*args, **candidate.params)


def reference(*args: Any) -> torch.Tensor:
    """Return the result of our kernel with its default tiles, which the judge compares with float64.

    The reference itself, which runs on a CPU, takes seconds for a call with many experts.
    """
    op = fused_experts if len(args) == 5 else fused_experts_fp8
    return provider(op, moe.TRITON if args[0].is_cuda else "reference").fn(*args)


def provider(op: Op, name: str) -> Any:
    return next(p for p in op.providers if p.name == name)
