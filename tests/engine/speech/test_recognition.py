"""Transcriptions: windows, timestamps, language and temperatures, equal to transformers on a tiny Whisper."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.speech import (
    END,
    FIRST,
    LANGUAGES,
    NO_SPEECH,
    PREVIOUS,
    RATE,
    SPEECH,
    START,
    SUPPRESSED,
    TRANSCRIBE,
    TRANSLATE,
    VOCAB,
    SpeechOracle,
    make_tiny_speech,
    recording,
)
from support.whisper_base import whisper_base_path

from fastkernels import LLM, SamplingParams
from fastkernels.engine.engines import recognition
from fastkernels.engine.engines.recognition import Job, Options, Recognition, Recognizer, Transcript
from fastkernels.engine.scheduling.request import CompletionOutput, Logprob, RequestOutput
from fastkernels.engine.speech import files, vocabulary
from fastkernels.engine.structured.timestamps import TimestampRules

SENTENCES = (
    "the weather is nice today so we went for a walk in the park",
    "she sells fresh bread and butter at the market every morning",
    "my brother plays the piano and my sister plays the violin",
)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> SpeechOracle:
    return SpeechOracle(make_tiny_speech(tmp_path_factory.mktemp("speech") / "speech"))


@pytest.fixture(scope="module")
def llm(oracle: SpeechOracle) -> Iterator[LLM]:
    with LLM(str(oracle.folder), device="cpu", num_blocks=100, max_num_seqs=4, async_scheduling=True) as made:
        yield made


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model's texts are unlikely: never generate them again."""
    monkeypatch.setattr(recognition, "TEMPERATURES", (0.0,))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs of all recognitions, in order."""
    found: list[Job] = []
    advance = Recognition.advance

    def noted(self: Recognition, outputs: Any = None) -> list[Job] | None:
        made = advance(self, outputs)
        found.extend(made or [])
        return made

    monkeypatch.setattr(Recognition, "advance", noted)
    return found


def test_timestamp_rules_equal_transformers(oracle: SpeechOracle, llm: LLM) -> None:
    """In one batch with a request without rules."""
    rules = llm.llm_engine.recognizer.vocabulary.rules
    samples = [recording(seed, 0.7) for seed in range(3)]
    prompts = [[START, LANGUAGES["en"], TRANSCRIBE], [START, LANGUAGES["de"], TRANSLATE], [START]]
    params = SamplingParams(temperature=0.0, max_tokens=30, timestamps=rules, detokenize=False)
    free = SamplingParams(temperature=0.0, max_tokens=30, detokenize=False, ignore_eos=True)
    given: list[Any] = [
        {"prompt_token_ids": p, "multi_modal_data": {"audio": s}}
        for p, s in zip(prompts, samples, strict=True)
    ]
    outputs = llm.generate([*given, given[0]], [params] * 3 + [free], use_tqdm=False)
    made = [list(o.outputs[0].token_ids) for o in outputs]
    want = [oracle.greedy(p, s, 30) for p, s in zip(prompts, samples, strict=True)]
    assert made[:3] == want and made[3] != made[0]
    assert len({tuple(tokens) for tokens in want}) == 3 and not any(set(t) & set(SUPPRESSED) for t in want)


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_first_window_equals_transformers(oracle: SpeechOracle, llm: LLM, jobs: list[Job], task: str) -> None:
    samples = recording(1, 0.9)
    logits = oracle.logits([START], samples)
    detected = max(LANGUAGES, key=lambda code: logits[LANGUAGES[code]])
    prompt = [START, LANGUAGES[detected], TRANSCRIBE if task == "transcribe" else TRANSLATE]
    want = oracle.greedy(prompt, samples, 28)
    (made,) = llm.transcribe(samples, task=task)
    assert made.language == detected and made.duration == 0.9
    assert [job.prompt.token_ids for job in jobs[:3]] == [[START, NO_SPEECH], [START], prompt]
    first = [s for s in made.segments if s.seek == 0]
    assert first and all(" ".join(map(str, s.tokens)) in " ".join(map(str, want)) for s in first)
    silence = float(logits.softmax(-1)[NO_SPEECH])
    assert first[0].no_speech_prob == pytest.approx(silence, rel=1e-3)


@pytest.mark.usefixtures("greedy")
def test_long_audio_is_recognized_in_windows(llm: LLM, jobs: list[Job]) -> None:
    """Times are absolute, and a batch of recordings gives what each gives alone."""
    given = [recording(seed, seconds) for seed, seconds in ((3, 2.4), (4, 0.5), (5, 1.2))]
    alone = [llm.transcribe(one, language="English", prompt="ab")[0] for one in given]
    windows = [j for j in jobs if j.params.timestamps is not None]
    assert len(windows) > 4 and windows[0].prompt.token_ids[:4] == [PREVIOUS, *_ids(llm, " ab")]
    together = llm.transcribe(given, language="en", prompt="ab")
    assert [segments(made) for made in together] == [segments(made) for made in alone]
    for samples, made in zip(given, alone, strict=True):
        seconds = len(samples) / RATE
        assert made.duration == seconds and made.language == "en" and made.text
        assert made.text == "".join(s.text for s in made.segments).strip()
        assert [s.id for s in made.segments] == list(range(len(made.segments)))
        starts = [s.start for s in made.segments]
        assert starts == sorted(starts) and starts[0] >= 0 and made.segments[-1].end <= seconds
        assert all(s.start <= s.end and s.seek <= round(s.start * 100) for s in made.segments)
    assert alone[0].segments[-1].start > 1.2


def _ids(llm: LLM, text: str) -> list[int]:
    return list(llm.get_tokenizer()(text, add_special_tokens=False).input_ids)


def output(tokens: Sequence[int], logprob: float = -0.1, no_speech: float | None = None) -> RequestOutput:
    """A final output with these tokens, each of this log-probability."""
    out = CompletionOutput(0, "", list(tokens), None, logprob * len(tokens), "stop", None, len(tokens))
    prompt = None if no_speech is None else [None, {NO_SPEECH: Logprob(math.log(no_speech))}]
    return RequestOutput("0", None, [START, START], [out], True, prompt)


def text(*letters: str) -> list[int]:
    """Tokens of a text, in which a number is a time in hundredths of a second."""
    made: list[int] = []
    for part in letters:
        made += [FIRST + int(part) // 2] if part.isdigit() else [sorted_alphabet().index(c) for c in part]
    return made


def sorted_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def begun(llm: LLM, seconds: float, **options: Any) -> Recognition:
    recognizer = llm.llm_engine.recognizer
    made = files.recording(recording(0, seconds), RATE)
    found = recognizer.start(made, Options(language="en", **options))
    assert found.advance() is not None
    return found


def segments(made: Transcript) -> list[tuple[str, float, float]]:
    return [(s.text, s.start, s.end) for s in made.segments]


@pytest.mark.parametrize(
    ("tokens", "texts", "start"),
    [
        (("0", "aa", "40"), [("aa", 0, 0.4)], 1.0),
        (("0", "aa", "40", "40", "bb", "90"), [("aa", 0, 0.4), ("bb", 0.4, 0.9)], 1.0),
        (("0", "aa", "40", "60", "bb"), [("aa", 0, 0.4)], 0.4),  # unfinished: left to the next window
        (("0", "aa", "40", "50"), [("aa", 0, 0.4)], 0.4),
        (("20", "aa"), [("aa", 0.2, 1.0)], 1.0),
        (("0", "aa", "2", "2", "bb"), [("aa", 0, 0.02)], 1 / 30),  # no slower than that
        (("0",), [], 1.0),
    ],
)
def test_next_window_begins_after_the_last_text(
    llm: LLM, tokens: Sequence[str], texts: list[Any], start: float
) -> None:
    run = begun(llm, 3.0)
    run.advance([output([START], no_speech=0.1)])
    again = run.advance([output([*text(*tokens), END])])
    assert segments(run.transcript) == texts and again is not None
    assert run._start == round(start * RATE)
    (window,) = run.advance([output([START], no_speech=0.1)]) or []
    history = [t for s in run.transcript.segments for t in s.tokens]
    assert window.prompt.token_ids == [
        *([PREVIOUS, *history] if history else []), START, LANGUAGES["en"], TRANSCRIBE
    ]  # fmt: skip


def test_silence_is_skipped(llm: LLM) -> None:
    run = begun(llm, 1.5)
    run.advance([output([START], no_speech=0.9)])
    assert (
        run.advance([output(text("0", "aa", "40"), logprob=-2)]) is not None and not run.transcript.segments
    )
    run.advance([output([START], no_speech=0.9)])  # a likely text is none
    assert run.advance([output(text("0", "bb", "40"), logprob=-0.5)]) is None
    assert segments(run.transcript) == [("bb", 1.0, 1.4)]


def test_bad_texts_are_generated_again(llm: LLM) -> None:
    """At higher temperatures, the last of which is kept, and is no context."""
    run = begun(llm, 2.0, prompt="zz")
    found = run.advance([output([START], no_speech=0.1)])
    loop = output(text("0", "ab" * 60, "40"))
    for temperature, bad in ((0.0, loop), (0.2, output(text("0", "aa", "40"), logprob=-1.5)), (0.4, loop)):
        assert found is not None and found[0].params.temperature == temperature
        found = run.advance([bad])
    assert found is not None and found[0].params.temperature == 0.6
    run.advance([output(text("0", "cc", "40"))])
    assert [(s.text, s.temperature) for s in run.transcript.segments] == [("cc", 0.6)]
    (window,) = run.advance([output([START], no_speech=0.1)]) or []
    assert window.prompt.token_ids == [START, LANGUAGES["en"], TRANSCRIBE]


def test_fixed_temperature_and_streams_generate_once(llm: LLM) -> None:
    for options in ({"sampling": SamplingParams(temperature=0.3, top_p=0.9, seed=4)}, {"live": True}):
        run = begun(llm, 0.5, **options)
        (job,) = run.advance([output([START], no_speech=0.1)]) or []
        wanted = options.get("sampling", GREEDY)
        assert (job.params.temperature, job.params.top_p) == (wanted.temperature, wanted.top_p)
        assert run.advance([output(text("0", "ab" * 60, "40"), logprob=-3)]) is None
        assert len(run.transcript.segments) == 1


def test_live_text_is_that_of_finished_parts(llm: LLM) -> None:
    run = begun(llm, 0.5, live=True)
    run.advance([output([START], no_speech=0.1)])
    shown = [
        run.text_so_far(text(*p)) for p in (("0", "aa"), ("0", "aa", "40"), ("0", "aa", "40", "40", "b"))
    ]
    assert shown == ["", "aa", "aa"]
    silent = begun(llm, 0.5, live=True)
    silent.advance([output([START], no_speech=0.9)])
    assert silent.text_so_far(text("0", "aa", "40")) == ""


def test_rules_allow_what_whisper_generates() -> None:
    rules = TimestampRules(VOCAB, END, FIRST, VOCAB - 1, FIRST + 3, (5,))

    def allowed(*tokens: int) -> set[int]:
        bits = np.unpackbits(rules.words(tokens).view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    letters = set(range(FIRST)) - {5}
    assert allowed() == set(range(FIRST, FIRST + 4))
    assert allowed(FIRST) == letters
    assert allowed(FIRST + 2, 7) == letters | set(range(FIRST + 3, VOCAB))
    assert allowed(FIRST + 2, 7, FIRST + 9) == {END} | set(range(FIRST + 9, VOCAB))
    assert allowed(FIRST + 2, 7, FIRST + 9, FIRST + 11) == letters
    assert allowed(FIRST + 2, 7, VOCAB - 1, VOCAB - 1, 8) == letters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "xx"}, "language 'xx' is not one of de, en, fr"),
        ({"task": "sing"}, "task 'sing' is not one of transcribe, translate"),
        ({"sampling_params": SamplingParams(n=2)}, "n must be 1 for a transcription, got 2"),
    ],
)
def test_unsupported_options_are_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.transcribe(recording(0, 0.5), **options)


def test_model_of_english_alone_has_no_tasks(llm: LLM, oracle: SpeechOracle, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"is_multilingual": false}')
    recognizer = llm.llm_engine.recognizer
    found = vocabulary.read(tmp_path, llm.get_tokenizer(), VOCAB, 1.0, 50)
    assert found.languages == found.tasks == {} and found.language("english") == "en"
    english = Recognizer(found, recognizer.reader, llm.get_tokenizer(), 56)
    run = english.start(files.recording(recording(0, 0.5), RATE), Options())
    assert [job.prompt.token_ids for job in run.advance() or []] == [[START, NO_SPEECH]]
    (job,) = run.advance([output([START], no_speech=0.1)]) or []
    assert job.prompt.token_ids == [START] and run.transcript.language == "en"
    with pytest.raises(ValueError, match="this model cannot translate"):
        english.start(files.recording(recording(0, 0.5), RATE), Options("translate"))
    with pytest.raises(ValueError, match="language 'de' is not one of en"):
        found.language("de")


def test_tokenizer_without_the_tokens_is_refused(tmp_path: Path) -> None:
    from support.tiny import byte_tokenizer

    with pytest.raises(ValueError, match=r"has no tokens <\|startoftranscript\|>, <\|endoftext\|>"):
        vocabulary.read(tmp_path, byte_tokenizer(), VOCAB, 1.0, 50)
    with pytest.raises(ValueError, match="transcriptions need a tokenizer"):
        vocabulary.read(tmp_path, None, VOCAB, 1.0, 50)


def test_text_model_takes_no_audio(tiny: Path) -> None:
    with (
        LLM(str(tiny), device="cpu", num_blocks=20) as text_model,
        pytest.raises(ValueError, match="takes text only"),
    ):
        text_model.transcribe(recording(0, 0.5))


@pytest.mark.slow
def test_whisper_base_transcribes_sentences() -> None:
    """Three synthesized sentences, also in a file of 39 s, of which the times are right."""
    llm = LLM(str(whisper_base_path()), device="cpu", dtype="float32", num_blocks=100, max_num_seqs=2)
    one = files.recording(SPEECH, RATE).window(0, 30 * RATE)
    (made,) = llm.transcribe(SPEECH)
    assert made.language == "en" and plain(made.text) == " ".join(SENTENCES)
    (long,) = llm.transcribe(np.concatenate([one] * 3), language="en")
    assert long.duration > 38 and plain(long.text) == " ".join(SENTENCES * 3)
    assert len({s.seek for s in long.segments}) == 2
    for sentence, seconds in ((0, 13.0), (0, 26.0), (2, 34.2)):
        words = SENTENCES[sentence].split()
        found = [s.start for s in long.segments if plain(s.text).startswith(" ".join(words[:2]))]
        assert any(abs(start - seconds) < 1.2 for start in found), (sentence, seconds, found)


def plain(text: str) -> str:
    return " ".join(re.findall("[a-z']+", text.lower()))
