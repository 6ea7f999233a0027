"""Detected objects of a request: boxes in the image's pixels, scores and labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastkernels.engine.inputs.images import Patches
from fastkernels.engine.sampling.pooling import PoolingOutput, PoolingParams

THRESHOLD = 0.5  # of a score, by default


@dataclass
class ObjectsOutput(PoolingOutput):
    """data: [n, 5 or more] float32, the best object first: left, top, right, bottom in pixels, and score."""

    @property
    def boxes(self) -> list[list[float]]:
        """left, top, right and bottom of each object in pixels of the image."""
        return self.data[:, :4].tolist()

    @property
    def scores(self) -> list[float]:
        """From 0 to 1."""
        return self.data[:, 4].tolist()


@dataclass
class DetectionOutput(ObjectsOutput):
    """data: [n, 6] float32, the best first: left, top, right, bottom in pixels, score and label.

    names: of the labels; size: width and height of the image
    """

    names: Mapping[int, str] = field(default_factory=dict, repr=False)
    size: tuple[int, int] = (1, 1)

    @property
    def labels(self) -> list[int]:
        """The numbers of the classes."""
        return self.data[:, 5].astype(int).tolist()

    @property
    def label_names(self) -> list[str]:
        """The names of the classes."""
        return [self.names.get(label, f"LABEL_{label}") for label in self.labels]


def detected(rows: np.ndarray, image: Patches, params: PoolingParams, names: Any) -> DetectionOutput:
    """The objects that a request wants. rows: of its image, as detector.ROW has them; names: {label: name} or None."""
    least = THRESHOLD if params.threshold is None else params.threshold
    chosen = rows[rows[:, 4] >= least][: params.max_detections].copy()
    left, top, width, height = image.view
    chosen[:, 0:4:2] = left + chosen[:, 0:4:2] * width
    chosen[:, 1:4:2] = top + chosen[:, 1:4:2] * height
    if image.clips:
        chosen[:, 0:4:2] = chosen[:, 0:4:2].clip(0, image.size[0])
        chosen[:, 1:4:2] = chosen[:, 1:4:2].clip(0, image.size[1])
    return DetectionOutput(chosen, {int(i): str(n) for i, n in (names or {}).items()}, image.size)
