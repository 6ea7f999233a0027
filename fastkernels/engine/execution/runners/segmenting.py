"""How a segmenter runs a step: features of images and texts are kept, and all pairs of both run at once.

Pairs of an image and marks run at once if they have as many points. All features of images are kept.
Of a clip, a step takes the next frames: the detector sees them at once, the tracker one after the other.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs
from fastkernels.engine.objects.marks import Marks
from fastkernels.engine.objects.segmentation import Concept
from fastkernels.models.common.interfaces import tracks
from fastkernels.models.common.interfaces.segmenter import (
    NO_BOX,
    Clip,
    ClipSegmenter,
    Found,
    FrameObjects,
    ImageSegmenter,
    Marked,
    Seen,
)

IMAGES, TEXTS = 16, 1024  # whose features are kept
PIXELS = 1 << 25  # of the masks that are resized at once
PAIRS = 8  # of a frame and a text, that the detector compares at once, unless a frame has more texts


@dataclass(frozen=True)
class Wanted:
    """A request of a step: its target, width and height of its image, and the settings of PoolingParams."""

    concept: Concept | Marks
    size: tuple[int, int]
    threshold: float
    mask_threshold: float
    max_detections: int | None
    masks: bool
    semantic: bool
    several: bool = True


@dataclass(frozen=True)
class Objects:
    """The objects of a request. rows [n, 5]: boxes in pixels, and scores; others: of SegmentationOutput."""

    rows: np.ndarray
    runs: list[list[int]] | None
    semantic: list[int] | None = None
    presence: float | None = None


@dataclass(frozen=True)
class NextFrames:
    """The next frames of a clip.

    key       of the clip: the request's id
    texts     token ids
    patches   of the frames [n, cells, C * p * p]
    frames    of the whole clip; size: their width and height
    masks     whether objects have masks; threshold: the least score of an object
    """

    key: str
    texts: tuple[tuple[int, ...], ...]
    patches: np.ndarray
    frames: int
    size: tuple[int, int]
    masks: bool
    threshold: float


@dataclass(frozen=True)
class Followed:
    """The objects of a frame of a clip.

    numbers, prompts [n]; rows [n, 5]: boxes in pixels, and scores; runs: of the masks, or None
    """

    numbers: list[int]
    prompts: list[int]
    rows: np.ndarray
    runs: list[list[int]] | None


@dataclass
class Computed:
    """Numbers of what was computed, for tests and logs."""

    images: int = 0
    texts: int = 0
    pairs: int = 0
    frames: int = 0


class Segmenting:
    """Runs a segmenter on the device. graphs: CUDA graphs, or None."""

    def __init__(self, model: ImageSegmenter, device: torch.device, graphs: ForwardGraphs | None):
        self._model: Any = model
        self._device, self._graphs = device, graphs
        self._images: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._looks: OrderedDict[bytes, Seen] = OrderedDict()  # of images with marks
        self._texts: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._clips: dict[str, Clip] = {}
        self.computed = Computed()

    def launch(
        self, wanted: Sequence[Wanted], patches: np.ndarray, to_device: Callable[..., torch.Tensor]
    ) -> SegmentStep:
        """patches: of the image of each request, one after the other [B * cells, C * p * p]."""
        images = patches.reshape(len(wanted), -1, patches.shape[1])
        marked = [i for i, one in enumerate(wanted) if isinstance(one.concept, Marks)]
        named = [i for i, one in enumerate(wanted) if isinstance(one.concept, Concept)]
        parts: list[Any] = self._mark(wanted, marked, images, to_device) if marked else []
        if named:
            concepts = [one.concept for one in wanted if isinstance(one.concept, Concept)]
            parts.append((named, self._segment(concepts, images[named], to_device)))
        self.computed.pairs += len(wanted)
        self._trim()
        return SegmentStep(wanted, parts)

    def _mark(
        self,
        wanted: Sequence[Wanted],
        places: list[int],
        images: np.ndarray,
        to_device: Callable[..., torch.Tensor],
    ) -> list[tuple[list[int], Marked]]:
        """(numbers of requests, their masks) of those at these places."""
        listed: dict[int, Any] = {i: wanted[i].concept for i in places}
        self._look([own.digest for own in listed.values()], images[places], to_device)
        alike: dict[tuple[int, bool], list[int]] = {}
        for i, own in listed.items():
            alike.setdefault((len(own.labels), own.mask is None), []).append(i)
        found = []
        for (_, bare), group in alike.items():
            while group:
                count = 1 << (len(group).bit_length() - 1)  # few shapes, for the graphs
                part, group = group[:count], group[count:]
                owns = [listed[i] for i in part]
                levels = zip(*(self._looks[own.digest] for own in owns), strict=True)
                points = to_device(np.array([own.points for own in owns]), np.float32)
                inputs = [*map(_stacked, levels), points, to_device(np.array([own.labels for own in owns]))]
                if not bare:
                    inputs.append(to_device(np.stack([own.mask for own in owns])[:, None], np.float32))
                made = self._run("mark", self._marked, inputs)
                found.append((part, Marked(*(t.clone() for t in made))))  # the next graph writes there
        return found

    def _marked(self, fine: Any, middle: Any, cells: Any, *marks: torch.Tensor) -> Marked:
        return self._model.mark(Seen(fine, middle, cells), *marks)

    def _segment(
        self, concepts: Sequence[Concept], images: np.ndarray, to_device: Callable[..., torch.Tensor]
    ) -> Found:
        self._see([concept.digest for concept in concepts], images, to_device)
        self._read([concept.input_ids for concept in concepts], to_device)
        features = _stacked([self._images[concept.digest] for concept in concepts])
        texts = _stacked([self._texts[concept.input_ids] for concept in concepts])
        lengths = np.array([len(concept.input_ids) for concept in concepts])
        known = to_device(np.arange(texts.shape[1]) < lengths[:, None], np.bool_)
        inputs = [features, texts, known]
        if most := max(len(concept.boxes) for concept in concepts):
            rows = 1 << (most - 1).bit_length()  # few shapes, for the graphs
            boxes = np.zeros((len(concepts), rows, 4), np.float32)
            labels = np.full((len(concepts), rows), NO_BOX)
            for i, concept in enumerate(concepts):
                boxes[i, : len(concept.boxes)] = np.reshape(concept.boxes, (-1, 4))
                labels[i, : len(concept.labels)] = concept.labels
            inputs += [to_device(boxes, np.float32), to_device(labels)]
        return self._run("segment", self._model.segment, inputs)

    def follow(
        self, clips: Sequence[NextFrames], to_device: Callable[..., torch.Tensor]
    ) -> list[list[Followed] | None]:
        """The objects in all frames of the clips that end with these frames; None for the others.

        Clips that are not among these are forgotten.
        """
        assert isinstance(self._model, ClipSegmenter)
        self._clips = {one.key: self._clips.get(one.key) or self._model.clip(one.frames) for one in clips}
        return [self._follow(one, self._clips[one.key], to_device) for one in clips]

    def _follow(
        self, given: NextFrames, clip: Clip, to_device: Callable[..., torch.Tensor]
    ) -> list[Followed] | None:
        model: Any = self._model
        self._read(given.texts, to_device)
        texts = _stacked([self._texts[ids] for ids in given.texts])
        lengths = np.array([len(ids) for ids in given.texts])
        known = to_device(np.arange(texts.shape[1]) < lengths[:, None], np.bool_)
        features, seen = self._run("watch", model.watch, [to_device(given.patches, np.float32)])
        features, seen = (
            features.clone(),
            Seen(*(level.clone() for level in seen)),
        )  # the next graph writes there
        step = max(PAIRS // len(given.texts), 1)
        for start in range(0, len(features), step):
            part = features[start : start + step]
            pairs = [
                part.repeat_interleave(len(texts), 0),
                texts.repeat(len(part), 1, 1),
                known.repeat(len(part), 1),
            ]
            found = Found(
                *(t.unflatten(0, (len(part), -1)) for t in self._run("segment", model.segment, pairs))
            )
            for i in range(len(part)):
                own = Seen(*(level[start + i : start + i + 1] for level in seen))
                clip.advance(own, Found(*(t[i] for t in found)))
            self.computed.pairs += len(part) * len(texts)
        self.computed.frames += len(features)
        self._trim()
        if clip.frame < given.frames:
            return None
        del self._clips[given.key]
        return [followed(frame, given) for frame in clip.result()]

    def _run(self, key: str, function: Callable[..., Any], inputs: list[torch.Tensor]) -> Any:
        return function(*inputs) if self._graphs is None else self._graphs(key, function, inputs)

    def _see(
        self, digests: Sequence[bytes], images: np.ndarray, to_device: Callable[..., torch.Tensor]
    ) -> None:
        new = {digest: i for i, digest in enumerate(digests) if digest not in self._images}
        if new:
            found = self._run("see", self._model.see, [to_device(images[list(new.values())], np.float32)])
            # Copies: each can be freed alone, and the memory of a graph is used again
            self._images.update((digest, own.clone()) for digest, own in zip(new, found, strict=True))
            self.computed.images += len(new)
        for digest in digests:
            self._images.move_to_end(digest)

    def _look(
        self, digests: Sequence[bytes], images: np.ndarray, to_device: Callable[..., torch.Tensor]
    ) -> None:
        new = {digest: i for i, digest in enumerate(digests) if digest not in self._looks}
        if new:
            found = self._run("look", self._model.look, [to_device(images[list(new.values())], np.float32)])
            for i, digest in enumerate(new):
                self._looks[digest] = Seen(*(level[i].clone() for level in found))
            self.computed.images += len(new)
        for digest in digests:
            self._looks.move_to_end(digest)

    def _read(self, texts: Sequence[tuple[int, ...]], to_device: Callable[..., torch.Tensor]) -> None:
        new = [ids for ids in dict.fromkeys(texts) if ids not in self._texts]
        if new:
            padded = np.zeros((len(new), self._model.text_length), np.int64)
            for i, ids in enumerate(new):
                padded[i, : len(ids)] = ids
            found = self._run("read", self._model.read, [to_device(padded)])
            self._texts.update((ids, own.clone()) for ids, own in zip(new, found, strict=True))
            self.computed.texts += len(new)
        for ids in texts:
            self._texts.move_to_end(ids)

    def _trim(self) -> None:
        stores: Any = (self._images, IMAGES), (self._looks, IMAGES), (self._texts, TEXTS)
        for kept, most in stores:
            while len(kept) > most:
                kept.popitem(last=False)


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))


class SegmentStep:
    """A launched step (step.Pending)."""

    def __init__(self, wanted: Sequence[Wanted], parts: Sequence[tuple[list[int], Found | Marked]]):
        self._wanted, self._parts = wanted, parts

    def result(self) -> list[Objects]:
        """The objects that each request has found, the best first. Waits for the device."""
        made: dict[int, Objects] = {}
        for places, found in self._parts:
            read = _marked_objects if isinstance(found, Marked) else _named_objects
            wanted = [self._wanted[i] for i in places]
            made.update(zip(places, read(wanted, found), strict=True))
        return [made[i] for i in range(len(self._wanted))]


def _named_objects(wanted: Sequence[Wanted], found: Any) -> list[Objects]:
    scores, boxes = found.scores.cpu().numpy(), found.boxes.cpu().numpy()
    made = []
    for i, one in enumerate(wanted):
        best = np.argsort(-scores[i], kind="stable")
        best = best[scores[i][best] >= one.threshold][: one.max_detections]
        rows = np.concatenate((boxes[i][best] * np.array(one.size * 2, np.float32), scores[i][best, None]), 1)
        runs = semantic = None
        if one.masks:
            chosen = torch.from_numpy(best).to(found.masks.device)
            runs = runs_of(found.masks[i].index_select(0, chosen), one.size, one.mask_threshold)
        if one.semantic:
            (semantic,) = runs_of(found.semantic[i, None], one.size, one.mask_threshold)
        made.append(Objects(rows, runs, semantic))
    return made


def _marked_objects(wanted: Sequence[Wanted], found: Any) -> list[Objects]:
    overlaps, single = found.overlaps.cpu().numpy(), found.single.cpu().numpy()
    presence = found.presence.sigmoid().tolist()
    made = []
    for i, one in enumerate(wanted):
        best = np.argsort(-overlaps[i, 1:], kind="stable") + 1 if one.several else single[i, None]
        best = best[overlaps[i][best] >= one.threshold][: one.max_detections]
        logits = found.masks[i].index_select(0, torch.from_numpy(best).to(found.masks.device))
        masks = _wide(logits, one.size, _logit(one.mask_threshold))
        ends = [_ends(masks.any(1)), _ends(masks.any(2))]
        rows = np.stack((ends[0][0], ends[1][0], ends[0][1], ends[1][1], overlaps[i][best]), 1)
        rows[~masks.flatten(1).any(1).cpu().numpy(), :4] = 0  # boxes of masks without a pixel
        made.append(
            Objects(rows.astype(np.float32), _runs(masks) if one.masks else None, presence=presence[i])
        )
    return made


def _logit(probability: float) -> float:
    if probability in (0, 1):
        return math.inf if probability else -math.inf
    return math.log(probability / (1 - probability))


def _wide(logits: torch.Tensor, size: tuple[int, int], level: float) -> torch.Tensor:
    """Masks [n, height, width] of logits [n, h, w]: whether a pixel is above the level."""
    (width, height), parts = size, []
    for part in logits.split(max(PIXELS // (width * height), 1)) if len(logits) else ():
        parts.append(F.interpolate(part[None], size=(height, width), mode="bilinear")[0] > level)
    return torch.cat(parts) if parts else logits.new_zeros((0, height, width), dtype=torch.bool)


def runs_of(logits: torch.Tensor, size: tuple[int, int], threshold: float) -> list[list[int]]:
    """Runs of the masks of logits [n, h, w] at width and height `size`, in columns, the first outside of the object.

    Probabilities are resized bilinearly, and a pixel above the threshold is inside. On the device up to the places
    where runs end.
    """
    (width, height), found = size, []
    for part in logits.split(max(PIXELS // (width * height), 1)) if len(logits) else ():
        wide = F.interpolate(part.float().sigmoid()[None], size=(height, width), mode="bilinear")[0]
        found += _runs(wide > threshold)
    return found


def _runs(masks: torch.Tensor) -> list[list[int]]:
    """Runs of masks [n, height, width] of bool."""
    inside = masks.transpose(1, 2).flatten(1)  # [n, pixels]
    edges = F.pad(inside, (1, 0))
    ends = (edges[:, 1:] != edges[:, :-1]).nonzero().cpu().numpy()
    each = [ends[ends[:, 0] == i, 1] for i in range(len(masks))]
    return [np.diff(own, prepend=0, append=inside.shape[1]).tolist() for own in each]


def followed(made: FrameObjects, given: NextFrames) -> Followed:
    """The objects of a frame that are shown, in the order of their numbers.

    Boxes are those of whole masks; after that, a pixel belongs to one object of a text. On the device up to the runs.
    """
    masks = _wide(made.masks, given.size, 0.0)
    rows, columns = masks.any(2), masks.any(1)
    filled = rows.any(1).tolist()
    shown = [
        i for i in sorted(range(len(filled)), key=made.numbers.__getitem__)
        if filled[i] and made.numbers[i] not in made.hidden and made.scores[i] >= given.threshold
    ]  # fmt: skip
    ends = [_ends(columns[shown]), _ends(rows[shown])]
    scores = np.array([made.scores[i] for i in shown], np.float32)
    boxes = np.stack((ends[0][0], ends[1][0], ends[0][1], ends[1][1], scores), 1).astype(np.float32)
    prompts, runs = [made.prompts[i] for i in shown], None
    if given.masks:
        own = masks[shown]
        if len(shown) > 1:
            own = tracks.one_owner(own, [made.presence[i] for i in shown], prompts)
        runs = _runs(own)
    return Followed([made.numbers[i] for i in shown], prompts, boxes, runs)


def _ends(lines: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last place of each row [n, size] of bool that is true."""
    found = lines.cpu().numpy()
    return found.argmax(1), found.shape[1] - 1 - found[:, ::-1].argmax(1)
