"""Requests for images, and their results."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastkernels.engine.scheduling.request import Status

SEEDS = 2**63


@dataclass(frozen=True)
class ImageParams:
    """Parameters of a request for images. None: the model's default.

    n                    images of each prompt; image i uses seed + i
    height, width        pixels
    num_inference_steps  steps of the schedule
    guidance_scale       how closely the image follows the prompt
    negative_prompt      what the image should not show, for a model with guidance by a doubled batch
    seed                 of the first noise, 0 to 2^63 - 1; None: drawn by the engine
    strength             how much of the schedule a given image goes through, above 0 to 1
    step_cache           the threshold, above 0 to 1, of steps that reuse the last output (engine/cache/step_cache.py);
                         None: all steps are computed
    """

    n: int = 1
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    strength: float | None = field(default=None, kw_only=True)
    step_cache: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("n", "height", "width", "num_inference_steps"):
            value = getattr(self, name)
            if (value is not None or name == "n") and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < SEEDS):
            raise ValueError(f"seed must be an integer from 0 to 2^63 - 1, got {self.seed!r}")
        scale = self.guidance_scale
        if scale is not None and (type(scale) not in (int, float) or not 0 <= scale <= 100):
            raise ValueError(f"guidance_scale must be a number from 0 to 100, got {scale!r}")
        for name in ("strength", "step_cache"):
            part = getattr(self, name)
            if part is not None and (type(part) not in (int, float) or not 0 < part <= 1):
                raise ValueError(f"{name} must be a number above 0, at most 1, got {part!r}")
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise ValueError(f"negative_prompt must be text, got {self.negative_prompt!r:.80}")


@dataclass(frozen=True)
class VideoParams(ImageParams):
    """The same for videos.

    num_frames  of the video
    """

    num_frames: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_frames is not None and (type(self.num_frames) is not int or self.num_frames < 1):
            raise ValueError(f"num_frames must be an integer of at least 1, got {self.num_frames!r}")


@dataclass(eq=False)
class ImageRequest:
    """One image to make. A lower priority number goes first.

    size        (height, width), of a video (height, width, frames)
    steps, scale, seed  of this image, with the model's defaults
    num_tokens  that a step computes for it: see Pipeline.tokens; twice as many with guidance by a doubled batch
    image       [height, width, 3] uint8, of which it is made
    first       the step that it begins with
    step        steps that are done, those before `first` included
    reused      steps that reused an output, when it has ended
    """

    request_id: str
    prompt: str
    params: ImageParams
    size: tuple[int, ...]
    steps: int
    scale: float
    seed: int
    num_tokens: int
    priority: int = 0
    image: np.ndarray | None = None
    first: int = 0
    step: int = 0
    reused: int = 0
    arrival: float = field(default_factory=time.monotonic)
    status: Status = Status.WAITING
    scheduled_time: float | None = None
    streams_deltas = False  # one output, at the end

    def __post_init__(self) -> None:
        self.step = self.first


@dataclass
class ImageRequestOutput:
    """The images of a request: arrays [height, width, 3] of uint8, and the seed of each. Videos: [frames, ...].

    steps_reused: of each, the steps that reused an output, with a step_cache
    """

    request_id: str
    prompt: str
    arrays: list[np.ndarray]
    seeds: list[int]
    steps: int = 0
    steps_reused: list[int] = field(default_factory=list)
    finished: bool = True
    prompt_token_ids: tuple[int, ...] = ()  # none are known: a prompt has tokens of several encoders

    @property
    def images(self) -> list[Any]:
        """The images as PIL has them. Raises ImportError without Pillow, which the extra 'images' installs."""
        from PIL import Image

        return [Image.fromarray(array) for array in self.arrays]
