"""Read the config.json of YOLO checkpoints, which names a model of ultralytics as its `model`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Letterbox:
    """How images become a model's pixels: see engine/letterbox.py."""

    size: int = 640
    stride: int = 32
    fill: int = 114
