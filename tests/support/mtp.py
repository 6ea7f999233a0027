"""Tiny checkpoints with a head for multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny


def make_mtp(folder: Path, kind: str, own: bool = True) -> Path:
    """A tiny checkpoint with a random head. own: DeepSeek's has an embedding and an output matrix of its own."""
    folder = make_tiny(folder, kind, "float32")
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    hidden, deepseek = weights["model.norm.weight"].shape[0], kind == "deepseek_v3"
    prefix = "model.layers.2." if deepseek else "mtp."
    names = ("enorm", "hnorm", "shared_head.norm")
    if not deepseek:
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    made = {f"{prefix}{name}.weight": torch.ones(hidden) for name in names}
    made[prefix + ("eh_proj" if deepseek else "fc") + ".weight"] = torch.zeros(hidden, 2 * hidden)
    layer = prefix if deepseek else "mtp.layers.0."
    made |= {
        k.replace("model.layers.1.", layer): v for k, v in weights.items() if k.startswith("model.layers.1.")
    }
    if deepseek and own:
        made[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        made[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"]
    for name, tensor in made.items():
        mean, std = (0.0, 0.1) if tensor.dim() > 1 else (1.0 if deepseek else 0.1, 0.1)
        made[name] = torch.empty(tensor.shape).normal_(mean, std, generator=generator)
    save_file({**weights, **made}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder
