"""/v1/images/generations and /v1/images/edits of a tiny FLUX.1."""

from __future__ import annotations

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from support.live import before_steps, live_server, metric, wait_for
from support.tiny_pipelines import make_tiny_flux

from fastkernels import LLM, ImageParams
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.routes import pictures

PATH = "/v1/images/generations"
SMALL = {"size": "24x16", "num_inference_steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_flux(tmp_path_factory.mktemp("pipeline") / "flux")


@pytest.fixture(scope="module")
def served(folder):
    options = {
        "num_blocks": None,
        "max_model_len": None,
        "max_pixels": 64 * 64,
        "max_steps": 5,
        "max_images": 3,
    }
    with live_server(folder, ServerConfig("flux"), max_waiting=6, **options) as found:
        yield found


@pytest.fixture(scope="module")
def url(served):
    return served[0]


def post(url, **body):
    return httpx.post(url + PATH, json=body, timeout=60)


def opened(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_side_that_the_format_cannot_store_is_refused(url, monkeypatch):
    monkeypatch.setitem(pictures.MOST_SIDE, "webp", 23)
    answer = post(url, prompt="a", output_format="webp", **SMALL)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "size"
    assert "'webp' stores at most 23 pixels a side, got 24 x 16" in error["message"]


def test_openai_client_generates_images(url, folder):
    with LLM(str(folder), device="cpu") as llm:
        params = ImageParams(2, 16, 24, 2, 1.5, seed=7)
        (wanted,) = llm.generate_images("a red cat", params, use_tqdm=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        extra = {"seed": 7, "num_inference_steps": 2, "guidance_scale": 1.5}
        answer = client.images.generate(
            model="flux", prompt="a red cat", n=2, size="24x16", response_format="b64_json", extra_body=extra
        )
    assert answer.size == "24x16" and answer.output_format == "png" and answer.created > 1.7e9
    assert [d.seed for d in answer.data] == [7, 8]
    for data, array in zip(answer.data, wanted.arrays, strict=True):
        found = opened(data.b64_json)
        assert found.format == "PNG" and found.size == (24, 16)
        assert np.abs(np.asarray(found).astype(int) - array).max() <= 1


def test_openai_client_streams_images(url):
    """An event for each image. A wrong field is refused before the stream begins."""
    extra = {"seed": 7, "num_inference_steps": 2}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        ask = partial(
            client.images.generate, model="flux", prompt="a red cat", size="24x16", extra_body=extra
        )
        want = [d.b64_json for d in ask(n=2).data]
        events = list(ask(n=2, stream=True))
        assert [e.type for e in events] == ["image_generation.completed"] * 2
        assert [e.b64_json for e in sorted(events, key=lambda e: e.index)] == want
        assert {(e.size, e.output_format, e.background, e.quality) for e in events} == {
            ("24x16", "png", "opaque", "auto")
        }
        (edited,) = client.images.edit(
            model="flux", prompt="a", image=("a.png", png(24, 16)), stream=True, extra_body=extra
        )
        assert edited.type == "image_edit.completed" and opened(edited.b64_json).size == (24, 16)
        with pytest.raises(openai.BadRequestError, match="n must be at most 3, got 4"):
            ask(n=4, stream=True)
        with pytest.raises(openai.NotFoundError):
            client.images.create_variation(image=("a.png", png(24, 16)))


def test_formats_and_defaults(url):
    for kind in ("jpeg", "webp"):
        answer = post(url, prompt="a", output_format=kind, output_compression=80, **SMALL).json()
        assert opened(answer["data"][0]["b64_json"]).format == kind.upper()
    body = {"prompt": "a", "n": None, "seed": None, "quality": "auto", "background": "opaque", "user": "me"}
    one, other = (post(url, **body, **SMALL).json()["data"][0] for _ in range(2))
    assert one["seed"] != other["seed"]
    again = post(url, prompt="a", seed=one["seed"], **SMALL).json()["data"][0]
    assert again["b64_json"] == one["b64_json"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "prompt is required"),
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "a" * 600}, "prompt", "the prompt has 600 tokens, and the text encoder takes 512"),
        ({"prompt": "a", "response_format": "url"}, "response_format", "'url' is not supported"),
        ({"prompt": "a", "size": "33x32"}, "size", "width must be a multiple of 4, got 33"),
        ({"prompt": "a", "size": "big"}, "size", 'WIDTHxHEIGHT in pixels, such as "1024x768", got "big"'),
        ({"prompt": "a", "size": "128x64"}, "size", "at most 4096 pixels, got 8192 (128 x 64)"),
        ({"prompt": "a", "n": 4}, "n", "n must be at most 3, got 4"),
        ({"prompt": "a", "num_inference_steps": 6}, "num_inference_steps", "must be at most 5, got 6"),
        ({"prompt": "a", "guidance_scale": 101}, "guidance_scale", "got 101"),
        ({"prompt": "a", "negative_prompt": "b"}, "negative_prompt", "negative_prompt is not supported"),
        ({"prompt": "a", "quality": "hd"}, "quality", "'auto' or 'standard', got \"hd\""),
        ({"prompt": "a", "stream": True, "partial_images": 1}, "partial_images", "got 1"),
        (
            {"prompt": "a", "output_compression": 50},
            "output_compression",
            "needs output_format 'jpeg' or 'webp'",
        ),
        ({"prompt": "a", "step": 3}, "step", 'unknown field "step"'),
        ({"prompt": "a", "model": "other"}, "model", "does not exist"),
    ],
)
def test_bad_input_names_the_field(url, body, param, words):
    answer = post(url, **{**SMALL, **body})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


def png(*size):
    pixels = np.random.default_rng(3).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(file, "PNG")
    return file.getvalue()


def test_openai_client_changes_an_image(url, folder):
    file = png(25, 18)
    with LLM(str(folder), device="cpu") as llm:
        given = {"prompt": "a red cat", "image": Image.open(io.BytesIO(file))}
        (wanted,) = llm.generate_images(
            given, ImageParams(2, None, None, 4, seed=7, strength=0.5), use_tqdm=False
        )
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.images.edit(
            model="flux", image=("cat.png", file), prompt="a red cat", n=2, response_format="b64_json",
            extra_body={"seed": 7, "num_inference_steps": 4, "strength": 0.5},
        )  # fmt: skip
        other = client.images.edit(
            image=[file], prompt="a", size="16x24", extra_body={"num_inference_steps": 2}
        )
    assert answer.size == "24x16" and [d.seed for d in answer.data] == [7, 8]
    for data, array in zip(answer.data, wanted.arrays, strict=True):
        assert np.abs(np.asarray(opened(data.b64_json)).astype(int) - array).max() <= 1
    assert other.size == "16x24" and opened(other.data[0].b64_json).size == (16, 24)


EDIT = {"prompt": "a", "num_inference_steps": "2"}


@pytest.mark.parametrize(
    ("fields", "files", "param", "words"),
    [
        ({}, [("mask", b"a")], "mask", "mask is a file, and only the file image is supported"),
        ({}, [("other", b"a")], "other", "other is a file"),
        ({"user": "me"}, [], "image", "image is required: a PNG, JPEG, WEBP, GIF or BMP file"),
        ({"image": "abc"}, [], "image", "image must be a file in the form"),
        ({}, [("image", b"GIF89a")], "image", "not an image of a known format; accepted are PNG, JPEG, WEBP"),
        ({}, [("image[]", png(8, 8)), ("image[]", png(8, 8))], "image", "image is given twice"),
        ({}, [("image", png(3, 8))], "image", "at least 4 x 4 pixels, got 3 x 8: give a size"),
        ({}, [("image", png(80, 80))], "size", "at most 4096 pixels, got 6400 (80 x 80)"),
        ({"strength": "0"}, [("image", png(8, 8))], "strength", "greater than 0, got 0.0"),
        ({"strength": "much"}, [("image", png(8, 8))], "strength", 'got "much"'),
        ({"n": "4"}, [("image", png(8, 8))], "n", "n must be at most 3, got 4"),
        ({"input_fidelity": "high"}, [("image", png(8, 8))], "input_fidelity", 'got "high"'),
        ({"stream": "some"}, [("image", png(8, 8))], "stream", 'got "some"'),
        ({"prompt": ""}, [("image", png(8, 8))], "prompt", "at least 1 character"),
        ({"step": "1"}, [("image", png(8, 8))], "step", 'unknown field "step"'),
    ],
)
def test_bad_forms_name_the_field(url, fields, files, param, words):
    parts = [(name, (None, value)) for name, value in {**EDIT, **fields}.items()]
    parts += [(name, ("a.png", data)) for name, data in files]
    answer = httpx.post(f"{url}/v1/images/edits", files=parts, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_edits_take_a_form(url):
    answer = httpx.post(f"{url}/v1/images/edits", json={"prompt": "a"}, timeout=60)
    assert answer.status_code == 415 and "multipart/form-data" in answer.json()["error"]["message"]


def test_steps_that_reuse_an_output_are_reported(url):
    before = metric(url, "fastkernels:denoise_steps_reused_total")
    body = {**SMALL, "prompt": "a", "num_inference_steps": 5, "seed": 1}
    plain, cached = post(url, **body).json(), post(url, step_cache=1, **body).json()
    assert "steps_reused" not in plain["data"][0] and cached["data"][0]["steps_reused"] == 1
    assert metric(url, "fastkernels:denoise_steps_reused_total") - before == 1
    answer = post(url, step_cache=0, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "step_cache"


def test_progress_and_disconnect(served):
    """Steps that are left are in /metrics; a client that leaves frees its images."""
    url, server = served
    before = metric(url, "fastkernels:images_total")
    gate = threading.Semaphore(1)
    body = {"prompt": "a", "size": "24x16", "num_inference_steps": 5}
    with before_steps(server, gate.acquire), ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, url, n=3, **body)
        wait_for(lambda: metric(url, "fastkernels:denoise_steps_left") == 12)  # one of five is done
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + PATH, json={"prompt": "a", "n": 2, **body}, timeout=0.5)
        engine, inbox = server.llm.engine, server.llm._inbox
        try:
            gate.release()
            wait_for(lambda: engine.steps_left in (9, 9 + 10))  # with its two images, unless they have gone
            wait_for(lambda: engine.steps_left == 9 or inbox.qsize() == 1)  # the news that it has gone
            gate.release()
            wait_for(lambda: engine.steps_left == 6)
        finally:
            for _ in range(20):
                gate.release()
        assert first.result().status_code == 200
    assert metric(url, "fastkernels:denoise_steps_left") == 0
    assert "kv_cache" not in httpx.get(f"{url}/metrics", timeout=60).text  # there is none
    assert metric(url, "fastkernels:images_total") == before + 3
    assert len(server.llm.engine.runner.pool) == 0 and server.llm.engine.requests == {}


def test_full_queue_is_429(served):
    url, server = served
    gate = threading.Semaphore(0)
    with before_steps(server, gate.acquire), ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(post, url, prompt="a", n=3, **SMALL) for _ in range(8)]
        wait_for(
            lambda: server.llm._inbox.qsize() + len(server.llm._streams) + sum(f.done() for f in asked) >= 8
        )
        for _ in range(120):  # the first step has one request or more; two fill the queue behind it
            gate.release()
        codes = sorted(f.result().status_code for f in asked)
    assert codes[0] == 200 and codes[-1] == 429


def test_other_routes_are_not_served(url):
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.endswith("'flux' is for LLM.generate_images, /v1/images/generations and /v1/images/edits")
    assert PATH in httpx.get(f"{url}/openapi.json").json()["paths"]
