"""Parsers of tool calls and reasoning: the same message however the text is cut into parts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkernels.engine.http.parsing.message import MessageParser, collect
from fastkernels.engine.http.parsing.reasoning import REASONING_PARSERS
from fastkernels.engine.http.parsing.tool_parsers import TOOL_PARSERS, detect
from fastkernels.engine.http.parsing.tools_json import Arguments, Calls

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "where": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    "warm": {"type": "boolean"},
    "scale": {"enum": [1.5, 2.5]},
}
TOOLS = [
    {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}},
    {"name": "noon", "parameters": {"type": "object", "properties": {}}},
]


def parse(text, tools=None, reasoning=None, prompt="", cuts=(), whole=False):
    """(content, reasoning, ((name, arguments), ...)) of a text that arrives in the parts between `cuts`."""
    think = REASONING_PARSERS[reasoning](prompt) if reasoning else None
    kind = TOOL_PARSERS.get(tools, tools)
    parser = MessageParser(think, kind(TOOLS) if kind else None)
    if whole:
        message = parser.whole(text)
    else:
        ends = [*sorted({c % (len(text) + 1) for c in cuts}), len(text)]
        pieces = [p for a, b in zip([0, *ends], ends, strict=False) for p in parser.feed(text[a:b])]
        message = collect([*pieces, *parser.finish()])
    return message.content, message.reasoning, tuple((c.name, c.arguments) for c in message.calls)


W, N = ("weather", '{"city": "Bern", "days": 3}'), ("noon", "{}")
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
CASES = [  # (parser, text, content, calls)
    ("hermes", f"Let me see.\n\n{HERMES}\n", "Let me see.", (W,)),
    ("hermes", f'{HERMES}\n<tool_call>\n{{"arguments": {{}}, "name": "noon"}}\n</tool_call>', None, (W, N)),
    ("hermes", f"{HERMES}<tool_call>{{'no'}}</tool_call>", "<tool_call>{'no'}</tool_call>", (W,)),
    ("hermes", f"{HERMES} and more", " and more", (W,)),
    ("hermes", 'a < b <tool {"x": 1} \n', 'a < b <tool {"x": 1} \n', ()),
    (
        "hermes",
        '<tool_call>{"name": "noon", "arguments": {"a": "}\\"</tool_call>{", "b": [{}]}}</tool_call>',
        None,
        (("noon", '{"a": "}\\"</tool_call>{", "b": [{}]}'),),
    ),
    ("hermes", '<tool_call>{"name": "noon", "arguments": "{\\"a\\": 1}"}</tool_call>', None, (("noon", '{"a": 1}'),)),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Bern", "days": 3}}', None, (W,)),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "noon", "parameters": {}}', None, (N,)),
    (
        "llama3_json",
        f'{{"name": "noon", "parameters": {{}}}}; {{"name": "weather", "parameters": {W[1]}}}\n',
        None,
        (N, W),
    ),
    ("llama3_json", '{"name": "Bob", "age": 3} is it', '{"name": "Bob", "age": 3} is it', ()),
    ("llama3_json", '{"name": "sun", "parameters": {}}', '{"name": "sun", "parameters": {}}', ()),
    ("llama3_json", 'See {"name": "noon", "parameters": {}}', 'See {"name": "noon", "parameters": {}}', ()),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {W[1]}}}, {{"name": "noon", "arguments": {{}}}}]',
        None,
        (W, N),
    ),
    ("mistral", f"Hi[TOOL_CALLS]weather{W[1]}[TOOL_CALLS]noon[ARGS]{{}}", "Hi", (W, N)),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{W[1]}", None, (W,)),
    ("qwen3_coder", f"Let me see.\n{XML}", "Let me see.", (W,)),
    ("qwen3_xml", f"{XML}\n<tool_call>\n<function=noon>\n</function>\n</tool_call>", None, (W, N)),
    ("qwen3_coder", "<function=weather><parameter=city>Bern</parameter><parameter=days>3</function>", None, (W,)),
    (
        "qwen3_coder",
        "<function=weather><parameter=city>\n7\n8\n</parameter><parameter=where>[1, 'a']</parameter>"
        "<parameter=warm>True</parameter><parameter=scale>2.5</parameter><parameter=days>few</parameter>"
        "<parameter=new>1</parameter></function>",
        None,
        (("weather", '{"city": "7\\n8", "where": [1, "a"], "warm": true, "scale": 2.5, "days": "few", "new": "1"}'),),
    ),
    (Calls, f'[{{"name": "weather", "parameters": {W[1]}}}, {{"name":"noon","parameters":{{}}}}]', None, (W, N)),
    (Arguments, W[1], None, (W,)),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CASES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, 400), max_size=40))
def test_calls_do_not_depend_on_the_cuts(tools, text, content, calls, cuts):
    expected = (content, None, calls)
    assert parse(text, tools, cuts=cuts) == expected
    assert parse(text, tools, cuts=range(len(text))) == expected
    assert parse(text, tools, whole=True) == expected
    for _, arguments in calls:
        json.loads(arguments)


@pytest.mark.parametrize("tools", sorted(TOOL_PARSERS))
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<function=", "noon", ">", "<parameter=", "</parameter>", "</function>",
             "{", "}", "é", '"name"', '"arguments"', ":", ",", '"', "\\", "[TOOL_CALLS]", "[ARGS]", "[", "]",
             " ", "\n", "1"]
        ),
        max_size=25,
    ).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=20),
)  # fmt: skip
def test_any_text_is_parsed_the_same_in_parts(tools, text, cuts):
    assert parse(text, tools, cuts=cuts) == parse(text, tools)


@pytest.mark.parametrize("text", [HERMES[:60], HERMES[:20], HERMES.replace("3}", "}")])
def test_incomplete_call_is_content_in_a_whole_answer(text):
    content, _, calls = parse("Hi " + text, "hermes", whole=True)
    assert calls == () and content.startswith("Hi <tool_call>")


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nhm\n</think>\n\nYes", "\nhm\n", "\n\nYes"),
        ("qwen3", "user\n<think>\n", "hm</think>Yes", "hm", "Yes"),
        ("qwen3", "", "Yes <think> no", None, "Yes <think> no"),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes", None, "Yes"),
        ("qwen3", "", "<think>hm", "hm", None),
        ("qwen3", "", "<thi", None, "<thi"),
        ("deepseek_r1", "", "hm</think>Yes", "hm", "Yes"),
        ("deepseek_r1", "", "<think>hm</think>Yes", "hm", "Yes"),
        ("deepseek_r1", "", "hm </thin", "hm </thin", None),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes", None, "Yes"),
    ],
)  # fmt: skip
def test_reasoning_is_split_off(name, prompt, text, reasoning, content):
    expected = (content, reasoning, ())
    assert parse(text, None, name, prompt) == expected
    assert parse(text, None, name, prompt, cuts=range(len(text))) == expected
    assert parse(text, None, name, prompt, whole=True) == expected


def test_calls_inside_reasoning_are_no_calls():
    text = f"<think>{HERMES}</think>\n{HERMES}"
    assert parse(text, "hermes", "qwen3", cuts=range(len(text))) == (None, HERMES, (W,))
    cut = text[:-30]
    content, reasoning, calls = parse(cut, "hermes", "qwen3", whole=True)
    assert (reasoning, calls) == (HERMES, ()) and content == cut.rpartition("</think>")[2]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call> <tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('Environment: ipython {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<tool_call>{name}<arg_key>k</arg_key> arguments", None),
        ("{{ tools | tojson }}", None),
    ],
)
def test_format_is_detected_from_the_template(template, name):
    assert detect(template) is TOOL_PARSERS.get(name)


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '<tool_call>{"name": "noon", "arguments": {"a": NESTED}}</tool_call>'),
        ("mistral", '[TOOL_CALLS]noon[ARGS]{"a": NESTED}'),
        ("qwen3_coder", "<function=weather><parameter=where>NESTED</parameter></function>"),
    ],
)
def test_arguments_of_many_levels_end_no_stream(tools, text):
    whole = text.replace("NESTED", "[" * 5000 + "]" * 5000)
    for found in (parse(whole, tools), parse(whole, tools, whole=True)):
        assert found[0] or found[2]
