"""Drafts of the next tokens by prompt lookup: what followed the last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

from fastkernels.engine.options.speculation import Speculation


class Lookup:
    """The tokens of one sequence, and where each of its groups of tokens was followed by which."""

    def __init__(self, settings: Speculation):
        self._settings = settings
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # index of the token after the last occurrence of a group

    def propose(self, prompt: Sequence[int], output: Sequence[int], most: int) -> list[int]:
        """Up to `most` drafts of the tokens after prompt and output, which begin with what an earlier call had."""
        tokens, s, known = self._tokens, self._settings, len(self._tokens)
        tokens += prompt[known:]
        tokens += output[max(known - len(prompt), 0) :]
        for i in range(max(known, 1), len(tokens)):  # the groups before token i
            for n in range(s.prompt_lookup_min, min(s.prompt_lookup_max, i) + 1):
                self._next[tuple(tokens[i - n : i])] = i
        for n in range(min(s.prompt_lookup_max, len(tokens)), s.prompt_lookup_min - 1, -1):
            if (at := self._next.get(tuple(tokens[-n:]))) is not None:
                return tokens[at : at + most]
        return []
