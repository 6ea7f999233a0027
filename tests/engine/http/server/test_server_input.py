"""Bad input gets a 4xx in OpenAI's form that names the field, the value and the limit."""

from __future__ import annotations

import time
from contextlib import ExitStack

import httpx
import pytest
from support.live import before_steps, live_server, metric, wait_for

from fastkernels.engine.http.requests.config import ServerConfig


@pytest.fixture(scope="module")
def live(tiny):
    config, settings = ServerConfig("tiny", max_body_size=1 << 20), {"max_num_seqs": 4, "num_blocks": 60}
    with live_server(tiny, config, max_waiting=4, max_model_len=512, **settings) as (url, server):
        yield url, server


@pytest.fixture(scope="module")
def url(live):
    return live[0]


def send(url, path="/v1/completions", content=None, **body):
    more = {"content": content} if content is not None else {"json": body}
    return httpx.post(url + path, headers={"content-type": "application/json"}, timeout=60, **more)


def error(answer, status=400):
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert found["code"] == status and found["message"] and found["type"] and set(found) == {
        "message", "type", "param", "code",
    }  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("field", "body", "words"),
    [
        ("temperature", {"temperature": -1}, ("0", "-1")),
        ("temperature", {"temperature": "0.5"}, ('got "0.5"',)),
        ("temperature", {"temperature": True}, ("got true",)),
        ("top_p", {"top_p": 7}, ("1", "7")),
        ("top_p", {"top_p": 0}, ("got 0",)),
        ("top_k", {"top_k": 2**31}, ("2147483647",)),
        ("min_p", {"min_p": 2}, ("1", "2")),
        ("presence_penalty", {"presence_penalty": 3}, ("2", "3")),
        ("frequency_penalty", {"frequency_penalty": -3}, ("-2", "-3")),
        ("repetition_penalty", {"repetition_penalty": 0}, ("0",)),
        ("seed", {"seed": 2**63}, ("9223372036854775807",)),
        ("seed", {"seed": 1.5}, ("got 1.5",)),
        ("n", {"n": 0}, ("1", "0")),
        ("n", {"n": 129}, ("128", "129")),
        ("temperature", {"temperature": 1e7}, ("1000000",)),
        ("best_of", {"best_of": 3, "n": 2}, ("2", "3")),
        ("block_length", {"block_length": 8}, ("not supported", "null", "8")),
        ("max_tokens", {"max_tokens": "many"}, ('got "many"',)),
        ("max_tokens", {"max_tokens": 0}, ("at least 1",)),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 3}, ("9", "3")),
        ("stop", {"stop": ["x"] * 1000}, ("128", "1000")),
        ("stop", {"stop": ["", "x"]}, ("1 to 1024",)),
        ("stop", {"stop": "x" * 1025}, ("1024",)),
        ("stop_token_ids", {"stop_token_ids": [10**6]}, ("1000000", "512")),
        ("logit_bias.x", {"logit_bias": {"x": 1}}, ("x",)),
        ("logit_bias.5", {"logit_bias": {"5": 101}}, ("100", "101")),
        ("logit_bias", {"logit_bias": {str(i): 1 for i in range(2000)}}, ("1024", "2000")),
        ("logprobs", {"logprobs": 21}, ("20", "21")),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}, ("stream",)),
        ("stream_options", {"stream_options": {"include_usage": True}}, ("stream",)),
        ("temprature", {"temprature": 1}, ("unknown", "did you mean 'temperature'")),
        ("response_format", {"response_format": {"type": "json_schema"}}, ("needs json_schema",)),
        ("response_format.type", {"response_format": {"type": "xml"}}, ("'json_object'", '"xml"')),
        ("response_format", {"response_format": {"type": "text", "format": {}}}, ("only for type",)),
        ("structured_outputs", {"structured_outputs": {}}, ("exactly one of json, regex", "none")),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "json": {}}}, ("json, regex",)),
        ("structured_outputs", {"structured_outputs": {"regex": "(a"}}, ("regex cannot be used",)),
        ("structured_outputs", {"structured_outputs": {"regex": "a\0"}}, ("NUL",)),
        ("structured_outputs", {"structured_outputs": {"choice": []}}, ("choice", "not empty")),
        ("structured_outputs", {"structured_outputs": {"grammar": "root ::= x"}}, ("grammar cannot be used",)),
        ("structured_outputs", {"structured_outputs": {"grammar": "start: ("}}, ("grammar cannot be used",)),
        ("structured_outputs", {"structured_outputs": {"json_object": False}}, ("true",)),
        ("structured_outputs", {"structured_outputs": {"structural_tag": {}}}, ("format",)),
        ("structured_outputs.xml", {"structured_outputs": {"xml": "a"}}, ('got "a"',)),
        ("structured_outputs.json", {"structured_outputs": {"json": 5}}, ("JSON object", "5")),
        ("guided_json", {"guided_json": "{"}, ("is not JSON",)),
        ("guided_json", {"guided_json": 5}, ("JSON object", "5")),
        ("guided_json", {"guided_json": {"type": "text"}}, ("json cannot be used",)),
        ("guided_json", {"guided_json": {"type": "array", "uniqueItems": True}}, ("uniqueItems at #",)),
        ("json_schema", {"json_schema": '{"not": {}}'}, ("not at #",)),
        ("guided_choice", {"guided_choice": ["a"], "regex": "b"}, ("regex", "use one of them")),
        ("ebnf", {"ebnf": " "}, ("not empty",)),
        ("bad_words", {"bad_words": [" "]}, ("not empty",)),
        ("bad_words[0]", {"bad_words": [""]}, ("at least 1",)),
        ("allowed_token_ids", {"allowed_token_ids": []}, ("at least 1",)),
        ("allowed_token_ids", {"allowed_token_ids": [600]}, ("600", "512")),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 513}, ("512", "513")),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}, ("-1 or at least 1", "0")),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": "9"}, ('got "9"',)),
        ("truncation_side", {"truncation_side": "middle"}, ("left", "right", 'got "middle"')),
        ("suffix", {"suffix": "end"}, ("not supported", "end")),
        ("use_beam_search", {"use_beam_search": True}, ("not supported",)),
        ("lora_path", {"lora_path": "a"}, ("not supported",)),
        ("prompt", {"prompt": ""}, ("empty",)),
        ("prompt", {"prompt": []}, ("empty",)),
        ("prompt", {"prompt": [[1], []]}, ("entry 1", "empty")),
        ("prompt", {"prompt": ["a", [1]]}, ("entry 1",)),
        ("prompt", {"prompt": [1, "a"]}, ("token ids",)),
        ("prompt", {"prompt": [1, True]}, ("token ids",)),
        ("prompt", {"prompt": [-1]}, ("at least 0",)),
        ("prompt", {"prompt": [5, 99999]}, ("99999", "511")),
        ("prompt", {"prompt": [5] * 600}, ("600", "512")),
        ("prompt", {"prompt": "a" * 600}, ("600", "512")),
        ("prompt", {"prompt": "a" * 900_000}, ("900000 characters", "512")),
        ("prompt", {"prompt": [[1]] * 1025}, ("1024", "1025")),
        ("prompt", {"prompt": {"text": "a"}}, ("text",)),
        ("prompt", {"prompt": None}, ("text",)),
        ("model", {"model": 5}, ("got 5",)),
    ],
)  # fmt: skip
def test_wrong_field_is_named_with_its_limit(url, field, body, words):
    found = error(send(url, **{"prompt": "a", **body}))
    assert found["type"] == "invalid_request_error" and found["param"] == field, found
    assert all(w in found["message"] for w in (field.split(".")[0], *words)), found["message"]


def calls(function):
    """A conversation with one call."""
    call = {"id": "1", "type": "function", "function": function}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"content": "no role"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[1]", {"messages": [{"role": "user", "content": "a"}, "b"]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
        ("messages[0].content", {"messages": [{"role": "system"}]}),
        ("messages[0].content", {"messages": [{"role": "tool", "tool_call_id": "a"}]}),
        ("messages[0].content", {"messages": [{"role": "assistant", "content": None}]}),
        ("messages[0].content", {"messages": [{"role": "assistant", "tool_calls": []}]}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "a"}]}),
        ("messages[0].name", {"messages": [{"role": "user", "content": "a", "name": 5}]}),
        ("messages[0].tool_calls[0].function.name", calls({"arguments": "{"})),
        ("messages[0].tool_calls[0].function.arguments", calls({"name": "f", "arguments": 5})),
        ("messages[0].tool_calls[0].function.arguments", calls({"name": "f", "arguments": ["a"]})),
        ("messages[0].tool_calls[0].type", {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "user", "tool_calls": 3}]}),
        ("messages[0].tool_calls[0]", {"messages": [{"role": "user", "tool_calls": [3]}]}),
        ("echo", {"echo": 0.0}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("logprobs", {"logprobs": 1}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("chat_template", {"chat_template": "{{ 1 }}"}),
        ("cache_salt", {"cache_salt": ""}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"tokenize": True}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"conversations": []}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"self": 1}}),
        ("prompt", {"prompt": "a"}),
    ],
)  # fmt: skip
def test_bad_chats(url, field, body):
    answer = send(url, "/v1/chat/completions", **{"messages": [{"role": "user", "content": "a"}], **body})
    found = error(answer)
    if "top_logprobs" not in field:  # the engine's own limit is on logprobs
        assert found["param"] == field, found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{}", "prompt is required"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'"a"', "object"),
        (b'{"prompt": "\xff"}', "UTF-8: byte 0xff at position 12"),
        (b'{"prompt": "a", "temperature": NaN}', "JSON"),
        (b'{"prompt": "a", "temperature": Infinity}', "JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "got inf"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "at most 200 levels"),
        (b'{"prompt": "[", "x": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}", "at most 200 levels"),
        (b'{"p": "' + b"a" * 300_000 + b'", "x": ' + b"[" * 300 + b"]" * 300 + b"}", "at most 200 levels"),
        (rb'{"p": "\\\" \\", "x": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}", "at most 200 levels"),
        (b'{"prompt": "' + b"[" * 300 + b'", }', "not JSON"),
        (rb'{"prompt": "\"' + b"[" * 300_000 + b'", }', "not JSON"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"prompt": "a", "user": {"a": [{"b": "{x} %s {{y}}"}]}, "{z}": 1}', "{z}"),
    ],
)
def test_bad_bodies(url, body, words):
    found = error(send(url, content=body))
    assert words in found["message"] or words in str(found["param"]), found


@pytest.mark.parametrize(
    "content", [{"role": "assistant", "content": None, "reasoning": "so"},
                {"role": "assistant", "content": None, "refusal": "no"},
                {"role": "function", "name": "f", "content": None}],
)  # fmt: skip
def test_messages_that_may_have_no_content(live, content):
    messages = [{"role": "user", "content": "a"}, content]
    assert send(live[0], "/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200


def test_template_may_name_a_role_of_its_own(live):
    url, server = live
    tokenizer = server.llm.engine.tokenizer
    before, body = tokenizer.chat_template, {"messages": [{"role": "wizard", "content": "a"}]}
    try:
        tokenizer.chat_template = "{% for m in messages if m.role == 'wizard' %}{{ m.content }}{% endfor %}"
        assert send(url, "/tokenize", **body).json()["count"] == 1
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("\n{{ messages[0].content.items() }}", ("fails in line 2", "chat_template_kwargs")),
        ("{{ messages[0].absent + 1 }}", ("fails in line 1",)),
        ("{{ raise_exception('only odd messages') }}", ("rejects these messages: only odd messages",)),
        ("{% for %}", ("not valid Jinja", "in line 1")),
    ],
)
def test_error_of_a_template_is_in_plain_words(live, template, words):
    url, server = live
    tokenizer = server.llm.engine.tokenizer
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = template
        found = error(send(url, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}]))
    finally:
        tokenizer.chat_template = before
    assert found["param"] == "messages" and all(word in found["message"] for word in words)
    assert "object" not in found["message"]


def test_paths_methods_and_models(url):
    assert error(send(url, model="nope", prompt="a"), 404)["param"] == "model"
    error(httpx.get(f"{url}/v1/nothing"), 404)
    wrong = httpx.get(f"{url}/v1/completions")
    error(wrong, 405)
    assert wrong.headers["allow"] == "POST"
    form = httpx.post(f"{url}/v1/completions", data={"prompt": "a"})
    assert "application/x-www-form-urlencoded" in error(form, 415)["message"]


def test_body_over_the_limit_is_413(url):
    def parts():
        for _ in range(64):
            yield b"a" * (1 << 16)

    for body in (b"a" * ((1 << 20) + 1), parts()):
        answer = send(url, content=body)
        assert "1048576" in error(answer, 413)["message"] and answer.headers["connection"] == "close"


def test_full_queue_is_429_and_runs_nothing(live):
    url, server = live
    refused = metric(url, "fastkernels:requests_refused_total")
    four = {"prompt": [[5], [6], [7], [8]], "ignore_eos": True}
    with ExitStack() as stack:
        stack.enter_context(before_steps(server, lambda: time.sleep(0.05)))  # the requests last until the end
        for running, waiting in ((4, 0), (4, 4)):  # both what may run and what may wait
            body = {**four, "max_tokens": 480, "stream": True}
            stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60))
            wait_for(lambda r=running: metric(url, "vllm:num_requests_running") == r)
            wait_for(lambda w=waiting: metric(url, "vllm:num_requests_waiting") == w)
        for stream in (False, True):
            answer = send(url, **four, stream=stream)
            assert "waiting" in error(answer, 429)["message"] and int(answer.headers["retry-after"]) >= 1
        assert metric(url, "vllm:num_requests_waiting") == 4
    assert metric(url, "fastkernels:requests_refused_total") == refused + 2
    wait_for(lambda: metric(url, "vllm:num_requests_running") == 0)
    assert send(url, prompt=[5], max_tokens=2).status_code == 200
    assert "5 sequences" in error(send(url, prompt="a", n=5))["message"]


def test_api_key_is_required(tiny):
    with live_server(tiny, ServerConfig("tiny", api_key="geheim")) as (url, _):
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert httpx.get(url + path).status_code == 200
        for header in ({}, {"authorization": "Bearer falsch"}, {"authorization": "Basic geheim"}):
            assert error(httpx.get(f"{url}/v1/models", headers=header), 401)["type"] == "authentication_error"
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=header)
            error(answer, 401)
        good = {"authorization": "Bearer geheim"}
        assert httpx.get(f"{url}/v1/models", headers=good).status_code == 200


def test_server_still_works(url):
    assert send(url, model="tiny", prompt="still here", max_tokens=1).status_code == 200
    assert metric(url, "fastkernels:failed_steps_total") == 0
