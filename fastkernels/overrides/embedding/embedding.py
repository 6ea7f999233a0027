"""Embedding lookup in a vocabulary shard: rows for the ids of the shard, zeros for all other ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

from fastkernels.core import assemble
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, Expr, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel


def reference(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    org_start: int = 0,
    org_end: int = -1,
    num_org_padding: int = 0,
    added_start: int = 0,
    added_end: int = 0,
) -> torch.Tensor:
    """input_ids: [...] int; weight: [rows, D]. Returns [..., D].

    Without a range (org_end < 0) the id is the row. With a range, the weight holds the rows of the ids org_start ..
    org_end - 1, then num_org_padding unused rows, then the rows of added_start .. added_end - 1; other ids give zeros.
    """
    if org_end < 0:
        return F.embedding(input_ids, weight)
    org = (input_ids >= org_start) & (input_ids < org_end)
    added = (input_ids >= added_start) & (input_ids < added_end)
    first_added = org_end - org_start + num_org_padding
    row = torch.where(
        org, input_ids - org_start, torch.where(added, input_ids - added_start + first_added, 0)
    )
    return F.embedding(row, weight).masked_fill(~(org | added).unsqueeze(-1), 0)


@triton.jit
def _embedding_kernel(
    ids_ptr, w_ptr, out_ptr, w_stride, rows, D, org_start, org_end, first_added, added_start, added_end,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    if MASKED:
        org = (row >= org_start) & (row < org_end)
        added = (row >= added_start) & (row < added_end)
        row = tl.where(org, row - org_start, tl.where(added, row - added_start + first_added, -1))
    # An id without a row gives zeros instead of an out-of-bounds read.
    here = (row >= 0) & (row < rows) & (cols < D)
    tl.store(
        out_ptr + token * D + cols,
        tl.load(w_ptr + row * w_stride + cols, mask=here, other=0.0),
        mask=cols < D,
    )


def _supports_triton(input_ids: torch.Tensor, weight: torch.Tensor, *shard: int) -> str | None:
    if input_ids.dtype not in (torch.int32, torch.int64):
        return f"input_ids are {input_ids.dtype}, not int32 or int64"
    if weight.stride(-1) != 1:
        return f"weight has strides {tuple(weight.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    org_start: int = 0,
    org_end: int = -1,
    num_org_padding: int = 0,
    added_start: int = 0,
    added_end: int = 0,
) -> torch.Tensor:
    rows, dim = weight.shape
    ids = input_ids.contiguous()
    out = torch.empty((*ids.shape, dim), dtype=weight.dtype, device=weight.device)
    if ids.numel() == 0:
        return out
    block = min(next_power_of_2(dim), 2048)
    grid = (ids.numel(), cdiv(dim, block))
    launch_kernel(
        _embedding_kernel, grid,
        ids, weight, out, weight.stride(0), rows, dim, org_start, org_end,
        org_end - org_start + num_org_padding, added_start, added_end, MASKED=org_end >= 0, BLOCK=block,
    )  # fmt: skip
    return out


def _fake(input_ids: torch.Tensor, weight: torch.Tensor, *shard: int) -> torch.Tensor:
    return torch.empty((*input_ids.shape, weight.shape[-1]), dtype=weight.dtype, device=weight.device)


embedding = define(
    "embedding(Tensor input_ids, Tensor weight, int org_start=0, int org_end=-1, int num_org_padding=0,"
    " int added_start=0, int added_end=0) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        # Without a shard this is F.embedding, as in the hosts.
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


WHOLE = (0, -1, 0, 0, 0)  # the weight holds the rows of all ids
_SHARD_ROWS = "shard[1] - shard[0] + shard[2] + shard[4] - shard[3]"


def _ids(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(call["vocab"], shape, generator=call.generator, device=call.device).to(dtype)


def _distinct(args: SimpleNamespace) -> int:
    """Count the rows of the weight that are read."""
    ids = args.input_ids
    if args.org_end >= 0:
        org = (ids >= args.org_start) & (ids < args.org_end)
        ids = ids[org | ((ids >= args.added_start) & (ids < args.added_end))]
    return ids.unique().numel()


def _vocab(args: SimpleNamespace) -> int | None:
    return max(args.org_end, args.added_end) if args.org_end >= 0 else None


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    input_ids, weight, *shard = args
    if tuple(shard) not in ((), WHOLE):
        raise ValueError(
            f"{cls.__name__} takes its shard from the group of ranks and cannot look up {tuple(shard)}"
        )
    if not issubclass(cls, nn.Module):  # a method object
        layer = nn.Module()
        layer.weight = nn.Parameter(weight, requires_grad=False)
        method: Any = cls()
        return partial(method.embedding, layer, input_ids)
    if assemble.takes(cls, "bias"):
        raise ValueError(f"{cls.__name__} has no lookup: the logits processor reads its weight")
    module = assemble.make(cls, weight, *weight.shape, padding_size=1)
    return partial(assemble.load(module, {"weight": weight}), input_ids)


def _repeated(args: list[Any]) -> None:
    args[0].copy_(args[0].flatten()[:1].expand(args[0].numel()).view(args[0].shape))


def _ends(args: list[Any]) -> None:
    args[0].zero_()
    args[0].view(-1)[::2] = args[1].shape[0] - 1


SPEC = OpSpec(
    name="embedding",
    level=1,
    by_default=True,
    reference=reference,
    op=embedding,
    cases=(
        Case("decode_32", {"tokens": (32,), "rows": 128256, "dim": 4096}, weight=1, tags=("model",)),
        Case("prefill_8k", {"tokens": (8192,), "rows": 128256, "dim": 4096}, weight=1, tags=("model",)),
        Case(
            "tp8_32", {"tokens": (32,), "vocab": 128256, "rows": 16032, "dim": 4096, "shard": (16032, 32064, 0, 0, 0)},
            weight=1, tags=("model",),
        ),
        Case("one", {"tokens": (1,), "rows": 1, "dim": 1}, dtype="float32", tags=("odd",)),
        Case("odd_63", {"tokens": (63,), "rows": 1000, "dim": 1128}, tags=("odd",)),
        Case("odd_2d", {"tokens": (3, 7), "rows": 65, "dim": 63, "ids": "int32"}, dtype="float16", tags=("odd",)),
        Case(
            "shard", {"tokens": (100,), "vocab": 1026, "rows": 544, "dim": 72, "shard": (512, 1010, 14, 1010, 1026)},
            tags=("odd",),
        ),
        Case("wide", {"tokens": (5,), "rows": 9, "dim": 3000}, dtype="float32", tags=("odd",)),
        Case("empty", {"tokens": (0,), "rows": 9, "dim": 64}, tags=("odd",)),
    ),
    arguments=(
        Tensor("input_ids", "*tokens", "ids", values=_ids),
        Tensor("weight", "rows dim", bytes="itemsize(dtype) * distinct * dim"),
        *(
            Scalar(name, "shard", index=index)
            for index, name in enumerate(("org_start", "org_end", "num_org_padding", "added_start", "added_end"))
        ),
    ),
    outputs=(Tensor("out", "*tokens dim"),),
    axes={
        "tokens": Axis.per_call(),
        "rows": Axis.count(Expr(_SHARD_ROWS), stated=True),
        "dim": Axis.width(),
        "ids": Axis.dtype("int64"),
        "shard": Axis(WHOLE),
        "vocab": Axis(Expr("rows"), read=_vocab),
        "distinct": Axis.counted(_distinct, Expr("min(prod(tokens), rows)")),
    },
    constraints=(f"rows >= {_SHARD_ROWS}",),
    flops="0",
    extremes={"repeated": _repeated, "first_and_last": _ends},
    activations=("weight",),
    build=_build,
    batch_invariant=True,  # a copy
)  # fmt: skip
