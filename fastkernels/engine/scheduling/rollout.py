"""Requests of a world model: frames that follow from actions, and their results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastkernels.engine.scheduling.denoising import SEEDS
from fastkernels.engine.scheduling.request import Status


@dataclass(frozen=True)
class FrameParams:
    """Parameters of a request for frames. None: the model's default.

    num_inference_steps  denoising steps of each frame
    seed                 of the noise, 0 to 2^63 - 1; None: drawn by the engine
    """

    num_inference_steps: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        steps = self.num_inference_steps
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(f"num_inference_steps must be an integer of at least 1, got {steps!r}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < SEEDS):
            raise ValueError(f"seed must be an integer from 0 to 2^63 - 1, got {self.seed!r}")


@dataclass(eq=False)
class FrameRequest:
    """Frames to make, one after the other. A lower priority number goes first.

    images      the first frames [P, 3, H, W] uint8
    actions     [P + N, A] float32, of the first frames and of the N that follow
    steps       denoising steps of each frame, before which is a pass over the frame before
    num_tokens  of one frame
    step        passes that are done
    """

    request_id: str
    images: np.ndarray
    actions: np.ndarray
    params: FrameParams
    steps: int
    seed: int
    num_tokens: int
    priority: int = 0
    step: int = 0
    arrival: float = field(default_factory=time.monotonic)
    status: Status = Status.WAITING
    scheduled_time: float | None = None
    streams_deltas = True

    @property
    def num_frames(self) -> int:
        return len(self.actions) - len(self.images)

    @property
    def passes(self) -> int:
        return self.num_frames * (self.steps + 1)


@dataclass
class FrameRequestOutput:
    """New frames of a request: arrays [H, W, 3] uint8, of which the first has the number `start`."""

    request_id: str
    start: int
    arrays: Sequence[np.ndarray]
    seed: int
    finished: bool
    prompt_token_ids: tuple[int, ...] = ()

    def joined(self, later: FrameRequestOutput) -> FrameRequestOutput:
        """This output and the one that follows it."""
        arrays = [*self.arrays, *later.arrays]
        return FrameRequestOutput(self.request_id, self.start, arrays, self.seed, later.finished)

    @property
    def images(self) -> list[Any]:
        """The frames as PIL has them. Raises ImportError without Pillow, which the extra 'images' installs."""
        from PIL import Image

        return [Image.fromarray(array) for array in self.arrays]
