"""Voices: what a speaker said, as text, speech tokens, frames of a mel spectrogram, and an embedding."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastkernels.engine.speech.files import AudioError

log = logging.getLogger("fastkernels")
SUFFIX = ".safetensors"
RECORDINGS = (".wav", ".flac", ".mp3", ".m4a", ".ogg", ".opus", ".webm")
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


class Voices(Mapping[str, Voice]):
    """The voices of a folder, read when the engine starts.

    A file NAME.safetensors is a voice. So is a recording NAME.wav (or flac, mp3, ...), with what it says in NAME.txt,
    which the checkpoint's ONNX models read. Raises VoiceError.
    """

    def __init__(self, found: Iterable[Voice]):
        self._voices = {voice.name: voice for voice in found}

    @staticmethod
    def read(folder: Path, checkpoint: Path) -> Voices:
        if not folder.is_dir():
            raise VoiceError(f"voices {str(folder)!r} is not a folder")
        files = sorted(f for f in folder.iterdir() if f.suffix.lower() in (SUFFIX, *RECORDINGS))
        ready = {f.stem for f in files if f.suffix == SUFFIX}
        made, reader = [], None
        for file in files:
            if not NAME.fullmatch(file.stem):
                raise VoiceError(f"{file}: {file.stem!r} is not a name of letters, digits, spaces and '._-'")
            if file.suffix == SUFFIX:
                made.append(Voice.read(file))
            elif file.stem not in ready:
                from fastkernels.engine.speech.voice_reader import VoiceReader

                reader = reader or VoiceReader(checkpoint)
                try:
                    made.append(reader.read(file, _words(file.with_suffix(".txt")), file.stem))
                except AudioError as error:
                    raise VoiceError(f"{file}: {error}") from error
        log.info("voices: %s", ", ".join(voice.name for voice in made) or "none")
        return Voices(made)

    def __getitem__(self, name: str) -> Voice:
        return self._voices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._voices)

    def __len__(self) -> int:
        return len(self._voices)


def _words(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise VoiceError(f"{file} cannot be read: {error}") from error
