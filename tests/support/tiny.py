"""Tiny random checkpoints and a byte-level tokenizer: `python tests/support/tiny.py FOLDER [KIND]`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCAB = 512
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 16.0,
    "attention_factor": 1.2,
}


def byte_tokenizer() -> Any:
    """A byte-level tokenizer without merges: one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, "<pad>": 3}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(symbol, len(vocab))
    while len(vocab) < VOCAB:
        vocab[f"<extra_{len(vocab)}>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 3,
}
GEMMA4_EXPERTS: dict[str, Any] = {  # values of full attention are its keys, no layer has inputs of its own
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
MLA: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": 16,  # of the rotary keys
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_nextn_predict_layers": 0,
}
# Sparse from the tenth token on. With fewer heads of the indexer, more scores are tied at 0.
DSA: dict[str, Any] = {
    **MLA,
    "q_lora_rank": 40,
    "n_group": 2,
    "topk_group": 1,
    "index_topk": 9,
    "index_n_heads": 12,
    "index_head_dim": 24,
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
}
GRANITE_EXPERTS: dict[str, Any] = {"intermediate_size": 48, "num_local_experts": 6, "num_experts_per_tok": 2}
# kind: (prefix of transformers' classes, what differs from SIZES)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("Qwen3", {"head_dim": 64}),  # four heads of 64 are wider than the hidden size
    "gemma2": ("Gemma2", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]},
    ),
    "phi3": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 2}),
    "granite": ("Granite", GRANITE),
    "granitemoe": ("GraniteMoe", {**GRANITE, **GRANITE_EXPERTS}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**GRANITE, **GRANITE_EXPERTS, "attention_bias": True, "shared_intermediate_size": 80},
    ),
    "jais2": ("Jais2", {"hidden_act": "relu2"}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
        },
    ),
    "cohere2": (
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": 8, "tie_word_embeddings": True, "logit_scale": 0.5},
    ),
    "cohere2_moe": (
        "Cohere2Moe",  # a dense layer, then experts with and without positions
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 96,
            "intermediate_size": 48,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "logit_scale": 0.5,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "gpt_neox": ("GPTNeoX", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "nemotron": ("Nemotron", {}),
    "mpt": (
        "Mpt",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": ("Glm4", {}),
    "biogpt": ("BioGpt", {"tie_word_embeddings": True}),
    "falcon": ("Falcon", {"num_kv_heads": 2, "ffn_hidden_size": 192, "tie_word_embeddings": True}),
    "opt": ("OPT", {"ffn_dim": 256, "word_embed_proj_dim": 128, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    "gemma3_text": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 8,
            "query_pre_attn_scalar": 48,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": YARN,
            },
        },
    ),
    "exaone4": ("Exaone4", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
    "seed_oss": ("SeedOss", {}),
    "ernie4_5": ("Ernie4_5", {}),
    "ministral": ("Ministral", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}),
    "bitnet": ("BitNet", {}),
    "cohere": ("Cohere", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "glm": ("Glm", {}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **MLA,
            "q_lora_rank": 40,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "attention_factor": None, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "deepseek_v32": ("DeepseekV32", DSA),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **DSA,
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "index_head_dim": 16,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **MLA,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**MLA, "q_lora_rank": 40, "n_group": 2}),
    "glm4_moe": (
        "Glm4Moe",
        {**EXPERTS, "num_key_value_heads": 2, "n_group": 2, "use_qk_norm": True, "attention_bias": True},
    ),
    "dots1": (
        "Dots1",
        {**EXPERTS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma4_text": (
        "Gemma4",  # layers 3 and 4 read the keys of 1 and 2
        {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
            "sliding_window": 8,
            "global_head_dim": 48,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": VOCAB,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_unified_text": (
        "Gemma4Unified",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "global_head_dim": 48,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "cwm": ("Cwm", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}),
    "minimax_m2": (
        "MiniMaxM2",
        {"intermediate_size": 48, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 16},
    ),
    "gpt_oss": (
        "GptOss",  # YaRN with a factor of 32
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
        },
    ),
}


RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 12, "time_step_rank": 10}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "mamba_d_state": 12,
            "mamba_dt_rank": 10,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **MLA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts": 8,
            "num_experts_per_token": 3,
            "num_shared_experts": 2,
            "linear_num_heads": 4,
            "linear_head_dim": 24,
        },
    ),
    "mamba2": (
        "Mamba2",
        {"expand": 1, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "chunk_size": 8},
    ),
}
# Of flash-linear-attention; see fla_models.py
FLA: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("GLA", {"num_heads": 4}),
    "retnet": ("RetNet", {"num_heads": 4, "expand_v": 1.5}),
    "rwkv7": (
        "RWKV7",
        {"decay_low_rank_dim": 24, "a_low_rank_dim": 20, "gate_low_rank_dim": 40, "v_low_rank_dim": 12},
    ),
}
RECURRENT.update(FLA)
# See ttt_models.py. No test but those of test_ttt.py reads a whole chunk.
RECURRENT["ttt_e2e"] = (
    "TTTE2E",
    {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "suffix_len": 2,
        "sliding_window_size": 12,
        "seq_len": 2048,
        "optimizer_inner": {"lr": 1.0, "clip_gradient": 1.0},
    },
)
KINDS.update(RECURRENT)


# Every language model that our engine builds, and variants of some. name: (kind, fields of its config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 24, "attention_bias": True}),
    "qwen3_windows": (
        "qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "mixtral": ("mixtral", {}),
    **{k: (k, {}) for k in ("qwen2", "qwen3_moe", "mistral", "phi3", "olmo2", "olmoe", "granite", "gemma2", "cohere2")},
    **{k: (k, {}) for k in ("smollm3", "starcoder2", "gpt_neox", "stablelm", "nemotron", "glm4", "mpt")},
    **{k: (k, {}) for k in ("gemma", "gemma3_text", "olmo3", "exaone4", "seed_oss", "ernie4_5", "ministral")},
    **{k: (k, {}) for k in ("cohere", "glm", "gpt_oss", "bitnet", "gemma4_text", "gemma4_unified_text")},
    **{k: (k, {}) for k in ("cwm", "minimax_m2")},
    **{k: (k, {}) for k in ("granitemoe", "granitemoeshared", "jais2", "qwen2_moe", "cohere2_moe")},
    "cohere2_moe_sigmoid": (
        "cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "rms_norm_eps": 1e-5},
    ),
    "qwen2_moe_windows": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "norm_topk_prob": True}),
    "gemma4_experts": ("gemma4_text", GEMMA4_EXPERTS),
    "exaone4_full": ("exaone4", {"layer_types": ["full_attention"] * 2, "sliding_window": None}),
    **{k: (k, {}) for k in ("deepseek_v32", "glm_moe_dsa")},
    **{k: (k, {}) for k in ("deepseek_v3", "deepseek_v2", "glm4_moe", "glm4_moe_lite", "dots1")},
    **{k: (k, {}) for k in RECURRENT},
    "mamba2_one_group": (
        "mamba2", {"n_groups": 1, "use_bias": True, "use_conv_bias": False},
    ),
    "gla_conv": (
        "gla", {"use_short_conv": True, "num_kv_heads": 2, "clamp_min": -0.03, "fuse_norm": False},
    ),
    "gla_hybrid": (
        "gla",
        {
            "num_hidden_layers": 3, "use_output_gate": False, "intermediate_size": None, "attn": [
                {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 8},
                {"layers": [2], "num_heads": 2, "rope_theta": 500.0},
            ],
        },
    ),
    "retnet_groups": ("retnet", {"num_kv_heads": 2, "use_output_gate": False, "tie_word_embeddings": True}),
    "rwkv7_no_bias": (
        "rwkv7", {"norm_first": False, "norm_bias": False, "fuse_norm": False, "intermediate_size": None},
    ),
    "qwen3_next_bias": ("qwen3_next", {"attention_bias": True, "mlp_only_layers": [0], "norm_topk_prob": False}),
    "kimi_linear_query": ("kimi_linear", {"q_lora_rank": 40, "n_group": 2, "topk_group": 1}),
    "deepseek_v2_greedy": ("deepseek_v2", {"q_lora_rank": 40, "topk_method": "greedy"}),
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True}),
    "mixtral_window": ("mixtral", {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 3}),
}  # fmt: skip


def model_class(prefix: str) -> Any:
    """The class of transformers with this prefix, or one of fla_models.py or ttt_models.py."""
    if prefix in {own for own, _ in FLA.values()}:
        from support import fla_models as library
    elif prefix == "TTTE2E":
        from support import ttt_models as library
    else:
        import transformers as library
    return getattr(library, f"{prefix}ForCausalLM")


def make_tiny(
    folder: str | Path, kind: str = "llama", dtype: str = "bfloat16", seed: int = 0, **overrides: Any
) -> Path:
    """A random checkpoint of KINDS[kind] in `folder`, with a tokenizer: 2 layers, GQA with 4 and 2 heads, untied.

    overrides: fields of the kind's config. Made once: a folder that has the same request recorded is left alone.
    The weights are large enough (std 0.1) that greedy choices have clear margins.
    """
    folder = Path(folder)
    prefix, differs = KINDS[kind]
    fields = {**SIZES, **differs, **overrides}
    request = json.dumps({"kind": kind, "dtype": dtype, "seed": seed, **fields}, sort_keys=True)
    done = folder / "tiny.json"
    if done.is_file() and done.read_text() == request:
        return folder
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    cls = model_class(prefix)
    computed = {name for name in fields if isinstance(getattr(cls.config_class, name, None), property)}
    model = cls(cls.config_class(**{name: v for name, v in fields.items() if name not in computed}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=generator)
            else:
                parameter.normal_(1.0, 0.1, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # Gemma 4
                buffer.uniform_(0.5, 0.9, generator=generator)
            elif name.endswith("mlp.e_score_correction_bias"):  # MiniMax-M2
                buffer.normal_(0.0, 0.1, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    done.write_text(request)
    return folder


def make_scripted(folder: str | Path, text: str) -> Path:
    """A checkpoint that continues any prompt that ends with text[0] with the rest of `text`, greedily, then EOS.

    Attention and MLPs add nothing, so a token decides the next one: the characters of `text` must be distinct ASCII.
    """
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedTokenizerFast

    folder = make_tiny(folder, dtype="float32")
    ids = PreTrainedTokenizerFast.from_pretrained(folder)(text).input_ids
    assert len(set(ids)) == len(ids) == len(text), f"a character occurs twice in {text!r}"
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        weight.fill_(1.0) if "norm" in name else weight.zero_()
    for i, (token, following) in enumerate(zip(ids, [*ids[1:], 1], strict=True)):
        weights["model.embed_tokens.weight"][token, i] = 1.0
        weights["lm_head.weight"][following, i] = 10.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_tiny_bert(folder: str | Path, seed: int = 0, cls: str = "BertModel", **overrides: Any) -> Path:
    """A random float32 BertModel in `folder`, with a tokenizer: 2 layers of 4 heads, hidden size 64.

    cls: another class of transformers with such fields; overrides: fields of its config.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    folder, model_class = Path(folder), getattr(transformers, cls)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 3,
    }  # fmt: skip
    model = model_class(model_class.config_class(**{**sizes, **overrides}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.1, generator=generator)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


_VISION = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8,
}  # fmt: skip
_TEXT = {**_VISION, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
# Encoders of images. name: (transformers' class, fields of its config)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov3": ("DINOv3ViTModel", {"num_register_tokens": 3}),
    "dinov3_gated": ("DINOv3ViTModel", {"use_gated_mlp": True, "hidden_act": "silu", "key_bias": True}),
    "dinov3_no_bias": (
        "DINOv3ViTModel",
        {"query_bias": False, "value_bias": False, "proj_bias": False, "mlp_bias": False},
    ),
    "siglip_vision": ("SiglipVisionModel", {"image_size": 32}),
    "siglip": ("SiglipModel", {}),
    "siglip_classes": ("SiglipForImageClassification", {"num_labels": 3}),
    "siglip2_vision": ("Siglip2VisionModel", {"num_patches": 16}),
    "siglip2": ("Siglip2Model", {}),
    "siglip2_classes": ("Siglip2ForImageClassification", {"num_labels": 5}),
    "swinv2": ("Swinv2Model", {"qkv_bias": False, "pretrained_window_sizes": [6, 0, 0]}),
    "swinv2_classes": ("Swinv2ForImageClassification", {"num_labels": 3}),
    "vjepa2": ("VJEPA2Model", {"qkv_bias": False}),
    "vjepa2_classes": ("VJEPA2ForVideoClassification", {"num_labels": 5}),
}
_OTHERS: dict[str, dict[str, Any]] = {  # sizes of those that differ from _VISION
    "Swinv2": {
        "embed_dim": 16, "depths": [2, 2, 1], "num_heads": [2, 4, 4], "window_size": 4, "image_size": 48,
        "patch_size": 4,
    },
    "VJEPA2": {
        "hidden_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8, "crop_size": 32,
        "tubelet_size": 2, "num_pooler_layers": 2, "mlp_ratio": 2.5, "pred_hidden_size": 24,
        "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1,
    },
}  # fmt: skip


def make_tiny_encoder(folder: str | Path, kind: str, seed: int = 0, **fields: Any) -> Path:
    """A random float32 checkpoint of ENCODERS in `folder`, with an image or video processor: patches of 8 pixels.

    fields: of the config
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    name, own = ENCODERS[kind]
    cls = getattr(transformers, name)
    fields = {**own, **fields}
    if name.startswith("DINOv3"):
        config = cls.config_class(**{**_VISION, "image_size": 32, **fields})
        processor: Any = transformers.DINOv3ViTImageProcessor(size={"height": 32, "width": 40})
    elif name.startswith(tuple(_OTHERS)):
        config = cls.config_class(**{**_OTHERS[name[:6]], **fields})
        if name.startswith("VJEPA2"):
            processor = transformers.VJEPA2VideoProcessor(crop_size=32)
        else:  # no multiple of windows, and odd sides after the first stage
            processor = transformers.ViTImageProcessor(size={"height": 50, "width": 37})
    else:
        if name.startswith("Siglip2"):
            processor = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=20)
        else:
            processor = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
        tower = (
            {**_VISION, "num_patches": 16} if name.startswith("Siglip2") else {**_VISION, "image_size": 32}
        )
        towers = {} if name.endswith("VisionModel") else {"text_config": _TEXT, "vision_config": tower}
        config = cls.config_class(**{**(towers or tower), **fields})
    model = cls(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.15, generator=generator)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Path(folder)


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VISION_TOKENS = {"<|vision_start|>": 512, "<|vision_end|>": 513, "<|image_pad|>": 514, "<|video_pad|>": 515}
MEDIA_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' or 'image_url' in part %}"
    + IMAGE
    + "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_QWEN_TEXT = {
    **SIZES, "vocab_size": 520, "hidden_size": 64, "intermediate_size": 96, "head_dim": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}  # fmt: skip
_QWEN3_TEXT = {
    "num_hidden_layers": 3, "head_dim": 24, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [5, 4, 3], "mrope_interleaved": True,
    },
}  # fmt: skip
_QWEN3_VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
# Models that read images. name: (prefix of transformers' classes, fields of the text model, those of the vision tower)
VLMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {},
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {},
        {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": ("Qwen3VL", _QWEN3_TEXT, _QWEN3_VISION),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {**_QWEN3_TEXT, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        _QWEN3_VISION,
    ),
}


def make_tiny_vlm(
    folder: str | Path, kind: str, seed: int = 0, tower: dict[str, Any] | None = None, **fields: Any
) -> Path:
    """A random float32 checkpoint of VLMS in `folder`: an image has one token for 8 x 8 pixels.

    tower: fields of the vision model; fields: of the text model
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    prefix, text, vision = VLMS[kind]
    vision = {**vision, **(tower or {})}
    ids = {name.strip("<|>").replace("pad", "token") + "_id": i for name, i in VISION_TOKENS.items()}
    ids = {name if "token" in name else name.replace("_id", "_token_id"): i for name, i in ids.items()}
    cls = getattr(transformers, f"{prefix}ForConditionalGeneration")
    text = {**_QWEN_TEXT, **text, **fields}
    config = cls.config_class(
        text_config={k: v for k, v in text.items() if v is not None}, vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"], **ids,
    )  # fmt: skip
    model = cls(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.15, generator=generator)
        model.get_input_embeddings().weight.normal_(0.0, 1.0, generator=generator)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(VISION_TOKENS)})
    assert tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)) == list(VISION_TOKENS.values())
    tokenizer.chat_template = MEDIA_TEMPLATE
    family = "Qwen3VL" if prefix.startswith("Qwen3") else "Qwen2VL"
    sizes = {"patch_size": vision["patch_size"], "merge_size": 2, "temporal_patch_size": 2}
    least = {"size": {"shortest_edge": 256, "longest_edge": 64 * 64}}
    videos = getattr(transformers, f"{family}VideoProcessor")(**sizes, **least, cap_pixels_per_frame=False)
    images = transformers.Qwen2VLImageProcessor(**sizes, **least)
    named = "Qwen2_5_VL" if prefix.startswith("Qwen2_5") else family
    processor = getattr(transformers, f"{named}Processor")(
        images, tokenizer, videos, chat_template=MEDIA_TEMPLATE
    )
    processor.save_pretrained(folder)
    return Path(folder)


OMNI = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>", "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}  # fmt: skip
OMNI_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}"
    + "".join(f"{{% if part['type'] == '{kind}' %}}{text}{{% endif %}}" for kind, text in OMNI.items())
    + "{% if 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@contextmanager
def small_videos() -> Iterator[None]:
    """Frames of a few pixels: the processor of Qwen2.5-Omni has limits of its own, whatever the checkpoint says."""
    import transformers

    cls = transformers.Qwen2_5OmniProcessor
    before = cls.videos_kwargs
    cls.videos_kwargs = {"size": {"shortest_edge": 256, "longest_edge": 64 * 64}}
    try:
        yield
    finally:
        cls.videos_kwargs = before


def make_tiny_omni(folder: str | Path, seed: int = 0, **fields: Any) -> Path:
    """A random float32 Qwen2.5-Omni Thinker: an image has one token for 8 x 8 pixels, audio 25 a second, up to 4 s.

    fields: of the text model
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    names = ("vision_bos", "vision_eos", "IMAGE", "VIDEO", "audio_bos", "audio_eos", "AUDIO")
    tokens = {f"{name.lower()}_token": f"<|{name}|>" for name in names}
    ids = dict(zip(tokens, range(VOCAB, VOCAB + len(tokens)), strict=True))
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config={k: v for k, v in {**_QWEN_TEXT, **fields}.items() if v is not None},
        vision_config=VLMS["qwen2_5_vl"][2],
        audio_config={
            "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48, "output_dim": 64, "n_window": 10, "max_source_positions": 50,
        },
        image_token_index=ids["image_token"], video_token_index=ids["video_token"],
        audio_token_index=ids["audio_token"], vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"], audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"], position_id_per_seconds=4,
    )  # fmt: skip
    model = transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.15, generator=generator)
        model.get_input_embeddings().weight.normal_(0.0, 1.0, generator=generator)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(tokens.values())})
    assert tokenizer.convert_tokens_to_ids(list(tokens.values())) == list(ids.values())
    tokenizer._set_model_specific_special_tokens(tokens)
    tokenizer.chat_template = OMNI_TEMPLATE
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    least = {"size": {"shortest_edge": 256, "longest_edge": 64 * 64}}
    transformers.Qwen2_5OmniProcessor(
        transformers.Qwen2VLImageProcessor(**sizes, **least),
        transformers.Qwen2VLVideoProcessor(**sizes, **least, cap_pixels_per_frame=False),
        transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=4, return_attention_mask=True),
        tokenizer, chat_template=OMNI_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    return Path(folder)


def make_tiny_whisper(folder: str | Path, seed: int = 0, **fields: Any) -> Path:
    """A random float32 Whisper in `folder`, for audio of up to a second. fields: of the config"""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    sizes = {
        "vocab_size": VOCAB, "num_mel_bins": 16, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3,
        "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 80,
        "max_source_positions": 50, "max_target_positions": 96, "pad_token_id": 3, "bos_token_id": 0, "eos_token_id": 1,
        "decoder_start_token_id": 2,
    }  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**sizes, **fields}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float(name.endswith("norm.weight")), 0.25, generator=generator)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    return Path(folder)


def make_tiny_pipeline(folder: str | Path, seed: int = 0) -> Path:
    """A random float32 SDXL pipeline of diffusers in `folder`, without tokenizers: two levels, 32 pixels and more."""
    import diffusers
    import torch
    import transformers

    torch.manual_seed(seed)
    levels = ["DownEncoderBlock2D"] * 2, ["UpDecoderBlock2D"] * 2
    text = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=100,
        projection_dim=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=64,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=(2, 4),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
    )  # fmt: skip
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=diffusers.AutoencoderKL(
            block_out_channels=[16, 32], down_block_types=levels[0], up_block_types=levels[1], norm_num_groups=8,
            latent_channels=4,
        ),
        unet=unet, text_encoder=transformers.CLIPTextModel(text), tokenizer=None, tokenizer_2=None,
        text_encoder_2=transformers.CLIPTextModelWithProjection(text),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )  # fmt: skip
    pipe.save_pretrained(folder)
    return Path(folder)


def make_tiny_llama(folder: str | Path, dtype: str = "bfloat16", seed: int = 0, **overrides: Any) -> Path:
    """make_tiny of a LlamaForCausalLM with llama3 rope scaling."""
    return make_tiny(folder, "llama", dtype, seed, **overrides)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: python tests/support/tiny.py FOLDER [{'|'.join(KINDS)}]")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(make_tiny(*sys.argv[1:]))
