"""Files of scenes: Gaussians as 3DGS (.ply) and gsplat (.pt) save them, and snapshots of instant-ngp.

All are read without code of theirs. The keys of Gaussians are those of gsplat's checkpoints.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

PLY, GSPLAT, SNAPSHOTS = ".ply", ".pt", (".ingp", ".msgpack")
SUFFIXES = (PLY, GSPLAT, *SNAPSHOTS)
# Where 3DGS and gsplat save scenes; the one with the most iterations counts
PLACES = (
    "*.ply",
    "point_cloud/iteration_*/point_cloud.ply",
    "ply/*.ply",
    "ckpt*.pt",
    "ckpts/ckpt*.pt",
    "*.ingp",
    "*.msgpack",
)
_TYPES = {
    **dict.fromkeys(("float", "float32"), "<f4"), **dict.fromkeys(("double", "float64"), "<f8"),
    **dict.fromkeys(("uchar", "uint8"), "u1"), **dict.fromkeys(("char", "int8"), "i1"),
    **dict.fromkeys(("int", "int32"), "<i4"), **dict.fromkeys(("uint", "uint32"), "<u4"),
    **dict.fromkeys(("short", "int16"), "<i2"), **dict.fromkeys(("ushort", "uint16"), "<u2"),
}  # fmt: skip
LONGEST_HEADER = 1 << 16


def find(folder: Path) -> Path | None:
    """The scene of a folder without config.json: of several, the one after the most iterations."""
    if (folder / "config.json").is_file():
        return None
    found = [file for place in PLACES for file in folder.glob(place) if file.is_file()]
    return max(
        found, key=lambda f: [int(n) for n in re.findall(r"\d+", str(f.relative_to(folder)))], default=None
    )


def config_of(file: Path) -> dict[str, Any]:
    """The fields of a config.json for a scene's file. Raises ValueError."""
    if file.suffix in SNAPSHOTS:
        from fastkernels.models.common.checkpoints import snapshots

        return snapshots.config_of(file)
    if file.suffix == PLY:
        count, names, _, _ = _header(file)
        rest = sum(name.startswith("f_rest_") for name in names)
        bands = rest // 3 + 1
    else:
        shapes = {key: value.shape for key, value in _gsplat(file).items()}
        count, bands = shapes["means"][0], 1 + shapes["shN"][1]
    if not count:
        raise ValueError(f"{file} has no Gaussians: at least one is needed")
    degree = round(bands**0.5) - 1
    if (degree + 1) ** 2 != bands:
        raise ValueError(
            f"{file} has {bands} coefficients of spherical harmonics a channel, which is no square"
        )
    return {
        "architectures": ["GaussianSplatting"], "model_type": "gaussian_splatting", "dtype": "float32",
        "num_gaussians": count, "sh_degree": degree,
    }  # fmt: skip


def tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a scene's file. Raises ValueError, OSError."""
    if file.suffix == PLY:
        return _ply(file)
    if file.suffix == GSPLAT:
        return _gsplat(file)
    from fastkernels.models.common.checkpoints import snapshots

    return snapshots.tensors(file)


def _header(file: Path) -> tuple[int, list[str], np.dtype, int]:
    """(vertices, names of their properties, type of a vertex, bytes before the first one)."""
    with file.open("rb") as f:
        start = f.read(LONGEST_HEADER)
    head, end, _ = start.partition(b"end_header")
    if not start.startswith(b"ply") or not end:
        raise ValueError(f"{file} is not a PLY file: it has no header from 'ply' to 'end_header'")
    lines = [line.split() for line in head.decode("ascii", "replace").splitlines()]
    form = next((" ".join(words[1:]) for words in lines if words[:1] == ["format"]), "none")
    if form != "binary_little_endian 1.0":
        raise ValueError(f"{file} has the format {form!r}; supported is 'binary_little_endian 1.0'")
    elements = [words for words in lines if words[:1] == ["element"]]
    if (
        not elements
        or elements[0][1:2] != ["vertex"]
        or len(elements[0]) != 3
        or not elements[0][2].isdigit()
    ):
        raise ValueError(f"{file}: the first element must be 'vertex' with a count, got {elements[:1]}")
    first = lines.index(elements[0]) + 1
    last = lines.index(elements[1]) if len(elements) > 1 else len(lines)
    properties = [words for words in lines[first:last] if words[:1] == ["property"]]
    if wrong := [words for words in properties if len(words) != 3 or words[1] not in _TYPES]:
        raise ValueError(f"{file}: {' '.join(wrong[0])!r} is not a property of a number")
    names = [words[2] for words in properties]
    wanted = {*"xyz", "opacity", *(f"f_dc_{i}" for i in range(3)), *(f"scale_{i}" for i in range(3))}
    wanted |= {f"rot_{i}" for i in range(4)}
    if missing := sorted(wanted - set(names)):
        raise ValueError(f"{file} is not a scene of Gaussians: its vertices have no {', '.join(missing)}")
    kind = np.dtype([(words[2], _TYPES[words[1]]) for words in properties])
    offset = start.index(b"\n", len(head)) + 1
    count, size = int(elements[0][2]), file.stat().st_size
    if size < offset + count * kind.itemsize:
        raise ValueError(
            f"{file} is truncated: {size} bytes, and {count} vertices end at {offset + count * kind.itemsize}"
        )
    return count, names, kind, offset


def _ply(file: Path) -> dict[str, torch.Tensor]:
    count, names, kind, offset = _header(file)
    rows = np.memmap(file, kind, "r", offset, (count,)) if count else np.empty(0, kind)

    def columns(*wanted: str) -> torch.Tensor:
        made = np.empty((count, len(wanted)), np.float32)
        for i, name in enumerate(wanted):
            made[:, i] = rows[name]
        return torch.from_numpy(made)

    rest = sum(name.startswith("f_rest_") for name in names)
    higher = columns(*(f"f_rest_{i}" for i in range(rest))).view(count, 3, rest // 3)  # channel by channel
    return {
        "means": columns(*"xyz"),
        "scales": columns(*(f"scale_{i}" for i in range(3))),
        "quats": columns(*(f"rot_{i}" for i in range(4))),
        "opacities": columns("opacity")[:, 0],
        "sh0": columns(*(f"f_dc_{i}" for i in range(3)))[:, None],
        "shN": higher.transpose(1, 2).contiguous(),
    }


def _gsplat(file: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, zip files, and others
        raise ValueError(f"{file} is not a checkpoint of gsplat: {type(error).__name__}: {error}") from error
    splats = found.get("splats", found) if isinstance(found, dict) else None
    wanted = ("means", "scales", "quats", "opacities", "sh0", "shN")
    if not isinstance(splats, dict) or not all(isinstance(splats.get(n), torch.Tensor) for n in wanted):
        raise ValueError(f"{file} is not a checkpoint of gsplat: `splats` must have {', '.join(wanted)}")
    return {name: splats[name] for name in wanted}
