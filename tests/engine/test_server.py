"""The server, as OpenAI's client and as a shell see it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

FK_BENCH = str(Path(sys.executable).parent / "fk-bench")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(folder, *args, env=None):
    """(process, url) of a server that answers."""
    port = free_port()
    command = [FK_BENCH, "serve", str(folder), "--port", str(port), "--device", "cpu", *args]
    process = subprocess.Popen(
        command, env={**os.environ, **(env or {})}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return process, url
        except httpx.HTTPError:
            time.sleep(0.1)
    process.kill()
    raise AssertionError(process.communicate()[1])


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def url(tiny, report):
    process, url = start(
        tiny, "--served-model-name", "tiny", "--max-model-len", "512", "--num-blocks", "200", "--max-waiting", "4",
        "--max-num-seqs", "4", env={"FASTKERNELS_REPORT": str(report)},
    )  # fmt: skip
    yield url
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0, process.stderr.read()
    (file,) = report.glob("fastkernels-0-*.json")
    rows = {r["op"]: r for r in json.loads(file.read_text())["rows"]}
    assert rows["rms_norm"]["calls"] > 0 and rows["rms_norm"]["modules"] == 5


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def post(url, path="/v1/completions", **body):
    return httpx.post(url + path, json=body, timeout=60)


GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


def test_completion_is_transformers(client, tiny, greedy):
    out = client.completions.create(model="tiny", prompt=[[5, 6, 7], [80, 81]], **GREEDY)
    assert [c.index for c in out.choices] == [0, 1]
    for choice, prompt in zip(out.choices, ([5, 6, 7], [80, 81]), strict=True):
        assert choice.token_ids == greedy(tiny, prompt, 12) and choice.prompt_token_ids == prompt
        assert choice.finish_reason == "length"
    assert (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.total_tokens) == (5, 24, 29)


def test_stream_is_the_whole_in_pieces(client):
    whole = client.completions.create(model="tiny", prompt="Hello", **GREEDY)
    stream = list(
        client.completions.create(
            model="tiny", prompt="Hello", stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    last, chunks = stream[-1], stream[:-1]
    assert last.choices == [] and last.usage == whole.usage
    assert all(c.usage is None for c in chunks)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert [t for c in chunks for t in c.choices[0].token_ids] == whole.choices[0].token_ids
    assert chunks[0].choices[0].prompt_token_ids == whole.choices[0].prompt_token_ids
    assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) == 12


def test_chat(client):
    messages = [{"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    chunks = list(client.chat.completions.create(model="tiny", messages=parts, stream=True, **GREEDY))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert whole.choices[0].message.content == text != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage.prompt_tokens == len("<|user|>Hi\n<|assistant|>")


def test_seed_and_stop(client):
    extra = {"ignore_eos": True}
    seeded = {"model": "tiny", "prompt": "Hi", "max_tokens": 20, "seed": 3, "extra_body": extra}
    first, second = (client.completions.create(**seeded).choices[0].text for _ in range(2))
    assert first == second
    stop = first[4:6]
    cut = client.completions.create(**seeded, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (first[: first.find(stop)], "stop")


def test_models_and_version(client, url):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 512)
    assert httpx.get(f"{url}/version").json()["version"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "n": 2}, "n=2"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "logprobs": 3}, "logprobs"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 7}, "top_p"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [[1], []]}, "empty"),
        ({"prompt": [5, 99999]}, "99999"),
        ({"prompt": [5] * 600}, "512"),
        ({"temperature": 0}, "prompt"),
    ],
)
def test_bad_requests_get_400_in_openais_shape(url, body, message):
    answer = post(url, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error" and error["code"] == 400
    assert message in error["message"]


def test_bad_chats_and_paths(client, url):
    for messages in ([], [{"content": "no role"}], [{"role": "user", "content": [{"type": "image_url"}]}]):
        assert post(url, "/v1/chat/completions", messages=messages).status_code == 400
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="a")
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["code"] == 404
    assert httpx.post(f"{url}/v1/completions", content=b"{").status_code == 400
    assert client.completions.create(model="tiny", prompt="still here", max_tokens=1).choices


def metric(url, name):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_metrics_count(url):
    before = metric(url, "vllm:generation_tokens_total")
    calls = metric(url, 'fastkernels:op_calls_total{op="rms_norm"}')
    post(url, prompt=[5, 6], max_tokens=7, ignore_eos=True)
    assert metric(url, "vllm:generation_tokens_total") == before + 7
    assert metric(url, 'fastkernels:op_calls_total{op="rms_norm"}') == calls + 7 * 5
    assert metric(url, "vllm:time_to_first_token_seconds_count") > 0


def test_a_client_that_leaves_aborts_its_request(url):
    aborted = metric(url, 'vllm:request_success_total{finished_reason="abort"')
    body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={**body, "stream": False}, timeout=0.3)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if metric(url, 'vllm:request_success_total{finished_reason="abort"') == aborted + 2:
            break
        time.sleep(0.2)
    assert metric(url, 'vllm:request_success_total{finished_reason="abort"') == aborted + 2
    assert metric(url, "vllm:kv_cache_usage_perc") == 0


def test_a_full_queue_is_429_and_the_rest_are_served(url):
    answer = post(url, prompt=[[i] for i in range(1, 40)], max_tokens=300, ignore_eos=True)
    assert answer.status_code == 429 and "waiting" in answer.json()["error"]["message"]
    assert post(url, prompt=[5], max_tokens=2).status_code == 200


def test_bad_starts_say_why_and_show_no_traceback(tiny, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [([str(tiny), "--port", port], port), ([str(tmp_path), "--port", "0"], "config.json")]
        for args, message in cases:
            done = subprocess.run([FK_BENCH, "serve", *args], capture_output=True, text=True, timeout=90)
            assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


def test_ctrl_c_ends_it_while_it_streams(tiny):
    process, url = start(tiny)
    body = {"prompt": [5], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
        next(answer.iter_lines())
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()
