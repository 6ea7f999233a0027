"""The runner of scenes: the images of a step's cameras, those of one size in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fastkernels.engine.cache.kv_cache import Limits
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.execution.runners.encode import CACHE_OPTIONS
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.configs.config import ALL_DTYPES
from fastkernels.models.common.interfaces.camera import Camera


@dataclass(frozen=True)
class RenderInput:
    """The cameras of a step, and whether each one's image is returned as it is computed, in float32."""

    cameras: Sequence[Camera]
    raw: Sequence[bool]


class Render(Runner):
    """Runs a model of the interface in interfaces/camera.py, in the checkpoint's dtype unless another is named."""

    def _prepare(self, folder: Path) -> None:
        config, default = self.config, EngineConfig(model="")
        for name in (*CACHE_OPTIONS, "max_model_len"):
            if getattr(config, name) != getattr(default, name):
                raise ValueError(f"{name} applies to models of tokens; {config.model} is a scene")
        if config.dtype == "auto":
            found = getattr(self.hf_config, "dtype", None) or torch.float32
            self.dtype = ALL_DTYPES[found] if isinstance(found, str) else found
        self._folder = folder

    def _loaded(self) -> None:
        self.model.ready(self._folder, self.config.load_format == "dummy")

    def num_fitting_blocks(self) -> int:
        """See Runner: 0, since nothing is cached."""
        return 0

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        self.max_model_len = self.config.max_num_batched_tokens
        self.limits = Limits(0, self.max_model_len, self.config.max_num_batched_tokens)

    def capture(self) -> None:
        """See Runner: what was computed from the weights is computed again."""
        self.model.refresh()

    @torch.inference_mode()
    def launch(self, step: RenderInput) -> RenderStep:
        """Start a step."""
        groups: dict[tuple[int, int], list[int]] = {}
        for i, camera in enumerate(step.cameras):
            groups.setdefault(camera.size, []).append(i)
        images: dict[int, torch.Tensor] = {}
        for rows in groups.values():
            found = self.model.render([step.cameras[i] for i in rows])
            for i, image in zip(rows, found, strict=True):
                images[i] = image if step.raw[i] else _bytes(image)
        return RenderStep(self.device, [images[i] for i in range(len(images))])


def _bytes(image: torch.Tensor) -> torch.Tensor:
    """[H, W, 4] float32 to red, green and blue of 8 bits; a quarter of the bytes leave the device."""
    return (image[..., :3].clamp(0, 1) * 255).round().to(torch.uint8)


def _to_host(image: torch.Tensor) -> torch.Tensor:
    """A copy that is complete once the device is. Memory that is not pinned takes several times as long."""
    if not image.is_cuda:
        return image.cpu()
    return torch.empty(image.shape, dtype=image.dtype, pin_memory=True).copy_(image, non_blocking=True)


class RenderStep:
    """A launched step (step.Pending)."""

    def __init__(self, device: torch.device, images: Sequence[torch.Tensor]):
        self._images = [_to_host(i) for i in images]
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        if self._done is not None:
            self._done.record()

    def result(self) -> list[np.ndarray]:
        """The images in the cameras' order: [H, W, 3] uint8, or [H, W, 4] float32. Waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        return [i.numpy() for i in self._images]
