"""The default model of serve-compare: a tiny random Llama with a byte tokenizer, created once in the cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VOCAB = 512


def small_model() -> Path:
    """Its directory (0.5 M parameters, bf16). Needs transformers; downloads nothing."""
    from fastkernels.core.env import Environment

    folder = Path(Environment.read().cache) / "models" / "small-random-llama"
    if not (folder / "tokenizer.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "model"
            _save_model(made)
            _save_tokenizer(made)
            os.replace(made, folder)
    return folder


def _save_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0 if weight.dim() > 1 else 1.0, 0.1, generator=generator)
    model.bfloat16().save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", "<unk>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<extra_{i}>" for i in range(len(names), VOCAB)]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        model_max_length=4096,
    )  # fmt: skip
    fast.save_pretrained(folder)
