"""The runner of diffusion language models: bidirectional attention with a block cache, tokens and their confidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.core.dispatch import direct_calls
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.core.layer_state import KVSpec
from fastkernels.engine.cache import kv_cache
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.execution.forward.packed_weights import pack_weights
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.steps.unmask_step import UnmaskInput, UnmaskOutput
from fastkernels.overrides.sampling.sampling import sampling

LOGITS = 1 << 25  # logits that are computed at once: of few masks, however many there are
SLACK = 1 << 30  # bytes that are left free
UNUSED = {
    "kv_cache_dtype": "auto", "mamba_ssm_cache_dtype": "auto", "attention_backend": None, "speculative_config": None,
}  # fmt: skip


class Unmask(Runner):
    """Runs a diffusion language model: tokens and masks in, a token and its log-probability for each mask out."""

    def _prepare(self, folder: Path) -> None:
        config = self.config
        for name, default in UNUSED.items():
            if getattr(config, name) != default:
                raise ValueError(
                    f"{name} {getattr(config, name)!r} applies to models with causal attention, which"
                    f" {config.model} has not"
                )
        self.max_model_len = kv_cache.wanted_model_len(config, self.hf_config)
        if config.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_model_len"
                f" {self.max_model_len}: a step computes all tokens of a sequence"
            )

    def _loaded(self) -> None:
        self.layers = [m for m in self.model.modules() if isinstance(getattr(m, "keeps", None), KVSpec)]
        self.groups = kv_cache.groups_of(self.layers, self.max_model_len)
        if self.device.type == "cpu":
            pack_weights(self.model)

    def num_fitting_blocks(self) -> int:
        """See Runner. Raises ValueError for too little memory."""
        config = self.config
        if config.num_blocks is not None:
            return config.num_blocks
        if config.kv_cache_memory is not None:
            return self._fitting(config.kv_cache_memory)
        if self.device.type == "cpu":
            return self._fitting(kv_cache.CPU_CACHE)
        weights, activations = self._measured()
        budget = kv_cache.cuda_budget(config)
        blocks = self._fitting(budget - weights - activations)
        least = -(-(config.max_model_len or 1) // config.block_size) + 1
        if blocks < least:
            size = least * self._block_bytes()
            length = config.max_model_len or config.block_size
            raise kv_cache.too_large(weights, activations, size, length, budget, config)
        return blocks

    def bind(self, num_blocks: int) -> None:
        """See Runner."""
        config = self.config
        if num_blocks < 2:
            raise ValueError(
                f"the KV cache has {max(num_blocks, 0)} blocks, and at least 2 are needed, one of them for padding;"
                " increase num_blocks or kv_cache_memory"
            )
        # A request without block_cache needs no room in the cache, so that it does not limit max_model_len.
        self.limits = kv_cache.Limits(num_blocks, self.max_model_len, config.max_num_batched_tokens)
        kv_cache.bind(self.groups, [num_blocks], config.block_size, self.dtype, self.device)
        self._mark("KV cache")

    def _fitting(self, num_bytes: int) -> int:
        return kv_cache.fitting_blocks(self.groups, num_bytes, self.config, self.dtype)

    def _block_bytes(self) -> int:
        return kv_cache.block_bytes(self.layers, self.config.block_size, self.dtype)

    def _measured(self) -> tuple[int, int]:
        """(bytes of the weights, additional bytes of the largest step). Raises ValueError for too little memory."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            self.launch(_largest(self.config.max_num_batched_tokens, self.max_model_len)).result()
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"the model does not fit: weights of {before / kv_cache.GIB:.2f} GiB and a step of"
                f" {self.config.max_num_batched_tokens} tokens need more than the GPU has; reduce"
                f" max_num_batched_tokens ({error})"
            ) from error
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        self._mark("largest step")
        return before, peak - before + SLACK

    @torch.inference_mode()
    def launch(self, step: UnmaskInput) -> UnmaskStep:
        """Start a step without waiting for the device."""
        starts = np.zeros(len(step.query_lens) + 1, np.int64)
        np.cumsum(step.query_lens, out=starts[1:])
        num_whole, plan = step.num_whole, None
        if num_whole < len(step.query_lens):
            ends = step.seq_lens[num_whole:].cumsum()
            plan = self._to_device(step.keys), self._to_device(np.concatenate([[0], ends])).int()
        metadata = AttentionMetadata(
            slot_mapping=self._to_device(step.slots), cu_seqlens_q=self._to_device(starts).int(),
            seq_lens=self._to_device(step.seq_lens).int(), block_table=self._to_device(step.block_table).int(),
            max_seqlen_q=int(step.query_lens.max()), max_seqlen_k=int(step.seq_lens.max()), padded=False, plan=plan,
            num_whole=num_whole, num_whole_tokens=int(starts[num_whole]),
        )  # fmt: skip
        with forward_context(metadata), direct_calls(self.device):
            hidden = self.model(self._to_device(step.input_ids), self._to_device(step.positions))
        size = max(1, LOGITS // self.hf_config.vocab_size)
        slices = [slice(i, i + size) for i in range(0, len(step.targets), size)]
        parts = [self.draw(self._logits(hidden, step, part), step, part) for part in slices]
        tokens, logprobs = (torch.cat(each) for each in zip(*parts, strict=True))
        return UnmaskStep(tokens, logprobs)

    def _logits(self, hidden: torch.Tensor, step: UnmaskInput, part: slice) -> torch.Tensor:
        """The guided logits [m, V] of some of the masks, in float32."""
        logits = self._head(hidden, step.targets[part])
        blind = step.blind[part]
        if (guided := np.flatnonzero(blind >= 0)).size:
            rows = self._to_device(guided)
            without = self._head(hidden, blind[guided])
            scale = self._to_device(step.guidance[part][guided], np.float32)[:, None]
            logits.index_copy_(0, rows, without + (scale + 1) * (logits.index_select(0, rows) - without))
        return logits

    def _head(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        return self.model.compute_logits(hidden.index_select(0, self._to_device(rows))).float()

    def draw(self, logits: torch.Tensor, step: UnmaskInput, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens from the logits of some of the masks: (token ids, their log-probabilities in float64)."""
        total = logits.double().logsumexp(-1)
        logits[:, self.hf_config.mask_token_id] = -torch.inf  # no mask is filled with a mask
        temperature = self._to_device(step.temperature[part], np.float32)
        whole, none = torch.ones_like(temperature), torch.zeros_like(temperature)
        seeds, offsets = (self._to_device(a[part]) for a in (step.seeds, step.offsets))
        tokens = sampling(logits, temperature, none.int(), whole, none, seeds, offsets)
        return tokens, logits.gather(1, tokens[:, None])[:, 0].double() - total

    def _to_device(self, array: np.ndarray, dtype: Any = np.int64) -> torch.Tensor:
        return transfer.to_device(array, self.device, dtype)


class UnmaskStep:
    """A launched step (step.Pending)."""

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor):
        self._tokens, self._logprobs = tokens, logprobs

    def result(self) -> UnmaskOutput:
        """Wait for the device."""
        return UnmaskOutput(self._tokens.cpu().numpy(), self._logprobs.cpu().numpy())


def _largest(tokens: int, longest: int) -> UnmaskInput:
    """A step of so many tokens, of which all are masks."""
    lens = np.array([longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0), np.int32)
    zeros, at = np.zeros(tokens, np.int64), np.arange(tokens)
    floats = zeros.astype(np.float32)
    return UnmaskInput(
        zeros, at % longest, lens, lens, zeros - 1, np.zeros((len(lens), 1), np.int32), len(lens), zeros[:0], at, at,
        floats, floats + 1, zeros, zeros,
    )  # fmt: skip
