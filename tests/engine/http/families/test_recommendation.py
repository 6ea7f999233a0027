"""/v1/scores: scores of a recommender's samples, batches across requests, and bodies that are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support import recommenders
from support.live import live_server

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig

MAKERS = {"dlrm": recommenders.dlrm, "lightgcn": recommenders.lightgcn}


@pytest.fixture(scope="module", params=MAKERS)
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param](folder)
    options = {"num_blocks": None, "max_model_len": 100, "max_waiting": 40, "max_num_seqs": 64}
    with live_server(folder, ServerConfig(request.param), **options) as (url, server):
        yield request.param, url, server, LLM(str(folder), device="cpu")


def samples(name):
    if name == "dlrm":
        return recommenders.impressions(6)
    return [
        {"user": 3},
        {"user": 4, "k": 2},
        {"user": 4, "items": [1, 39]},
        {"user": 0, "exclude_seen": False},
    ] * 2


def post(url, **body):
    return httpx.post(url + "/v1/scores", json=body, timeout=60)


def test_scores_are_those_of_the_engine(served):
    name, url, _, llm = served
    given = samples(name)
    want = [o.outputs for o in llm.score(given, use_tqdm=False)]
    answer = post(url, model=name, inputs=given).json()
    assert answer["object"] == "list" and answer["id"].startswith("scores-") and answer["model"] == name
    assert [(d["index"], d["object"]) for d in answer["data"]] == [(i, "scores") for i in range(len(given))]
    assert [d["items"] for d in answer["data"]] == [o.item_ids for o in want]
    for found, one in zip(answer["data"], want, strict=True):
        assert found["scores"] == pytest.approx(one.scores, abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 5
    (one,) = post(url, inputs=given[1]).json()["data"]
    assert one["scores"] == pytest.approx(want[1].scores, abs=1e-5)


def test_requests_share_steps(served):
    """Requests that come while a step runs are scored together in the next one."""
    name, url, server, _ = served
    given, sizes = samples(name), []
    launch = server.llm.engine.executor.launch

    def counted(step):
        sizes.append(len(step.samples))
        return launch(step)

    server.llm.engine.executor.launch = counted
    try:
        server.llm.call(lambda: None).result(10)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: post(url, inputs=[given[i % len(given)]] * 3), range(24)))
    finally:
        server.llm.engine.executor.launch = launch
    assert [answer.status_code for answer in found] == [200] * 24
    assert sum(sizes) == 72 and max(sizes) > 3


def test_logits_are_scores_without_the_activation(served):
    name, url, _, _ = served
    given = samples(name)
    scores, raw = (
        [d["scores"] for d in post(url, inputs=given, **more).json()["data"]]
        for more in ({}, {"use_activation": False})
    )
    if name == "lightgcn":
        assert scores == raw  # products have no activation
    else:
        assert max(abs(x[0]) for x in raw) > 1 >= max(x[0] for x in scores)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "inputs"),
        ({"inputs": []}, 400, "inputs must have at least one sample"),
        ({"inputs": "text"}, 400, "inputs"),
        ({"inputs": [{}, 3]}, 400, "inputs"),
        ({"inputs": [{}] * 41}, 400, "41 inputs are more than the queue holds, 40"),
        ({"inputs": [{"other": 1}]}, 400, "input 0 has the unknown field 'other'"),
        ({"inputs": [{}], "input": 1}, 400, "did you mean 'inputs'?"),
        ({"inputs": [{}], "model": "other"}, 404, "the model 'other' does not exist"),
    ],
)
def test_wrong_bodies_are_refused(served, body, status, words):
    answer = post(served[1], **body)
    assert answer.status_code == status and words in answer.text.replace('\\"', '"')


def test_ids_beyond_a_table_are_named(served):
    name, url, _, _ = served
    good = samples(name)[0]
    bad = {"dense": [0.0] * 5, "sparse": {"f0": [1, 50]}} if name == "dlrm" else {"user": 1, "items": [50]}
    answer = post(url, inputs=[good, bad])
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "inputs"
    assert error["message"].startswith("input 1 has the id 50 of ") and "rows: 0 to" in error["message"]
    large = (
        {"dense": [0.0] * 5, "sparse": {"f0": [1] * 101}}
        if name == "dlrm"
        else {"user": 1, "items": [1] * 101}
    )
    assert "input 0 has 101 ids, and a request may have 100" in post(url, inputs=large).text


NUMBERS = {
    "dlrm": [
        ('{"dense": [1e999, 0, 0, 0, 0]}', "input 0 has inf in `dense`"),
        ('{"dense": [1e300, 0, 0, 0, 0]}', "input 0 has 1e+300 in `dense`"),
        ('{"dense": [1%s, 0, 0, 0, 0]}' % ("0" * 400), "in `dense`, which is no finite number in float32"),
        ('{"dense": [1e38, 1e38, 1e38, 1e38, 1e38]}', "the score of input 0 is NaN"),
    ],
    "lightgcn": [
        ('{"user": 1, "k": 1e999}', "input 0 has k inf: it must be an integer from 1 to 40"),
        ('{"user": 1, "k": -1e999}', "input 0 has k -inf"),
        ('{"user": 1, "k": 1%s}' % ("0" * 400), "it must be an integer from 1 to 40"),
        ('{"user": 1, "k": 2.5}', "input 0 has k 2.5"),
    ],
}  # fmt: skip


def test_numbers_without_a_score_are_refused(served):
    """The answer is 400, and JSON: it has no NaN."""
    name, url, _, _ = served
    for sample, words in NUMBERS[name]:
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(
            url + "/v1/scores", content=f'{{"inputs": {sample}}}', headers=headers, timeout=60
        )
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], sample


def test_metrics_have_no_cache(served):
    answer = httpx.get(served[1] + "/metrics", timeout=60)
    assert answer.status_code == 200 and "vllm:num_requests_running" in answer.text
    assert "kv_cache_usage" not in answer.text


def test_other_routes_name_this_one(served):
    url = served[1]
    answer = httpx.post(url + "/v1/embeddings", json={"input": "a"}, timeout=60)
    assert answer.status_code == 404 and "LLM.score and /v1/scores" in answer.text
    assert "/v1/scores" in httpx.get(url + "/openapi.json", timeout=60).json()["paths"]
    assert "fastkernels:op_calls" in httpx.get(url + "/metrics", timeout=60).text
