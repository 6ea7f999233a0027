"""SGLang's attention backends: decode and extend through our ops, on SGLang's KV pool and the backend's metadata.

`__class__` of the live backend instance is swapped, because the model runner, graph runners and hybrid wrappers all
hold that instance. A step that our kernels do not support goes to the host's own method, counted with a reason. The
decode metadata of a captured graph are static buffers: our ops read the same tensors, and get the page table's
capacity as the largest number of keys, which holds for every replay. A graph without the host's kernels needs no plan
of them, so that its steps launch three kernels less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core import versions
from fk_integrations.core.host_op import BATCHES
from fk_integrations.core.journal import Journal

FLASH = "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend"
NATIVE = "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend"
LINEAR = "sglang.srt.layers.attention.linear."
PROMPTS = ("EXTEND", "MIXED")
MODES = ("DECODE", *PROMPTS)
NO_DECODE = "a batch with more than one token of a sequence"
NOT_FASTER = "a decode of a batch and context that no table lists as faster"


def attention_shape(runner: Any, layer: Any) -> tuple[Any, ...]:
    """A RadixAttention's values for attention_decode's Key; None among them: not the same in all known backends."""
    known = known_backends(runner)
    blocks = {1 if _path(type(b)) == NATIVE else b.page_size for b in known}
    dtypes = {b.token_to_kv_pool.dtype for b in known}
    block_size, dtype = (found.pop() if len(found) == 1 else None for found in (blocks, dtypes))
    window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
    heads = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim
    return *heads, block_size, max(window + 1, 0), dtype


def served(runner: Any, layer: Any) -> bool:
    """Whether our decode kernels can serve a RadixAttention, in all backends of the runner that are known."""
    known = known_backends(runner)
    return bool(known) and not any(
        (_unsupported_layer(runner, layer), *(_unsupported_backend(runner, backend) for backend in known))
    )


def points(runner: Any) -> list[tuple[int, int]]:
    """Batches and contexts of the decode graphs: a graph has the page table of the longest context."""
    page = next((b.page_size for b in backends(runner) if hasattr(b, "page_size")), 1)
    context = -(-runner.model_config.context_len // page) * page
    most = runner.max_running_requests
    return [(batch, context) for batch in BATCHES if batch <= most]


def swap_attention(
    runner: Any, layer: Any, version: str, journal: Journal, by_table: bool = False
) -> Reason | None:
    """Put our kernels behind a RadixAttention, in every known backend of the runner. None, or why not.

    by_table: see HostOp.swap; in a step that stays the host's, the host stores keys and values.
    """
    if (text := _unsupported_layer(runner, layer)) is not None:
        return Reason(Kind.UNSUPPORTED, text)
    reasons: list[Reason] = []
    for backend in backends(runner):
        reason = _swap_backend(runner, backend, version, journal, by_table)
        if reason is None:
            type(backend).fastkernels_layers.add(layer)
        else:
            reasons.append(reason)
    if len(reasons) < len(backends(runner)):
        return None
    kind = reasons[0].kind if reasons else Kind.UNSUPPORTED
    return Reason(kind, "; ".join(dict.fromkeys(reason.text for reason in reasons)))


def backends(runner: Any) -> list[Any]:
    """The runner's attention backends and the parts of composed ones (hybrid, two-batch overlap), each once."""
    found: list[Any] = []
    todo = [getattr(runner, name, None) for name in ("attn_backend", "decode_attn_backend")]
    todo += getattr(runner, "decode_attn_backend_group", None) or []
    while todo:
        backend = todo.pop(0)
        if not hasattr(backend, "init_cuda_graph_state") or any(backend is b for b in found):
            continue
        found.append(backend)
        for value in vars(backend).values():
            todo += value if isinstance(value, (list, tuple)) else [value]
    return found


def linear_backends(runner: Any) -> list[Any]:
    """The runner's backends of linear attention, the dispatchers of their kernels and the kernels, each once."""
    found: list[Any] = []
    todo = [b for b in backends(runner) if type(b).__module__.startswith(LINEAR)]
    while todo:
        each = todo.pop(0)
        if not any(each is f for f in found):
            found.append(each)
            todo += [v for v in vars(each).values() if type(v).__module__.startswith(LINEAR)]
    return found


def known_backends(runner: Any) -> list[Any]:
    """Those whose metadata our ops read."""
    return [backend for backend in backends(runner) if _path(type(backend)) in _STEPS]


def is_flash(backend: Any) -> bool:
    return _path(type(backend)) == FLASH


def _path(host_class: type) -> str:
    return f"{host_class.__module__}:{host_class.__qualname__}"


def _swap_backend(runner: Any, backend: Any, version: str, journal: Journal, by_table: bool) -> Reason | None:
    host_class: Any = type(backend)
    if hasattr(host_class, "fastkernels_layers"):
        return None
    path = _path(host_class)
    if path not in _STEPS:
        return Reason(Kind.UNSUPPORTED, f"the attention backend is {path}; known: {', '.join(_STEPS)}")
    reason = versions.unknown("sglang", version, path, host_class)
    patched = [name for name in ("forward", "forward_decode", "forward_extend") if name in vars(backend)]
    if reason is None and patched:
        reason = Reason(Kind.REPLACED, f"its {patched[0]} was replaced by other code")
    if reason is None and (text := _unsupported_backend(runner, backend)) is not None:
        reason = Reason(Kind.UNSUPPORTED, text)
    if reason is None:
        journal.set_class(backend, _implementation(host_class, _STEPS[path], by_table))
    return reason


# Unsupported layers, backends and steps


def _unsupported_layer(runner: Any, layer: Any) -> str | None:
    if layer.attn_type.value != "decoder":
        return f"attention type {layer.attn_type.value!r} is not supported"
    if layer.is_cross_attention:
        return "cross attention is not supported"
    if layer.v_head_dim != layer.qk_head_dim or layer.tp_v_head_num != layer.tp_k_head_num:
        return f"keys of {layer.qk_head_dim} with values of {layer.v_head_dim} (MLA) are not supported"
    if layer.pos_encoding_mode != "NONE" or layer.logit_capping_method != "tanh":
        kinds = f"{layer.pos_encoding_mode!r} and {layer.logit_capping_method!r}"
        return f"position encoding and capping of {kinds} are not supported"
    if layer.xai_temperature_len > 0:
        return "a temperature by length is not supported"
    # Every layer of an FP8 model has scales; the host uses them only if the cache has a dtype of its own.
    scaled = layer.k_scale is not None or layer.v_scale is not None
    if scaled and runner.server_args.kv_cache_dtype != "auto":
        return "scaled keys and values are not supported"
    return None


def _unsupported_backend(runner: Any, backend: Any) -> str | None:
    pool: Any = backend.token_to_kv_pool
    if type(pool).__name__ != "MHATokenToKVPool":
        return f"a KV pool of {type(pool).__name__} is not supported"
    buffer = pool.k_buffer[0]
    if pool.dtype != pool.store_dtype or buffer.dtype.itemsize == 1:
        return f"a KV cache of {pool.dtype} is not supported"
    if buffer.dim() != 3 or not buffer.is_contiguous():
        return f"a KV pool of shape {tuple(buffer.shape)} is not [slots, heads, head size]"
    if getattr(runner.server_args, "enable_torch_compile", False):
        return "under --enable-torch-compile the backend's attention is left alone"
    translator = getattr(backend, "kv_index_translator", None)
    switches = {
        "MLA": getattr(backend, "use_mla", False),
        "local attention": getattr(backend, "has_local_attention", False),
        "context parallelism": getattr(backend, "attn_cp_size", 1) > 1,
        "attention without a KV cache": getattr(backend, "fa_skip_kv_cache", False),
        "a window that knows the prefill": getattr(backend, "is_prefill_aware_swa", False),
        "a pool of windows": getattr(backend, "use_sliding_window_kv_pool", False),
        "a sharded KV pool": getattr(backend, "_kv_shard_pool", None) is not None,
        "a translated KV pool": getattr(translator, "is_translating", False),
        "FlashAttention 4": getattr(backend, "fa_impl_ver", 3) != 3,
    }
    return next((f"{name} is not supported" for name, on in switches.items() if on), None)


def _unsupported_step(q: Any, batch: Any, pool: Any, extra: dict[str, Any]) -> str | None:
    mode = batch.forward_mode.name
    if mode not in MODES:
        return f"forward mode {mode}"
    if batch.spec_info is not None:
        return "speculative decoding"
    if batch.encoder_lens is not None:
        return "an encoder's keys before the text's"
    for name, value in extra.items():
        if name != "sinks" and value is not None and value is not False:
            return f"{name} is set"
    for name in ("mha_return_lse", "dcp_kv_mask", "attn_cp_metadata"):
        if getattr(batch, name, None) not in (None, False):
            return f"{name} is set"
    if q.dtype != pool.dtype:
        return f"queries of {q.dtype} on a KV cache of {pool.dtype}"
    return None


# A step's metadata


class Step(NamedTuple):
    """block_table: [B, pages], seq_lens: [B] int32, cu_seqlens_q: [B + 1] int32 (None for a batch of decodes)."""

    block_size: int
    block_table: Any
    seq_lens: Any
    cu_seqlens_q: Any
    max_seqlen_q: int


def _flash_step(backend: Any, batch: Any) -> Step | str:
    m = backend.forward_metadata
    for name in ("local_attn_metadata", "swa_spec_metadata", "swa_page_table", "image_token_ranges"):
        if getattr(m, name, None) is not None:
            return f"{name} is set"
    return Step(backend.page_size, m.page_table, m.cache_seqlens_int32, m.cu_seqlens_q, m.max_seq_len_q)


def _native_step(backend: Any, batch: Any) -> Step | str:
    """torch_native has no plan of its own: its metadata are the batch's, and a page is one slot."""
    import torch

    lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
    longest = int(lengths.max()) if len(lengths) else 0
    table = backend.req_to_token_pool.req_to_token[batch.req_pool_indices, :longest]
    starts, most = None, 1
    if batch.forward_mode.name != "DECODE":
        starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        most = max(batch.extend_seq_lens_cpu)
    return Step(1, table, batch.seq_lens.to(torch.int32), starts, most)


_STEPS: dict[str, Callable[[Any, Any], Step | str]] = {FLASH: _flash_step, NATIVE: _native_step}


# The subclass


def _implementation(
    host_class: Any, step_of: Callable[[Any, Any], Step | str], by_table: bool = False
) -> type:
    """A subclass of the backend's class for one patch; `fastkernels_layers` holds the layers that it serves."""
    import torch

    from fastkernels.overrides.attention.attention import explicitly_requested
    from fastkernels.overrides.attention.attention_decode import attention_decode
    from fastkernels.overrides.attention.attention_prefill import attention_prefill
    from fastkernels.overrides.cache.store_kvcache import store_kvcache

    layers: set[Any] = set()
    captured = set[int]()  # batches of decode graphs in which all layers run ours

    def left_to_host(batch: Any) -> None:
        """Note a layer of the host's in the graph that is being captured."""
        if captured and torch.cuda.is_current_stream_capturing():
            captured.discard(batch.batch_size)

    def attend(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        batch: Any,
        save: bool,
        step: Step,
        choosy: bool,
        sinks: Any,
    ) -> Any:
        """The result; None, with nothing done, if `choosy` and no table lists this decode as faster."""
        shape = (-1, step.block_size, layer.tp_k_head_num, layer.head_dim)
        key_cache, value_cache = (t.view(shape) for t in self.token_to_kv_pool.get_kv_buffer(layer.layer_id))
        q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        longest = step.block_table.shape[1] * step.block_size
        rest = (longest, float(layer.scaling), window, float(layer.logit_cap or 0))
        more = () if sinks is None else (sinks,)
        scales = (1.0, 1.0) if more else ()
        decode = (q, key_cache, value_cache, step.seq_lens, step.block_table, *rest, *scales, *more)
        if choosy and not attention_decode.faster(*decode):
            return None
        if save and k is not None:
            k, v = (t.reshape(-1, *shape[2:]) for t in (k, v))
            n = min(k.shape[0], batch.out_cache_loc.shape[0])  # padding is at the end of either
            store_kvcache(k[:n], v[:n], key_cache, value_cache, batch.out_cache_loc[:n])
        if batch.forward_mode.name == "DECODE":
            out = attention_decode(*decode)
        else:
            out = attention_prefill(  # rows of padding are undefined, as in the host's own kernels
                q, key_cache, value_cache, step.cu_seqlens_q, step.seq_lens, step.block_table, step.max_seqlen_q,
                *rest, 1.0, 1.0, False, *more,
            )  # fmt: skip
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    def method(name: str) -> Callable[..., Any]:
        def forward(
            self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **extra: Any
        ) -> Any:  # fmt: skip
            host = getattr(host_class, name)
            if layer not in layers:
                left_to_host(forward_batch)
                return host(self, q, k, v, layer, forward_batch, save_kv_cache, **extra)
            choosy = by_table and not explicitly_requested()
            if choosy and forward_batch.forward_mode.name in PROMPTS:  # first: a prompt waits for this code
                attention_decode.leave(NO_DECODE)
                return host(self, q, k, v, layer, forward_batch, save_kv_cache, **extra)
            reason = _unsupported_step(q, forward_batch, self.token_to_kv_pool, extra)
            if reason is None:
                step = step_of(self, forward_batch)
                rows = q.numel() // (layer.tp_q_head_num * layer.head_dim)
                if isinstance(step, str):
                    reason = step
                elif name == "forward_decode" and step.seq_lens.shape[0] != rows:
                    reason = "a decode of several queries a sequence"
                else:
                    sinks = extra.get("sinks")
                    out = attend(self, q, k, v, layer, forward_batch, save_kv_cache, step, choosy, sinks)
                    if out is not None:
                        return out
                    reason = NOT_FASTER
            attention_decode.leave(reason) if choosy else attention_prefill.note(reason)
            left_to_host(forward_batch)
            return host(self, q, k, v, layer, forward_batch, save_kv_cache, **extra)

        return forward

    def init_forward_metadata_out_graph(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step. Without a layer of the host's in its graph, FlashAttention's plan is not made again."""
        batch = forward_batch.batch_size
        if forward_batch.forward_mode.name == "DECODE" and forward_batch.spec_info is None:
            if in_capture:
                captured.add(batch)
            elif batch in captured:
                self.decode_cuda_graph_metadata[batch].scheduler_metadata = None
        host_class.init_forward_metadata_out_graph(self, forward_batch, in_capture)

    planned = step_of is _flash_step and hasattr(host_class, "init_forward_metadata_out_graph")
    body = {
        **({"init_forward_metadata_out_graph": init_forward_metadata_out_graph} if planned else {}),
        "forward_decode": method("forward_decode"),
        "forward_extend": method("forward_extend"),
        "fastkernels_layers": layers,
        "__module__": host_class.__module__,
        "__qualname__": host_class.__qualname__,
    }
    return type(host_class.__name__, (host_class,), body)
