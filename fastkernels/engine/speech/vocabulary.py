"""The tokens of a speech recognizer that are no text: tasks, languages and timestamps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels.engine.structured.timestamps import TimestampRules

TASKS = ("transcribe", "translate")
INITIAL = 1.0  # s: the first text of a window begins no later
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")  # the name has changed


@dataclass(frozen=True)
class Vocabulary:
    """Token ids by meaning.

    start      of every prompt; previous: of the text before it, None if there is no such token
    tasks      by name, and languages by code; empty for a model of English alone
    no_speech  its probability after `start` is that of silence; None if there is no such token
    names      of the languages, by code
    rules      of what is generated; precision: seconds between two timestamps
    """

    start: int
    previous: int | None
    tasks: dict[str, int]
    languages: dict[str, int]
    no_speech: int | None
    names: dict[str, str]
    rules: TimestampRules
    precision: float

    @property
    def end(self) -> int:
        return self.rules.end

    def is_text(self, token: int) -> bool:
        return token < self.rules.first and token != self.rules.end

    def seconds(self, token: int) -> float:
        """The time of a timestamp, from the start of its window."""
        return (token - self.rules.first) * self.precision

    def language(self, given: str) -> str:
        """The code of a language given by code or by its English name. Raises ValueError."""
        wanted = given.strip().lower()
        codes = {name: code for code, name in self.names.items()}
        code = codes.get(wanted, wanted)
        if not self.languages and code == "en":
            return code
        if code not in self.languages:
            known = ", ".join(sorted(self.languages)) or "en"
            raise ValueError(f"language {given[:64]!r} is not one of {known}")
        return code


def read(folder: Path, tokenizer: Any, vocab_size: int, window: float, states: int) -> Vocabulary:
    """The vocabulary of a checkpoint. Raises ValueError for a tokenizer that is not a recognizer's.

    window: seconds that the encoder reads; states: that it makes of them, with one timestamp each
    """
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    if tokenizer is None:
        raise ValueError("transcriptions need a tokenizer, which skip_tokenizer_init left out")
    known = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    config = _generation_config(folder)
    start, last_name = known.get("<|startoftranscript|>"), "<|notimestamps|>"
    end = known.get("<|endoftext|>", tokenizer.eos_token_id)
    if start is None or end is None or last_name not in known:
        raise ValueError(
            f"the tokenizer of {folder} has no tokens <|startoftranscript|>, <|endoftext|> and {last_name}: it is no"
            " recognizer's"
        )
    first, precision = known[last_name] + 1, window / states
    last = min(first + states, vocab_size - 1)
    initial = config.get("max_initial_timestamp_index")
    initial = round(INITIAL / precision) if initial is None else int(initial)
    special = {i for i in {*known.values(), *tokenizer.all_special_ids} if i < first and i != end}
    banned = special | {int(i) for i in config.get("suppress_tokens") or () if 0 <= int(i) < first} - {end}
    multilingual = config.get("is_multilingual", True)
    return Vocabulary(
        start=start,
        previous=known.get("<|startofprev|>"),
        tasks={t: known[f"<|{t}|>"] for t in TASKS if multilingual and f"<|{t}|>" in known},
        languages={c: known[f"<|{c}|>"] for c in LANGUAGES if multilingual and f"<|{c}|>" in known},
        no_speech=next((known[name] for name in _NO_SPEECH if name in known), None),
        names=dict(LANGUAGES),
        rules=TimestampRules(
            vocab_size, end, first, last, min(first + initial, last), tuple(sorted(banned))
        ),
        precision=precision,
    )  # fmt: skip


def _generation_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
