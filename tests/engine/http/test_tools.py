"""Tool calls and reasoning through OpenAI's client. Grammars make the random model write calls."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from support.live import DEVICES, live_server, replayed, unmerged

from fastkernels.core.registry import UnknownName
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.server import Server
from fastkernels.engine.options.config import EngineConfig

HERMES = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %};"
    "{% endfor %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "noon"}},
]
MESSAGES = [{"role": "user", "content": "Hi"}]
CALLS = (
    r'Let me see\.\n<tool_call>\n\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{2}", "days": [1-3]\}\}'
    r"\n</tool_call>"
    r'\n<tool_call>\n\{"name": "noon", "arguments": \{\}\}\n</tool_call>'
)  # fmt: skip


@pytest.fixture(scope="module", params=DEVICES)
def live(tiny, request):
    config = ServerConfig("tiny", reasoning_parser="qwen3")
    with live_server(tiny, config, device=request.param) as (url, server):
        server.llm.engine.tokenizer.chat_template = HERMES
        yield url, server


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, regex=None, **more):
    extra = {"structured_outputs": {"regex": regex}} if regex else {}
    extra.update(more.pop("extra_body", {}))
    options = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 200, **more}
    return client.chat.completions.create(**options, extra_body=extra)


def joined(stream):
    """(content, reasoning, calls, finish reason) of a stream's choice 0, with the shape of each delta checked."""
    content = reasoning = ""
    calls, reason = [], None
    for chunk in stream:
        for choice in chunk.choices:
            delta, reason = choice.delta, choice.finish_reason or reason
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or []:
                if call.index == len(calls):
                    assert call.id and call.type == "function" and call.function.name
                    calls.append([call.function.name, ""])
                else:
                    assert call.index == len(calls) - 1 and call.id is None and call.function.name is None
                calls[-1][1] += call.function.arguments
    return content, reasoning, [tuple(c) for c in calls], reason


def test_calls_are_parsed_whole_and_streamed(live, client):
    whole = ask(client, CALLS, tools=TOOLS).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "Let me see."
    first, second = whole.message.tool_calls
    assert first.id != second.id and (second.function.name, second.function.arguments) == ("noon", "{}")
    found = json.loads(first.function.arguments)
    assert set(found) == {"city", "days"} and len(found["city"]) == 3 and found["days"] in (1, 2, 3)
    with unmerged(live[1]):
        chunks = list(ask(client, CALLS, tools=TOOLS, stream=True))
    deltas = [c.choices[0].delta for c in chunks]
    assert deltas[0].role == "assistant" and sum(bool(d.tool_calls) for d in deltas) > 10, "arguments stream"
    assert all(d.content or d.tool_calls for d in deltas[1:-1]), "no empty chunks"
    content, _, calls, reason = joined(chunks)
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert calls == [("weather", first.function.arguments), ("noon", "{}")]


def test_stream_helper_of_the_client_collects_the_calls(client):
    """Its accumulator fails on deltas out of order."""
    body = {"structured_outputs": {"regex": CALLS}}
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=TOOLS, seed=3, max_tokens=200, extra_body=body
    ) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [(e.index, e.name) for e in done] == [(0, "weather"), (1, "noon")]
    assert [c.function.arguments for c in message.tool_calls] == [e.arguments for e in done]


def test_one_call_without_parallel_calls(client):
    stream = ask(client, CALLS, tools=TOOLS, parallel_tool_calls=False, stream=True)
    assert [name for name, _ in joined(stream)[2]] == ["weather"]


def test_cut_off_call_is_content(client):
    choice = ask(client, CALLS, tools=TOOLS, max_tokens=60).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content.startswith('Let me see.\n<tool_call>\n{"name": "weather"')


def parts(client, stream, **more):
    """(content, [(name, arguments), ...], finish_reason) of an answer, streamed or not."""
    answer = ask(client, tools=TOOLS[:1], stream=stream, **more)
    if stream:
        content, _, calls, reason = joined(answer)
        return content, calls, reason
    (choice,) = answer.choices
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_forced_call_cut_in_its_name_is_content(client, stream):
    """Cut after its name, it is a call with the arguments so far."""
    text = '[{"name": "weather", "parameters": '
    seen = set()
    for max_tokens in range(1, 45, 2):
        content, calls, reason = parts(client, stream, tool_choice="required", max_tokens=max_tokens)
        assert reason == "length"
        if calls:
            assert content == "" and len(calls) == 1 and calls[0][0] == "weather"
            seen.add("no arguments" if not calls[0][1] else "arguments")
        else:
            assert content and text.replace(" ", "").startswith(content.replace(" ", ""))
            seen.add("content")
    assert seen == {"content", "no arguments", "arguments"}


@pytest.mark.parametrize("stream", [False, True])
def test_call_cut_by_a_stop_string_is_no_finished_call(client, stream):
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    _, ((_, arguments),), reason = parts(client, stream, **options)
    assert reason == "tool_calls"
    _, ((_, cut),), reason = parts(client, stream, **options, stop=['days"'])
    assert arguments.startswith(cut) and cut.endswith('"') and reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_required_choice_forces_calls(client, stream):
    answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=stream)
    if stream:
        content, _, calls, reason = joined(answer)
    else:
        (choice,) = answer.choices
        content, reason = choice.message.content or "", choice.finish_reason
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    ((name, arguments),) = calls
    assert content == "" and reason == "tool_calls" and name in ("weather", "noon")
    if name == "weather":
        check_weather(arguments)


def check_weather(arguments):
    found = json.loads(arguments)
    assert set(found) == {"city", "days"} and isinstance(found["city"], str) and found["days"] in (1, 2, 3)


def test_schemas_with_definitions_are_followed(client):
    """Their references are relative to the function's own schema."""

    class Place(pydantic.BaseModel):
        x: Literal[1, 2]
        near: Place | None

    class Route(pydantic.BaseModel):
        start: Place

    class Place2(pydantic.BaseModel):
        y: Literal[3]

    class Stop(pydantic.BaseModel):
        place: Place2

    Place2.__name__ = "Place"  # another definition of the same name
    options = [openai.pydantic_function_tool(m, name=m.__name__) for m in (Route, Stop)]
    seen = set()
    for seed in range(6):
        answer = ask(client, tools=options, tool_choice="required", parallel_tool_calls=False, seed=seed)
        for call in answer.choices[0].message.tool_calls:
            if answer.choices[0].finish_reason != "length":
                seen.add(call.function.name)
                {"Route": Route, "Stop": Stop}[call.function.name].model_validate_json(
                    call.function.arguments
                )
    assert seen == {"Route", "Stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_named_choice_forces_that_function(client, stream):
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        ((name, arguments),) = joined(answer)[2]
    else:
        ((name, arguments),) = [
            (c.function.name, c.function.arguments) for c in answer.choices[0].message.tool_calls
        ]
    assert name == "weather"
    check_weather(arguments)


def test_many_forced_calls_among_free_requests(live):
    """Requests with several choices in one batch, each choice with its own parser."""
    url, server = live
    free = {"model": "tiny", "prompt": "Hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    forced = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "n": 2, "max_tokens": 200}

    def post(path, body):
        return httpx.post(f"{url}/v1/{path}", json=body, timeout=120).json()["choices"]

    alone = post("completions", free)[0]["text"]
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(post, "chat/completions", {**forced, "seed": i}) for i in range(4)]
        texts = [pool.submit(post, "completions", free) for _ in range(4)]
    assert [text.result()[0]["text"] for text in texts] == [alone] * 4
    choices = [choice for call in calls for choice in call.result()]
    assert len(choices) == 8
    for choice in choices:
        if choice["finish_reason"] != "length":
            for call in choice["message"]["tool_calls"]:
                assert call["function"]["name"] in ("weather", "noon")
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert replayed(server)


def test_tool_results_reach_the_template(live, client):
    url, _ = live
    call = {"id": "1", "type": "function", "function": {"name": "noon", "arguments": '{"at": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why"},
        {"role": "tool", "tool_call_id": "1", "content": "12"},
    ]
    ids = httpx.post(f"{url}/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = httpx.post(f"{url}/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == 'weather noon user:Hi;assistant:why<tool_call>{"at": 1}</tool_call>;tool:12;'
    assert ask(client, messages=messages, tools=TOOLS, max_tokens=2).usage.prompt_tokens == len(ids)


def rendered(url, messages, **more):
    """The text that the chat template makes of a conversation."""
    ids = httpx.post(f"{url}/tokenize", json={"messages": messages, **more}).json()["tokens"]
    return httpx.post(f"{url}/detokenize", json={"tokens": ids}).json()["prompt"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {}), ("  ", {}), (None, {}), ('{"', {}), ("{", {}), ('"text"', {}), ("5", {}), ("[1]", {}), ("null", {}),
        ("[" * 100_000, {}), ('{"a": "\\ud800"}', {}), ('{"a": {"b": null}}', {"a": {"b": None}}), ({"a": 1}, {"a": 1}),
    ],
)  # fmt: skip
def test_history_with_any_arguments_continues(live, given, expected):
    """An answer that max_tokens cut off must not end its conversation."""
    url = live[0]
    call = {"id": "1", "type": "function", "function": {"name": "noon", "arguments": given}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert rendered(url, history) == f"user:Hi;assistant:<tool_call>{json.dumps(expected)}</tool_call>;"
    body = {"messages": history, "max_tokens": 1}
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    if isinstance(given, str):
        call = {"type": "function_call", "call_id": "1", "name": "noon", "arguments": given}
        body = {"input": [{"role": "user", "content": "Hi"}, call], "max_output_tokens": 1}
        assert httpx.post(f"{url}/v1/responses", json=body).status_code == 200


def test_cut_off_answers_of_the_server_are_accepted_back(client):
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, lengths in (("required", (1, 20, 30, 40)), (named, (1, 2, 5, 10))):
        for max_tokens in lengths:
            answer = ask(client, tools=TOOLS, tool_choice=choice, max_tokens=max_tokens).choices[0]
            assert answer.finish_reason == "length"
            history = [*MESSAGES, answer.message.model_dump(exclude_unset=True), *MESSAGES]
            assert ask(client, messages=history, tools=TOOLS, max_tokens=1).choices


def test_empty_list_of_calls_is_no_call(live):
    template = "{% for m in messages %}{{ 'calls' if m.tool_calls is defined else m.content }};{% endfor %}"
    url, server = live
    server.llm.engine.tokenizer.chat_template = template
    try:
        for calls in ([], None):
            assistant = {"role": "assistant", "content": "a", "tool_calls": calls}
            assert rendered(url, [*MESSAGES, assistant]) == "Hi;a;"
    finally:
        server.llm.engine.tokenizer.chat_template = HERMES


@pytest.mark.parametrize(
    ("field", "body", "words"),
    [
        ("tool_choice", {"tool_choice": "required"}, "needs tools"),
        ("tool_choice", {"tool_choice": "any", "tools": TOOLS}, '"required"'),
        (
            "tool_choice",
            {"tool_choice": {"type": "function", "function": {"name": "sun"}}, "tools": TOOLS},
            "'sun'",
        ),
        (
            "tool_choice",
            {"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"},
            "cannot both decide",
        ),
    ],
)
def test_bad_choices(live, field, body, words):
    answer = httpx.post(f"{live[0]}/v1/chat/completions", json={"messages": MESSAGES, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field) and words in error["message"]


def test_tools_that_would_be_ignored_are_refused(live):
    url, server = live
    tokenizer = server.llm.engine.tokenizer
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 1}
    try:
        for template, choice, status, words in (
            ("{{ messages[0].content }}", "auto", 400, "template ignores tools"),
            ("{{ messages[0].content }}", "required", 400, "template ignores tools"),
            ("{{ messages[0].content }}", "none", 200, ""),
            ("{{ messages[0].content }}{{ tools }}", "auto", 400, "--tool-call-parser (hermes, llama3_json"),
            (None, "auto", 400, "no chat template"),
        ):
            tokenizer.chat_template = template
            answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "tool_choice": choice})
            assert answer.status_code == status and words in answer.text
    finally:
        tokenizer.chat_template = HERMES


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A model that answers '\\n' with reasoning and YES, behind a template that begins the reasoning."""
    from support.tiny import make_scripted

    folder = make_scripted(tmp_path_factory.mktemp("scripted"), "\nso</think>YES")
    with live_server(folder, ServerConfig("tiny", reasoning_parser="qwen3")) as (url, server):
        server.llm.engine.tokenizer.chat_template = (
            "{{ messages[0].content }}{% if thinks is not defined %}<think>{% endif %}{{ '\n' }}"
        )
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield url, client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", [True, False])
def test_reasoning_is_separate(thinker, stream, shown):
    _, client = thinker
    answer = ask(client, temperature=0, stream=stream, extra_body={"include_reasoning": shown})
    if stream:
        content, reasoning, _, reason = joined(answer)
    else:
        (choice,) = answer.choices
        content, reason = choice.message.content, choice.finish_reason
        reasoning = getattr(choice.message, "reasoning", None) or ""
    assert (content, reasoning, reason) == ("YES", "so" if shown else "", "stop")


def test_answer_without_reasoning_is_content(thinker):
    _, client = thinker
    answer = ask(client, temperature=0, extra_body={"chat_template_kwargs": {"thinks": False}})
    assert answer.choices[0].message.content == "so</think>YES"


def test_unknown_parsers_are_refused_before_the_model_is_loaded(tmp_path):
    for config in (ServerConfig(tool_call_parser="hermess"), ServerConfig(reasoning_parser="qwen")):
        with pytest.raises(UnknownName, match="Did you mean"):
            Server(EngineConfig(str(tmp_path / "missing")), config)


CHATML = (
    "<|im_start|>system\nYou call functions.{% if tools %} These exist: {% for t in tools %}{{ t.function | tojson }}\n"
    "{% endfor %}Call one with <tool_call>{{ '{' }}\"name\": ..., \"arguments\": ...{{ '}' }}</tool_call>{% endif %}"
    "<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.slow
def test_real_model_is_forced_to_a_sensible_call():
    """Its tokens have several bytes, so that calls, names and arguments begin inside a token."""
    from support.smollm2 import smollm2_path

    question = [{"role": "user", "content": "How is the weather in Paris for the next 2 days?"}]
    city = {"type": "string", "maxLength": 20}
    parameters = {**PARAMETERS, "properties": {**PARAMETERS["properties"], "city": city}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    hermes = r'<tool_call>\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{1,12}", "days": [1-3]\}\}</tool_call>'
    with live_server(smollm2_path(), ServerConfig("tiny")) as (url, server):
        server.llm.engine.tokenizer.chat_template = CHATML
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            options = {"messages": question, "tools": tools, "temperature": 0}
            for more in ({"tool_choice": "required", "parallel_tool_calls": False}, {"regex": hermes}):
                (call,) = ask(client, **options, **more).choices[0].message.tool_calls
                assert (
                    call.function.name == "weather" and json.loads(call.function.arguments)["city"] == "Paris"
                )
                _, _, calls, reason = joined(ask(client, **options, **more, stream=True))
                assert (calls, reason) == ([("weather", call.function.arguments)], "tool_calls")


@pytest.mark.slow
def test_real_model_calls_by_itself():
    """After three conversations with calls, with `auto` and without a grammar, in both APIs."""
    from support.smollm2 import smollm2_path

    function = {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    chat, items = [], []
    for city in ("London", "Berlin", "Madrid", "Rome"):
        question = {"role": "user", "content": f"What is the weather in {city}?"}
        answer = {"role": "assistant", "content": f"It is sunny in {city}."}
        call = {"name": "weather", "arguments": json.dumps({"city": city})}
        made = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
        chat += [question, made, {"role": "tool", "tool_call_id": city, "content": "sunny"}, answer]
        result = {"type": "function_call_output", "call_id": city, "output": "sunny"}
        items += [question, {"type": "function_call", "call_id": city, **call}, result, answer]
    with live_server(smollm2_path(), ServerConfig("tiny")) as (url, server):
        server.llm.engine.tokenizer.chat_template = CHATML
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            options = {
                "messages": chat[:-3],
                "tools": [{"type": "function", "function": function}],
                "temperature": 0,
            }
            whole = ask(client, **options).choices[0]
            expected = [("weather", '{"city": "Rome"}')]
            calls = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
            assert (calls, whole.finish_reason) == (expected, "tool_calls")
            assert joined(ask(client, **options, stream=True))[2:] == (expected, "tool_calls")
            response = client.responses.create(
                model="tiny", input=items[:-3], tools=[{"type": "function", **function}], temperature=0
            )
            assert [(o.name, o.arguments) for o in response.output] == expected
