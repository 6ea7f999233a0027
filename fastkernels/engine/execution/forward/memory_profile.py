"""Measures the memory of the largest step, which runs once before the KV cache is allocated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fastkernels.engine.cache.kv_cache import GIB
from fastkernels.engine.execution.forward.graphs import MAX_MIXED_TOKENS, verify_sizes
from fastkernels.engine.execution.forward.media_features import MediaFeatures
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.options.speculation import Speculation
from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.steps.step import PromptTargets, StepInput, even

# Bytes added to the measured peak for the allocator and for graphs, in addition to `graph_bytes`
SLACK = 1 << 30


def largest_step(max_num_seqs: int, max_tokens: int, max_model_len: int, logprobs: int) -> StepInput:
    """max_num_seqs rows with max_tokens tokens in total, all sampling features, and prompt_logprobs of one row."""
    lens = even(min(max_num_seqs, max_tokens), max_tokens, max_model_len)
    targets = PromptTargets(len(lens) - 1, logprobs, np.zeros(int(lens[-1]), dtype=np.int64))
    return replace(made_up_step(lens, lens, every_way(logprobs)), prompt_targets=[targets])


def every_way(logprobs: int) -> SamplingParams:
    """Parameters that use every feature of the sampler."""
    return SamplingParams(
        temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.1, logprobs=logprobs, seed=0,
    )  # fmt: skip


def made_up_step(query_lens: np.ndarray, seq_lens: np.ndarray, params: SamplingParams) -> StepInput:
    """A step of the first slots, for an engine without requests; rows with one query come first.

    The block tables are empty, so that all tokens go to the reserved block 0.
    """
    rows = len(query_lens)
    new = [NewRow(i, params, 0, frozenset(), (0,), (0,)) for i in range(rows)]
    ids = np.zeros(int(query_lens.sum()), dtype=np.int64)
    return StepInput(
        np.arange(rows), query_lens, seq_lens, np.zeros(rows, dtype=np.int64), ids, int((query_lens == 1).sum()),
        np.empty((0, 3), dtype=np.int32), new,
    )  # fmt: skip


def activation_bytes(runner: Runner) -> tuple[int, int]:
    """(bytes of weights and other persistent state, additional bytes of the largest step). CUDA only.

    A cache of two blocks is enough, since all tokens go to block 0. Raises ValueError for too little GPU memory.
    """
    config = runner.config
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    length = min(runner.max_model_len, config.max_num_batched_tokens)
    step = largest_step(config.max_num_seqs, config.max_num_batched_tokens, length, config.max_logprobs)
    try:
        runner.launch(step).result()
        runner.run_border()
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise ValueError(
            f"the model does not fit: weights {before / GIB:.2f} GiB and a step of {config.max_num_batched_tokens}"
            f" tokens with {config.max_num_seqs} sequences need more than the GPU has ({total / GIB:.2f} GiB,"
            f" {free / GIB:.2f} GiB free); reduce max_num_batched_tokens or max_num_seqs ({error})"
        ) from error
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    return before, peak - before + SLACK + graph_bytes(runner, peak - before)


def media_bytes(features: MediaFeatures, tokens: int, capacity: int) -> tuple[int, int]:
    """(additional bytes of a step that encodes `tokens` features, bytes of `capacity` kept ones). CUDA only."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    size = features.run_largest(tokens)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak, capacity * size


def graph_bytes(runner: Runner, step: int) -> int:
    """Bytes of the graphs' pool, which eager steps cannot use.

    That is the share of the largest step's bytes for the largest mixed graph, plus the logits of the largest decode
    graph, or of the largest one that verifies drafts. With tensor parallelism these logits exist three times: this
    rank's shard, all shards, and sorted.
    """
    config = runner.config
    if config.enforce_eager:
        return 0
    copies = 1 if config.tensor_parallel_size == 1 else 3
    rows = config.max_num_seqs
    if config.speculative_config is not None:
        count = Speculation.read(config.speculative_config).num_speculative_tokens
        sizes = verify_sizes(count, rows, config.max_num_batched_tokens)
        rows = max(rows, (count + 1) * max(sizes, default=0))
    logits = copies * rows * runner.hf_config.vocab_size * runner.dtype.itemsize
    most = config.max_num_batched_tokens
    return logits + step * min(MAX_MIXED_TOKENS, most) // most
