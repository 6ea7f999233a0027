"""Audio and videos in chat completions, with OpenAI's client: answers, usage, limits and refusals."""

from __future__ import annotations

import base64
import io
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.live import live_server
from support.media_oracle import RATE, clip, prompt, smooth, tone, video_file, wav
from support.tiny import OMNI, make_tiny_omni, make_tiny_vlm, small_videos
from support.vlm_oracle import image

from fastkernels import LLM, SamplingParams
from fastkernels.engine.http.requests.config import ServerConfig

SOUND, PITCH = wav(tone(1, 0.53)), wav(tone(2, 1.27))
MOVIE = video_file(smooth(17, 32, 24))
WIDE = image(0, 40, 24)


class Files(BaseHTTPRequestHandler):
    """/sound.wav is an audio."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(SOUND)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_videos():
        yield make_tiny_omni(tmp_path_factory.mktemp("omni") / "thinker")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    config = ServerConfig("tiny", allowed_media_domains=("127.0.0.1",))
    limits = {"audio": 2, "video": 1}
    with live_server(folder, config, max_model_len=256, limit_mm_per_prompt=limits) as (url, _):
        yield url


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def jpeg(frame: Any) -> bytes:
    from PIL import Image

    made = io.BytesIO()
    Image.fromarray(frame).save(made, "JPEG")
    return made.getvalue()


def audio(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": b64(data), "format": form}}


def video(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{b64(data)}"}}


def picture() -> dict[str, Any]:
    made = io.BytesIO()
    WIDE.save(made, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64(made.getvalue())}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


CHATS: list[tuple[list[dict[str, Any]], str, dict[str, list[Any]]]] = [
    ([text("Hear "), audio(SOUND)], f"Hear {OMNI['audio']}", {"audio": [SOUND]}),
    ([video(MOVIE), text("?")], f"{OMNI['video']}?", {"video": [MOVIE]}),
    (
        [audio(PITCH), picture(), video(MOVIE), audio(SOUND)],
        f"{OMNI['audio']}{OMNI['image']}{OMNI['video']}{OMNI['audio']}",
        {"audio": [PITCH, SOUND], "image": [WIDE], "video": [MOVIE]},
    ),
]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, str]]:
    """The prompt's tokens and the text of LLM.generate for each of CHATS."""
    llm = LLM(str(folder), device="cpu", max_model_len=256, num_blocks=100)
    given = [prompt(f"<|user|>{words}\n<|assistant|>", **media) for _, words, media in CHATS]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(given, params, use_tqdm=False)
    chats = llm.chat([[{"role": "user", "content": parts}] for parts, *_ in CHATS], params, use_tqdm=False)
    assert [o.outputs[0].text for o in chats] == [o.outputs[0].text for o in outputs]
    return [(len(o.prompt_token_ids), o.outputs[0].text) for o in outputs]


def test_audio_and_videos_in_chats_are_answered(url: str, expected: list[tuple[int, str]]) -> None:
    """Requests at once; usage counts the tokens of media."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def ask(chat: Any, **more: Any) -> Any:
            return client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": chat[0]}], max_tokens=8, temperature=0,
                extra_body={"ignore_eos": True}, **more,
            )  # fmt: skip

        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(ask, CHATS))
        assert [(a.usage.prompt_tokens, a.choices[0].message.content) for a in answers] == expected
        chunks = list(ask(CHATS[2], stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected[2][1]
    assert chunks[-1].usage.prompt_tokens == expected[2][0]
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 16


def chat(url: str, *parts: Any, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 8, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/chat/completions", json={**body, "ignore_eos": True})


def test_other_forms_of_media_are_read(url: str, files: str, expected: list[tuple[int, str]]) -> None:
    """vLLM's audio_url, an allowed host, and a video of JPEG files, which has losses."""
    for where in (f"data:audio/wav;base64,{b64(SOUND)}", f"{files}/sound.wav"):
        answer = chat(url, text("Hear "), {"type": "audio_url", "audio_url": {"url": where}}).json()
        assert answer["choices"][0]["message"]["content"] == expected[0][1]
    frames = ",".join(b64(jpeg(frame)) for frame in clip(1, 4, 32, 24))
    answer = chat(url, {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}).json()
    assert answer["usage"]["prompt_tokens"] == 2 * 12 + 2 + len("<|user|>\n<|assistant|>")


def test_template_without_parts_gets_placeholders(folder: Path, expected: list[tuple[int, str]]) -> None:
    template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}<|assistant|>"
    with live_server(folder, ServerConfig("tiny", chat_template=template), max_model_len=256) as (url, _):
        answers = [chat(url, part).json() for part in (audio(SOUND), video(MOVIE))]
    sizes = [expected[0][0] - len("Hear "), expected[1][0] - len("?")]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == sizes


def pcm(samples: np.ndarray, bits: int, code: int = 1, channels: int = 1) -> bytes:
    """A WAV file of samples as they lie in memory. code: 1 for integers, 3 for floats."""
    data = samples.tobytes()
    row = channels * bits // 8
    form = struct.pack("<IHHIIHH", 16, code, channels, RATE, RATE * row, row, bits)
    body = b"WAVEfmt " + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_wav_files_of_all_kinds_are_the_same_sound(url: str) -> None:
    sound = (tone(2, 0.5) * 32767).astype("<i2")[:, None]
    wide = sound.astype("<i4") << 16
    same = [
        pcm(sound, 16),
        pcm((sound / 32768).astype("<f8"), 64, 3),
        pcm(wide.view(np.uint8).reshape(-1, 4)[:, 1:], 24),
        pcm(np.repeat(sound, 8, 1), 16, channels=8),
    ]
    found = []
    for file in same:
        body = {"messages": [{"role": "user", "content": [audio(file)]}], "max_tokens": 4, "temperature": 0}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={**body, "logprobs": True, "ignore_eos": True}
        ).json()
        found.append([token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]])
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-3)


def sized(seconds: int) -> bytes:
    """A file whose header claims this length."""
    import av

    made = io.BytesIO()
    with av.open(made, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray((tone(0, 0.1) * 9999).astype("<i2")[None], "s16", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    data = bytearray(made.getvalue())
    total = int.from_bytes(data[18:26], "big") >> 36 << 36 | seconds * 16000
    data[18:26] = total.to_bytes(8, "big")
    return bytes(data)


BAD = [
    ([audio(b"no audio")], "audio 0 of the prompt cannot be read: the file is damaged, or no audio file: use flac"),
    ([audio(wav(tone(0, 4.1)))], "audio 0 of the prompt cannot be read: the audio has 4.1 s, and at most 4 s are"),
    ([audio(sized(5 * 3600))], "audio 0 of the prompt cannot be read: the audio has 5 h 00 min, and at most 4 s are"),
    ([audio(wav(tone(0, 0.5), 1))], "a sampling rate of 1 Hz, and 4000 to 384000 are possible"),
    ([audio(SOUND), audio(PITCH), audio(b"none")], "the prompt has 3 audios, and at most 2 are allowed (limit_mm"),
    ([video(MOVIE)] * 2, "the prompt has 2 videos, and at most 1 are allowed (limit_mm_per_prompt of this engine)"),
    ([audio(SOUND), video(SOUND)], "video 0 of the prompt is one that is damaged, or no file of a known format"),
    ([video(MOVIE[:600])], "video 0 of the prompt is one"),
    ([audio(SOUND), {"type": "audio_url", "audio_url": {"url": "http://localhost/a"}}], "audio 1 cannot be read: the"),
    ([{"type": "audio_url", "audio_url": {"url": "http://["}}], "audio 0 cannot be read: 'http://[': Invalid IPv6 URL"),
    ([{"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}], "video 0 cannot be read: its URL begins"),
    ([{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}}], "video 0 is a video whose frame 0"),
    ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,***"}}], "video 0 is not base64 behind the"),
    ([{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,***"}}], "video 0 is not base64 behind the"),
    ([{"type": "video_url"}], 'messages[0].content: a video must be {"type": "video_url"'),
    ([{"type": "input_audio", "input_audio": {"format": "wav"}}], "an audio must be {\"type\": \"input_audio\""),
    ([{"type": "sound"}], "or of type video_url, input_audio or audio_url"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "words"), BAD)
def test_bad_media_are_refused(url: str, parts: list[Any], words: str) -> None:
    answer = chat(url, *parts)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_audio_for_models_without_it_is_refused(tiny: Path, tmp_path: Path) -> None:
    for folder, words in (
        (tiny, "messages have 1 audios and 1 videos, and 'tiny' takes text only"),
        (
            make_tiny_vlm(tmp_path / "vlm", "qwen2_vl"),
            "media of kind 'audio', and this model takes image, video",
        ),
    ):
        with live_server(folder, ServerConfig("tiny")) as (url, _):
            answer = chat(url, audio(SOUND), video(MOVIE))
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
