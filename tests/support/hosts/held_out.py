"""Tiny random checkpoints of architectures that no op or model of ours was written for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.tiny import SIZES, byte_tokenizer

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MLA = {
    "q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "head_dim": 64,
}  # fmt: skip


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_LONG = _rope(
    "longrope", original_max_position_embeddings=64, short_factor=[1.0] * 16, long_factor=[1.5] * 16
)  # fmt: skip
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1)
_GEMMA4 = {
    "tie_word_embeddings": True, "sliding_window": 8, "global_head_dim": 64, "vocab_size_per_layer_input": 512,
    "final_logit_softcapping": 20.0,
}  # fmt: skip
# name: (transformers' model class, what differs from SIZES)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {"tie_word_embeddings": True}),
    "cohere": ("CohereForCausalLM", {"tie_word_embeddings": True}),
    "cohere2": ("Cohere2ForCausalLM", {"tie_word_embeddings": True, "sliding_window": 8}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _MLA),
    # Public checkpoints name how they route, transformers' config does not. Without the names vLLM has no correction
    # bias and routes by softmax.
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**_MLA, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "deepseek_yarn": ("DeepseekV2ForCausalLM", {**_MLA, **_YARN}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"tie_word_embeddings": True}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
    ),
    "exaone4": ("Exaone4ForCausalLM", {"sliding_window": 8}),
    "falcon": ("FalconForCausalLM", {"head_dim": ..., "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", {"tie_word_embeddings": True, "sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", {"tie_word_embeddings": True, "sliding_window": 8}),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4_experts": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "glm": ("GlmForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "gpt2": ("GPT2LMHeadModel", {"tie_word_embeddings": True}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**_YARN, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 16}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {"tie_word_embeddings": True}),
    "granitemoe": ("GraniteMoeForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama_dynamic": ("LlamaForCausalLM", _rope("dynamic", factor=2.0)),
    "llama_linear": ("LlamaForCausalLM", _rope("linear", factor=2.0)),
    "minicpm3": ("MiniCPM3ForCausalLM", _MLA),
    "ministral": ("MinistralForCausalLM", {"sliding_window": 8}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": ("NemotronForCausalLM", {}),
    "olmo": ("OlmoForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {**_MOE, "intermediate_size": 64}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 256, "word_embed_proj_dim": 128, "tie_word_embeddings": True}),
    "phi": ("PhiForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3_long": ("Phi3ForCausalLM", {**_LONG, "original_max_position_embeddings": 64}),
    "qwen2": ("Qwen2ForCausalLM", _YARN),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_MOE, "shared_expert_intermediate_size": 64}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 64}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _MOE),
    "seed_oss": ("SeedOssForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "stablelm": ("StableLmForCausalLM", {}),
    "starcoder2": ("Starcoder2ForCausalLM", {}),
}


def make_held_out(folder: str | Path, name: str, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """A random checkpoint of ARCHITECTURES[name] in `folder`, with a tokenizer: 2 layers, hidden size 128.

    The weights are large enough (std 0.1) that greedy choices have clear margins. A field of SIZES that the config
    lacks is `...` in ARCHITECTURES.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    cls, differs = ARCHITECTURES[name]
    model_class = getattr(transformers, cls)
    fields = {k: v for k, v in {**SIZES, **differs}.items() if v is not ...}
    config = model_class.config_class(**fields)
    model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.1, generator=generator)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def check_same(patched: list[Any], stock: list[Any]) -> None:
    """Both are [(token ids, log probability of each)]: the same tokens, log-probabilities within 0.05."""
    assert [tokens for tokens, _ in patched] == [tokens for tokens, _ in stock]
    for (_, ours), (_, theirs) in zip(patched, stock, strict=True):
        assert ours == pytest.approx(theirs, abs=0.05)


def transformers_logprobs(model: Path, prompt: str, tokens: list[int]) -> list[float]:
    """The log probability that transformers gives each of these tokens after the prompt, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(prompt)["input_ids"]
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = hf(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].tolist()
