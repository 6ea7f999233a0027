"""Images and videos of requests: encoded files to RGB, and RGB to the patches that a model takes."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastkernels.engine.inputs.letterbox import LetterboxProcessor
from fastkernels.engine.inputs.timm_images import TimmProcessor
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs.ultralytics_config import Letterbox
from fastkernels.models.common.layers import cnn

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 1 << 26  # of an image, or of all frames of a video, before they are resized: 192 MiB of RGB
SQUARE = 384  # pixels of a side, from which on ConvNeXt's processor makes images square and crops nothing
DAMAGE = (OSError, SyntaxError, ValueError)  # of Pillow, for files that it cannot read
_OPENED = [threading.Lock() for _ in range(64)]  # by id: Pillow reads an opened file once, for one thread


@dataclass(frozen=True)
class Patches:
    """One image or video as a model takes it.

    values    [patches, C * p * p], row by row: float32, or bytes that the runner scales (pixels.Scale); of a video
              [patches, C * t * p * p], one step after the other
    grid      (rows, columns); of a video (steps, rows, columns)
    tokens    of the model's sequence: patches and prefix tokens
    features  hidden states that the model returns
    view      of an image, the rectangle that the model sees: left, top, width and height in the image's pixels
    size      the image's width and height
    clips     whether the view is larger than the image
    """

    values: np.ndarray
    grid: tuple[int, ...]
    tokens: int
    features: int
    view: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)
    size: tuple[int, int] = (1, 1)
    clips: bool = False


class ImageReader:
    """Makes a model's patches of PIL images with the checkpoint's image processor. Safe in any thread.

    Raises CheckpointError without a processor.
    """

    kind, file, processor = "image", "preprocessor_config.json", "AutoImageProcessor"

    def __init__(self, folder: Path, hf_config: Any, model: Any):
        settings = getattr(hf_config, "preprocessing", None)
        self._processor: Any = _own_processor(settings) if settings else self._of_transformers(folder)
        config = getattr(hf_config, "vision_config", hf_config)
        self._patch_size: int = getattr(model, "patch_size", getattr(config, "patch_size", cnn.PATCH))
        self._steps: int = getattr(config, "tubelet_size", 1)
        self._edge = _shorter_side(self._processor)
        self._model = model

    def _of_transformers(self, folder: Path) -> Any:
        import transformers

        try:
            return getattr(transformers, self.processor).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointError(
                f"the {self.kind} processor of {folder} ({self.file}) cannot be used; it may need the packages pillow"
                f" and torchvision (pip install 'fastkernels[images]'): {' '.join(str(error).split())}"
            ) from error

    def patches(self, given: Any) -> Patches:
        """Raises ValueError for something else than an image, and for an image that the processor cannot take."""
        if not is_image(given):
            raise ValueError(
                f"the prompt must be a PIL image, got {type(given).__name__}: this model takes images"
            )
        image = rgb(given)
        made = self._process(given, images=image)
        values = made["pixel_values"][0]
        if "spatial_shapes" in made:  # patches already, padded
            rows, columns = made["spatial_shapes"][0].tolist()
            return self._made(values[: rows * columns], (rows, columns))
        height, width = values.shape[1:]
        values, (_, rows, columns) = self._cut(values[None])
        found = self._made(values, (rows, columns))
        if "view" in made:
            return replace(found, view=made["view"], size=image.size, clips=True)
        seen = columns * self._patch_size / width, rows * self._patch_size / height
        view = (0.0, 0.0, image.width * seen[0], image.height * seen[1])
        return replace(found, view=view, size=image.size)

    def _process(self, image: Any, count: int = 1, **given: Any) -> Any:
        """Call the processor. image: the first one of `count` of its size"""
        self._check_resized(image, count)
        try:
            return self._processor(**given, return_tensors="pt")
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            size = f"{image.width} x {image.height}"
            raise ValueError(
                f"the prompt, {'an image' if self.kind == 'image' else 'frames'} of {size} pixels, cannot be"
                f" processed: {error}"
            ) from error

    def _check_resized(self, image: Any, count: int) -> None:
        """Raise ValueError for a narrow image that becomes too large if its shorter side is as the model has it."""
        short, long = sorted(image.size)
        if short and count * self._edge**2 * long > MAX_PIXELS * short:
            longer = self._edge * long // short
            raise ValueError(
                f"the prompt has {image.width} x {image.height} pixels, which this model resizes to {self._edge} x"
                f" {longer}{f' in {count} frames' if count > 1 else ''}, and at most {MAX_PIXELS} pixels are possible:"
                " cut it into parts that are less narrow"
            )

    def _cut(self, frames: Any) -> tuple[Any, tuple[int, int, int]]:
        """The patches of frames [N, C, H, W], as a convolution's weight has them: (C, t, p, p)."""
        p, t = self._patch_size, self._steps
        if getattr(self._model, "pads_images", False):
            import torch

            frames = torch.nn.functional.pad(frames, (0, -frames.shape[3] % p, 0, -frames.shape[2] % p))
        steps, rows, columns = len(frames) // t, frames.shape[2] // p, frames.shape[3] // p
        cut = frames[: steps * t, :, : rows * p, : columns * p]
        cut = cut.unflatten(3, (columns, p)).unflatten(2, (rows, p)).unflatten(0, (steps, t))
        # [steps, t, C, rows, p, columns, p]
        return cut.permute(0, 3, 5, 2, 1, 4, 6).flatten(3).flatten(0, 2), (steps, rows, columns)

    def _made(self, values: Any, grid: tuple[int, ...]) -> Patches:
        import torch

        if not len(values):
            raise ValueError(f"the prompt is smaller than one patch of {self._patch_size} pixels")
        if (check := getattr(self._model, "check_grid", None)) is not None:
            check(grid)
        tokens = self._model.prefix_tokens + len(values)
        features = getattr(self._model, "features", None)
        values = values if values.dtype == torch.uint8 else values.float()
        return Patches(values.numpy(), grid, tokens, features(grid) if features else tokens)


class VideoReader(ImageReader):
    """The same for videos, lists of frames, with the checkpoint's video processor. An image becomes one step."""

    kind, file, processor = "video", "video_preprocessor_config.json", "AutoVideoProcessor"

    def patches(self, given: Any) -> Patches:
        """Raises ValueError for something else than an image or frames of one size, and a wrong number of frames."""
        frames = given if is_video(given) else [given]
        if not all(map(is_image, frames)):
            kind = type(given).__name__
            raise ValueError(
                f"the prompt must be a list of PIL images or one such image, got {kind}: this model takes videos"
            )
        sizes = sorted({frame.size for frame in frames})
        if len(sizes) > 1:
            raise ValueError(f"the prompt has frames of several sizes: {sizes[0]} and {sizes[-1]} pixels")
        if len(frames) > 1 and len(frames) % self._steps:
            raise ValueError(
                f"the prompt has {len(frames)} frames, and this model takes one or a multiple of {self._steps}"
            )
        made = self._process(frames[0], len(frames), videos=[[rgb(frame) for frame in frames]])
        made = made["pixel_values_videos"][0]
        return self._made(*self._cut(made if len(made) > 1 else made.repeat(self._steps, 1, 1, 1)))


def _own_processor(settings: Any) -> Any:
    """The processor of images for the settings of a checkpoint that transformers cannot read."""
    return LetterboxProcessor(settings) if isinstance(settings, Letterbox) else TimmProcessor(settings)


def _shorter_side(processor: Any) -> int:
    """The pixels that a processor gives to the shorter side of any image; 0 if it sizes images otherwise."""
    if isinstance(processor, TimmProcessor):
        return processor.edge if processor.settings.mode == "center" else 0
    size = getattr(processor, "size", None) or {}
    fixed = getattr(processor, "do_resize", False) and size.get("longest_edge") is None
    edge, part = int(size.get("shortest_edge") or 0) if fixed else 0, getattr(processor, "crop_pct", None)
    if part is None:
        return edge
    return int(edge / part) if edge < SQUARE else 0


READERS = {"images": ImageReader, "videos": VideoReader}


def is_video(value: Any) -> bool:
    """Whether the value is a list of frames: PIL images."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and is_image(value[0])


def is_image(value: Any) -> bool:
    """Whether the value is a PIL image."""
    return hasattr(value, "convert") and hasattr(value, "getbands")


def rgb(image: Any) -> Any:
    """The image in RGB, upright as its EXIF orientation says: the given one if it is so already."""
    from PIL import Image

    with _OPENED[id(image) // 16 % len(_OPENED)]:
        image = _upright(image)
    if image.mode == "RGB":  # a copy of 12 million pixels takes milliseconds
        return image
    if image.mode.startswith("I;16"):  # convert() would clip, not scale
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _upright(image: Any) -> Any:
    """The image as its EXIF orientation says. EXIF that cannot be read has no effect, as in vLLM and browsers."""
    from PIL import ExifTags, ImageOps

    image.load()
    with contextlib.suppress(Exception):
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
    return image


def _over_white(image: Any) -> Any:
    """An image with transparent pixels, over white as in vLLM's server; others as they are."""
    from PIL import Image

    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image
    above = _upright(image)
    if above.mode.startswith("I;16"):  # convert() would clip, not scale
        gray = np.asarray(above)
        return Image.fromarray(np.where(gray == above.info["transparency"], 255, gray >> 8).astype(np.uint8))
    above = above.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)


def decode(data: bytes) -> Any:
    """The PIL image of a file's bytes; of an animation, its first frame, as in vLLM.

    Raises ValueError for formats, sizes and damage, with what is accepted.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("images cannot be read here: the package pillow is not installed") from error
    accepted = f"accepted are {', '.join(FORMATS)} of at most {MAX_PIXELS} pixels"
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        found = re.search(r"\d+", str(error))  # Pillow gives no size
        raise ValueError(f"an image of {found[0] if found else 'too many'} pixels; {accepted}") from error
    except DAMAGE as error:
        raise ValueError(f"not an image of a known format; {accepted}") from error
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"an image of {image.width} x {image.height} pixels; {accepted}")
    try:
        return rgb(_over_white(image))
    except DAMAGE as error:
        raise ValueError(f"a damaged {image.format} image ({error}); {accepted}") from error


def decode_frames(files: Iterable[bytes]) -> list[Any]:
    """The frames of a video, each an image file. Raises ValueError as decode does, which names the frame."""
    frames: list[Any] = []
    pixels = 0
    for i, data in enumerate(files):
        try:
            frames.append(decode(data))
        except ValueError as error:
            raise ValueError(
                f"a video whose frame {i} (each frame is a file of its own) is {error}"
            ) from error
        pixels += frames[-1].width * frames[-1].height
        if pixels > MAX_PIXELS:
            raise ValueError(f"a video of more than {MAX_PIXELS} pixels in all frames")
    return frames
