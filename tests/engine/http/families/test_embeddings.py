"""/v1/embeddings of the MiniLM embedder, and the routes that a model does not have."""

from __future__ import annotations

import base64
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from support.live import live_server, metric, wait_for
from support.minilm import minilm_path
from support.server_process import ended, start
from support.tiny import make_tiny_bert

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig

TEXTS = ["A man is eating food.", "Revenue fell by 3%."]


@pytest.fixture(scope="module")
def url():
    with live_server(minilm_path(), ServerConfig("minilm"), num_blocks=None, max_model_len=None) as (url, _):
        yield url


@pytest.fixture(scope="module")
def expected():
    return [o.outputs.data for o in LLM(str(minilm_path()), device="cpu").embed(TEXTS)]


def post(url, path="/v1/embeddings", **body):
    return httpx.post(url + path, json=body, timeout=60)


def test_openai_client_gets_the_vectors(url, expected):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for encoding in ("float", "base64", openai.NOT_GIVEN):
            answer = client.embeddings.create(model="minilm", input=TEXTS, encoding_format=encoding)
            vectors = [
                np.frombuffer(base64.b64decode(d.embedding), "<f4")
                if isinstance(d.embedding, str)
                else d.embedding
                for d in answer.data
            ]
            np.testing.assert_allclose(vectors, expected, atol=1e-6)
            assert [d.index for d in answer.data] == [0, 1] and answer.model == "minilm"
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == 16


def test_text_and_token_ids_give_the_same(url, expected):
    ids = post(url, "/tokenize", prompt=TEXTS[0]).json()["tokens"]
    for given in (TEXTS[0], TEXTS[:1], ids, [ids]):
        (found,) = post(url, input=given).json()["data"]
        assert found["object"] == "embedding" and found["index"] == 0
        np.testing.assert_allclose(found["embedding"], expected[0], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input is required"),
        ({"input": ""}, "input", "not empty"),
        ({"input": []}, "input", "not empty"),
        ({"input": ["a"] * 10_000}, "input", "at most 2048 entries are allowed, got 10000"),
        ({"input": [["a"]]}, "input", "token ids"),
        ({"input": ["a", [5]]}, "input", "entry 1 differs in type"),
        ({"input": [5, 40000]}, "input", "40000 is not in the vocabulary"),
        (
            {"input": ["a", "word " * 300]},
            "input",
            "input 1 has 302 tokens, and the maximum input length is 256",
        ),
        ({"input": "a", "dimensions": 8}, "dimensions", "got 8: this model does not declare Matryoshka"),
        ({"input": "a", "dimensions": 0}, "dimensions", "got 0"),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "at most 256"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", 'got "int8"'),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
        ({"input": "a", "temperature": 1}, "temperature", 'unknown field "temperature"'),
    ],
)
def test_bad_input_names_the_field(url, body, param, words):
    answer = post(url, **body)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_batches_are_cut_and_encoded(url):
    """A cut text keeps the special tokens around it, unless a side is given; token ids are cut as they are."""
    ids = post(url, "/tokenize", prompt=TEXTS[0]).json()["tokens"]
    for given, cut, same in (
        ([TEXTS[0], "a"], {"truncate_prompt_tokens": 5}, [*ids[:4], ids[-1]]),
        ([TEXTS[0], "a"], {"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ([TEXTS[0], "a"], {"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
        ([ids, ids[:2]], {"truncate_prompt_tokens": 5}, ids[:5]),
        (["word " * 300, "a"], {"truncate_prompt_tokens": -1}, None),
    ):
        answer = post(url, input=given, encoding_format="base64", **cut).json()
        found = [np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in answer["data"]]
        assert [len(v) for v in found] == [384, 384]
        if same is None:
            assert answer["usage"]["prompt_tokens"] == 256 + 3
        else:
            (want,) = post(url, input=same).json()["data"]
            np.testing.assert_allclose(found[0], want["embedding"], atol=1e-6)


def test_matryoshka_vectors_are_cut(tmp_path):
    folder = make_tiny_bert(tmp_path / "bert", matryoshka_dimensions=[16, 32])
    with live_server(folder, ServerConfig("bert"), num_blocks=None, max_model_len=None) as (url, _):
        (whole,) = post(url, input="abc").json()["data"]
        (part,) = post(url, input="abc", dimensions=16).json()["data"]
        start = np.array(whole["embedding"][:16])
        np.testing.assert_allclose(part["embedding"], start / np.linalg.norm(start), atol=1e-6)
        answer = post(url, input="abc", dimensions=17)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "dimensions must be one of 16, 32, got 17"


def test_neutral_fields_are_accepted(url):
    given = {"user": "me", "dimensions": None, "model": "minilm", "priority": -3, "request_id": "mine"}
    assert post(url, input="a", **given).status_code == 200


def test_use_activation_false_leaves_vectors_as_they_are(url):
    (raw,), (one,) = (post(url, input=TEXTS[0], use_activation=a).json()["data"] for a in (False, True))
    length = np.linalg.norm(raw["embedding"])
    assert abs(length - 1) > 0.1
    np.testing.assert_allclose(np.array(raw["embedding"]) / length, one["embedding"], atol=1e-5)


def test_an_embedder_does_not_generate(url):
    for path in ("/v1/completions", "/v1/chat/completions", "/reset_prefix_cache"):
        answer = post(url, path, prompt="a", messages=[{"role": "user", "content": "a"}])
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message == f"{path} is not available: 'minilm' is for LLM.embed and /v1/embeddings"
    assert "/v1/completions" not in httpx.get(f"{url}/openapi.json").json()["paths"]
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 256


def test_a_generator_does_not_embed(tiny):
    with live_server(tiny) as (url, _):
        answer = post(url, input="a")
        assert answer.status_code == 404
        assert "'tiny' is for LLM.generate, /v1/completions" in answer.json()["error"]["message"]
        assert "/v1/embeddings" not in httpx.get(f"{url}/openapi.json").json()["paths"]


def test_metrics_count_the_inputs(url):
    before = metric(url, "vllm:prompt_tokens_total")
    assert post(url, input=[[101, 102], [101, 1037, 102]]).status_code == 200
    assert metric(url, "vllm:prompt_tokens_total") == before + 5
    assert metric(url, "vllm:request_success_total", finished_reason="stop") >= 2
    assert metric(url, "vllm:e2e_request_latency_seconds_count") >= 2
    assert "kv_cache_usage" not in httpx.get(f"{url}/metrics").text


def test_a_full_queue_is_429():
    small = {"max_waiting": 2, "num_blocks": None, "max_model_len": None}
    with live_server(minilm_path(), **small) as (url, server):
        assert post(url, input=["a", "b", "c"]).status_code == 400
        assert post(url, input=["a", "b"]).status_code == 200
        executor, go = server.llm.engine.executor, threading.Event()
        launch = executor.launch
        executor.launch = lambda step: go.wait(20) and launch(step)
        scheduler, inbox = server.llm.engine.scheduler, server.llm._inbox
        with ThreadPoolExecutor(3) as pool:
            answers = []
            for given, arrived in (("a", lambda: scheduler.running), (["b", "c"], lambda: inbox.qsize() == 1),
                                   ("d", lambda: inbox.qsize() == 2)):  # fmt: skip
                answers.append(pool.submit(post, url, input=given))
                wait_for(arrived)
            go.set()
            assert [a.result().status_code for a in answers] == [200, 200, 429]
        assert server.metrics.refused == 1


@pytest.mark.slow
def test_fk_bench_serve_starts_an_embedder(expected, tmp_path):
    report = {"FASTKERNELS_REPORT": str(tmp_path)}
    process, url = start(minilm_path(), "--served-model-name", "e", num_blocks=None, env=report)
    answer = post(url, model="e", input=TEXTS)
    np.testing.assert_allclose([d["embedding"] for d in answer.json()["data"]], expected, atol=1e-6)
    process.send_signal(signal.SIGTERM)
    status, errors = ended(process)
    assert status == 0 and "Traceback" not in errors, errors
    (file,) = tmp_path.glob("fastkernels-0-*.json")
    rows = {r["op"]: r for r in json.loads(file.read_text())["rows"]}
    assert rows["layer_norm"]["calls"] > 0 and rows["layer_norm"]["modules"] == 13
