"""Requests that name the objects of an image by a text, example boxes or marks, and what a segmenter finds for them."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import numpy as np

from fastkernels.engine.inputs.images import ImageReader, Patches, is_image, rgb
from fastkernels.engine.inputs.tokenizer import encode
from fastkernels.engine.inputs.videos import Source, VideoError, video
from fastkernels.engine.objects import marks
from fastkernels.engine.objects.detection import ObjectsOutput
from fastkernels.engine.objects.rle import coco_rle, decode_runs
from fastkernels.engine.sampling.pooling import PoolingOutput
from fastkernels.models.common.interfaces.segmenter import MarkSegmenter, Segmenter

THRESHOLD, MASK_THRESHOLD = 0.5, 0.5  # by default: of a score, and of a pixel's probability
MOST_BOXES = 64  # of a prompt
MOST_CHARACTERS = 4096  # of a text, before it is split into tokens
MOST_MASK_PIXELS = 1 << 24  # of an image whose masks are wanted: each object has one of the image's size
MOST_FRAMES = 64  # of a clip
CLIP_FRAMES = 4  # of a clip in a step: others run between the steps
MOST_CLIP_TEXTS = 16  # of a clip
CLIP_FIELDS = ("video", "text")
KEPT = 8  # images whose patches are kept
FIELDS = (
    "text",
    "boxes",
    "box_labels",
    "prompt_token_ids",
)  # of a prompt that names objects, next to the image
VISUAL = "visual"  # the text of a prompt with boxes alone, which the model was trained with


@dataclass(frozen=True)
class Concept:
    """The target of a request: objects of a kind in an image.

    digest     of the image: equal images have equal features
    input_ids  of the text
    boxes      (x, y, width, height), center and size in parts of the image; labels: 1, or 0 for what is not wanted
    name       the text
    """

    digest: bytes
    input_ids: tuple[int, ...]
    boxes: tuple[tuple[float, float, float, float], ...] = ()
    labels: tuple[int, ...] = ()
    name: str = ""


@dataclass
class SegmentationOutput(ObjectsOutput):
    """data: [n, 5] float32, the best first: left, top, right, bottom in pixels, and score.

    Of marks, these are the masks that they can mean, and scores are predicted overlaps with the object.

    runs           of each object's mask: lengths of runs of pixels in columns, the first of pixels that are outside;
                   None without masks
    semantic_runs  of the mask of all pixels that belong to any such object, if it was requested
    text           of the prompt; size: width and height of the image
    presence       of marks: the probability that the object is in the image
    """

    runs: list[list[int]] | None = None
    semantic_runs: list[int] | None = None
    text: str = ""
    size: tuple[int, int] = (1, 1)
    presence: float | None = None

    @property
    def labels(self) -> list[str]:
        """The text of the prompt, for each object."""
        return [self.text] * len(self.data)

    @property
    def masks(self) -> np.ndarray | None:
        """Masks [n, height, width] of bool."""
        if self.runs is None:
            return None
        width, height = self.size
        found = [decode_runs(runs, height, width) for runs in self.runs]
        return np.stack(found) if found else np.zeros((0, height, width), bool)

    @property
    def semantic(self) -> np.ndarray | None:
        """The mask of all objects [height, width] of bool, if it was requested."""
        return None if self.semantic_runs is None else decode_runs(self.semantic_runs, *self.size[::-1])

    @property
    def rles(self) -> list[dict[str, Any]] | None:
        """Masks as COCO has them: {'size': [height, width], 'counts': a text}."""
        return None if self.runs is None else [coco_rle(runs, self.size) for runs in self.runs]

    @property
    def semantic_rle(self) -> dict[str, Any] | None:
        """`semantic` in the form of `rles`."""
        return None if self.semantic_runs is None else coco_rle(self.semantic_runs, self.size)


@dataclass
class FrameOutput(SegmentationOutput):
    """The objects of a frame of a clip, by their numbers. Of `data`, scores are those of when an object was found.

    object_ids  equal in all frames that have the object; texts: those that name them
    """

    object_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        """The text that names each object."""
        return self.texts


@dataclass
class ClipOutput(PoolingOutput):
    """data: [n, 7] float32 of all objects in all frames: frame, object, left, top, right, bottom, and score.

    frames: in order. size: width and height
    """

    frames: list[FrameOutput] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    size: tuple[int, int] = (1, 1)


class ClipPrompt:
    """A clip and what to follow in it. images: frames [n, height, width, 3] uint8; texts: token ids of names.

    The patches of a frame need many times the memory of its pixels. Those of the next frames are made in a thread while
    the frames before them run, and no others are kept.
    """

    def __init__(
        self,
        images: np.ndarray,
        reader: ImageReader,
        texts: tuple[tuple[int, ...], ...],
        names: tuple[str, ...],
    ):
        """Raises ValueError for frames that the image processor cannot take."""
        self.images, self.texts, self.names = images, texts, names
        self._reader, self._ahead = reader, Future[list[Patches]]()
        self._ahead.set_result(self._made(0))
        self.tokens = self._ahead.result()[0].tokens  # of a frame; all have the same size

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the frames."""
        return self.images.shape[2], self.images.shape[1]

    def take(self, start: int) -> list[Patches]:
        """The patches of the CLIP_FRAMES frames from `start` on: called for 0, CLIP_FRAMES, and so on."""
        found, self._ahead = self._ahead.result(), Future()
        if (after := start + CLIP_FRAMES) < len(self):
            Thread(target=self._make, args=(self._ahead, after), name="clip-patches", daemon=True).start()
        return found

    def _make(self, into: Future[list[Patches]], start: int) -> None:
        try:
            into.set_result(self._made(start))
        except BaseException as error:  # raised by the step that needs them
            into.set_exception(error)

    def _made(self, start: int) -> list[Patches]:
        from PIL import Image

        frames = self.images[start : start + CLIP_FRAMES]
        return [self._reader.patches(Image.fromarray(frame)) for frame in frames]


class PromptReader:
    """Makes patches, and a Concept or Marks, of a request's prompt. Safe in any thread.

    The patches of the last images are kept, so that many prompts on one image resize it once.
    """

    def __init__(self, images: ImageReader, model: Any, tokenizer: Any):
        self._images, self._model, self._tokenizer = images, model, tokenizer
        self._fields = [FIELDS] if isinstance(model, Segmenter) else []
        named = "'text': what to find, 'boxes': [[left, top, right, bottom], ...], 'box_labels': [1, 0, ...]"
        forms = [f"{{'image': a PIL image, {named}}} with text, boxes or both"] if self._fields else []
        if isinstance(model, MarkSegmenter):
            self._fields.append(marks.FIELDS)
            marked = "'points': [[x, y], ...], 'point_labels': [1, 0, ...], 'box': [left, top, right, bottom]"
            forms.append(f"{{'image': a PIL image, {marked}, 'mask': logits}} with points, a box or a mask")
        self._form = ", or ".join(forms)
        self._kept: OrderedDict[bytes, Patches] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, prompt: Any, masks: bool) -> tuple[Patches, Concept | marks.Marks]:
        """prompt: {'image': a PIL image, 'text': what to find, 'boxes': examples, 'box_labels': 1 or 0 of each}.

        A box is left, top, right and bottom in pixels. `prompt_token_ids` may be there instead of the text. Instead of
        these, the prompt of a MarkSegmenter has the fields of marks.FIELDS. Raises ValueError, whose message names the
        field.
        """
        if not isinstance(prompt, Mapping) or not is_image(prompt.get("image")):
            raise ValueError(f"the prompt must be {self._form}, got {type(prompt).__name__}")
        known = tuple(name for fields in self._fields for name in fields)
        if unknown := sorted(set(map(str, prompt)) - {"image", *known}):
            raise ValueError(
                f"the prompt has the fields {', '.join(unknown)}; known are image, {', '.join(known)}"
            )
        named, marked = (
            [n for n in fields if prompt.get(n) is not None] for fields in (FIELDS, marks.FIELDS)
        )
        if named and marked:
            raise ValueError(
                f"{marked[0]} marks one object, and {named[0]} names objects: send a prompt for each"
            )
        image = prompt["image"]
        if (masks or marked) and image.width * image.height > MOST_MASK_PIXELS:
            hint = "make it smaller" + ("" if marked else ", or set masks to False")
            raise ValueError(
                f"the prompt's image has {image.width} x {image.height} pixels, and masks are made of images of at most"
                f" {MOST_MASK_PIXELS} pixels: {hint}"
            )
        image = rgb(image)
        if marked or FIELDS not in self._fields:
            found = marks.read_marks(prompt, image.size, self._model)
            patches, digest = self._patches(image)
            return patches, replace(found, digest=digest)
        boxes, labels = _boxes(prompt, image)
        name, ids = self._text(prompt, bool(boxes))
        patches, digest = self._patches(image)
        return patches, Concept(digest, tuple(ids), boxes, labels, name)

    def read_clip(self, prompt: Mapping[str, Any], masks: bool) -> ClipPrompt:
        """prompt: {'video': frames or a file's bytes, as of videos.video, 'text': what to follow, or a list of texts}.

        Raises ValueError, whose message names the field.
        """
        if unknown := sorted(set(map(str, prompt)) - set(CLIP_FIELDS)):
            raise ValueError(
                f"the prompt of a video has the fields {', '.join(unknown)}; known are {', '.join(CLIP_FIELDS)}"
            )
        given = prompt.get("text")
        texts = list(given) if isinstance(given, (list, tuple)) else [given]
        if not texts or len(texts) > MOST_CLIP_TEXTS:
            raise ValueError(f"text must have 1 to {MOST_CLIP_TEXTS} texts for a video, got {len(texts)}")
        texts = list(dict.fromkeys(texts)) if all(isinstance(t, str) for t in texts) else texts
        ids = [tuple(self._text({"text": text}, False)[1]) for text in texts]
        try:
            frames = video(prompt["video"], _all_frames).frames
        except VideoError as error:
            raise ValueError(f"the prompt has a video {error}") from error
        count, height, width = frames.shape[:3]
        if count > MOST_FRAMES:
            raise ValueError(_many(count))
        if masks and width * height > MOST_MASK_PIXELS:
            raise ValueError(
                f"the prompt's video has {width} x {height} pixels, and masks are made of frames of at most"
                f" {MOST_MASK_PIXELS} pixels: make it smaller, or set masks to False"
            )
        if not isinstance(prompt["video"], (bytes, list)):
            frames = (
                frames.copy()
            )  # they are read while the clip runs, when the caller's array may have changed
        return ClipPrompt(frames, self._images, tuple(ids), tuple(map(str, texts)))

    def _text(self, prompt: Mapping[str, Any], boxes: bool) -> tuple[str, Sequence[int]]:
        text, ids = prompt.get("text"), prompt.get("prompt_token_ids")
        if text is not None and ids is not None:
            raise ValueError("text and prompt_token_ids are both given: give one")
        if text is None and ids is None:
            if not boxes:
                raise ValueError("text is missing: a prompt has a text, boxes, or both")
            text = VISUAL
        if text is not None and (not isinstance(text, str) or not text.strip()):
            raise ValueError(f"text must be a text, not empty, got {text!r:.80}")
        if text is not None:
            if len(text) > MOST_CHARACTERS:
                raise ValueError(f"text has {len(text)} characters, and a prompt may have {MOST_CHARACTERS}")
            if self._tokenizer is None:
                raise ValueError("text needs a tokenizer, which skip_tokenizer_init left out")
            ids = encode(self._tokenizer, text)
        most = self._model.text_length
        if (
            not isinstance(ids, Sequence)
            or not ids
            or not all(type(i) is int and 0 <= i < self._model.vocab_size for i in ids)
        ):
            raise ValueError(
                f"prompt_token_ids must be integers from 0 to {self._model.vocab_size - 1}, got {ids!r:.80}"
            )
        if len(ids) > most:
            raise ValueError(
                f"text has {len(ids)} tokens, and this model reads at most {most}: use a short phrase"
            )
        return text or "", ids

    def _patches(self, image: Any) -> tuple[Patches, bytes]:
        digest = hashlib.blake2b(f"{image.size}".encode(), digest_size=16)
        digest.update(image.tobytes())
        key = digest.digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key], key
        made = self._images.patches(image)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made, key


def _all_frames(source: Source) -> range:
    if source.frames > MOST_FRAMES:
        raise ValueError(_many(source.frames))
    return range(source.frames)


def _many(frames: int) -> str:
    return f"the prompt has a video of {frames} frames, and at most {MOST_FRAMES} are possible: cut it into parts"


def _boxes(
    prompt: Mapping[str, Any], image: Any
) -> tuple[tuple[tuple[float, float, float, float], ...], tuple[int, ...]]:
    """(center and size of each box in parts of the image, labels). Raises ValueError."""
    given, labels = prompt.get("boxes"), prompt.get("box_labels")
    given = [] if given is None else given
    if isinstance(given, (list, tuple)) and len(given) > MOST_BOXES:
        raise ValueError(f"boxes has {len(given)} entries, and a prompt may have {MOST_BOXES}")
    if not isinstance(given, (list, tuple)) or not all(
        isinstance(box, (list, tuple))
        and len(box) == 4
        and all(type(n) in (int, float) and abs(n) < float("inf") for n in box)
        for box in given
    ):
        raise ValueError(f"boxes must be a list of [left, top, right, bottom] in pixels, got {given!r:.80}")
    width, height = image.size
    for i, (left, top, right, bottom) in enumerate(given):
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise ValueError(
                f"boxes[{i}] = {[left, top, right, bottom]} must have 0 <= left < right <= {width} and 0 <= top <"
                f" bottom <= {height}, in pixels of the image"
            )
    labels = [1] * len(given) if labels is None else labels
    if not isinstance(labels, (list, tuple)) or any(
        type(n) not in (int, bool) or n not in (0, 1) for n in labels
    ):
        raise ValueError(f"box_labels must be a list of 1, wanted, and 0, not wanted, got {labels!r:.80}")
    if len(labels) != len(given):
        raise ValueError(f"box_labels has {len(labels)} entries for {len(given)} boxes: give one for each")
    return (
        tuple(
            ((a + c) / 2 / width, (b + d) / 2 / height, (c - a) / width, (d - b) / height)
            for a, b, c, d in given
        ),
        tuple(map(int, labels)),
    )
