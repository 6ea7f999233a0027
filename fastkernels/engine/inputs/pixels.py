"""Pixels stay bytes until they are on the device: a fourth of the memory to write, to send to ranks, and to copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastkernels.models.common.configs.timm_config import Preprocessing
from fastkernels.models.common.configs.ultralytics_config import Letterbox


class Scale:
    """Bytes as a model's numbers: (x / 255 - mean) / std in float32, with a mean and a std of each channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu"):
        at, by = (torch.tensor(numbers, dtype=torch.float64)[:, None] for numbers in (mean, std))
        self._factor, self._shift = (t.float().to(device) for t in (1 / (255 * by), -at / by))  # [C, 1]

    @classmethod
    def of(cls, settings: Preprocessing | Letterbox, device: torch.device | str = "cpu") -> Scale:
        """The scale of a checkpoint's images."""
        if isinstance(settings, Letterbox):
            return cls((0.0,) * 3, (1.0,) * 3, device)
        return cls(settings.mean, settings.std, device)

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """patches: [N, C * pixels] uint8, channel by channel. Returns as many in float32."""
        pixels = patches.unflatten(1, (len(self._factor), -1)).float()
        return torch.addcmul(self._shift, pixels, self._factor).flatten(1)
