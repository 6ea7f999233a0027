"""Prompts: 'random' ids of exact lengths, a ShareGPT file, or a file of prompts.

A Dataset draws disjoint samples: draw(part, round, count) never repeats a prompt within a run, and returns the same
prompts to every lane. Random prompts of a group may share a prefix, and those of a conversation have later turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fk_bench.serving.load.client import Prompt

NAMES = ("random", "sharegpt", "prompts")
# For the agreement phase: fixed texts of several lengths and kinds that a real model continues with confidence.
AGREEMENT_TEXTS = (
    "The capital of France is",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "List the planets of the solar system in order: Mercury, Venus,",
    "Q: What is 12 times 12?\nA:",
    "The three states of matter are",
    "In a shared meadow each shepherd gains by adding one more sheep, but the grass is everybody's. The result is that",
    "1, 2, 4, 8, 16, 32,",
    "To make bread you need flour, water, salt and yeast. First,",
    "Bonjour, je m'appelle",
    "SELECT name, COUNT(*) FROM orders GROUP BY",
    "Photosynthesis is the process by which plants",
    "Dear Sir or Madam,\n\nI am writing to",
    "A bicycle has two wheels, a tricycle has three, and a car has",
    "The opposite of hot is cold. The opposite of up is down. The opposite of left is",
)


class DatasetError(ValueError):
    """The data set cannot be read, or has too little data."""


@dataclass
class Vocabulary:
    """The parts of a model's tokenizer that data sets need: `encode`, and the ids of ordinary text."""

    size: int
    special: frozenset[int] = frozenset()
    tokenizer: Any = None

    def encode(self, text: str) -> list[int] | str:
        """The ids; without a tokenizer.json the text itself, which the server then tokenizes."""
        return text if self.tokenizer is None else list(self.tokenizer.encode(text).ids)

    @cached_property
    def ordinary(self) -> list[int]:
        return [i for i in range(self.size) if i not in self.special]


def load_vocabulary(model: str) -> Vocabulary:
    """From config.json and tokenizer.json of a local directory or of a model of the hub. Raises DatasetError."""
    files = {name: _model_file(model, name) for name in ("config.json", "tokenizer.json")}
    if files["config.json"] is None:
        raise DatasetError(
            f"model {model!r} has no config.json (neither a local directory nor a model of the hub)"
        )
    config = json.loads(files["config.json"].read_text())
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not size:
        raise DatasetError(f"{files['config.json']} has no vocab_size")
    if files["tokenizer.json"] is None:
        return Vocabulary(int(size))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(files["tokenizer.json"]))
    added = json.loads(files["tokenizer.json"].read_text()).get("added_tokens") or []
    special = frozenset(int(t["id"]) for t in added)
    return Vocabulary(min(int(size), tokenizer.get_vocab_size()), special, tokenizer)


def _model_file(model: str, name: str) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    if folder.is_absolute() or model.startswith("."):
        return None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, name))
    except Exception:  # the hub's client has a dozen exceptions for a missing file
        return None


@dataclass
class Dataset:
    """Prompts for every (part, round). `texts` is empty for random ids.

    seed         round r of a random data set is drawn from seed + r
    input_len    tokens of a random prompt, exactly
    """

    vocabulary: Vocabulary
    seed: int
    input_len: int
    output_len: int
    texts: Sequence[tuple[str, int | None]] = ()
    ignore_eos: bool = True
    repeated: bool = False
    _seen: set[tuple[int, ...]] = field(default_factory=set)
    _used: int = 0
    _drawn: dict[tuple[Any, ...], list[Prompt]] = field(default_factory=dict)

    def draw(
        self,
        part: str,
        round_: int,
        count: int,
        lengths: tuple[int, int] | None = None,
        prefix: tuple[int, int] = (0, 1),
        turns: int = 1,
    ) -> list[Prompt]:
        """`count` prompts for this part of the run (a level or a warm-up) and round: the same in every call.

        The rest is for random prompts only:
        lengths  tokens of a prompt (of each turn) and of its output; None: the data set's
        prefix   (tokens, groups): prompt i starts with the prefix of group i % groups
        turns    of a conversation
        """
        lengths = lengths or (self.input_len, self.output_len)
        key = (part, round_, count, lengths, prefix, turns)
        if key not in self._drawn:
            if self.texts:
                self._drawn[key] = self._from_texts(count)
            else:
                rng = random.Random(f"{self.seed + round_}/{part}")
                prompts = self._random(rng, [lengths] * count)
                self._drawn[key] = self._extended(prompts, rng, lengths[0], prefix, turns)
        return self._drawn[key]

    def warm_up(self, part: str, count: int, **shape: Any) -> list[Prompt]:
        """Random prompts as long as those of draw(), so that no measured prompt is in a server's cache."""
        if not self.texts:
            return self.draw(f"warm-up {part}", -1, count, **shape)
        like = [self.texts[i % len(self.texts)] for i in range(count)]
        lengths = [
            (
                len(self.vocabulary.encode(text)) if self.vocabulary.tokenizer else self.input_len,
                output or self.output_len,
            )
            for text, output in like
        ]
        return self._random(random.Random(f"{self.seed}/warm-up {part}"), lengths)

    def _random(self, rng: random.Random, lengths: Sequence[tuple[int, int]]) -> list[Prompt]:
        ordinary = self.vocabulary.ordinary
        prompts: list[Prompt] = []
        attempts = 0
        while len(prompts) < len(lengths):
            input_len, output_len = lengths[len(prompts)]
            ids = tuple(rng.choices(ordinary, k=input_len))
            attempts += 1
            if ids in self._seen and attempts < 100 * len(lengths):
                continue
            self.repeated |= ids in self._seen
            self._seen.add(ids)
            prompts.append(Prompt(list(ids), output_len, True))
        return prompts

    def _extended(
        self, prompts: list[Prompt], rng: random.Random, turn_len: int, prefix: tuple[int, int], turns: int
    ) -> list[Prompt]:
        """With a shared prefix in front, and later turns."""
        length, groups = prefix
        ordinary = self.vocabulary.ordinary
        prefixes = [rng.choices(ordinary, k=length) for _ in range(groups)]
        made = []
        for i, prompt in enumerate(prompts):
            later = tuple(tuple(rng.choices(ordinary, k=turn_len)) for _ in range(turns - 1))
            made.append(replace(prompt, tokens=[*prefixes[i % groups], *prompt.tokens], later=later))
        return made

    def _from_texts(self, count: int) -> list[Prompt]:
        order = list(range(len(self.texts)))
        random.Random(self.seed).shuffle(order)
        prompts = []
        for _ in range(count):
            self.repeated |= self._used >= len(order)
            text, output_len = self.texts[order[self._used % len(order)]]
            self._used += 1
            prompts.append(
                Prompt(self.vocabulary.encode(text), output_len or self.output_len, self.ignore_eos)
            )
        return prompts

    def agreement(self, count: int, output_len: int) -> list[Prompt]:
        """Fixed prompts; outputs may end with eos, as a user's would."""
        texts = [AGREEMENT_TEXTS[i % len(AGREEMENT_TEXTS)] for i in range(count)]
        texts = [t if i < len(AGREEMENT_TEXTS) else f"{i}. {t}" for i, t in enumerate(texts)]
        return [Prompt(self.vocabulary.encode(t), output_len, False) for t in texts]


def load(
    name: str,
    model: str,
    seed: int,
    input_len: int,
    output_len: int,
    path: str | None = None,
    ignore_eos: bool = True,
) -> Dataset:
    """A data set by name. Raises DatasetError, which names the file and the problem."""
    if name not in NAMES:
        raise DatasetError(f"--dataset: unknown data set {name!r}. Known: {', '.join(NAMES)}.")
    vocabulary = load_vocabulary(model)
    if name == "random":
        return Dataset(vocabulary, seed, input_len, output_len)
    if path is None:
        raise DatasetError(f"--dataset {name} reads a file: give --dataset-path FILE")
    file = Path(path)
    if not file.is_file():
        raise DatasetError(f"--dataset-path: no such file: {path}")
    texts = _sharegpt(file, vocabulary) if name == "sharegpt" else _prompts(file)
    return Dataset(vocabulary, seed, input_len, output_len, texts, ignore_eos)


def _sharegpt(file: Path, vocabulary: Vocabulary) -> list[tuple[str, int | None]]:
    """The first human turn, and the length of the first answer (4 to 1024 tokens, the filter of vLLM and SGLang)."""
    try:
        talks = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise DatasetError(f"{file} is not JSON: {error}") from None
    found: list[tuple[str, int | None]] = []
    for talk in talks if isinstance(talks, list) else []:
        turns: list[Any] = []
        if isinstance(talk, dict):
            turns = talk.get("conversations") or talk.get("conversation") or []
        if len(turns) < 2 or not all(isinstance(t, dict) and t.get("value") for t in turns[:2]):
            continue
        ids = vocabulary.encode(turns[1]["value"])
        length = len(ids) if isinstance(ids, list) else len(ids.split())
        if 4 <= length <= 1024:
            found.append((turns[0]["value"], length))
    if not found:
        raise DatasetError(
            f"{file} has no conversation of two turns (a list of {{'conversations': [{{'value': ...}}]}})"
        )
    return found


def _prompts(file: Path) -> list[tuple[str, int | None]]:
    """One prompt a line: plain text, or JSON {"prompt": ..., "output_len": N} in a .jsonl file."""
    found: list[tuple[str, int | None]] = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            found.append((line, None))
            continue
        try:
            item = json.loads(line)
            found.append((str(item["prompt"]), int(item["output_len"]) if item.get("output_len") else None))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            raise DatasetError(
                f'{file}:{number}: expected {{"prompt": "...", "output_len": N}}, got {line[:80]!r}'
            ) from None
    if not found:
        raise DatasetError(f"{file} has no prompt")
    return found
