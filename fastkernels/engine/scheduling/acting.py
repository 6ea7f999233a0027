"""Requests for a robot's actions, and their results."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from fastkernels.engine.scheduling.denoising import SEEDS
from fastkernels.engine.scheduling.request import Status
from fastkernels.models.common.interfaces.policy import Observation


@dataclass(frozen=True)
class ActionParams:
    """Parameters of a request for actions. None: the model's default.

    num_actions  actions of the answer, at most those of the model's chunk
    num_steps    denoising steps
    seed         of the noise that denoising begins with, 0 to 2^63 - 1; None: drawn by the engine
    """

    num_actions: int | None = None
    num_steps: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_actions", "num_steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < SEEDS):
            raise ValueError(f"seed must be an integer from 0 to 2^63 - 1, got {self.seed!r}")


@dataclass(eq=False)
class ActionRequest:
    """One observation to act on. A lower priority number goes first. num_actions, steps, seed: with defaults."""

    request_id: str
    observation: Observation
    params: ActionParams
    num_actions: int
    steps: int
    seed: int
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    status: Status = Status.WAITING
    scheduled_time: float | None = None
    streams_deltas = False  # one output, at the end

    @property
    def num_tokens(self) -> int:
        """Its share of a step."""
        return self.observation.size


@dataclass
class ActionRequestOutput:
    """actions: [num_actions, numbers] float32, the first one first, in the units of the checkpoint's statistics."""

    request_id: str
    actions: np.ndarray
    seed: int
    steps: int
    num_tokens: int = 0
    finished: bool = True
    prompt_token_ids: tuple[int, ...] = ()
