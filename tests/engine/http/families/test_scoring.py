"""/score, /rerank and /pooling: a cross-encoder, ColBERT, BGE-M3 and an embedder, and input that is refused."""

from __future__ import annotations

import base64
import time

import httpx
import numpy as np
import pytest
from support.live import before_steps, live_server, metric, wait_for
from support.minilm import minilm_path
from support.retrievers import make_tiny_bge_m3, make_tiny_colbert, make_tiny_cross_encoder

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig

QUERY = "who, me?"
DOCUMENTS = ["It is I.", "No.", "something else"]
MAKERS = {
    "cross": make_tiny_cross_encoder, "colbert": make_tiny_colbert, "bge": make_tiny_bge_m3,
    "minilm": lambda folder: minilm_path(),
}  # fmt: skip


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """{name: (url, LLM)}, each started at its first use."""
    started, open_servers = {}, []

    def server(name):
        if name not in started:
            folder = MAKERS[name](tmp_path_factory.mktemp(name) / "model")
            context = live_server(folder, ServerConfig(name), num_blocks=None, max_model_len=None)
            url, server.live[name] = context.__enter__()
            open_servers.append(context)
            started[name] = url, LLM(str(folder), device="cpu")
        return started[name]

    server.live = {}
    yield server
    for context in reversed(open_servers):
        context.__exit__(None, None, None)


def post(url, path, **body):
    return httpx.post(url + path, json=body, timeout=60)


@pytest.mark.parametrize("name", MAKERS)
def test_scores_are_those_of_the_engine(servers, name):
    url, llm = servers(name)
    want = [o.outputs.score for o in llm.score(QUERY, DOCUMENTS)]
    answer = post(url, "/score", queries=QUERY, documents=DOCUMENTS).json()
    assert answer["object"] == "list" and answer["id"].startswith("score-") and answer["model"] == name
    assert [(d["index"], d["object"]) for d in answer["data"]] == [(i, "score") for i in range(3)]
    np.testing.assert_allclose([d["score"] for d in answer["data"]], want, atol=1e-4)
    used = answer["usage"]
    assert used["prompt_tokens"] == used["total_tokens"] > 10
    other = post(url, "/v1/score", text_1=[QUERY] * 3, text_2=DOCUMENTS).json()
    np.testing.assert_allclose([d["score"] for d in other["data"]], want, atol=1e-4)
    for sides in ({"data_1": QUERY, "data_2": DOCUMENTS[1]}, {"queries": [QUERY], "items": DOCUMENTS[1:2]}):
        (one,) = post(url, "/score", **sides).json()["data"]
        np.testing.assert_allclose(one["score"], want[1], atol=1e-4)


@pytest.mark.parametrize("path", ["/v1/score", "/rerank"])
def test_scores_are_numbers_only(servers, path):
    """As in vLLM, they have no encoding: a value that would change the answer is refused."""
    url, _ = servers("cross")
    body = {"query": QUERY, "documents": DOCUMENTS}
    if path == "/v1/score":
        body["queries"] = body.pop("query")
    assert post(url, path, **body, encoding_format="float").status_code == 200
    answer = post(url, path, **body, encoding_format="base64")
    want = 'encoding_format is not supported: it may be null, "float", got "base64"'
    assert answer.status_code == 400 and want in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["cross", "colbert"])
def test_reranking_puts_the_best_first(servers, name):
    url, llm = servers(name)
    want = [o.outputs.score for o in llm.score(QUERY, DOCUMENTS)]
    order = sorted(range(3), key=lambda i: -want[i])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = post(url, path, query=QUERY, documents=DOCUMENTS, top_n=2).json()
        assert set(answer) == {"id", "model", "usage", "results"}
        assert [r["index"] for r in answer["results"]] == order[:2]
        assert [r["document"] for r in answer["results"]] == [
            {"text": DOCUMENTS[i], "multi_modal": None} for i in order[:2]
        ]
        np.testing.assert_allclose(
            [r["relevance_score"] for r in answer["results"]], [want[i] for i in order[:2]], atol=1e-4
        )
    more = [*DOCUMENTS, ""]  # an empty text is no failure
    body = {"query": QUERY, "documents": more, "top_n": 9, "return_documents": False}
    results = post(url, "/rerank", **body).json()["results"]
    assert sorted(r["index"] for r in results) == [0, 1, 2, 3]
    assert set(results[0]) == {"index", "relevance_score"}


def test_logits_are_scores_without_the_activation(servers):
    url, _ = servers("cross")
    bodies = ({}, {"use_activation": False})
    scores, logits = (
        [d["score"] for d in post(url, "/score", queries=QUERY, documents=DOCUMENTS, **b).json()["data"]]
        for b in bodies
    )
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-np.array(logits))), atol=1e-5)


def test_texts_are_cut_before_they_are_scored(servers):
    url, _ = servers("cross")
    cut = {"max_tokens_per_query": 3, "max_tokens_per_doc": 5}
    found = post(url, "/score", queries=QUERY, documents=DOCUMENTS, **cut).json()
    want = post(url, "/score", queries=QUERY[:3], documents=[d[:5] for d in DOCUMENTS]).json()
    assert [d["score"] for d in found["data"]] == [d["score"] for d in want["data"]]
    assert found["usage"]["prompt_tokens"] == 3 * (3 + 3) + 5 + 3 + 5
    whole = post(url, "/score", queries=QUERY, documents="x" * 500, truncate_prompt_tokens=-1).json()
    assert whole["usage"]["prompt_tokens"] == 128


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/score", {"queries": QUERY}, "queries", "give queries and documents, or queries and items, or"),
        ("/score", {"queries": QUERY, "text_2": "a"}, "queries", "got queries, text_2"),
        ("/score", {"queries": [QUERY] * 2, "documents": DOCUMENTS}, "documents", "2 queries and 3 documents"),
        ("/score", {"queries": QUERY, "documents": []}, "documents", "must be a text or a list of texts, not empty"),
        ("/score", {"queries": QUERY, "documents": [[5]]}, "documents", "must be a text or a list of texts, not empty"),
        ("/rerank", {"query": QUERY}, "documents", "documents is required"),
        ("/rerank", {"query": QUERY, "documents": ["a"] * 2049}, "documents", "at most 2048 entries"),
        ("/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": -1}, "top_n", "-1"),
        ("/rerank", {"query": QUERY, "documents": ["a", "x" * 300]}, "documents",
         "document 1 with its query has 311 tokens, and the maximum input length is 128 tokens"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "max_tokens_per_doc": 128}, "max_tokens_per_doc",
         "less than the maximum input length of 128 tokens, got 128"),
        ("/rerank", {"query": "a", "documents": ["a"], "truncate_prompt_tokens": 129}, "truncate_prompt_tokens",
         "got 129"),
        ("/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["text"]}, "rank_fields", "unknown field"),
        ("/pooling", {"input": "a", "task": "encode"}, "task", 'got "encode"'),
        ("/pooling", {"input": "a", "task": "token_classify"}, "task", "needs a model with lexical weights"),
        ("/pooling", {"input": "a", "task": "token_embed", "input_type": "query"}, "input_type",
         "a model of late interaction"),
        ("/pooling", {"input": "a", "task": "embed", "input_type": "query"}, "input_type",
         "applies to vectors for MaxSim"),
        ("/pooling", {"input": "a", "task": "classify", "dimensions": 8}, "dimensions", "got 8 for task 'classify'"),
        ("/pooling", {"input": "a", "encoding_format": "bytes"}, "encoding_format", 'got "bytes"'),
        ("/pooling", {"input": "a", "task": "embed", "dimensions": 8}, "dimensions", "does not declare Matryoshka"),
    ],
)  # fmt: skip
def test_bad_input_names_the_field(servers, path, body, param, words):
    url, _ = servers("cross")
    answer = post(url, path, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_scores_by_maxsim_have_no_logits(servers):
    url, _ = servers("colbert")
    answer = post(url, "/score", queries=QUERY, documents="a", use_activation=False)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "use_activation"


def test_pooling_has_every_task(servers):
    url, llm = servers("bge")
    for task in ("embed", "token_embed", "token_classify"):
        want = [o.outputs.data for o in llm.encode(DOCUMENTS, task)]
        answer = post(url, "/pooling", input=DOCUMENTS, task=task).json()
        assert answer["object"] == "list" and answer["id"].startswith("pooling-")
        assert answer["usage"]["prompt_tokens"] == sum(map(len, DOCUMENTS)) + 6
        for i, (found, data) in enumerate(zip(answer["data"], want, strict=True)):
            assert (found["index"], found["object"]) == (i, "pooling")
            np.testing.assert_allclose(found["data"], data, atol=1e-5)
    (text,) = post(url, "/pooling", input=DOCUMENTS[1], task="token_embed", encoding_format="base64").json()[
        "data"
    ]
    found = np.frombuffer(base64.b64decode(text["data"]), "<f4").reshape(-1, 64)
    np.testing.assert_allclose(found, llm.encode(DOCUMENTS[1])[0].outputs.data, atol=1e-5)
    raw = [
        post(url, "/pooling", input="a", use_activation=on).json()["data"][0]["data"] for on in (True, False)
    ]
    np.testing.assert_allclose(raw[0], np.array(raw[1]) / np.linalg.norm(raw[1]), atol=1e-5)
    assert abs(np.linalg.norm(raw[1]) - 1) > 0.1


def test_default_task_of_pooling_is_the_model_s(servers):
    tokens = len(DOCUMENTS[1]) + 2
    for name, shape in (("cross", (1,)), ("colbert", (tokens, 24)), ("bge", (64,)), ("minilm", (384,))):
        (found,) = post(servers(name)[0], "/pooling", input=DOCUMENTS[1]).json()["data"]
        assert np.shape(found["data"]) == shape, name


def test_input_type_gives_vectors_for_maxsim(servers):
    url, llm = servers("colbert")
    query, document = (
        np.array(post(url, "/pooling", input=text, input_type=kind).json()["data"][0]["data"])
        for text, kind in ((QUERY, "query"), (DOCUMENTS[0], "document"))
    )
    assert query.shape == (12, 24) and document.shape == (len(DOCUMENTS[0]) + 3 - 1, 24)
    score = (query @ document.T).max(1).sum()
    np.testing.assert_allclose(score, llm.score(QUERY, DOCUMENTS[0])[0].outputs.score, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("minilm", "/v1/embeddings", {"input": ["a", "b"]}),
        ("minilm", "/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("minilm", "/score", {"queries": QUERY, "documents": DOCUMENTS}),
        ("cross", "/classify", {"input": "a"}),
        ("cross", "/rerank", {"query": QUERY, "documents": DOCUMENTS}),
        ("bge", "/pooling", {"input": "a", "task": "token_embed"}),
        ("colbert", "/score", {"queries": QUERY, "documents": DOCUMENTS}),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_results_that_json_lacks_are_an_error(servers, name, path, body, value):
    url, _ = servers(name)
    weight = next(p for n, p in servers.live[name].llm.engine.runner.model.named_parameters() if "orm" in n)
    kept = weight.detach().clone()
    weight.data.fill_(value)
    try:
        answer = post(url, path, **body)
    finally:
        weight.data.copy_(kept)
    assert answer.status_code == 500
    assert "0 has values that are NaN or infinite" in answer.json()["error"]["message"]
    assert post(url, path, **body).status_code == 200


def test_requests_that_clients_leave_are_counted(servers):
    url, _ = servers("cross")
    server = servers.live["cross"]
    aborted = metric(url, "vllm:request_success_total", finished_reason="abort")
    with before_steps(server, lambda: time.sleep(0.5)), pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/classify", json={"input": [DOCUMENTS[0]] * 200}, timeout=0.2)
    wait_for(lambda: not server.llm.engine.requests and server.app.active == 0)
    assert metric(url, "vllm:request_success_total", finished_reason="abort") > aborted


def test_requests_of_a_failed_step_are_counted(servers, monkeypatch):
    url, _ = servers("cross")
    server = servers.live["cross"]
    aborted = metric(url, "vllm:request_success_total", finished_reason="abort")
    with monkeypatch.context() as patch:
        patch.setattr(server.llm.engine.executor, "launch", lambda step: 1 / 0)
        assert post(url, "/classify", input=DOCUMENTS).status_code == 500
    assert metric(url, "vllm:request_success_total", finished_reason="abort") == aborted + len(DOCUMENTS)
