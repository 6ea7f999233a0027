"""/v1/audio/speech: OpenAI's SDK, formats, streams, voices, metrics, clients that leave, and refused bodies."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from support.cosyvoice import TEXT, make_tiny_cosyvoice
from support.live import live_server, wait_for

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.scheduling.speaking import SpeechParams

PATH = "/v1/audio/speech"
BODY: dict[str, Any] = {
    "model": "voice", "input": TEXT, "voice": "anna", "response_format": "pcm", "temperature": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_cosyvoice(tmp_path_factory.mktemp("speech") / "cosyvoice", "safetensors")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, Any]]:
    with live_server(folder, ServerConfig("voice"), voices=str(folder / "voices")) as found:
        yield found


@pytest.fixture(scope="module")
def want(folder: Path) -> np.ndarray:
    with LLM(str(folder), device="cpu", num_blocks=200, voices=str(folder / "voices")) as llm:
        return llm.speak(TEXT, SpeechParams("anna", temperature=0), use_tqdm=False)[0].samples


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url + PATH, json={**BODY, **body}, timeout=60)


def of_pcm(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i2").astype(np.float32) / 32767


def test_openai_sdk_gets_the_sound_of_the_engine(served: Any, want: np.ndarray) -> None:
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="-", max_retries=0) as client:
        whole = client.audio.speech.create(
            model="voice", input=TEXT, voice="anna", response_format="pcm", extra_body={"temperature": 0}
        ).content
        assert np.abs(of_pcm(whole) - want).max() < 1e-3
        with client.audio.speech.with_streaming_response.create(
            model="voice", input=TEXT, voice="anna", response_format="wav",
            extra_body={"temperature": 0, "stream": True},
        ) as answer:  # fmt: skip
            parts = list(answer.iter_bytes())
        assert answer.headers["content-type"] == "audio/wav"
    file = b"".join(parts)
    assert file[:4] == b"RIFF" and len(of_pcm(file[44:])) == len(want)


@pytest.mark.parametrize("kind", ["mp3", "opus", "aac", "flac", "wav"])
def test_files_hold_the_sound(served: Any, want: np.ndarray, kind: str) -> None:
    answer = post(served[0], response_format=kind)
    assert answer.status_code == 200, answer.text
    with av.open(io.BytesIO(answer.content)) as file:
        resampler = av.AudioResampler("flt", "mono", 24_000)
        made = [r.to_ndarray()[0] for f in [*file.decode(audio=0), None] for r in resampler.resample(f)]
    found = np.concatenate(made)
    assert len(want) <= len(found) + 100 and len(found) < len(want) + 4000
    spectra = [np.abs(np.fft.rfft(x[:20_000])) for x in (found, want)]
    assert np.corrcoef(*(s[:2000].reshape(-1, 20).mean(1) for s in spectra))[0, 1] > 0.9


def test_events_have_the_bytes_and_the_usage(served: Any, want: np.ndarray) -> None:
    answer = post(served[0], stream_format="sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
    *parts, last = events
    assert len(parts) == 3 and {p["type"] for p in parts} == {"speech.audio.delta"}
    assert len(of_pcm(b"".join(base64.b64decode(p["audio"]) for p in parts))) == len(want)
    usage = last["usage"]
    assert last["type"] == "speech.audio.done" and usage["output_tokens"] == len(want) // 960 + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_voices_are_listed_and_differ(served: Any) -> None:
    listed = httpx.get(f"{served[0]}/v1/audio/voices").json()
    assert [v["id"] for v in listed["data"]] == ["anna", "ben"]
    anna, ben, same = (post(served[0], voice=v).content for v in ("anna", "ben", {"id": "anna"}))
    assert anna == same != ben


def test_seed_repeats_a_draw(served: Any) -> None:
    one, two, other = (post(served[0], temperature=1, seed=s).content for s in (5, 5, 6))
    assert one == two != other


def test_metrics_count_sound(served: Any, want: np.ndarray) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{served[0]}/metrics").text.splitlines()
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line[0] != "#"}

    before = read()
    post(served[0])
    after = read()
    name = "fastkernels:speech_seconds_total"
    assert after[name] - before[name] == pytest.approx(len(want) / 24_000)
    assert after["fastkernels:time_to_first_sound_seconds_count"] == (
        before["fastkernels:time_to_first_sound_seconds_count"] + 1
    )


def test_client_that_leaves_ends_its_request(served: Any) -> None:
    url, server = served
    text = "One more of these long texts. " * 40
    with httpx.stream("POST", url + PATH, json={**BODY, "input": text, "stream": True}, timeout=60) as answer:
        next(answer.iter_raw())
    engine = server.llm.engine
    wait_for(lambda: not engine.has_unfinished_requests() and not engine.runner._spoken)
    assert not engine._parts and not engine.scheduler.running


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "has nothing to speak: ''"),
        ({"input": " ... !"}, "input", "has nothing to speak"),
        ({"input": "a" * 100_000}, "input", "must have at most 4096 characters, got 100000"),
        ({"voice": "zoe"}, "voice", "'zoe' is not one of anna, ben"),
        ({"voice": None}, "voice", "is required: it is one of anna, ben"),
        ({"response_format": "midi"}, "response_format", "'mp3', 'opus', 'aac', 'flac', 'wav' or 'pcm'"),
        ({"speed": 0}, "speed", "0.25"),
        ({"speed": 99}, "speed", "4"),
        ({"instructions": "x" * 2000}, "instructions", "at most 1024 characters, got 2000"),
        ({"stream_format": "video"}, "stream_format", "'audio' or 'sse'"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_unusable_bodies_are_refused(served: Any, body: dict[str, Any], param: str, words: str) -> None:
    answer = post(served[0], **body)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_completions_are_not_served(served: Any) -> None:
    answer = httpx.post(f"{served[0]}/v1/completions", json={"model": "voice", "prompt": "a"})
    assert answer.status_code == 404 and "/v1/audio/speech" in answer.text
