"""Silent and half-open connections, browsers' origins, and a rank that died."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import httpx
import pytest
from support.live import live_server, wait_for

from fastkernels.engine.http.requests.config import ServerConfig

LIMIT = 0.3


@pytest.fixture(scope="module")
def url(tiny):
    config = ServerConfig(
        "tiny",
        api_key="k",
        header_timeout=LIMIT,
        allowed_origins=("https://a.example",),
        timeout_keep_alive=30,
    )
    with live_server(tiny, config) as (url, _):
        yield url


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    sock.settimeout(60)
    return sock


REQUEST = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET /vers", b"GET /version HTTP/1.1\r\nhost: x\r\n"])
@pytest.mark.parametrize("first", [b"", REQUEST], ids=["new", "reused"])
def test_connection_without_a_request_is_closed(url, sent, first):
    started = time.monotonic()
    with connect(url) as sock:
        if first:
            started = time.monotonic()
            sock.sendall(first)
            answer = b""
            while not answer.endswith(b"}"):
                received = sock.recv(1 << 16)
                assert received
                answer += received
            if not sent:
                return  # an idle connection after an answer has timeout_keep_alive
        with contextlib.suppress(ConnectionError):  # closed between two bytes
            for i in range(len(sent)):  # byte by byte: each one must not extend the limit
                sock.sendall(sent[i : i + 1])
                if i < 5:
                    time.sleep(0.05)
            assert sock.recv(1 << 16) == b""
        assert LIMIT / 2 < time.monotonic() - started < 30  # as timeout_keep_alive


@pytest.mark.slow
def test_slow_answer_outlives_the_header_limit(url):
    body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}
    started = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": "Bearer k"}, timeout=60)
    assert answer.status_code == 200 and time.monotonic() - started > LIMIT


def test_idle_connection_is_reused(url):
    with httpx.Client() as client:
        ports = []
        for _ in range(2):
            stream = client.get(f"{url}/version").extensions["network_stream"]
            ports.append(stream.get_extra_info("client_addr")[1])
            time.sleep(2 * LIMIT)
        assert ports[0] == ports[1]


@pytest.mark.parametrize(("origin", "allowed"), [("https://a.example", True), ("https://b.example", False)])
def test_cors_allows_the_listed_origins(url, origin, allowed):
    asked = {"origin": origin, "access-control-request-method": "POST"}
    before = httpx.options(f"{url}/v1/completions", headers=asked)  # without the key, as browsers send it
    assert before.status_code == (200 if allowed else 400)
    answer = httpx.post(f"{url}/v1/completions", json={}, headers={"origin": origin})
    assert answer.status_code == 401
    found = (
        before.headers.get("access-control-allow-origin"),
        answer.headers.get("access-control-allow-origin"),
    )
    assert found == ((origin, origin) if allowed else (None, None))


def test_no_cors_by_default(tiny_server):
    answer = httpx.get(f"{tiny_server}/version", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.fixture(scope="module")
def tiny_server(tiny):
    with live_server(tiny, max_model_len=64) as (url, _):
        yield url


def test_empty_content_type_is_json(tiny_server):
    body, headers = b'{"prompt": "a", "max_tokens": 1}', {"content-type": ""}
    assert httpx.post(f"{tiny_server}/v1/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
def test_tokens_beyond_the_context_are_refused(tiny_server, field):
    body = {"prompt": [5] * 12, "max_tokens": 52, "temperature": 0}
    fits = httpx.post(f"{tiny_server}/v1/completions", json=body)
    assert fits.status_code == 200
    more = {**body, field: 53, "max_tokens": 53}
    if field == "min_tokens":
        more = {"prompt": [[5], [5] * 12], "min_tokens": 53, "max_tokens": None}
    answer = httpx.post(f"{tiny_server}/v1/completions", json=more)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert all(word in error["message"] for word in ("53", "52", "64", "12"))


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_chat_tokens_beyond_the_context_are_refused(tiny_server, field):
    chat = {"messages": [{"role": "user", "content": "Hi"}], field: 64}
    answer = httpx.post(f"{tiny_server}/v1/chat/completions", json=chat)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_default_tokens_are_what_fits(tiny_server):
    answer = httpx.post(f"{tiny_server}/v1/completions", json={"prompt": [5] * 62, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.slow
def test_health_reports_a_dead_rank_at_once(tiny, monkeypatch):
    """While the watcher still waits for the process's last words."""
    from fastkernels.engine.execution.ranks import Worker

    waiting = threading.Event()
    death = Worker.death

    def slow(self):
        waiting.wait(60)
        return death(self)

    with live_server(tiny, tensor_parallel_size=2) as (url, server):
        monkeypatch.setattr(Worker, "death", slow)
        worker = server.llm.engine.executor._ranks.workers[0].process
        assert httpx.get(f"{url}/health").status_code == 200
        worker.kill()
        try:
            wait_for(lambda: httpx.get(f"{url}/health").status_code != 200)
            health = httpx.get(f"{url}/health")
            asked = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        finally:
            waiting.set()
    assert health.status_code == asked.status_code == 503
    assert "lost rank 1" in health.json()["error"]["message"]
