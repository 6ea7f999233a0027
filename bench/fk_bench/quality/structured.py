"""Random weights whose logits have structure: of a model that has a config.json, and no weights here.

The logits of a freshly initialized model are nearly equal, so that no fault changes a distribution. transformers draws
the weights; then the last norm's weight is multiplied until the logits have a standard deviation of LOGITS over the
vocabulary, about that of trained models. Ranks and distributions then depend on every layer. A model without such a
norm keeps its weights, and its planted faults show whether that suffices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fk_bench.core.hub import ModelError

LOGITS = 3.0


def checkpoint(model: Path, folder: Path, seed: int = 0, strong: bool = False) -> Path:
    """Write the checkpoint of a folder that has only a config.json, as bfloat16.

    strong: draw matrices with the scale of their inputs, so that each layer of a small model changes the logits
    Raises ModelError for an architecture of which transformers has no model of text alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    torch.manual_seed(seed)
    with torch.no_grad():  # tied weights of inference mode cannot be saved
        try:
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        except ValueError as error:  # an architecture that answers text about images, say
            raise ModelError(
                f"{model}: transformers makes no model of text alone from {config.model_type!r}, so that no random"
                " weights can be drawn: give a checkpoint with weights"
            ) from error
        for name, weight in made.named_parameters() if strong else ():
            if name.endswith("A_log"):
                weight.uniform_(-1.0, 1.0)
            elif weight.dim() > 1:
                weight.normal_(0.0, 0.1 if "embed" in name else weight.shape[-1] ** -0.5)
        tokens = torch.randint(config.get_text_config().vocab_size, (4, 64))
        before = made(input_ids=tokens).logits.std(-1).mean()
        if (norm := last_norm(made)) is not None:
            shift = float(not norm.weight.any())  # Gemma's norms multiply by weight + 1
            norm.weight.copy_((norm.weight + shift) * (LOGITS / before) - shift)
    made.bfloat16().save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        (folder / file.name).symlink_to(file.resolve())
    return folder


def last_norm(model: torch.nn.Module) -> Any:
    """The norm behind the last layer, which hands its output to the head; None if it has another name."""
    names = (
        "model.norm",
        "transformer.ln_f",
        "model.final_layernorm",
        "gpt_neox.final_layer_norm",
        "backbone.norm_f",
    )
    return next((m for n, m in model.named_modules() if n in names), None)
