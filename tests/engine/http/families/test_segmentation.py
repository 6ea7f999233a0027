"""/v1/segmentations: classes of points, batches across requests, and bodies that are refused."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from support import clouds
from support.live import live_server

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig

OPTIONS = {"num_blocks": None, "max_model_len": 400, "max_waiting": 40, "max_num_seqs": 64}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ptv3")
    clouds.ptv3(folder)
    with live_server(folder, ServerConfig("ptv3"), **OPTIONS) as (url, server):
        yield url, server, LLM(str(folder), device="cpu")


def given(points, seed=0):
    return clouds.lists(clouds.cloud(points, seed))


def post(url, **body):
    return httpx.post(url + "/v1/segmentations", json=body, timeout=60)


def test_labels_and_numbers_are_those_of_the_engine(served):
    url, _, llm = served
    inputs = [given(120), given(1), given(33, 1)]
    want = [o.outputs for o in llm.segment(inputs, use_tqdm=False)]
    answer = post(url, model="ptv3", inputs=inputs).json()
    assert answer["object"] == "list" and answer["id"].startswith("segmentations-")
    assert [(d["index"], d["object"], d["data"]) for d in answer["data"]] == [
        (i, "segmentation", None) for i in range(3)
    ]
    assert [d["labels"] for d in answer["data"]] == [o.item_ids for o in want]
    assert answer["usage"] == {"prompt_tokens": 154, "total_tokens": 154}
    logits = [o.outputs.data for o in llm.segment(inputs, use_activation=False, use_tqdm=False)]
    for output, numbers in (("probabilities", [o.data for o in want]), ("logits", logits)):
        listed = post(url, inputs=inputs, output=output).json()["data"]
        texts = post(url, inputs=inputs, output=output, encoding_format="base64").json()["data"]
        for one, text, number in zip(listed, texts, numbers, strict=True):
            np.testing.assert_allclose(one["data"], number, atol=1e-5)
            found = np.frombuffer(base64.b64decode(text["data"]), "<f4").reshape(number.shape)
            np.testing.assert_allclose(found, number, atol=1e-5)


def test_requests_share_steps(served):
    """Clouds that come while a step runs share the next one, with the results that they have alone."""
    url, server, llm = served
    inputs, sizes = [given(20 + i, i) for i in range(4)], []
    want = [llm.segment(one, use_tqdm=False)[0].outputs.item_ids for one in inputs]
    launch = server.llm.engine.executor.launch

    def counted(step):
        sizes.append(len(step.samples))
        return launch(step)

    server.llm.engine.executor.launch = counted
    try:
        server.llm.call(lambda: None).result(10)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: post(url, inputs=[inputs[i % 4]] * 3).json(), range(16)))
    finally:
        server.llm.engine.executor.launch = launch
    assert sum(sizes) == 48 and max(sizes) > 3
    assert all(d["labels"] == want[i % 4] for i, answer in enumerate(found) for d in answer["data"])


def test_model_without_a_head_returns_features(tmp_path):
    clouds.ptv3(tmp_path, num_classes=0)
    with live_server(tmp_path, ServerConfig("ptv3"), **OPTIONS) as (url, _):
        (one,) = post(url, inputs=given(9)).json()["data"]
        assert one["labels"] is None and np.shape(one["data"]) == (9, 16)
        answer = post(url, inputs=given(9), output="labels")
        assert (
            answer.status_code == 400
            and "output 'labels' is not possible: 'ptv3' has 'features'" in answer.text
        )


def huge():
    made = given(6)
    made["feat"] = [[1e38] * 4] * 6
    return made


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "inputs"),
        ({"inputs": []}, 400, "inputs must have at least one cloud"),
        ({"inputs": "text"}, 400, "inputs"),
        ({"inputs": [{}] * 41}, 400, "41 inputs are more than the queue holds, 40"),
        ({"inputs": [{}]}, 400, "input 0 needs `coord`"),
        ({"inputs": [given(3), {"coord": [], "feat": []}]}, 400, "input 1 has no points in `coord`"),
        ({"inputs": given(401)}, 400, "input 0 has 401 points, and a request may have 400 (max_model_len)"),
        ({"inputs": {**given(3), "grid_size": 1e-9}}, 400, "65536 are possible: use a larger grid_size"),
        (
            {"inputs": given(3), "output": "features"},
            400,
            "'ptv3' has 'labels', 'probabilities' and 'logits'",
        ),
        ({"inputs": given(3), "output": "colors"}, 400, "output"),
        ({"inputs": given(3), "input": 1}, 400, "did you mean 'inputs'?"),
        ({"inputs": given(3), "model": "other"}, 404, "the model 'other' does not exist"),
        ({"inputs": huge()}, 400, "the result of input 0 is NaN: its numbers are too large for the model"),
    ],
)
def test_wrong_bodies_are_refused(served, body, status, words):
    answer = post(served[0], **body)
    assert answer.status_code == status and words in answer.text


def test_numbers_beyond_float32_are_refused(served):
    """The answer is JSON."""
    body = '{"inputs": {"coord": [[0, 0, 1e999]], "feat": [[1, 2, 3, 4]], "grid_size": 1}}'
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(served[0] + "/v1/segmentations", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400 and "at point 0: no finite numbers" in answer.json()["error"]["message"]


def test_other_routes_name_this_one(served):
    url = served[0]
    answer = httpx.post(url + "/v1/scores", json={"inputs": {}}, timeout=60)
    assert answer.status_code == 404 and "LLM.segment and /v1/segmentations" in answer.text
    assert "/v1/segmentations" in httpx.get(url + "/openapi.json", timeout=60).json()["paths"]
    assert "kv_cache_usage" not in httpx.get(url + "/metrics", timeout=60).text
