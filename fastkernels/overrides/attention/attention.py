"""Causal attention over a paged KV cache: store this step's keys and values, then attend to the whole sequence."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from fastkernels.core import assemble, registry
from fastkernels.core.case import Case
from fastkernels.core.declaration import Scalar, Tensor
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.core.layer_state import KVSpec
from fastkernels.core.shapes import varied
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.attention import attention_prefill, cases
from fastkernels.overrides.attention.attention_decode import attention_decode
from fastkernels.overrides.cache.store_kvcache import store_kvcache


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    padded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query: [T, Hq, D]; key, value: [T, Hkv, D]; the rest as in store_kvcache and attention_prefill.

    Returns (out [T, Hq, D], new key_cache, new value_cache).
    """
    store = registry.get("store_kvcache").reference
    key_cache, value_cache = store(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    out = attention_prefill.reference(
        query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k, scale,
        window_left, softcap, k_scale, v_scale, padded,
    )  # fmt: skip
    return out, key_cache, value_cache


class AttentionType(str, Enum):
    """The hosts' kinds of attention; only DECODER (causal, with a KV cache) is supported."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class PagedAttention(nn.Module):
    """Attention over this rank's heads. The engine binds `kv_cache` = (key_cache, value_cache) before a step.

    key_cache, value_cache: [blocks, block_size, num_kv_heads, head_size]; with an fp8 cache, a key is the stored value
    times k_scale, a value the stored value times v_scale. The step's AttentionMetadata comes from forward_context; its
    backend attends, or the ops where it has none. Layers of another kv_group have block tables of their own. sinks:
    [num_heads], the logit of one more key of each head, whose value is 0. alibi_slopes: [num_heads] float32, of ALiBi.
    """

    kv_cache: tuple[torch.Tensor, torch.Tensor] | None
    kv_group = 0
    kept_behind = 0  # keys behind the window that the engine keeps, too
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    def _build(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None,
        window: int | None,
        cap: float,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"{num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        # A vLLM window counts the token itself, an SGLang window and window_left do not.
        self.window_left, self.softcap = -1 if window is None else window, cap
        self.kv_cache = None
        self.k_scale = self.v_scale = 1.0

    @property
    def keeps(self) -> KVSpec:
        """Declare keys and values as the layer's data of a sequence."""
        return KVSpec(None if self.window_left < 0 else self.window_left + 1 + self.kept_behind)

    def cache_shapes(self, blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors of `kv_cache`."""
        shape = (blocks, block_size, self.num_kv_heads, self.head_size)
        return shape, shape

    def new_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, ...]:
        """Return zeros for `kv_cache`, whose keys and values are in this dtype."""
        shapes = self.cache_shapes(blocks, block_size)
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """query, key, value: [T, heads * head_size] or [T, heads, head_size]. Returns [T, heads * head_size]."""
        if self.kv_cache is None:
            raise RuntimeError(
                "no KV cache is bound: set kv_cache = (key_cache, value_cache) on every attention layer"
            )
        key_cache, value_cache = self.kv_cache
        metadata = metadata.of(self)
        q = query.view(-1, self.num_heads, self.head_size)
        k = None if key is None else key.view(-1, self.num_kv_heads, self.head_size)
        v = None if value is None else value.view(-1, self.num_kv_heads, self.head_size)
        if metadata.backend is not None and self.alibi_slopes is None:  # the ops have ALiBi
            return metadata.backend.forward(self, q, k, v, metadata).view(-1, self.num_heads * self.head_size)
        sinks: tuple[Any, ...] = () if self.sinks is None else (self.sinks,)  # not every candidate takes them
        if self.alibi_slopes is not None:
            sinks = self.sinks, self.alibi_slopes
        if k is not None and v is not None:
            store_kvcache(k, v, key_cache, value_cache, metadata.slot_mapping, self.k_scale, self.v_scale)
        if metadata.decode_only:
            out = attention_decode(
                q, key_cache, value_cache, metadata.seq_lens, metadata.block_table, metadata.max_seqlen_k,
                self.scale, self.window_left, self.softcap, self.k_scale, self.v_scale, *sinks,
            )  # fmt: skip
        else:
            out = attention_prefill.attention_prefill(
                q, key_cache, value_cache, metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_table,
                metadata.max_seqlen_q, metadata.max_seqlen_k, self.scale, self.window_left, self.softcap,
                self.k_scale, self.v_scale, metadata.padded, *sinks,
            )  # fmt: skip
        return out.view(-1, self.num_heads * self.head_size)


def refuse(what: str, **given: Any) -> None:
    """Raise ValueError for the first argument that is set: no kernel of ours supports it."""
    for name, value in given.items():
        if value:
            raise ValueError(
                f"{what}: {name}={value!r} is not supported; leave it out or use the host's own layer"
            )


def explicitly_requested() -> bool:
    """Return whether one of these ops is requested by name, so that no step of a live host is left to the host."""
    return any(
        op.requested == "named"
        for op in (attention_decode, attention_prefill.attention_prefill, store_kvcache)
    )


def _decode(
    name: str, seq_lens: list[int], tags: tuple[str, ...], weight: float, dtype: str = "bfloat16", **dims: int
) -> Case:
    shape = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16, **dims}
    return Case(name, {"q_lens": [1] * len(seq_lens), "seq_lens": seq_lens, **shape}, dtype, weight, tags)


_SCALARS = (-1, 0.0, 1.0, 1.0, True)  # defaults of the arguments after scale


def _huge_key(args: list[Any]) -> None:
    args[1][:1].mul_(32)


def _equal_keys(args: list[Any]) -> None:
    for keys in (args[1], args[3]):
        keys.copy_(args[1][:1].clone().expand_as(keys))


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    query, key, value, *step = args[:11]
    scale, window_left, softcap, k_scale, v_scale, padded = assemble.filled(args[11:], 6, *_SCALARS)
    _, heads, size = query.shape
    if assemble.takes(cls, "per_layer_sliding_window"):
        window = None if window_left < 0 else window_left + 1
        layer = cls(
            heads, size, scale, key.shape[1], logits_soft_cap=softcap or None, per_layer_sliding_window=window
        )  # fmt: skip
        batch: tuple[Any, ...] = ()
    else:
        window = window_left if window_left > 0 else -1
        assemble.refuse(cls, window_left=0 if window_left == 0 else None)
        layer = cls(heads, size, scale, key.shape[1], 0, logit_cap=softcap, sliding_window_size=window)
        batch = (None,)
    layer.kv_cache, layer.k_scale, layer.v_scale = (step[0], step[1]), k_scale, v_scale
    context = cases.metadata(step, padded)

    def call() -> tuple[torch.Tensor, ...]:
        flat = [t.flatten(1) for t in (query, key, value)]  # copies, if rows are apart
        with forward_context(context):
            return layer(*flat, *batch).view(query.shape), step[0], step[1]

    return call


_STORED = "attended * kv_heads * head_size"


def _vary(case: Case, rng: random.Random) -> Case:
    return varied(case, lambda: cases.draw_batch(case, rng), SPEC.bytes_moved, SPEC.flops)


SPEC = OpSpec(
    name="attention",
    level=2,
    reference=reference,
    cases=(
        *(
            case
            for case in attention_prefill.SPEC.cases
            if case.dtype != "float8_e4m3fn" and not {"sinks", "alibi", "tree"} & case.dims.keys()
        ),
        _decode("decode_1", [4096], ("model",), 32),
        _decode("decode_32", [1024] * 32, ("model",), 32),
        _decode(
            "decode_odd", [70, 3, 19], ("odd",), 1, "float32", heads=6, kv_heads=2, head_size=40, block_size=5
        ),
    ),
    arguments=(
        Tensor(
            "query",
            "tokens heads head_size",
            "queries",
            bytes="attended * heads * head_size * itemsize(queries)",
        ),
        Tensor("key", "tokens kv_heads head_size", "queries", bytes=f"{_STORED} * itemsize(queries)"),
        Tensor("value", "tokens kv_heads head_size", "queries", bytes=f"{_STORED} * itemsize(queries)"),
        *(
            replace(cache, mutated=True, bytes=f"{cache.bytes} + {_STORED} * itemsize(dtype)")
            for cache in cases.CACHE
        ),
        *cases.STEP,
        *cases.SCALARS,
        Scalar("padded", value="padding > 0"),
    ),
    outputs=(
        Tensor(
            "out",
            "tokens heads head_size",
            "queries",
            bytes="attended * heads * head_size * itemsize(queries)",
        ),
    ),
    axes={**cases.AXES, **cases.RAGGED},
    values=cases.values,
    flops=cases.FLOPS,
    vary=_vary,
    extremes={"huge_key": _huge_key, "equal_keys": _equal_keys},
    activations=("value", "value_cache"),  # the result is linear in the values
    contained="query",
    build=_build,
    tolerance=attention_prefill.SPEC.tolerance,
    calls=("store_kvcache", "attention_prefill", "attention_decode"),
    by_table=attention_decode,
)
