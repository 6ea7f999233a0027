"""Snapshots of instant-ngp (.ingp, .msgpack): the fields of a config.json, and the tensors of a radiance field."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.models.common.checkpoints.radiance_field import read_config, sizes_of

FINEST = 2048  # resolution of the last level on the unit cube, from which per_level_scale follows if it is not given


@lru_cache(maxsize=1)
def _read(file: Path, changed: float) -> dict[str, Any]:
    """The whole file. changed: its time, so that another file of the same name is read again."""
    try:
        import msgpack
    except ImportError as error:
        raise ValueError(f"{file} needs the package msgpack, which the extra 'scenes' installs") from error
    data = file.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        elif data[:1] == b"\x78":
            data = zlib.decompress(data)
        found = msgpack.unpackb(data, strict_map_key=False, max_bin_len=1 << 31)
    except (ValueError, OSError, EOFError, zlib.error, msgpack.UnpackException) as error:
        raise ValueError(
            f"{file} is not a snapshot of instant-ngp: {type(error).__name__}: {error}"
        ) from error
    for part in ("encoding", "network", "rgb_network", "snapshot"):
        if not isinstance(found, dict) or not isinstance(found.get(part), dict):
            raise ValueError(
                f"{file} is not a snapshot of a radiance field of instant-ngp: it has no {part!r}"
            )
    return found


def _open(file: Path) -> dict[str, Any]:
    return _read(file, file.stat().st_mtime)


def _number(table: Mapping[str, Any], name: str, default: Any, file: Path) -> Any:
    value = table.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{file}: {name}={value!r} is not a number")
    return value


def config_of(file: Path) -> dict[str, Any]:
    """The fields of a config.json. Raises ValueError for encodings other than hash grids and harmonics."""
    found = _open(file)
    encoding, density, color, snapshot = (
        found[n] for n in ("encoding", "network", "rgb_network", "snapshot")
    )
    kind = str(encoding.get("otype", "HashGrid"))
    if kind.lower() not in ("hashgrid", "grid"):
        raise ValueError(f"{file}: the encoding {kind!r} is not supported, only 'HashGrid'")
    directions = found.get("dir_encoding") or {}
    nested = [n for n in directions.get("nested", ()) if n.get("otype") != "Identity"] or [directions]
    if str(nested[0].get("otype", "SphericalHarmonics")) != "SphericalHarmonics":
        raise ValueError(f"{file}: the direction encoding {nested[0].get('otype')!r} is not supported")
    nerf = snapshot.get("nerf") or {}
    dataset = nerf.get("dataset") or {}
    aabb_scale = int(_number(nerf, "aabb_scale", dataset.get("aabb_scale", 1), file))
    features = int(_number(encoding, "n_features_per_level", 2, file))
    levels = int(_number(encoding, "n_levels", encoding.get("n_features", 32) // features, file))
    base = int(_number(encoding, "base_resolution", 16, file))
    usual = math.exp(math.log(FINEST * aabb_scale / base) / max(levels - 1, 1))
    return {
        "architectures": ["InstantNGP"], "model_type": "instant_ngp", "dtype": "float16", "aabb_scale": aabb_scale,
        "levels": levels, "features_per_level": features, "base_resolution": base,
        "log2_hashmap_size": int(_number(encoding, "log2_hashmap_size", 19, file)),
        "per_level_scale": float(_number(encoding, "per_level_scale", usual, file)),
        "width": int(_number(density, "n_neurons", 64, file)),
        "density_layers": int(_number(density, "n_hidden_layers", 1, file)),
        "color_layers": int(_number(color, "n_hidden_layers", 2, file)),
        "sh_degree": int(_number(nested[0], "degree", 4, file)) - 1,
        "grid": int(_number(snapshot, "density_grid_size", 128, file)),
        "scale": float(dataset.get("scale", 1.0)), "offset": [float(v) for v in dataset.get("offset", (0.0, 0.0, 0.0))],
    }  # fmt: skip


def tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors by our names. Parameters are the density network's, the color network's, then the table's."""
    config, snapshot = read_config(config_of(file)), _open(file)["snapshot"]
    kind = np.float32 if snapshot.get("params_type") == "float" else np.float16
    parts = sizes_of(config)
    params = np.frombuffer(snapshot.get("params_binary", b""), kind)
    if len(params) < sum(parts.values()):
        raise ValueError(f"{file} has {len(params)} parameters, and its config needs {sum(parts.values())}")
    made, first = {}, 0
    for name, size in parts.items():
        made[name] = torch.from_numpy(params[first : first + size].astype(np.float16))
        first += size
    grid = np.frombuffer(snapshot.get("density_grid_binary", b""), np.float16)
    cells = config["cascades"] * config["grid"] ** 3
    if len(grid) != cells:
        raise ValueError(f"{file} has {len(grid)} cells of the density grid, and its config needs {cells}")
    made["table"] = made["table"].view(-1, config["features_per_level"])
    made["density_grid"] = torch.from_numpy(grid.astype(np.float16))
    return made
