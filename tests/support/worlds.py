"""Tiny checkpoints of world models, with random weights under the key names of the public ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

OASIS: dict[str, Any] = {
    "architectures": ["Oasis"], "model_type": "oasis", "dtype": "float32", "input_h": 8, "input_w": 6, "in_channels": 4,
    "hidden_size": 64, "depth": 2, "num_heads": 4, "max_frames": 5,
    "vae": {
        "input_height": 32, "input_width": 24, "patch_size": 4, "latent_dim": 4, "enc_dim": 32, "enc_depth": 1,
        "enc_heads": 2, "dec_dim": 48, "dec_depth": 2, "dec_heads": 2,
    },
}  # fmt: skip


def _linear(name: str, out: int, size: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, size), **({f"{name}.bias": (out,)} if bias else {})}


def dit_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """{key: shape} of open-oasis' DiT, in its order."""
    size, channels, patch = c["hidden_size"], c["in_channels"], 2
    made: dict[str, tuple[int, ...]] = {
        "x_embedder.proj.weight": (size, channels, patch, patch), "x_embedder.proj.bias": (size,),
    }  # fmt: skip
    made |= _linear("t_embedder.mlp.0", size, 256) | _linear("t_embedder.mlp.2", size, size)
    made |= _linear("external_cond", size, 25)
    for i in range(c["depth"]):
        for kind in "st":
            at = f"blocks.{i}.{kind}_"
            made |= _linear(f"{at}attn.to_qkv", 3 * size, size, bias=False)
            made |= _linear(f"{at}attn.to_out", size, size)
            made |= _linear(f"{at}mlp.fc1", 4 * size, size) | _linear(f"{at}mlp.fc2", size, 4 * size)
            made |= _linear(f"{at}adaLN_modulation.1", 6 * size, size)
    made |= _linear("final_layer.linear", patch * patch * channels, size)
    return made | _linear("final_layer.adaLN_modulation.1", 2 * size, size)


def vae_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """{key: shape} of open-oasis' AutoencoderKL, in its order."""
    patch = c["patch_size"]
    made: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (c["enc_dim"], 3, patch, patch), "patch_embed.proj.bias": (c["enc_dim"],),
    }  # fmt: skip
    for kind, name in (("enc", "encoder"), ("dec", "decoder")):
        size = c[f"{kind}_dim"]
        for i in range(c[f"{kind}_depth"]):
            at = f"{name}.{i}."
            made |= {f"{at}norm{n}.{part}": (size,) for n in (1, 2) for part in ("weight", "bias")}
            made |= _linear(f"{at}attn.qkv", 3 * size, size) | _linear(f"{at}attn.proj", size, size)
            made |= _linear(f"{at}mlp.fc1", 4 * size, size) | _linear(f"{at}mlp.fc2", size, 4 * size)
        made |= {f"{kind}_norm.{part}": (size,) for part in ("weight", "bias")}
    made |= _linear("quant_conv", 2 * c["latent_dim"], c["enc_dim"])
    made |= _linear("post_quant_conv", c["dec_dim"], c["latent_dim"])
    return made | _linear("predictor", 3 * patch * patch, c["dec_dim"])


def oasis_weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The random weights of transformer and VAE."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        return {
            key: 0.2 * torch.randn(shape, generator=generator) + ("norm" in key and key.endswith("weight"))
            for key, shape in shapes.items()
        }

    return drawn(dit_shapes(OASIS)), drawn(vae_shapes(OASIS["vae"]))


def oasis(folder: Path, **changes: Any) -> Path:
    """Save a checkpoint as it is published: two files, here with a config."""
    folder.mkdir(parents=True, exist_ok=True)
    dit, vae = oasis_weights()
    freqs = {f"{kind}_rotary_emb.freqs": torch.ones(8) for kind in ("spatial", "temporal")}
    save_file({**dit, **freqs}, folder / "oasis500m.safetensors")
    save_file(vae, folder / "vit-l-20.safetensors")
    (folder / "config.json").write_text(json.dumps({**OASIS, **changes}))
    return folder


def walk(first: int, later: int, seed: int = 0) -> dict[str, Any]:
    """A request's prompt: `first` images and `later` actions."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    images = [Image.fromarray(rng.integers(0, 256, (32, 24, 3), dtype=np.uint8)) for _ in range(first)]
    actions = rng.random((first + later, 25)).astype(np.float32)
    return {"images": images, "actions": actions[first:].tolist(), "prompt_actions": actions[:first].tolist()}
