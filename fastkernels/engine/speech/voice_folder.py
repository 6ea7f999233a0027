"""The voices of a folder: files of voices, and recordings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fastkernels.engine.speech.files import AudioError
from fastkernels.engine.speech.voice_reader import VoiceReader
from fastkernels.engine.speech.voices import NAME, SUFFIX, Voice, VoiceError

log = logging.getLogger("fastkernels")
RECORDINGS = (".wav", ".flac", ".mp3", ".m4a", ".ogg", ".opus", ".webm")


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
