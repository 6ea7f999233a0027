"""/v1/embeddings and /classify of images and videos."""

from __future__ import annotations

import asyncio
import base64
import io

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from support.live import live_server, metric
from support.minilm import minilm_path
from support.tiny import make_tiny_encoder

import fastkernels.engine.inputs.images as reading
from fastkernels import LLM
from fastkernels.engine.execution.runners import encode
from fastkernels.engine.http.routes import embeddings

RNG = np.random.default_rng(1)
IMAGES = [Image.fromarray(RNG.integers(0, 256, (h, 48, 3), dtype=np.uint8)) for h in (40, 60, 24)]


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def part(image, kind="PNG", **options):
    return data_part(encoded(image, kind, **options), kind)


def data_part(data, kind="PNG"):
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind.lower()};base64,{data}"}}


def video(frames):
    url = "data:video/jpeg;base64," + ",".join(map(encoded, frames))
    return {"type": "video_url", "video_url": {"url": url}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder") / "classes", "siglip2_classes")


@pytest.fixture(scope="module")
def url(folder):
    with live_server(folder, num_blocks=None, max_model_len=None) as (url, _):
        yield url


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), device="cpu")


def post(url, path="/v1/embeddings", **body):
    return httpx.post(url + path, json=body, timeout=60)


def test_images_become_vectors(url, llm):
    wanted = [o.outputs.data for o in llm.embed(IMAGES, use_tqdm=False)]
    before = metric(url, "vllm:prompt_tokens_total")
    answer = post(url, input=[part(i) for i in IMAGES]).json()
    np.testing.assert_allclose([d["embedding"] for d in answer["data"]], wanted, atol=1e-5)
    tokens = sum(o.num_tokens for o in llm.embed(IMAGES, use_tqdm=False))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert metric(url, "vllm:prompt_tokens_total") == before + tokens
    messages = [{"role": "user", "content": [part(IMAGES[1])]}]
    alone = [encoded(IMAGES[1]), f"data:image/png;base64,{encoded(IMAGES[1])}"]
    for body in ({"input": part(IMAGES[1])}, {"messages": messages}, *({"input": one} for one in alone)):
        (found,) = post(url, **body).json()["data"]
        np.testing.assert_allclose(found["embedding"], wanted[1], atol=1e-5)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        made = client.embeddings.create(model=folder_name(url), input=[part(IMAGES[0])])
        np.testing.assert_allclose(made.data[0].embedding, wanted[0], atol=1e-5)


def test_inputs_are_read_at_once_and_the_first_error_is_raised():
    running, most, ended = [0], [0], []

    async def work(i, wrong):
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.02 if i == 1 else 0.001)
        running[0] -= 1
        ended.append(i)
        if wrong:
            raise ValueError(i)
        return 10 * i

    count = 3 * embeddings.AT_ONCE
    assert asyncio.run(embeddings.several(work, [False] * count)) == [10 * i for i in range(count)]
    assert most[0] == embeddings.AT_ONCE
    ended.clear()
    with pytest.raises(ValueError, match="1"):
        asyncio.run(embeddings.several(work, [False, True, True, *[False] * 500]))
    assert len(ended) < 503, "no others begin after an error"


def test_upright_images_are_not_copied():
    plain = IMAGES[0]
    assert reading.rgb(plain) is plain
    file = io.BytesIO()
    turned = plain.copy()
    turned.getexif()[0x0112] = 6
    turned.save(file, "PNG", exif=turned.getexif())
    opened = Image.open(file)
    np.testing.assert_array_equal(reading.rgb(opened), np.rot90(plain, 3))
    np.testing.assert_array_equal(reading.rgb(Image.open(io.BytesIO(file.getvalue()))), np.rot90(plain, 3))
    assert opened.size == plain.size, "the given image stays as it is"
    assert reading.rgb(plain.convert("RGBA")).mode == "RGB"


def test_batches_of_equal_sizes_share_their_metadata(llm, monkeypatch):
    runner, made = llm.llm_engine.runner, []
    described = runner._described
    monkeypatch.setattr(runner, "_described", lambda *given: (made.append(1), described(*given))[1])
    monkeypatch.setattr(encode, "IMAGE_SIZES", 2)
    runner.capture()
    sizes = ([0], [0, 1, 2], [0], [1, 2], [1], [0, 1, 2])
    found = [[o.outputs.data for o in llm.embed([IMAGES[i] for i in s], use_tqdm=False)] for s in sizes]
    assert len(made) == 4 and len(runner._images) == 2  # three images were forgotten before they came again
    for one, s in zip(found, sizes, strict=True):
        for vector, i in zip(one, s, strict=True):
            np.testing.assert_allclose(vector, found[1][i], atol=1e-6)


def folder_name(url):
    return httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


def test_images_are_classified(url, llm):
    wanted = llm.classify(IMAGES, use_tqdm=False)
    answer = post(url, "/classify", input=[part(i) for i in IMAGES]).json()
    for i, (found, want) in enumerate(zip(answer["data"], wanted, strict=True)):
        np.testing.assert_allclose(found["probs"], want.outputs.probs, atol=1e-5)
        assert found["index"] == i and found["num_classes"] == 5
        assert found["label"] == f"LABEL_{np.argmax(want.outputs.data)}"
        assert sum(found["probs"]) == pytest.approx(1, abs=1e-5)


def test_other_formats_and_modes_are_read(url):
    gray = IMAGES[0].convert("L")
    (want,) = post(url, input=part(gray.convert("RGB"))).json()["data"]
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) << 8)
    broken = encoded(gray)
    broken = "\n".join(broken[i : i + 76] for i in range(0, len(broken), 76))
    same_image = (
        part(gray, "WEBP", lossless=True),
        part(gray.convert("RGBA")),
        part(deep),
        data_part(broken),
    )
    for same in (part(gray), *same_image):
        (found,) = post(url, input=same).json()["data"]
        np.testing.assert_allclose(found["embedding"], want["embedding"], atol=1e-5)
    assert post(url, input=part(IMAGES[0], "JPEG")).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": "a text"}, "input", "takes images, as"),
        ({"input": [5, 6]}, "input", "takes images, as"),
        ({"input": []}, "input", "or images, one or a list"),
        ({"input": None}, "input", '"image_url": {"url": "data:image/png;base64,'),
        ({"input": video(IMAGES[:1])}, "input", 'takes images, as {"type": "image_url"'),
        ({"input": {"type": "text", "text": "a"}}, "input", "must be an image"),
        ({"input": [part(IMAGES[0]), "a"]}, "input", "entry 1 must be an image"),
        ({"input": data_part("AAAA")}, "input", "input 0 is not an image of a known format; accepted are"),
        ({"input": data_part("A*")}, "input", "not base64 behind the comma"),
        ({"input": data_part(encoded(IMAGES[0])[:2000])}, "input", "input 0 is a damaged PNG image"),
        ({"input": "word " * 20}, "input", "takes images, as {"),
        ({"input": part(IMAGES[0], "TIFF")}, "input", "accepted are PNG, JPEG, WEBP, GIF, BMP of"),
        (
            {"input": {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}},
            "input", "downloads nothing: image_url.url begins with 'https://a.b/c.png'",
        ),
        ({"messages": [{"role": "user", "content": "text"}]}, "messages", "one content part of type image_url"),
        ({"messages": [{"role": "user", "content": [part(IMAGES[0])] * 2}]}, "messages", "one content part"),
        ({"messages": "a"}, "messages", "one content part"),
        ({"messages": [], "input": part(IMAGES[0])}, "input", "either input or messages"),
    ],
)  # fmt: skip
def test_bad_image_is_refused(url, body, param, words):
    answer = post(url, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_large_image_is_refused(url, monkeypatch):
    monkeypatch.setattr(reading, "MAX_PIXELS", 1000)
    answer = post(url, input=[part(IMAGES[0])])
    assert answer.status_code == 400
    assert "an image of 48 x 40 pixels; accepted are" in answer.json()["error"]["message"]


def test_text_model_takes_no_images():
    with live_server(minilm_path(), num_blocks=None, max_model_len=None) as (url, _):
        answer = post(url, input=part(IMAGES[0]))
        assert answer.status_code == 400
        assert "takes text or token ids, not images" in answer.json()["error"]["message"]
        answer = post(url, "/classify", input="a")
        assert answer.status_code == 404
        assert "has no classifier" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def of_videos(tmp_path_factory):
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder") / "videos", "vjepa2_classes")


@pytest.fixture(scope="module")
def video_url(of_videos):
    with live_server(of_videos, num_blocks=None, max_model_len=None) as (url, _):
        yield url


def test_videos_become_vectors_and_classes(video_url, of_videos):
    """Clips of two and four frames, and an image."""
    frames = [Image.fromarray(RNG.integers(0, 256, (40, 48, 3), dtype=np.uint8)) for _ in range(5)]
    prompts, parts = (
        [frames[:4], frames[3:], frames[0]],
        [video(frames[:4]), video(frames[3:]), part(frames[0])],
    )
    llm = LLM(str(of_videos), device="cpu")
    wanted = llm.embed(prompts, use_tqdm=False)
    answer = post(video_url, input=parts).json()
    np.testing.assert_allclose(
        [d["embedding"] for d in answer["data"]], [o.outputs.data for o in wanted], atol=1e-5
    )
    assert answer["usage"]["prompt_tokens"] == 32 + 16 + 16
    (found,) = post(video_url, messages=[{"role": "user", "content": [parts[1]]}]).json()["data"]
    np.testing.assert_allclose(found["embedding"], wanted[1].outputs.data, atol=1e-5)
    answer = post(video_url, "/classify", input=parts).json()
    for found, want in zip(answer["data"], llm.classify(prompts, use_tqdm=False), strict=True):
        np.testing.assert_allclose(found["probs"], want.outputs.probs, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("a text", 'takes videos, as {"type": "video_url", '),
        (video(IMAGES[:1] * 3), "input 0 has 3 frames, and this model takes one or a multiple of 2"),
        (video(IMAGES[:2]), "input 0 has frames of several sizes: (48, 40) and (48, 60)"),
        (video(IMAGES[:1])["video_url"] | {"type": "video_url"}, "must be an image"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "accepted are PNG, JPEG, WEBP"),
        ({"type": "video_url", "video_url": {"url": "https://a.b/c.mp4"}}, "video_url.url begins with 'https:"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,,"}}, "frame 0"),
    ],
)  # fmt: skip
def test_bad_video_is_refused(video_url, given, words):
    answer = post(video_url, input=given)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"], answer.text


def test_video_of_too_many_pixels_is_refused(video_url, monkeypatch):
    monkeypatch.setattr(reading, "MAX_PIXELS", 4000)
    answer = post(video_url, input=video(IMAGES[:1] * 4))
    assert answer.status_code == 400
    assert "input 0 is a video of more than 4000 pixels in all frames" in answer.json()["error"]["message"]


def test_encoder_that_detects_nothing_has_no_detections(url):
    answer = post(url, "/v1/detections", input=encoded(IMAGES[0]))
    assert answer.status_code == 404 and "detects no objects" in answer.json()["error"]["message"]
