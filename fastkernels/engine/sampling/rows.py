"""The rows of a step as the sampler gets them: requests that enter slots, and masks of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastkernels.engine.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class NewRow:
    """A request enters a slot, on admission or again after a preemption.

    seed              seed of its noise
    end_token_ids     tokens that end it, banned before params.min_tokens
    prompt_token_ids, output_token_ids  for penalties and repetition-aware sampling; empty without these
    shift             position of a token behind the last medium, less its index
    """

    slot: int
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int] = frozenset()
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    shift: int = 0


@dataclass(frozen=True)
class TokenMasks:
    """The tokens that rows [M] int64 of a step may sample: token t is allowed by bit t % 32 of words[:, t // 32].

    words [M, W] int32, with W * 32 >= vocab_size.
    """

    rows: np.ndarray
    words: np.ndarray
