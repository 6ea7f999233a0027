"""/v1/actions: a policy's actions, batches across requests, and bodies that are refused."""

from __future__ import annotations

import base64
import struct
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from support import policies
from support.live import live_server

from fastkernels import LLM, ActionParams
from fastkernels.engine.http.requests.config import ServerConfig


@pytest.fixture(scope="module", params=["pi0", "dp3"])
def served(request, tmp_path_factory):
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    getattr(policies, name)(folder)
    options = {"num_blocks": None, "max_model_len": 100, "max_waiting": 40, "max_num_seqs": 64}
    with (
        live_server(folder, ServerConfig(name), **options) as (url, server),
        LLM(str(folder), device="cpu") as llm,
    ):
        yield name, url, server, llm


def post(url, **body):
    return httpx.post(url + "/v1/actions", json=body, timeout=60)


def inputs(name, count):
    return [policies.as_json(o) for o in policies.observations(name, count)]


def test_actions_are_those_of_the_engine(served):
    name, url, _, llm = served
    given = policies.observations(name, 4)
    params = [ActionParams(seed=7 + i) for i in range(4)]
    want = [o.actions for o in llm.act(given, params, use_tqdm=False)]
    answer = post(url, model=name, inputs=inputs(name, 4), seed=7).json()
    assert answer["object"] == "list" and answer["id"].startswith("actions-") and answer["model"] == name
    for i, (found, one) in enumerate(zip(answer["data"], want, strict=True)):
        assert (found["index"], found["object"], found["seed"]) == (i, "actions", 7 + i)
        assert found["shape"] == list(one.shape)
        np.testing.assert_allclose(np.array(found["actions"]), one, atol=1e-5)
    assert answer["usage"]["total_tokens"] >= 4
    body = {"inputs": inputs(name, 1)[0], "seed": 7, "num_actions": 2, "encoding_format": "base64"}
    (one,) = post(url, **body).json()["data"]
    numbers = struct.unpack(f"<{2 * want[0].shape[1]}f", base64.b64decode(one["actions"]))
    np.testing.assert_allclose(np.reshape(numbers, one["shape"]), want[0][:2], atol=1e-5)


def test_seed_is_answered_and_repeats_actions(served):
    name, url, _, _ = served
    first, second = (post(url, inputs=inputs(name, 1)).json()["data"][0] for _ in range(2))
    assert first["seed"] != second["seed"] and first["actions"] != second["actions"]
    again = post(url, inputs=inputs(name, 1), seed=first["seed"]).json()["data"][0]
    np.testing.assert_allclose(again["actions"], first["actions"], atol=1e-5)


def test_requests_share_steps(served):
    """Requests that come while a step runs are computed together in the next one."""
    name, url, server, _ = served
    given, sizes = inputs(name, 4), []
    launch = server.llm.engine.executor.launch

    def counted(step):
        sizes.append(len(step.observations))
        return launch(step)

    server.llm.engine.executor.launch = counted
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: post(url, inputs=[given[i % 4]] * 3), range(12)))
    finally:
        server.llm.engine.executor.launch = launch
    assert [answer.status_code for answer in found] == [200] * 12
    assert sum(sizes) == 36 and max(sizes) > 3


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "inputs"),
        ({"inputs": []}, 400, "inputs must have at least one observation"),
        ({"inputs": "text"}, 400, 'inputs: must be a JSON object, or a list, got "text"'),
        ({"inputs": [{}, 3]}, 400, "inputs[1]: must be a JSON object, got 3"),
        ({"inputs": [{}] * 41}, 400, "41 inputs are more than the queue holds, 40"),
        ({"inputs": [{"other": 1}]}, 400, "input 0 "),
        ({"inputs": [{}], "input": 1}, 400, "did you mean 'inputs'?"),
        ({"inputs": [{}], "model": "other"}, 404, "the model 'other' does not exist"),
        ({"inputs": [{}], "num_actions": 0}, 400, "num_actions"),
        ({"inputs": [{}], "num_actions": 50}, 400, "num_actions must be at most"),
        ({"inputs": [{}], "num_steps": 101}, 400, "num_steps must be at most 100 (max_steps), got 101"),
        ({"inputs": [{}], "seed": -1}, 400, "seed"),
    ],
)
def test_wrong_bodies_are_refused(served, body, status, words):
    answer = post(served[1], **body)
    assert answer.status_code == status and words in answer.text.replace('\\"', '"')


IMAGE = policies.as_url(policies.images(1)[0])
BAD = {
    "pi0": [
        ({"state": [1.0], "prompt": [2]}, "input 0 needs `images`, at least one"),
        ({"images": [], "state": [1.0], "prompt": [2]}, "input 0 needs `images`, at least one"),
        ({"images": ["http://a/b.png"], "state": [1.0], "prompt": [2]}, "image 0 is not a data URL in base64"),
        ({"images": ["%%%"], "state": [1.0], "prompt": [2]}, "image 0 is not base64"),
        ({"images": ["aaaa"], "state": [1.0], "prompt": [2]}, "input 0 has as image 0 not an image of a known format"),
        ({"images": [3], "state": [1.0], "prompt": [2]}, "image 0 that is neither a data URL nor base64"),
        ({"images": [IMAGE] * 17, "state": [1.0], "prompt": [2]}, "has 17 images, and at most 16 are allowed"),
        ({"images": [IMAGE], "prompt": [2]}, "input 0 needs `state`, a list of up to 9 numbers"),
        ({"images": [IMAGE], "state": [], "prompt": [2]}, "input 0 has an empty `state`"),
        ({"images": [IMAGE], "state": [0.0] * 10, "prompt": [2]}, "10 numbers in `state`, and the model takes up to 9"),
        ({"images": [IMAGE], "state": ["a"], "prompt": [2]}, "input 0 needs `state`, a list of up to 9 numbers"),
        ({"images": [IMAGE], "state": [True], "prompt": [2]}, "input 0 needs `state`, a list of up to 9 numbers"),
        ({"images": [IMAGE], "state": [1e300], "prompt": [2]}, "has 1e+300 in `state` at [0], which is no finite"),
        ({"images": [IMAGE], "state": [1.0]}, "input 0 needs `prompt`, a text or token ids"),
        ({"images": [IMAGE], "state": [1.0], "prompt": "pick"}, "this engine has no tokenizer: give token ids"),
        ({"images": [IMAGE], "state": [1.0], "prompt": [120]}, "has the token id 120 in `prompt`: ids are from 0"),
        ({"images": [IMAGE], "state": [1.0], "prompt": [10**40]}, "has the token id 1000000"),
        ({"images": [IMAGE], "state": [1.0], "prompt": [1.5]}, "input 0 cannot be read: prompt token id 1.5 is not"),
        ({"images": [IMAGE], "state": ["1.5"], "prompt": [2]}, "input 0 needs `state`, a list of up to 9 numbers"),
        ({"images": [IMAGE], "state": [1.0], "prompt": [2] * 97}, "size of 101 tokens, and a request may have 100"),
    ],
    "dp3": [
        ({"state": [0.0] * 7}, "input 0 needs `point_cloud`: points of 3 numbers, of one observation or of 2"),
        ({"point_cloud": [], "state": [0.0] * 7}, "input 0 needs `point_cloud`, points of 3 numbers"),
        ({"point_cloud": [[], []], "state": [0.0] * 7}, "input 0 needs `point_cloud`"),
        ({"point_cloud": [[[0, 0, 0]]] * 3, "state": [0.0] * 7}, "has 3 observations in `point_cloud`"),
        ({"point_cloud": [[0, 0]], "state": [0.0] * 7}, "got numbers of shape [1, 2]"),
        ({"point_cloud": [[0, 0, 0], [0]], "state": [0.0] * 7}, "input 0 needs `point_cloud`"),
        ({"point_cloud": [[0, None, 0]], "state": [0.0] * 7}, "has nan in `point_cloud` at [0, 1]"),
        ({"point_cloud": [[0, 1e39, 0]], "state": [0.0] * 7}, "has 1e+39 in `point_cloud` at [0, 1]"),
        ({"point_cloud": [[0, 0, 0]], "state": [0.0] * 6}, "needs `state`, 7 numbers"),
        ({"point_cloud": "AAAA", "state": [0.0] * 7}, "input 0 has 3 bytes of base64 as `point_cloud`"),
        ({"point_cloud": [[0, 0, 0]] * 3300, "state": [0.0] * 7}, "size of 104 tokens, and a request may have 100"),
    ],
}  # fmt: skip


def test_wrong_observations_are_refused(served):
    name, url, _, _ = served
    for given, words in BAD[name]:
        answer = post(url, inputs=given)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "inputs", given
        assert words in answer.json()["error"]["message"], answer.text


def test_nan_is_refused_and_large_numbers_have_no_answer(served):
    name, url, _, _ = served
    given = inputs(name, 1)[0]
    for number, words in (("NaN", "the body is not JSON"), ("1e999", "inf in `state`"), ("3e38", "")):
        state = ", ".join([number] * 7)
        text = httpx.Request("POST", url, json={"inputs": {**given, "state": "STATE"}}).content.decode()
        text = text.replace('"STATE"', f"[{state}]")
        answer = httpx.post(
            url + "/v1/actions", content=text, headers={"Content-Type": "application/json"}, timeout=60
        )
        if words:
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        else:  # as the model computes it: numbers, or 400
            assert answer.status_code == 200 or "are not finite" in answer.json()["error"]["message"]


def test_other_routes_name_this_one(served):
    url = served[1]
    answer = httpx.post(url + "/v1/embeddings", json={"input": "a"}, timeout=60)
    assert answer.status_code == 404 and "LLM.act and /v1/actions" in answer.text
    assert "/v1/actions" in httpx.get(url + "/openapi.json", timeout=60).json()["paths"]
    metrics = httpx.get(url + "/metrics", timeout=60)
    assert metrics.status_code == 200 and "kv_cache_usage" not in metrics.text
