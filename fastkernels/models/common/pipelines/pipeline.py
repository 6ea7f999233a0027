"""The interface of a diffusion pipeline, as the runner Denoise calls it.

A size is (height, width) in pixels, of a video (height, width, frames). Latents of a request have the model's own
shape, [...], and are float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from fastkernels.models.common.pipelines.autoencoder import Autoencoder
from fastkernels.models.common.pipelines.schedules import Schedule
from fastkernels.models.common.pipelines.texts import Encoder

Size: TypeAlias = tuple[int, ...]
Conditions: TypeAlias = Mapping[str, torch.Tensor]


class Guidance(Enum):
    """How a model is guided towards the prompt."""

    NONE = "none"
    EMBEDDED = "embedded"  # the scale is an input of the model
    DOUBLED = "doubled"  # the model also computes the negative prompt, in the same batch


class Pipeline(nn.Module):
    """A denoiser and the image decoder `vae`. Text encoders, which load_texts adds, are no modules of it.

    guidance      see Guidance
    steps, scale, size  defaults of a request: steps, guidance scale and size
    multiple      height and width are multiples of it
    frames        of a video, by default; 0: the model makes images
    period        of a video, all frames but the first are a multiple of it
    longest       the most tokens of a prompt
    edits         whether a request may begin from an image
    """

    guidance: Guidance
    steps: int
    scale: float
    size: Size
    multiple: int
    frames: int = 0
    period: int = 1
    edits: bool = False
    vae: Autoencoder
    encoders: ClassVar[tuple[str, ...]] = (
        "",
        "_2",
    )  # suffixes of their folders; the last one limits the prompt
    texts: tuple[Encoder, ...] = ()

    @abstractmethod
    def load_texts(
        self, folder: Path, config: Any, device: torch.device, dtype: torch.dtype, seed: int | None
    ) -> None:
        """Load the text encoders. seed: of random weights; None: the checkpoint's. Raises as texts.load does."""

    @abstractmethod
    def encode(self, prompts: Sequence[str | None]) -> list[Conditions]:
        """The inputs of the denoiser for each prompt. None: no prompt, for a negative one that was not given."""

    @abstractmethod
    def tokens(self, size: Size) -> int:
        """The longest sequence that the denoiser attends to, for one image."""

    @abstractmethod
    def schedule(self, steps: int, size: Size, first: int = 0) -> Schedule:
        """The schedule of a request that begins with step `first`. Raises Unsupported."""

    @abstractmethod
    def begin(self, noise: torch.Tensor) -> torch.Tensor:
        """Latents [1, ...] of normal noise [1, C, h, w]."""

    @abstractmethod
    def forward(
        self, latents: torch.Tensor, times: torch.Tensor, scales: torch.Tensor, conditions: Conditions, size: Size
    ) -> torch.Tensor:  # fmt: skip
        """The denoiser's output [B, ...] for latents [B, ...], times [B] and guidance scales [B]."""

    @abstractmethod
    def decode(self, latents: torch.Tensor, size: Size) -> torch.Tensor:
        """Pixels [B, 3, H, W], of videos [B, F, 3, H, W], uint8."""

    @property
    def longest(self) -> int:
        return self.texts[-1].max_length

    def first_step(self, steps: int, strength: float) -> int:
        """The step that an image of this strength begins with, rounded as in diffusers."""
        return steps - min(int(steps * strength), steps)

    def noise(self, generator: torch.Generator, size: Size, dtype: torch.dtype) -> torch.Tensor:
        """Normal noise [1, C, h, w] on the CPU: that of diffusers with this generator."""
        height, width = (n // self.vae.scale for n in size[:2])
        shape = (1, self.vae.channels, height, width)
        return torch.randn(shape, generator=generator, dtype=dtype)

    def check_prompt(self, prompt: str, name: str = "the prompt") -> None:
        """Raise ValueError, which calls it `name`, for a prompt that the text encoder would cut."""
        found = self.texts[-1].token_count(prompt)
        if found > self.longest:
            raise ValueError(f"{name} has {found} tokens, and the text encoder takes {self.longest}")
