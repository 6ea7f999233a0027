"""The calls of the op embedding, for its SPEC: inputs and cost of a case, the case of real arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fastkernels.core import assemble
from fastkernels.core.shapes import drawn, dtype_name, optional, unless, varied
from fastkernels.core.spec import Case

WHOLE = (0, -1, 0, 0, 0)  # the weight has the rows of all ids


def inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    vocab = d.get("vocab", d["rows"])
    ids = torch.randint(vocab, d["tokens"], generator=generator, device=device)
    weight = torch.randn(d["rows"], d["dim"], generator=generator, device=device)
    dtype = getattr(torch, d.get("ids", "int64"))
    return [ids.to(dtype), weight.to(getattr(torch, case.dtype)), *d.get("shard", WHOLE)]


def bytes_moved(case: Case) -> int:
    d, tokens = case.dims, int(torch.Size(case.dims["tokens"]).numel())
    size, rows = getattr(torch, case.dtype).itemsize, d.get("distinct", min(tokens, d["rows"]))
    return tokens * getattr(torch, d.get("ids", "int64")).itemsize + size * d["dim"] * (tokens + rows)


def dims_of(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    org_start: int = 0,
    org_end: int = -1,
    num_org_padding: int = 0,
    added_start: int = 0,
    added_end: int = 0,
) -> dict[str, Any]:
    shard = (org_start, org_end, num_org_padding, added_start, added_end)
    here = input_ids
    if org_end >= 0:
        org = (input_ids >= org_start) & (input_ids < org_end)
        here = input_ids[org | ((input_ids >= added_start) & (input_ids < added_end))]
    return {
        "tokens": tuple(input_ids.shape), "rows": weight.shape[0], "dim": weight.shape[1],
        "distinct": here.unique().numel(),
        **optional(
            shard=unless(shard, WHOLE), ids=unless(dtype_name(input_ids.dtype), "int64"),
            vocab=max(org_end, added_end) if org_end >= 0 else None,
        ),
    }  # fmt: skip


def vary(case: Case, rng: random.Random) -> Case:
    rows = () if "shard" in case.dims else ("rows",)  # a shard's ranges are for its rows
    return varied(
        case,
        lambda: {**drawn(case, rng, ("tokens", *rows), ("dim",)), "distinct": None},
        bytes_moved,
        lambda case: 0,
    )


def build(cls: type, args: list[Any]) -> Callable[[], Any]:
    input_ids, weight, *shard = args
    if tuple(shard) not in ((), WHOLE):
        raise ValueError(
            f"{cls.__name__} looks a shard's rows up in a group of ranks only, not in {tuple(shard)}"
        )
    if not issubclass(cls, nn.Module):  # a method object
        layer = nn.Module()
        layer.weight = nn.Parameter(weight, requires_grad=False)
        method: Any = cls()
        return partial(method.embedding, layer, input_ids)
    if assemble.takes(cls, "bias"):
        raise ValueError(f"{cls.__name__} looks nothing up: it is called through the logits processor")
    module = assemble.make(cls, weight, *weight.shape, padding_size=1)
    return partial(assemble.load(module, {"weight": weight}), input_ids)


def _repeated(args: list[Any]) -> None:
    args[0].copy_(args[0].flatten()[:1].expand(args[0].numel()).view(args[0].shape))


def _ends(args: list[Any]) -> None:
    args[0].zero_()
    args[0].view(-1)[::2] = args[1].shape[0] - 1


EXTREMES = {"repeated": _repeated, "first_and_last": _ends}
