"""Tiny random Llama checkpoints and a byte-level tokenizer: `python tests/support/tiny.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
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


def _tokenizer(folder: Path) -> None:
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
    fast.save_pretrained(folder)


def make_tiny_llama(folder: str | Path, dtype: str = "bfloat16", seed: int = 0, **overrides: Any) -> Path:
    """A LlamaForCausalLM in `folder`: GQA with 4 and 2 heads of 32, llama3 rope scaling, untied.

    overrides: fields of LlamaConfig. Made once: a folder that has the same request recorded is left alone.
    The weights are large enough (std 0.1) that greedy choices have clear margins.
    """
    folder = Path(folder)
    request = json.dumps({"dtype": dtype, "seed": seed, **overrides}, sort_keys=True)
    done = folder / "tiny.json"
    if done.is_file() and done.read_text() == request:
        return folder
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 3,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **overrides}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1, generator=generator)
            else:
                parameter.normal_(1.0, 0.1, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _tokenizer(folder)
    done.write_text(request)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/support/tiny.py FOLDER")
    print(make_tiny_llama(sys.argv[1]))
