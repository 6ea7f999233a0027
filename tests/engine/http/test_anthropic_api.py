"""The Messages API through Anthropic's client, whose stream helper collects the blocks."""

from __future__ import annotations

import anthropic
import httpx
import pytest
from support.live import live_server, unmerged

from fastkernels.engine.http.requests.config import ServerConfig

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.reasoning %}({{ m.reasoning }}){% endif %}{% if not loop.last %};{% endif %}{% endfor %}{{ tools or '' }}"
    "{% if add_generation_prompt %};<think>{{ '\n' }}{% endif %}"
)
WEATHER = {
    "name": "weather",
    "input_schema": {
        "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"], "additionalProperties": False,
    },
}  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]
GREEDY = {"model": "tiny", "messages": HI, "max_tokens": 100, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A model that answers '\\n' with reasoning and YES."""
    from support.tiny import make_scripted

    folder = make_scripted(tmp_path_factory.mktemp("scripted"), "\nso</think>YES")
    config = ServerConfig("tiny", api_key="key", reasoning_parser="qwen3", tool_call_parser="hermes")
    with live_server(folder, config) as (url, server):
        server.llm.engine.tokenizer.chat_template = TEMPLATE
        yield url, server


@pytest.fixture(scope="module")
def client(live):
    with anthropic.Anthropic(base_url=live[0], api_key="key", max_retries=0) as client:
        yield client


def ask(client, **more):
    return client.messages.create(**{**GREEDY, **more})


def streamed(client, **more):
    """(the stream's last message, its events)."""
    with client.messages.stream(**{**GREEDY, **more}) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def test_message_has_thinking_and_text(client):
    whole, (stream, events) = ask(client), streamed(client)
    for message in (whole, stream):
        assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn")
        thinking, text = message.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "so", "YES")
        assert thinking.signature and message.usage.output_tokens == len("so</think>YES") + 1  # and EOS
    assert whole.id.startswith("msg-")
    assert whole.usage.input_tokens == stream.usage.input_tokens + stream.usage.cache_read_input_tokens
    kinds = [e.type for e in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


@pytest.mark.parametrize("create", [ask, lambda *args, **more: streamed(*args, **more)[0]])
def test_limit_and_stop_sequence_are_the_reasons(client, create):
    assert create(client, max_tokens=12).stop_reason == "max_tokens"
    stopped = create(client, stop_sequences=["ES"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ES")
    assert stopped.content[-1].text == "Y"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tool_use_whole_and_streamed(live, client, choice):
    options = {"tools": [WEATHER], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    whole = ask(client, **options)
    with unmerged(live[1]):
        stream, events = streamed(client, **options)
    for message in (whole, stream):
        (use,) = message.content
        assert (use.type, use.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
        assert use.input["days"] in (1, 2, 3)
    assert sum(e.type == "input_json" for e in events) > 2, "the input streams"


def test_cut_tool_use_has_no_input(client):
    cut = ask(client, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}, max_tokens=3)
    assert (cut.content[0].input, cut.stop_reason) == ({}, "max_tokens")
    again = [*HI, {"role": "assistant", "content": cut.content}, *HI]
    assert ask(client, messages=again).content[-1].text == "YES"


def rendered(live, **body):
    """The prompt of a request."""
    url, server = live
    seen = []
    make = server.llm.make_request

    def spy(request_id, ids, *rest, **more):
        seen.append(server.llm.engine.tokenizer.decode(ids))
        return make(request_id, ids, *rest, **more)

    server.llm.make_request = spy
    try:
        sent = {"max_tokens": 1, "messages": HI, **body}
        answer = httpx.post(f"{url}/v1/messages", json=sent, headers={"x-api-key": "key"}, timeout=60)
        assert answer.status_code == 200, answer.text
    finally:
        del server.llm.make_request
    return seen[0]


def test_blocks_reach_the_template(live, client):
    first = ask(client)
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"days": 2}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [*(b.model_dump() for b in first.content), use]},
        {
            "role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]  # fmt: skip
    system = [{"type": "text", "text": "x-anthropic-billing-header: 5"}, {"type": "text", "text": "Brief"}]
    expected = 'system:Brief;user:a;assistant:YES[weather{"days": 2}](so);tool:rain;user:so?;<think>\n'
    assert rendered(live, messages=messages, system=system) == expected
    tokens = client.messages.count_tokens(model="tiny", messages=messages, system=system).input_tokens
    assert tokens == len(live[1].llm.engine.tokenizer(expected, add_special_tokens=False).input_ids)


def test_message_of_the_assistant_is_continued(live):
    assert rendered(live, messages=[*HI, {"role": "assistant", "content": "So"}]) == "user:Hi;assistant:So"


def test_json_schema_is_followed(client):
    wanted = {"format": {"type": "json_schema", "schema": {"const": 7}}}
    assert ask(client, output_config=wanted).content[-1].text == "7"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "source of a block of type image must be",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
            "with role assistant",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"max_tokens": 5000}, "max_tokens is 5000"),
        ({"n": 2}, "unknown field"),
    ],
)
def test_bad_requests_have_the_clients_error(live, body, words):
    sent = {"messages": HI, "max_tokens": 1, **body}
    answer = httpx.post(f"{live[0]}/v1/messages", json=sent, headers={"x-api-key": "key"})
    error = answer.json()
    assert answer.status_code == 400 and error["type"] == "error", error
    assert error["error"]["type"] == "invalid_request_error" and words in error["error"]["message"], error


def test_errors_are_the_clients_exceptions(live, client):
    with pytest.raises(anthropic.NotFoundError, match="no-such"):
        ask(client, model="no-such")
    stranger = anthropic.Anthropic(base_url=live[0], api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError, match="API key"):
        ask(stranger)
    with anthropic.Anthropic(base_url=live[0], auth_token="key", max_retries=0) as bearer:
        assert ask(bearer).content[-1].text == "YES"


def test_failure_in_a_stream_is_an_error_event(live, client):
    _, server = live

    def read():
        with unmerged(server), client.messages.stream(**GREEDY) as stream:
            for event in stream:
                if event.type == "content_block_start":
                    server.llm.fail_all("a test ends it")

    with pytest.raises(anthropic.APIStatusError, match="a test ends it"):
        read()
    assert ask(client).content[-1].text == "YES"
