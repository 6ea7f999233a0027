"""Requests for images of a scene, and their results."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastkernels.engine.scheduling.request import Status
from fastkernels.models.common.interfaces.camera import Camera

TILE = 16  # pixels of a tile's side: a budget of 8192 is one image of 1920 x 1080


@dataclass(frozen=True)
class RenderParams:
    """raw: float32 values of red, green, blue and opacity, which are not clamped, in place of 8-bit colors."""

    raw: bool = False

    def __post_init__(self) -> None:
        if type(self.raw) is not bool:
            raise ValueError(f"raw must be True or False, got {self.raw!r}")


@dataclass(eq=False)
class RenderRequest:
    """One image to render. A lower priority number goes first."""

    request_id: str
    camera: Camera
    params: RenderParams
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    status: Status = Status.WAITING
    scheduled_time: float | None = None
    streams_deltas = False  # one output, at the end

    @property
    def num_tokens(self) -> int:
        """Its share of a step: the number of its tiles of 16 x 16 pixels."""
        width, height = self.camera.size
        return -(-width // TILE) * -(-height // TILE)


@dataclass
class RenderRequestOutput:
    """array: the image [height, width, 3] uint8, or [height, width, 4] float32 with RenderParams(raw=True)."""

    request_id: str
    array: np.ndarray
    finished: bool = True
    num_tokens: int = 0
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def image(self) -> Any:
        """The image of 8 bits as PIL has it. Raises ImportError without Pillow, which the extra 'images' installs."""
        from PIL import Image

        if self.array.dtype != np.uint8:
            raise ValueError("a raw image has no PIL form: use `array`, or render without raw=True")
        return Image.fromarray(self.array)
