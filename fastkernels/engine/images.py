"""Images of requests: encoded files to RGB, and RGB to the patches that a model takes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastkernels.models.common.checkpoint import CheckpointError

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 1 << 26  # of one image before it is resized: 192 MiB of RGB


@dataclass(frozen=True)
class Patches:
    """One image as a model takes it.

    values  [rows * columns, C * p * p] float32, row by row
    grid    (rows, columns)
    tokens  of the model's sequence: patches and prefix tokens
    """

    values: np.ndarray
    grid: tuple[int, int]
    tokens: int


class ImageReader:
    """Makes a model's patches of PIL images with the checkpoint's image processor. Safe in any thread.

    prefix_tokens: the model's tokens before the patches. Raises CheckpointError without a processor.
    """

    def __init__(self, folder: Path, hf_config: Any, prefix_tokens: int):
        from transformers import AutoImageProcessor

        try:
            self._processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointError(
                f"the image processor of {folder} (preprocessor_config.json) cannot be used; it may need the packages"
                f" pillow and torchvision (pip install 'fastkernels[images]'): {' '.join(str(error).split())}"
            ) from error
        self._patch_size: int = getattr(hf_config, "vision_config", hf_config).patch_size
        self._prefix_tokens = prefix_tokens

    def patches(self, image: Any) -> Patches:
        """Raises ValueError for something else than an image, and for an image that the processor cannot take."""
        if not is_image(image):
            raise ValueError(
                f"the prompt must be a PIL image, got {type(image).__name__}: this model takes images"
            )
        try:
            made = self._processor(images=rgb(image), return_tensors="pt")
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            size = f"{image.width} x {image.height}"
            raise ValueError(
                f"the prompt, an image of {size} pixels, cannot be processed: {error}"
            ) from error
        values = made["pixel_values"][0]
        if "spatial_shapes" in made:  # patches already, padded
            rows, columns = made["spatial_shapes"][0].tolist()
            found = values[: rows * columns]
        else:
            p = self._patch_size
            rows, columns = values.shape[1] // p, values.shape[2] // p
            cut = values[:, : rows * p, : columns * p].unflatten(2, (columns, p)).unflatten(1, (rows, p))
            found = (
                cut.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1)
            )  # as a convolution's weight: (C, p, p)
        if not len(found):
            raise ValueError(f"the prompt is smaller than one patch of {self._patch_size} pixels")
        return Patches(found.float().numpy(), (rows, columns), self._prefix_tokens + len(found))


def is_image(value: Any) -> bool:
    """Whether the value is a PIL image."""
    return hasattr(value, "convert") and hasattr(value, "getbands")


def rgb(image: Any) -> Any:
    """The image in RGB, upright as its EXIF orientation says."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # convert() would clip, not scale
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def decode(data: bytes) -> Any:
    """The PIL image of a file's bytes. Raises ValueError for formats, sizes and damage, with what is accepted."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("images cannot be read here: the package pillow is not installed") from error
    accepted = f"accepted are {', '.join(FORMATS)} of one frame and at most {MAX_PIXELS} pixels"
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(f"an image of too many pixels; {accepted}") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"not an image of a known format; {accepted}") from error
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"an image of {image.width} x {image.height} pixels; {accepted}")
    frames = getattr(image, "n_frames", 1)
    if frames != 1:
        raise ValueError(f"an image of {frames} frames; {accepted}")
    try:
        return rgb(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"a damaged {image.format} image ({error}); {accepted}") from error
