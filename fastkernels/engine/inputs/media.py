"""Reads the media of a prompt: values by the checkpoint's processor, placeholders in the tokens, positions."""

from __future__ import annotations

import base64
import hashlib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

from fastkernels.core import local_files
from fastkernels.engine.cache.media_cache import MediaItem
from fastkernels.engine.inputs import videos
from fastkernels.engine.inputs.images import decode, is_image, rgb
from fastkernels.engine.speech import files
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.layers.media import Grid, mrope_positions

LIMIT = 999  # media of a kind in a prompt, unless limit_mm_per_prompt says otherwise: vLLM's default
PART = 1024  # features of a video that are encoded at once, at least those of one step
PLURALS = {"image": "images", "video": "videos", "audio": "audios"}
PROCESSORS = {  # {kind: (part of transformers' processor, its file)}
    "image": ("image_processor", "preprocessor_config.json"),
    "video": ("video_processor", "video_preprocessor_config.json"),
    "audio": ("feature_extractor", "preprocessor_config.json"),
}
_TOKENIZING = Lock()  # a tokenizer is not safe in several threads


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


@dataclass(frozen=True)
class Medium:
    """Tokens and features in place of a placeholder.

    token_ids  of the text and the features
    items      start: from the first of these tokens
    spans      (first of these tokens, offsets [3, m]) of features whose positions belong together
    """

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    spans: tuple[tuple[int, np.ndarray], ...]


class MediaReader:
    """Makes a MediaPrompt of token ids and media. Safe in any thread.

    model   with the interface of fastkernels/models/common/layers/media.py
    limits  {kind: media in a prompt}; most: tokens of a prompt
    """

    def __init__(self, folder: Path, model: Any, dtype: torch.dtype, limits: Mapping[str, int], most: int):
        self.model, self.dtype, self.most = model, dtype, most
        self.limits = {kind: limits.get(kind, LIMIT) for kind in model.token_ids}
        self._kinds = {token: kind for kind, token in model.token_ids.items()}
        self._folder = folder

    @cached_property
    def processor(self) -> Any:
        """The checkpoint's processor. Raises CheckpointError if it has none that can be used."""
        return _processor(self._folder, self.model.token_ids)

    def limit(self, kind: str, count: int) -> None:
        """Raise ValueError for more media of a kind than a prompt may have."""
        if kind not in self.limits:
            known = ", ".join(sorted(self.limits))
            raise ValueError(f"the prompt has media of kind {kind!r}, and this model takes {known}")
        if count > self.limits[kind]:
            raise ValueError(
                f"the prompt has {count} {PLURALS[kind]}, and at most {self.limits[kind]} are allowed"
                f" (limit_mm_per_prompt of this engine)"
            )

    def read(self, text: str | None, ids: Sequence[int], data: Mapping[str, Any]) -> MediaPrompt:
        """ids: with one placeholder for each medium; data: {kind: a medium or a list of them}.

        An image is a PIL image. A video: see videos.video; an audio: see files.recording. Each may be the bytes or the
        path of a file. A list of frames is one video. Raises ValueError for anything else, too many, or another number
        than that of placeholders.
        """
        given = {kind: _listed(kind, value) for kind, value in data.items() if value is not None}
        for kind, listed in given.items():
            if listed:
                self.limit(kind, len(listed))
        places = [(i, self._kinds[token]) for i, token in enumerate(ids) if token in self._kinds]
        for kind, token in self.model.token_ids.items():
            found, wanted = sum(k == kind for _, k in places), len(given.get(kind, []))
            if found != wanted:
                raise ValueError(
                    f"the prompt has {found} placeholders of {PLURALS[kind]}, and {wanted} {PLURALS[kind]} are given:"
                    f" each {kind} needs one, {self.model.placeholders[kind]} in text or the token id {token}"
                )
        made: list[int] = []
        items: list[MediaItem] = []
        spans: list[tuple[int, np.ndarray]] = []
        counts = dict.fromkeys(given, 0)
        before = 0
        for place, kind in places:
            i = counts[kind]
            counts[kind] += 1
            made += ids[before:place]
            medium = self._read(kind, i, given[kind][i], self.most - len(made))
            items += [replace(item, start=len(made) + item.start) for item in medium.items]
            spans += [(len(made) + start, offsets) for start, offsets in medium.spans]
            made += medium.token_ids
            self._check_length(kind, i, len(made))
            before = place + 1
        made += ids[before:]
        return MediaPrompt(text, made, tuple(items), *mrope_positions(spans))

    def _check_length(self, kind: str, i: int, tokens: int) -> None:
        if tokens > self.most:
            raise ValueError(
                f"the prompt has {tokens} tokens up to {kind} {i}, and the maximum context length is {self.most}"
                " tokens, output included"
            )

    def _read(self, kind: str, i: int, value: Any, room: int) -> Medium:
        """room: tokens that the prompt may still have. Raises ValueError."""
        if kind == "image":
            return self._image(i, value)
        return self._audio(i, value, room) if kind == "audio" else self._video(i, value, room)

    def _image(self, i: int, image: Any) -> Medium:
        image = _of_path("image", i, image)
        if isinstance(image, bytes):
            try:
                image = decode(image)
            except ValueError as error:
                raise ValueError(f"image {i} of the prompt is {error}") from error
        if not is_image(image):
            raise ValueError(
                f"image {i} of the prompt must be a PIL image, or the bytes or path of a file, got"
                f" {type(image).__name__}"
            )
        image = rgb(image)
        size, process = f"{image.width} x {image.height} pixels", self.processor.image_processor
        try:
            found = process(images=[image], return_tensors="pt")
            steps, rows, columns = found["image_grid_thw"][0].tolist()
            merged = self.model.merged((steps, rows, columns))
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"image {i} of {size} cannot be processed: {error}") from error
        digest = _digest(f"image {image.width} {image.height}", image.tobytes())
        values = found["pixel_values"].to(self.dtype)
        item = MediaItem("image", digest, values, (steps, rows, columns), 0, prod(merged))
        return self._medium([item], ((0, self.model.offsets(merged)),))

    def _medium(self, items: Sequence[MediaItem], spans: tuple[tuple[int, np.ndarray], ...]) -> Medium:
        """A medium of features only."""
        token = self.model.token_ids[items[0].kind]
        return Medium([token] * sum(item.size for item in items), tuple(items), spans)

    def _audio(self, i: int, value: Any, room: int) -> Medium:
        extractor = self.processor.feature_extractor
        rate, hop, most = extractor.sampling_rate, extractor.hop_length, extractor.n_samples
        try:
            samples = files.recording(value, rate, most / rate).window(0, most + 1)
        except (files.MissingPackage, files.AudioError) as error:
            raise ValueError(f"audio {i} of the prompt cannot be read: {error}") from error
        if len(samples) > most:
            raise ValueError(
                f"audio {i} of the prompt is longer than {most / rate:g} s, the most that this model reads: cut it into"
                " parts"
            )
        frames = -(-len(samples) // hop)
        size = self.model.audio_size(frames)
        if not size:
            raise ValueError(
                f"audio {i} of the prompt has {len(samples) / rate:g} s, and {self.model.audio_frames * hop / rate:g} s"
                " are the least"
            )
        if size > room:
            self._check_length("audio", i, self.most - room + size)
        # The last frames read samples beyond the end: zeros, as if it were padded to the longest audio
        padded = np.pad(samples, (0, min(extractor.n_fft + -len(samples) % hop, most - len(samples))))
        found = extractor(padded, sampling_rate=rate, padding=False, truncation=False, return_tensors="pt")[
            "input_features"
        ][0, :, :frames]
        if tuple(found.shape) != (self.model.audio_bins, frames):
            raise ValueError(
                f"the feature extractor makes {list(found.shape)}, and the model reads"
                f" {[self.model.audio_bins, frames]}: the checkpoint's preprocessor_config.json belongs to another"
                " model"
            )
        if not torch.isfinite(found).all():
            raise ValueError(
                f"audio {i} of the prompt is too loud: its samples reach {np.abs(samples).max():g}, and 1 is full scale"
            )
        digest = _digest("audio", samples.tobytes())
        item = MediaItem("audio", digest, found.to(self.dtype), (frames, 1, 1), 0, size)
        return self._medium([item], ((0, np.broadcast_to(np.arange(size), (3, size))),))

    def _video(self, i: int, value: Any, room: int) -> Medium:
        process = self.processor.video_processor
        try:
            found = videos.video(_of_path("video", i, value), partial(self._sample, i, room))
            frames = found.frames
            self._check_video(i, len(frames), frames.shape[2], frames.shape[1], room)
        except videos.VideoError as error:
            raise ValueError(f"video {i} of the prompt is one {error}") from error
        steps = process.temporal_patch_size
        if len(frames) % steps:  # the last frame stands for those that a step lacks, as in the processor
            rest = steps - len(frames) % steps
            frames = np.concatenate([frames, np.repeat(frames[-1:], rest, axis=0)])
        times = np.concatenate([found.times, np.repeat(found.times[-1:], len(frames) - len(found.times))])
        shape = f"{len(frames)} frames of {frames.shape[2]} x {frames.shape[1]} pixels"
        try:
            tensor = torch.from_numpy(frames).permute(0, 3, 1, 2)
            made = process(videos=[tensor], do_sample_frames=False, return_tensors="pt", **self._video_size)
            grid = tuple(made["video_grid_thw"][0].tolist())
            merged = self.model.merged(grid)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"video {i} of {shape} cannot be processed: {error}") from error
        seconds = steps / found.rate
        values = made["pixel_values_videos"].to(self.dtype)
        return self._steps(values, grid, merged, frames, times, seconds)

    @cached_property
    def _video_size(self) -> dict[str, Any]:
        """Limits of a frame's size that the whole processor has in place of the video processor's."""
        own = getattr(self.processor, "videos_kwargs", None) or {}
        return {"size": own["size"]} if "size" in own else {}

    def _steps(
        self,
        values: torch.Tensor,
        grid: Grid,
        merged: Grid,
        frames: np.ndarray,
        times: np.ndarray,
        seconds: float,
    ) -> Medium:
        """A video as parts of some steps, each with features of its own. times: of the frames."""
        patches, size, frames_of = prod(grid[1:]), prod(merged[1:]), len(frames) // grid[0]
        stamped = self.model.timestamps
        each = 1 if stamped else max(1, PART // size)
        token, ids = self.model.token_ids["video"], list[int]()
        items, spans = list[MediaItem](), list[tuple[int, np.ndarray]]()
        for at in range(0, grid[0], each):
            n = min(each, grid[0] - at)
            own = frames[at * frames_of : (at + n) * frames_of]
            name = f"video {own.shape} {grid[1:]} {0 if stamped else seconds:.6g}"
            if stamped:
                time = times[at * frames_of : (at + 1) * frames_of][[0, -1]].mean()
                ids += self._stamp(time)
            part = values[at * patches : (at + n) * patches]
            items.append(
                MediaItem("video", _digest(name, own.tobytes()), part, (n, *grid[1:]), len(ids), n * size)
            )
            if stamped:
                spans.append((len(ids), self.model.offsets((1, *merged[1:]))))
            ids += [token] * n * size
            if stamped:
                ids += self._marks[1:]
        if not stamped:
            spans.append((0, self.model.offsets(merged, seconds)))
        return Medium(ids, tuple(items), tuple(spans))

    @cached_property
    def _marks(self) -> list[int]:
        """The tokens before and behind the features of a step of a video with timestamps."""
        own = self.processor
        return [own.vision_start_token_id, own.vision_end_token_id]

    def _stamp(self, time: float) -> list[int]:
        text = f"<{time:.1f} seconds>"
        with _TOKENIZING:
            found: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*found, *self._marks[:1]]

    def _sample(self, i: int, room: int, source: videos.Source) -> Sequence[int]:
        """The frames of a file that the checkpoint's video processor takes. Raises ValueError."""
        from transformers.video_utils import VideoMetadata

        process = self.processor.video_processor
        metadata = VideoMetadata(
            total_num_frames=source.frames, fps=source.rate, width=source.width, height=source.height,
            duration=source.seconds,
        )  # fmt: skip
        if source.frames < process.temporal_patch_size:
            return list(range(source.frames))
        fps = process.fps if process.num_frames is None else None
        more = {"fps": fps or videos.FPS} if process.num_frames is None else {}
        try:
            kept = [int(k) for k in process.sample_frames(metadata, **more)]
        except ValueError as error:
            raise videos.VideoError(f"that cannot be sampled: {error}") from error
        self._check_video(i, len(kept), source.width, source.height, room)
        return kept

    def _check_video(self, i: int, frames: int, width: int, height: int, room: int) -> None:
        """Raise ValueError for a video of more tokens than there is room for, before it is decoded or resized."""
        process = self.processor.video_processor
        steps = process.temporal_patch_size
        try:
            patches = process.get_num_of_video_patches(
                max(frames + -frames % steps, steps), height, width, self._video_size
            )
        except (ValueError, ZeroDivisionError) as error:
            shape = f"{frames} frames of {width} x {height} pixels"
            raise ValueError(f"video {i} of {shape} cannot be processed: {error}") from error
        size = patches // self.model.merge**2
        if size > room:
            self._check_length("video", i, self.most - room + size)


def _listed(kind: str, value: Any) -> list[Any]:
    """The media of a kind: a list of frames is one video, and a list of samples one audio."""
    if isinstance(value, tuple) and kind != "image":  # frames and their rate, or samples and theirs
        return [value]
    if not isinstance(value, (list, tuple)):
        return [value]
    if kind == "video" and value and is_image(value[0]):
        return [value]
    if kind == "audio" and value and isinstance(value[0], (int, float)):
        return [value]
    return list(value)


def _of_path(kind: str, i: int, value: Any) -> Any:
    """The bytes of a file that is given as its path; other media as they are. Raises ValueError."""
    if not isinstance(value, (str, PathLike)):
        return value
    try:
        return local_files.read(value)
    except local_files.FileError as error:
        raise ValueError(f"{kind} {i} of the prompt {error}") from error


def _digest(name: str, data: bytes) -> bytes:
    key = hashlib.blake2b(f"{name} ".encode(), digest_size=16)
    key.update(data)
    return key.digest()


def _processor(folder: Path, kinds: Iterable[str]) -> Any:
    try:
        from transformers import AutoProcessor

        found = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"the processor of {folder} (preprocessor_config.json) cannot be used; it may need the packages pillow and"
            f" torchvision (pip install 'fastkernels[images]'): {' '.join(str(error).split())}"
        ) from error
    for kind in kinds:
        name, file = PROCESSORS[kind]
        if getattr(found, name, None) is None:
            raise CheckpointError(f"{folder} has no {name.replace('_', ' ')} ({file})")
    return found


def data_of(url: str, name: str) -> bytes:
    """The bytes of a medium, given as a data URL in base64. name: such as 'image 0'. Raises ValueError."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise ValueError(f"{name} is not a data URL in base64: it begins with {head[:64]!r}")
    try:
        return base64.b64decode("".join(data.split()), validate=True)  # encoders break lines
    except ValueError as error:
        raise ValueError(f"{name} is not base64 behind the comma: {error}") from error


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
