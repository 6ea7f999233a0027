"""Videos as MP4 files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

CODECS = ("libx264", "mpeg4")  # the first that PyAV's FFmpeg has


class MissingPackage(ImportError):
    """The package av is missing, which the extra `audio` installs."""


def check_packages() -> None:
    """Raise MissingPackage if no video can be written."""
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise MissingPackage("videos need the package av: pip install 'fastkernels[audio]'") from error


def write_mp4(path: Path, frames: np.ndarray, rate: int) -> None:
    """Write frames [F, H, W, 3] uint8, `rate` a second, H and W even. Raises MissingPackage."""
    check_packages()
    import av

    codec = next(name for name in CODECS if name in av.codecs_available)
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as file:
        stream: Any = file.add_stream(codec, rate=Fraction(rate))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        file.mux(stream.encode())
