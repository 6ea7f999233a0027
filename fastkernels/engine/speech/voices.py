"""Voices: what a speaker said, as text, speech tokens, frames of a mel spectrogram, and an embedding."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SUFFIX = ".safetensors"
MOST_SECONDS = 30
NAME = re.compile(r"[\w][\w .-]{0,63}")


class VoiceError(ValueError):
    """A voice that cannot be used. The message names the file."""


@dataclass(frozen=True, eq=False)
class Voice:
    """A voice for speech.

    text     what it says; '': unknown, so that the language model does not read its tokens
    tokens   [P] int64 speech tokens of it
    frames   [ratio * P, mel] float32 of the mel spectrogram
    speaker  [S] float32 embedding
    """

    name: str
    text: str
    tokens: torch.Tensor
    frames: torch.Tensor
    speaker: torch.Tensor

    @staticmethod
    def read(file: Path) -> Voice:
        """A voice as `save` writes it. Raises VoiceError."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(file), framework="pt") as found:
                text = (found.metadata() or {}).get("text", "")
                tensors = [found.get_tensor(name) for name in ("tokens", "frames", "speaker")]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise VoiceError(f"{file} is not a file of a voice: {error}") from error
        return Voice.of(file.stem, text, *tensors)

    @staticmethod
    def of(name: str, text: str, tokens: Any, frames: Any, speaker: Any) -> Voice:
        """A voice of arrays or lists."""
        return Voice(
            name, text.strip(), torch.as_tensor(tokens).long().cpu(),
            torch.as_tensor(frames).float().cpu(), torch.as_tensor(speaker).float().cpu(),
        )  # fmt: skip

    def save(self, file: Path) -> None:
        from safetensors.torch import save_file

        tensors = {"tokens": self.tokens, "frames": self.frames, "speaker": self.speaker}
        save_file({k: v.contiguous() for k, v in tensors.items()}, str(file), metadata={"text": self.text})

    def check(self, config: Any, size: int) -> None:
        """Raise VoiceError if the voice does not fit a model. config: its FlowConfig; size: its speech tokens."""
        count = len(self.tokens) if self.tokens.dim() == 1 else 0
        most = MOST_SECONDS * 25
        if not 1 <= count <= most:
            raise VoiceError(
                f"voice {self.name!r}: tokens must be [P] with P from 1 to {most}, got {list(self.tokens.shape)}"
            )
        if int(self.tokens.min()) < 0 or int(self.tokens.max()) >= size:
            raise VoiceError(f"voice {self.name!r}: tokens must be from 0 to {size - 1}")
        for name, wanted in (("frames", [config.ratio * count, config.mel]), ("speaker", [config.speaker])):
            found = getattr(self, name)
            if list(found.shape) != wanted:
                raise VoiceError(f"voice {self.name!r}: {name} must be {wanted}, got {list(found.shape)}")
            if not torch.isfinite(found).all():
                raise VoiceError(f"voice {self.name!r}: {name} has values that are not finite numbers")
