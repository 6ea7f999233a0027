"""Tiny scenes: Gaussians in each file format, and a radiance field with a snapshot of instant-ngp's layout."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from fastkernels.overrides.geometry.cases import cameras, scene

COUNT, DEGREE, WIDTH, HEIGHT = 60, 2, 40, 28
NGP: dict[str, Any] = {
    "architectures": ["InstantNGP"], "model_type": "instant_ngp", "dtype": "float32", "aabb_scale": 2, "levels": 4,
    "features_per_level": 4, "base_resolution": 4, "log2_hashmap_size": 8, "width": 16, "sh_degree": 2, "grid": 8,
    "per_level_scale": 1.6, "density_layers": 1, "color_layers": 2,
}  # fmt: skip


def gaussians(count: int = COUNT) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, with gsplat's names."""
    made = scene(count, torch.Generator().manual_seed(5), DEGREE)
    return {
        "means": made.means, "quats": made.quats, "scales": made.scales.log(), "opacities": made.opacities.logit(),
        "sh0": made.coeffs[:, :1].clone(), "shN": made.coeffs[:, 1:].clone(),
    }  # fmt: skip


def save_safetensors(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(gaussians(), folder / "model.safetensors")
    config = {
        "architectures": ["GaussianSplatting"], "model_type": "gaussian_splatting", "dtype": "float32",
        "num_gaussians": COUNT, "sh_degree": DEGREE,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))


def save_gsplat(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"step": 7, "splats": gaussians()}, folder / "ckpt_6_rank0.pt")


def save_ply(file: Path, count: int = COUNT) -> None:
    """As 3DGS writes it: normals, then coefficients channel by channel."""
    made = gaussians(count)
    rest = made["shN"].transpose(1, 2).reshape(count, -1)
    parts = [
        made["means"], torch.zeros(count, 3), made["sh0"][:, 0], rest, made["opacities"][:, None], made["scales"],
        made["quats"],
    ]  # fmt: skip
    names = [*"xyz", "nx", "ny", "nz", *(f"f_dc_{i}" for i in range(3))]
    names += [f"f_rest_{i}" for i in range(rest.shape[1])] + ["opacity"]
    names += [f"scale_{i}" for i in range(3)] + [f"rot_{i}" for i in range(4)]
    head = ["ply", "format binary_little_endian 1.0", f"element vertex {count}"]
    head += [f"property float {name}" for name in names] + ["end_header", ""]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes("\n".join(head).encode() + torch.cat(parts, 1).numpy().astype("<f4").tobytes())


def field(config: dict[str, Any] = NGP) -> dict[str, torch.Tensor]:
    """The tensors of a radiance field: colors and densities that differ from place to place."""
    from fastkernels.models.common.checkpoints.radiance_field import read_config, sizes_of

    full, generator = read_config(config), torch.Generator().manual_seed(2)
    made = {
        name: (0.7 * torch.randn(size, generator=generator)).half().float()
        for name, size in sizes_of(full).items()
    }
    made["table"] = (2 * made["table"]).view(-1, full["features_per_level"])
    cells = torch.rand(full["cascades"] * full["grid"] ** 3, generator=generator)
    return {**made, "density_grid": (cells < 0.4).float()}


def save_ngp(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    made = field({**NGP, **changes})
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**NGP, **changes}))
    return made


def snapshot(**changes: Any) -> dict[str, Any]:
    """A snapshot as instant-ngp writes it, before msgpack."""
    made = field()
    params = torch.cat([made[name].flatten() for name in ("density_net", "color_net", "table")])
    encoding = {
        "otype": "HashGrid", "n_levels": 4, "n_features_per_level": 4, "base_resolution": 4, "log2_hashmap_size": 8,
        "per_level_scale": 1.6,
    }  # fmt: skip
    return {
        "encoding": encoding,
        "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
        "rgb_network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 2},
        "dir_encoding": {
            "otype": "Composite",
            "nested": [{"otype": "SphericalHarmonics", "degree": 3}, {"otype": "Identity"}],
        },
        "snapshot": {
            "params_type": "__half", "params_binary": params.numpy().astype(np.float16).tobytes(),
            "density_grid_size": 8, "density_grid_binary": made["density_grid"].numpy().astype(np.float16).tobytes(),
            "nerf": {"aabb_scale": 2},
        },
    } | changes  # fmt: skip


def save_snapshot(file: Path, **changes: Any) -> None:
    import msgpack

    file.parent.mkdir(parents=True, exist_ok=True)
    data = msgpack.packb(snapshot(**changes))
    file.write_bytes(zlib.compress(data) if file.suffix == ".ingp" else data)


def views(
    count: int, width: int = WIDTH, height: int = HEIGHT, seed: int = 0, **more: Any
) -> list[dict[str, Any]]:
    """Cameras of requests that look at the origin; center: at another point."""
    center = torch.tensor(more.pop("center", (0.0, 0.0, 0.0)))
    distance = more.pop("distance", 2.5)
    made, ks = cameras(count, width, height, torch.Generator().manual_seed(seed), distance)
    made[:, :3, 3] -= made[:, :3, :3] @ center
    return [
        {"width": width, "height": height, "K": k.tolist(), "viewmat": v.tolist(), **more}
        for v, k in zip(made, ks, strict=True)
    ]
