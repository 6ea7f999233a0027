"""The interface of models that find what a prompt names in an image, with a mask of each object.

A segmenter runs in three steps, so that requests share the results of the first two: `see` of images, `read` of texts,
and `segment` of pairs of both with the boxes of the prompt. Images have one size, the model's: `check_grid` refuses
others. They come as patches (models/vision/dinov3.py). Its only task is 'segment'.

A ClipSegmenter also follows the objects through the frames of a clip. A MarkSegmenter finds the object that points, a
box or a mask mark in an image, in two steps: `look` at images and `mark` of pairs of an image and marks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

NO_BOX = -1  # the label of a box that only fills its row; 1: an example of what is wanted, 0: of what is not
NO_POINT = -1  # the label of a place without a point
CORNERS = 2, 3  # the labels of the corners of a box: left and top, right and bottom


class Found(NamedTuple):
    """The results of B pairs of an image and a prompt, with Q queries.

    logits    [B, Q] of each query, float32
    presence  [B, 1], the logit of whether the image has what the prompt names, float32
    boxes     [B, Q, 4] float32: left, top, right and bottom in parts of the image
    masks     [B, Q, h, w], logits of pixels of the model's own mask
    semantic  [B, h, w], logits of whether a pixel belongs to any such object
    """

    logits: torch.Tensor
    presence: torch.Tensor
    boxes: torch.Tensor
    masks: torch.Tensor
    semantic: torch.Tensor

    @property
    def scores(self) -> torch.Tensor:
        """Of each query, from 0 to 1 [B, Q]."""
        return self.logits.sigmoid() * self.presence.sigmoid()


class ImageSegmenter(nn.Module):
    """Base of models of images of one size. side: rows and columns of an image's patches, of patch_size pixels"""

    prefix_tokens, num_labels = 0, 0
    side: int
    patch_size: int

    def check_grid(self, grid: tuple[int, int]) -> None:
        """Raise ValueError for an image of another number of patches."""
        p, side = self.patch_size, self.side
        if grid != (side, side):
            raise ValueError(
                f"the prompt has {grid[1] * p} x {grid[0] * p} pixels after the image processor, and this model takes"
                f" {side * p} x {side * p}: set `size` in preprocessor_config.json"
            )

    def features(self, grid: tuple[int, int]) -> int:
        """The number of results of an image: one."""
        return 1


class Segmenter(ImageSegmenter):
    """Base of segmenters. text_length: the most tokens of a text, whose ids are below vocab_size"""

    text_length: int
    vocab_size: int

    @abstractmethod
    def see(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches [B, side * side, C * p * p] of images to features [B, cells, channels]."""

    @abstractmethod
    def read(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [B, L] int64, padded on the right by any id, to features [B, L, channels]."""

    @abstractmethod
    def segment(
        self, features: torch.Tensor, texts: torch.Tensor, known: torch.Tensor, boxes: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Found:  # fmt: skip
        """known: [B, L] bool, False for padding; boxes: [B, N, 4] float32, center and size in parts of the image.

        labels: [B, N] int64: 1, 0 or NO_BOX.
        """


class Seen(NamedTuple):
    """A frame or images as a tracker reads them: cells [B, n, channels] of three levels, the largest first."""

    fine: torch.Tensor
    middle: torch.Tensor
    cells: torch.Tensor


@dataclass
class FrameObjects:
    """The objects of a frame. Objects have a number in the clip, and equal numbers are the same object.

    masks       [n, h, w] float32, logits of pixels of the model's own mask
    presence    of each, from 0 to 1: that of the tracker in this frame
    scores      of each, from 0 to 1: that of the detector when it was found
    prompts     the numbers of their prompts
    hidden      numbers of objects that are not shown
    """

    numbers: list[int]
    masks: torch.Tensor
    presence: list[float]
    scores: list[float]
    prompts: list[int]
    hidden: set[int]


class Clip(ABC):
    """The state of a clip. frame: the number of the next one."""

    frame: int

    @abstractmethod
    def advance(self, seen: Seen, found: Found) -> None:
        """Take the next frame. found: of this frame with each prompt, in order."""

    @abstractmethod
    def result(self) -> list[FrameObjects]:
        """The objects of the frames, after the last one: some are known to be wrong only then."""


class ClipSegmenter(Segmenter):
    """Base of segmenters that follow objects through the frames of clips."""

    @abstractmethod
    def watch(self, patches: torch.Tensor) -> tuple[torch.Tensor, Seen]:
        """Patches of frames [B, cells, C * p * p] to (features as of `see`, what the tracker reads, of B frames)."""

    @abstractmethod
    def clip(self, frames: int) -> Clip:
        """The state before the first of this number of frames."""


class Marked(NamedTuple):
    """The results of B pairs of an image and marks: the mask for clear marks, and M for those that can be read several
    ways.

    masks     [B, 1 + M, h, w], logits of pixels of the model's own masks, float32
    overlaps  [B, 1 + M], the predicted overlap of each with the object, float32
    single    [B], the number of the mask to take if only one is wanted
    presence  [B], the logit of whether the object is in the image, float32
    """

    masks: torch.Tensor
    overlaps: torch.Tensor
    single: torch.Tensor
    presence: torch.Tensor


class MarkSegmenter(ImageSegmenter):
    """Base of models that find the object that marks point to. A mask that marks has 4 * side rows and columns."""

    @abstractmethod
    def look(self, patches: torch.Tensor) -> Seen:
        """Patches [B, side * side, C * p * p] of images to what `mark` reads."""

    @abstractmethod
    def mark(
        self, seen: Seen, points: torch.Tensor, labels: torch.Tensor, masks: torch.Tensor | None = None
    ) -> Marked:
        """points: [B, n, 2] float32, x and y in pixels of the model's image; masks: logits [B, 1, 4 * side, 4 * side].

        labels: [B, n] int64: 1 in the object, 0 outside of it, CORNERS of a box, or NO_POINT, with one of these at the
        end, and two of these without points.
        """
