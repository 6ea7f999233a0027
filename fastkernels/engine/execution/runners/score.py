"""The runner of recommenders: one forward pass over the samples of a step, each of which gets scores."""

from __future__ import annotations

import itertools
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
from fastkernels.models.common.interfaces.samples import Best, Scores, Together


@dataclass(frozen=True)
class ScoreInput:
    """The samples of a step, as the model's `read` made them, and whether each one's activation applies."""

    samples: Sequence[Any]
    activated: Sequence[bool]


class Score(Runner):
    """Runs a model of the interface in models/recsys/dlrm_v2.py, in the checkpoint's dtype unless another is named."""

    what = "a recommender"
    ids_per_token = (
        64  # of max_num_batched_tokens: an id costs a row of a table, and a token a pass through layers
    )

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
        """The ids that a request may have."""
        config = self.config
        most = self.ids_per_token * config.max_num_batched_tokens
        if (longest := config.max_model_len or most) > most:
            raise ValueError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} allows {most} ids, less than max_model_len"
                f" {longest}: a request is computed in one step"
            )
        return longest

    def _loaded(self) -> None:
        self._make_graphs()
        self.model.ready(self._folder, self.config.load_format == "dummy")

    def num_fitting_blocks(self) -> int:
        """See Runner: 0, since nothing is cached."""
        return 0

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        self.limits = Limits(0, self.max_model_len, self.config.max_num_batched_tokens)

    def capture(self) -> None:
        """See Runner: graphs and what was computed from the weights are made again."""
        self._make_graphs()
        self.model.refresh()

    def _make_graphs(self) -> None:
        if hasattr(self.model, "graphs") and self.device.type == "cuda" and not self.config.enforce_eager:
            self.model.graphs = self.graphs = ForwardGraphs(self.device)

    @torch.inference_mode()
    def launch(self, step: ScoreInput) -> ScoreStep:
        """Start one forward pass."""
        return ScoreStep(self.model.score(step.samples, step.activated, self._place))

    def _place(self, array: np.ndarray) -> torch.Tensor:
        return transfer.to_device(array, self.device)


class ScoreStep:
    """A launched forward pass (step.Pending)."""

    def __init__(self, found: Scores):
        self._found = found

    def result(self) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Per sample scores [n, ...] float32, and the ids [n] int64 that they belong to, if any. Waits for them."""
        if isinstance(self._found, Together):
            scores, sizes = self._found
            return [(part, None) for part in _split(scores.float(), sizes)]
        if isinstance(self._found, Best):
            best, ids = (transfer.to_host(t) for t in (self._found.scores.float(), self._found.ids))
            return [(best[i, :n], ids[i, :n]) for i, n in enumerate(self._found.sizes)]
        joined = torch.cat([scores.float() for scores, _ in self._found])
        parts = _split(joined, [len(scores) for scores, _ in self._found])
        own = [ids for _, ids in self._found if ids is not None]
        listed = iter(_split(torch.cat(own), [len(one) for one in own]) if own else ())
        return [
            (part, None if chosen is None else next(listed))
            for part, (_, chosen) in zip(parts, self._found, strict=True)
        ]


def _split(tensor: torch.Tensor, sizes: Sequence[int]) -> list[np.ndarray]:
    """Parts of a tensor, in the host's memory."""
    array = transfer.to_host(tensor)
    ends = list(itertools.accumulate(sizes))
    return [array[end - n : end] for end, n in zip(ends, sizes, strict=True)]
