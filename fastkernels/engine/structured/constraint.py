"""The tokens that a sequence may generate next: by its grammar, allowed_token_ids, bad_words and timestamps.

The masks live on the host. A constraint is advanced when the engine learns of the sequence's token, which is before the
sampling of the next one (see EngineCore), and a preemption keeps it. It runs ahead only to fill the masks behind
drafts, and goes back at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastkernels.engine.structured.grammars import Grammar, next_words, words_of
from fastkernels.engine.structured.timestamps import TimestampRules

if TYPE_CHECKING:
    from fastkernels.engine.scheduling.request import Request

log = logging.getLogger("fastkernels")
MOST_BLANK = 4  # tokens of whitespace in a row in JSON: a model could go on with them until max_tokens


class Constraint:
    """The constraint of one sequence. words: int32 [W], the mask of its next token as in step.TokenMasks.

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


def advance(requests: Iterable[Request]) -> list[tuple[Request, str]]:
    """Update the constraints of unfinished sequences that got a token.

    Returns those that end here with their finish reason: 'stop' where the grammar allows nothing else, 'abort' where
    no token is allowed.
    """
    ended: list[tuple[Request, str]] = []
    matched: list[Request] = []
    for request in requests:
        constraint = request.constraint
        assert constraint is not None
        if constraint.matcher is None:
            _update(request, None, ended)
        elif not constraint.matcher.accept_token(request.output_token_ids[-1]):
            log.warning(
                "request %s: its grammar does not accept token %d",
                request.request_id,
                request.output_token_ids[-1],
            )
            ended.append((request, "abort"))
        elif constraint.matcher.is_terminated():
            ended.append((request, "stop"))
        else:
            matched.append(request)
    if matched:
        matchers = [r.constraint.matcher for r in matched if r.constraint is not None]
        assert matched[0].constraint is not None
        for request, words in zip(
            matched, next_words(matchers, matched[0].constraint.vocab_size), strict=True
        ):
            _update(request, words, ended)
    return ended


def _update(request: Request, words: np.ndarray | None, ended: list[tuple[Request, str]]) -> None:
    constraint = request.constraint
    assert constraint is not None
    if words is not None and constraint.matcher.is_completed() and constraint.stops_only(words):
        ended.append((request, "stop"))
        return
    constraint.update(words, request.output_token_ids)
    if not constraint.words.any():
        log.warning("request %s: no token is allowed by all its constraints", request.request_id)
        ended.append((request, "abort"))


def _width(vocab_size: int) -> int:
    return -(-vocab_size // 32)
