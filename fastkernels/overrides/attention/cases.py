"""Axes, values and cases that the attention ops share: a batch of sequences over a paged KV cache.

Axes of a case:
  seq_lens, q_lens        keys and queries of each sequence; one query each where the op has no q_lens
  heads, kv_heads, head_size, block_size
  blocks, max_blocks      of the cache, and columns of the block table; by default a few more than are needed
  window_left, softcap, scale, scales (of keys and values)
  max_seqlen_q, max_seqlen_k, padding (queries past the last sequence)   where a host pads a batch
  queries                 the dtype of the queries and sinks, where the cache is fp8
  kv_tokens               cached tokens that are read, counted: a prefix that sequences share is read once
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core.case import TOLERANCE as USUAL
from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor, uniform
from fastkernels.core.expressions import Expr
from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.core.shapes import near, near_size, unless

FP8 = torch.float8_e4m3fn
TOLERANCE = {**USUAL, "float8_e4m3fn": Tolerance(2e-3, 2e-3)}  # with an fp8 cache q and out are float16


# -- what follows from the lengths; `d` has the axes of a case


def lengths(d: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (queries, keys) of each sequence."""
    return list(zip(d.get("q_lens", [1] * len(d["seq_lens"])), d["seq_lens"], strict=True))


def pairs(d: Mapping[str, Any]) -> int:
    """Count the (query, key) pairs that the causal mask and the window let through."""
    window = d.get("window_left", -1)
    total = 0
    for n, k in lengths(d):
        first = k - n + 1  # keys that the first query sees without the window
        if window < 0 or k <= window + 1:
            total += (max(first, 0) + k) * (k - max(first, 0) + 1) // 2 if n else 0
        else:
            total += sum(min(seen, window + 1) for seen in range(max(first, 0), k + 1)) if n else 0
    return total


def keys_read(d: Mapping[str, Any]) -> int:
    """Count the cached tokens that are read, each once."""
    window = d.get("window_left", -1)
    read = sum((k if window < 0 else min(k, n + window)) if n else 0 for n, k in lengths(d))
    return min(read, d.get("kv_tokens", read))


def _blocks_of(d: Mapping[str, Any]) -> list[int]:
    return [-(-n // d["block_size"]) for n in d["seq_lens"]]


def _max_blocks(d: Mapping[str, Any]) -> int:
    return max(*_blocks_of(d), 1) + 1 if d["seq_lens"] else 1


def _seen(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Which of 31 keys before its own each query sees; it sees itself and the keys before these."""
    below = (call.rand(*shape) * 2**31).to(dtype)
    return (below << 1) | (-1 << 32) | 1


# -- the declaration

CACHE_SHAPE = "blocks block_size kv_heads head_size"
CACHE = (
    Tensor("key_cache", CACHE_SHAPE, bytes="keys_read * kv_heads * head_size * itemsize(dtype)"),
    Tensor("value_cache", CACHE_SHAPE, bytes="keys_read * kv_heads * head_size * itemsize(dtype)"),
)
SEQ_LENS = Tensor("seq_lens", "sequences", "int32", bytes="0")
BLOCK_TABLE = Tensor("block_table", "sequences max_blocks", "int32", bytes="0")
# A step's sequences, in the order of AttentionMetadata: the last arguments of layers
STEP = (
    Tensor("slot_mapping", "tokens", "int64", bytes="0"),
    Tensor("cu_seqlens_q", "sequences+1", "int32", bytes="0"),
    SEQ_LENS,
    BLOCK_TABLE,
    Scalar("max_seqlen_q"),
    Scalar("max_seqlen_k"),
)
SCALARS = (
    Scalar("scale"),
    Scalar("window_left", default=-1),
    Scalar("softcap", default=0.0),
    Scalar("k_scale", dim="scales", index=0),
    Scalar("v_scale", dim="scales", index=1),
)
ALIBI = Tensor("alibi_slopes", "heads", "float32", when="alibi", values=uniform(0.0, 0.5))
TREE = Tensor("tree", "tokens", "int64", when="tree", values=_seen)
SINKS = Tensor("sinks", "heads", "queries", when="sinks")  # a weight, in the dtype of the model
FLOPS = "4 * pairs * heads * head_size"


def _drawn_lengths(lens: Sequence[int], rng: random.Random) -> list[int]:
    """Return other sequences with about as many keys in all."""
    parts = [rng.uniform(0.3, 1.0) for _ in range(near(len(lens), rng))]
    total = near(sum(lens), rng)
    keys = [max(int(total * part / sum(parts)), 1) for part in parts]
    if 0 in lens and len(keys) > 1:
        keys[rng.randrange(len(keys))] = 0
    return keys


def _drawn_head_size(size: int, rng: random.Random) -> int:
    return rng.choice((64, 128)) if size in (64, 128) else near_size(size, rng)


def _drawn_block_size(size: int, rng: random.Random) -> int:
    return rng.choice((16, 32, 64)) if size % 16 == 0 else near(size, rng)


def _shared(a: SimpleNamespace) -> int | None:
    """Count the cached tokens that are read, None if every sequence has its own."""
    cache = a.key_cache if hasattr(a, "key_cache") else a.kv_cache
    return _counted(a.seq_lens.tolist(), a.block_table, cache.shape[1])


def _counted(lens: list[int], block_table: torch.Tensor, block_size: int) -> int | None:
    used: dict[int, int] = {}
    for row, n in zip(block_table.tolist(), lens, strict=True):
        for i in range(-(-n // block_size)):
            used[row[i]] = max(used.get(row[i], 0), min(n - i * block_size, block_size))
    return unless(sum(used.values()), sum(lens))


def _padding(a: SimpleNamespace) -> int:
    queries = a.q if hasattr(a, "q") else a.query
    return len(queries) - int(a.cu_seqlens_q[-1])


AXES: dict[str, Axis] = {
    "seq_lens": Axis.per_call(draw=_drawn_lengths, read=lambda a: a.seq_lens.tolist()),
    "heads": Axis.count(),
    "kv_heads": Axis.count(),
    "head_size": Axis.width(draw=_drawn_head_size),
    "block_size": Axis.count(draw=_drawn_block_size),
    "blocks": Axis(lambda s: sum(_blocks_of(s)) + 2, stated=True),
    "max_blocks": Axis(_max_blocks, stated=True),
    "queries": Axis.dtype(Expr("'float16' if dtype == 'float8_e4m3fn' else dtype")),
    "kv_tokens": Axis.counted(_shared, Expr("sum(seq_lens)")),
    "scale": Axis(Expr("head_size ** -0.5")),
    "scales": Axis.option((1.0, 1.0)),
    "max_seqlen_k": Axis.count(lambda s: max(s["seq_lens"], default=0), stated=True),
    "sequences": Axis(Expr("len(seq_lens)"), varies=True),
    "keys_read": Axis(keys_read, varies=True),
    "pairs": Axis(pairs, varies=True),
}
# Those of ops with several queries a sequence
RAGGED: dict[str, Axis] = {
    "q_lens": Axis.per_call(read=lambda a: a.cu_seqlens_q.diff().tolist()),
    "max_seqlen_q": Axis.count(lambda s: max(s["q_lens"], default=0), stated=True),
    "padding": Axis.option(0, read=_padding),
    "tokens": Axis(Expr("sum(q_lens) + padding"), varies=True),
    "attended": Axis(Expr("sum(q_lens)"), varies=True),
}


# -- values


def block_tables(
    d: Mapping[str, Any], device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return seq_lens [B] and a block table [B, max_blocks] that scatters the sequences over the cache."""
    lens, n_blocks = d["seq_lens"], _blocks_of(d)
    blocks = d.get("blocks", sum(n_blocks) + 2)
    order = torch.randperm(blocks, generator=generator, device=device).to(torch.int32)
    count = torch.tensor(n_blocks, dtype=torch.int64, device=device)[:, None]
    column = torch.arange(d.get("max_blocks", _max_blocks(d)), device=device)
    at = count.cumsum(0) - count + column  # [B, max_blocks]; with fewer blocks, sequences share some
    table = (
        torch.where(column < count, order[at % blocks], 0)
        if blocks
        else torch.zeros_like(at, dtype=torch.int32)
    )
    return torch.tensor(lens, dtype=torch.int32, device=device), table


def values(call: Call) -> dict[str, torch.Tensor]:
    """Return the tensors of integers; those of a ragged batch where the op has q_lens."""
    d = call.sizes
    seq_lens, table = block_tables(d, call.device, call.generator)
    found = {"seq_lens": seq_lens, "block_table": table}
    if "q_lens" in d.axes:
        _, slots, starts = ragged(d, table)
        found |= {"slot_mapping": slots, "cu_seqlens_q": starts}
    return found


def ragged(d: Mapping[str, Any], table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions [T], slot_mapping [T] and cu_seqlens_q [B + 1] of a step; padding has position 0 and slot -1."""
    device, size = table.device, d["block_size"]
    positions = [torch.arange(k - n, k, device=device) for n, k in lengths(d)]
    slots = [table[i].long()[at // size] * size + at % size for i, at in enumerate(positions)]
    nowhere = torch.full((d.get("padding", 0),), -1, device=device)
    starts = torch.tensor([0, *d["q_lens"]], device=device).cumsum(0).to(torch.int32)
    return torch.cat((*positions, nowhere.clamp_min(0))), torch.cat((*slots, nowhere)), starts


def huge_key(args: list[Any]) -> None:
    args[1][:1, :1] = (args[1][:1, :1].float() * 32).to(args[1].dtype)


def equal_keys(args: list[Any]) -> None:
    args[1].copy_(args[1][:1, :1].clone().expand_as(args[1]))


EXTREMES = {"huge_key": huge_key, "equal_keys": equal_keys}


def draw_batch(case: Case, rng: random.Random) -> dict[str, Any]:
    """Draw other sequences with about as many keys in all.

    They are whole prompts, or have one query each, where the case's do. Dims that only captured cases have are None.
    """
    d, lens = case.dims, list(case.dims["seq_lens"])
    keys = _drawn_lengths(lens, rng)
    group, kv_heads = d["heads"] // d["kv_heads"], near(d["kv_heads"], rng)
    new: dict[str, Any] = {
        "seq_lens": keys, "kv_heads": kv_heads, "heads": kv_heads * (near(group, rng) if group > 1 else 1),
        "head_size": _drawn_head_size(d["head_size"], rng), "block_size": _drawn_block_size(d["block_size"], rng),
    }  # fmt: skip
    q_lens = list(d.get("q_lens", []))
    if "q_lens" in d and q_lens == lens:
        new["q_lens"] = keys
    elif "q_lens" in d:
        most = 1 if set(q_lens) <= {1} else max(keys)
        new["q_lens"] = [rng.randint(1, min(n, most)) if n else 0 for n in keys]
    if d.get("max_seqlen_k", 0) > max(lens, default=0):  # as where a CUDA graph covers longer sequences
        new["max_seqlen_k"] = max(keys) + near(d["max_seqlen_k"] - max(lens, default=0), rng)
    return {**{name: None for name in _CAPTURED if name in d}, **new}


_CAPTURED = ("blocks", "max_blocks", "kv_tokens", "max_seqlen_q", "max_seqlen_k", "padding", "scale")


# -- for the layers around attention


def make_step(
    case: Case, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Make query [T, Hq, D], positions [T], and a step.

    The step is key_cache, value_cache, slot_mapping, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k.
    """
    d, dtype = case.dims, getattr(torch, case.dtype)
    queries = getattr(torch, d.get("queries", "float16")) if dtype == FP8 else dtype

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).to(queries)

    seq_lens, table = block_tables(d, device, generator)
    positions, slots, starts = ragged(d, table)
    query = randn(len(positions), d["heads"], d["head_size"])
    blocks = d.get("blocks", sum(_blocks_of(d)) + 2)
    caches = [randn(blocks, d["block_size"], d["kv_heads"], d["head_size"]).to(dtype) for _ in range(2)]
    longest = [
        d.get(f"max_{n}", max(d[v], default=0)) for n, v in (("seqlen_q", "q_lens"), ("seqlen_k", "seq_lens"))
    ]
    return query, positions, [*caches, slots, starts, seq_lens, table, *longest]


def bytes_moved(case: Case) -> int:
    """Count the bytes of queries, cached keys and values, and the result."""
    d, size = case.dims, getattr(torch, case.dtype).itemsize
    queries = max(size, 2) * sum(n for n, _ in lengths(d)) * d["heads"]  # not fp8 where the cache is
    return 2 * d["head_size"] * (queries + size * keys_read(d) * d["kv_heads"])


def flops(case: Case) -> int:
    return 4 * pairs(case.dims) * case.dims["heads"] * case.dims["head_size"]


def metadata(step: Sequence[Any], padded: bool = True) -> AttentionMetadata:
    _, _, slots, starts, seq_lens, table, max_q, max_k = step
    return AttentionMetadata(slots, starts, seq_lens, table, max_q, max_k, padded=padded)
