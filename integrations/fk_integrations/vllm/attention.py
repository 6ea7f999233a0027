"""vLLM's attention implementations, which are replaced inside layers that stay vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core import versions
from fk_integrations.core.journal import Journal

FLASH_ATTN = "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl"
_CROSS = "vllm.model_executor.layers.attention.cross_attention"
CROSS, CROSS_BACKEND = f"{_CROSS}:CrossAttention", f"{_CROSS}:create_cross_attention_backend"
FP8 = "fp8", "fp8_e4m3"  # vLLM's names of a KV cache in e4m3
NO_DECODE = "a batch with more than one token of a sequence"
FP8_PROMPT = "a batch with more than one token of a sequence, on a KV cache in FP8"
NOT_FASTER = "a decode of a batch and context that no table lists as faster"


def named_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules of a model with their names, each once.

    vLLM 0.26's Transformers backend has its attention layers in a dict, outside of the module tree; later ones do not.
    """
    seen: set[Any] = set()
    for name, module in model.named_modules(seen):
        yield name, module
        outside = vars(module).get("attention_instances")
        for i, layer in outside.items() if isinstance(outside, dict) else ():
            yield from layer.named_modules(seen, f"{name}.attention_instances.{i}".lstrip("."))


def is_cross(module: Any) -> bool:
    """Whether a layer attends to an encoder's states, whose keys and values are in its KV cache."""
    return f"{type(module).__module__}:{type(module).__qualname__}" == CROSS


def attention_shape(module: Any) -> tuple[Any, ...]:
    """An Attention layer's values for attention_decode's Key. The block size is unknown until the cache exists."""
    heads = module.num_heads, module.num_kv_heads, module.head_size
    dtype = torch.float8_e4m3fn if module.kv_cache_dtype in FP8 else module.kv_cache_torch_dtype
    return *heads, None, module.sliding_window or 0, dtype


def whole_shape(module: Any, config: Any) -> tuple[Any, ...] | None:
    """The same with the cache's block size, for layers that our decode kernels can serve."""
    impl, block_size = getattr(module, "impl", None), config.cache_config.block_size
    served = f"{type(impl).__module__}:{type(impl).__qualname__}" == FLASH_ATTN
    if impl is None or not served or not block_size or _unsupported(module, impl, config) is not None:
        return None
    if impl.sinks is not None:  # what is measured has none
        return None
    return tuple(block_size if value is None else value for value in attention_shape(module))


def swap_attention(module: Any, version: str, config: Any, journal: Journal, by_table: bool) -> Reason | None:
    """Put our kernels behind an Attention layer, on the KV cache of vLLM's FlashAttention backend. None, or why not.

    The layer, its cache layout and its metadata builder stay; `layer.impl` becomes an instance of a subclass.
    by_table: see HostOp.swap. A captured graph replays the choice that was made at its capture.
    """
    impl = getattr(module, "impl", None)
    host_class: Any = type(impl)
    cross = is_cross(module)
    backend = (
        host_class.__base__ if cross and impl is not None else host_class
    )  # the layer's own subclass stores keys
    found = f"{backend.__module__}:{backend.__qualname__}"
    if found != FLASH_ATTN:
        note = ": its KV cache is packed for the CPU's own kernels" if "cpu_attn" in found else ""
        return Reason(Kind.UNSUPPORTED, f"the attention backend is {found}, not {FLASH_ATTN}{note}")
    if any(name in vars(impl) for name in ("forward", "do_kv_cache_update")):
        return Reason(Kind.REPLACED, "the backend's forward was replaced by other code")
    if cross and by_table:
        return Reason(Kind.LEFT_TO_HOST, "cross attention is not measured: it is replaced on request")
    reason = versions.unknown("vllm", version, FLASH_ATTN, backend)
    if reason is None and cross:
        reason = versions.unknown("vllm", version, CROSS_BACKEND, type(module))
    if reason is None and (text := _unsupported(module, impl, config)) is not None:
        reason = Reason(Kind.UNSUPPORTED, text)
    if reason is None:
        most = config.model_config.max_model_len
        made = _cross(host_class) if cross else _implementation(host_class, by_table, most)
        journal.set_class(impl, made)
    return reason


def _unsupported(module: Any, impl: Any, config: Any) -> str | None:
    mode = config.compilation_config.cudagraph_mode
    if mode is not None and mode.mixed_mode().name == "FULL":
        # Captured with one query per sequence and replayed for prefills, which only FlashAttention supports.
        return "cudagraph_mode FULL replays one graph for decodes and prefills; use FULL_AND_PIECEWISE"
    if impl.attn_type != ("encoder_decoder" if is_cross(module) else "decoder"):
        return f"attention type {impl.attn_type!r} is not supported"
    whole = impl.sliding_window in (None, (-1, -1))
    if is_cross(module) and (not whole or impl.logits_soft_cap or impl.sinks is not None):
        return "cross attention with a window, a soft cap or sinks is not supported"
    if impl.kv_cache_dtype in FP8:
        if (text := _unsupported_scales(module, config)) is not None:
            return text
    elif str(impl.kv_cache_dtype).startswith(("fp8", "int8", "nvfp4")):
        return f"a KV cache of {impl.kv_cache_dtype} is not supported"
    if impl.alibi_slopes is not None:
        return "ALiBi is not supported"
    if impl.sliding_window is not None and impl.sliding_window[1] > 0:
        return f"sliding window {impl.sliding_window} looks ahead"
    if config.parallel_config.decode_context_parallel_size > 1:
        return "decode context parallelism is not supported"
    return None


def _unsupported_scales(module: Any, config: Any) -> str | None:
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales changes the KV cache's scales in a step, and ours are constants"
    for name in ("_q_scale", "_k_scale", "_v_scale"):
        scale = getattr(module, name, None)
        if scale is None or scale.numel() != 1 or not hasattr(module, f"{name}_float"):
            return f"{name} of a KV cache in FP8 is not one number"
    return None


@cache
def _implementation(host: type, by_table: bool = False, max_model_len: int = 0) -> type:
    """A subclass of FlashAttentionImpl that reads and writes the cache through our ops.

    By table, our kernel stores keys and values in every step that a graph replays: it is one pass, as the host's is,
    and takes less time at every size. Outside of graphs the host's stores them, since its launch is one C++ call and
    ours costs more Python than either kernel takes. FASTKERNELS_DISABLE=store_kvcache leaves all steps to the host.
    """
    from fastkernels.overrides.attention.attention import explicitly_requested
    from fastkernels.overrides.attention.attention_decode import attention_decode
    from fastkernels.overrides.attention.attention_prefill import attention_prefill
    from fastkernels.overrides.cache.store_kvcache import store_kvcache

    host_class: Any = host
    key, warm, stored = attention_decode.key, set[Any](), set[int]()
    assert key is not None

    def ours(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The arguments with which our decode runs, by table; None: it stays the host's.

        vLLM 0.26 warms up with contexts of one token and captures with max_model_len. The kernel to be captured
        therefore runs once at warm-up, or it would be compiled during the capture.
        """
        if attention_decode.faster(*args):
            return args
        args = (*args[:5], max_model_len, *args[6:])
        if not attention_decode.faster(*args) or (point := key.of(*args)) in warm:
            return None
        warm.add(point)
        return args

    def caches(self: Any, kv_cache: Any) -> tuple[Any, Any]:
        # [blocks, Hkv, block_size, 2 * D] -> two [blocks, block_size, Hkv, D]
        if self.kv_cache_dtype in FP8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def do_kv_cache_update(
        self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        n = slot_mapping.shape[0]  # key and value are padded, slot_mapping is not
        asked = store_kvcache.requested
        hosts = asked == "off" or (asked == "" and n in stored and _from_python(key))
        if self.kv_cache_dtype in FP8 or (by_table and hosts):
            host_class.do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping)
            return
        stored.add(n)  # a size runs once before its capture
        key_cache, value_cache = caches(self, kv_cache)
        store_kvcache(key[:n], value[:n], key_cache, value_cache, slot_mapping)

    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        m = attn_metadata
        stock = (self, layer, query, key, value, kv_cache, m, output, output_scale, output_block_scale)
        if m is None:
            return host_class.forward(*stock)
        choosy = by_table and not explicitly_requested()
        if choosy and m.max_query_len != 1:  # first, because every layer of a prompt waits for this code
            attention_decode.leave(NO_DECODE)
            return host_class.forward(*stock)
        reason = _unsupported_step(m, output_scale, output_block_scale)
        if reason is not None:
            attention_decode.leave(reason) if choosy else attention_prefill.note(reason)
            return host_class.forward(*stock)
        n, softcap = m.num_actual_tokens, float(self.logits_soft_cap or 0)
        # In a batch that replays a decode graph, padding has rows of its own, in seq_lens (0) and in tokens.
        decode = m.max_query_len == 1 and n == m.seq_lens.shape[0]
        if choosy and not decode:
            attention_decode.leave(NO_DECODE)
            return host_class.forward(*stock)
        fp8 = self.kv_cache_dtype in FP8
        if fp8 and not decode:
            attention_prefill.note(FP8_PROMPT)
            return host_class.forward(*stock)
        key_cache, value_cache = caches(self, kv_cache)
        # In 0.26 the window of the layer's group is in the metadata and wins.
        window = getattr(m, "sliding_window", None) or self.sliding_window
        left = -1 if window is None else window[0]
        q, sinks = query[:n], self.sinks
        out = output[:n].view(q.shape)
        if decode:
            scale, scales = self.scale, (1.0, 1.0)
            if fp8:
                scales = layer._k_scale_float, layer._v_scale_float
                if q.dtype == torch.float8_e4m3fn:  # the layer has quantized it
                    scale *= layer._q_scale_float
            args = (
                q, key_cache, value_cache, m.seq_lens, m.block_table, m.max_seq_len, scale, left, softcap,
                *(() if sinks is None and not fp8 else scales), *(() if sinks is None else (sinks,)),
            )  # fmt: skip
            chosen = ours(args) if choosy else args
            if chosen is None:
                attention_decode.leave(NOT_FASTER)
                return host_class.forward(*stock)
            attention_decode.into(out, *chosen)
        else:
            attention_prefill.into(  # rows of padding stay unchanged, as with the host's own kernels
                out, q, key_cache, value_cache, m.query_start_loc, m.seq_lens, m.block_table, m.max_query_len,
                m.max_seq_len, self.scale, left, softcap, 1.0, 1.0, False, *(() if sinks is None else (sinks,)),
            )  # fmt: skip
        return output

    body = {"forward": forward, "do_kv_cache_update": do_kv_cache_update, "__module__": host_class.__module__}
    return type(host_class.__name__, (host_class,), body)


@cache
def _cross(host: type) -> type:
    """A subclass of a cross attention layer's implementation: every query sees all states of its sequence's encoder.

    The host's class stores keys and values of the states, which only the first step of a sequence has.
    """
    from fastkernels.overrides.attention.attention_decode import attention_decode

    host_class: Any = host

    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        m = attn_metadata
        reason = None if m is None else _unsupported_cross(self, layer, m, output_scale, output_block_scale)
        if m is None or reason is not None:
            if reason is not None:
                attention_decode.note(reason)
            return host_class.forward(
                self, layer, query, key, value, kv_cache, m, output, output_scale, output_block_scale
            )
        if key is not None and value is not None:
            host_class.do_kv_cache_update(self, layer, key, value, kv_cache, m.slot_mapping)
        n = m.num_actual_tokens
        seq_lens, table = m.seq_lens, m.block_table
        if m.max_query_len != 1 or n != seq_lens.shape[0]:  # a row for each token of a prompt
            tokens = torch.arange(n, device=query.device, dtype=m.query_start_loc.dtype)
            rows = torch.searchsorted(m.query_start_loc[1:], tokens, right=True).clamp_max_(len(seq_lens) - 1)
            seq_lens, table = seq_lens[rows], table[rows]
        q = query[:n]
        caches = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        attention_decode.into(
            output[:n].view(q.shape), q, *caches, seq_lens, table, m.max_seq_len, self.scale
        )
        return output

    body = {"forward": forward, "__module__": host_class.__module__}
    return type(host_class.__name__, (host_class,), body)


def _unsupported_cross(
    impl: Any, layer: Any, metadata: Any, output_scale: Any, output_block_scale: Any
) -> str | None:
    if output_scale is not None or output_block_scale is not None:
        return "fused quantization of the attention's output"
    if getattr(metadata, "use_cascade", False):
        return "cascade attention"
    if layer is not None and layer.kv_sharing_target_layer_name is not None:
        return "keys and values of another layer"
    return "a KV cache in FP8" if impl.kv_cache_dtype in FP8 else None


def _from_python(tensor: Any) -> bool:
    """Whether kernels on this tensor are launched one by one, not recorded for a graph."""
    return bool(tensor.is_cuda) and not torch.cuda.is_current_stream_capturing()


def _unsupported_step(metadata: Any, output_scale: Any, output_block_scale: Any) -> str | None:
    if output_scale is not None or output_block_scale is not None:
        return "fused quantization of the attention's output"
    if getattr(metadata, "use_cascade", False):
        return "cascade attention"
    if metadata.causal is not True:
        return "attention that is not causal"
    for name in ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_prefix_lens"):
        if getattr(metadata, name, None) is not None:
            return f"{name} is set"
    return None
