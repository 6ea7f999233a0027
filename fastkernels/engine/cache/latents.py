"""The state of each image on the ranks, between the steps of its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fastkernels.engine.cache.step_cache import StepCache
from fastkernels.models.common.pipelines.pipeline import Conditions, Size
from fastkernels.models.common.pipelines.schedules import Schedule


@dataclass
class Latents:
    """One image.

    values    [1, ...] in float32
    negative  the conditions of the negative prompt, if it is computed
    clean     the clean latents of the step before, which a solver of second order takes
    cache     None: each step is computed
    """

    values: torch.Tensor
    size: Size
    schedule: Schedule
    scale: float
    conditions: Conditions
    negative: Conditions | None
    clean: torch.Tensor | None = None
    cache: StepCache | None = None


class LatentPool:
    """The latents of all images in progress, by request id."""

    def __init__(self) -> None:
        self._images: dict[str, Latents] = {}

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, request_id: str) -> Latents:
        return self._images[request_id]

    def add(self, request_id: str, latents: Latents) -> None:
        self._images[request_id] = latents

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget images; unknown ids are ignored."""
        for request_id in request_ids:
            self._images.pop(request_id, None)

    def values(self, request_ids: Sequence[str]) -> torch.Tensor:
        """The latents of images of one size [B, ...]."""
        return torch.cat([self._images[i].values for i in request_ids])

    def put(self, request_ids: Sequence[str], values: torch.Tensor) -> None:
        """Replace them."""
        for request_id, row in zip(request_ids, values.split(1), strict=True):
            self._images[request_id].values = row

    def advance(self, request_ids: Sequence[str], clean: torch.Tensor) -> torch.Tensor:
        """Keep their clean latents [B, ...]; returns those of the step before, zeros at the first step."""
        images, rows = [self._images[i] for i in request_ids], clean.split(1)
        before = [
            torch.zeros_like(row) if i.clean is None else i.clean for i, row in zip(images, rows, strict=True)
        ]
        for image, row in zip(images, rows, strict=True):
            image.clean = row
        return torch.cat(before)

    def conditions(self, request_ids: Sequence[str], negative: bool = False) -> Conditions:
        """Their conditions, or those of their negative prompts, {name: [B, ...]}."""
        each = [self._images[i].negative if negative else self._images[i].conditions for i in request_ids]
        first = each[0]
        assert first is not None
        return {name: _stacked([c[name] for c in each if c is not None]) for name in first}


def joined(first: Conditions, second: Conditions) -> Conditions:
    """The conditions of two batches [A, ...] and [B, ...] as those of one, [A + B, ...]."""
    return {name: _stacked([*first[name], *second[name]]) for name in first}


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows as a batch; texts of several lengths are padded with zeros, which their masks leave out."""
    longest = max(len(row) for row in rows)
    padded = [
        row
        if len(row) == longest
        else torch.nn.functional.pad(row, (0, 0) * (row.dim() - 1) + (0, longest - len(row)))
        for row in rows
    ]
    return torch.stack(padded)
