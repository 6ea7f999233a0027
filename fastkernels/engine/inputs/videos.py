"""Videos of prompts: files of any common format to frames, sampled as they are decoded."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastkernels.engine.inputs.images import MAX_PIXELS, is_image, rgb

FORMATS = "mov, mp4, m4v, matroska, webm, avi, mpeg, mpegts, gif"
OPTIONS = {"format_whitelist": FORMATS.replace(" ", ""), "protocol_whitelist": ""}
FPS = 2.0  # frames of a second that Qwen's models read, unless the video processor says otherwise
MAX_SECONDS = 3600
MAX_DECODED = 1 << 18  # frames up to the last sampled one: decoding needs all of them
MAX_SAMPLED = 1 << 28  # pixels of all sampled frames: 768 MiB of RGB


class VideoError(ValueError):
    """A video that cannot be read."""


@dataclass(frozen=True)
class Source:
    """The size of a video, known before a frame is decoded. frames: their number; rate: of a second."""

    frames: int
    rate: float
    width: int
    height: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


@dataclass(frozen=True)
class Video:
    """Sampled frames [n, H, W, 3] uint8, and the time of each from the beginning, in seconds.

    rate: frames of a second after sampling
    """

    frames: np.ndarray
    times: np.ndarray
    rate: float


Sampler = Callable[[Source], Sequence[int]]  # the numbers of the frames to keep, increasing


def video(given: Any, sample: Sampler) -> Video:
    """A video of a file's bytes, of frames, or of (frames, {'fps': their rate}).

    Frames are PIL images of one size, or an array [n, H, W, 3] uint8. These are all kept; without a rate they are FPS a
    second. sample: of a file. Raises VideoError, before anything is decoded if the size shows it.
    """
    if isinstance(given, bytes):
        return _of_file(given, sample)
    frames, known = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if known is not None and not isinstance(known, Mapping):
        raise VideoError(f"of frames and {known!r}, which must be a dict such as {{'fps': {FPS:g}}}")
    rate = (known or {}).get("fps", FPS)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
        raise VideoError(f"of frames with fps {rate!r}, which must be a number above 0")
    if hasattr(frames, "numpy"):  # a tensor
        frames = frames.cpu().numpy()
    made = frames if isinstance(frames, np.ndarray) else _stacked(frames)
    if made.ndim != 4 or made.shape[3] != 3 or made.dtype != np.uint8:
        raise VideoError(
            f"of shape {list(made.shape)} and {made.dtype}, which must be [n, H, W, 3] and uint8"
        )
    if not made.size:
        raise VideoError("without frames")
    _check_pixels(len(made), made.shape[2], made.shape[1])
    return Video(np.ascontiguousarray(made), np.arange(len(made)) / rate, float(rate))


def _stacked(frames: Any) -> np.ndarray:
    listed = list(frames) if isinstance(frames, (list, tuple)) else [frames]
    if not listed:
        raise VideoError("without frames")
    if not all(map(is_image, listed)):
        kind = next(type(f).__name__ for f in listed if not is_image(f))
        raise VideoError(
            f"of a {kind}: it must be the bytes of a file, PIL images, an array [n, H, W, 3], or one of these with a"
            " dict of their fps"
        )
    sizes = sorted({f.size for f in listed})
    if len(sizes) > 1:
        raise VideoError(f"of frames of several sizes: {sizes[0]} and {sizes[-1]} pixels")
    _check_pixels(len(listed), *sizes[0])
    return np.stack([np.asarray(rgb(f)) for f in listed])


def _check_pixels(frames: int, width: int, height: int) -> None:
    if frames * width * height > MAX_SAMPLED:
        raise VideoError(
            f"of {frames} sampled frames of {width} x {height} pixels, and at most {MAX_SAMPLED} pixels in all are"
            " possible: make it shorter or smaller"
        )


def _of_file(data: bytes, sample: Sampler) -> Video:
    try:
        import av
    except ImportError as error:
        raise VideoError(
            "that cannot be read here: the package av is not installed (pip install 'fastkernels[audio]')"
        ) from error
    try:
        # Only these formats: others, such as playlists, would open further files and addresses
        container = av.open(io.BytesIO(data), options=OPTIONS, metadata_errors="ignore")
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise VideoError(f"that is damaged, or no file of a known format: use {FORMATS}") from error
    with container:
        if not container.streams.video:
            raise VideoError("without frames: the file has no video stream")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise VideoError("with a codec that is not supported")
        stream.codec_context.thread_count = 1
        source = _source(av, container, stream, data)
        kept = [int(i) for i in sample(source)]
        _check_pixels(len(kept), source.width, source.height)
        frames = _decoded(av, container, stream, kept, source)
    times = np.array(kept[: len(frames)]) / source.rate
    return Video(np.stack(frames), times, len(kept) / source.seconds)


def _source(av: Any, container: Any, stream: Any, data: bytes) -> Source:
    """The size of a video, from its headers and packets. Raises VideoError."""
    width, height = stream.codec_context.width, stream.codec_context.height
    if width < 1 or height < 1:
        raise VideoError("of an unknown size in pixels: the file is damaged")
    if width * height > MAX_PIXELS:
        raise VideoError(
            f"of {width} x {height} pixels, and at most {MAX_PIXELS} pixels in a frame are possible"
        )
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    seconds = None
    if stream.duration is not None and stream.time_base is not None:
        seconds = float(stream.duration * stream.time_base)
    elif container.duration is not None:
        seconds = container.duration / av.time_base
    if seconds is not None and seconds > MAX_SECONDS:
        raise VideoError(f"of {seconds:g} s, and at most {MAX_SECONDS} s are possible: cut it into parts")
    frames = stream.frames
    if not frames:  # the header does not say: count the packets, without decoding them
        with av.open(io.BytesIO(data), options=OPTIONS, metadata_errors="ignore") as again:
            packets = again.demux(again.streams.video[0])
            frames = sum(packet.size > 0 for packet in packets)
    if not frames:
        raise VideoError("without frames")
    if frames > MAX_DECODED:
        raise VideoError(f"of {frames} frames, and at most {MAX_DECODED} are possible: cut it into parts")
    if not 0 < rate < math.inf:
        rate = frames / seconds if seconds else FPS
    if frames / rate > MAX_SECONDS:
        raise VideoError(
            f"of {frames / rate:g} s, and at most {MAX_SECONDS} s are possible: cut it into parts"
        )
    return Source(frames, rate, width, height)


def _decoded(av: Any, container: Any, stream: Any, kept: Sequence[int], source: Source) -> list[np.ndarray]:
    """These frames. The last one stands for those that the header promised in vain. Raises VideoError."""
    found: list[np.ndarray] = []
    last: Any = None
    turns = 0
    try:
        for i, frame in enumerate(container.decode(stream)):
            last = frame
            turns = turns if i else round(frame.rotation / 90)
            while len(found) < len(kept) and kept[len(found)] == i:
                found.append(_array(frame, source, turns))
            if len(found) == len(kept):
                return found
    except av.error.FFmpegError as error:
        raise VideoError(f"that is damaged: {error}") from error
    if last is None:
        raise VideoError("without frames")
    rest = _array(last, source, turns)
    return [*found, *[rest] * (len(kept) - len(found))]


def _array(frame: Any, source: Source, turns: int) -> np.ndarray:
    """RGB of a frame. Its size may change within a file: it becomes that of the first one.

    turns: quarters to the left, by which a phone's file says that it is shown; vLLM's OpenCV turns it, too
    """
    made = frame.to_ndarray(format="rgb24", width=source.width, height=source.height)
    return np.rot90(made, turns) if turns else made
