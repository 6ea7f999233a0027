"""Structured outputs with the OpenAI SDK: many at once, among free requests, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Literal

import openai
import pydantic
import pytest
from support.live import DEVICES, live_server, metric, replayed

HELLO = [{"role": "user", "content": "Hello"}]
REGEX = "[A-F]{2}-[0-9]{3}"
GRAMMAR = 'root ::= "[" pair ("," pair)? "]"\npair ::= [a-c] "=" [0-9]'
COLORS = ["red", "green", "light blue"]


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["Ann", "Bob", "Jörg"]
    age: int = pydantic.Field(ge=0, le=130)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=2)
    friend: Person | None = None


FLAT = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "items": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    },
    "required": ["ok", "items"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=DEVICES)
def live(tiny, request):
    sizes = {"max_num_seqs": 8, "num_blocks": 90, "max_model_len": 400}
    with live_server(tiny, device=request.param, **sizes) as (url, server):
        yield url, server


async def parsed(client, i):
    answer = await client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Person, max_tokens=300, seed=i, temperature=0.5,
        logit_bias={"96": 9, "81": 9},
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)


async def schema(client, i):
    named = {"name": "flat", "schema": FLAT, "strict": True}
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_schema", "json_schema": named}, seed=i,
        max_tokens=300, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    choice = answer.choices[0]
    found = json.loads(choice.message.content)
    assert choice.finish_reason == "stop" and set(found) == {"ok", "items"} and set(found["items"]) <= {1, 2}
    assert len(choice.logprobs.content) == answer.usage.completion_tokens


async def streamed_choice(client, i):
    stream = await client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stream=True,
        extra_body={"structured_outputs": {"choice": COLORS}},
        seed=i,
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) in COLORS
    assert chunks[-1].choices[0].finish_reason == "stop"


async def regex(client, i):
    extra = {"guided_regex": REGEX} if i % 2 else {"structured_outputs": {"regex": REGEX}}
    answer = await client.completions.create(
        model="tiny", prompt=["Hello", "there"], n=2, max_tokens=20, extra_body=extra, seed=i
    )
    assert len(answer.choices) == 4
    assert all(re.fullmatch(REGEX, c.text) and c.finish_reason == "stop" for c in answer.choices)


async def grammar(client, i):
    answer = await client.completions.create(
        model="tiny",
        prompt="Hello",
        max_tokens=30,
        extra_body={"structured_outputs": {"grammar": GRAMMAR}},
        seed=i,
    )
    assert re.fullmatch(r"\[[a-c]=\d(,[a-c]=\d)?\]", answer.choices[0].text)


async def free(client, i):
    answer = await client.completions.create(
        model="tiny", prompt="Hello", max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 24
    return answer.choices[0].text


def test_sixteen_at_once_are_all_valid(live):
    url, server = live

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            alone = await free(client, 0)
            kinds = [parsed, schema, streamed_choice, regex, grammar, free]
            work = [kind(client, i) for i in range(3) for kind in kinds]
            found = await asyncio.gather(*work)
            assert [text for text in found if text is not None] == [alone] * 3

    asyncio.run(run())
    assert server.llm.num_failed_steps == 0 and not server.llm.engine.requests
    assert metric(url, "vllm:kv_cache_usage_perc") == 0
    assert replayed(server)


def test_json_object_streams_json(live):
    url, _ = live
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=HELLO, response_format={"type": "json_object"}, stream=True, seed=1,
            logit_bias={"5": -100, "96": 50},
        )  # fmt: skip
        assert json.loads("".join(c.choices[0].delta.content or "" for c in stream)) == {}


def test_wrong_schema_is_the_clients_error(live):
    url, server = live
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for schema, words in (
            (
                {"type": "object", "properties": {"a": {"not": {}}}},
                "json: not at #/properties/a is not",
            ),
            ({"type": "nothing"}, 'response_format: json cannot be used: Unsupported type "nothing"'),
            ({"$ref": "#/$defs/missing"}, "json cannot be used"),
        ):
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="tiny", messages=HELLO, response_format=wanted)
            assert caught.value.param == "response_format" and words in caught.value.body["message"]
    assert server.llm.num_failed_steps == 0


def test_bad_words_and_allowed_tokens(live):
    url, _ = live
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        bias = {"68": 20, "69": 20, "70": 20}
        extra = {"bad_words": ["ab", "c"], "ignore_eos": True}
        text = client.completions.create(
            model="tiny", prompt="a", max_tokens=60, logit_bias=bias, extra_body=extra
        ).choices[0].text  # fmt: skip
        assert set(text) <= {"a", "b"} and "ab" not in text
        only = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=9, extra_body={"allowed_token_ids": [70, 72]}
        )
        assert set(only.choices[0].message.content) <= {"c", "e"}


def test_truncated_prompt_is_what_was_computed(live):
    url, _ = live
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for extra, echoed in (
            ({"truncate_prompt_tokens": 3}, "abc"),
            ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "def"),
            ({"truncate_prompt_tokens": 9}, "abcdef"),
        ):
            answer = client.completions.create(
                model="tiny", prompt="abcdef", max_tokens=1, echo=True, extra_body=extra
            )
            assert answer.choices[0].text.startswith(echoed)
            assert answer.usage.prompt_tokens == len(echoed)
        long = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a" * 999}],
            extra_body={"truncate_prompt_tokens": -1},
        )
        assert (long.usage.prompt_tokens, long.usage.completion_tokens) == (399, 1)
        for prompt, limits in (
            ("a" * 999, {"max_tokens": 7}),
            ([70] * 999, {"max_tokens": 7, "min_tokens": 7}),
        ):
            extra = {"truncate_prompt_tokens": -1, "ignore_eos": True, **limits}
            usage = client.completions.create(model="tiny", prompt=prompt, extra_body=extra).usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (393, 7)
