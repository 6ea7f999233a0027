"""Step caching: steps of a schedule that reuse the denoiser's last output. Off by default, since it changes images.

The rule is that of EasyCache (Zhou et al., arXiv 2507.02860) as its authors run it, which needs no knowledge of the
model. They compute the first 5 or 10 of 50 steps, and the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

WARM_UP = 0.2  # of the schedule's steps, and at least LEAST, are computed first
LEAST = 3


@dataclass
class StepCache:
    """Of one image. With inputs x and outputs v of the denoiser, and the last computed steps h and i, a step t

        adds  rate * mean|x_t - x_(t-1)| / mean|v_i|   with  rate = mean|v_i - v_h| / mean|x_i - x_h|

    to the expected error, and as long as that is below `threshold` its output is x_t + (v_i - x_i). The first steps and
    the last one are always computed. Reused steps change x_(t-1) only.

    steps   of the schedule, of which `first` is the first that runs
    reused  the number of steps whose output was reused
    """

    threshold: float
    steps: int
    first: int = 0
    reused: int = 0
    error: float = 0.0
    x: torch.Tensor | None = None  # of the step before
    computed: tuple[torch.Tensor, torch.Tensor] | None = None  # x_i and v_i
    rate: torch.Tensor | None = None

    def expected(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The part of the error that step `index` adds, with input x [1, ...].

        None for a step that is computed in any case.
        """
        warm = max(LEAST, math.ceil(WARM_UP * (self.steps - self.first)))
        if index - self.first < warm or index == self.steps - 1:
            return None
        if self.rate is None or self.x is None or self.computed is None:
            return None
        return self.rate * (x - self.x).abs().mean() / self.computed[1].abs().mean()

    def reuse(self, x: torch.Tensor) -> torch.Tensor:
        """The output of a step that is not computed."""
        assert self.computed is not None
        self.reused += 1
        self.x, (before, output) = x, self.computed
        return x + (output - before)

    def add(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Note a computed step."""
        if self.computed is not None:
            before, last = self.computed
            self.rate = (output - last).abs().mean() / (x - before).abs().mean()
        self.x, self.computed, self.error = x, (x, output), 0.0


def reusable(caches: Sequence[StepCache | None], indexes: Sequence[int], x: torch.Tensor) -> list[int]:
    """The rows of x [B, ...] whose step may reuse an output. Waits for the device if a row has a cache."""
    rows, added = [], []
    for i, (cache, index) in enumerate(zip(caches, indexes, strict=True)):
        one = None if cache is None else cache.expected(index, x[i : i + 1])
        if one is not None:
            rows.append(i)
            added.append(one)
    found = []
    for i, one in zip(rows, torch.stack(added).tolist() if added else (), strict=True):
        cache = caches[i]
        assert cache is not None
        cache.error += one
        if cache.error < cache.threshold:  # not if it is NaN
            found.append(i)
    return found
