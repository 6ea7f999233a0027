"""Calls of the ops whose choice is modelled: points, their candidates, arguments with cold weights or keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from experiments.attention.decode_attention import Caches, Timed
from experiments.attention.decode_attention_check import Layout
from experiments.common.graph_clock import Run
from experiments.linear.linear_fp8 import KINDS, values, weight_scales, x_of
from experiments.selection import experts
from experiments.selection.experts import Point, provider
from experiments.selection.models import attention_shapes, linear_shapes

from fastkernels.core.dispatch import Op
from fastkernels.core.tuning import Chip
from fastkernels.overrides.attention import attention_decode_cuda
from fastkernels.overrides.attention import selection as attention
from fastkernels.overrides.attention.attention_decode import attention_decode
from fastkernels.overrides.attention.attention_decode import reference as decode_reference
from fastkernels.overrides.kit.selection import Candidate
from fastkernels.overrides.linear import selection as linear_selection
from fastkernels.overrides.linear.kernels import skinny_linear_cuda as skinny
from fastkernels.overrides.linear.kernels import wgmma_linear_cuda as wgmma
from fastkernels.overrides.linear.kernels import wgmma_linear_fp8_cuda as wgmma_fp8
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.linear import reference as linear_reference
from fastkernels.overrides.linear.linear_fp8 import linear_fp8
from fastkernels.overrides.linear.linear_fp8 import reference as fp8_reference
from fastkernels.overrides.moe.fused_experts import fused_experts
from fastkernels.overrides.moe.fused_experts_fp8 import fused_experts_fp8

COLD = 256 << 20  # bytes that the calls of a graph read, so that L2 holds none of them; at least two calls
MOST = 64  # calls in a graph
LARGE = 300_000_000  # weights from this size on are two in a graph, and measured last
CHANNELS = 1 << 28  # of all keys, at most: larger calls leave nothing to choose


class Subject(NamedTuple):
    """An op to measure.

    points      all points, in the order of measurement
    candidates  the parameter sets of a point on a chip
    calls       arguments of several calls on different memory
    compiled    the kernel of a candidate, compiled
    hosts       providers that stand for the host's kernel, timed if installed; none compiles at each shape
    error       the largest relative error of a right result
    kernel      equal for points and candidates that run the same kernel
    """

    op: Op
    points: Callable[[list[int]], Iterator[Point]]
    candidates: Callable[[Point, Chip], tuple[Candidate, ...]]
    calls: Callable[[Run, Point], list[tuple[Any, ...]]]
    compiled: Callable[[Point, Candidate], Any]
    reference: Callable[..., torch.Tensor]
    hosts: tuple[str, ...]
    error: float
    kernel: Callable[[Point, Candidate], Any]


def kernel_of(point: Point, candidate: Candidate) -> Any:
    """Return `Subject.kernel`: one plan serves many shapes of linear layers, other kernels depend on the shape."""
    shape, sizes = tuple(point.shape.values()), tuple(point.sizes.values())
    if isinstance(candidate.kernel, wgmma.Plan):
        return candidate.kernel, shape[2:]
    return candidate.kind, candidate.kernel, shape, sizes


def depth(size: int) -> int:
    """Return the number of calls in a graph, each of which reads so many bytes."""
    return min(max(-(-COLD // size), 2), MOST)


# -- linear


def linear_points(tokens: list[int]) -> Iterator[Point]:
    for (n, k), layers in sorted(linear_shapes().items(), key=lambda item: item[0][0] * item[0][1] > LARGE):
        for m in tokens:
            yield Point({"N": n, "K": k, "dtype": "bfloat16"}, {"M": m}, layers)


def linear_candidates(point: Point, chip: Chip) -> tuple[Candidate, ...]:
    return linear_selection.linear_candidates(point.sizes["M"], point.shape["N"], point.shape["K"], chip)


def linear_calls(run: Run, point: Point) -> list[tuple[Any, ...]]:
    n, k = point.shape["N"], point.shape["K"]
    x = run.randn(point.sizes["M"], k)
    return [(x, run.randn(n, k, scale=k**-0.5)) for _ in range(depth(2 * n * k))]


def compile_linear(point: Point, candidate: Candidate) -> None:
    device, m, k = torch.device("cuda", 0), point.sizes["M"], point.shape["K"]
    if isinstance(candidate.kernel, wgmma.Plan):
        wgmma.kernel_for(device, candidate.kernel, True)
    else:
        skinny.kernel_for(device, dict(candidate.params), m, k, True, False)


# -- linear_fp8


def fp8_points(tokens: list[int], scales: list[str]) -> Iterator[Point]:
    for (n, k), layers in linear_shapes(head=False).items():  # hosts do not quantize lm_head
        for kind in scales:
            if n % 16 == 0 and k % 16 == 0:  # libraries need it
                for m in tokens:
                    shape = {"N": n, "K": k, "block": KINDS[kind], "out_dtype": "bfloat16"}
                    yield Point(shape, {"M": m}, layers)


def fp8_candidates(point: Point, chip: Chip) -> tuple[Candidate, ...]:
    n, k, block = (point.shape[name] for name in ("N", "K", "block"))
    return linear_selection.linear_fp8_candidates(point.sizes["M"], n, k, block, chip)


def fp8_calls(run: Run, point: Point) -> list[tuple[Any, ...]]:
    n, k, block = (point.shape[name] for name in ("N", "K", "block"))
    x, x_scale = x_of(run, block, point.sizes["M"], k)
    return [(x, values(run, n, k), x_scale, weight_scales(run, block, n, k)) for _ in range(depth(n * k))]


def compile_fp8(point: Point, candidate: Candidate) -> None:
    assert isinstance(candidate.kernel, wgmma.Plan)
    blocks = point.shape["block"] == KINDS["block"]
    wgmma_fp8.kernel_for(torch.device("cuda", 0), candidate.kernel, True, blocks)


# -- attention_decode


def decode_points(batches: list[int], contexts: list[int]) -> Iterator[Point]:
    for (heads, kv_heads, head_size), models in attention_shapes().items():
        shape = {
            "heads": heads, "kv_heads": kv_heads, "head_size": head_size, "block_size": 16, "window": 0,
            "dtype": "bfloat16",
        }  # fmt: skip
        for context in contexts:
            for batch in batches:
                if batch * context * kv_heads * head_size <= CHANNELS:
                    yield Point(shape, {"batch": batch, "context": context}, models)


def decode_candidates(point: Point, chip: Chip) -> tuple[Candidate, ...]:
    heads, kv_heads, head_size, block_size = list(point.shape.values())[:4]
    sizes = point.sizes["batch"], point.sizes["context"]
    call = attention.Call(heads // kv_heads, kv_heads, head_size, block_size, *sizes)
    return attention.decode_candidates(call, chip)


def decode_calls(run: Run, point: Point) -> list[tuple[Any, ...]]:
    heads, kv_heads, head_size, block_size = list(point.shape.values())[:4]
    layout = Layout(heads, kv_heads, head_size, block_size)
    case = Timed("uniform", layout, point.sizes["batch"], point.sizes["context"])
    return [tuple(call) for call in Caches(run, layout, case.blocks * case.calls).calls(case)]


def compile_decode(point: Point, candidate: Candidate) -> None:
    """Compile by a call with one key a sequence; Triton kernels are compiled for any strides of the table."""
    heads, kv_heads, head_size, block_size = list(point.shape.values())[:4]
    batch, device = point.sizes["batch"], torch.device("cuda", 0)
    q = torch.zeros(batch, heads, head_size, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(1, block_size, kv_heads, head_size, dtype=torch.bfloat16, device=device)
    lens = torch.ones(batch, dtype=torch.int32, device=device)
    table = torch.zeros(batch, 64, dtype=torch.int32, device=device)
    fn = provider(attention_decode, candidate.provider).fn
    fn(q, cache, cache, lens, table, point.sizes["context"], head_size**-0.5, **candidate.params)


def subjects(scales: list[str], batches: list[int], contexts: list[int]) -> dict[str, Subject]:
    """Return the ops that can be measured. `points` of the linear layers takes numbers of tokens."""
    assert max(contexts) <= attention_decode_cuda.TYPICAL
    return {
        "linear": Subject(
            linear, linear_points, linear_candidates, linear_calls, compile_linear, linear_reference, ("cublas",),
            4e-3, kernel_of,
        ),
        "linear_fp8": Subject(
            linear_fp8, partial(fp8_points, scales=scales), fp8_candidates, fp8_calls, compile_fp8, fp8_reference,
            ("cutlass", "sgl_kernel", "cublas"), 1e-2, kernel_of,
        ),
        "attention_decode": Subject(
            attention_decode, lambda _: decode_points(batches, contexts), decode_candidates, decode_calls,
            compile_decode, decode_reference, ("fa3",), 8e-3, kernel_of,
        ),
        "fused_experts": Subject(
            fused_experts, experts.points, experts.candidates, experts.calls, experts.compiled, experts.reference,
            ("vllm",), 1e-2, experts.kernel_of,
        ),
        "fused_experts_fp8": Subject(
            fused_experts_fp8, partial(experts.points, scales=scales), experts.candidates, experts.calls,
            experts.compiled, experts.reference, ("vllm", "cutlass", "deepgemm"), 6e-2, experts.kernel_of,
        ),
    }  # fmt: skip
