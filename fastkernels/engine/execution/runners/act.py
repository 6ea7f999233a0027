"""The runner of robot policies: all denoising steps of a batch of observations at once, in one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.engine.cache.kv_cache import Limits
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.execution.runners.encode import CACHE_OPTIONS
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.configs.config import ALL_DTYPES
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.interfaces.policy import Observation
from fastkernels.models.common.plans import build


@dataclass(frozen=True)
class ActInput:
    """The observations of a batch, and the seed and number of denoising steps of each."""

    observations: Sequence[Observation]
    seeds: Sequence[int]
    steps: Sequence[int]


class Act(Runner):
    """Runs a model of the interface in models/common/interfaces/policy.py."""

    def _prepare(self, folder: Path) -> None:
        config, default = self.config, EngineConfig(model="")
        for name in CACHE_OPTIONS:
            if getattr(config, name) != getattr(default, name):
                raise ValueError(f"{name} applies to models that generate; {config.model} is a robot policy")
        self._folder = folder
        cls = registry.model_class(build.architecture_of(self.hf_config, folder))
        if config.dtype == "auto" and cls.keeps_dtype:
            found = getattr(self.hf_config, "dtype", None) or torch.float32
            self.dtype = ALL_DTYPES[found] if isinstance(found, str) else found
        self.max_model_len = config.max_model_len or config.max_num_batched_tokens
        if config.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_model_len"
                f" {self.max_model_len}: an observation is computed in one step"
            )

    def _loaded(self) -> None:
        self.model.ready(self._folder, self.config.load_format == "dummy")

    def num_fitting_blocks(self) -> int:
        """See Runner: 0, since nothing is cached."""
        return 0

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        self.limits = Limits(0, self.max_model_len, self.config.max_num_batched_tokens)
        if self.device.type == "cuda" and not self.config.enforce_eager:
            self.graphs = ForwardGraphs(self.device)

    def capture(self) -> None:
        """See Runner: what was computed from the weights is computed again."""
        self.model.refresh()
        if self.graphs is not None:
            self.graphs = ForwardGraphs(self.device)

    @torch.inference_mode()
    def launch(self, step: ActInput) -> ActStep:
        """Start the denoising of all observations, those of one group and number of steps in one batch."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, (observation, steps) in enumerate(zip(step.observations, step.steps, strict=True)):
            groups.setdefault((steps, *observation.group), []).append(row)
        return ActStep([(rows, self._actions(step, rows)) for rows in groups.values()])

    def _actions(self, step: ActInput, rows: Sequence[int]) -> torch.Tensor:
        """[len(rows), *chunk]."""
        steps, padded = step.steps[rows[0]], list(rows)
        if self.graphs is not None:  # a graph for each power of two; rows that are added repeat the first one
            most = 1 << (len(rows) - 1).bit_length()
            padded += [rows[0]] * (most - len(rows))
        noise = np.stack([self.model.noise(step.seeds[row], steps) for row in padded])
        arrays = self.model.stack([step.observations[row] for row in padded])
        names = tuple(arrays)
        inputs = [self._place(noise), *(self._place(array) for array in arrays.values())]

        def run(noise: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
            return self.model(steps, noise, **dict(zip(names, values, strict=True)))

        found = run(*inputs) if self.graphs is None else self.graphs((steps, names), run, inputs)
        return found[: len(rows)].clone()  # the next replay writes into the graph's output

    def _place(self, array: np.ndarray) -> torch.Tensor:
        return transfer.to_device(array, self.device)


class ActStep:
    """A launched batch (step.Pending)."""

    def __init__(self, found: Sequence[tuple[Sequence[int], torch.Tensor]]):
        self._found = found

    def result(self) -> list[np.ndarray]:
        """The actions of each observation, [actions, numbers] float32. Waits for the device."""
        made: dict[int, Any] = {}
        for rows, actions in self._found:
            made.update(zip(rows, transfer.to_host(actions.float()), strict=True))
        return [made[row] for row in range(len(made))]
