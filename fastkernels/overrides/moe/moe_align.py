"""Sort (token, expert) pairs by expert, each expert's padded to whole blocks, for a grouped matrix product."""

from __future__ import annotations

import random
from typing import Any

import torch

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.shapes import drawn, dtype_name, optional, unless, varied
from fastkernels.core.spec import Case, OpSpec, Permutable, Target, Tolerance
from fastkernels.overrides.moe import moe_align_triton as _moe_align_triton

Aligned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    max_num_tokens_padded: int,
    expert_map: torch.Tensor | None = None,
    invalid_first: bool = False,
) -> Aligned:
    """topk_ids: [T, K]; pair i is entry i of the flat topk_ids. Returns three int32 tensors:

    sorted_token_ids [max_num_tokens_padded]: pairs by expert, an expert's in order, T * K where there is none
    expert_ids [ceil(max_num_tokens_padded / block_size)]: the expert of each block, 0 behind the last one
    num_tokens_post_padded [1]: entries in use, a multiple of block_size

    Ids that are not in 0 .. num_experts - 1 are left out, or, with invalid_first, come first in blocks of expert -1.
    expert_map [num_experts]: the number of each expert here, -1 for those that are elsewhere and are left out.
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
        return f"{num_experts} experts are more than 2046"
    if topk_ids.numel() >= 1 << 30:
        return f"{topk_ids.numel()} pairs are more than 2^30"
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
    _moe_align_triton.align(ids, expert_map, outs, num_experts, block_size, invalid_first)
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
    fake=lambda topk_ids, block_size, num_experts, max_num_tokens_padded, expert_map=None, invalid_first=False: (
        _empty(topk_ids, block_size, max_num_tokens_padded)
    ),
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def padded_size(pairs: int, block_size: int, num_experts: int) -> int:
    """Entries that sorted pairs need at most: every expert that can have one may waste a block less one entry."""
    most = pairs + num_experts * (block_size - 1)
    return min(pairs * block_size, most) if pairs < num_experts else most


def vllm_moe_align_block_size_0_26(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> Aligned:
    """vllm.model_executor.layers.fused_moe.moe_align_block_size.moe_align_block_size of 0.26.

    With an expert_map, the pairs of experts that are elsewhere are left out (ignore_invalid_experts), or kept in
    blocks whose entry in expert_ids is -1. An expert's pairs are in order, which the host does not promise.
    """
    capacity = padded_size(topk_ids.numel(), block_size, num_experts)
    if pad_sorted_ids:
        capacity = -(-capacity // block_size) * block_size
    leave_out = expert_map if ignore_invalid_experts else None
    sorted_ids, expert_ids, total = moe_align(topk_ids, block_size, num_experts, capacity, leave_out, False)
    if expert_map is not None and not ignore_invalid_experts:
        expert_ids = expert_map[expert_ids]
    return sorted_ids, expert_ids, total


def vllm_moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    return_scatter_idx: bool = False,
) -> Any:
    """vllm.model_executor.layers.fused_moe.moe_align_block_size.moe_align_block_size from 0.32 on.

    return_scatter_idx: a fourth result, [T * K, 1] int32, each pair's own number, -1 for those that are left out.
    """
    if return_scatter_idx and expert_map is not None and not ignore_invalid_experts:
        raise ValueError("return_scatter_idx with an expert_map needs ignore_invalid_experts=True")
    found = vllm_moe_align_block_size_0_26(
        topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts
    )
    if not return_scatter_idx:
        return found
    flat = topk_ids.flatten()
    valid = (flat >= 0) & (flat < num_experts)
    if expert_map is not None:
        valid &= expert_map[flat.clamp(0, num_experts - 1).long()] >= 0
    pairs = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    return (*found, torch.where(valid, pairs, -1).view(-1, 1))


def sglang_moe_align_block_size_0_5_17(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, ignore_invalid_expert: bool = False
) -> Aligned:
    """sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size.moe_align_block_size before 0.5.23.

    Ids of -1 (experts that are elsewhere) come first in blocks of expert -1, or are left out (ignore_invalid_expert).
    """
    capacity = padded_size(topk_ids.numel(), block_size, num_experts + 1)
    return moe_align(topk_ids, block_size, num_experts, capacity, None, not ignore_invalid_expert)


def sglang_moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    ignore_invalid_expert: bool = False,
    *,
    return_inactive_prefix_count: bool = False,
    pad_expert_ids: bool = False,
) -> Aligned:
    """sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size.moe_align_block_size from 0.5.23 on.

    Raises ValueError for return_inactive_prefix_count and pad_expert_ids, which serve other kernels of the host.
    """
    for name, value in (
        ("return_inactive_prefix_count", return_inactive_prefix_count),
        ("pad_expert_ids", pad_expert_ids),
    ):
        if value:
            raise ValueError(f"moe_align_block_size: {name} is not supported; use the host's own function")
    capacity = -(-padded_size(topk_ids.numel(), block_size, num_experts + 1) // 4) * 4
    return moe_align(topk_ids, block_size, num_experts, capacity, None, not ignore_invalid_expert)


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    noise = torch.rand(d["tokens"], d["experts"], generator=generator, device=device)
    ids = noise.argsort(dim=-1)[:, : d["topk"]].to(getattr(torch, d.get("ids", "int32")))
    expert_map = None
    if d.get("absent"):  # every third token has no expert, and every second expert is elsewhere
        ids[::3] = -1
        local = torch.arange(d["experts"], dtype=torch.int32, device=device)
        expert_map = torch.where(local % 2 == 0, local // 2, -1)
    first = d.get("invalid_first", False)
    capacity = d.get("capacity", padded_size(ids.numel(), d["block"], d["experts"] + first))
    return [ids, d["block"], d["experts"], capacity, expert_map, first]


def _dims(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    max_num_tokens_padded: int,
    expert_map: torch.Tensor | None = None,
    invalid_first: bool = False,
) -> dict[str, Any]:
    tokens, topk = topk_ids.shape
    return {
        "tokens": tokens, "experts": num_experts, "topk": topk, "block": block_size, "capacity": max_num_tokens_padded,
        **optional(
            absent=expert_map is not None, invalid_first=invalid_first,
            ids=unless(dtype_name(topk_ids.dtype), "int32"),
        ),
    }  # fmt: skip


def _bytes(case: Case) -> int:
    d = case.dims
    pairs = d["tokens"] * d["topk"]
    return 4 * (2 * pairs + -(-pairs // d["block"]) + 1)


def _case(name: str, tokens: int, experts: int, topk: int, block: int, tag: str, **more: bool) -> Case:
    dims = {"tokens": tokens, "experts": experts, "topk": topk, "block": block, **more}
    return Case(name, dims, "float32", tags=(tag,))


def _vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        new = drawn(case, rng, ("tokens", "experts", "topk"))
        block = rng.choice((8, 16, 32, 48, 64, 128))
        return {**new, "topk": min(new["topk"], new["experts"]), "block": block, "capacity": None}

    return varied(case, draw, SPEC.bytes_moved, SPEC.flops)


def _first_expert(args: list[Any]) -> None:
    args[0].zero_()


def _last_expert(args: list[Any]) -> None:
    args[0].fill_(args[2] - 1)


_NOTE = (
    "the hosts' MoE kernels bind the function by name when they are imported: for forks and for our engine"
)
_VLLM = "vllm.model_executor.layers.fused_moe.moe_align_block_size:moe_align_block_size"
_SGLANG = "sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size:moe_align_block_size"

SPEC = OpSpec(
    name="moe_align",
    level=1,
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
    inputs=_inputs,
    dims_of=_dims,
    vary=_vary,
    permutable=lambda *args: Permutable(rows=(0,), columns=(0,)),
    extremes={"first_expert": _first_expert, "last_expert": _last_expert},
    activations=(),
    bytes_moved=_bytes,
    flops=lambda case: 2 * case.dims["tokens"] * case.dims["topk"],
    tolerance={"float32": Tolerance(0.0, 0.0)},
    targets=(
        Target("vllm", _VLLM, "vllm_moe_align_block_size_0_26", "function", "<0.32", note=_NOTE),
        Target("vllm", _VLLM, "vllm_moe_align_block_size", "function", ">=0.32", note=_NOTE),
        Target("sglang", _SGLANG, "sglang_moe_align_block_size_0_5_17", "function", "<0.5.23", note=_NOTE),
        Target("sglang", _SGLANG, "sglang_moe_align_block_size", "function", ">=0.5.23", note=_NOTE),
    ),
)
