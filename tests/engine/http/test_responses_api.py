"""The Responses API through OpenAI's client, whose stream helper checks the order of the events."""

from __future__ import annotations

import json

import httpx
import openai
import pydantic
import pytest
from support.live import live_server, unmerged

from fastkernels.engine.http.requests.config import ServerConfig

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]"
    "{% endfor %}{% if m.reasoning %}({{ m.reasoning }}){% endif %};{% endfor %}{{ tools or '' }}<think>{{ '\n' }}"
)
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"enum": [1, 2, 3]}},
        "required": ["days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A model that answers '\\n' with reasoning and YES."""
    from support.tiny import make_scripted

    folder = make_scripted(tmp_path_factory.mktemp("scripted"), "\nso</think>YES")
    config = ServerConfig("tiny", reasoning_parser="qwen3", tool_call_parser="hermes")
    with live_server(folder, config) as (url, server):
        server.llm.engine.tokenizer.chat_template = TEMPLATE
        yield url, server


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_response_has_reasoning_and_a_message(client):
    answer = client.responses.create(
        model="tiny", input="Hi", instructions="Be brief", temperature=0, metadata={"a": "b"}, store=False
    )
    assert answer.status == "completed" and answer.output_text == "YES" and answer.error is None
    reasoning, message = answer.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == "so"
    assert message.role == "assistant" and message.status == "completed"
    assert answer.instructions == "Be brief" and answer.metadata == {"a": "b"} and answer.temperature == 0
    assert answer.usage.output_tokens == len("so</think>YES") + 1  # and EOS
    assert answer.usage.output_tokens_details.reasoning_tokens == 2
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_stream_has_the_events_of_the_client(client):
    with client.responses.stream(model="tiny", input="Hi", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [e.type.removeprefix("response.") for e in events]
    assert [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [e.sequence_number for e in events if hasattr(e, "sequence_number")] == list(range(len(events)))
    assert final.output_text == "YES" and final.output[0].content[0].text == "so"
    assert final.usage.output_tokens == 14


def test_limit_makes_the_response_incomplete(client):
    for stream in (False, True):
        answer = client.responses.create(
            model="tiny", input="Hi", temperature=0, max_output_tokens=12, stream=stream
        )
        last = list(answer)[-1].response if stream else answer
        assert last.status == "incomplete" and last.incomplete_details.reason == "max_output_tokens"
        assert last.output_text == "YE" and last.output[1].status == "incomplete"


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_text(live, client, stream):
    """Without the tokens of the reasoning."""
    with unmerged(live[1]):
        answer = client.responses.create(
            model="tiny", input="Hi", temperature=0, max_output_tokens=13, stream=stream, **LOGPROBS
        )
        events = list(answer) if stream else []
    response = events[-1].response if stream else answer
    (part,) = response.output[-1].content
    assert part.text == "YES" and [entry.token for entry in part.logprobs] == ["Y", "E", "S"]
    for entry in part.logprobs:
        first, second = entry.top_logprobs
        assert (first.token, first.logprob) == (
            entry.token,
            entry.logprob,
        ) and first.logprob >= second.logprob
    if stream:
        deltas = [e for e in events if e.type == "response.output_text.delta"]
        assert [[entry.token for entry in e.logprobs] for e in deltas] == [["Y"], ["E"], ["S"]]
        (done,) = [e for e in events if e.type == "response.output_text.done"]
        assert [entry.token for entry in done.logprobs] == ["Y", "E", "S"]


def test_calls_have_no_logprobs_of_text(client):
    answer = client.responses.create(
        model="tiny", input="Hi", tools=[WEATHER], tool_choice="required", **LOGPROBS, max_output_tokens=100
    )
    assert [item.type for item in answer.output] == ["function_call"]


def test_store_has_no_effect(client):
    """OpenAI's clients set it by default; vLLM ignores it, too."""
    answer = client.responses.create(model="tiny", input="Hi", temperature=0, store=True)
    assert answer.output_text == "YES" and answer.store is False


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_function_calls_whole_and_streamed(live, client, choice):
    options = {
        "model": "tiny", "input": "Hi", "tools": [WEATHER], "tool_choice": choice, "temperature": 0,
        "parallel_tool_calls": False, "max_output_tokens": 100,
    }  # fmt: skip
    (call,) = client.responses.create(**options).output
    assert call.type == "function_call" and call.name == "weather" and call.status == "completed"
    assert json.loads(call.arguments)["days"] in (1, 2, 3)
    with unmerged(live[1]):
        events = list(client.responses.create(stream=True, **options))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and len(deltas) > 2
    assert events[-1].response.output[0].arguments == call.arguments


def test_parse_returns_a_model(client):
    class Trip(pydantic.BaseModel):
        days: int
        far: bool

    answer = client.responses.parse(
        model="tiny", input="Hi", text_format=Trip, max_output_tokens=400, extra_body={"seed": 1}
    )
    assert isinstance(answer.output_parsed, Trip)


def test_items_reach_the_template(live, client):
    first = client.responses.create(model="tiny", input="Hi", temperature=0)
    items = [
        {"role": "developer", "content": "Be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": c} for c in "ab"]},
        *[item.model_dump() for item in first.output],
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "noon", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]  # fmt: skip
    expected = "system:Brief\n\nBe kind;user:ab;assistant:YES[weather][noon](so);tool:rain;<think>\n"
    answer = client.responses.create(
        model="tiny", input=items, instructions="Brief", temperature=0, max_output_tokens=2
    )
    ids = live[1].llm.engine.tokenizer(expected).input_ids
    assert answer.usage.input_tokens == len(ids)


@pytest.mark.parametrize(
    ("field", "body", "words"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}, "stores no responses"),
        ("background", {"background": True}, "stores no responses"),
        ("input", {"input": []}, "not empty"),
        ("input", {"input": [{"type": "item_reference", "id": "1"}]}, "item_reference"),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ("max_output_tokens", {"max_output_tokens": 5000}, "max_output_tokens is 5000"),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}, "web_search"),
        ("tool_choice", {"tool_choice": "any"}, '"required"'),
        ("max_tokens", {"max_tokens": 5}, "unknown field"),
        ("top_logprobs", {"top_logprobs": 3}, "'message.output_text.logprobs'"),
        ("include[0]", {"include": ["all"]}, "message.output_text.logprobs"),
        ("input", {"input": [{"role": "wizard", "content": "a"}]}, "use one of system"),
    ],
)
def test_bad_requests(live, field, body, words):
    answer = httpx.post(f"{live[0]}/v1/responses", json={"input": "Hi", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field) and words in error["message"], error


def test_failure_in_a_stream_is_an_event(live, client):
    _, server = live
    stream = client.responses.create(
        model="tiny", input="Hi", max_output_tokens=400, extra_body={"ignore_eos": True}, stream=True
    )
    events = []
    for event in stream:
        events.append(event)
        if event.type.endswith("delta"):
            server.llm.fail_all("a test ends it")
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert events[-1].response.error.message == "a test ends it"
    again = client.responses.create(model="tiny", input="Hi", temperature=0)
    assert again.output_text == "YES"
