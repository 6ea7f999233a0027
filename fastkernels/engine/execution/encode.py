"""The runner of encoders: one forward pass over whole sequences, pooled or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.engine.cache.kv_cache import Limits, wanted_model_len
from fastkernels.engine.config import EngineConfig
from fastkernels.engine.execution.pooling import read_pooling
from fastkernels.engine.execution.runner import Runner

CACHE_OPTIONS = ("num_blocks", "kv_cache_memory", "kv_cache_dtype", "attention_backend")


@dataclass(frozen=True)
class EncodeInput:
    """B whole sequences: input_ids [T] int64, one sequence after the other; query_lens [B] int32.

    pooled [B]: whether a sequence's result is one vector, or one vector for each token.
    """

    input_ids: np.ndarray
    query_lens: np.ndarray
    pooled: Sequence[bool]


class Encode(Runner):
    """Runs an encoder: model(input_ids [T], positions [T]) returns hidden states [T, H]. It has no KV cache."""

    def _prepare(self, folder: Path) -> None:
        config = self.config
        default = EngineConfig(model="")
        for name in CACHE_OPTIONS:
            if getattr(config, name) != getattr(default, name):
                raise ValueError(f"{name} applies to models that generate; {config.model} is an encoder")
        self.pooling = read_pooling(folder)
        own = wanted_model_len(config, self.hf_config)
        self.max_model_len = own if config.max_model_len else min(own, self.pooling.max_tokens or own)
        if config.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_model_len"
                f" {self.max_model_len}: an encoder computes a sequence in one step"
            )

    def num_fitting_blocks(self) -> int:
        """See Runner: 0, since nothing is cached."""
        return 0

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        self.limits = Limits(0, self.max_model_len, self.config.max_num_batched_tokens)

    @torch.inference_mode()
    def launch(self, step: EncodeInput) -> EncodeStep:
        """Start one forward pass without waiting for the device."""
        starts = np.zeros(len(step.query_lens) + 1, dtype=np.int64)
        np.cumsum(step.query_lens, out=starts[1:])
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], step.query_lens)
        cu_seqlens = self._to_device(starts)
        longest = int(step.query_lens.max())
        metadata = AttentionMetadata(
            slot_mapping=cu_seqlens.new_empty(0), cu_seqlens_q=cu_seqlens.int(), seq_lens=cu_seqlens.diff().int(),
            block_table=cu_seqlens.new_empty(len(step.query_lens), 0).int(), max_seqlen_q=longest,
            max_seqlen_k=longest, padded=False,
        )  # fmt: skip
        with forward_context(metadata):
            hidden = self.model(self._to_device(step.input_ids), self._to_device(positions))
        pooled = self.pooling(hidden, cu_seqlens) if any(step.pooled) else None
        return EncodeStep(step, starts, hidden if not all(step.pooled) else None, pooled)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


class EncodeStep:
    """A launched forward pass (step.Pending)."""

    def __init__(
        self, step: EncodeInput, starts: np.ndarray, hidden: torch.Tensor | None, pooled: torch.Tensor | None
    ):
        self._step, self._starts, self._hidden, self._pooled = step, starts, hidden, pooled

    def result(self) -> list[np.ndarray]:
        """Per sequence in float32: [H] where pooled, else [tokens, H]. Waits for the device."""
        hidden = None if self._hidden is None else self._hidden.float().cpu().numpy()
        pooled = None if self._pooled is None else self._pooled.cpu().numpy()
        found = []
        for row, as_vector in enumerate(self._step.pooled):
            source = pooled if as_vector else hidden
            assert source is not None
            found.append(source[row] if as_vector else source[self._starts[row] : self._starts[row + 1]])
        return found
