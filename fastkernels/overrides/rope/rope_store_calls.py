"""The calls of the op rope_store_kvcache, for its SPEC: inputs and cost of a case, the case of real arguments."""

from __future__ import annotations

import random
from typing import Any

import torch

from fastkernels.core.shapes import drawn, dtype_name, near, optional, unless, varied
from fastkernels.core.spec import Case
from fastkernels.overrides.rope.rope_tables import cos_sin_table, inverse_frequencies

FP8 = torch.float8_e4m3fn


def inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d, dtype = case.dims, getattr(torch, case.dtype)
    cache_dtype, dtype = dtype, torch.float16 if dtype == FP8 else dtype
    tokens, heads, kv_heads, size = d["tokens"], d["heads"], d["kv_heads"], d["head_size"]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    qkv = randn(tokens, heads + 2 * kv_heads, size)  # slices of one packed tensor, as in the models
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    rotary_dim = d.get("rotary_dim", size)
    table = cos_sin_table(inverse_frequencies(500000.0, rotary_dim), d.get("max_positions", 4096))
    table = table.to(device, getattr(torch, d.get("cache", dtype_name(dtype))))
    positions = torch.randint(0, table.shape[0], (tokens,), generator=generator, device=device)
    blocks = d.get("blocks", -(-tokens // d["block_size"]) + 3)
    slots = torch.randperm(blocks * d["block_size"], generator=generator, device=device)[:tokens]
    slots = slots.to(getattr(torch, d.get("slots", "int64")))
    if d.get("padded"):
        slots[:: d["padded"]] = -1
    caches = [randn(blocks, d["block_size"], kv_heads, size).to(cache_dtype) for _ in range(2)]
    norms = [1 + 0.1 * randn(size) if d.get("norms") else None for _ in range(2)]
    positions = positions.to(getattr(torch, d.get("positions", "int64")))
    scalars = [d.get("eps", 1e-6), *d.get("scales", ())]
    return [positions, query, key, value, *caches, slots, table, d.get("neox", True), *norms, *scalars]


def _stored(case: Case) -> int:
    d = case.dims
    return d.get("stored", d["tokens"] - (-(-d["tokens"] // d["padded"]) if d.get("padded") else 0))


def bytes_moved(case: Case) -> int:
    d, size = case.dims, getattr(torch, case.dtype).itemsize
    own, tokens, rotary_dim = max(size, 2), d["tokens"], d.get("rotary_dim", d["head_size"])
    changed = d["head_size"] if d.get("norms") else rotary_dim
    rows = d.get("distinct", min(tokens, d.get("max_positions", 4096))) * rotary_dim
    table = rows * getattr(torch, d["cache"]).itemsize if "cache" in d else rows * own
    at = tokens * sum(getattr(torch, d.get(name, "int64")).itemsize for name in ("positions", "slots"))
    stored = 2 * _stored(case) * d["kv_heads"] * d["head_size"] * (own + size)
    return 2 * tokens * d["heads"] * changed * own + stored + table + at


def flops(case: Case) -> int:
    d = case.dims
    each = 3 * d.get("rotary_dim", d["head_size"]) + (4 * d["head_size"] if d.get("norms") else 0)
    return d["tokens"] * (d["heads"] + d["kv_heads"]) * each


def dims_of(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> dict[str, Any]:
    tokens, heads, size = query.shape
    blocks, block_size, kv_heads, _ = key_cache.shape
    stored = int((slot_mapping >= 0).sum())
    max_positions, rotary_dim = cos_sin_cache.shape
    return {
        "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_size": size, "block_size": block_size,
        "blocks": blocks, "stored": stored, "rotary_dim": rotary_dim, "max_positions": max_positions,
        "distinct": positions.unique().numel(), "neox": is_neox_style,
        **optional(
            norms=q_weight is not None, padded=-(-tokens // (tokens - stored)) if tokens > stored else None,
            cache=unless(dtype_name(cos_sin_cache.dtype), dtype_name(query.dtype)), eps=unless(eps, 1e-6),
            positions=unless(dtype_name(positions.dtype), "int64"),
            slots=unless(dtype_name(slot_mapping.dtype), "int64"), scales=unless((k_scale, v_scale), (1.0, 1.0)),
        ),
    }  # fmt: skip


def vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        new = drawn(case, rng, ("tokens", "heads"), ("head_size", "rotary_dim", "max_positions"))
        size = max(new["head_size"] // 2 * 2, 2)
        partial = max(min(new.get("rotary_dim", size), size) // 2 * 2, 2)
        whole = case.dims.get("rotary_dim", case.dims["head_size"]) == case.dims["head_size"]
        return {
            **new, "head_size": size, "rotary_dim": size if whole else partial,
            "kv_heads": near(case.dims["kv_heads"], rng), "block_size": rng.choice((1, 5, 16, 32, 64)),
            "distinct": None, "stored": None, "blocks": None,
        }  # fmt: skip

    return varied(case, draw, bytes_moved, flops)


def _large(args: list[Any], factor: float = 64.0) -> None:
    """Not beyond what an fp8 cache holds: the reference in float64 would not know where that ends."""
    fp8 = args[4].dtype == FP8
    for t in args[1:4]:
        t.mul_(min(factor, 32.0) if fp8 else factor)


def _outlier(args: list[Any]) -> None:
    for t in args[1:4]:
        t[-1, -1, -1] = 100.0 if args[4].dtype == FP8 else 1000.0


def _all_padding(args: list[Any]) -> None:
    args[6].fill_(-1)


def _last_position(args: list[Any]) -> None:
    args[0].fill_(args[7].shape[0] - 1)


EXTREMES = {
    "all_padding": _all_padding, "last_position": _last_position, "large": _large, "outlier": _outlier
}  # fmt: skip
