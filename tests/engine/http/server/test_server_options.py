"""Chat templates of the server and of requests, cache_salt, request ids, load, and sampling beyond OpenAI's limits."""

from __future__ import annotations

import threading
import time

import httpx
import openai
import pytest
from support.live import before_steps, live_server, wait_for

from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.server import Server
from fastkernels.engine.options.config import EngineConfig

HI = [{"role": "user", "content": "Hi"}]
OWN = "own:{{ messages[0].content }}"
TOOLS = [{"type": "function", "function": {"name": "noon"}}]


@pytest.fixture(scope="module")
def template_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "chat.jinja"
    file.write_text("file:{{ messages[0].content }}{% generation %}{% endgeneration %}")
    return file


@pytest.fixture(scope="module")
def live(tiny, template_file):
    config = ServerConfig(
        "tiny", chat_template=str(template_file), trust_request_chat_template=True, tool_call_parser="hermes",
        enable_tokenizer_info_endpoint=True,
    )  # fmt: skip
    with live_server(tiny, config) as (url, server):
        yield url, server


@pytest.fixture(scope="module")
def url(live):
    return live[0]


def post(url, path, **body):
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rendered(url, **body):
    return post(url, "/detokenize", tokens=post(url, "/tokenize", messages=HI, **body)["tokens"])["prompt"]


def test_chat_template_is_read_from_a_file(url):
    assert rendered(url) == "file:Hi"
    assert post(url, "/v1/chat/completions", messages=HI, max_tokens=1)["usage"]["prompt_tokens"] == 7


def test_request_brings_its_own_chat_template(url):
    assert rendered(url, chat_template=OWN) == "own:Hi"
    shows = OWN + "{% for t in tools %}{{ t.function.name }}{% endfor %}"
    body = {"messages": HI, "max_tokens": 1, "tools": TOOLS}
    used = post(url, "/v1/chat/completions", **body, chat_template=shows)["usage"]["prompt_tokens"]
    assert used == len("own:Hinoon")
    for template in (OWN, None):  # a template that ignores tools, and the server's, which does, too
        answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "chat_template": template})
        assert answer.status_code == 400 and "ignores tools" in answer.text


def test_untrusted_chat_template_is_refused(tiny):
    with live_server(tiny, ServerConfig("tiny", chat_template=OWN)) as (url, _):
        assert rendered(url) == "own:Hi", "the flag may hold the text itself"
        for path in ("/tokenize", "/v1/chat/completions"):
            for more in ({"chat_template": OWN}, {"chat_template_kwargs": {"chat_template": OWN}}):
                answer = httpx.post(url + path, json={"messages": HI, **more})
                assert answer.status_code == 400 and "chat_template" in answer.json()["error"]["param"]
        assert httpx.get(f"{url}/tokenizer_info").status_code == 404


@pytest.mark.parametrize(
    ("template", "words"), [("no/such.jinja", "'no/such.jinja' is neither"), ("{% for %}", "not valid Jinja")]
)
def test_wrong_chat_template_ends_the_start(tmp_path, template, words):
    with pytest.raises(ValueError, match=f"--chat-template.*{words}"):
        Server(EngineConfig(str(tmp_path / "missing")), ServerConfig(chat_template=template))


def test_tokenizer_info_has_the_template_in_use(url, template_file):
    info = httpx.get(f"{url}/tokenizer_info").json()
    assert info["chat_template"] == template_file.read_text() and info["tokenizer_class"]
    assert not {"vocab_file", "merges_file"} & set(info)


def cached(url, path, **body):
    return post(url, path, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prefixes_are_cached_by_salt(url):
    post(url, "/reset_prefix_cache")
    body = {"prompt": [7] * 40, "max_tokens": 1, "temperature": 0}
    hits = [cached(url, "/v1/completions", **body, cache_salt=s) for s in (None, None, "a", "a", "b", None)]
    assert hits == [0, 32, 0, 32, 0, 32]
    chat = {"messages": [{"role": "user", "content": "a" * 60}], "max_tokens": 1}
    assert [cached(url, "/v1/chat/completions", **chat, cache_salt=s) > 0 for s in "aab"] == [
        False,
        True,
        False,
    ]
    found = []
    for more in ({}, {"cache_salt": "a"}, {"extra_key": "b"}, {"cache_salt": "a"}, {"extra_key": "b"}):
        sampling = {"max_new_tokens": 1, "temperature": 0}
        answer = post(url, "/generate", input_ids=[9] * 40, sampling_params=sampling, **more)
        found.append(answer["meta_info"]["cached_tokens"])
    assert found == [0, 0, 0, 32, 32]


def test_salt_does_not_change_the_answer(url):
    body = {"prompt": [8] * 40, "max_tokens": 8, "temperature": 0}
    answers = {
        post(url, "/v1/completions", **body, cache_salt=s)["choices"][0]["text"] for s in (None, "a", "a")
    }
    assert len(answers) == 1


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/health", "/v1/completions"])
def test_every_answer_has_a_request_id(url, path):
    own, given = httpx.get(url + path), httpx.get(url + path, headers={"X-Request-Id": "mine"})
    assert len(own.headers["x-request-id"]) == 32 and given.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("stream", [False, True])
def test_request_id_is_part_of_the_answers_id(url, stream):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        raw = client.completions.with_raw_response.create(
            model="tiny", prompt="a", max_tokens=1, stream=stream
        )
        answer = next(iter(raw.parse())) if stream else raw.parse()
        assert answer.id == f"cmpl-{raw.request_id}"


def test_health_answers_head(url):
    for path in ("/health", "/ping"):
        assert httpx.head(url + path).status_code == 200


def test_load_counts_requests_that_run_the_model(live):
    url, server = live

    def load():
        return httpx.get(f"{url}/load").json()["server_load"]

    assert load() == 0
    with before_steps(server, lambda: time.sleep(0.05)):
        body = {"prompt": [5], "max_tokens": 100, "ignore_eos": True}
        threads = [
            threading.Thread(target=post, args=(url, "/v1/completions"), kwargs=body) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: load() == 2)
        post(url, "/tokenize", prompt="a")
    for thread in threads:
        thread.join()
    assert load() == 0


def test_greedy_outputs_of_one_request_are_equal(url):
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}
    alone = post(url, "/v1/completions", **body)["choices"][0]["text"]
    assert [c["text"] for c in post(url, "/v1/completions", **body, n=3)["choices"]] == [alone] * 3


def test_temperature_over_two_is_accepted(url):
    body = {"prompt": [5], "max_tokens": 32, "ignore_eos": True, "seed": 1, "return_token_ids": True}
    for temperature in (2.5, 1e6):
        allowed = {**body, "temperature": temperature, "allowed_token_ids": [7, 8, 9]}
        ids = post(url, "/v1/completions", **allowed)["choices"][0]["token_ids"]
        assert set(ids) == {7, 8, 9}


@pytest.mark.parametrize("name", ["api_key", "served_model_name"])
def test_empty_key_and_name_are_refused(name):
    for value in ("", " "):
        with pytest.raises(ValueError, match=f"{name} is '{value}': give one, or leave it out"):
            ServerConfig(**{name: value})
