"""Requests for speech, their parts on the way from text to sound, and their results."""

from __future__ import annotations

import reprlib
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastkernels.engine.scheduling.outputs import RequestGroup
from fastkernels.engine.scheduling.request import Status
from fastkernels.engine.speech.voices import Voice

SLOWEST, FASTEST = 0.25, 4.0  # as OpenAI's API has it
MOST_SILENT = 5  # tokens of silence in a row; more are left out
MOST_INSTRUCTIONS = 1024  # characters


@dataclass(frozen=True)
class SpeechParams:
    """Parameters of a request for speech.

    voice         a name of the engine's voices, or a Voice; None: the engine's only one
    speed         0.25 to 4: of the speech. Other speeds than 1 are possible for whole parts of a text alone
    stream        make sound of the first tokens of a part while the others are generated. Otherwise sound is made of
                  each part of a text as a whole, which is slightly better and takes less time in total
    instructions  how to speak, such as "Speak as quietly as possible."; the voice's text is not read then
    temperature   of the draw of tokens, 0 to 2; 0: the most likely one
    seed          of the draw; None: drawn by the engine
    """

    voice: str | Voice | None = None
    speed: float = 1.0
    stream: bool = False
    instructions: str | None = None
    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _number("speed", self.speed, SLOWEST, FASTEST)
        _number("temperature", self.temperature, 0.0, 2.0)
        if self.seed is not None and (type(self.seed) is not int or not -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed must be a 64-bit signed integer, got {reprlib.repr(self.seed)}")
        if self.instructions is not None:
            if not isinstance(self.instructions, str):
                raise ValueError(f"instructions must be text, got {reprlib.repr(self.instructions)}")
            if len(self.instructions) > MOST_INSTRUCTIONS:
                raise ValueError(
                    f"instructions must have at most {MOST_INSTRUCTIONS} characters, got {len(self.instructions)}"
                )
        if not isinstance(self.voice, (str, Voice, type(None))):
            raise ValueError(f"voice must be a name or a Voice, got {reprlib.repr(self.voice)}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {reprlib.repr(value)}")


@dataclass(eq=False)
class SpeechRequest:
    """A text to speak. A lower priority number goes first.

    groups    of the language model, one for each part of the text, in order
    parts     the same on their way to sound
    samples   made so far
    """

    request_id: str
    text: str
    voice: Voice
    params: SpeechParams
    groups: list[RequestGroup]
    rate: int
    parts: list[Part] = field(default_factory=list)
    samples: int = 0
    arrival: float = field(default_factory=time.monotonic)
    first_sound_time: float | None = None
    status: Status = Status.WAITING
    streams_deltas = True

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(group.prompt_token_ids) for group in self.groups)

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(s.output_token_ids) for group in self.groups for s in group.sequences)

    @property
    def scheduled_time(self) -> float | None:
        """When the first of its parts was scheduled."""
        times = [t for g in self.groups for s in g.sequences if (t := s.scheduled_time) is not None]
        return min(times, default=None)


@dataclass(eq=False)
class Part:
    """A part of a text whose tokens become sound.

    chunk, lookahead  tokens of a chunk, and those behind it that its frames depend on
    most       tokens of the largest chunk: chunks double until then, since each is computed behind all before it
    tokens     generated so far, without the end and long silence
    ended      no further tokens come
    start      tokens that have become sound
    in_flight  tokens are becoming sound
    done       all of it has become sound
    sounds     samples to send once the parts before it are sent
    """

    speech: SpeechRequest
    key: str
    chunk: int
    lookahead: int
    silent: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    start: int = 0
    in_flight: bool = False
    done: bool = False
    sounds: list[np.ndarray] = field(default_factory=list)
    _silent_before: int = 0

    def __post_init__(self) -> None:
        self.hop, self.most = self.chunk, 4 * self.chunk

    def add(self, token: int) -> None:
        """Add a generated token."""
        self._silent_before = self._silent_before + 1 if token in self.silent else 0
        if self._silent_before <= MOST_SILENT:
            self.tokens.append(token)

    @property
    def streaming(self) -> bool:
        return self.speech.params.stream and self.speech.params.speed == 1.0

    def ready(self) -> tuple[int, bool] | None:
        """(number of tokens that end the next chunk, whether it is the last one); None: there is none yet.

        With the voice's tokens, the first chunk ends at a multiple of `chunk`, as the flow's own chunks do.
        """
        if self.in_flight or self.done:
            return None
        if self.streaming:
            hop = self.hop
            if self.start == 0:
                hop += -len(self.speech.voice.tokens) % self.chunk
            if len(self.tokens) - self.start >= hop + self.lookahead:
                return self.start + hop, False
        return (len(self.tokens), True) if self.ended else None

    def launched(self, end: int, final: bool) -> None:
        """Go on behind a chunk."""
        self.in_flight, self.start = True, end
        if not final:
            self.hop = min(self.most, 2 * self.hop)


@dataclass
class SpeechOutput:
    """New sound of a request: samples [n] float32 of one channel at `rate` Hz.

    num_prompt_tokens, num_generated_tokens  of the language model so far
    """

    request_id: str
    samples: np.ndarray
    rate: int
    finished: bool
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    def joined(self, later: SpeechOutput) -> SpeechOutput:
        """This output and the one that follows it."""
        samples = np.concatenate([self.samples, later.samples])
        return SpeechOutput(
            self.request_id, samples, self.rate, later.finished, later.num_prompt_tokens,
            later.num_generated_tokens,
        )  # fmt: skip

    def file(self, kind: str = "wav") -> bytes:
        """A file of this format; see engine/speech/encoding.py. Raises ValueError, and MissingPackage."""
        from fastkernels.engine.speech.encoding import Encoder

        encoder = Encoder(kind, self.rate, len(self.samples))
        return encoder.encode(self.samples) + encoder.close()
