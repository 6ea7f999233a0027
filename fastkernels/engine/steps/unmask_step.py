"""The input and output of one step of a diffusion language model, exchanged between the scheduler and the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class UnmaskInput:
    """B sequences, of which T tokens are computed, and M masks for which tokens are drawn.

    input_ids, positions [T]  int64: sequence after sequence
    query_lens, seq_lens [B]  int32: computed tokens, and all tokens
    slots [T]                 int64: where keys and values go in the cache; -1: nowhere
    block_table               [B, max_blocks] int32; 0 behind the blocks of a sequence
    num_whole                 sequences that compute all of their tokens, which come first
    keys                      int64: where the keys of the other sequences are in the cache, one after the other
    targets [M]               int64: computed tokens at which there are masks
    blind [M]                 int64: the same masks in a sequence whose prompt is masked; -1: no guidance
    guidance, temperature [M]  float32; seeds, offsets [M]: int64, of the noise
    """

    input_ids: np.ndarray
    positions: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    slots: np.ndarray
    block_table: np.ndarray
    num_whole: int
    keys: np.ndarray
    targets: np.ndarray
    blind: np.ndarray
    guidance: np.ndarray
    temperature: np.ndarray
    seeds: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class UnmaskOutput:
    """token_ids [M] int64, and logprobs [M] float64: of these tokens, before temperature."""

    token_ids: np.ndarray
    logprobs: np.ndarray
