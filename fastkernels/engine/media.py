"""Reads the media of a prompt: patches by the checkpoint's processor, placeholders in the tokens, positions."""

from __future__ import annotations

import base64
import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.engine.cache.media_cache import MediaItem
from fastkernels.engine.images import decode, is_image, rgb
from fastkernels.models.common.checkpoint import CheckpointError
from fastkernels.models.common.media import mrope_positions

LIMIT = 999  # media of a kind in a prompt, unless limit_mm_per_prompt says otherwise: vLLM's default


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with media.

    text       None: it was given as token ids
    token_ids  a placeholder for each feature
    items      in the order of the prompt
    positions  [3, n] int64 of the first n tokens, which end with the last medium; shift: see mrope_positions
    """

    text: str | None
    token_ids: list[int]
    items: tuple[MediaItem, ...]
    positions: np.ndarray
    shift: int


class MediaReader:
    """Makes a MediaPrompt of token ids and media. Safe in any thread.

    model   with the interface of fastkernels/models/common/media.py
    limits  {kind: media in a prompt}; most: tokens of a prompt
    """

    def __init__(self, folder: Path, model: Any, dtype: torch.dtype, limits: Mapping[str, int], most: int):
        self.model, self.dtype, self.most = model, dtype, most
        self.limits = {kind: limits.get(kind, LIMIT) for kind in model.token_ids}
        self._folder = folder

    @cached_property
    def processor(self) -> Any:
        """The checkpoint's processor. Raises CheckpointError if it has none that can be used."""
        return _processor(self._folder)

    def limit(self, kind: str, count: int) -> None:
        """Raise ValueError for more media of a kind than a prompt may have."""
        if kind not in self.limits:
            known = ", ".join(sorted(self.limits))
            raise ValueError(f"the prompt has media of kind {kind!r}, and this model takes {known}")
        if count > self.limits[kind]:
            raise ValueError(
                f"the prompt has {count} {kind}s, and at most {self.limits[kind]} are allowed"
                f" (limit_mm_per_prompt of this engine)"
            )

    def read(self, text: str | None, ids: Sequence[int], data: Mapping[str, Any]) -> MediaPrompt:
        """ids: with one placeholder for each medium; data: {'image': PIL images or files' bytes, one or a list}.

        Raises ValueError for something else than images, too many, or another number than that of placeholders.
        """
        given: dict[str, list[Any]] = {}
        for kind, value in data.items():
            listed = list(value) if isinstance(value, (list, tuple)) else [value]
            if value is not None and listed:
                self.limit(kind, len(listed))
                given[kind] = listed
        images, token = given.get("image", []), self.model.token_ids["image"]
        places = [i for i, token_id in enumerate(ids) if token_id == token]
        if len(places) != len(images):
            name = self.model.placeholders["image"]
            raise ValueError(
                f"the prompt has {len(places)} placeholders of images, and {len(images)} images are given: each image"
                f" needs one, {name} in text or the token id {token}"
            )
        made: list[int] = []
        items: list[MediaItem] = []
        before = 0
        for i, (place, image) in enumerate(zip(places, images, strict=True)):
            made += ids[before:place]
            items.append(self._image(i, image, len(made)))
            made += [token] * items[-1].size
            if len(made) > self.most:
                raise ValueError(
                    f"the prompt has {len(made)} tokens up to image {i}, and the maximum context length is {self.most}"
                    " tokens, output included"
                )
            before = place + 1
        made += ids[before:]
        spans = [(item.start, self.model.merged(item.grid)) for item in items]
        return MediaPrompt(text, made, tuple(items), *mrope_positions(spans))

    def _image(self, i: int, image: Any, start: int) -> MediaItem:
        if isinstance(image, bytes):
            try:
                image = decode(image)
            except ValueError as error:
                raise ValueError(f"image {i} of the prompt is {error}") from error
        if not is_image(image):
            raise ValueError(f"image {i} of the prompt must be a PIL image, got {type(image).__name__}")
        image = rgb(image)
        size, process = f"{image.width} x {image.height} pixels", self.processor.image_processor
        try:
            found = process(images=[image], return_tensors="pt")
            steps, rows, columns = found["image_grid_thw"][0].tolist()
            merged = self.model.merged((steps, rows, columns))
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"image {i} of {size} cannot be processed: {error}") from error
        key = hashlib.blake2b(f"image {image.width} {image.height} ".encode(), digest_size=16)
        key.update(image.tobytes())
        values = found["pixel_values"].to(self.dtype)
        return MediaItem(key.digest(), values, (steps, rows, columns), start, prod(merged))


def _processor(folder: Path) -> Any:
    try:
        from transformers import AutoProcessor

        found = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"the processor of {folder} (preprocessor_config.json) cannot be used; it may need the packages pillow and"
            f" torchvision (pip install 'fastkernels[images]'): {' '.join(str(error).split())}"
        ) from error
    if getattr(found, "image_processor", None) is None:
        raise CheckpointError(f"{folder} has no image processor (preprocessor_config.json)")
    return found


def data_of(url: str, i: int) -> bytes:
    """The bytes of image i, given as a data URL in base64. Raises ValueError."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise ValueError(f"image {i} is not a data URL in base64: it begins with {head[:64]!r}")
    try:
        return base64.b64decode("".join(data.split()), validate=True)  # encoders break lines
    except ValueError as error:
        raise ValueError(f"image {i} is not base64 behind the comma: {error}") from error


def media_of(prompt: Any) -> tuple[Any, Mapping[str, Any]]:
    """(text or token ids, media by kind) of a prompt as vLLM has it. Raises ValueError."""
    if not isinstance(prompt, Mapping):
        return prompt, {}
    data = prompt.get("multi_modal_data") or {}
    if not isinstance(data, Mapping):
        raise ValueError(
            f"multi_modal_data must be a dict such as {{'image': image}}, got {reprlib.repr(data)}"
        )
    for name in ("prompt_token_ids", "prompt"):
        if prompt.get(name) is not None:
            return prompt[name], {kind: value for kind, value in data.items() if value is not None}
    raise ValueError(
        "the prompt must be text or token ids, or a dict with 'prompt' or 'prompt_token_ids', got"
        f" {reprlib.repr(dict(prompt))}"
    )
