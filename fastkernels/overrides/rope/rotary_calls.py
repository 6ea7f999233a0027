"""The calls of the op rotary_emb, for its SPEC: inputs and cost of a case, the case of real arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastkernels.core import assemble
from fastkernels.core.shapes import drawn, dtype_name, near, optional, unless, varied
from fastkernels.core.spec import Case
from fastkernels.overrides.rope.rope_tables import cos_sin_table, inverse_frequencies


def inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d, dtype = case.dims, getattr(torch, case.dtype)
    tokens, size, n_k = d["tokens"], d["head_size"], d["kv_heads"]
    width = (d["heads"] + 2 * n_k) * size
    qkv = torch.randn(tokens, width, generator=generator, device=device).to(dtype)
    query: torch.Tensor = qkv[:, : d["heads"] * size]
    key = qkv[:, d["heads"] * size : -n_k * size] if n_k else None
    if not d.get("packed", True):
        query, key = query.clone(), None if key is None else key.clone()
    if d.get("by_head"):
        query, key = query.unflatten(-1, (-1, size)), None if key is None else key.unflatten(-1, (-1, size))
    inv_freq = inverse_frequencies(500000.0, d.get("rotary_dim", size))
    cache = cos_sin_table(inv_freq, d.get("max_positions", 4096)).to(
        device, getattr(torch, d.get("cache", case.dtype))
    )
    positions = torch.randint(0, cache.shape[0], (tokens,), generator=generator, device=device)
    flags = (d.get("cast_cache", True), d.get("round_products", False))
    return [
        positions.to(getattr(torch, d.get("positions", "int64"))),
        query,
        key,
        size,
        cache,
        d.get("neox", True),
        *flags,
    ]


def rotated(case: Case) -> int:
    """Channels that change."""
    d = case.dims
    return d["tokens"] * (d["heads"] + d["kv_heads"]) * d.get("rotary_dim", d["head_size"])


def flops(case: Case) -> int:
    return 3 * rotated(case)


def bytes_moved(case: Case) -> int:
    d = case.dims
    rows = d.get("distinct", min(d["tokens"], d.get("max_positions", 4096))) * d.get(
        "rotary_dim", d["head_size"]
    )
    table = rows * getattr(torch, d.get("cache", case.dtype)).itemsize
    positions = d["tokens"] * getattr(torch, d.get("positions", "int64")).itemsize
    return 2 * rotated(case) * getattr(torch, case.dtype).itemsize + table + positions


def dims_of(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    cast_cache: bool = True,
    round_products: bool = False,
) -> dict[str, Any]:
    tokens, (max_positions, rotary_dim) = positions.numel(), cos_sin_cache.shape
    width = query.shape[1:].numel()
    return {
        "tokens": tokens, "heads": width // head_size,
        "kv_heads": 0 if key is None else key.shape[1:].numel() // head_size, "head_size": head_size,
        "rotary_dim": rotary_dim, "max_positions": max_positions, "distinct": positions.unique().numel(),
        "neox": is_neox_style, "cast_cache": cast_cache, "packed": query.stride(0) != width,
        **optional(
            round_products=round_products, by_head=query.dim() == 3,
            cache=unless(dtype_name(cos_sin_cache.dtype), dtype_name(query.dtype)),
            positions=unless(dtype_name(positions.dtype), "int64"),
        ),
    }  # fmt: skip


def vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        new = drawn(case, rng, ("tokens", "heads"), ("head_size", "rotary_dim", "max_positions"))
        size = max(new["head_size"] // 2 * 2, 2)
        partial = max(min(new.get("rotary_dim", size), size) // 2 * 2, 2)
        whole = case.dims.get("rotary_dim", case.dims["head_size"]) == case.dims["head_size"]
        heads = near(case.dims["kv_heads"], rng) if case.dims["kv_heads"] else 0
        return {
            **new, "head_size": size, "rotary_dim": size if whole else partial, "kv_heads": heads, "distinct": None
        }  # fmt: skip

    return varied(case, draw, bytes_moved, flops)


def build(cls: type, args: list[Any]) -> Callable[[], Any]:
    positions, query, key, head_size, table, neox, cast_cache, round_products = assemble.filled(
        args, 8, True, False
    )
    # vLLM rounds the table and not the products; SGLang does both on the CPU and neither on a GPU.
    sglang = assemble.takes(cls.forward, "offsets")  # type: ignore[attr-defined]
    casts, rounds = (query.device.type == "cpu",) * 2 if sglang else (True, False)
    exact = query.dtype == torch.float32  # which the products are in anyway
    if (casts != cast_cache and table.dtype != query.dtype) or (rounds != round_products and not exact):
        raise ValueError(
            f"{cls.__name__} has cast_cache={casts}, round_products={rounds} on {query.device.type}, not"
            f" {cast_cache}, {round_products}"
        )
    scaling = (8.0, 1.0, 4.0, 64) if assemble.takes(cls, "scaling_factor") else ()  # the table is given
    sizes = head_size, table.shape[1], table.shape[0], 10000
    module = assemble.make(cls, table, *sizes, neox, query.dtype, *scaling)
    assemble.load(module, {"cos_sin_cache": table})
    return partial(module, positions, query, key)


def _first(args: list[Any]) -> None:
    args[0].zero_()


def _last(args: list[Any]) -> None:
    args[0].fill_(args[4].shape[0] - 1)


EXTREMES = {"first_position": _first, "last_position": _last}
