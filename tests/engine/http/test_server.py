"""The server's answers through OpenAI's client."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from support.live import live_server, metric, unmerged

from fastkernels import __version__

GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def live(tiny):
    with live_server(tiny) as (url, server):
        yield url, server


@pytest.fixture(scope="module")
def url(live):
    return live[0]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(url, path="/v1/completions", **body):
    return httpx.post(url + path, json=body, timeout=60)


def test_completion_equals_transformers(client, tiny, greedy):
    out = client.completions.create(model="tiny", prompt=[[5, 6, 7], [80, 81]], **GREEDY)
    assert [c.index for c in out.choices] == [0, 1] and out.object == "text_completion"
    for choice, prompt in zip(out.choices, ([5, 6, 7], [80, 81]), strict=True):
        assert choice.token_ids == greedy(tiny, prompt, 12) and choice.prompt_token_ids == prompt
        assert choice.finish_reason == "length"
    assert (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.total_tokens) == (5, 24, 29)


@pytest.mark.parametrize("batch", [False, True])
def test_stream_joins_to_the_whole_answer(client, batch):
    prompt = ["Hello", "Bye"] if batch else "Hello"
    options = {**GREEDY, "model": "tiny", "prompt": prompt, "logprobs": 2}
    whole = client.completions.create(**options)
    stream = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    last, chunks = stream[-1], stream[:-1]
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.total_tokens == whole.usage.total_tokens and all(c.usage is None for c in chunks)
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(c.text for c in own) == choice.text
        assert [t for c in own for t in c.token_ids] == choice.token_ids
        assert own[0].prompt_token_ids == choice.prompt_token_ids and own[-1].finish_reason == "length"
        for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            parts = [item for c in own for item in getattr(c.logprobs, field)]
            if field in ("tokens", "text_offset"):
                assert parts == getattr(choice.logprobs, field)
            assert len(parts) == 12


def test_n_choices_repeat_with_a_seed(client):
    options = {"model": "tiny", "prompt": "Hi", "n": 3, "max_tokens": 8, "seed": 5, "temperature": 1.0}
    first, again = (client.completions.create(**options) for _ in range(2))
    texts = [c.text for c in first.choices]
    assert [c.index for c in first.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert [c.text for c in again.choices] == texts
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts
    chat = {**options, "messages": MESSAGES}
    del chat["prompt"]
    assert len({c.message.content for c in client.chat.completions.create(**chat).choices}) == 3


def test_logprobs_of_a_completion(client, url):
    out = client.completions.create(model="tiny", prompt="Hello", logprobs=3, **GREEDY)
    logprobs = out.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 12
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values()) and 1 <= len(top) <= 3 and value < 0
    lengths = [len(t) for t in logprobs.tokens]
    assert logprobs.text_offset == [sum(lengths[:i]) for i in range(12)]
    named = post(
        url, prompt="Hello", logprobs=0, max_tokens=2, temperature=0, return_tokens_as_token_ids=True
    )
    tokens = named.json()["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{t}" for t in out.choices[0].token_ids[:2]]


def test_echo_and_prompt_logprobs(client, url):
    options = {"model": "tiny", "prompt": "Hello", "echo": True, "logprobs": 1, **GREEDY}
    plain = client.completions.create(model="tiny", prompt="Hello", **GREEDY).choices[0].text
    choice = client.completions.create(**options).choices[0]
    assert choice.text == "Hello" + plain
    assert choice.logprobs.tokens[:5] == list("Hello") and choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None and len(choice.logprobs.tokens) == 17
    assert choice.logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    chunks = list(client.completions.create(stream=True, **options))
    assert "".join(c.choices[0].text for c in chunks) == choice.text
    assert [t for c in chunks for t in c.choices[0].logprobs.tokens] == choice.logprobs.tokens
    only = post(url, prompt="Hello", echo=True, max_tokens=0, logprobs=1).json()
    assert only["choices"][0]["text"] == "Hello" and only["usage"]["completion_tokens"] == 0
    assert only["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        choice.logprobs.token_logprobs[1:5], abs=1e-4
    )
    one = post(url, prompt=[7], echo=True, max_tokens=2, logprobs=1, prompt_logprobs=1).json()["choices"][0]
    assert one["prompt_logprobs"] == [None] and one["logprobs"]["token_logprobs"][0] is None
    assert len(one["logprobs"]["tokens"]) == 3
    given = post(url, prompt="Hello", prompt_logprobs=0, max_tokens=1).json()["choices"][0]["prompt_logprobs"]
    values = [next(iter(entry.values()))["logprob"] for entry in given[1:]]
    assert given[0] is None and values == pytest.approx(choice.logprobs.token_logprobs[1:5], abs=1e-4)


def test_chat(client):
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    chunks = list(client.chat.completions.create(model="tiny", messages=parts, stream=True, **GREEDY))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert whole.choices[0].message.content == text != ""
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert whole.usage.prompt_tokens == len("<|user|>Hi\n<|assistant|>")
    assert whole.system_fingerprint == chunks[-1].system_fingerprint == f"fastkernels-{__version__}"
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens == len(chunks[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", "system:S;user:a\nb;"),
        (
            "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}",
            "system:S;user:[a][b];",
        ),
        ("{% for m in messages %}{{ m.role == 'developer' }};{% endfor %}", "True;False;"),
    ],
)
def test_templates_get_parts_and_roles_that_they_read(live, template, expected):
    url, server = live
    tokenizer = server.llm.engine.tokenizer
    user = {"role": "user", "content": [{"type": "refusal", "refusal": "a"}, "b"]}
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        messages = [{"role": "developer", "content": "S"}, user]
        ids = post(url, "/tokenize", messages=messages, add_generation_prompt=False).json()["tokens"]
    finally:
        tokenizer.chat_template = before
    assert post(url, "/detokenize", tokens=ids).json()["prompt"] == expected


def test_logprobs_of_a_chat(client):
    options = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **GREEDY}
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(content) == 12
    for item in content:
        assert len(item.top_logprobs) == 2 and item.top_logprobs[0].token == item.token
        assert item.top_logprobs[0].logprob == item.logprob >= item.top_logprobs[1].logprob
        assert bytes(item.bytes).decode() == item.token
    chunks = client.chat.completions.create(stream=True, **options)
    streamed = [item for c in chunks for item in c.choices[0].logprobs.content]
    assert [i.token for i in streamed] == [i.token for i in content]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_spell_characters_of_several_tokens(client, stream):
    """Here each byte is a token: the last of a character has its text and its bytes, and they add up to the content."""
    text = "日本🎉é!"
    options = {
        "max_tokens": 40,
        "seed": 1,
        "stream": stream,
        "extra_body": {"structured_outputs": {"regex": text}},
    }
    made = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, **options
    )
    items = [item for c in (made if stream else [made]) for item in c.choices[0].logprobs.content]
    tokens = ["", "", "日", "", "", "本", "", "", "", "🎉", "", "é", "!"]
    assert [item.token for item in items] == tokens
    assert b"".join(bytes(item.bytes) for item in items).decode() == text
    made = client.completions.create(model="tiny", prompt="Hello", logprobs=1, **options)
    found = [c.choices[0].logprobs for c in (made if stream else [made])]
    assert [t for part in found for t in part.tokens] == tokens
    offsets = [o for part in found for o in part.text_offset]
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]


def test_tools_and_template_arguments_reach_the_template(live, client):
    url, server = live
    tokenizer = server.llm.engine.tokenizer
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        template + "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}{{ mood or '' }}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}"
        "{% endfor %}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}

    def rendered(**body):
        ids = post(url, "/tokenize", **body).json()["tokens"]
        return post(url, "/detokenize", tokens=ids).json()["prompt"]

    try:
        more = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
        text = rendered(messages=more, tools=[tool], chat_template_kwargs={"mood": "gay"})
        assert text.endswith("[weather]gayBern")
        server.context.tools.name = "hermes"  # the template has no format of calls that could be detected
        out = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[tool], tool_choice="auto", max_tokens=2
        )
        none = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[tool], tool_choice="none", max_tokens=2
        )
        assert out.usage.prompt_tokens == none.usage.prompt_tokens + len("[weather]")
    finally:
        tokenizer.chat_template, server.context.tools.name = template, None
    refused = post(
        url, "/v1/chat/completions", messages=MESSAGES, chat_template_kwargs={"chat_template": "x"}
    )
    assert refused.status_code == 400 and "chat_template" in refused.json()["error"]["message"]


def test_stop_strings_and_tokens(client):
    seeded = {
        "model": "tiny",
        "prompt": "Hi",
        "max_tokens": 20,
        "seed": 3,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**seeded).choices[0].text
    stop = whole[4:6]
    for given in (stop, [stop, "never"]):
        cut = client.completions.create(**seeded, stop=given).choices[0]
        assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[: whole.find(stop)], "stop", stop)
    chunks = list(client.completions.create(**seeded, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole[: whole.find(stop)]
    token = client.completions.create(model="tiny", prompt="Hi", **GREEDY).choices[0].token_ids[3]
    body = {**GREEDY["extra_body"], "stop_token_ids": [token]}
    ended = client.completions.create(
        model="tiny", prompt="Hi", temperature=0, max_tokens=12, extra_body=body
    )
    assert ended.choices[0].stop_reason == token and ended.choices[0].finish_reason == "stop"


def test_logit_bias_and_penalties(client):
    biased = client.completions.create(model="tiny", prompt="Hi", logit_bias={"70": 100}, **GREEDY)
    assert biased.choices[0].token_ids == [70] * 12
    options = {"logit_bias": {"70": 50}, "frequency_penalty": 2.0, **GREEDY}
    fewer = client.completions.create(model="tiny", prompt="Hi", **{**options, "max_tokens": 60}).choices[0]
    assert 0 < fewer.token_ids.count(70) < 60


def test_continuous_usage_and_cached_tokens(live, client):
    options = {"model": "tiny", "prompt": list(range(10, 110)), "stream": True, **GREEDY}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    with unmerged(live[1]):
        chunks = list(client.completions.create(**options, stream_options=usage))
    assert [c.usage.completion_tokens for c in chunks] == [*range(1, 13), 12]
    again = list(client.completions.create(**options, stream_options=usage))
    assert again[-1].usage.prompt_tokens_details.cached_tokens == 96
    for path in ("reset_prefix_cache", "flush_cache"):
        assert httpx.post(f"{str(client.base_url).removesuffix('v1/')}{path}").json() == {"success": True}
        flushed = list(client.completions.create(**options, stream_options=usage))
        assert flushed[-1].usage.prompt_tokens_details.cached_tokens == 0


def test_tokenize_round_trip(url):
    text = "Hé 😀"
    found = post(url, "/tokenize", prompt=text, return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(text.encode()) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert post(url, "/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
    assert post(url, "/detokenize", tokens=[10**6]).status_code == 400


def test_models_version_and_ids(client, url):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 512) and client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.models.retrieve("nope")
    assert httpx.get(f"{url}/version").json()["version"] and httpx.get(f"{url}/ping").status_code == 200
    assert post(url, prompt="a", max_tokens=1, request_id="mine").json()["id"] == "cmpl-mine"


def test_requests_of_vllm_and_sglang_benchmarks(url):
    vllm = {
        "model": "tiny", "prompt": "Hi", "repetition_penalty": 1.0, "max_tokens": 3, "logprobs": None, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    sglang = {
        "model": "tiny", "prompt": "Hi", "best_of": 1, "max_tokens": 3, "stream": True, "temperature": 0.0,
        "ignore_eos": True,
    }  # fmt: skip
    for body in (vllm, sglang):
        lines = [line for line in post(url, **body).text.splitlines() if line]
        assert lines[-1] == "data: [DONE]" and all(json.loads(line[6:])["id"] for line in lines[:-1])


def test_metrics_count(url):
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_params_n_sum")
    before = [metric(url, name) for name in names]
    calls = metric(url, "fastkernels:op_calls_total", op="rms_norm")
    post(url, prompt=[5, 6], max_tokens=7, ignore_eos=True)
    assert [metric(url, n) - b for n, b in zip(names, before, strict=True)] == [7, 2, 1]
    assert metric(url, "fastkernels:op_calls_total", op="rms_norm") == calls + 7 * 5
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
        assert metric(url, f"vllm:{name}_seconds_count") > 0
    assert metric(url, "vllm:request_success_total", finished_reason="length") > 0
