"""Reductions of segments of rows, as torch_scatter.segment_csr: the points of a cell become one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KINDS = ("max", "mean", "sum")


def reference(
    x: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor | None = None, reduce: str = "max"
) -> torch.Tensor:
    """x: [N, C]; offsets: [S + 1] int, ascending; indices: [M] int, rows of x, or None for all in order.

    Returns [S, C] in x's dtype: of each segment s the maximum, mean or sum of the rows indices[offsets[s]] to
    indices[offsets[s + 1] - 1]. A segment without rows gives 0. Computed in at least float32.
    """
    _check(x, offsets, indices, reduce)
    acc = torch.promote_types(x.dtype, torch.float32)
    rows = (x if indices is None else x[indices.long()]).to(acc)
    ends = offsets.tolist()
    out = x.new_zeros((len(ends) - 1, x.shape[1]), dtype=acc)
    for s, (begin, end) in enumerate(pairwise(ends)):
        if begin < end:
            part = rows[begin:end]
            out[s] = part.amax(0) if reduce == "max" else part.mean(0) if reduce == "mean" else part.sum(0)
    return out.to(x.dtype)


def _check(x: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor | None, reduce: str) -> None:
    if reduce not in KINDS:
        raise ValueError(f"segment_reduce: reduce must be one of {', '.join(KINDS)}, got {reduce!r}")
    if x.dim() != 2 or offsets.dim() != 1 or not len(offsets) or (indices is not None and indices.dim() != 1):
        shape = None if indices is None else tuple(indices.shape)
        raise ValueError(
            f"segment_reduce: x must be [N, C], offsets [segments + 1] and indices [M], got {tuple(x.shape)},"
            f" {tuple(offsets.shape)} and {shape}"
        )


@triton.jit(do_not_specialize=["N", "S"])
def _segment_kernel(
    x_ptr, offset_ptr, index_ptr, out_ptr, x_stride, N, S, C, INDEXED: tl.constexpr, MAX: tl.constexpr,
    MEAN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A tile of segments: their first rows, then their second ones, up to the longest one's last.
    follow(OVERLAP)
    segments = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.load(offset_ptr + segments, mask=segments < S, other=0).to(tl.int64)
    end = tl.load(offset_ptr + segments + 1, mask=segments < S, other=0).to(tl.int64)
    count = end - begin
    acc = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    if MAX:
        acc = tl.where((count > 0)[:, None], float("-inf"), acc)
    for i in range(tl.max(count, 0)):
        row = begin + i
        here = i < count
        if INDEXED:
            row = tl.load(index_ptr + row, mask=here, other=0).to(tl.int64)
        mask = (here & (row >= 0) & (row < N))[:, None] & (cols < C)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if MAX:
            most = tl.maximum(acc, x, propagate_nan=tl.PropagateNan.ALL)
            acc = tl.where(mask, most, acc)
        else:
            acc += x
    if MEAN:
        acc = acc / tl.maximum(count, 1).to(tl.float32)[:, None]
    mask = (segments < S)[:, None] & (cols < C)[None, :]
    tl.store(out_ptr + segments[:, None] * C + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def _fake(x: torch.Tensor, offsets: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x.new_empty((offsets.shape[0] - 1, x.shape[1]))


def _supports_triton(
    x: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor | None = None, reduce: str = "max"
) -> str | None:
    if x.dtype not in FLOATS:
        return f"x is {x.dtype}, not float16, bfloat16 or float32"
    if x.stride(-1) != 1:
        return f"x has strides {tuple(x.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    x: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor | None = None, reduce: str = "max"
) -> torch.Tensor:
    _check(x, offsets, indices, reduce)
    out = _fake(x, offsets)
    if not out.numel():
        return out
    block_c = min(next_power_of_2(x.shape[1]), 128)
    block_s = max(1024 // block_c, 1)
    launch_kernel(
        _segment_kernel, (cdiv(len(out), block_s), cdiv(x.shape[1], block_c)), x, offsets.contiguous(),
        None if indices is None else indices.contiguous(), out, x.stride(0), len(x), len(out), x.shape[1],
        INDEXED=indices is not None, MAX=reduce == "max", MEAN=reduce == "mean", BLOCK_S=block_s, BLOCK_C=block_c,
        num_warps=4,
    )  # fmt: skip
    return out


def _torch(
    x: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor | None = None, reduce: str = "max"
) -> torch.Tensor:
    _check(x, offsets, indices, reduce)
    rows = x if indices is None else x[indices.long()]
    counts = offsets.long().diff()
    of = torch.arange(len(counts), device=x.device)
    of = of.repeat_interleave(counts)[:, None].expand(-1, x.shape[1])
    kind = {"max": "amax"}.get(reduce, reduce)
    begin = int(offsets[0])
    rows = rows[begin : begin + len(of)]
    return x.new_zeros((len(counts), x.shape[1])).scatter_reduce_(0, of, rows, kind, include_self=False)


def _runs_torch(
    x: torch.Tensor, offsets: torch.Tensor, indices: Any = None, reduce: str = "max"
) -> str | None:
    exact = x.dtype in (torch.float32, torch.float64) or reduce == "max"
    return None if exact else f"PyTorch's CPU kernel adds in {x.dtype}"


segment_reduce = define(
    'segment_reduce(Tensor x, Tensor offsets, Tensor? indices=None, str reduce="max") -> Tensor',
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",), supports=_runs_torch),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Segments of 1 to 8 rows where there are enough of them, in any order of the rows."""
    rows, segments = call["rows"], call["segments"]
    ends = torch.randint(rows + 1, (max(segments - 1, 0),), generator=call.generator, device=call.device)
    ends = ends.sort().values
    made = {"offsets": torch.cat((ends.new_zeros(1), ends, ends.new_full((min(segments, 1),), rows)))}
    if call["indexed"]:
        made["indices"] = torch.randperm(rows, generator=call.generator, device=call.device)
    return made


def _case(
    name: str,
    tag: str,
    rows: int,
    segments: int,
    dim: int,
    dtype: str = "float32",
    weight: float = 1,
    **more: Any,
) -> Case:
    return Case(name, {"rows": rows, "segments": segments, "dim": dim, **more}, dtype, weight, (tag,))


def _first(args: list[Any]) -> None:
    """All rows are the first segment's."""
    args[1][1:] = len(args[0])


SPEC = OpSpec(
    name="segment_reduce",
    level=1,
    reference=reference,
    op=segment_reduce,
    arguments=(
        Tensor("x", "rows dim"),
        Tensor("offsets", "segments+1", "int64"),
        Tensor("indices", "rows", "int64", when="indexed"),
        Scalar("reduce", default="max"),
    ),
    outputs=(Tensor("out", "segments dim"),),
    axes={
        "rows": Axis.per_call(), "segments": Axis.per_call(), "dim": Axis.width(), "indexed": Axis.option(True),
        "reduce": Axis.option("max", choices=KINDS),
    },
    constraints=("segments > 0 or rows == 0",),
    values=_values,
    flops="rows * dim",
    cases=(  # Point Transformer V3: the pools between the stages of a scan of a room
        _case("room_64", "model", 120_000, 40_000, 64, weight=4),
        _case("room_128", "model", 40_000, 12_000, 128, weight=4),
        _case("room_512", "model", 4_000, 1_200, 512, weight=4),
        _case("room_128_half", "model", 40_000, 12_000, 128, "float16", 4),
        _case("one", "odd", 1, 1, 1),
        _case("odd_63", "odd", 63, 20, 24),
        _case("mean", "odd", 100, 31, 40, reduce="mean"),
        _case("sum", "odd", 77, 30, 65, reduce="sum"),
        _case("half", "odd", 129, 40, 33, "float16"),
        _case("odd_bf16", "odd", 50, 17, 32, "bfloat16", reduce="mean"),
        _case("in_order", "odd", 90, 30, 16, indexed=False),
        _case("wide", "odd", 20, 6, 300),
        _case("empty", "odd", 4, 60, 8),
        _case("none", "odd", 0, 0, 8),
    ),
    activations=("x",),
    extremes={"first": _first},
    baseline="torch",
)  # fmt: skip
