"""Objects that are followed through the frames of a clip: which detections are new, and which tracks go on.

The rules are those of SAM 3 (Carion et al., arXiv 2511.16719): a detector looks at each frame, a
tracker moves the masks of earlier frames, and both are compared by their overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

T = torch.Tensor
OUTSIDE = -10.0  # the logit of a pixel that is taken from an object
HOLE, SPRINKLE = 0.1, -0.1  # logits of small parts that are filled or removed
SHRUNK = 0.3  # of its area: an object that keeps less next to others is hidden from the memory


def mask_iou(a: T, b: T) -> T:
    """Intersection over union [N, M] of masks [N, h, w] and [M, h, w] of bool."""
    a, b = a.flatten(1).float(), b.flatten(1).float()
    both = a @ b.t()  # exact: sums of at most 2 ** 24 ones
    return both / (a.sum(1)[:, None] + b.sum(1) - both).clamp(min=1)


def distinct(masks: T, scores: T, most: float) -> np.ndarray:
    """Which of the masks [N, h, w] of bool stay [N] bool: of two with an overlap above `most`, the better one."""
    overlap, kept = (mask_iou(masks, masks) > most).cpu().numpy(), np.zeros(len(masks), bool)
    for i in np.argsort(-scores.cpu().numpy(), kind="stable"):
        kept[i] = not overlap[i][kept].any()
    return kept


def _areas(inside: T) -> T:
    """The pixels of the connected part (8 neighbors) that each pixel belongs to [N, h, w]; 0 outside of the masks."""
    count, height, width = inside.shape
    pixels = height * width
    own = torch.arange(pixels, device=inside.device).view(1, height, width)
    labels = torch.where(inside, own, pixels)
    while True:  # the least number spreads to neighbors, and by leaps along what is known
        near = -F.max_pool2d(-labels[:, None].float(), 3, 1, 1)[:, 0].long()
        spread = torch.where(inside, torch.minimum(labels, near), pixels)
        known = F.pad(spread.flatten(1), (0, 1), value=pixels)
        spread = known.gather(1, spread.flatten(1)).view_as(labels)
        if torch.equal(spread, labels):
            break
        labels = spread
    sums = torch.zeros(count, pixels + 1, device=inside.device, dtype=torch.int64)
    sums.scatter_add_(1, labels.flatten(1), torch.ones_like(labels).flatten(1))
    return torch.where(inside, sums.gather(1, labels.flatten(1)).view_as(labels), 0)


def without_specks(masks: T, most: int) -> T:
    """Logits [N, h, w] with holes of at most `most` pixels filled, and such parts removed unless half of the mask."""
    if most <= 0 or not len(masks):
        return masks
    outside = masks <= 0
    masks = torch.where(outside & (_areas(outside) <= most), HOLE, masks)
    inside = masks > 0
    limit = (inside.sum((1, 2), keepdim=True) // 2).clamp(max=most)
    return torch.where(inside & (_areas(inside) <= limit), SPRINKLE, masks)


def groups(numbers: Sequence[int]) -> list[list[int]]:
    """The places of equal numbers."""
    return [[i for i, n in enumerate(numbers) if n == wanted] for wanted in sorted(set(numbers))]


def apart(masks: T, prompts: Sequence[int]) -> T:
    """Logits [N, h, w] without the objects that keep few pixels when each pixel belongs to one object of a prompt."""
    masks = masks.clone()
    for places in groups(prompts):
        if len(places) > 1:
            own = masks[places]
            best = own.argmax(0, keepdim=True) == torch.arange(len(own), device=own.device)[:, None, None]
            before, after = (own > 0).sum((1, 2)), ((own > 0) & best).sum((1, 2))
            hidden = after / before.clamp(min=1) < SHRUNK
            masks[places] = torch.where(hidden[:, None, None], own.clamp(max=OUTSIDE), own)
    return masks


def one_owner(masks: T, scores: Sequence[float], prompts: Sequence[int]) -> T:
    """Masks [N, h, w] of bool in which a pixel belongs to the object of a prompt with the best score, if above 0."""
    masks, each = masks.clone(), torch.tensor(scores, device=masks.device)[:, None, None]
    for places in groups(prompts):
        own, best = masks[places], each[places]
        if len(places) == 1:
            masks[places] = own & (best > 0)
            continue
        claims = torch.where(own, best, 0.0)
        owner = claims.argmax(0, keepdim=True) == torch.arange(len(own), device=own.device)[:, None, None]
        masks[places] = own & owner & (claims > 0)
    return masks


@dataclass(frozen=True)
class Rules:
    """Thresholds of the checkpoint's config, under its names."""

    score_threshold_detection: float
    det_nms_thresh: float
    assoc_iou_thresh: float
    trk_assoc_iou_thresh: float
    new_det_thresh: float
    recondition_on_trk_masks: bool
    hotstart_delay: int
    hotstart_unmatch_thresh: int
    hotstart_dup_thresh: int
    suppress_unmatched_only_within_hotstart: bool
    init_trk_keep_alive: int
    max_trk_keep_alive: int
    min_trk_keep_alive: int
    suppress_overlapping_based_on_recent_occlusion_threshold: float
    decrease_trk_keep_alive_for_empty_masklets: bool
    fill_hole_area: int
    max_num_objects: int
    recondition_every_nth_frame: int
    high_conf_thresh: float
    high_iou_thresh: float

    @classmethod
    def of(cls, config: Any) -> Rules:
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})


class Detections(NamedTuple):
    """Objects of a frame: logits of masks [n, h, w], scores [n] float32, and the numbers of their prompts."""

    masks: T
    scores: np.ndarray
    prompts: list[int]


@dataclass
class Match:
    """How detections and tracks of a frame belong together.

    new        detections that no track covers
    tracks_of  {detection: tracks on it}, all by their numbers
    unmatched  tracks that no detection covers; empty: those without a pixel
    sure       {track: a detection of high score and overlap}
    """

    new: list[int]
    tracks_of: dict[int, list[int]] = field(default_factory=dict)
    unmatched: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    sure: dict[int, int] = field(default_factory=dict)


def match(found: Detections, masks: T, numbers: Sequence[int], prompts: Sequence[int], rules: Rules) -> Match:
    """masks: logits [M, h, w] of the tracks with these numbers and prompts."""
    if not len(numbers):
        return Match(list(range(len(found.scores))))
    inside = masks > 0
    filled = inside.flatten(1).any(1).cpu().numpy()
    empty = [n for n, f in zip(numbers, filled, strict=True) if not f]
    if not len(found.scores):
        return Match([], unmatched=[n for n, f in zip(numbers, filled, strict=True) if f], empty=empty)
    iou = mask_iou(found.masks > 0, inside).cpu().numpy()
    iou[np.not_equal.outer(found.prompts, prompts)] = 0
    covered = (iou >= rules.trk_assoc_iou_thresh).any(0)
    near = iou >= rules.assoc_iou_thresh
    new = (found.scores >= rules.new_det_thresh) & ~near.any(1)
    sure = (found.scores >= rules.high_conf_thresh) & ~new & (iou.max(1) >= rules.high_iou_thresh)
    listed = np.asarray(numbers)
    return Match(
        np.flatnonzero(new).tolist(), {i: listed[row].tolist() for i, row in enumerate(near)},
        listed[filled & ~covered].tolist(), empty,
        {int(listed[iou[i].argmax()]): int(i) for i in np.flatnonzero(sure)},
    )  # fmt: skip


@dataclass
class History:
    """The past of the tracks, by their numbers, which shows those that were found by mistake.

    first      the frame in which each was found
    lost       frames in which no detection covered it
    alive      a counter that grows with matches and falls without
    doubled    {(earlier track, later track): frames in which one detection covered both}
    removed    tracks that the clip's first frames have shown to be wrong
    """

    rules: Rules
    first: dict[int, int] = field(default_factory=dict)
    lost: dict[int, list[int]] = field(default_factory=dict)
    alive: dict[int, int] = field(default_factory=dict)
    doubled: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)

    def add(self, frame: int, matched: Match, born: Iterable[int]) -> tuple[set[int], set[int]]:
        """Note a frame's matches and new tracks. Returns (tracks to remove, tracks to hide in this frame)."""
        rules = self.rules
        for number in born:
            self.first.setdefault(number, frame)
            self.alive[number] = rules.init_trk_keep_alive
        for number in {n for numbers in matched.tracks_of.values() for n in numbers}:
            self.alive[number] = min(rules.max_trk_keep_alive, self.alive[number] + 1)
        for number in matched.unmatched:
            self.lost.setdefault(number, []).append(frame)
        fading = list(matched.unmatched)
        fading += matched.empty if rules.decrease_trk_keep_alive_for_empty_masklets else []
        for number in fading:
            self.alive[number] = max(rules.min_trk_keep_alive, self.alive[number] - 1)
        start, wrong, hidden = frame - rules.hotstart_delay, set(), set()
        for number, frames in self.lost.items():
            if number in self.removed:
                continue
            if len(frames) >= rules.hotstart_unmatch_thresh and self.first[number] > start:
                wrong.add(number)
            elif self.alive[number] <= 0 and not rules.suppress_unmatched_only_within_hotstart:
                hidden.add(number)
        for numbers in matched.tracks_of.values():
            earliest = min(numbers, key=self.first.__getitem__, default=None)
            for number in numbers:
                if earliest is not None and number != earliest:
                    self.doubled.setdefault((earliest, number), []).append(frame)
        for (_, number), frames in self.doubled.items():
            known = number in self.removed or self.first[number] <= start
            if not known and len(frames) >= rules.hotstart_dup_thresh:
                wrong.add(number)
        self.removed |= wrong
        return wrong, hidden


def covered_lately(
    masks: T, last: Mapping[int, int], prompts: Sequence[int], numbers: Sequence[int], most: float
) -> list[bool]:
    """Of each track, whether it lies on another of its prompt that has been visible for longer.

    masks: [N, h, w] of bool; last: {track: the last frame in which it was hidden, -1 for none}; most: the least overlap
    """
    hidden = [False] * len(numbers)
    for places in groups(prompts):
        if len(places) < 2:
            continue
        overlap = (mask_iou(masks[places], masks[places]) >= most).cpu().numpy()
        for a, i in enumerate(places):
            for b in range(a + 1, len(places)):
                j = places[b]
                one, other = last[numbers[i]], last[numbers[j]]
                if overlap[a, b]:
                    hidden[i] |= one > other > -1
                    hidden[j] |= other > one > -1
    return hidden
