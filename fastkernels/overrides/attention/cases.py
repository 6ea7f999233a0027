"""The calls of the attention ops, for their SPECs: a batch over a paged KV cache, its cost, the case of real arguments.

dims of a case
  seq_lens, q_lens        keys and queries of each sequence; without q_lens one query each
  heads, kv_heads, head_size, block_size
  blocks, max_blocks      of the cache, and columns of the block table: as many as are needed and a few more
  window_left, softcap, scale, scales (of keys and values)
  max_seqlen_q, max_seqlen_k, padding (queries behind the last sequence's): where a host pads a batch
  queries                 their dtype, where the cache is fp8
  kv_tokens               cached tokens that are read, where sequences share a prefix
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.core.shapes import dtype_name, near, near_size, optional, unless, varied
from fastkernels.core.spec import TOLERANCE as USUAL
from fastkernels.core.spec import Case, Tolerance

FP8 = torch.float8_e4m3fn
TOLERANCE = {**USUAL, "float8_e4m3fn": Tolerance(2e-3, 2e-3)}  # with an fp8 cache q and out are float16


def make_batch(case: Case, device: str, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """q, key_cache, value_cache, seq_lens, block_table."""
    d, dtype = case.dims, getattr(torch, case.dtype)
    cache_dtype, dtype = dtype, getattr(torch, d.get("queries", "float16")) if dtype == FP8 else dtype
    block_size, lens = d["block_size"], d["seq_lens"]
    n_blocks = [-(-n // block_size) for n in lens]
    shape = (d.get("blocks", sum(n_blocks) + 2), block_size, d["kv_heads"], d["head_size"])

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    order = torch.randperm(shape[0], generator=generator, device=device).to(torch.int32)
    width = d.get("max_blocks", max(*n_blocks, 1) + 1 if n_blocks else 1)
    table = torch.zeros(len(lens), width, dtype=torch.int32, device=device)
    # With fewer blocks, sequences share some
    at = torch.arange(sum(n_blocks), device=device) % max(shape[0], 1)
    for i, n in enumerate(n_blocks):
        table[i, :n] = order[at[sum(n_blocks[:i]) : sum(n_blocks[: i + 1])]]
    q = randn(sum(d.get("q_lens", [1] * len(lens))) + d.get("padding", 0), d["heads"], d["head_size"])
    caches = [randn(*shape).to(cache_dtype) for _ in range(2)]
    return q, *caches, torch.tensor(lens, dtype=torch.int32, device=device), table


def scalars(case: Case) -> list[Any]:
    """scale, window_left, softcap and, where given, k_scale and v_scale."""
    d = case.dims
    scale = d.get("scale", d["head_size"] ** -0.5)
    return [scale, d.get("window_left", -1), d.get("softcap", 0.0), *d.get("scales", ())]


def _lengths(case: Case) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence."""
    d = case.dims
    return list(zip(d.get("q_lens", [1] * len(d["seq_lens"])), d["seq_lens"], strict=True))


def pairs(case: Case) -> int:
    """(query, key) pairs that the causal mask and the window let through."""
    window = case.dims.get("window_left", -1)
    total = 0
    for n, k in _lengths(case):
        first = k - n + 1  # keys that the first query sees without the window
        if window < 0 or k <= window + 1:
            total += (max(first, 0) + k) * (k - max(first, 0) + 1) // 2 if n else 0
        else:
            total += sum(min(seen, window + 1) for seen in range(max(first, 0), k + 1)) if n else 0
    return total


def bytes_moved(case: Case) -> int:
    d = case.dims
    size, window = getattr(torch, case.dtype).itemsize, d.get("window_left", -1)
    read = sum((k if window < 0 else min(k, n + window)) if n else 0 for n, k in _lengths(case))
    read = min(read, d.get("kv_tokens", read))
    # They are not fp8 where the cache is
    queries = max(size, 2) * sum(n for n, _ in _lengths(case)) * d["heads"]
    return 2 * d["head_size"] * (queries + size * read * d["kv_heads"])


def flops(case: Case) -> int:
    return 4 * pairs(case) * case.dims["heads"] * case.dims["head_size"]


def cache_dims(
    heads: int, dtype: torch.dtype, key_cache: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
) -> dict[str, Any]:
    """The dims of make_batch but q_lens, for queries of so many heads and this dtype."""
    blocks, block_size, kv_heads, head_size = key_cache.shape
    lens = seq_lens.tolist()
    return {
        "seq_lens": lens, "heads": heads, "kv_heads": kv_heads, "head_size": head_size, "block_size": block_size,
        "blocks": blocks, "max_blocks": block_table.shape[1],
        **optional(
            kv_tokens=_shared(lens, block_table, block_size),
            queries=unless(dtype_name(dtype), "float16") if key_cache.dtype == FP8 else None,
        ),
    }  # fmt: skip


def scalar_dims(
    head_size: int, scale: float, window_left: int, softcap: float, k_scale: float, v_scale: float
) -> dict[str, Any]:
    """The dims of `scalars`."""
    return optional(
        scale=unless(scale, head_size**-0.5), window_left=unless(window_left, -1), softcap=unless(softcap, 0.0),
        scales=unless((k_scale, v_scale), (1.0, 1.0)),
    )  # fmt: skip


def _shared(lens: list[int], block_table: torch.Tensor, block_size: int) -> int | None:
    """Cached tokens that are read, None if every sequence has its own."""
    used: dict[int, int] = {}
    for row, n in zip(block_table.tolist(), lens, strict=True):
        for i in range(-(-n // block_size)):
            used[row[i]] = max(used.get(row[i], 0), min(n - i * block_size, block_size))
    return unless(sum(used.values()), sum(lens))


def vary(case: Case, rng: random.Random) -> Case:
    return varied(case, lambda: draw_batch(case, rng), bytes_moved, flops)


def draw_batch(case: Case, rng: random.Random) -> dict[str, Any]:
    """Other sequences with about as many keys in all; whole prompts, or one query each, where the case has that."""
    d, lens = case.dims, list(case.dims["seq_lens"])
    parts = [rng.uniform(0.3, 1.0) for _ in range(near(len(lens), rng))]
    total = near(sum(lens), rng)
    keys = [max(int(total * part / sum(parts)), 1) for part in parts]
    if 0 in lens and len(keys) > 1:
        keys[rng.randrange(len(keys))] = 0
    group, kv_heads = d["heads"] // d["kv_heads"], near(d["kv_heads"], rng)
    new: dict[str, Any] = {
        "seq_lens": keys, "kv_heads": kv_heads, "heads": kv_heads * (near(group, rng) if group > 1 else 1),
        "head_size": rng.choice((64, 128)) if d["head_size"] in (64, 128) else near_size(d["head_size"], rng),
        "block_size": rng.choice((16, 32, 64)) if d["block_size"] % 16 == 0 else near(d["block_size"], rng),
    }  # fmt: skip
    q_lens = list(d.get("q_lens", []))
    if "q_lens" in d and q_lens == lens:
        new["q_lens"] = keys
    elif "q_lens" in d:
        most = 1 if set(q_lens) <= {1} else max(keys)
        new["q_lens"] = [rng.randint(1, min(n, most)) if n else 0 for n in keys]
    if d.get("max_seqlen_k", 0) > max(lens, default=0):  # as where a CUDA graph is for the longest sequences
        new["max_seqlen_k"] = max(keys) + near(d["max_seqlen_k"] - max(lens, default=0), rng)
    return {**{name: None for name in _OF_A_HOST if name in d}, **new}


# What a captured case has and another batch has not.
_OF_A_HOST = ("blocks", "max_blocks", "kv_tokens", "max_seqlen_q", "max_seqlen_k", "padding", "scale")


def _huge_key(args: list[Any]) -> None:
    args[1][:1, :1] = (args[1][:1, :1].float() * 32).to(args[1].dtype)


def _equal_keys(args: list[Any]) -> None:
    args[1].copy_(args[1][:1, :1].clone().expand_as(args[1]))


EXTREMES = {"huge_key": _huge_key, "equal_keys": _equal_keys}


def make_step(
    case: Case, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """query [T, Hq, D], positions [T], and the step: key_cache, value_cache, slot_mapping, cu_seqlens_q, seq_lens,
    block_table, max_seqlen_q, max_seqlen_k; for dims as in attention_prefill.
    """
    d = case.dims
    q, key_cache, value_cache, seq_lens, table = make_batch(case, device, generator)
    block_size, q_lens, lens = key_cache.shape[1], d["q_lens"], d["seq_lens"]
    starts = torch.tensor([0, *q_lens], device=device).cumsum(0).to(torch.int32)
    positions = [torch.arange(k - n, k, device=device) for n, k in zip(q_lens, lens, strict=True)]
    slots = [
        table[i].long()[at // block_size] * block_size + at % block_size for i, at in enumerate(positions)
    ]
    nowhere = torch.full((d.get("padding", 0),), -1, device=device)
    longest = [d.get(f"max_seqlen_{k}", max(v, default=0)) for k, v in (("q", q_lens), ("k", lens))]
    step = [key_cache, value_cache, torch.cat((*slots, nowhere)), starts, seq_lens, table, *longest]
    return q, torch.cat((*positions, nowhere.clamp_min(0))), step


def step_dims(heads: int, dtype: torch.dtype, step: Sequence[Any], tokens: int) -> dict[str, Any]:
    """The dims that make_step reads, of a step of so many query heads and tokens."""
    key_cache, _, _, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k = step
    q_lens = cu_seqlens_q.diff().tolist()
    found = cache_dims(heads, dtype, key_cache, seq_lens, block_table)
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    padding = {"padding": tokens - sum(q_lens)} if tokens > sum(q_lens) else {}
    return {"q_lens": q_lens, **found, **longest, **padding}


def stored_bytes(case: Case) -> int:
    """What storing the step's keys and values reads and writes."""
    d, size = case.dims, getattr(torch, case.dtype).itemsize
    return 2 * sum(d["q_lens"]) * d["kv_heads"] * d["head_size"] * (size + max(size, 2))


def metadata(step: Sequence[Any], padded: bool = True) -> AttentionMetadata:
    _, _, slots, starts, seq_lens, table, max_q, max_k = step
    return AttentionMetadata(slots, starts, seq_lens, table, max_q, max_k, padded=padded)
