"""Every field of every route with values of every JSON type: no failure, and messages in words of the API."""

from __future__ import annotations

import copy
import re

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.live import live_server

from fastkernels.engine.http.requests.config import ServerConfig

# a template with the operations on messages, tools and arguments that models' templates have
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name + t.function.parameters | tojson }}{% endfor %}"
    "{% for d in documents or [] %}{{ d.title + d.text }}{% endfor %}"
    "{% for m in messages %}{{ m.role + ':' + m.content + (m.name or '') + (m.reasoning or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %};{% endfor %}"
    "{{ ' '.join(flags or []) }}"
)
PYTHON = re.compile(
    r"NoneType|object has no|object is not|\b(dict|str|tuple|bytes)\b|[Dd]ictionary|__\w+__|<class|Error\b|[Tt]raceback"
    r"|multiple values|\bargument\b|recursion|instance of|subscript|iterable|unhashable"
)
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {
            "role": "assistant", "content": None, "reasoning": "r", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "c"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}], "documents": [{"title": "t", "text": "x"}],
    "chat_template_kwargs": {"flags": ["a"]},
}  # fmt: skip
SAMPLING = {
    "temperature": 1, "top_p": 1, "top_k": 5, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0,
    "repetition_penalty": 1, "seed": 1, "n": 1, "stop": ["x"], "stop_token_ids": [1], "min_tokens": 0,
    "ignore_eos": False, "logit_bias": {"1": 1}, "bad_words": ["b"],
}  # fmt: skip
OPENAI = {
    **SAMPLING, "max_tokens": 1, "stream": False, "stream_options": None, "logprobs": None, "user": "u", "priority": 0,
    "request_id": "r", "model": "tiny", "truncate_prompt_tokens": 9, "truncation_side": "left", "echo": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
}  # fmt: skip
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "o"},
]
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "c"}]}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": "s"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [RESULT]},
]  # fmt: skip
BODIES = {
    "/v1/completions": {**OPENAI, "prompt": "a"},
    "/v1/chat/completions": {**OPENAI, **CHAT, "tool_choice": "none", "reasoning_effort": "low"},
    "/v1/responses": {
        "input": ITEMS, "instructions": "i", "max_output_tokens": 1, "temperature": 1, "top_p": 1, "stream": False,
        "tools": [{"type": "function", **FUNCTION}], "tool_choice": "none", "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}, "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "messages": BLOCKS, "system": [{"type": "text", "text": "s"}], "max_tokens": 1, "stop_sequences": ["x"],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "temperature": 1, "top_k": 5, "stream": False,
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "tool_choice": {"type": "none"},
    },
    "/generate": {
        "text": "a", "stream": False, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1, "n": 1, "stop": ["x"], "json_schema": "{}"},
    },
    "/tokenize": {**CHAT, "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip
WRONG = (
    None,
    True,
    5,
    -1,
    0.5,
    1e300,
    "",
    "text",
    '{"',
    [],
    [5],
    [None],
    ["a"],
    [[]],
    {},
    {"a": None},
    {"type": 5},
)


@pytest.fixture(scope="module")
def client(tiny):
    with live_server(tiny, ServerConfig("tiny"), max_num_seqs=16) as (url, server):
        server.llm.engine.tokenizer.chat_template = TEMPLATE
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client
        assert server.llm.num_failed_steps == 0


def places(value, path=()):
    """The path of every value in a body."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inside:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(body, path, value):
    body = copy.deepcopy(body)
    at = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return body


def check(client, route, body):
    answer = client.post(route, json=body)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        message = answer.json()["error"]["message"]
        assert not PYTHON.search(message.split(", got ")[0]), (body, message)
        assert not re.search(r"\b(None|True|False)\b", message), (body, message)  # values, too, are JSON's
    return answer.status_code


@pytest.mark.parametrize(
    "each", [4, pytest.param(1, marks=pytest.mark.slow)]
)  # a share of the values, or all
@pytest.mark.parametrize("route", BODIES)
def test_wrong_types_are_named_in_plain_words(client, route, each):
    body = BODIES[route]
    assert check(client, route, body) == 200
    for number, path in enumerate(places(body)):
        for value in WRONG[number % each :: each]:
            check(client, route, changed(body, path, value))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.parametrize("route", BODIES)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_in_two_fields_is_no_failure(client, route, data):
    body = BODIES[route]
    for _ in range(2):
        path = data.draw(st.sampled_from(sorted(places(body), key=str)))
        body = changed(body, path, data.draw(JSON))
    check(client, route, body)
