"""The runner of recommenders: one forward pass over the samples of a step, each of which gets scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.engine.cache.kv_cache import Limits
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.execution.runners.encode import CACHE_OPTIONS
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.configs.config import ALL_DTYPES


@dataclass(frozen=True)
class ScoreInput:
    """The samples of a step, as the model's `read` made them, and whether each one's activation applies."""

    samples: Sequence[Any]
    activated: Sequence[bool]


class Score(Runner):
    """Runs a model of the interface in models/recsys/dlrm_v2.py, in the checkpoint's dtype unless another is named."""

    what = "a recommender"

    def _prepare(self, folder: Path) -> None:
        config = self.config
        default = EngineConfig(model="")
        for name in CACHE_OPTIONS:
            if getattr(config, name) != getattr(default, name):
                raise ValueError(f"{name} applies to models that generate; {config.model} is {self.what}")
        self._folder = folder
        if config.dtype == "auto":  # scores are compared with those of float32 models
            found = getattr(self.hf_config, "dtype", None) or torch.float32
            self.dtype = ALL_DTYPES[found] if isinstance(found, str) else found
        self.max_model_len = self._longest()

    def _longest(self) -> int:
        """The ids that a sample may have."""
        config = self.config
        longest = config.max_model_len or config.max_num_batched_tokens
        if config.max_num_batched_tokens < longest:
            raise ValueError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_model_len"
                f" {longest}: a sample is computed in one step"
            )
        return longest

    def _loaded(self) -> None:
        self.model.ready(self._folder, self.config.load_format == "dummy")
        self._renew_graphs()

    def _renew_graphs(self) -> None:
        if hasattr(self.model, "graphs") and self.device.type == "cuda" and not self.config.enforce_eager:
            self.model.graphs = self.graphs = ForwardGraphs(self.device)

    def num_fitting_blocks(self) -> int:
        """See Runner: 0, since nothing is cached."""
        return 0

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        self.limits = Limits(0, self.max_model_len, self.config.max_num_batched_tokens)

    def capture(self) -> None:
        """See Runner: what was computed from the weights is computed again."""
        self.model.refresh()
        self._renew_graphs()

    @torch.inference_mode()
    def launch(self, step: ScoreInput) -> ScoreStep:
        """Start one forward pass."""
        return ScoreStep(self.model.score(step.samples, step.activated, self._place))

    def _place(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


class ScoreStep:
    """A launched forward pass (step.Pending)."""

    def __init__(self, found: Sequence[tuple[torch.Tensor, torch.Tensor | None]]):
        self._found = found

    def result(self) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Per sample scores [n, ...] float32, and the ids [n] int64 that they belong to, if any. Waits for them."""
        scores = torch.cat([scores.float() for scores, _ in self._found]).cpu().numpy()
        listed = [ids for _, ids in self._found if ids is not None]
        ids = torch.cat(listed).cpu().numpy() if listed else None
        made: list[tuple[np.ndarray, np.ndarray | None]] = []
        at = ids_at = 0
        for one, own in self._found:
            n = len(one)
            part = None if own is None or ids is None else ids[ids_at : ids_at + n]
            made.append((scores[at : at + n], part))
            at, ids_at = at + n, ids_at + (0 if own is None else n)
        return made
