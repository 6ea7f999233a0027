"""The runner of diffusion language models: bidirectional attention with a block cache, tokens and their confidence."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.core.dispatch import direct_calls
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.core.layer_state import KVSpec
from fastkernels.engine.cache import kv_cache
from fastkernels.engine.execution.forward import transfer
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs
from fastkernels.engine.execution.forward.packed_weights import pack_weights
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.steps.unmask_step import UnmaskInput, UnmaskOutput
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.sampling.sampling import sampling

LOGITS = 1 << 25  # logits that are computed at once: of few masks, however many there are
SLACK = 1 << 30  # bytes that are left free
# Steps of fewer tokens times the square of the hidden size than GRAPH_WORK run in CUDA graphs: larger ones keep the GPU
# busy while the host launches the next kernels. Tokens and keys of such a step are padded to one of 16 sizes in each
# octave, so that requests of different lengths share graphs.
GRAPH_WORK, GRAPHS = 40_000_000_000, 32
STEP, OCTAVE = 16, 32  # the least distance of two sizes, and their number up to a power of two
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
        self.capture()
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

    def capture(self) -> None:
        """See Runner: a graph is captured when a shape comes a second time."""
        config, self.graphs = self.config, None
        if self.device.type == "cuda" and config.tensor_parallel_size == 1 and not config.enforce_eager:
            self.graphs = ForwardGraphs(self.device, GRAPHS)

    @torch.inference_mode()
    def launch(self, step: UnmaskInput) -> UnmaskStep:
        """Start a step without waiting for the device."""
        with direct_calls(self.device):
            hidden = self._hidden(step)
        size = max(1, LOGITS // self.hf_config.vocab_size)
        slices = [slice(i, i + size) for i in range(0, len(step.targets), size)]
        parts = [self.draw(self._logits(hidden, step, part), step, part) for part in slices]
        tokens, logprobs = (
            each[0] if len(each) == 1 else torch.cat(each) for each in zip(*parts, strict=True)
        )
        return UnmaskStep(tokens, logprobs)

    def _hidden(self, step: UnmaskInput) -> torch.Tensor:
        """The hidden states of the step's tokens [T, H], and maybe of padding behind them."""
        work = len(step.input_ids) * self.hf_config.hidden_size**2
        graphs = self.graphs if work <= GRAPH_WORK else None
        rows = Rows.of(step) if graphs is None else Rows.of(step).padded()
        long, places = transfer.packed(
            (rows.ids, rows.positions, rows.slots, rows.keys), self.device, np.int64
        )
        short, at = transfer.packed((rows.starts, rows.lens, rows.key_starts), self.device, np.int32)

        def compute(long: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
            ids, positions, slots, keys = (long[place] for place in places)
            starts, lens, key_starts = (short[place] for place in at)
            metadata = AttentionMetadata(
                slot_mapping=slots, cu_seqlens_q=starts, seq_lens=lens, block_table=lens.new_empty(len(lens), 0),
                max_seqlen_q=rows.longest, max_seqlen_k=rows.longest_k, padded=False,
                plan=(keys, key_starts) if len(key_starts) else None, num_whole=rows.num_whole,
                num_whole_tokens=rows.num_whole_tokens,
            )  # fmt: skip
            with forward_context(metadata):
                return self.model(ids, positions)

        return compute(long, short) if graphs is None else graphs(rows.key, compute, [long, short])

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
        self._both = torch.stack((tokens, logprobs.view(torch.int64)))  # one copy, and one wait

    def result(self) -> UnmaskOutput:
        """Wait for the device."""
        tokens, logprobs = transfer.to_host(self._both)
        return UnmaskOutput(tokens, logprobs.view(np.float64))


@dataclass(frozen=True)
class Rows:
    """Inputs of the model and of its attention for the sequences of a step; see UnmaskInput.

    slots       [T]; empty where no token goes into the cache
    starts      [B + 1]: where each sequence's tokens begin; lens [B]: its tokens, cached ones included
    key_starts  [B - num_whole + 1]: where its keys begin in `keys`; empty if all sequences are whole
    longest, longest_k  most computed tokens, and most keys, of a sequence
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    keys: np.ndarray
    starts: np.ndarray
    lens: np.ndarray
    key_starts: np.ndarray
    num_whole: int
    num_whole_tokens: int
    longest: int
    longest_k: int

    @classmethod
    def of(cls, step: UnmaskInput) -> Rows:
        starts = np.zeros(len(step.query_lens) + 1, np.int64)
        np.cumsum(step.query_lens, out=starts[1:])
        num_whole, key_starts = step.num_whole, starts[:0]
        if num_whole < len(step.query_lens):
            key_starts = np.concatenate([[0], step.seq_lens[num_whole:].cumsum()])
        stored = (step.slots >= 0).any()
        return cls(
            step.input_ids, step.positions, step.slots if stored else step.slots[:0], step.keys, starts, step.seq_lens,
            key_starts, num_whole, int(starts[num_whole]), int(step.query_lens.max()), int(step.seq_lens.max()),
        )  # fmt: skip

    @property
    def key(self) -> Hashable:
        """Sizes and numbers that a graph is captured for."""
        sizes = len(self.ids), len(self.slots), len(self.keys), len(self.lens), len(self.key_starts)
        return *sizes, self.num_whole, self.num_whole_tokens, self.longest, self.longest_k

    def padded(self) -> Rows:
        """The same with tokens, keys and their largest numbers rounded up. The padding is one more sequence."""
        size, wide = _rounded(len(self.ids)), _rounded(len(self.keys))
        more, keys = size - len(self.ids), wide - len(self.keys)
        longest = max(_rounded(self.longest), more)
        if len(self.lens) * self.longest == size:  # equal sequences: attention of a batch, which is faster
            longest = self.longest
        if not more and not keys:
            return replace(self, longest=longest, longest_k=max(longest, _rounded(self.longest_k)))
        whole = not len(self.key_starts)
        return Rows(
            np.pad(self.ids, (0, more)), np.pad(self.positions, (0, more)),
            np.pad(self.slots, (0, more if len(self.slots) else 0), constant_values=-1), np.pad(self.keys, (0, keys)),
            np.append(self.starts, size), np.append(self.lens, more if whole else keys),
            self.key_starts if whole else np.append(self.key_starts, wide), self.num_whole + whole,
            size if whole else self.num_whole_tokens, longest, max(longest, _rounded(self.longest_k), keys),
        )  # fmt: skip


def _rounded(count: int) -> int:
    """The count up to the next size of graphs."""
    step = max(STEP, next_power_of_2(max(count, 1)) // OCTAVE)
    return cdiv(count, step) * step


def _largest(tokens: int, longest: int) -> UnmaskInput:
    """A step of so many tokens, of which all are masks."""
    lens = np.array([longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0), np.int32)
    zeros, at = np.zeros(tokens, np.int64), np.arange(tokens)
    floats = zeros.astype(np.float32)
    return UnmaskInput(
        zeros, at % longest, lens, lens, zeros - 1, np.zeros((len(lens), 1), np.int32), len(lens), zeros[:0], at, at,
        floats, floats + 1, zeros, zeros,
    )  # fmt: skip
