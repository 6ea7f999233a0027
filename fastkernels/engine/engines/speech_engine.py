"""The engine of speech models: texts in, sound out, as it is made.

A text is split into parts of some sentences. The language model, with its cache and batches, writes the tokens of all
parts; flow matching and the vocoder make sound of their chunks, of all requests together. Sound is sent in the order of
the text.
"""

from __future__ import annotations

import random
import reprlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastkernels.engine.engines.engine import Checkpoint
from fastkernels.engine.engines.llm_engine import LLMEngine
from fastkernels.engine.execution.runners.speak import Piece, SpeechInput, SpeechStep
from fastkernels.engine.inputs import tokenizer
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.repetition import RepetitionAware
from fastkernels.engine.sampling.sampling_params import RequestOutputKind, SamplingParams
from fastkernels.engine.scheduling.engine_core import StepResult
from fastkernels.engine.scheduling.request import Request, RequestOutput, Status
from fastkernels.engine.scheduling.speaking import Part, SpeechOutput, SpeechParams, SpeechRequest
from fastkernels.engine.speech import sentences
from fastkernels.engine.speech.text_tokens import SPECIAL_TOKENS
from fastkernels.engine.speech.voice_folder import Voices
from fastkernels.engine.speech.voices import Voice
from fastkernels.models.common.configs.speech_config import TEXT
from fastkernels.models.common.speech.flow import MOST

LEAST_RATIO, MOST_RATIO = 2, 20  # speech tokens of a token of the text
PAUSE = 0.0005  # seconds between looks at a stage that runs while the language model has nothing to do


class SpeechEngine(LLMEngine):
    """See Engine. Raises VoiceError for voices that cannot be used."""

    kind = "Speak"

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None):
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} is not supported for speech models, only 1"
            )
        if config.speculative_config is not None:
            raise ValueError("speculative_config is not supported for speech models")
        super().__init__(config, checkpoint)

    def _start(self) -> None:
        super()._start()
        source = self.folder / TEXT
        self.text_tokenizer = tokenizer.load(
            self.config.tokenizer or (source if source.is_dir() else self.folder)
        )
        self.text_tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
        model = self.runner.model
        self.rate: int = model.vocoder.config.rate
        self.rules = RepetitionAware(**self.hf_config.sampling)
        flow = model.flow.config
        self._chunk, self._lookahead = flow.chunk // flow.ratio, flow.lookahead
        self._draws = random.Random(self.config.seed)
        self._speeches: dict[str, SpeechRequest] = {}
        self._parts: dict[
            str, Part
        ] = {}  # whose sound is not complete, by id of the language model's request
        self._making: tuple[list[Part], SpeechStep] | None = None
        self._drops: list[str] = []
        self.voices = Voices(())
        if self.config.voices is not None:
            self.voices = Voices.read(Path(self.config.voices).expanduser(), self.folder)
            for voice in self.voices.values():
                self._check_voice(voice)

    def _check_voice(self, voice: Voice) -> None:
        voice.check(self.runner.model.flow.config, self.runner.model.speech_tokens)

    def make_request(  # type: ignore[override]
        self, request_id: str, prompt: Any, params: SpeechParams | None = None, priority: int = 0
    ) -> SpeechRequest:
        """See Engine. prompt: the text to speak; params: default SpeechParams()."""
        params = params or SpeechParams()
        if not isinstance(params, SpeechParams):
            raise ValueError(f"a speech model takes SpeechParams, got {type(params).__name__}")
        if not isinstance(prompt, str):
            raise ValueError(f"text must be a string, got {reprlib.repr(prompt)}")
        most = self.config.max_characters
        if len(prompt) > most:
            raise ValueError(f"text must have at most {most} characters, got {len(prompt)}")
        voice = self._voice(params.voice)
        for name, text in (("text", prompt), ("instructions", params.instructions or "")):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{name} is not valid Unicode text: {error}") from error
        parts = sentences.split(prompt, lambda text: len(self._ids(text)))
        if not parts:
            raise ValueError(f"text has nothing to speak: {reprlib.repr(prompt)}")
        if len(parts) > self.config.max_waiting:
            raise ValueError(f"text has {len(parts)} parts, at most {self.config.max_waiting} can wait")
        first = self._draws.getrandbits(63) if params.seed is None else params.seed
        groups = [
            self._group(f"{request_id}/{i}", part, voice, params, (first + i) % 2**63, priority)
            for i, part in enumerate(parts)
        ]
        made = SpeechRequest(request_id, prompt, voice, params, groups, self.rate)
        made.parts = [
            Part(made, group.request_id, self._chunk, self._lookahead, self.runner.model.silent_tokens)
            for group in groups
        ]
        return made

    def _group(
        self, key: str, text: str, voice: Voice, params: SpeechParams, seed: int, priority: int
    ) -> Any:
        """The language model's request for a part of a text."""
        read = bool(voice.text) and params.instructions is None
        ids = self._ids(text)
        model = self.runner.model
        before = self._ids(model.opening(params.instructions) + (voice.text if read else ""))
        prompt = model.prompt(before, ids, voice.tokens.tolist() if read else [])
        flow = model.flow.config
        room = min(
            self.max_model_len - len(prompt), (MOST - len(voice.frames)) // flow.ratio - self._lookahead
        )
        if room < 1:
            raise ValueError(
                f"the voice and a part of the text have {len(prompt)} tokens, and the maximum context length is"
                f" {self.max_model_len}, speech included"
            )
        most = min(MOST_RATIO * len(ids), room)
        return super().make_request(
            key, prompt,
            SamplingParams(
                max_tokens=most, min_tokens=min(LEAST_RATIO * len(ids), most), temperature=params.temperature,
                seed=seed, detokenize=False, repetition_aware=self.rules, output_kind=RequestOutputKind.DELTA,
            ),
            priority,
        )  # fmt: skip

    def _ids(self, text: str) -> list[int]:
        return tokenizer.encode(self.text_tokenizer, text, special=False)

    def _voice(self, given: str | Voice | None) -> Voice:
        if isinstance(given, Voice):
            self._check_voice(given)
            return given
        known = ", ".join(self.voices)
        if not known:
            raise ValueError(
                "voice is not possible: this engine has no voices; set `voices` (--voices) to a folder with some"
            )
        if given is None:
            if len(self.voices) > 1:
                raise ValueError(f"voice is required: it is one of {known}")
            return next(iter(self.voices.values()))
        if given not in self.voices:
            raise ValueError(f"voice {reprlib.repr(given)} is not one of {known}")
        return self.voices[given]

    def check_room(self, requests: Sequence[Any]) -> None:
        self.scheduler.check_room(sum(len(r.groups) for r in requests))

    def has_room(self, request: Any) -> bool:
        return self.scheduler.num_waiting + len(request.groups) <= self.config.max_waiting

    def add_request(  # type: ignore[override]
        self, request_id: str, prompt: Any, params: SpeechParams | None = None, priority: int = 0
    ) -> None:
        if request_id in self._speeches:
            raise ValueError(f"there is already a request {request_id!r}")
        if not isinstance(prompt, SpeechRequest):
            prompt = self.make_request(request_id, prompt, params, priority)
        self.check_room([prompt])
        for group, part in zip(prompt.groups, prompt.parts, strict=True):
            super().add_request(group.request_id, group)
            self._parts[group.request_id] = part
        self._speeches[request_id] = prompt

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        gone = [self._speeches.pop(i) for i in dict.fromkeys(ids) if i in self._speeches]
        keys = [part.key for speech in gone for part in speech.parts]
        super().abort_request(keys)
        for speech in gone:
            speech.status = Status.FINISHED
            for part in speech.parts:
                part.done = True
                self._parts.pop(part.key, None)
        self._drops += keys
        if not self._speeches and keys:  # no step would tell the runner
            drops, self._drops = self._drops, []
            self.executor.launch(SpeechInput((), drops))
        return []

    def abort_all(self) -> None:
        super().abort_all()
        self._drops += self._parts
        self._parts.clear()
        self._speeches.clear()
        self._making = None

    def has_unfinished_requests(self) -> bool:
        return self.core.busy or bool(self._speeches) or self._making is not None

    def step(self) -> list[SpeechOutput]:  # type: ignore[override]
        """Run a step of the language model, and start or collect a batch of sound. Returns the new sound."""
        busy = self.core.busy
        super().step()
        try:
            self._make_sound()
            found = self._collect()
            if not busy and not found and self._making is not None:
                time.sleep(PAUSE)
            return found
        except BaseException:
            self.abort_all()
            raise

    def _read(self, done: StepResult) -> list[RequestOutput]:
        """Add the new tokens to their parts."""
        now, end = time.monotonic(), self.runner.model.speech_tokens
        for _, request in done.news:
            self._count(request, now)
            part = self._parts[request.request_id]
            token = request.output_token_ids[-1]
            if token < end:
                part.add(token)
            part.ended = request.finish_reason is not None
        self._forget([r for _, r in done.news if r.finish_reason is not None])
        return []

    def _forget(self, sequences: list[Request]) -> None:
        """Remove finished sequences, which are parts of a request."""
        for sequence in sequences:
            group = self._group_of.pop(id(sequence), None)
            if group is not None:
                self.requests.pop(group.request_id, None)

    def _make_sound(self) -> None:
        """Start a batch of all parts that have a chunk, unless one is in flight."""
        if self._making is not None:
            return
        chosen: list[Part] = []
        pieces: list[Piece] = []
        for part in self._parts.values():
            ready = part.ready()
            if ready is None:
                continue
            end, final = ready
            if final and not part.tokens:  # the model said nothing
                part.done = True
                continue
            tokens = part.tokens if final else part.tokens[: end + self._lookahead]
            speed = part.speech.params.speed
            pieces.append(
                Piece(part.key, list(tokens), part.start, part.speech.voice, final, part.streaming, speed)
            )
            part.launched(end, final)
            part.done = final
            chosen.append(part)
        drops, self._drops = self._drops, []
        if pieces or drops:
            made = self.executor.launch(SpeechInput(pieces, drops))
            self._making = (chosen, made) if pieces else None

    def _collect(self) -> list[SpeechOutput]:
        """The sound of the batch in flight, if it has ended, and of what waited for it."""
        if self._making is not None and self._making[1].done():
            (chosen, step), self._making = self._making, None
            sounds = step.result()
            for part in chosen:
                part.in_flight = False
                part.sounds.append(sounds[part.key])
        found = []
        for speech in list(self._speeches.values()):
            output = self._news(speech)
            if output is not None:
                found.append(output)
        return found

    def _news(self, speech: SpeechRequest) -> SpeechOutput | None:
        """The sound of a request that is ready, in the order of its parts. None: there is none."""
        sounds: list[np.ndarray] = []
        for part in speech.parts:
            sounds += part.sounds
            part.sounds = []
            if not part.done or part.in_flight:
                break
            self._parts.pop(part.key, None)
        finished = all(p.done and not p.in_flight for p in speech.parts)
        if not finished and not any(map(len, sounds)):
            return None
        samples = np.concatenate([np.empty(0, np.float32), *sounds])
        now = time.monotonic()
        if len(samples) and speech.first_sound_time is None:
            speech.first_sound_time = now
            self.stats.ttfs.append(now - speech.arrival)
        speech.samples += len(samples)
        self.stats.sound += len(samples) / self.rate
        if finished:
            del self._speeches[speech.request_id]
            speech.status = Status.FINISHED
            self.stats.speeches.append(speech)
        return SpeechOutput(
            speech.request_id, samples, self.rate, finished, speech.num_prompt_tokens, speech.num_generated_tokens
        )  # fmt: skip
