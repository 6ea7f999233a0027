"""Sort (token, expert) pairs by expert, padded to whole blocks per expert, for a grouped matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Permutable, Scalar, Sizes, Tensor, Tolerance
from fastkernels.overrides.routing.cases import placement
from fastkernels.overrides.routing.moe_align_triton import align

Aligned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    max_num_tokens_padded: int,
    expert_map: torch.Tensor | None = None,
    invalid_first: bool = False,
) -> Aligned:
    """topk_ids: [T, K]; pair i is entry i of the flattened topk_ids. Returns three int32 tensors:

    sorted_token_ids [max_num_tokens_padded]: pairs sorted by expert, in order within an expert; T * K for padding
    expert_ids [ceil(max_num_tokens_padded / block_size)]: the expert of each block, 0 behind the last used block
    num_tokens_post_padded [1]: the number of used entries, a multiple of block_size

    Ids outside 0 .. num_experts - 1 are dropped or, with invalid_first, come first, in blocks of expert -1.
    expert_map [num_experts]: the local index of each expert; experts on other ranks have -1 and are dropped.
    """
    flat = topk_ids.flatten().long()
    n, device = flat.numel(), topk_ids.device
    valid = (flat >= 0) & (flat < num_experts)
    if expert_map is not None:
        local = expert_map.long()[flat.clamp(0, num_experts - 1)]
        flat, valid = local, valid & (local >= 0)
    bucket = torch.where(valid, flat + 1, 0 if invalid_first else num_experts + 1)
    counts = (bucket[None] == torch.arange(num_experts + 1, device=device)[:, None]).sum(dim=1)
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    order = bucket.argsort(stable=True)
    first = torch.cat((counts.cumsum(0) - counts, counts.sum()[None]))
    start = torch.cat((ends - padded, ends.new_full((1,), max_num_tokens_padded)))
    buckets = bucket[order]
    place = start[buckets] + torch.arange(n, device=device) - first[buckets]
    found = torch.full((max_num_tokens_padded + n,), n, dtype=torch.int32, device=device)
    found[place] = order.to(torch.int32)
    blocks = torch.arange(-(-max_num_tokens_padded // block_size), device=device) * block_size
    experts = torch.searchsorted(ends, blocks, right=True) - 1
    experts = torch.where(blocks < ends[-1], experts, 0)
    return found[:max_num_tokens_padded].clone(), experts.to(torch.int32), ends[-1:].to(torch.int32)


def _check(topk_ids: torch.Tensor, block_size: int, num_experts: int, capacity: int) -> None:
    if block_size < 1 or num_experts < 1 or capacity < 0:
        raise ValueError(
            f"block_size {block_size}, num_experts {num_experts} and max_num_tokens_padded {capacity}"
            " must be positive"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids is {topk_ids.dtype}, not int32 or int64")


def _empty(topk_ids: torch.Tensor, block_size: int, capacity: int) -> Aligned:
    sizes = (capacity, -(-capacity // block_size), 1)
    found = [torch.empty(n, dtype=torch.int32, device=topk_ids.device) for n in sizes]
    return found[0], found[1], found[2]


def _supports_triton(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    max_num_tokens_padded: int,
    expert_map: torch.Tensor | None = None,
    invalid_first: bool = False,
) -> str | None:
    if num_experts > 2046:
        return f"{num_experts} experts exceed the limit of 2046"
    if topk_ids.numel() >= 1 << 30:
        return f"{topk_ids.numel()} pairs exceed the limit of 2^30"
    return None


def _triton(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    max_num_tokens_padded: int,
    expert_map: torch.Tensor | None = None,
    invalid_first: bool = False,
) -> Aligned:
    _check(topk_ids, block_size, num_experts, max_num_tokens_padded)
    ids = topk_ids.contiguous()
    outs = _empty(ids, block_size, max_num_tokens_padded)
    align(ids, expert_map, outs, num_experts, block_size, invalid_first)
    return outs


def _reference(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    max_num_tokens_padded: int,
    expert_map: torch.Tensor | None = None,
    invalid_first: bool = False,
) -> Aligned:
    _check(topk_ids, block_size, num_experts, max_num_tokens_padded)
    return reference(topk_ids, block_size, num_experts, max_num_tokens_padded, expert_map, invalid_first)


moe_align = define(
    "moe_align(Tensor topk_ids, int block_size, int num_experts, int max_num_tokens_padded,"
    " Tensor? expert_map=None, bool invalid_first=False) -> (Tensor, Tensor, Tensor)",
    fake=lambda topk_ids, block_size, num_experts, capacity, *_: _empty(topk_ids, block_size, capacity),
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def padded_size(pairs: int, block_size: int, num_experts: int) -> int:
    """Return the most entries that sorted pairs can need: each used expert may pad up to block_size - 1 entries."""
    most = pairs + num_experts * (block_size - 1)
    return min(pairs * block_size, most) if pairs < num_experts else most


def _values(call: Call) -> Mapping[str, torch.Tensor]:
    ids = call.rand(call["tokens"], call["experts"]).argsort(dim=-1)[:, : call["topk"]]
    ids = ids.to(getattr(torch, call["ids"]))
    if not call["absent"]:
        return {"topk_ids": ids}
    ids[::3] = -1  # every third token has no expert, and half of the experts are on another rank
    return {"topk_ids": ids, "expert_map": placement(call, call["experts"], (call["experts"] + 1) // 2)}


def _capacity(sizes: Sizes) -> int:
    return padded_size(
        sizes["tokens"] * sizes["topk"], sizes["block"], sizes["experts"] + sizes["invalid_first"]
    )


def _case(name: str, tokens: int, experts: int, topk: int, block: int, tag: str, **more: bool) -> Case:
    dims = {"tokens": tokens, "experts": experts, "topk": topk, "block": block, **more}
    return Case(name, dims, "float32", tags=(tag,))


def _first_expert(args: list[Any]) -> None:
    args[0].zero_()


def _last_expert(args: list[Any]) -> None:
    args[0].fill_(args[2] - 1)


SPEC = OpSpec(
    name="moe_align",
    level=1,
    by_default=True,
    reference=reference,
    op=moe_align,
    cases=(
        _case("decode_1", 1, 8, 2, 16, "model"),
        _case("decode_32", 32, 8, 2, 16, "model"),
        _case("prefill_4k", 4096, 8, 2, 128, "model"),
        _case("qwen3_32", 32, 128, 8, 16, "model"),
        _case("qwen3_4k", 4096, 128, 8, 64, "model"),
        _case("odd_63", 63, 60, 4, 16, "odd"),
        _case("one", 1, 1, 1, 1, "odd"),
        _case("few", 3, 160, 6, 64, "odd"),
        _case("absent", 130, 7, 3, 16, "odd", absent=True),
        _case("invalid_first", 130, 7, 3, 48, "odd", absent=True, invalid_first=True),
        _case("chunks", 1100, 33, 4, 32, "odd"),
        _case("none", 0, 8, 2, 16, "odd"),
    ),
    arguments=(
        Tensor("topk_ids", "tokens topk", "ids"),
        Scalar("block_size", "block"),
        Scalar("num_experts", "experts"),
        Scalar("max_num_tokens_padded", "capacity"),
        Tensor("expert_map", "experts", "int32", when="absent", bytes="0"),
        Scalar("invalid_first", default=False),
    ),
    # Only used entries count as written.
    outputs=(
        Tensor("sorted_token_ids", "capacity", "int32", bytes="4 * tokens * topk"),
        Tensor("expert_ids", "cdiv(capacity,block)", "int32", bytes="4 * cdiv(tokens * topk, block)"),
        Tensor("num_tokens_post_padded", "1", "int32"),
    ),
    axes={
        "tokens": Axis.per_call(),
        "experts": Axis.count(),
        "topk": Axis.count(),
        "block": Axis.option(choices=(8, 16, 32, 48, 64, 128)),
        "capacity": Axis(_capacity, stated=True),
        "ids": Axis.dtype("int32"),
    },
    constraints=("topk <= experts",),
    values=_values,
    permutable=lambda *args: Permutable(rows=(0,), columns=(0,)),
    extremes={"first_expert": _first_expert, "last_expert": _last_expert},
    activations=(),
    flops="2 * tokens * topk",
    tolerance={"float32": Tolerance(0.0, 0.0)},
)
