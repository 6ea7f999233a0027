"""The tokens that a transcription with timestamps may generate next (Whisper, arXiv 2212.04356)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class TimestampRules:
    """A text is generated between two timestamps, and times never decrease.

    The first token is a timestamp. A timestamp after text is followed by another, the start of the next text, or by the
    end. Also, a timestamp is sampled whenever all timestamps together are more likely than each other token, which is
    the sampler's part.

    vocab_size  tokens of the logits
    end         the token at the end of the output
    first       the timestamp of 0 s; later times are the tokens after it, up to `last`
    initial     the last timestamp that may be the first token
    banned      tokens that are never generated, special ones included
    """

    vocab_size: int
    end: int
    first: int
    last: int
    initial: int
    banned: tuple[int, ...] = ()

    def words(self, tokens: Sequence[int]) -> np.ndarray:
        """The mask of the next token after these generated ones: int32 [W] as in rows.TokenMasks."""
        bits = self._bits(tokens)
        width = -(-self.vocab_size // 32) * 4
        return np.frombuffer(bytearray(bits.to_bytes(width, "little")), np.int32)

    def _bits(self, tokens: Sequence[int]) -> int:
        if not tokens:
            return _span(self.first, self.initial)
        if tokens[-1] < self.first:
            latest = next((t for t in reversed(tokens) if t >= self.first), self.first - 1)
            return self._text | _span(latest + 1, self.last)
        if len(tokens) == 1 or tokens[-2] >= self.first:
            return self._text
        return _span(tokens[-1], self.last) | 1 << self.end

    @cached_property
    def _text(self) -> int:
        """Bits of the text's tokens and of the end."""
        bits = _span(0, self.first - 1) | 1 << self.end
        for token in self.banned:
            bits &= ~(1 << token)
        return bits


def _span(first: int, last: int) -> int:
    """Bits of the tokens first to last; none if last is before first."""
    return (1 << last + 1) - (1 << first) if last >= first else 0
