"""Host classes that are recorded in addition to the targets: candidates for the next ops, and their bases."""

from __future__ import annotations

_LINEAR = (
    "ReplicatedLinear", "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear",
)  # fmt: skip
_EMBEDDING = ("VocabParallelEmbedding", "ParallelLMHead")
_ACTIVATION = ("SiluAndMul", "GeluAndMul", "NewGELU", "QuickGELU")
_LLAMA = ("LlamaMLP", "LlamaAttention", "LlamaDecoderLayer", "LlamaModel", "LlamaForCausalLM")


def _in(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{name}" for name in names)


def _transformers(model: str, prefix: str, *names: str) -> tuple[str, ...]:
    return _in(f"transformers.models.{model}.modeling_{model}", *(f"{prefix}{name}" for name in names))


LISTED: dict[str, tuple[str, ...]] = {
    "vllm": (
        *_in("vllm.model_executor.layers.layernorm", "RMSNorm", "GemmaRMSNorm", "LayerNorm"),
        *_in("vllm.model_executor.layers.activation", *_ACTIVATION, "FastGELU"),
        *_in("vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbedding"),
        *_in("vllm.model_executor.layers.rotary_embedding.llama3_rope", "Llama3RotaryEmbedding"),
        *_in("vllm.model_executor.layers.linear", *_LINEAR, "UnquantizedLinearMethod"),
        *_in(
            "vllm.model_executor.layers.vocab_parallel_embedding", *_EMBEDDING, "UnquantizedEmbeddingMethod"
        ),
        *_in("vllm.model_executor.layers.logits_processor", "LogitsProcessor"),
        *_in("vllm.model_executor.layers.attention.attention", "Attention"),
        *_in("vllm.model_executor.layers.attention.cross_attention", "create_cross_attention_backend"),
        *_in("vllm.model_executor.layers.attention.mla_attention", "MLAAttention"),
        *_in("vllm.v1.attention.backends.mla.flashattn_mla", "FlashAttnMLAImpl"),
        *_in("vllm.v1.attention.backends.mla.flashmla", "FlashMLAImpl"),
        *_in("vllm.v1.attention.backends.mla.flashinfer_mla", "FlashInferMLAImpl"),
        *_in("vllm.v1.attention.backends.mla.triton_mla", "TritonMLAImpl"),
        *_in("vllm.v1.attention.backends.mla.cpu_mla", "CPUMLAImpl"),
        *_in("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl"),
        *_in("vllm.v1.attention.backends.flashinfer", "FlashInferImpl"),
        *_in("vllm.v1.attention.backends.triton_attn", "TritonAttentionImpl"),
        *_in("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl"),
        *_in("vllm.model_executor.models.llama", *_LLAMA),
        *_in("vllm.model_executor.models.qwen2", "Qwen2MLP", "Qwen2Attention", "Qwen2DecoderLayer"),
        *_in("vllm.model_executor.models.qwen3", "Qwen3Attention", "Qwen3DecoderLayer"),
    ),
    "sglang": (
        *_in("sglang.srt.layers.layernorm", "RMSNorm", "GemmaRMSNorm", "Gemma3RMSNorm", "LayerNorm"),
        *_in("sglang.srt.layers.activation", *_ACTIVATION),
        *_in("sglang.srt.layers.rotary_embedding.base", "RotaryEmbedding"),
        *_in("sglang.srt.layers.rotary_embedding.rope_variant", "Llama3RotaryEmbedding"),
        *_in("sglang.srt.layers.linear", *_LINEAR),
        *_in(
            "sglang.srt.layers.quantization.unquant", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"
        ),
        *_in("sglang.srt.layers.vocab_parallel_embedding", *_EMBEDDING),
        *_in("sglang.srt.layers.logits_processor", "LogitsProcessor"),
        *_in("sglang.srt.layers.radix_attention", "RadixAttention"),
        *_in("sglang.srt.layers.attention.flashattention_backend", "FlashAttentionBackend"),
        *_in("sglang.srt.layers.attention.flashinfer_backend", "FlashInferAttnBackend"),
        *_in("sglang.srt.layers.attention.triton_backend", "TritonAttnBackend"),
        *_in("sglang.srt.layers.attention.torch_native_backend", "TorchNativeAttnBackend"),
        *_in("sglang.srt.layers.attention.intel_amx_backend", "IntelAMXAttnBackend"),
        *_in("sglang.srt.models.llama", *_LLAMA),
        *_in("sglang.srt.models.qwen2", "Qwen2MLP", "Qwen2Attention", "Qwen2DecoderLayer"),
        *_in("sglang.srt.models.qwen3", "Qwen3Attention", "Qwen3DecoderLayer"),
    ),
    "transformers": (
        *_transformers("llama", "Llama", "RMSNorm", "MLP", "RotaryEmbedding", "Attention", "DecoderLayer"),
        *_transformers("mistral", "Mistral", "RMSNorm", "MLP"),
        *_transformers("mixtral", "Mixtral", "RMSNorm"),
        *_transformers("qwen2", "Qwen2", "RMSNorm", "MLP"),
        *_transformers("qwen3", "Qwen3", "RMSNorm", "MLP"),
        *_transformers("qwen2_moe", "Qwen2Moe", "RMSNorm", "MLP"),
        *_transformers("qwen3_moe", "Qwen3Moe", "RMSNorm", "MLP"),
        *_transformers("granite", "Granite", "RMSNorm", "MLP"),
        *_transformers("smollm3", "SmolLM3", "RMSNorm", "MLP"),
        *_transformers("olmo2", "Olmo2", "RMSNorm", "MLP"),
        *_transformers("phi3", "Phi3", "RMSNorm", "MLP"),
        *_transformers("deepseek_v3", "DeepseekV3", "RMSNorm", "MLP"),
        *_transformers("gemma", "Gemma", "RMSNorm", "MLP"),
        *_transformers("t5", "T5", "LayerNorm"),
    ),
}
