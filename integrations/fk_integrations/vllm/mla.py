"""vLLM's implementations of multi-head latent attention, whose decode is replaced inside layers that stay vLLM's."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastkernels.core.reasons import Kind, Reason
from fastkernels.overrides.latent_attention.mla_decode import mla_decode
from fk_integrations.core import versions
from fk_integrations.core.expert_layers import path_of
from fk_integrations.core.journal import Journal

LAYER = "vllm.model_executor.layers.attention.mla_attention:MLAAttention"
_BACKENDS = "vllm.v1.attention.backends.mla"
# Implementations with the common metadata and a cache [blocks, block_size, rank + rope]
DENSE = {
    f"{_BACKENDS}.flashattn_mla:FlashAttnMLAImpl", f"{_BACKENDS}.flashmla:FlashMLAImpl",
    f"{_BACKENDS}.flashinfer_mla:FlashInferMLAImpl", f"{_BACKENDS}.triton_mla:TritonMLAImpl",
    f"{_BACKENDS}.cpu_mla:CPUMLAImpl",
}  # fmt: skip
NO_DECODE = "a decode with more than one token of a sequence"

NO_TABLE = "no table lists decodes of latent attention as faster; name mla_decode in ops to use ours"


def swap_decode(module: Any, version: str, config: Any, journal: Journal, by_table: bool) -> Reason | None:
    """Have an MLAAttention layer decode with ours, on vLLM's own cache. None, or why not.

    Prompts, the projections around the decode and the cache's update stay vLLM's.
    """
    if by_table:
        return Reason(Kind.LEFT_TO_HOST, NO_TABLE)
    impl = getattr(module, "impl", None)
    path = path_of(impl)
    if path not in DENSE:
        return Reason(
            Kind.UNSUPPORTED, f"the attention backend is {path}, whose decode has another cache or metadata"
        )
    if "forward_mqa" in vars(impl):
        return Reason(Kind.REPLACED, "the backend's forward_mqa was replaced by other code")
    host_class: Any = type(impl)
    reason = versions.unknown("vllm", version, path, host_class)
    if reason is None and (text := _unsupported(module, config)) is not None:
        reason = Reason(Kind.UNSUPPORTED, text)
    if reason is None:
        journal.set_class(impl, _implementation(host_class))
    return reason


def _unsupported(module: Any, config: Any) -> str | None:
    if str(module.kv_cache_dtype).startswith(("fp8", "int8", "nvfp4")):
        return f"a KV cache of {module.kv_cache_dtype} is not supported"
    if getattr(module, "sliding_window", None) is not None:
        return f"a sliding window of {module.sliding_window} is not supported with latent attention"
    if getattr(module, "non_causal_multi_token_decode", False):
        return "decodes of several tokens that are not causal are not supported"
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name}={getattr(parallel, name)}: its decodes must return their log-sum-exp"
    return None


@cache
def _implementation(host: type) -> type:
    """A subclass of the host's implementation that decodes with mla_decode."""
    import torch

    host_class: Any = host

    def forward_mqa(self: Any, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> Any:
        decode = attn_metadata.decode
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        # Heads are padded where a backend's kernel needs a number of its own.
        if len(query) != len(decode.seq_lens) or query.shape[1] != self.num_heads:
            mla_decode.note(NO_DECODE)
            return host_class.forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)
        out = mla_decode(
            query, kv_c_and_k_pe_cache, decode.seq_lens, decode.block_table, attn_metadata.max_seq_len, self.scale,
            self.kv_lora_rank,
        )  # fmt: skip
        return out, None

    body = {
        "forward_mqa": forward_mqa,
        "__module__": host_class.__module__,
        "__qualname__": host_class.__qualname__,
    }
    return type(host_class.__name__, (host_class,), body)
