"""Clients that disconnect, stall or send malformed HTTP: only their own requests end."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest
from support.live import before_steps, live_server, metric, wait_for

from fastkernels.engine.http.requests.config import ServerConfig

LONG = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def live(tiny):
    with live_server(tiny, ServerConfig("tiny", stall_timeout=1.0), max_num_seqs=16) as (url, server):
        yield url, server


def raw(url, body, path="/v1/completions"):
    """A socket after sending a request."""
    host, port = url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def idle(url):
    return (
        metric(url, "vllm:num_requests_running") == 0
        and metric(url, "vllm:num_requests_waiting") == 0
        and metric(url, "vllm:kv_cache_usage_perc") == 0
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v1/completions", LONG, 1),
        ("/v1/completions", {**LONG, "n": 3}, 3),
        ("/v1/completions", {**LONG, "prompt": [[5], [6, 7]], "n": 2}, 4),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "ignore_eos": True, "n": 2},
            2,
        ),
    ],
)
def test_disconnect_ends_all_requests_of_the_client(live, path, body, sequences, stream):
    url, server = live
    aborted = metric(url, "vllm:request_success_total", finished_reason="abort")
    with before_steps(server, lambda: time.sleep(0.01)):  # the requests last until the client leaves
        sock = raw(url, {**body, "stream": stream}, path)
        wait_for(lambda: metric(url, "vllm:num_requests_running") == sequences)
        if stream:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        sock.close()
        wait_for(lambda: server.app.active == 0 and idle(url))
    assert metric(url, "vllm:request_success_total", finished_reason="abort") == aborted + sequences
    assert server.llm._streams == {}


def test_disconnect_does_not_change_other_answers(live):
    url, _ = live
    body = {
        "prompt": "Hello",
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    alone = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["token_ids"]
    for _ in range(3):
        leaver = raw(url, {**LONG, "stream": True})
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as answer:
            ids = []
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line[6:])["choices"][0]["token_ids"]
                    if len(ids) == 5:
                        leaver.close()
        assert ids == alone
    wait_for(lambda: idle(url))


def test_stalled_client_is_dropped(tiny):
    config = ServerConfig("tiny", stall_timeout=1.0)
    # Its answer is larger than the buffers of both ends, so that the server's write must wait.
    with live_server(tiny, config, send_buffer=4096, max_num_seqs=32) as (url, server):
        stall(url, server)


def stall(url, server):
    host, port = url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect((host, int(port)))
    body = {**LONG, "n": 16, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    wait_for(lambda: server.app.active == 1)
    started = time.monotonic()
    assert (
        httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60).status_code
        == 200
    )
    wait_for(lambda: server.app.active == 0 and idle(url), 60)
    assert time.monotonic() - started < 60
    sock.settimeout(10)
    received = b""
    while chunk := sock.recv(1 << 16):
        received += chunk
    assert b"[DONE]" not in received, "the stream was cut off, not completed"
    sock.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\nabc\r\n0\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    ],
    ids=["binary", "version", "negative", "lengths", "chunk", "path", "headers"],
)
def test_malformed_http_does_not_harm_the_server(live, sent):
    url, _ = live
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.settimeout(10)
        try:
            sock.sendall(sent)
            answer = sock.recv(1 << 16)
        except ConnectionError:
            answer = b""
    assert answer[:12] in (b"", b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 404"), answer[:200]
    assert httpx.get(f"{url}/health").status_code == 200


def test_half_a_request(live):
    url, server = live
    host, port = url.removeprefix("http://").split(":")
    for sent in (
        b"POST /v1/comple",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{",
    ):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(sent)
            time.sleep(0.1)
    wait_for(lambda: server.app.active == 0)
    assert httpx.get(f"{url}/health").status_code == 200


def test_missing_body_is_408(live, monkeypatch):
    from fastkernels.engine.http import gate

    monkeypatch.setattr(gate, "BODY_TIMEOUT", 0.2)
    url, _ = live
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.settimeout(10)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_pipelined_requests(live):
    """The second request is answered after the first."""
    url, _ = live
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as sock:
        sock.settimeout(20)
        sock.sendall((head + data) * 2)
        received = b""
        while received.count(b"HTTP/1.1 200") < 2 or received.count(b'"usage"') < 2:
            more = sock.recv(1 << 16)
            assert more
            received += more


def test_no_request_is_left(live):
    url, server = live
    wait_for(lambda: idle(url))
    assert server.llm._streams == {} and server.llm.engine.requests == {}
    assert metric(url, "fastkernels:failed_steps_total") == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "logprobs": 2, "echo": True}),
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "prompt_logprobs": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2},
        ),
        (
            "/generate",
            {
                "input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
                "sampling_params": {"max_new_tokens": 2},
            },
        ),
    ],
)  # fmt: skip
def test_log_probabilities_of_a_damaged_model_are_json(live, path, body):
    url, server = live
    weight = next(p for n, p in server.llm.engine.runner.model.named_parameters() if "norm" in n)
    kept = weight.detach().clone()
    weight.data.fill_(float("nan"))
    try:
        answer = httpx.post(url + path, json=body, timeout=60)
    finally:
        weight.data.copy_(kept)
        assert httpx.post(f"{url}/reset_prefix_cache", timeout=60).status_code == 200
    assert answer.status_code == 200, answer.text

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    json.loads(answer.text, parse_constant=refuse)
