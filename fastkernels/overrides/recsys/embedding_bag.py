"""Bags of embeddings over many tables (DLRM, arXiv 1906.00091): sums or means of the rows that jagged ids name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recsys.cases import zipf

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
MANY = 2048  # programs of four warps that fill a GPU


def reference(
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    table_starts: torch.Tensor,
    table_rows: torch.Tensor,
    per_sample_weights: torch.Tensor | None = None,
    mean: bool = False,
) -> torch.Tensor:
    """indices: [N] int; offsets: [F * B + 1] int; weight: [rows, D]. Returns [B, F * D] in weight's dtype.

    Bag f * B + b holds the ids offsets[f * B + b] to offsets[f * B + b + 1] of feature f in sample b, as in torchrec's
    KeyedJaggedTensor. The table of feature f is table_rows[f] rows of weight from row table_starts[f] on, both [F]
    int64. Features may share a table.

    A bag is the sum of its rows, times per_sample_weights [N] if there are any, or with `mean` their mean. A bag
    without ids is 0. An id beyond its table adds 0, and counts in a mean. Computed in float32 or float64. Raises
    ValueError for shapes that do not fit, and for a mean with weights.
    """
    _check(indices, offsets, weight, table_starts, table_rows, per_sample_weights, mean)
    features, bags = len(table_starts), len(offsets) - 1
    acc = torch.promote_types(weight.dtype, torch.float32)
    # Not of offsets[1:]: Inductor 2.11 searches views from their storage's first value on.
    bag = (
        torch.searchsorted(offsets.long(), torch.arange(len(indices), device=indices.device), right=True) - 1
    )
    kept = (bag >= 0) & (bag < bags)
    bag = bag.clamp(0, max(bags - 1, 0))
    feature = bag // max(bags // features, 1)
    ids = indices.long()
    there = kept & (ids >= 0) & (ids < table_rows[feature])
    rows = F.embedding(torch.where(there, ids + table_starts[feature], 0), weight).to(acc)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.to(acc)[:, None]
    total = weight.new_zeros(bags, weight.shape[1], dtype=acc)
    total.index_add_(0, bag, rows.masked_fill(~there[:, None], 0))
    if mean:
        total = total / offsets.diff().clamp_min(1)[:, None]
    return _by_sample(total.to(weight.dtype), features)


def _by_sample(bags: torch.Tensor, features: int) -> torch.Tensor:
    """[F * B, D] as [B, F * D]."""
    return bags.view(features, -1, bags.shape[1]).transpose(0, 1).flatten(1).contiguous()


def _check(
    indices: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, table_starts: torch.Tensor,
    table_rows: torch.Tensor, per_sample_weights: torch.Tensor | None, mean: bool,
) -> None:  # fmt: skip
    features = table_starts.numel()
    if weight.dim() != 2 or not len(weight):
        raise ValueError(f"embedding_bag: weight must be [rows, D] with a row, got {tuple(weight.shape)}")
    if table_starts.dim() != 1 or not features or table_rows.shape != table_starts.shape:
        shapes = f"{tuple(table_starts.shape)} and {tuple(table_rows.shape)}"
        raise ValueError(f"embedding_bag: table_starts and table_rows must be [features], got {shapes}")
    if indices.dim() != 1 or offsets.dim() != 1 or not len(offsets) or (len(offsets) - 1) % features:
        raise ValueError(
            f"embedding_bag: indices must be [N] and offsets [{features} * B + 1], got {tuple(indices.shape)} and"
            f" {tuple(offsets.shape)}"
        )
    if per_sample_weights is not None and per_sample_weights.shape != indices.shape:
        raise ValueError(
            f"embedding_bag: per_sample_weights must be {tuple(indices.shape)}, one for each id, got"
            f" {tuple(per_sample_weights.shape)}"
        )
    if per_sample_weights is not None and mean:
        raise ValueError("embedding_bag: per_sample_weights are for sums: use mean=False")


@triton.jit(do_not_specialize=["batch", "features"])
def _embedding_bag_kernel(
    ids_ptr, offsets_ptr, w_ptr, starts_ptr, rows_ptr, factors_ptr, out_ptr, w_stride, D, batch, features,
    ADDRESSES: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per bag and part of the columns. With ADDRESSES, starts are distances from w_ptr in elements: tables
    # are tensors of their own.
    follow(OVERLAP)
    bag = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    feature, sample = bag // batch, bag % batch
    begin = tl.load(offsets_ptr + bag).to(tl.int64)
    n = (tl.load(offsets_ptr + bag + 1).to(tl.int64) - begin).to(tl.int32)
    start, rows = tl.load(starts_ptr + feature), tl.load(rows_ptr + feature)
    if not ADDRESSES:
        start = start * w_stride
    total = tl.zeros([BLOCK_D], tl.float32)
    following = tl.load(ids_ptr + begin + tl.arange(0, BLOCK_L), mask=tl.arange(0, BLOCK_L) < n, other=-1)
    for first in range(0, n, BLOCK_L):
        places = first + tl.arange(0, BLOCK_L)
        ids = following.to(tl.int64)
        # The next ids arrive while the rows of these do.
        following = tl.load(ids_ptr + begin + places + BLOCK_L, mask=places + BLOCK_L < n, other=-1)
        there = (ids >= 0) & (ids < rows)
        mask = there[:, None] & (cols < D)[None, :]
        row = tl.load(w_ptr + start + ids[:, None] * w_stride + cols[None, :], mask=mask, other=0.0)
        row = row.to(tl.float32)
        if WEIGHTED:
            factor = tl.load(factors_ptr + begin + places, mask=places < n, other=0.0).to(tl.float32)
            row = tl.where(mask, row * factor[:, None], 0.0)
        total += tl.sum(row, 0)
    if MEAN:
        total = total / tl.maximum(n, 1).to(tl.float32)
    out_at = out_ptr + (sample * features + feature) * D + cols
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=cols < D)


def _fake(
    indices: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, table_starts: torch.Tensor, *_: Any,
    **__: Any,
) -> torch.Tensor:  # fmt: skip
    features = table_starts.shape[0]
    return weight.new_empty((offsets.shape[0] - 1) // features, features * weight.shape[1])


def supports_triton(
    indices: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, table_starts: torch.Tensor,
    table_rows: torch.Tensor, per_sample_weights: torch.Tensor | None = None, mean: bool = False,
) -> str | None:  # fmt: skip
    if weight.dtype not in FLOATS:
        return f"weight is {weight.dtype}, not float16, bfloat16 or float32"
    if weight.stride(-1) != 1:
        return f"weight has strides {tuple(weight.stride())}: the last dimension must be contiguous"
    for name, t in (("indices", indices), ("offsets", offsets)):
        if t.dtype not in INTEGERS:
            return f"{name} are {t.dtype}, not int32 or int64"
    if table_starts.dtype != torch.int64 or table_rows.dtype != torch.int64:
        return f"table_starts and table_rows are {table_starts.dtype} and {table_rows.dtype}, not int64"
    if per_sample_weights is not None and per_sample_weights.dtype not in FLOATS:
        return f"per_sample_weights are {per_sample_weights.dtype}"
    return None


def launch(
    indices: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor,
    factors: torch.Tensor | None, mean: bool, addresses: bool,
) -> torch.Tensor:  # fmt: skip
    """Run the kernel. addresses: starts are distances of the tables from `weight` in elements."""
    out = _fake(indices, offsets, weight, starts)
    if out.numel() == 0:
        return out
    bags, dim = len(offsets) - 1, weight.shape[1]
    block = min(next_power_of_2(dim), 512)
    programs = bags * cdiv(dim, block)
    # Of many bags, each is the work of one warp: its sum needs no other, and more bags wait for memory at a time.
    most = 1024 if programs >= MANY else 2048
    at_once = min(next_power_of_2(cdiv(max(len(indices), 1), bags)), max(most // block, 1), 16)
    tile = block * at_once
    launch_kernel(
        _embedding_bag_kernel, (bags, cdiv(dim, block)), indices.contiguous(), offsets.contiguous(), weight,
        starts.contiguous(), rows.contiguous(), None if factors is None else factors.contiguous(), out,
        weight.stride(0), dim, len(out), len(starts), ADDRESSES=addresses, WEIGHTED=factors is not None, MEAN=mean,
        BLOCK_L=at_once, BLOCK_D=block, num_warps=1 if tile <= 512 or most == 1024 else 2 if tile <= 1024 else 4,
    )  # fmt: skip
    return out


def _triton(
    indices: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, table_starts: torch.Tensor,
    table_rows: torch.Tensor, per_sample_weights: torch.Tensor | None = None, mean: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check(indices, offsets, weight, table_starts, table_rows, per_sample_weights, mean)
    return launch(
        indices, offsets, weight, table_starts, table_rows, per_sample_weights, mean, addresses=False
    )


def _torch(
    indices: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, table_starts: torch.Tensor,
    table_rows: torch.Tensor, per_sample_weights: torch.Tensor | None = None, mean: bool = False,
) -> torch.Tensor:  # fmt: skip
    """F.embedding_bag of each feature, on a CPU; the reference where an id is beyond its table."""
    given = indices, offsets, weight, table_starts, table_rows, per_sample_weights, mean
    _check(*given)
    features, bags = len(table_starts), offsets.tolist()
    batch = (len(bags) - 1) // features
    if bags[0] < 0 or bags[-1] > len(indices) or any(a > b for a, b in pairwise(bags)):
        raise ValueError(
            f"embedding_bag: offsets must grow from 0 to at most {len(indices)}, the number of ids"
        )
    parts = []
    for f, (start, rows) in enumerate(zip(table_starts.tolist(), table_rows.tolist(), strict=True)):
        first, last = bags[f * batch], bags[(f + 1) * batch]
        ids = indices[first:last].long()
        if not rows or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows):
            return reference(*given)
        factors = None if per_sample_weights is None else per_sample_weights[first:last].to(weight.dtype)
        own = offsets[f * batch : (f + 1) * batch + 1].long() - first
        parts.append(
            F.embedding_bag(
                ids, weight[start : start + rows], own, mode="mean" if mean else "sum",
                per_sample_weights=factors, include_last_offset=True,
            )
        )  # fmt: skip
    return torch.cat(parts, 1)


def _runs_torch(
    indices: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any
) -> str | None:
    if weight.dtype not in (torch.float32, torch.float64):
        return f"PyTorch's CPU kernel adds in {weight.dtype}"
    return None


embedding_bag = define(
    "embedding_bag(Tensor indices, Tensor offsets, Tensor weight, Tensor table_starts, Tensor table_rows,"
    " Tensor? per_sample_weights=None, bool mean=False) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=supports_triton),
        Provider("torch", _torch, devices=("cpu",), supports=_runs_torch),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Ids with Zipf's skew, in bags of random lengths; some bags are empty."""
    tables, batch, count, device = call["tables"], call["batch"], call["ids"], call.device
    shares = torch.tensor(call["hots"] or [1] * len(tables), dtype=torch.float64, device=device)
    counts = [int(n) for n in (shares / shares.sum() * count).floor().tolist()]
    counts[0] += count - sum(counts)
    lengths, ids = [], []
    for rows, n in zip(tables, counts, strict=True):
        of = torch.randint(max(batch, 1), (n,), generator=call.generator, device=device)
        lengths.append(torch.bincount(of, minlength=batch))
        ids.append(zipf(n, rows, call.generator))
    sizes = torch.tensor(tables, device=device)
    ends = torch.cat(lengths).cumsum(0)
    kind = getattr(torch, call["id_dtype"])
    return {
        "indices": torch.cat(ids).to(kind),
        "offsets": torch.cat((ends.new_zeros(1), ends)).to(kind),
        "table_starts": sizes.cumsum(0) - sizes,
        "table_rows": sizes,
    }


def _distinct(args: SimpleNamespace) -> int:
    """Count the rows that are read, if each feature has a table of its own."""
    bags = args.offsets.diff()
    feature = torch.arange(len(bags), device=bags.device) // max(len(bags) // len(args.table_starts), 1)
    of = feature.repeat_interleave(bags, output_size=len(args.indices))
    return int((args.indices + args.table_starts[of]).unique().numel())


# Rows, and ids in a bag, of the 26 features of MLPerf's DLRMv2 (Criteo, multi-hot). Tables are cut to 100,000 rows.
ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
CRITEO = tuple(min(rows, 100_000) for rows in ROWS)


def _criteo(batch: int, weight: float, multi: bool = True, dtype: str = "float32") -> Case:
    hots = HOTS if multi else (1,) * len(HOTS)
    name = f"dlrm_{'multi' if multi else 'one'}_{batch}" + ("_half" if dtype == "float16" else "")
    dims = {"tables": CRITEO, "batch": batch, "ids": sum(hots) * batch, "dim": 128, "hots": hots}
    return Case(name, dims, dtype, weight, ("model",))


def _odd(
    name: str, tables: Sequence[int], batch: int, ids: int, dim: int, dtype: str = "float32", **more: Any
) -> Case:
    return Case(
        name, {"tables": tuple(tables), "batch": batch, "ids": ids, "dim": dim, **more}, dtype, tags=("odd",)
    )


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    raise ValueError(f"{cls.__name__} needs tables as configs of its host")


def _beyond(args: list[Any]) -> None:
    """Every third id is beyond its table: behind the last row, or negative."""
    args[0][::3] = int(args[4].max())
    args[0][1::6] = -1


def _one_bag(args: list[Any]) -> None:
    """The last bag has all ids of its feature; the others are empty."""
    features = len(args[3])
    batch = (len(args[1]) - 1) // features
    last = args[1][batch::batch].repeat_interleave(batch) if batch else args[1][:0]
    first = args[1][: len(args[1]) - 1 : batch].repeat_interleave(batch) if batch else args[1][:0]
    ends = torch.where(torch.arange(len(last), device=last.device) % max(batch, 1) == batch - 1, last, first)
    args[1][1:] = ends


def _repeated(args: list[Any]) -> None:
    args[0].zero_()


SPEC = OpSpec(
    name="embedding_bag",
    level=1,
    reference=reference,
    op=embedding_bag,
    arguments=(
        Tensor("indices", "ids", "id_dtype"),
        Tensor("offsets", "features*batch+1", "id_dtype"),
        Tensor("weight", "rows dim", bytes="itemsize(dtype) * distinct * dim", std=0.1),
        Tensor("table_starts", "features", "int64", bytes="0"),
        Tensor("table_rows", "features", "int64", bytes="0"),
        Tensor("per_sample_weights", "ids", "float32", when="weighted"),
        Scalar("mean", default=False),
    ),
    outputs=(Tensor("out", "batch features*dim"),),
    axes={
        "tables": Axis.count(read=lambda a: tuple(a.table_rows.tolist())),
        "features": Axis(Expr("len(tables)")),
        "rows": Axis(Expr("sum(tables)")),
        "batch": Axis.per_call(),
        "ids": Axis.per_call(),
        "dim": Axis.width(),
        "hots": Axis(None),
        "id_dtype": Axis.dtype("int64"),
        "weighted": Axis.option(False),
        "distinct": Axis.counted(_distinct, Expr("min(ids, rows)")),
    },
    constraints=("not (weighted and mean)",),
    values=_values,
    flops="ids * dim",
    cases=(
        _criteo(1, 16),
        _criteo(32, 16),
        _criteo(2048, 4),
        _criteo(2048, 4, dtype="float16"),
        _criteo(2048, 4, multi=False),
        _odd("one", [1], 1, 1, 1),
        _odd("odd_63", [5, 70, 1], 7, 33, 63),
        _odd("means", [5, 70], 9, 80, 24, mean=True),
        _odd("weighted", [50, 3], 5, 40, 32, weighted=True),
        _odd("half", [33, 8, 21], 4, 50, 128, "float16"),
        _odd("int32", [33, 8], 3, 30, 16, id_dtype="int32"),
        _odd("wide", [9, 4], 3, 17, 700),
        _odd("long", [40], 2, 150, 8, weighted=True),
        _odd("odd_bf16", [12, 7, 3, 30], 6, 61, 48, "bfloat16", mean=True),
        _odd("no_ids", [4, 6], 3, 0, 8),
    ),
    build=_build,
    activations=("weight",),
    extremes={"beyond": _beyond, "one_bag": _one_bag, "repeated": _repeated},
    baseline="torch",
    batch_invariant=False,  # BLOCK_L depends on the number of ids
)  # fmt: skip
