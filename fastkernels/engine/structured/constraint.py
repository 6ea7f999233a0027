"""The tokens that a sequence may generate next: by its grammar, allowed_token_ids, bad_words and timestamps.

The masks live on the host. A constraint is advanced when the engine learns of the sequence's token, which is before the
sampling of the next one (see EngineCore), and a preemption keeps it. It runs ahead only to fill the masks behind
drafts, and goes back at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastkernels.engine.structured.grammars import Grammar, next_words, words_of
from fastkernels.engine.structured.timestamps import TimestampRules

MOST_BLANK = 4  # tokens of whitespace in a row in JSON: a model could go on with them until max_tokens


class Constraint:
    """The constraint of one sequence. words: int32 [W], the mask of its next token as in rows.TokenMasks.

    grammar  of its structured output
    allowed  the only tokens that it may generate
    banned   sequences of tokens that it must not generate
    times    rules of its timestamps
    """

    def __init__(
        self,
        vocab_size: int,
        grammar: Grammar | None = None,
        allowed: Sequence[int] | None = None,
        banned: Sequence[Sequence[int]] = (),
        times: TimestampRules | None = None,
    ):
        self.vocab_size = vocab_size
        self.matcher: Any = None if grammar is None else grammar.matcher()
        self.banned, self.times = banned, times
        self._blank = None if grammar is None else grammar.blank
        self._blanks = 0  # tokens of whitespace at the end
        self._always = None if allowed is None else words_of(allowed, vocab_size)
        self.words = self._limited(None if grammar is None else grammar.words, ())

    def update(self, words: np.ndarray | None, tokens: Sequence[int]) -> None:
        """Set the mask after these generated tokens, the last of which is new. words: the grammar's."""
        self.words = self._limited(words, tokens)
        if self._blank is not None:
            last = tokens[-1]
            self._blanks = self._blanks + 1 if self._blank[last >> 5] >> (last & 31) & 1 else 0
            others = self.words & ~self._blank
            if self._blanks >= MOST_BLANK and others.any():
                self.words = others

    def _limited(self, words: np.ndarray | None, tokens: Sequence[int]) -> np.ndarray:
        times = None if self.times is None else self.times.words(tokens)
        parts = [w for w in (words, self._always, times) if w is not None]
        found = np.bitwise_and.reduce(parts) if parts else np.full(_width(self.vocab_size), -1, np.int32)
        for *before, last in self.banned:
            if not before or list(tokens[-len(before) :]) == before:
                found[last >> 5] &= ~np.uint32(1 << (last & 31)).view(np.int32)
        return found

    def words_behind(
        self, tokens: Sequence[int], drafts: Sequence[int], children: Sequence[Sequence[int]]
    ) -> dict[int, np.ndarray]:
        """The masks behind `tokens`, as node 0, and behind each draft that the sequence may reach and go on from.

        children: the nodes behind each node; node i + 1 is drafts[i]
        """
        found, path, kept = {0: self.words}, list(tokens), (self.words, self._blanks)

        def visit(node: int) -> None:
            words, blanks = self.words, self._blanks
            for child in children[node]:
                token = drafts[child - 1] if child <= len(drafts) else -1
                if token < 0 or not words[token >> 5] >> (token & 31) & 1:
                    continue
                if self.matcher is not None and not self.matcher.accept_token(token):
                    continue
                path.append(token)
                if self.matcher is None or not self.matcher.is_terminated():
                    own = None if self.matcher is None else next_words([self.matcher], self.vocab_size)[0]
                    self.update(own, path)
                    if self.words.any():
                        found[child] = self.words
                        visit(child)
                path.pop()
                if self.matcher is not None:
                    self.matcher.rollback(1)
                self.words, self._blanks = words, blanks

        visit(0)
        self.words, self._blanks = kept
        return found

    def stops_only(self, words: np.ndarray) -> bool:
        """Whether the grammar's mask allows nothing but the end."""
        rest = words.copy()
        for token in self.matcher.stop_token_ids:
            rest[token >> 5] &= ~np.uint32(1 << (token & 31)).view(np.int32)
        return not rest.any()


def _width(vocab_size: int) -> int:
    return -(-vocab_size // 32)
