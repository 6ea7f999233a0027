"""Recognizes a recording window by window, as openai-whisper does.

A window begins where the last text that the model finished ends, by its timestamps, and continues the text before it. A
window of silence is skipped. A text that repeats itself or that the model finds unlikely is generated again at higher
temperatures.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastkernels.engine.inputs.audio import AudioReader, SourcePrompt
from fastkernels.engine.sampling.sampling_params import RequestOutputKind, SamplingParams
from fastkernels.engine.scheduling.request import RequestOutput
from fastkernels.engine.speech.files import AudioError, Recording
from fastkernels.engine.speech.vocabulary import TASKS, Vocabulary

FRAMES = 100  # a second, the unit of Segment.seek
SHORTEST = 0.1  # s of a recording, and of its last window
LEAST_ADVANCE = 1 / 30  # of a window: a model that repeats itself reaches the end all the same
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_COMPRESSED = 2.4  # ratio of a text that repeats itself
LEAST_LIKELY = -1.0  # mean log-probability of a token
SILENT = 0.6  # probability of no speech
FORGETS = 0.5  # temperature above which a text is no context of the next window


@dataclass
class Segment:
    """A text between two timestamps, in seconds of the recording. The fields are those of OpenAI's verbose_json.

    seek    start of its window, in hundredths of a second
    tokens  with the timestamps around the text
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass
class Transcript:
    """language: its code; duration: seconds of the recording that were read; tokens: of prompts, and generated ones"""

    language: str
    duration: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(s.text for s in self.segments).strip()


@dataclass(frozen=True)
class Options:
    """How to recognize.

    task      one of TASKS; 'translate': to English
    language  of the speech, as a code or an English name; None: the model detects it
    prompt    a text that would come before the recording: its style and words are continued
    sampling  temperature and so on. At temperature 0, a bad text is generated again at higher ones
    live      texts are shown before their window ends, so that none is generated again
    max_tokens  of the text of a window; None: half of the model's length
    """

    task: str = "transcribe"
    language: str | None = None
    prompt: str = ""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    live: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True)
class Job:
    """A request to the engine."""

    prompt: SourcePrompt
    params: SamplingParams


@dataclass(frozen=True)
class _Piece:
    """A text of a window; start and end in seconds from the window's start."""

    start: float
    end: float
    tokens: list[int]


class Recognizer:
    """The recognizer of an engine. length: tokens of a prompt and its output."""

    def __init__(self, vocabulary: Vocabulary, reader: AudioReader, tokenizer: Any, length: int):
        self.vocabulary, self.reader, self.tokenizer, self.length = vocabulary, reader, tokenizer, length
        self.rate = reader.rate

    def start(self, recording: Recording, options: Options) -> Recognition:
        """Raises ValueError for options that the model does not have."""
        return Recognition(self, recording, options)

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        if not text.strip():
            return []
        ids = self.tokenizer(" " + text.strip(), add_special_tokens=False).input_ids
        banned = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        return [i for i in ids if self.vocabulary.is_text(i) and i not in banned]

    def text(self, tokens: Sequence[int]) -> str:
        ids = [t for t in tokens if self.vocabulary.is_text(t)]
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Recognition:
    """The recognition of one recording: run the jobs of advance(), then those of advance(their outputs), and so on."""

    def __init__(self, of: Recognizer, recording: Recording, options: Options):
        vocabulary = of.vocabulary
        if options.task not in TASKS:
            raise ValueError(f"task {options.task!r} is not one of {', '.join(TASKS)}")
        if options.task not in vocabulary.tasks and (vocabulary.tasks or options.task != "transcribe"):
            raise ValueError(f"this model cannot {options.task}")
        if options.sampling.n != 1:
            raise ValueError(f"n must be 1 for a transcription, got {options.sampling.n}")
        language = "" if vocabulary.languages else "en"
        if options.language is not None:
            language = vocabulary.language(options.language)
        self.task, self.transcript = options.task, Transcript(language)
        self._of, self._recording, self._options = of, recording, options
        self._history, self._forgotten = of.text_ids(options.prompt), 0
        self._start = 0  # of the window, in samples
        self._silent = False  # the window, probably
        self._rounds = self._run()

    def advance(self, outputs: Sequence[RequestOutput] | None = None) -> list[Job] | None:
        """The next jobs, which run together; None at the end. outputs: final ones of the last jobs, in order.

        Reads the recording, which takes time. Raises ValueError for a recording that cannot be read.
        """
        try:
            return next(self._rounds) if outputs is None else self._rounds.send(outputs)
        except StopIteration:
            return None

    def text_so_far(self, tokens: Sequence[int] = ()) -> str:
        """The finished texts. tokens: that the running job has generated, if its text may be shown."""
        made = "".join(s.text for s in self.transcript.segments)
        if tokens and self._options.live and not self._silent:
            pieces, _ = self._split(tokens, 0.0)
            texts = (self._of.text(p.tokens) for p in pieces)
            made += "".join(t for t in texts if t.strip())
        return made.strip()

    def _run(self) -> Generator[list[Job], Sequence[RequestOutput], None]:
        of, recording, made = self._of, self._recording, self.transcript
        most, least = of.reader.most, round(SHORTEST * of.rate)
        while True:
            samples = recording.window(self._start, most)
            made.duration = recording.seconds
            if len(samples) < least:
                if self._start == 0:
                    raise AudioError(
                        f"the audio has {len(samples) / of.rate:g} s, and {SHORTEST:g} s are needed"
                    )
                return
            try:
                source = of.reader.source(samples)
            except ValueError as error:
                raise AudioError(str(error)) from error
            no_speech = yield from self._probe(source)
            output, temperature = yield from self._decode(source, no_speech)
            tokens, logprob, ratio = self._measures(output)
            advance = seconds = len(samples) / of.rate
            if not (no_speech > SILENT and logprob < LEAST_LIKELY):
                pieces, advance = self._split(tokens, seconds)
                self._keep(pieces, temperature, logprob, ratio, no_speech)
                if temperature > FORGETS:
                    self._forgotten = len(self._history)
            self._start += round(max(advance, most / of.rate * LEAST_ADVANCE) * of.rate)

    def _probe(self, source: Any) -> Generator[list[Job], Sequence[RequestOutput], float]:
        """The probability of no speech. Detects the language, unless it is known."""
        vocabulary, jobs = self._of.vocabulary, []
        greedy = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        if vocabulary.no_speech is not None:
            ids = [vocabulary.start, vocabulary.no_speech]
            jobs.append(Job(SourcePrompt(None, ids, source), replace(greedy, prompt_logprobs=0)))
        if not self.transcript.language:
            params = replace(greedy, allowed_token_ids=sorted(vocabulary.languages.values()))
            jobs.append(Job(SourcePrompt(None, [vocabulary.start], source), params))
        if not jobs:
            return 0.0
        outputs = yield jobs
        if not self.transcript.language:
            found = outputs[-1].outputs[0].token_ids[0]
            self.transcript.language = next(c for c, i in vocabulary.languages.items() if i == found)
        no_speech = 0.0
        if vocabulary.no_speech is not None:
            entries = outputs[0].prompt_logprobs
            assert entries is not None and entries[1] is not None
            no_speech = math.exp(entries[1][vocabulary.no_speech].logprob)
        self._silent = no_speech > SILENT
        return no_speech

    def _decode(
        self, source: Any, no_speech: float
    ) -> Generator[list[Job], Sequence[RequestOutput], tuple[RequestOutput, float]]:
        """The output of a window, and its temperature."""
        prompt, sampling = SourcePrompt(None, self._prompt(), source), self._options.sampling
        half = self._of.length // 2
        most = min(half, self._options.max_tokens or half)
        kind = RequestOutputKind.CUMULATIVE if self._options.live else RequestOutputKind.FINAL_ONLY
        params = replace(
            sampling, max_tokens=most, logprobs=0, detokenize=False, output_kind=kind,
            timestamps=self._of.vocabulary.rules,
        )  # fmt: skip
        again = sampling.greedy and not self._options.live
        for temperature in TEMPERATURES if again else (sampling.temperature,):
            (output,) = yield [Job(prompt, replace(params, temperature=temperature))]
            self.transcript.prompt_tokens += len(output.prompt_token_ids)
            self.transcript.generated_tokens += output.outputs[0].num_tokens
            _, logprob, ratio = self._measures(output)
            unlikely = logprob < LEAST_LIKELY
            if no_speech > SILENT if unlikely else ratio <= MOST_COMPRESSED:
                break
        return output, temperature

    def _prompt(self) -> list[int]:
        vocabulary, made = self._of.vocabulary, []
        before = self._history[self._forgotten :][-(self._of.length // 2 - 1) :]
        if before and vocabulary.previous is not None:
            made = [vocabulary.previous, *before]
        made.append(vocabulary.start)
        if vocabulary.languages:
            made.append(vocabulary.languages[self.transcript.language])
        if vocabulary.tasks:
            made.append(vocabulary.tasks[self._options.task])
        return made

    def _measures(self, output: RequestOutput) -> tuple[list[int], float, float]:
        """(tokens without the end, mean log-probability of a token, compression ratio of the text)."""
        out, end = output.outputs[0], self._of.vocabulary.end
        tokens = [t for t in out.token_ids if t != end]
        text = self._of.text(tokens).encode()
        ratio = len(text) / len(zlib.compress(text)) if text else 0.0
        return tokens, (out.cumulative_logprob or 0.0) / max(len(out.token_ids), 1), ratio

    def _split(self, tokens: Sequence[int], seconds: float) -> tuple[list[_Piece], float]:
        """(the texts of a window, the seconds after which the next window starts).

        A text without an end is left to the next window, unless it is the only one. Then it lasts for all `seconds`,
        and 0 leaves it out.
        """
        vocabulary, pieces = self._of.vocabulary, list[_Piece]()
        start, begin = 0.0, 0
        text = False
        for i, token in enumerate(tokens):
            if vocabulary.is_text(token):
                text = True
                continue
            time = vocabulary.seconds(token)
            if text:
                pieces.append(_Piece(start, time, list(tokens[begin : i + 1])))
                text = False
                begin = i + 1
            else:
                begin = i
            start = time
        closed = bool(pieces) and begin == len(tokens)
        if not pieces and text and seconds:
            pieces.append(_Piece(min(start, seconds), seconds, list(tokens[begin:])))
            closed = True
        return pieces, seconds if closed or not pieces else pieces[-1].end

    def _keep(
        self, pieces: Sequence[_Piece], temperature: float, logprob: float, ratio: float, no_speech: float
    ) -> None:
        of, made = self._of, self.transcript
        offset = self._start / of.rate
        for piece in pieces:
            text = of.text(piece.tokens)
            self._history += piece.tokens
            if not text.strip():
                continue
            start, end = (min(offset + t, made.duration) for t in (piece.start, piece.end))
            made.segments.append(
                Segment(
                    len(made.segments), round(offset * FRAMES), round(start, 2), round(end, 2), text, piece.tokens,
                    temperature, logprob, ratio, no_speech,
                )
            )  # fmt: skip
