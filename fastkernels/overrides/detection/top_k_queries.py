"""The best queries of detectors: the rows of scores with the largest maxima, or the largest scores of all rows.

RT-DETR (arXiv 2304.08069) and YOLOv10 (arXiv 2405.14458) select predictions so, instead of by suppression of overlaps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Permutable, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

TILE = 2048  # scores of a program
MOST_CLASSES = 2048
T = torch.Tensor


def reference(scores: T, k: int, flat: bool = False) -> tuple[T, T]:
    """scores: [B, N, C]. Returns the k best values [B, k] in scores' dtype, the largest first, and ids [B, k] int64.

    An id is that of a row, whose value is its largest score, or with flat=True row * C + column of a score. Of equal
    values the smaller id comes first. NaN is larger than all numbers. Raises ValueError for k outside of 1 .. N, or
    N * C with flat=True.
    """
    _check(scores, k, flat)
    rows = scores.flatten(1) if flat else scores.amax(2)
    best, ids = rows.sort(dim=1, descending=True, stable=True)
    return best[:, :k], ids[:, :k]


def _check(scores: T, k: int, flat: bool) -> None:
    if scores.dim() != 3 or not scores.shape[2]:
        raise ValueError(f"top_k_queries: scores must be [B, N, C], C above 0, got {tuple(scores.shape)}")
    count = scores.shape[1] * (scores.shape[2] if flat else 1)
    if not 1 <= k <= count:
        raise ValueError(f"top_k_queries: k must be from 1 to {count}, got {k}")


@triton.jit(do_not_specialize=["N"])
def _query_keys_kernel(
    x_ptr, keys_ptr, N, C, x_stride_b, x_stride_n, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    # A row's key orders like its maximum, then like the complement of its id: rows with equal maxima stay in order.
    follow(OVERLAP)
    image = tl.program_id(1).to(tl.int64)
    rows, cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    at = x_ptr + image * x_stride_b + rows.to(tl.int64)[:, None] * x_stride_n + cols[None, :]
    x = tl.load(at, mask=(rows < N)[:, None] & (cols < C)[None, :], other=float("-inf")).to(tl.float32)
    best = tl.max(x, 1)
    broken = tl.max((x != x).to(tl.int32), 1) > 0  # the maximum drops NaN
    bits = tl.where(best == 0.0, 0.0, best).to(tl.int32, bitcast=True)  # one zero
    bits = tl.where(broken, 0x7FC00000, bits)  # one NaN
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - rows).to(tl.int64)
    tl.store(keys_ptr + image * N + rows, key, mask=rows < N)


def _fake(scores: T, k: int, flat: bool = False) -> tuple[T, T]:
    batch = scores.shape[0]
    return scores.new_empty(batch, k), torch.empty(batch, k, dtype=torch.int64, device=scores.device)


def _supports_triton(scores: T, k: int, flat: bool = False) -> str | None:
    if scores.dtype not in FLOATS:
        return f"scores have dtype {scores.dtype}, not float16, bfloat16 or float32"
    if flat and not scores.is_contiguous():
        return f"scores have strides {tuple(scores.stride())}: they must be contiguous"
    if not flat and (scores.stride(2) != 1 or scores.shape[2] > MOST_CLASSES):
        return f"scores {tuple(scores.shape)} have strides {tuple(scores.stride())}, or over {MOST_CLASSES} classes"
    return None


def _triton(scores: T, k: int, flat: bool = False) -> tuple[T, T]:
    _check(scores, k, flat)
    if not scores.shape[0]:
        return _fake(scores, k)
    if flat:
        scores = scores.view(len(scores), -1, 1)
    batch, count, classes = scores.shape
    keys = torch.empty(batch, count, dtype=torch.int64, device=scores.device)
    block_c = next_power_of_2(classes)
    block_n = max(TILE // block_c, 1)
    launch_kernel(
        _query_keys_kernel, (cdiv(count, block_n), batch), scores, keys, count, classes, *scores.stride()[:2],
        BLOCK_N=block_n, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    best = keys.topk(k, 1).values
    order = (best >> 32).int()
    values = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)
    return values.to(scores.dtype), 0x7FFFFFFF - (best & 0x7FFFFFFF)


def _reference(scores: T, k: int, flat: bool = False) -> tuple[T, T]:
    best, ids = reference(scores, k, flat)
    return best.contiguous(), ids.contiguous()


top_k_queries = define(
    "top_k_queries(Tensor scores, SymInt k, bool flat=False) -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="top_k_queries",
    level=1,
    reference=reference,
    op=top_k_queries,
    cases=(  # the cells of three levels at 640 px, and the 300 queries that are left; 80 classes
        _case("cells_32", "model", batch=32, queries=8400, classes=80, k=300),
        _case("cells_4", "model", batch=4, queries=8400, classes=80, k=300),
        _case("cells_1", "model", weight=4, batch=1, queries=8400, classes=80, k=300),
        _case("classes_1", "model", "float32", weight=4, batch=1, queries=300, classes=80, k=300, flat=True),
        _case("classes_32", "model", "float32", batch=32, queries=300, classes=80, k=300, flat=True),
        _case("one", "odd", "float32", batch=1, queries=1, classes=1, k=1),
        _case("odd_63", "odd", "float32", batch=3, queries=63, classes=7, k=20),
        _case("all", "odd", "float16", batch=2, queries=33, classes=1, k=33),
        _case("ties", "odd", batch=2, queries=1000, classes=3, k=77),
        _case("flat_63", "odd", "float32", batch=2, queries=9, classes=7, k=63, flat=True),
        _case("flat_ties", "odd", batch=2, queries=257, classes=4, k=100, flat=True),
        _case("wide", "odd", "float16", batch=1, queries=65, classes=1128, k=9),
    ),
    arguments=(
        Tensor("scores", "batch queries classes"),
        Scalar("k"),
        Scalar("flat", default=False),
    ),
    outputs=(Tensor("values", "batch k"), Tensor("ids", "batch k", "int64")),
    axes={
        "batch": Axis.per_call(),
        "queries": Axis.per_call(),
        "classes": Axis.count(),
        "k": Axis.count(),
    },
    constraints=("k<=((queries*classes)if(flat)else(queries))",),
    flops="batch * queries * classes",
    tie_sensitive=True,
    permutable=lambda *_: Permutable(rows=(0,), columns=(0,)),
)
