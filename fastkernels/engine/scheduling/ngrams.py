"""Drafts of the next tokens by prompt lookup: what followed the last tokens where they occurred before.

A step computes the drafts of a sequence together with its last token, and samples after each of them. Noise is a
function of the seed and the number of the token, so that the sampled tokens are those of steps without drafts. A draft
that differs from the token sampled in its place ends the step's tokens of its sequence.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

MOST_DRAFTS = 32


@dataclass(frozen=True)
class Speculation:
    """EngineConfig.speculative_config, with vLLM's names.

    num_speculative_tokens  drafts of a sequence in a step, at most
    prompt_lookup_max, prompt_lookup_min  the numbers of last tokens that are looked up, the largest first
    disable_by_batch_size   more running sequences than this have no drafts; None: no limit

    Raises ValueError, naming the field and the value.
    """

    num_speculative_tokens: int
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    disable_by_batch_size: int | None = None

    @staticmethod
    def read(given: Mapping[str, Any]) -> Speculation:
        """The settings of a speculative_config. Raises ValueError."""
        known = {"method", *(f.name for f in fields(Speculation))}
        for name in given:
            if name not in known:
                raise ValueError(
                    f"speculative_config: {name!r} is not supported, only {', '.join(sorted(known))}"
                )
        if given.get("method") != "ngram":
            raise ValueError(
                f"speculative_config: method must be 'ngram', got {reprlib.repr(given.get('method'))}"
            )
        rest = {name: value for name, value in given.items() if name != "method"}
        if "num_speculative_tokens" not in rest:
            raise ValueError(f"speculative_config {dict(given)!r} needs num_speculative_tokens")
        return Speculation(**rest)

    def __post_init__(self) -> None:
        for name, most in (
            ("num_speculative_tokens", MOST_DRAFTS), ("prompt_lookup_max", 16),
            ("prompt_lookup_min", self.prompt_lookup_max), ("disable_by_batch_size", None),
        ):  # fmt: skip
            value = getattr(self, name)
            if name == "disable_by_batch_size" and value is None:
                continue
            if type(value) is not int or value < 1 or (most is not None and value > most):
                span = "at least 1" if most is None else f"in [1, {most}]"
                raise ValueError(
                    f"speculative_config: {name} must be an integer {span}, got {reprlib.repr(value)}"
                )


@dataclass
class DraftCounts:
    """Of all steps: drafted sequences, drafts, accepted ones, and accepted ones by their place."""

    sequences: int = 0
    drafts: int = 0
    accepted: int = 0
    by_place: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    def add(self, drafts: int, accepted: int) -> None:
        self.sequences += 1
        self.drafts += drafts
        self.accepted += accepted
        for place in range(accepted):
            self.by_place[place] += 1


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
