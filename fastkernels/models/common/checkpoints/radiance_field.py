"""Config of a radiance field of a hash grid and two small networks, and the sizes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.overrides.geometry.hash_encoding import table_rows
from fastkernels.overrides.geometry.march_rays import MOST_CASCADES

# Outputs of the networks: the density's first one is a logarithm, the other's first three are colors
DENSITY_OUT, COLOR_OUT = 16, 16
INTEGERS = {
    "aabb_scale": 1, "levels": 16, "features_per_level": 2, "base_resolution": 16, "log2_hashmap_size": 19, "width": 64,
    "density_layers": 1, "color_layers": 2, "grid": 128,
}  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, checked, with defaults, and cascades. Raises Unsupported."""
    made = {**INTEGERS, "sh_degree": 3, "scale": 1.0, "offset": [0.0, 0.0, 0.0], **raw}
    for name in INTEGERS:
        if type(made[name]) is not int or made[name] < 1:
            raise Unsupported(f"config.{name}={made[name]!r} is not supported, only integers above 0")
    cascades = made["aabb_scale"].bit_length()
    if made["aabb_scale"] & (made["aabb_scale"] - 1) or cascades > MOST_CASCADES:
        raise Unsupported(
            f"config.aabb_scale={made['aabb_scale']} is not supported, only powers of two up to"
            f" {1 << MOST_CASCADES - 1}"
        )
    if made["grid"] & (made["grid"] - 1) or not 2 <= made["grid"] <= 1024:
        raise Unsupported(f"config.grid={made['grid']} is not supported, only powers of two from 2 to 1024")
    if not 3 <= made["log2_hashmap_size"] <= 30:
        raise Unsupported(
            f"config.log2_hashmap_size={made['log2_hashmap_size']} is not supported, only 3 to 30"
        )
    if type(made["sh_degree"]) is not int or not 0 <= made["sh_degree"] <= 4:
        raise Unsupported(f"config.sh_degree={made['sh_degree']!r} is not supported, only 0 to 4")
    usual = math.exp(
        math.log(2048 * made["aabb_scale"] / made["base_resolution"]) / max(made["levels"] - 1, 1)
    )
    factor = made.setdefault("per_level_scale", usual)
    numbers = [factor, made["scale"], *(made["offset"] if isinstance(made["offset"], list) else [None])]
    if len(numbers) != 5 or any(type(n) not in (int, float) or not math.isfinite(n) for n in numbers):
        raise Unsupported(
            f"config.per_level_scale={factor!r}, scale={made['scale']!r} and offset={made['offset']!r} are not numbers,"
            " of offset three"
        )
    if factor < 1 or made["scale"] <= 0:
        raise Unsupported(
            f"config.per_level_scale={factor} must be at least 1, and scale={made['scale']} above 0"
        )
    return {**made, "cascades": cascades}


def padded(size: int) -> int:
    """Inputs of a network are rounded up to 16, and the weights of the others are unused."""
    return -(-size // 16) * 16


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """{parameter: its number of elements}, in the order of snapshots."""
    width, inputs = config["width"], padded(config["levels"] * config["features_per_level"])
    colors = padded(DENSITY_OUT + (config["sh_degree"] + 1) ** 2)
    grid = (config[n] for n in ("levels", "base_resolution", "per_level_scale", "log2_hashmap_size"))
    return {
        "density_net": width * (inputs + (config["density_layers"] - 1) * width + DENSITY_OUT),
        "color_net": width * (colors + (config["color_layers"] - 1) * width + COLOR_OUT),
        "table": table_rows(*grid) * config["features_per_level"],
    }
