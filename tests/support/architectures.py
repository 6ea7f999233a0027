"""The language models that tests build: every architecture, and variants of some."""

from __future__ import annotations

from typing import Any

# name: (kind, fields of its config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 24, "attention_bias": True}),
    "qwen3_windows": (
        "qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "mixtral": ("mixtral", {}),
    **{k: (k, {}) for k in ("qwen2", "qwen3_moe", "mistral", "phi3", "olmo2", "olmoe", "granite", "gemma2", "cohere2")},
    **{k: (k, {}) for k in ("smollm3", "starcoder2", "gpt_neox", "stablelm", "nemotron", "glm4")},
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True}),
    "mixtral_window": ("mixtral", {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 3}),
}  # fmt: skip
