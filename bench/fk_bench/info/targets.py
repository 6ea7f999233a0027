"""The operators and architectures that a complete benchmark of inference covers, and where each is judged.

`targets.tsv` has one row for each: a group (level 1 or 2 of the published benchmark, what it lacks, its architectures),
the tasks that judge it (ops, and blocks as MODEL.KIND), or the family of ops that will bring it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("targets.tsv")
GROUPS = ("1", "2", "needed", "model")
# Families of ops and models that do not exist yet, or only in part
COMING = {
    "audio": "speech recognition and synthesis",
    "collective": "collectives, alone and fused with norms and matrix products",
    "convolutional": "convolutional image encoders",
    "detection": "detection and segmentation",
    "diffusion": "image and video generation in our engine",
    "diffusion_lm": "language models that unmask",
    "elementwise": "single activations and operations on tensors",
    "geometry": "points, splats and radiance fields",
    "multimodal": "language models that read images, video and sound",
    "policies": "robot policies",
    "recurrence": "linear attention and state-space models",
    "speculative": "speculative decoding",
    "world_models": "world models",
}


@dataclass(frozen=True)
class Target:
    """tasks: ops and blocks that judge it; family: a key of COMING if there are none."""

    group: str
    name: str
    tasks: tuple[str, ...]
    family: str


def targets() -> tuple[Target, ...]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(
            Target(row["group"], row["target"], tuple(filter(None, row["tasks"].split(","))), row["family"])
            for row in csv.DictReader(file, delimiter="\t")
        )
