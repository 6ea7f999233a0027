"""Causal attention over a paged KV cache: store this step's keys and values, then attend to all of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn

from fastkernels.core import assemble
from fastkernels.core.forward_context import AttentionMetadata, forward_context, get_forward_context
from fastkernels.core.shapes import varied
from fastkernels.core.spec import Case, OpSpec, Target
from fastkernels.overrides.attention import attention_calls as calls
from fastkernels.overrides.attention import attention_prefill as prefill
from fastkernels.overrides.attention import paged_step as _paged_step
from fastkernels.overrides.attention.attention_decode import attention_decode
from fastkernels.overrides.cache.store_kvcache import store_kvcache


class AttentionType(str, Enum):
    """The hosts' kinds of attention; only DECODER (causal, with a KV cache) is served here."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class PagedAttention(nn.Module):
    """Attention of this rank's heads. `kv_cache` is (key_cache, value_cache), bound by the engine before a step.

    key_cache, value_cache: [blocks, block_size, num_kv_heads, head_size]; with an fp8 cache, what is stored times
    k_scale (v_scale) is the key (value). The step's AttentionMetadata comes from forward_context; where it
    has a backend, that attends, else the ops are called.
    """

    kv_cache: tuple[torch.Tensor, torch.Tensor] | None

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
        # The hosts' windows count the token itself (vLLM) or not (SGLang); window_left never does.
        self.window_left, self.softcap = -1 if window is None else window, cap
        self.kv_cache = None
        self.k_scale = self.v_scale = 1.0

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
        q = query.view(-1, self.num_heads, self.head_size)
        k = None if key is None else key.view(-1, self.num_kv_heads, self.head_size)
        v = None if value is None else value.view(-1, self.num_kv_heads, self.head_size)
        if metadata.backend is not None:
            return metadata.backend.forward(self, q, k, v, metadata).view(-1, self.num_heads * self.head_size)
        if k is not None and v is not None:
            store_kvcache(k, v, key_cache, value_cache, metadata.slot_mapping, self.k_scale, self.v_scale)
        if metadata.decode_only:
            out = attention_decode(
                q, key_cache, value_cache, metadata.seq_lens, metadata.block_table, metadata.max_seqlen_k,
                self.scale, self.window_left, self.softcap, self.k_scale, self.v_scale,
            )  # fmt: skip
        else:
            out = prefill.attention_prefill(
                q, key_cache, value_cache, metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_table,
                metadata.max_seqlen_q, metadata.max_seqlen_k, self.scale, self.window_left, self.softcap,
                self.k_scale, self.v_scale, metadata.padded,
            )  # fmt: skip
        return out.view(-1, self.num_heads * self.head_size)


def _refuse(what: str, **given: Any) -> None:
    """Raise ValueError for the first argument that asks for what we have no kernel for."""
    for name, value in given.items():
        if value:
            raise ValueError(
                f"{what}: {name}={value!r} is not supported; leave it out or use the host's own layer"
            )


class VllmAttention(PagedAttention):
    """vllm.model_executor.layers.attention.attention.Attention, decoder only; see PagedAttention.

    query, key, value: [T, heads * head_size] or [T, heads, head_size]; out: output_shape or [T, heads * head_size].
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        use_alibi_sqrt: bool | None = None,
        cache_config: Any = None,
        quant_config: Any = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        mm_prefix_clamp_sliding_window: bool = False,
        attn_backend: type | None = None,
        head_size_v: int | None = None,
        **extra_impl_args: Any,
    ) -> None:
        super().__init__()
        _refuse(
            prefix or "Attention", alibi_slopes=alibi_slopes, use_alibi_sqrt=use_alibi_sqrt, quant_config=quant_config,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type, attn_backend=attn_backend,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            mm_prefix_clamp_sliding_window=mm_prefix_clamp_sliding_window,
            head_size_v=None if head_size_v == head_size else head_size_v, extra_impl_args=extra_impl_args,
        )  # fmt: skip
        window = per_layer_sliding_window
        if window is None:
            window = getattr(cache_config, "sliding_window", None)
        left = None if window is None else window - 1
        self._build(num_heads, head_size, scale, num_kv_heads, left, logits_soft_cap or 0.0)
        self.layer_name = prefix

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        out = self._attend(query, key, value, get_forward_context())
        out = out if output_shape is None else out.view(output_shape)
        return out if output_dtype is None else out.to(output_dtype)


class SGLangRadixAttention_0_5_16(PagedAttention):
    """sglang.srt.layers.radix_attention.RadixAttention of 0.5.16, decoder only; see PagedAttention.

    forward_batch: our AttentionMetadata, or None for that of the forward context. save_kv_cache=False stores nothing.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
        is_cross_attention: bool = False,
        pos_encoding_mode: str = "NONE",
        logit_capping_method: str = "tanh",
        quant_config: Any = None,
        attn_type: AttentionType = AttentionType.DECODER,
        use_irope: bool = False,
        prefix: str = "",
    ) -> None:
        super().__init__()
        _refuse(
            prefix or f"RadixAttention {layer_id}", is_cross_attention=is_cross_attention, quant_config=quant_config,
            v_head_dim=None if v_head_dim in (-1, head_dim) else v_head_dim, use_irope=use_irope,
            pos_encoding_mode=None if pos_encoding_mode == "NONE" else pos_encoding_mode,
            logit_capping_method=None if logit_capping_method == "tanh" else logit_capping_method,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type,
        )  # fmt: skip
        window = sliding_window_size if sliding_window_size and sliding_window_size > 0 else None
        self._build(num_heads, head_dim, scaling, num_kv_heads, window, logit_cap)
        self.layer_id = layer_id

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        forward_batch: AttentionMetadata | None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._radix(q, k, v, forward_batch, save_kv_cache, kwargs)

    def _radix(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        forward_batch: AttentionMetadata | None,
        save_kv_cache: bool,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        _refuse(f"RadixAttention {self.layer_id}", **extra)
        metadata = get_forward_context() if forward_batch is None else forward_batch
        return self._attend(q, k if save_kv_cache else None, v if save_kv_cache else None, metadata)


class SGLangRadixAttention_0_5_17(SGLangRadixAttention_0_5_16):
    """sglang.srt.layers.radix_attention.RadixAttention from 0.5.17 on; see SGLangRadixAttention_0_5_16."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        forward_batch: AttentionMetadata | None,
        save_kv_cache: bool = True,
        key_value_num_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if k is not None and v is not None and key_value_num_tokens is not None:
            k, v = k[:key_value_num_tokens], v[:key_value_num_tokens]
        return self._radix(q, k, v, forward_batch, save_kv_cache, kwargs)


class SGLangRadixAttention(SGLangRadixAttention_0_5_17):
    """sglang.srt.layers.radix_attention.RadixAttention; see SGLangRadixAttention_0_5_16."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
        is_cross_attention: bool = False,
        pos_encoding_mode: str = "NONE",
        logit_capping_method: str = "tanh",
        quant_config: Any = None,
        attn_type: AttentionType = AttentionType.DECODER,
        use_irope: bool = False,
        prefix: str = "",
        use_prefill_attention_wrapper: bool = True,
    ) -> None:
        super().__init__(
            num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap, v_head_dim, sliding_window_size,
            is_cross_attention, pos_encoding_mode, logit_capping_method, quant_config, attn_type, use_irope, prefix,
        )  # fmt: skip


def asked_for() -> bool:
    """Whether somebody asked for one of these ops by name: then no step of a live host is left to it (Op.asked)."""
    return any(op.asked == "named" for op in (attention_decode, prefill.attention_prefill, store_kvcache))


_VLLM = "vllm.model_executor.layers.attention.attention:Attention"
_SGLANG = "sglang.srt.layers.radix_attention:RadixAttention"
_NOTE = (
    "live, the host's layer stays and its backend's implementation is replaced: attention_prefill, attention_decode;"
    " by default only where a tuned table says that attention_decode is faster, for the decodes of those sizes"
)


def _decode(
    name: str, seq_lens: list[int], tags: tuple[str, ...], weight: float, dtype: str = "bfloat16", **dims: int
) -> Case:
    shape = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16, **dims}
    return Case(name, {"q_lens": [1] * len(seq_lens), "seq_lens": seq_lens, **shape}, dtype, weight, tags)


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    query, _, step = _paged_step.make_step(case, device, generator)
    shape = (query.shape[0], case.dims["kv_heads"], query.shape[2])
    key, value = (torch.randn(shape, generator=generator, device=device).to(query.dtype) for _ in range(2))
    args = assemble.filled([query, key, value, *step, *calls.scalars(case)], 17, *_SCALARS)
    return [*args[:-1], "padding" in case.dims]


_SCALARS = (-1, 0.0, 1.0, 1.0, True)  # the defaults behind scale


def _dims(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> dict[str, Any]:
    step, scalars = rest[:8], assemble.filled(rest[8:], 6, *_SCALARS)
    tokens, heads, size = query.shape
    return {
        **_paged_step.step_dims(heads, query.dtype, step, tokens),
        **calls.scalar_dims(size, *scalars[:-1]),
    }


def _bytes(case: Case) -> int:
    return prefill.SPEC.bytes_moved(case) + _paged_step.stored_bytes(case)


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
    context = _paged_step.metadata(step, padded)
    flat = [t.flatten(1) for t in (query, key, value)]

    def call() -> tuple[torch.Tensor, ...]:
        with forward_context(context):
            return layer(*flat, *batch).view(query.shape), step[0], step[1]

    return call


SPEC = OpSpec(
    name="attention",
    level=2,
    reference=_paged_step.reference,
    cases=(
        *(case for case in prefill.SPEC.cases if case.dtype != "float8_e4m3fn"),
        _decode("decode_1", [4096], ("model",), 32),
        _decode("decode_32", [1024] * 32, ("model",), 32),
        _decode(
            "decode_odd", [70, 3, 19], ("odd",), 1, "float32", heads=6, kv_heads=2, head_size=40, block_size=5
        ),
    ),
    inputs=_inputs,
    bytes_moved=_bytes,
    flops=prefill.SPEC.flops,
    dims_of=_dims,
    vary=lambda case, rng: varied(case, lambda: calls.draw_batch(case, rng), _bytes, prefill.SPEC.flops),
    extremes={"huge_key": _huge_key, "equal_keys": _equal_keys},
    activations=(2, 4),  # of values, which the result is linear in
    build=_build,
    mutates=(3, 4),
    dtype_arg=3,  # the cache's
    tolerance=prefill.SPEC.tolerance,
    calls=("store_kvcache", "attention_prefill", "attention_decode"),
    by_table=attention_decode,
    targets=(
        Target("vllm", _VLLM, "VllmAttention", "attention", default=False, note=_NOTE),
        Target(
            "sglang",
            _SGLANG,
            "SGLangRadixAttention_0_5_16",
            "attention",
            "<0.5.17",
            default=False,
            note=_NOTE,
        ),
        Target(
            "sglang",
            _SGLANG,
            "SGLangRadixAttention_0_5_17",
            "attention",
            ">=0.5.17,<0.5.23",
            default=False,
            note=_NOTE,
        ),
        Target("sglang", _SGLANG, "SGLangRadixAttention", "attention", ">=0.5.23", default=False, note=_NOTE),
    ),
)
