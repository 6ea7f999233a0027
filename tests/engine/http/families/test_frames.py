"""/v1/frames: whole answers, streams, batches across requests, clients that leave, and bodies that are refused."""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image
from support import worlds
from support.live import live_server, wait_for

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.scheduling.rollout import FrameParams

PATH = "/v1/frames"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return worlds.oasis(tmp_path_factory.mktemp("oasis"))


@pytest.fixture(scope="module")
def served(folder):
    options = {
        "num_blocks": None,
        "max_model_len": None,
        "max_frames": 400,
        "max_steps": 5,
        "max_num_seqs": 4,
    }
    with live_server(folder, ServerConfig("oasis"), **options) as found:
        yield found


def file_of(image):
    file = io.BytesIO()
    image.save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def body_of(prompt, **more):
    return {**prompt, "images": [file_of(image) for image in prompt["images"]], **more}


def post(url, **body):
    return httpx.post(url + PATH, json=body, timeout=60)


def arrays(data):
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(d["b64_json"])))) for d in data]


def events(text):
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def test_frames_are_those_of_the_engine_streamed_or_not(served, folder):
    url, _ = served
    prompt = worlds.walk(2, 4, 1)
    with LLM(str(folder), device="cpu") as llm:
        (want,) = llm.generate_frames(prompt, FrameParams(2, seed=9), use_tqdm=False)
    body = body_of(prompt, num_inference_steps=2, seed=9, model="oasis")
    whole = post(url, **body).json()
    assert whole["id"].startswith("frames-") and whole["size"] == "24x32" and whole["seed"] == 9
    assert [d["index"] for d in whole["data"]] == [0, 1, 2, 3]
    answer = post(url, **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *frames, last = events(answer.text)
    assert answer.text.endswith("data: [DONE]\n\n") and [f["type"] for f in frames] == ["frame"] * 4
    assert (last["type"], last["frames"], last["seed"]) == ("completed", 4, 9)
    for found in (whole["data"], frames):
        for a, b in zip(arrays(found), want.arrays, strict=True):
            assert np.abs(a.astype(int) - b).max() <= 1


def test_requests_share_steps(served):
    url, server = served
    sizes, launch = [], server.llm.engine.executor.launch

    def counted(step):
        sizes.append(len(step.rows))
        return launch(step)

    server.llm.engine.executor.launch = counted
    try:
        with ThreadPoolExecutor(6) as pool:
            bodies = [body_of(worlds.walk(1, 3, i), num_inference_steps=2) for i in range(6)]
            found = list(pool.map(lambda body: post(url, **body), bodies))
    finally:
        server.llm.engine.executor.launch = launch
    assert [a.status_code for a in found] == [200] * 6
    assert sum(sizes) == 6 * 3 * 3 and 1 < max(sizes) <= 4
    metrics = httpx.get(f"{url}/metrics").text
    assert "fastkernels:frames_total{" in metrics and "fastkernels:denoise_steps_left{" in metrics


def test_client_that_leaves_frees_its_slot(served):
    url, server = served
    body = body_of(worlds.walk(1, 1), stream=True, num_inference_steps=5)
    body["actions"] = [{"forward": 1}] * 400
    with httpx.stream("POST", url + PATH, json=body, timeout=60) as answer:
        assert next(answer.iter_lines()).startswith('data: {"type":"frame","index":0')
    wait_for(lambda: not server.llm.engine.requests)
    server.llm.call(lambda: None).result(10)
    assert len(server.llm.engine.runner._free) == 4


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"images": []}, "images", "images must have at least one image"),
        ({"images": 3}, "images", "or must be a list, got 3"),
        ({"images": ["%%"]}, "images", "image 0 is not base64"),
        ({"images": ["AAAA", "%%"]}, "images", "image 0 is not an image"),
        ({"images": "x"}, "images", "image 0 is not base64"),
        ({"images": base64.b64encode(b"text" * 20).decode()}, "images", "image 0 is not an image"),
        ({"images": ["http://host/a.png"]}, "images", "image 0 is not base64"),
        ({"images": ["data:image/png,abc"]}, "images", "image 0 is not a data URL in base64"),
        ({"images": ["x"] * 5}, "images", "images must be at most 4, got 5"),
        ({"actions": []}, "actions", "at least one action"),
        ({"actions": [{"jump": 1}] * 401}, "actions", "actions must be at most 400, got 401"),
        ({"actions": [{"jump": 1}, {"jmp": 1}]}, "actions", "actions[1] has the unknown key 'jmp'"),
        ({"actions": [{"jump": -1}]}, "actions", "actions[0]: jump must be a number from 0 to 1, got -1"),
        ({"actions": [[0, 1]]}, "actions", "a list of 25 numbers"),
        ({"actions": [{}, None]}, "actions[1]", "actions[1]: must be a JSON object, or a list, got null"),
        ({"actions": [[0, "1"]]}, "actions[0][1]", "actions[0][1]: "),
        ({"actions": [{"jump": None}]}, "actions[0].jump", "actions[0].jump: "),
        ({"prompt_actions": []}, "prompt_actions", "one action for each of 1 images"),
        ({"num_inference_steps": 6}, "num_inference_steps", "num_inference_steps must be at most 5, got 6"),
        ({"response_format": "url"}, "response_format", "b64_json"),
        ({"output_format": "gif"}, "output_format", "png"),
        ({"frames": 3}, "frames", "unknown field"),
    ],
)
def test_wrong_bodies_are_refused(served, changes, param, words):
    answer = post(served[0], **{**body_of(worlds.walk(1, 1)), **changes})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    assert (error["param"] or "").startswith(param), error


def test_other_routes_and_models_are_named(served):
    answer = post(served[0], **body_of(worlds.walk(1, 1)), model="other")
    assert answer.status_code == 404 and "the model 'other' does not exist" in answer.text
    answer = httpx.post(f"{served[0]}/v1/images/generations", json={"prompt": "a cat"}, timeout=60)
    assert answer.status_code == 404 and "LLM.generate_frames and /v1/frames" in answer.text
