"""SGLang's /generate, against the OpenAI routes of the same server."""

from __future__ import annotations

import json

import httpx
import pytest
from support.live import live_server


@pytest.fixture(scope="module")
def url(tiny):
    with live_server(tiny) as (url, _):
        yield url


def generate(url, **body):
    return httpx.post(f"{url}/generate", json=body, timeout=60)


SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def test_generate_equals_a_completion(url, tiny, greedy):
    answer = generate(url, input_ids=[5, 6, 7], sampling_params=SAMPLING, rid="mine").json()
    assert answer["output_ids"] == greedy(tiny, [5, 6, 7], 8)
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 8)
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    text = generate(url, text="Hello", sampling_params=SAMPLING).json()
    same = httpx.post(
        f"{url}/v1/completions",
        json={"prompt": "Hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True},
    )
    assert text["text"] == same.json()["choices"][0]["text"]


def test_stream_is_cumulative(url):
    body = {"text": ["Hello", "Bye"], "sampling_params": SAMPLING, "return_logprob": True, "stream": True}
    whole = generate(url, **{**body, "stream": False}).json()
    last, counts = {}, {0: [], 1: []}
    lines = [x[6:] for x in generate(url, **body).text.splitlines() if x.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for event in map(json.loads, lines):
        before = last.get(event["index"], {"text": ""})
        assert event["text"].startswith(before["text"])
        counts[event["index"]].append(event["meta_info"]["completion_tokens"])
        last[event["index"]] = event
    for i in (0, 1):
        assert counts[i] == sorted(set(counts[i])) and counts[i][-1] == 8
        assert last[i]["text"] == whole[i]["text"] and last[i]["output_ids"] == whole[i]["output_ids"]
        for got, want in zip(
            last[i]["meta_info"]["output_token_logprobs"], whole[i]["meta_info"]["output_token_logprobs"],
            strict=True,
        ):  # fmt: skip
            assert got[1:] == want[1:] and got[0] == pytest.approx(want[0], abs=1e-4)


def test_logprobs_of_prompt_and_output(url):
    answer = generate(
        url, input_ids=[5, 6, 7], sampling_params=SAMPLING, return_logprob=True, logprob_start_len=1,
        top_logprobs_num=2, return_text_in_logprobs=True,
    ).json()  # fmt: skip
    meta = answer["meta_info"]
    assert [i for _, i, _ in meta["input_token_logprobs"]] == [6, 7]
    assert [i for _, i, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert "".join(t for _, _, t in meta["output_token_logprobs"]) == answer["text"]
    for (value, token, _), top in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        assert len(top) == 2 and top[0][1] == token and top[0][0] == value >= top[1][0]


def test_n_and_default_length(url):
    several = generate(
        url, text="Hi", sampling_params={"n": 2, "max_new_tokens": 4, "ignore_eos": True}
    ).json()
    assert len(several) == 2 and all(o["meta_info"]["completion_tokens"] == 4 for o in several)
    default = generate(url, text="Hi", sampling_params={"ignore_eos": True}).json()
    assert default["meta_info"]["completion_tokens"] == 128
    long = generate(url, input_ids=[5] * 500, sampling_params={"ignore_eos": True}).json()
    assert long["meta_info"]["completion_tokens"] == 12  # what fits


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_may_have_its_own_parameters(url, stream):
    params = [{**SAMPLING, "max_new_tokens": 3, "n": 2}, {**SAMPLING, "regex": "[0-9]{5}", "n": 2}]
    answer = generate(url, text=["Hello", "Bye"], sampling_params=params, stream=stream)
    if stream:
        events = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
        found = [max((e for e in events if e["index"] == i), key=lambda e: len(e["text"])) for i in range(4)]
    else:
        found = answer.json()
    assert [o["meta_info"]["completion_tokens"] for o in found[:2]] == [3, 3]
    assert found[0]["text"] == found[1]["text"], "greedy"
    assert all(o["text"].isdigit() and len(o["text"]) == 5 for o in found[2:])
    alone = generate(url, text=["Hello"], sampling_params=[params[0]]).json()
    assert alone[0]["output_ids"] == found[0]["output_ids"]


def test_structured_output(url):
    answer = generate(url, text="Hi", sampling_params={"regex": "[0-9]{3}", "max_new_tokens": 8}).json()
    assert answer["text"].isdigit() and len(answer["text"]) == 3
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    ("field", "body", "words"),
    [
        ("text", {}, "either text or input_ids"),
        ("text", {"text": "a", "input_ids": [1]}, "either text or input_ids"),
        (
            "sampling_params.max_new_tokens",
            {"text": "a", "sampling_params": {"max_new_tokens": 9999}},
            "9999",
        ),
        ("sampling_params.stop", {"text": "a", "sampling_params": {"stop": 5}}, "list of strings"),
        ("sampling_params.top_p", {"text": "a", "sampling_params": {"top_p": 2}}, "2"),
        ("max_tokens", {"text": "a", "sampling_params": {"max_tokens": 2}}, "unknown field"),
        ("sampling_params", {"text": "a", "sampling_params": 5}, "object"),
        ("sampling_params", {"text": ["a", "b"], "sampling_params": [{}]}, "1 entries for 2 prompts"),
        ("sampling_params", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "n must be the same"),
        ("sampling_params[1].top_p", {"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "2"),
        ("input_ids", {"input_ids": [[1], []]}, "token ids"),
        ("input_ids", {"input_ids": [1, -1]}, "token ids"),
        ("lora_path", {"text": "a", "lora_path": "x"}, "not supported"),
        (
            "logprob_start_len",
            {"text": "a", "return_logprob": True, "logprob_start_len": 0, "stream": True},
            "-1",
        ),
    ],
)
def test_bad_requests(url, field, body, words):
    answer = generate(url, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field) and words in error["message"], error


def test_info_of_model_and_server(url):
    info = httpx.get(f"{url}/get_model_info").json()
    assert info == httpx.get(f"{url}/model_info").json()
    assert info["is_generation"] and info["architectures"] == ["LlamaForCausalLM"]
    server = httpx.get(f"{url}/get_server_info").json()
    assert server == httpx.get(f"{url}/server_info").json()
    assert server["context_length"] == 512 and server["max_total_num_tokens"] > 512
