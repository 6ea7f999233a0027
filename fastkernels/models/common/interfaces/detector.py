"""The interface of models that detect objects.

A detector has the interface of an encoder of images (models/vision/dinov3.py), with patches of cnn.PATCH pixels. Its
hidden states are what it has found: model(patches [P, C * p * p], grids) returns rows [T, 6] float32 (`ROW`), image
after image, of each image `features(grid)` rows, the best first. Its only task is 'detect'.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from fastkernels.models.common.layers import cnn
from fastkernels.overrides.detection.top_k_queries import top_k_queries

# Sides are in parts of the model's image, of which more than the photograph's may be seen; a label is a class's number.
ROW = ("left", "top", "right", "bottom", "score", "label")


class Detector(nn.Module):
    """Base of detectors. channels: of an image."""

    prefix_tokens, num_labels = 0, 0
    ops: tuple[str, ...] = ("top_k_queries",)
    channels: int

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the images that `detect` takes."""

    @abstractmethod
    def detect(self, images: torch.Tensor) -> torch.Tensor:
        """Images of one size [B, C, H, W] to rows [B, detections, 6]."""

    @abstractmethod
    def detections(self, grid: tuple[int, int]) -> int:
        """The number of rows of an image of this size in patches. Raises ValueError for a size that is too small."""

    def features(self, grid: tuple[int, int]) -> int:
        return self.detections(grid)

    def forward(self, patches: torch.Tensor, grids: cnn.Grids) -> torch.Tensor:
        return cnn.by_size(patches, grids, self.channels, self.dtype, self.detect)


def best(logits: torch.Tensor, boxes: torch.Tensor, count: int) -> torch.Tensor:
    """The rows [B, count, 6] of the best pairs of a query and a class.

    logits: [B, Q, classes]; boxes: [B, Q, 4] float32, with the sides as in `ROW`
    """
    scores, ids = top_k_queries(logits.float().sigmoid(), count, True)
    classes = logits.shape[2]
    chosen = boxes.gather(1, (ids // classes)[:, :, None].expand(-1, -1, 4))
    return torch.cat((chosen, scores[:, :, None], (ids % classes)[:, :, None].float()), -1)
