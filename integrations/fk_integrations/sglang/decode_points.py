"""Decode attention of SGLang as a patch measures it: against SGLang's own kernel, on the engine's own KV pool.

An engine leaves little free memory, and a batch of long sequences with many key heads reads several GB. The pool is
only read. Results are compared on a small cache of random values, since a new pool holds zeros.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fastkernels.core import registry
from fastkernels.core.case import Case
from fastkernels.core.dispatch import Provider
from fastkernels.verify.measure import Calls, Point, case_of, leave_room, several
from fk_integrations.sglang import attention

CHECKED_KEYS = 1 << 13  # of all sequences together, on which results are compared


def host_kernel(runner: Any) -> Provider | None:
    """SGLang's decode kernel as a provider; None for other backends than FlashAttention."""
    known = attention.known_backends(runner)
    flash = [b for b in known if attention.is_flash(b)]
    if not flash or len(flash) < len(known):
        return None
    return Provider("fa3", _flash(flash[0]), devices=("cuda",))


def _flash(backend: Any) -> Any:
    """FlashAttention-3 as SGLang's backend calls it in a decode graph: with a plan that is made once a step."""
    run = sys.modules[type(backend).__module__].flash_attn_with_kvcache  # type: ignore[attr-defined]
    plans = WeakIdKeyDictionary()  # {lengths: (starts of the queries, the plan)}
    heads = backend.num_attention_heads, backend.num_kv_heads, backend.head_dim
    static = getattr(backend, "_decode_uses_static_max_seqlen_k", False)

    def decode(
        q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: torch.Tensor,
        block_table: torch.Tensor, max_seqlen_k: int, scale: float, window_left: int = -1, softcap: float = 0.0,
        *rest: Any,
    ) -> torch.Tensor:  # fmt: skip
        batch = q.shape[0]
        if seq_lens not in plans:  # in the call before the capture
            starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
            planned = (q.shape[1], key_cache.shape[2], q.shape[2]) == heads and window_left < 0
            longest = block_table.shape[1] * key_cache.shape[1]  # as the kernel derives it
            plan = backend._compute_scheduler_metadata(batch, longest, seq_lens, starts) if planned else None
            plans[seq_lens] = starts, plan
        starts, plan = plans[seq_lens]
        splits = getattr(backend, "decode_num_splits", backend.num_splits)
        found: torch.Tensor = run(
            q=q, k_cache=key_cache, v_cache=value_cache, page_table=block_table, cache_seqlens=seq_lens,
            cu_seqlens_q=starts, max_seqlen_q=1, softmax_scale=scale, causal=True,
            window_size=(window_left, 0) if window_left >= 0 else (-1, -1), softcap=softcap,
            num_splits=splits if window_left < 0 else backend.num_splits, ver=backend.fa_impl_ver,
            scheduler_metadata=plan, **({"max_seqlen_k": max_seqlen_k} if static else {}),
        )  # fmt: skip
        return found

    return decode


def calls_on(runner: Any) -> Calls:
    """See measure.Live.calls."""

    def calls(
        point: Point, device: torch.device, generator: torch.Generator, cold_bytes: int
    ) -> tuple[list[Any], list[list[Any]]] | None:
        return _calls(runner, point, device, generator, cold_bytes)

    return calls


def _calls(
    runner: Any, point: Point, device: torch.device, generator: torch.Generator, cold_bytes: int
) -> tuple[list[Any], list[list[Any]]] | None:
    known = attention.known_backends(runner)
    if not known or not point.modules:
        return None
    pool = known[0].token_to_kv_pool
    block, (batch, context) = point.shape[3], point.sizes
    spec = registry.get(point.op)
    key = spec.op.key
    dims = dict(case_of(point).dims)
    keys, pages = dims["seq_lens"][0], _slots(pool) // block
    needed = batch * -(-keys // block)  # pages
    layers = _layers(point, pool)
    page_bytes = sum(t[0].numel() * t.element_size() for t in pool.get_kv_buffer(layers[0].layer_id)) * block
    if pages < 1 or min(pages, needed) * page_bytes * len(layers) < min(cold_bytes, needed * page_bytes):
        return None
    dims["seq_lens"] = [min(keys, max(CHECKED_KEYS // batch, block))] * batch
    case = Case("verified", dims, str(point.named()[0]["dtype"]))
    columns = -(-context // block)  # of the page table of a graph
    leave_room(device, spec.bytes_moved(case) + 12 * batch * columns)
    where = device.type if device.index is None else str(device)
    check = key.own(layers[0], spec.inputs(case, where, generator))
    check[4] = torch.nn.functional.pad(check[4][:, :columns], (0, max(columns - check[4].shape[1], 0)))
    if not cold_bytes:
        return check, [check]
    lengths = torch.full_like(check[3], keys)
    order = torch.randperm(max(needed, pages), generator=generator, device=device)[:needed] % pages
    table = torch.zeros(batch, columns, dtype=torch.int32, device=device)
    table[:, : needed // batch] = order.view(batch, -1)
    read = needed * page_bytes
    count = several(cold_bytes, read)
    shape = (pages, block, *point.shape[1:3])
    made = []
    for i in range(count):
        caches = pool.get_kv_buffer(layers[i % len(layers)].layer_id)
        own = (t[: pages * block].view(shape) for t in caches)
        made.append([check[0], *own, lengths, table, *check[5:]])
    return check, made


def _layers(point: Point, pool: Any) -> list[Any]:
    """The point's layers that have memory of their own: some share the keys of another layer."""
    memory = {pool.get_kv_buffer(layer.layer_id)[0].data_ptr(): layer for layer in reversed(point.modules)}
    return list(memory.values())[::-1]


def _slots(pool: Any) -> int:
    """Slots of each layer that have memory: a pool that is sized after the capture has only addresses before."""
    keys, values = pool.k_buffer, pool.v_buffer
    slots = int(min(keys[0].shape[0], values[0].shape[0], pool.size + pool.page_size))
    if getattr(pool, "post_capture_active", False):
        row = keys[0][0].numel() * keys[0].element_size()
        slots = min(slots, int(pool.post_capture_backed_bytes) // (len(keys) + len(values)) // row)
    return slots
