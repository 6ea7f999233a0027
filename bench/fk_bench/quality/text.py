"""The text of an item: sequences whose own tokens are forced in decode steps, so that all runs see the same context."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


def english() -> str:
    """Return Python's documentation as text: 465,000 characters, 113,000 tokens of SmolLM2 (Python 3.11)."""
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items()))


def tokens_of(model: Path, vocabulary: int, text: str = "") -> list[int]:
    """The text's tokens (default: `english`), or random ones if the model's folder has no tokenizer.json."""
    file = model / "tokenizer.json"
    if not file.is_file():
        rng = random.Random(0)
        return [rng.randrange(vocabulary) for _ in range(100_000)]
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file)).encode(text or english(), add_special_tokens=False).ids


@dataclass(frozen=True)
class Forced:
    """One sequence: a prompt, and the tokens that are forced after it. Its logits are rows `at` and following."""

    prompt: list[int]
    tokens: list[int]
    at: int


@dataclass(frozen=True)
class Extent:
    """How much is compared. The defaults are 256 tokens, which a model of 8B on a GPU forces in seconds."""

    sequences: int = 16
    batch: int = 8
    prompts: tuple[int, ...] = (48, 112, 176, 240)  # lengths, in turn
    new: int = 16  # forced tokens of each sequence

    def __post_init__(self) -> None:
        if min(self.sequences, self.batch, self.new, *self.prompts) < 1 or not self.prompts:
            raise ValueError(f"sequences, batch, prompts and new tokens are at least 1, got {self}")

    @property
    def total(self) -> int:
        return self.sequences * self.new

    @property
    def longest(self) -> int:
        return max(self.prompts) + self.new + 16  # SGLang keeps a few tokens free


def cut(tokens: Sequence[int], extent: Extent) -> list[Forced]:
    """Cut a text into sequences that do not overlap. Raises ValueError if it is too short."""
    found, at = [], 0
    for i in range(extent.sequences):
        start = at + extent.prompts[i % len(extent.prompts)]
        end = start + extent.new
        found.append(Forced([*tokens[at:start]], [*tokens[start:end]], i * extent.new))
        at = end
    if at > len(tokens):
        raise ValueError(f"the text has {len(tokens)} tokens, {at} are needed; compare fewer sequences")
    return found


def batches(count: int, size: int, order: bool = False, seed: int = 0) -> list[list[int]]:
    """The numbers of the sequences that run together. `order`: shuffled, in batches of random smaller sizes."""
    numbers, rng = list(range(count)), random.Random(f"{seed} {count} {size}")
    if order:
        rng.shuffle(numbers)
    found = []
    while numbers:
        most = rng.randrange(1, size) if order and size > 1 else size
        found.append(numbers[:most])
        del numbers[:most]
    return found


def save(sequences: Sequence[Forced], path: Path) -> None:
    path.write_text(json.dumps([asdict(s) for s in sequences]))


def load(path: Path) -> list[Forced]:
    return [Forced(**s) for s in json.loads(path.read_text())]
