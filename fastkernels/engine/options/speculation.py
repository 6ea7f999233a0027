"""Settings of speculative decoding, and counters of drafts.

A step computes the drafts of a sequence together with its last token, and samples after each of them. Noise is a
function of the seed and the number of the token, so that the sampled tokens are those of steps without drafts. A draft
that differs from the token sampled in its place ends the step's tokens of its sequence.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from fastkernels.engine.options.draft_tree import DraftTree

MOST_DRAFTS = 32
AUTO = "auto"
# method: fields of its own
METHODS: dict[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "eagle3": ("model", "speculative_token_tree"),
    "draft_model": ("model",),
    "mtp": ("model",),
}
SYNTHETIC = ("synthetic_acceptance_length", "synthetic_acceptance_rates")


@dataclass(frozen=True)
class Speculation:
    """EngineConfig.speculative_config, with vLLM's names.

    method                  'ngram', 'eagle3', 'draft_model' or 'mtp'
    model                   folder or hub id of the draft model (for 'mtp', by default the target's own)
    num_speculative_tokens  drafts of a sequence in a step, at most
    speculative_token_tree  paths of the drafts, such as '[(0,), (1,), (0, 0)]': the last number is a draft's rank among
                            those behind the same token (default: one draft behind the other)
    prompt_lookup_max, prompt_lookup_min  the numbers of last tokens that are looked up, the largest first
    disable_by_batch_size   more running sequences than this have no drafts; None: no limit; 'auto': as the times of
                            steps at start, and accepted drafts, say (payoff.Payoff)
    rejection_sample_method 'standard', or 'synthetic' for measurements: drafts are accepted whatever is sampled
    synthetic_acceptance_length  mean number of tokens of a sequence in a step, its own one included
    synthetic_acceptance_rates   the share of steps that accept the first draft, the first two, ...

    Raises ValueError, naming the field and the value.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    model: str | None = None
    speculative_token_tree: str | Sequence[Sequence[int]] | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    disable_by_batch_size: int | str | None = AUTO
    rejection_sample_method: str = "standard"
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: Sequence[float] | None = None

    @staticmethod
    def read(given: Mapping[str, Any]) -> Speculation:
        """The settings of a speculative_config. Raises ValueError."""
        method = given.get("method")
        if not isinstance(method, str) or method not in METHODS:
            known = ", ".join(map(repr, METHODS))
            raise ValueError(f"speculative_config: method must be one of {known}, got {reprlib.repr(method)}")
        others = {name for names in METHODS.values() for name in names} - set(METHODS[method])
        known_names = sorted({f.name for f in fields(Speculation)} - others)
        for name in given:
            if name not in known_names:
                raise ValueError(
                    f"speculative_config: {name!r} is not supported by {method!r}, only {', '.join(known_names)}"
                )
        if "num_speculative_tokens" not in given:
            raise ValueError(f"speculative_config {dict(given)!r} needs num_speculative_tokens")
        return Speculation(**given)

    def __post_init__(self) -> None:
        for name, most in (
            ("num_speculative_tokens", MOST_DRAFTS), ("prompt_lookup_max", 16),
            ("prompt_lookup_min", self.prompt_lookup_max), ("disable_by_batch_size", None),
        ):  # fmt: skip
            value = getattr(self, name)
            if name == "disable_by_batch_size" and value in (None, AUTO):
                continue
            if type(value) is not int or value < 1 or (most is not None and value > most):
                span = "at least 1, or 'auto'" if most is None else f"in [1, {most}]"
                raise ValueError(
                    f"speculative_config: {name} must be an integer {span}, got {reprlib.repr(value)}"
                )
        optional = self.method == "mtp" and self.model is None
        if self.has_model and not optional and not (isinstance(self.model, str) and self.model):
            raise ValueError(
                f"speculative_config: {self.method!r} needs `model`, the folder or hub id of a draft model,"
                f" got {reprlib.repr(self.model)}"
            )
        self._check_tree()
        self._check_acceptance()

    def _check_tree(self) -> None:
        if self.speculative_token_tree is None:
            return
        nodes, wanted = len(DraftTree.read(self.speculative_token_tree)), self.num_speculative_tokens
        if nodes != wanted:
            raise ValueError(
                f"speculative_config: speculative_token_tree has {nodes} drafts, and num_speculative_tokens is"
                f" {wanted}: they must be equal"
            )

    def _check_acceptance(self) -> None:
        method, most = self.rejection_sample_method, self.depth
        if method not in ("standard", "synthetic"):
            raise ValueError(
                "speculative_config: rejection_sample_method must be 'standard' or 'synthetic', got"
                f" {reprlib.repr(method)}"
            )
        length, rates = self.synthetic_acceptance_length, self.synthetic_acceptance_rates
        given = [name for name in SYNTHETIC if getattr(self, name) is not None]
        if len(given) != (method == "synthetic"):
            want = "one of" if method == "synthetic" else "neither of"
            raise ValueError(
                f"speculative_config: rejection_sample_method {method!r} needs {want} {' and '.join(SYNTHETIC)}, got"
                f" {', '.join(given) or 'none'}"
            )
        if length is not None and (not _is_number(length) or not 1 <= length <= most + 1):
            raise ValueError(
                f"speculative_config: {SYNTHETIC[0]} must be a number in [1, {most + 1}], one more than"
                f" the drafts behind each other, got {reprlib.repr(length)}"
            )
        if rates is None:
            return
        right = isinstance(rates, (list, tuple)) and all(_is_number(r) and 0 <= r <= 1 for r in rates)
        if not right or len(rates) != most or list(rates) != sorted(rates, reverse=True):
            raise ValueError(
                f"speculative_config: {SYNTHETIC[1]} must be {most} numbers in [0, 1], none larger than the one before,"
                f" got {reprlib.repr(rates)}"
            )

    @property
    def has_model(self) -> bool:
        """Whether a model makes the drafts."""
        return "model" in METHODS[self.method]

    @property
    def holds_drafts(self) -> bool:
        """Whether drafts stay on the device: a model makes them, in a chain."""
        return self.has_model and self.tree is None

    @cached_property
    def tree(self) -> DraftTree | None:
        """The tree of the drafts; None if each has one child at most."""
        made = None if self.speculative_token_tree is None else DraftTree.read(self.speculative_token_tree)
        return None if made is None or made.is_chain else made

    @property
    def depth(self) -> int:
        """Most drafts that a step accepts."""
        return self.num_speculative_tokens if self.tree is None else self.tree.depth

    @property
    def is_measured(self) -> bool:
        """Whether measurements decide when sequences have drafts."""
        return self.disable_by_batch_size == AUTO and not self.synthetic

    @property
    def synthetic(self) -> bool:
        """Whether drafts are accepted whatever the target samples."""
        return self.rejection_sample_method == "synthetic"

    @property
    def rates(self) -> list[float]:
        """synthetic_acceptance_rates, with the least variance where the length is given, as in vLLM."""
        if self.synthetic_acceptance_rates is not None:
            return list(self.synthetic_acceptance_rates)
        assert self.synthetic_acceptance_length is not None
        wanted = self.synthetic_acceptance_length - 1
        return [min(max(wanted - i, 0.0), 1.0) for i in range(self.depth)]

    @property
    def reads_states(self) -> bool:
        """Whether the draft model reads the target's hidden states."""
        return self.method in ("eagle3", "mtp")

    @property
    def lookahead(self) -> int:
        """Tokens behind a step's for which the draft model computes keys."""
        if not self.has_model:
            return 0
        return self.num_speculative_tokens - self.reads_states


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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

    def merge(self, other: DraftCounts) -> None:
        """Add the counts of another rank."""
        self.sequences += other.sequences
        self.drafts += other.drafts
        self.accepted += other.accepted
        self.by_place = [a + b for a, b in zip(self.by_place, other.by_place, strict=True)]
