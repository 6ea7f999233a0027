"""Points, a box and a mask that mark one object in an image, for models that segment it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastkernels.engine.objects.rle import from_coco
from fastkernels.models.common.interfaces.segmenter import CORNERS, NO_POINT

FIELDS = ("points", "point_labels", "box", "mask")  # of a prompt, next to the image
MOST_POINTS = 64  # of an object
MOST_MASK_SIDE = 8192  # rows and columns of a mask that marks
SURE = 10.0  # logits of a mask of bools: 10 inside, -10 outside


@dataclass(frozen=True)
class Marks:
    """The target of a request: the object in an image that these mark.

    points  x and y in pixels of the model's image, those of the box's corners at the end
    labels  as of MarkSegmenter.mark
    mask    logits [4 * side, 4 * side] float32, or None
    digest  of the image: equal images have equal features
    """

    points: tuple[tuple[float, float], ...]
    labels: tuple[int, ...]
    mask: np.ndarray | None = field(default=None, compare=False)
    digest: bytes = b""
    name = ""
    input_ids = ()


def read_marks(prompt: Mapping[str, Any], size: tuple[int, int], model: Any) -> Marks:
    """The marks of a prompt on an image of this width and height. model: a MarkSegmenter.

    Raises ValueError, whose message begins with the field.
    """
    points, labels = _points(prompt, size)
    if (box := prompt.get("box")) is not None:
        left, top, right, bottom = _box(box, size)
        points += [(left, top), (right, bottom)]
        labels += CORNERS
    mask = None if prompt.get("mask") is None else _mask(prompt["mask"], size, 4 * model.side)
    if not points and mask is None:
        raise ValueError("points are missing: a prompt has points, a box or a mask, or several of these")
    ends = 1 if points else 2
    side = model.side * model.patch_size
    scaled = [(x * (side / size[0]), y * (side / size[1])) for x, y in points]
    return Marks((*scaled, *((0.0, 0.0),) * ends), (*labels, *(NO_POINT,) * ends), mask)


def _numbers(given: Any, count: int) -> bool:
    return (
        isinstance(given, (list, tuple))
        and len(given) == count
        and all(type(n) in (int, float) and abs(n) < float("inf") for n in given)
    )


def _points(prompt: Mapping[str, Any], size: tuple[int, int]) -> tuple[list[tuple[float, float]], list[int]]:
    given, labels = prompt.get("points"), prompt.get("point_labels")
    given = [] if given is None else given
    if isinstance(given, (list, tuple)) and len(given) > MOST_POINTS:
        raise ValueError(f"points has {len(given)} entries, and an object may have {MOST_POINTS}")
    if not isinstance(given, (list, tuple)) or not all(_numbers(point, 2) for point in given):
        raise ValueError(f"points must be a list of [x, y] in pixels, got {given!r:.80}")
    width, height = size
    for i, (x, y) in enumerate(given):
        if not (0 <= x <= width and 0 <= y <= height):
            raise ValueError(
                f"points[{i}] = {[x, y]} must have 0 <= x <= {width} and 0 <= y <= {height}, in pixels of the image"
            )
    labels = [1] * len(given) if labels is None else labels
    if not isinstance(labels, (list, tuple)) or any(
        type(n) not in (int, bool) or n not in (0, 1) for n in labels
    ):
        raise ValueError(
            f"point_labels must be a list of 1, in the object, and 0, outside, got {labels!r:.80}"
        )
    if len(labels) != len(given):
        raise ValueError(f"point_labels has {len(labels)} entries for {len(given)} points: give one for each")
    return [(float(x), float(y)) for x, y in given], [int(n) for n in labels]


def _box(given: Any, size: tuple[int, int]) -> Sequence[float]:
    if not _numbers(given, 4):
        raise ValueError(f"box must be [left, top, right, bottom] in pixels, got {given!r:.80}")
    (left, top, right, bottom), (width, height) = given, size
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise ValueError(
            f"box = {list(given)} must have 0 <= left < right <= {width} and 0 <= top < bottom <= {height}, in pixels"
            " of the image"
        )
    return [float(n) for n in given]


def _mask(given: Any, size: tuple[int, int], side: int) -> np.ndarray:
    """Logits [side, side] of a mask, as transformers resizes it."""
    import torch
    import torch.nn.functional as F

    if isinstance(given, Mapping):
        try:
            found = from_coco(given, size)
        except ValueError as error:
            raise ValueError(f"mask {error}") from error
    elif isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        found = (given.float() if given.is_floating_point() else given).numpy()  # NumPy has no bfloat16
    else:
        try:
            found = np.asarray(given)
        except ValueError as error:  # of lists of several lengths
            raise ValueError(f"mask cannot be an array: {error}") from error
    if found.ndim != 2 or 0 in found.shape or found.dtype.kind not in "bf":
        raise ValueError(
            "mask must be an array [height, width] of bools, or of floats that are logits, or COCO's {'size': [height,"
            f" width], 'counts': a text}}, got {type(given).__name__} of {found.dtype} {list(found.shape)}"
        )
    if max(found.shape) > MOST_MASK_SIDE:
        raise ValueError(
            f"mask has {found.shape[1]} x {found.shape[0]} pixels, and at most {MOST_MASK_SIDE} a side are possible"
        )
    logits = np.where(found, SURE, -SURE) if found.dtype.kind == "b" else found
    made = torch.from_numpy(np.ascontiguousarray(logits, np.float32))
    if not made.isfinite().all():
        raise ValueError("mask has values that are infinite or NaN: logits must be finite")
    if made.shape != (side, side):
        made = F.interpolate(made[None, None], size=(side, side), mode="bilinear", antialias=True)[0, 0]
    return made.numpy()
