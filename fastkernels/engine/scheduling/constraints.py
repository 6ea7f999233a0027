"""Updates the constraints of sequences that got a token."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from fastkernels.engine.scheduling.request import Request
from fastkernels.engine.structured.grammars import next_words

log = logging.getLogger("fastkernels")


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
