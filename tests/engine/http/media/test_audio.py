"""/v1/audio/transcriptions and /v1/audio/translations, with OpenAI's client: formats, streams, limits, refusals."""

from __future__ import annotations

import io
import json
import re
import struct
import sys
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.live import live_server, wait_for
from support.speech import RATE, make_tiny_speech, recording

from fastkernels import LLM
from fastkernels.engine.engines import recognition
from fastkernels.engine.engines.recognition import Transcript
from fastkernels.engine.http.requests.config import ServerConfig

PATH = "/v1/audio/transcriptions"
SECONDS = 1.4


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return made.getvalue()


def loud(seconds: float) -> bytes:
    """A file of float32 samples, whose power overflows."""
    made = bytearray(wav(np.zeros(2 * round(seconds * RATE))))
    made[20:36] = struct.pack("<HHIIHH", 3, 1, RATE, 4 * RATE, 4, 32)
    made[44:] = np.full(round(seconds * RATE), 1e30, np.float32).tobytes()
    return bytes(made)


FILE = wav(recording(7, SECONDS))
OTHERS = [wav(recording(seed, 0.4)) for seed in range(20, 24)]


@pytest.fixture(scope="module", autouse=True)
def greedy() -> Iterator[None]:
    """A random model's texts are unlikely: never generate them again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognition, "TEMPERATURES", (0.0,))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_speech(tmp_path_factory.mktemp("audio") / "speech")


@pytest.fixture(scope="module")
def offline(folder: Path) -> dict[str, Transcript]:
    with LLM(str(folder), device="cpu", num_blocks=100, max_num_seqs=4) as llm:
        return {task: llm.transcribe(FILE, task=task)[0] for task in ("transcribe", "translate")}


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    config = ServerConfig("tiny", max_body_size=1 << 20)
    with live_server(folder, config, max_model_len=56, num_blocks=100) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def transcribe(client: Any, file: bytes = FILE, **more: Any) -> Any:
    return client.audio.transcriptions.create(model="tiny", file=("a.wav", file), **more)


def test_json_is_the_text_of_the_engine(client: Any, offline: dict[str, Transcript]) -> None:
    made = transcribe(client)
    assert made.text == offline["transcribe"].text and len(made.text) > 4
    assert (made.usage.type, made.usage.seconds) == ("duration", 2)
    assert transcribe(client, response_format="text") == made.text + "\n"
    translated = client.audio.translations.create(model="tiny", file=("a.wav", FILE))
    assert translated.text == offline["translate"].text != made.text


def test_verbose_json_has_segments(client: Any, offline: dict[str, Transcript]) -> None:
    want = offline["transcribe"]
    made = transcribe(client, response_format="verbose_json", timestamp_granularities=["segment"])
    names = {"en": "english", "de": "german", "fr": "french"}
    assert (made.language, made.duration, made.task) == (names[want.language], SECONDS, "transcribe")
    assert [(s.id, s.text, s.tokens, s.start, s.end, s.seek) for s in made.segments] == [
        (s.id, s.text, s.tokens, s.start, s.end, s.seek) for s in want.segments
    ]
    for got, expected in zip(made.segments, want.segments, strict=True):
        for name in ("avg_logprob", "compression_ratio", "no_speech_prob"):
            assert getattr(got, name) == pytest.approx(getattr(expected, name), abs=1e-3)
        assert got.temperature == 0.0


def test_subtitles_have_absolute_times(client: Any, offline: dict[str, Transcript]) -> None:
    segments = offline["transcribe"].segments
    srt = transcribe(client, response_format="srt").split("\n\n")
    assert len(srt) == len(segments) + 1 and srt[-1] == ""
    for i, (block, segment) in enumerate(zip(srt, segments, strict=False), 1):
        number, times, text = block.split("\n", 2)
        found = re.fullmatch(r"00:00:(\d\d),(\d{3}) --> 00:00:(\d\d),(\d{3})", times)
        assert int(number) == i and text == segment.text.strip() and found is not None
        a, b, c, d = map(int, found.groups())
        assert (a + b / 1000, c + d / 1000) == (segment.start, segment.end)
    vtt = transcribe(client, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:0") and vtt.count(" --> ") == len(segments) and "," not in vtt[:40]


def test_stream_has_the_same_text(client: Any, offline: dict[str, Transcript]) -> None:
    events = list(transcribe(client, stream=True))
    deltas = [e.delta for e in events if e.type == "transcript.text.delta"]
    assert [e.type for e in events] == ["transcript.text.delta"] * len(deltas) + ["transcript.text.done"]
    assert len(deltas) > 1 and "".join(deltas) == events[-1].text == offline["transcribe"].text
    usage, want = events[-1].usage, offline["transcribe"]
    assert (usage.input_tokens, usage.output_tokens) == (want.prompt_tokens, want.generated_tokens)
    assert usage.total_tokens == want.prompt_tokens + want.generated_tokens


@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_stream_of_vllms_client_has_choices(url: str, offline: dict[str, Transcript], task: str) -> None:
    """The fields that `vllm bench serve --backend openai-audio` sends, and how it reads the events."""
    fields = {"stream": "True", "stream_include_usage": "True", "stream_continuous_usage_stats": "True",
              "max_completion_tokens": "448"}  # fmt: skip
    path = PATH if task == "transcribe" else "/v1/audio/translations"
    answer = httpx.post(url + path, files={"file": FILE}, data=fields)
    chunks = [json.loads(m) for m in answer.text.replace("data: ", "").split("\n\n") if m and m != "[DONE]"]
    text, tokens = "", []
    for chunk in chunks:
        if choices := chunk.get("choices"):
            text += choices[0]["delta"].get("content") or ""
        elif usage := chunk.get("usage"):
            tokens.append((usage["prompt_tokens"], usage["completion_tokens"]))
    want = offline[task]
    assert text == want.text and tokens == [(want.prompt_tokens, want.generated_tokens)]
    kinds = {"transcribe": "transcription.chunk", "translate": "translation.chunk"}
    assert {c["object"] for c in chunks} == {kinds[task]} and len({c["id"] for c in chunks}) == 1
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    totals = [c["usage"]["total_tokens"] for c in chunks]
    assert totals == sorted(totals) and totals[-1] == want.prompt_tokens + want.generated_tokens


def test_stream_has_no_usage_unless_wanted(url: str) -> None:
    answer = httpx.post(url + PATH, files={"file": FILE}, data={"stream": "true"}).text
    assert '"choices":[]' not in answer and "prompt_tokens" not in answer and answer.endswith("[DONE]\n\n")


def test_tokens_of_a_window_are_limited(client: Any) -> None:
    def tokens(**more: Any) -> int:
        events = list(transcribe(client, OTHERS[0], stream=True, extra_body=more))
        return events[-1].usage.output_tokens

    assert tokens(max_completion_tokens=3) == 3 < tokens()


def test_clients_at_once_get_their_own_text(client: Any) -> None:
    alone = [transcribe(client, file).text for file in OTHERS]
    assert len(set(alone)) > 2
    with ThreadPoolExecutor(len(OTHERS)) as pool:
        assert list(pool.map(lambda file: transcribe(client, file).text, OTHERS)) == alone


def test_language_prompt_and_sampling_change_the_text(client: Any) -> None:
    def text(**more: Any) -> str:
        return transcribe(client, OTHERS[0], **more).text

    plain = text(language="en")
    assert text(language="English") == plain
    assert plain not in (text(language="de"), text(language="en", prompt="hello"))
    hot = [text(language="en", temperature=1.0, extra_body={"seed": seed}) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_left_stream_is_aborted(url: str) -> None:
    with httpx.stream(
        "POST", url + PATH, files={"file": wav(recording(1, 30))}, data={"stream": "true"}
    ) as answer:
        assert answer.status_code == 200 and next(answer.iter_bytes())
    wait_for(
        lambda: (
            'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in httpx.get(url + "/metrics").text
        )
    )


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found.group(1))


def test_metrics_count_requests_and_seconds(client: Any, url: str) -> None:
    labels = 'engine="0",model_name="tiny"'
    names = [
        f'fastkernels:audio_requests_total{{{labels},task="{task}"}}' for task in ("transcribe", "translate")
    ]
    seconds = f"fastkernels:audio_seconds_total{{{labels}}}"
    before = [metric(url, name) for name in (*names, seconds)]
    transcribe(client, OTHERS[1])
    client.audio.translations.create(model="tiny", file=("a.wav", OTHERS[0]))
    after = [metric(url, name) for name in (*names, seconds)]
    assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([1, 1, 0.8])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"model": "other"}, "model", "the model 'other' does not exist"),
        ({"language": "xx"}, "language", "language 'xx' is not one of de, en, fr"),
        ({"response_format": "xml"}, "response_format", 'got "xml"'),
        ({"temperature": "warm"}, "temperature", 'got "warm"'),
        ({"temperature": "-1"}, "temperature", 'got "-1"'),
        ({"top_p": "2"}, "top_p", "top_p must be in (0, 1], got 2.0"),
        ({"timestamp_granularities[]": ["word"], "response_format": "verbose_json"}, "timestamp_granularities",
         "times of words are not supported; use segment"),
        ({"timestamp_granularities[]": ["segment"]}, "timestamp_granularities", "need response_format verbose_json"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "srt cannot be streamed: use json or text"),
        ({"include[]": ["logprobs"]}, "include", "include is not supported"),
        ({"stream_include_usage": "1"}, "stream_include_usage", "may only be set with stream=true"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens", "max_completion_tokens"),
        ({"n": "2"}, "n", "n is not supported: it may be 1, got \"2\""),
        ({"surprise": "1"}, "surprise", 'unknown field "surprise"'),
    ],
)  # fmt: skip
def test_bad_fields_are_refused(url: str, fields: dict[str, Any], param: str, message: str) -> None:
    answer = httpx.post(url + PATH, files={"file": ("a.wav", FILE)}, data=fields)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"noise" * 100, "the file is damaged, or no audio file: use flac, m4a"),
        (wav(recording(0, 0.5), 1), "a sampling rate of 1 Hz, and 4000 to 384000 are possible"),
        (wav(recording(0, 0)), "the audio has 0 s, and 0.1 s are needed"),
        (wav(recording(0, 0.05)), "the audio has 0.05 s, and 0.1 s are needed"),
        (
            loud(0.5),
            "the audio is too loud for the feature extractor: its samples reach 1e+30, and 1 is full scale",
        ),
    ],
)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_bad_files_are_refused(url: str, file: bytes, message: str, stream: str) -> None:
    answer = httpx.post(url + PATH, files={"file": ("a.wav", file)}, data={"stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["param"] == "file"


def test_later_window_is_refused(url: str) -> None:
    file = io.BytesIO(loud(3.0))
    file.seek(44)
    file.write(recording(3, 1.5).tobytes())
    answer = httpx.post(url + PATH, files={"file": ("a.wav", file.getvalue())}, timeout=60)
    assert answer.status_code == 400 and "too loud" in answer.json()["error"]["message"]
    with httpx.stream(
        "POST", url + PATH, files={"file": file.getvalue()}, data={"stream": "true"}
    ) as streamed:
        assert "too loud" in streamed.read().decode()


def test_forms_without_a_file_are_refused(url: str) -> None:
    for answer in (
        httpx.post(url + PATH, files={"model": (None, "tiny")}),
        httpx.post(url + PATH, files={"file": (None, "text")}),
    ):
        assert answer.status_code == 400 and "file is required" in answer.json()["error"]["message"]
    both = httpx.post(url + PATH, files=[("file", FILE), ("file", FILE)])
    assert both.status_code == 400 and "Maximum number of files is 1" in both.json()["error"]["message"]
    wrong = httpx.post(url + PATH, json={"model": "tiny"})
    assert wrong.status_code == 415 and "must be multipart/form-data" in wrong.json()["error"]["message"]
    assert httpx.post(url + PATH).status_code == 415
    torn = httpx.post(
        url + PATH, content=b"--x\r\nnothing", headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert torn.status_code == 400
    large = httpx.post(url + PATH, files={"file": bytes(2 << 20)})
    assert large.status_code == 413 and "the limit is 1048576" in large.json()["error"]["message"]


def test_missing_package_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    answer = httpx.post(url + PATH, files={"file": ("a.wav", FILE)})
    assert answer.status_code == 501
    assert "the package av: pip install 'fastkernels[audio]'" in answer.json()["error"]["message"]


def test_text_model_takes_no_audio(tiny: Path) -> None:
    with live_server(tiny) as (url, _):
        for path in (PATH, "/v1/audio/translations"):
            answer = httpx.post(url + path, files={"file": ("a.wav", FILE)})
            assert answer.status_code == 400 and "takes text only" in answer.json()["error"]["message"]
