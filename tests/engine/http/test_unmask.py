"""A diffusion language model behind OpenAI's API: streams by block, usage, and fields of its own."""

from __future__ import annotations

import httpx
import openai
import pytest
from support.live import live_server, metric
from support.llada import Llada, make_tiny_llada

from fastkernels.engine.http.requests.config import ServerConfig

WAY = {"block_length": 8, "threshold": 0.4, "block_cache": "dual", "ignore_eos": True}
PROMPT = list(range(10, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_llada(tmp_path_factory.mktemp("llada") / "tiny", seed=2)


@pytest.fixture(scope="module")
def url(folder):
    with live_server(folder, ServerConfig("llada"), max_model_len=None) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(url, path="/v1/completions", **body):
    return httpx.post(url + path, json=body, timeout=60)


def test_openai_client_gets_the_answer_and_its_usage(client, folder):
    body = {**WAY, "return_token_ids": True}
    answer = client.completions.create(model="llada", prompt=PROMPT, max_tokens=24, extra_body=body)
    own = {name: WAY[name] for name in ("block_length", "threshold", "block_cache")}
    assert answer.choices[0].token_ids == Llada(folder).generate(PROMPT, 24, **own)[0]
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (20, 24)


def test_stream_has_an_event_for_each_block(client, url):
    before = metric(url, "vllm:generation_tokens_total")
    given = {
        "model": "llada",
        "prompt": PROMPT,
        "max_tokens": 24,
        "extra_body": {**WAY, "return_token_ids": True},
    }
    whole = client.completions.create(**given)
    events = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    choices = [event.choices[0] for event in events if event.choices]
    assert [len(choice.token_ids) for choice in choices] == [8, 8, 8]
    assert [choice.finish_reason for choice in choices] == [None, None, "length"]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert events[-1].usage.completion_tokens == 24
    assert metric(url, "vllm:generation_tokens_total") == before + 48
    assert metric(url, "vllm:kv_cache_usage_perc") == 0


def test_chat_has_128_tokens_by_default_and_streams(client):
    given = {
        "model": "llada",
        "messages": [{"role": "user", "content": "Hi"}],
        "extra_body": WAY,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**given)
    assert whole.usage.completion_tokens == 128
    events = list(client.chat.completions.create(**given, stream=True))
    text = "".join(e.choices[0].delta.content or "" for e in events)
    assert text == whole.choices[0].message.content and len(text) > 8
    assert sum(bool(e.choices[0].delta.content) for e in events) > 4


@pytest.mark.parametrize(
    ("field", "body", "words"),
    [
        ("block_length", {"block_length": 7}, "must be a divisor of max_tokens=16: 1, 2, 4, 8, 16; got 7"),
        ("block_length", {"block_length": 0}, "got 0"),
        ("steps", {"steps": 0}, "got 0"),
        ("steps", {"steps": 3, "block_length": 8}, "must be a multiple of the 2 blocks"),
        ("steps", {"steps": 8, "threshold": 0.5}, "cannot be set with threshold"),
        ("threshold", {"threshold": 1.5}, "got 1.5"),
        ("remasking", {"remasking": "entropy"}, "'low_confidence' or 'random', got \"entropy\""),
        ("block_cache", {"block_cache": "all"}, "'none', 'prefix' or 'dual', got \"all\""),
        ("cfg_scale", {"cfg_scale": 1.0, "block_cache": "dual"}, "needs block_cache='none', got 'dual'"),
        ("max_tokens", {"max_tokens": 300}, "max_tokens is 300, and the context has room for 236 tokens"),
        ("prompt", {"prompt": [7] * 256}, "the prompt has 256 tokens, and the maximum context length is 256"),
        ("prompt", {"prompt": [7, 500]}, "has the mask token 500 at position 1"),
        ("logprobs", {"logprobs": 1}, "logprobs is not supported for a diffusion language model"),
        ("top_p", {"top_p": 0.5, "temperature": 1}, "only 1.0: got 0.5"),
        ("structured_outputs", {"structured_outputs": {"regex": "a"}}, "is not supported for a diffusion"),
    ],
)  # fmt: skip
def test_bad_field_is_a_400_with_its_value(url, field, body, words):
    answer = post(url, **{"prompt": PROMPT, "max_tokens": 16, **body})
    found = answer.json()["error"]
    assert (answer.status_code, found["param"]) == (400, field), found
    assert words in found["message"]


def test_other_routes_are_404_with_those_that_exist(url):
    for path in ("/v1/responses", "/generate", "/v1/embeddings", "/reset_prefix_cache"):
        answer = post(url, path, prompt="a")
        assert answer.status_code == 404 and "/v1/chat/completions" in answer.text
    paths = httpx.get(f"{url}/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions"} <= set(paths["paths"])
    assert "block_length" in str(paths["components"]["schemas"])
