"""Reads recordings: files of any common format, resampled to one channel at the model's rate as they are read."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastkernels.core import local_files

FORMATS = "wav, w64, aiff, flac, mp3, aac, ogg, mov, mp4, m4a, matroska, webm"
EXTENSIONS = "flac, m4a, mp3, mp4, mpeg, mpga, ogg, wav or webm"
MAX_SECONDS = 4 * 3600
MIN_RATE, MAX_RATE = 4000, 384_000  # Hz
MAX_CHANNELS = 8
MOST_DAMAGED = 8  # packets that cannot be decoded, if they are not fewer than the others


class AudioError(ValueError):
    """A recording that cannot be read."""


class MissingPackage(ImportError):
    """A package of the extra `audio` is missing."""


class Recording:
    """Samples of one channel at `rate` Hz, read once from the beginning to the end. Keeps one window of them.

    blocks: arrays [n] of float32. Raises AudioError while it reads.
    """

    def __init__(self, blocks: Iterator[np.ndarray], rate: int):
        self.blocks, self.rate = blocks, rate
        self.length = 0  # samples read so far
        self._kept = np.empty(0, np.float32)

    @property
    def seconds(self) -> float:
        return self.length / self.rate

    def window(self, start: int, count: int) -> np.ndarray:
        """Samples start to start + count, fewer at the end. Later windows start no earlier."""
        parts = [self._kept[max(start - self.length + len(self._kept), 0) :]]
        while self.length < start + count and (block := next(self.blocks, None)) is not None:
            parts.append(block[max(start - self.length, 0) :])
            self.length += len(block)
            if self.length > MAX_SECONDS * self.rate:
                raise AudioError(f"the audio is longer than {_duration(MAX_SECONDS)}: cut it into parts")
        self._kept = np.concatenate(parts)
        if not np.isfinite(self._kept).all():
            raise AudioError("the audio has samples that are not finite numbers")
        return self._kept[:count]


def recording(given: Any, rate: int, most: float = MAX_SECONDS) -> Recording:
    """A recording of a path, a file's bytes, a file, samples [n] of one channel, or (samples, their rate).

    rate: in Hz, of the result. most: seconds. Raises AudioError, and MissingPackage without the extra `audio`.
    """
    if isinstance(given, bytes):
        import io

        return _of_file(io.BytesIO(given), rate, most)
    if isinstance(given, (str, os.PathLike)):
        try:
            file = local_files.opened(given)
        except local_files.FileError as error:
            raise AudioError(f"the audio file {error}") from error
        found = _of_file(file, rate, most)
        return Recording(_then_closed(found, file), rate)
    if hasattr(given, "read"):
        return _of_file(given, rate, most)
    samples, own = given if isinstance(given, tuple) and len(given) == 2 else (given, rate)
    try:
        made, own = np.asarray(samples, np.float32), operator.index(own)
    except (TypeError, ValueError) as error:
        raise AudioError(
            "the audio must be a path, the bytes of a file, samples, or (samples, their rate in Hz, an integer):"
            f" {error}"
        ) from error
    if made.ndim != 1:
        raise AudioError(f"the audio must be samples of one channel [n], got shape {list(made.shape)}")
    _check(own, 1, len(made) / own if own else None, most)
    return Recording(iter([made]) if own == rate else _resampled(made, own, rate), rate)


def _then_closed(found: Recording, file: Any) -> Iterator[np.ndarray]:
    with file:
        yield from found.blocks


def _check(rate: int, channels: int, seconds: float | None, most: float = MAX_SECONDS) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise AudioError(
            f"the audio has a sampling rate of {rate} Hz, and {MIN_RATE} to {MAX_RATE} are possible"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise AudioError(f"the audio has {channels} channels, and at most {MAX_CHANNELS} are possible")
    if seconds is not None and seconds > most:
        raise AudioError(
            f"the audio has {_duration(seconds)}, and at most {_duration(most)} are possible: cut it into parts"
        )


def _duration(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600} h {whole // 60 % 60:02} min" if whole >= 3600 else f"{seconds:g} s"


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingPackage("audio files need the package av: pip install 'fastkernels[audio]'") from error
    return av


def _of_file(file: Any, rate: int, most: float) -> Recording:
    av = _av()
    # Playlists and scripts, which name other files and URLs, are no audio
    options = {"format_whitelist": FORMATS.replace(" ", ""), "protocol_whitelist": ""}
    try:
        container = av.open(file, mode="r", options=options, metadata_errors="ignore")
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise AudioError(f"the file is damaged, or no audio file: use {EXTENSIONS}") from error
    if not container.streams.audio:
        raise AudioError("the file has no audio stream")
    stream = container.streams.audio[0]
    codec = stream.codec_context
    if codec is None:
        raise AudioError("the file's audio has a codec that is not supported")
    codec.thread_count = 1
    seconds = None
    if stream.duration is not None and stream.time_base is not None:
        seconds = float(stream.duration * stream.time_base)
    elif container.duration is not None:
        seconds = container.duration / av.time_base
    _check(codec.sample_rate, codec.channels, seconds, most)
    return Recording(_decoded(av, container, stream, rate), rate)


def _decoded(av: Any, container: Any, stream: Any, rate: int) -> Iterator[np.ndarray]:
    """The samples of a stream. A packet that cannot be decoded is left out, as players do.

    The rate and the channels may change between frames, as in joined MP3 files.
    """
    resampler: Any = None
    form: tuple[Any, ...] | None = None
    good = damaged = 0
    with container:
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
                if packet is None:
                    break
                frames = packet.decode()
                good += 1
            except av.error.FFmpegError as error:
                damaged += 1
                if damaged >= MOST_DAMAGED and damaged >= good:
                    raise AudioError(
                        f"the audio file is damaged: {damaged} of its first {good + damaged} packets cannot be decoded"
                    ) from error
                continue
            for frame in frames:
                if (found := (frame.sample_rate, frame.layout.name, frame.format.name)) != form:
                    _check(frame.sample_rate, len(frame.layout.channels), None)
                    yield from _rest(resampler)
                    resampler, form = av.AudioResampler("flt", None, rate), found
                frame.pts = None  # gaps are no silence
                yield from map(_mean, resampler.resample(frame))
        yield from _rest(resampler)


def _rest(resampler: Any) -> Iterator[np.ndarray]:
    """The last samples of a resampler; None has none."""
    if resampler is not None:
        yield from map(_mean, resampler.resample(None))


def _mean(frame: Any) -> np.ndarray:
    """The mean of the channels [n], as vLLM's; FFmpeg's own mix of two equal ones is 1.41 times as loud."""
    return (
        frame.to_ndarray().reshape(-1, len(frame.layout.channels)).mean(1)
    )  # planes of 8 channels crash PyAV 18


def _resampled(samples: np.ndarray, own: int, rate: int) -> Iterator[np.ndarray]:
    av = _av()
    resampler = av.AudioResampler("flt", "mono", rate)
    for at in range(0, len(samples), own):
        block = np.ascontiguousarray(samples[None, at : at + own])
        frame = av.AudioFrame.from_ndarray(block, "flt", "mono")
        frame.sample_rate, frame.pts = own, None
        yield from map(_mean, resampler.resample(frame))
    if len(samples):
        yield from _rest(resampler)
