"""/v1/detections: boxes in images, batches across requests, and bodies that are refused."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.detectors import NAMES, make_yolo, pictures
from support.live import live_server

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig

IMAGES = pictures((80, 70), (64, 64), (100, 50))


def encoded(image: Any, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("yolo")
    make_yolo(folder)
    options = {"num_blocks": None, "max_model_len": None, "max_waiting": 8}
    with live_server(folder, ServerConfig("yolo"), **options) as (url, server):
        yield url, server, LLM(str(folder), device="cpu")


def post(url, path="/v1/detections", **body):
    return httpx.post(url + path, json=body, timeout=60)


def test_boxes_are_those_of_the_engine(served):
    url, _, llm = served
    want = [o.outputs for o in llm.detect(IMAGES, 0.2, 7, use_tqdm=False)]
    given = [f"data:image/png;base64,{encoded(IMAGES[0])}", encoded(IMAGES[1]), encoded(IMAGES[2])]
    answer = post(url, model="yolo", input=given, threshold=0.2, max_detections=7).json()
    assert answer["object"] == "list" and answer["id"].startswith("detect-") and answer["model"] == "yolo"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 4 + 4 + 2
    for i, (found, one) in enumerate(zip(answer["data"], want, strict=True)):
        assert (found["index"], found["object"], found["size"]) == (i, "detections", list(IMAGES[i].size))
        assert found["labels"] == one.labels and found["label_names"] == [NAMES[n] for n in one.labels]
        assert found["scores"] == pytest.approx(one.scores, abs=1e-5) and len(found["boxes"]) == 7
        assert [n for box in found["boxes"] for n in box] == pytest.approx(
            [n for box in one.boxes for n in box], abs=1e-2
        )
    part = {"type": "image_url", "image_url": {"url": given[0]}}
    (one,) = post(url, input=[part], threshold=0.2, max_detections=7).json()["data"]
    assert one["labels"] == want[0].labels
    (one,) = post(url, input=encoded(IMAGES[1]), threshold=1).json()["data"]
    assert one["boxes"] == one["scores"] == one["labels"] == []


def test_requests_share_steps(served):
    """Requests that come while a step runs are computed together in the next one."""
    url, server, _ = served
    sizes, launch = [], server.llm.engine.executor.launch

    def counted(step):
        sizes.append(len(step.tasks))
        return launch(step)

    server.llm.engine.executor.launch = counted
    try:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda image: post(url, input=encoded(image)), IMAGES * 2))
    finally:
        server.llm.engine.executor.launch = launch
    assert [a.status_code for a in answers] == [200] * 6 and sum(sizes) == 6
    first, again = (answers[i].json()["data"][0] for i in (0, 3))
    assert first["scores"] == pytest.approx(again["scores"], abs=1e-5) and first["labels"] == again["labels"]


PNG = encoded(IMAGES[1])
HUGE = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    + (60_000).to_bytes(4, "big") * 2
    + b"\x08\x02\x00\x00\x00"
    + bytes(40)
).decode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a text"}, "input 0 cannot be used: 'yolo' takes images"),
        ({"input": [1, 2]}, "takes images"),
        (
            {"input": base64.b64encode(b"no image" * 8).decode()},
            "not an image of a known format; accepted are PNG",
        ),
        ({"input": HUGE}, "at most 67108864 pixels"),
        ({"input": "https://example.com/a.png"}, "takes images"),
        ({"input": [PNG] * 9}, "9 inputs are more than the queue holds"),
        ({"input": PNG, "threshold": 1.5}, "threshold"),
        ({"input": PNG, "threshold": "high"}, "threshold"),
        ({"input": PNG, "max_detections": 0}, "max_detections"),
        ({"threshold": 0.5}, "input"),
        ({"input": PNG, "nms": 0.5}, "nms"),
        ({"input": PNG, "model": "other"}, "the model 'other' does not exist"),
    ],
)
def test_bad_bodies_are_refused(served, body, words):
    answer = post(served[0], **body)
    assert answer.status_code in (400, 404) and words in answer.text, answer.text


def test_other_routes_of_encoders_name_the_task(served):
    url, _, _ = served
    for path in ("/v1/embeddings", "/pooling"):
        answer = post(url, path, input=PNG)
        assert answer.status_code == 400 and "is for the task 'detect' only" in answer.text
    assert post(url, "/classify", input=PNG).status_code == 404
    answer = post(url, "/v1/chat/completions", messages=[])
    message = "/v1/chat/completions is not available: 'yolo' is for LLM.detect and /v1/detections"
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, message)
    assert "/v1/detections" in httpx.get(url + "/openapi.json", timeout=60).json()["paths"]
