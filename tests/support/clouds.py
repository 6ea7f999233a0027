"""Tiny checkpoints of Point Transformer V3 under Pointcept's key names, and clouds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PTV3: dict[str, Any] = {
    "architectures": ["PointTransformerV3"], "model_type": "ptv3", "dtype": "float32", "num_classes": 5,
    "in_channels": 4, "stride": [2, 4], "enc_depths": [1, 2, 1], "enc_channels": [16, 24, 32],
    "enc_num_head": [2, 3, 2], "enc_patch_size": [16, 16, 8], "dec_depths": [2, 1], "dec_channels": [16, 24],
    "dec_num_head": [2, 2], "dec_patch_size": [16, 16], "shuffle_orders": True, "shuffle_seed": 3,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """{key: shape} of the state dict of the repository's class, and `seg_head`."""
    made: dict[str, tuple[int, ...]] = {}

    def dense(key: str, inner: int, outer: int) -> None:
        made[f"{key}.weight"], made[f"{key}.bias"] = (outer, inner), (outer,)

    def vectors(key: str, size: int, *more: str) -> None:
        made.update({f"{key}.{name}": (size,) for name in ("weight", "bias", *more)})

    def batch_norm(key: str, size: int) -> None:
        vectors(key, size, "running_mean", "running_var")
        made[f"{key}.num_batches_tracked"] = ()

    def blocks(key: str, depth: int, size: int) -> None:
        for i in range(depth):
            made[f"{key}.block{i}.cpe.0.weight"] = (size, 3, 3, 3, size)
            made[f"{key}.block{i}.cpe.0.bias"] = (size,)
            dense(f"{key}.block{i}.cpe.1", size, size)
            for name in ("cpe.2", "norm1.0", "norm2.0"):
                vectors(f"{key}.block{i}.{name}", size)
            dense(f"{key}.block{i}.attn.qkv", size, 3 * size)
            dense(f"{key}.block{i}.attn.proj", size, size)
            dense(f"{key}.block{i}.mlp.0.fc1", size, 4 * size)
            dense(f"{key}.block{i}.mlp.0.fc2", 4 * size, size)

    channels = config["enc_channels"]
    wide = [*config["dec_channels"], channels[-1]]
    made["embedding.stem.conv.weight"] = (channels[0], 5, 5, 5, config["in_channels"])
    batch_norm("embedding.stem.norm", channels[0])
    for s, depth in enumerate(config["enc_depths"]):
        if s:
            dense(f"enc.enc{s}.down.proj", channels[s - 1], channels[s])
            batch_norm(f"enc.enc{s}.down.norm.0", channels[s])
        blocks(f"enc.enc{s}", depth, channels[s])
    for s, depth in enumerate(config["dec_depths"]):
        for name, size in (("proj", wide[s + 1]), ("proj_skip", channels[s])):
            dense(f"dec.dec{s}.up.{name}.0", size, wide[s])
            batch_norm(f"dec.dec{s}.up.{name}.1", wide[s])
        blocks(f"dec.dec{s}", depth, wide[s])
    if config["num_classes"]:
        dense("seg_head", wide[0], config["num_classes"])
    return made


def state(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights, from each of which the result depends."""
    generator, made = torch.Generator().manual_seed(0), {}
    for key, shape in shapes(config).items():
        if key.endswith("num_batches_tracked"):
            made[key] = torch.tensor(7)
            continue
        value = torch.randn(shape, generator=generator)
        if key.endswith("running_var"):
            value = value.abs() + 0.5
        elif len(shape) == 5:
            value *= (9 * shape[-1]) ** -0.5
        elif len(shape) == 2:
            value *= shape[1] ** -0.5
        else:
            value = 0.2 * value + key.endswith("weight")
        made[key] = value
    return made


def ptv3(folder: Path, prefix: str = "module.backbone.", **changes: Any) -> dict[str, torch.Tensor]:
    """Save a checkpoint with Pointcept's prefixes of its keys. Returns the state dict without them."""
    config = {**PTV3, **changes}
    made = state(config)
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        (prefix.replace("backbone.", "") if key.startswith("seg_head") else prefix) + key: value
        for key, value in made.items()
    }
    save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return made


def cloud(points: int, seed: int = 0, channels: int = 4, grid_size: float = 0.05) -> dict[str, Any]:
    """Points of a flat box, several of them in a cell."""
    generator = torch.Generator().manual_seed(seed)
    coord = torch.rand(points, 3, generator=generator) * torch.tensor([0.6, 0.9, 0.2]) - 0.3
    return {
        "coord": coord,
        "feat": torch.randn(points, channels, generator=generator),
        "grid_size": grid_size,
    }


def lists(given: dict[str, Any]) -> dict[str, Any]:
    """A cloud for JSON."""
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
