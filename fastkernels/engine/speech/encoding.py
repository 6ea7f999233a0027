"""Write sound to files of common formats, piece by piece as it is made."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np

from fastkernels.engine.speech.files import MissingPackage

UNKNOWN = 0xFFFFFFFF  # bytes of a WAV file whose length is not known when it begins
BITS = {"mp3": 128_000, "opus": 64_000, "aac": 96_000}  # a second
# {format: (media type, container of FFmpeg, codec)}
FORMATS: dict[str, tuple[str, str, str]] = {
    "mp3": ("audio/mpeg", "mp3", "libmp3lame"),
    "opus": ("audio/ogg", "ogg", "libopus"),
    "aac": ("audio/aac", "adts", "aac"),
    "flac": ("audio/flac", "flac", "flac"),
    "wav": ("audio/wav", "", ""),
    "pcm": ("audio/pcm", "", ""),
}


class Encoder:
    """Encodes samples [n] of one channel from -1 to 1; wav and pcm have 16 bits.

    samples: their number, if it is known, for the header of a WAV file. Raises ValueError for an unknown format, and
    MissingPackage without the extra `audio`, which formats other than wav and pcm need.
    """

    def __init__(self, kind: str, rate: int, samples: int | None = None):
        if kind not in FORMATS:
            raise ValueError(f"format {kind!r} is not one of {', '.join(FORMATS)}")
        self._header = _wav_header(rate, samples) if kind == "wav" else b""
        self._container: Any = None
        _, container, codec = FORMATS[kind]
        if not container:
            return
        try:
            import av
        except ImportError as error:
            raise MissingPackage(
                f"{kind} needs the package av: pip install 'fastkernels[audio]', or use wav or pcm"
            ) from error
        self._av, self._rate = av, rate
        self._sink = _Sink()
        # The headers of MP3 and FLAC would be completed at the end, which a stream cannot do
        options = {"write_xing": "0"} if kind == "mp3" else {}
        self._container = av.open(self._sink, "w", format=container, options=options)
        self._stream: Any = self._container.add_stream(codec, rate=rate, layout="mono")
        if kind in BITS:
            self._stream.bit_rate = BITS[kind]
        self._fifo: Any = av.AudioFifo()
        self._resampler: Any = av.AudioResampler(self._stream.format.name, "mono", self._stream.rate)

    def encode(self, samples: np.ndarray) -> bytes:
        """The bytes of further samples, as far as they are complete."""
        if self._container is None:
            header, self._header = self._header, b""
            scaled = np.clip(samples, -1.0, 1.0) * 32767.0
            return header + np.round(scaled).astype("<i2").tobytes()
        if len(samples):
            block = np.ascontiguousarray(np.asarray(samples, np.float32)[None])
            frame = self._av.AudioFrame.from_ndarray(block, "flt", "mono")
            frame.sample_rate, frame.pts = self._rate, None
            self._write(frame)
        return self._sink.take()

    def close(self) -> bytes:
        """The rest of the file."""
        if self._container is None:
            header, self._header = self._header, b""
            return header
        self._write(None)
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take()

    def _write(self, frame: Any) -> None:
        """Encode a frame; None: what is left of earlier ones."""
        for made in self._resampler.resample(frame):
            made.pts = None
            self._fifo.write(made)
        size = self._stream.frame_size or 1024
        while (part := self._fifo.read(size, partial=frame is None)) is not None:
            self._container.mux(self._stream.encode(part))


def _wav_header(rate: int, samples: int | None) -> bytes:
    """Of 16-bit samples of one channel."""
    size = UNKNOWN if samples is None else 2 * samples
    riff = UNKNOWN if samples is None else 36 + size
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", riff, b"WAVE") + form + struct.pack("<4sI", b"data", size)


class _Sink(io.RawIOBase):
    """A file that FFmpeg writes in order, without going back."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        made, self._parts = b"".join(self._parts), []
        return made
