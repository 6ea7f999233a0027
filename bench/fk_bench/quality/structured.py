"""Random weights whose logits have structure: of a model that has a config.json, and no weights here.

The logits of a freshly initialized model are nearly equal, so that no fault changes a distribution. transformers draws
the weights; then the last norm's weight is multiplied until the logits have a standard deviation of LOGITS over the
vocabulary, about that of trained models. Ranks and distributions then depend on every layer. A model without such a
norm keeps its weights, and its planted faults show whether that suffices.
"""

from __future__ import annotations

from pathlib import Path

import torch

LOGITS = 3.0


def checkpoint(model: Path, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint of a folder that has only a config.json, as bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    torch.manual_seed(seed)
    with torch.inference_mode():
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        tokens = torch.randint(config.get_text_config().vocab_size, (4, 64))
        before = made(input_ids=tokens).logits.std(-1).mean()
        if (norm := last_norm(made)) is not None:
            norm.weight.mul_(LOGITS / before)
    made.bfloat16().save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        (folder / file.name).symlink_to(file.resolve())
    return folder


def last_norm(model: torch.nn.Module) -> torch.nn.Module | None:
    """The norm behind the last layer, which hands its output to the head."""
    norms = [
        m
        for n, m in model.named_modules()
        if n in ("model.norm", "transformer.ln_f", "model.final_layernorm")
    ]
    return norms[-1] if norms else None
