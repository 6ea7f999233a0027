"""Images in chat completions, with OpenAI's client: answers, usage, limits and refusals."""

from __future__ import annotations

import base64
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from support.live import live_server
from support.tiny import IMAGE, make_tiny_vlm
from support.vlm_oracle import image, prompt

from fastkernels import LLM, SamplingParams
from fastkernels.engine.http.requests.config import ServerConfig

WIDE, HIGH = image(0, 40, 24), image(1, 24, 56)  # 15 and 21 tokens
LIMITS = {"image": 2}


def file(picture: Any, kind: str = "PNG", **options: Any) -> bytes:
    made = io.BytesIO()
    picture.save(made, kind, **options)
    return made.getvalue()


def data_url(given: Any) -> str:
    raw = given if isinstance(given, bytes) else file(given)
    return "data:image/png;base64," + base64.b64encode(raw).decode()


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def message(*parts: Any) -> list[dict[str, Any]]:
    """Texts and images as the parts of one message."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else part(data_url(p)) for p in parts]
    return [{"role": "user", "content": content}]


class Files(BaseHTTPRequestHandler):
    """/cat.png is an image, /moved redirects to it, /large has more bytes than the server reads."""

    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/moved" else 200)
        if self.path == "/moved":
            self.send_header("Location", "/cat.png")
        self.end_headers()
        if self.path != "/moved":
            self.wfile.write(file(WIDE) if self.path == "/cat.png" else bytes(3 << 20))

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vlm(tmp_path_factory.mktemp("media") / "qwen2_vl", "qwen2_vl")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    config = ServerConfig("tiny", allowed_media_domains=("127.0.0.1",), max_body_size=2 << 20)
    with live_server(folder, config, max_model_len=256, limit_mm_per_prompt=LIMITS) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The prompt's tokens and the text of LLM.generate for a message."""
    llm = LLM(str(folder), device="cpu", max_model_len=256, num_blocks=100)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def run(*parts: Any) -> tuple[int, str]:
        text = "".join(p if isinstance(p, str) else IMAGE for p in parts)
        images = [p for p in parts if not isinstance(p, str)]
        output = llm.generate(prompt(f"<|user|>{text}\n<|assistant|>", *images), params, use_tqdm=False)[0]
        return len(output.prompt_token_ids), output.outputs[0].text

    return run


def ask(client: Any, *parts: Any, **more: Any) -> Any:
    given = {"model": "tiny", "messages": message(*parts), "max_tokens": 12, "temperature": 0}
    return client.chat.completions.create(**given, extra_body={"ignore_eos": True}, **more)


CHATS: list[tuple[Any, ...]] = [("See ", WIDE, " well"), ("none",), (HIGH, WIDE), (HIGH, "?")]


def test_images_in_chats_are_answered(client: Any, expected: Any) -> None:
    """Requests with and without images at once; usage counts the tokens of images."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda parts: ask(client, *parts), CHATS))
    for parts, answer in zip(CHATS, answers, strict=True):
        tokens, text = expected(*parts)
        assert answer.choices[0].message.content == text
        assert answer.usage.prompt_tokens == tokens and answer.usage.completion_tokens == 12
    again = ask(client, *CHATS[0])
    assert again.usage.prompt_tokens_details.cached_tokens > 16


def test_stream_with_image_has_the_same_text(client: Any, expected: Any) -> None:
    chunks = list(ask(client, *CHATS[2], stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected(*CHATS[2])[1]
    assert chunks[-1].usage.prompt_tokens == expected(*CHATS[2])[0]


def test_tokens_of_images_are_counted(url: str, expected: Any) -> None:
    found = httpx.post(f"{url}/tokenize", json={"messages": message(*CHATS[2])}).json()
    assert found["count"] == expected(*CHATS[2])[0] == len(found["tokens"])


def test_allowed_host_is_read(client: Any, files: str, expected: Any) -> None:
    messages = [{"role": "user", "content": [part(f"{files}/cat.png")]}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == expected(WIDE)


def test_template_without_parts_gets_placeholders(folder: Path, expected: Any) -> None:
    template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}<|assistant|>"
    with live_server(folder, ServerConfig("tiny", chat_template=template), max_model_len=256) as (url, _):
        body = {"messages": message("a", WIDE), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        refused = [{"role": "user", "content": [part("http://127.0.0.1/cat.png")]}]
        error = httpx.post(f"{url}/v1/chat/completions", json={"messages": refused})
    assert answer["choices"][0]["message"]["content"] == expected("a\n", WIDE)[1]
    assert error.status_code == 400
    assert error.json()["error"]["message"] == (
        "image 0 cannot be read: its URL begins with 'http://127.0.0.1/cat.png', and this server reads data URLs only"
        " (--allowed-media-domains adds hosts)"
    )


def test_other_apis_take_images(url: str, folder: Path, expected: Any) -> None:
    """OpenAI's responses, Anthropic's messages and LLM.chat."""
    tokens, text = expected("See ", WIDE)
    parts = [{"type": "input_text", "text": "See "}, {"type": "input_image", "image_url": data_url(WIDE)}]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 12, "temperature": 0}
    found = httpx.post(f"{url}/v1/responses", json=body).json()
    assert found["usage"]["input_tokens"] == tokens
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file(WIDE)).decode()}
    blocks = [{"type": "text", "text": "See "}, {"type": "image", "source": source}]
    body = {
        "messages": [{"role": "user", "content": blocks}],
        "max_tokens": 12,
        "temperature": 0,
        "model": "tiny",
    }
    found = httpx.post(f"{url}/v1/messages", json=body).json()
    assert found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"] == tokens
    source["data"] = None  # type: ignore[assignment]
    answer = httpx.post(f"{url}/v1/messages", json=body)
    assert answer.status_code == 400 and "source of a block of type image must be" in answer.text
    llm = LLM(str(folder), device="cpu", max_model_len=256, num_blocks=100)
    for last in ({"type": "image_pil", "image_pil": WIDE}, part(data_url(WIDE))):
        chat = [{"role": "user", "content": [{"type": "text", "text": "See "}, last]}]
        output = llm.chat(chat, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
        assert output[0].outputs[0].text == text
    with pytest.raises(ValueError, match="image 0 is not a data URL in base64"):
        llm.chat([{"role": "user", "content": [part("cat.png")]}], use_tqdm=False)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims this size, with few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def moving(kind: str, **options: Any) -> bytes:
    """An animation of three frames."""
    return file(WIDE, kind, save_all=True, append_images=[image(i, 40, 24) for i in (5, 6)], **options)


CUT = file(image(3, 64, 64))[:600]
BAD = [
    ([part(data_url(b"not an image"))], "image 0 of the prompt is not an image of a known format; accepted are PNG"),
    ([part(data_url(CUT))], "image 0 of the prompt is a damaged PNG image"),
    ([part(data_url(bomb(20_000, 20_000)))], "an image of 400000000 pixels; accepted are PNG, JPEG, WEBP, GIF, BMP"),
    ([part(data_url(file(WIDE, "JPEG")[:900]))], "image 0 of the prompt is a damaged JPEG image"),
    ([part(data_url(file(WIDE, "TIFF")))], "is not an image of a known format; accepted are PNG, JPEG, WEBP"),
    ([part(data_url(moving("GIF")[:30]))], "image 0 of the prompt is"),
    ([part(data_url(b""))], "is not an image of a known format"),
    ([part(data_url(WIDE))] * 200, "the prompt has 200 images, and at most 2 are allowed (limit_mm_per_prompt"),
    ([part(data_url(WIDE))] * 3, "the prompt has 3 images, and at most 2 are allowed (limit_mm_per_prompt"),
    ([part("data:image/png,abc")], "image 0 is not a data URL in base64"),
    ([part("data:image/png;base64,***")], "image 0 is not base64 behind the comma"),
    ([part("file:///etc/passwd")], "its URL begins with 'file:///etc/passwd', and this server reads data URLs, and"),
    ([part("http://localhost/cat.png")], "the host 'localhost' is not one of 127.0.0.1"),
    ([part("http://127.0.0.1@evil.example/a.png")], "the host 'evil.example' is not one of 127.0.0.1"),
    ([part("FILES/moved")], "/moved' answers 302"),
    ([part("FILES/large")], "has more than 2097152 bytes"),
    ([part("http://127.0.0.1:1/cat.png")], "image 0 cannot be read: 'http://127.0.0.1:1/cat.png'"),
    ([part(data_url(WIDE)), {"type": "text", "text": IMAGE}], "2 placeholders of images, and 1 images are given"),
    ([part(data_url(image(0, 1, 300)))], "image 0 of 1 x 300 pixels cannot be processed"),
    ([{"type": "image_url"}], 'messages[0].content: an image must be {"type": "image_url"'),
    ([{"type": "picture"}], 'must be a text, or a list of {"type": "text", "text": ...} and {"type": "image_url"'),
]  # fmt: skip


@pytest.mark.parametrize(("content", "words"), BAD)
def test_bad_image_is_refused(url: str, files: str, content: list[Any], words: str) -> None:
    for one in content:
        if one.get("image_url", {}).get("url", "").startswith("FILES"):
            content = [part(files + one["image_url"]["url"].removeprefix("FILES"))]
    answer = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}
    )
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_truncation_with_image_is_refused(url: str) -> None:
    body = {"messages": message(WIDE), "truncate_prompt_tokens": 9}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"


def test_images_longer_than_the_context_are_refused(folder: Path) -> None:
    """Before later images are decoded."""
    with live_server(folder, max_model_len=64) as (url, _):
        body = {"messages": message(*[image(i, 64, 64) for i in range(3)])}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    wanted = "tokens up to image 0, and the maximum context length is 64 tokens"
    assert wanted in answer.json()["error"]["message"]


def test_image_for_a_text_model_is_refused(tiny: Path) -> None:
    with live_server(tiny) as (url, _):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": message("a", WIDE)})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "messages have 1 images, and 'tiny' takes text only"


def over_white(picture: Any) -> Any:
    pixels = np.asarray(picture.convert("RGBA")).astype(int)
    alpha = pixels[..., 3:]
    return Image.fromarray(((pixels[..., :3] * alpha + 255 * (255 - alpha)) / 255).round().astype(np.uint8))


def rotated() -> tuple[bytes, Any]:
    """A JPEG that its EXIF orientation turns, and the turned image."""
    exif = Image.Exif()
    exif[0x0112] = 6
    made = file(WIDE, "JPEG", exif=exif)
    return made, Image.open(io.BytesIO(made)).transpose(Image.Transpose.ROTATE_270)


def unusual() -> list[tuple[bytes, Any]]:
    """Files of modes that cameras, printers and editors write, and the RGB image that each one shows."""
    ink, gray = file(WIDE.convert("CMYK"), "JPEG"), WIDE.convert("L")
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    clear = WIDE.copy()
    clear.putalpha(image(4, 40, 24).convert("L"))
    colors = WIDE.quantize(64)
    alphas = bytes(range(0, 256, 4))
    colors_and_alpha = file(colors, transparency=alphas)
    level = int(np.asarray(gray)[0, 0])  # that is transparent
    holes = Image.fromarray(np.where(np.asarray(gray) == level, 255, np.asarray(gray)).astype(np.uint8))
    return [
        (ink, Image.open(io.BytesIO(ink)).convert("RGB")),
        (file(deep), gray.convert("RGB")),
        rotated(),
        (file(clear), over_white(clear)),
        (colors_and_alpha, over_white(Image.open(io.BytesIO(colors_and_alpha)))),
        (file(WIDE, "WEBP", lossless=True), WIDE),
        (moving("WEBP", lossless=True), WIDE),  # of animations, the first frame
        (moving("GIF"), Image.open(io.BytesIO(moving("GIF"))).convert("RGB")),
        # a camera's JPEG with a preview
        (moving("MPO"), Image.open(io.BytesIO(moving("MPO"))).convert("RGB")),
        (file(WIDE, "BMP"), WIDE),
        (file(WIDE, exif=b"Exif\0\0damaged"), WIDE),
        (file(deep, transparency=level * 257), holes.convert("RGB")),
    ]


def test_unusual_modes_are_read_as_rgb(url: str) -> None:
    def logprobs(given: Any) -> list[float]:
        body = {
            "messages": message(given),
            "max_tokens": 4,
            "temperature": 0,
            "logprobs": True,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]

    plain = logprobs(WIDE)
    for i, (given, shown) in enumerate(unusual()):
        want = logprobs(shown)
        assert logprobs(given) == pytest.approx(want, abs=2e-3), i  # an alpha is rounded
        assert shown is WIDE or want != pytest.approx(plain, abs=1e-3), i
