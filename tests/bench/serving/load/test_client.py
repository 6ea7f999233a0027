"""The load client: streams cut anywhere, reused connections, errors, and its own cost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fk_bench.serving.load.arrivals import closed_loop
from fk_bench.serving.load.client import Client, Prompt
from fk_bench.serving.load.metrics import Trace

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b'data: {"choices":[{"text":"\xc3\xa4","token_ids":[7]}]}\n\n'  # cut within a character, too
EVENTS += b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[bool]]  # (request, ...) -> whether it goes on


@contextlib.asynccontextmanager
async def server(answer: Answer) -> Any:
    """(its URL, the number of connections, the requests)."""
    connections, requests = itertools.count(), list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        next(connections)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                requests.append(head + await reader.readexactly(int(length or 0)))
                if not await answer(requests[-1], writer):
                    break
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield url, lambda: next(connections), requests
    finally:
        listening.close()


def in_pieces(data: bytes, size: int, goes_on: bool = True) -> Answer:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> bool:
        for i in range(0, len(data), size):
            writer.write(data[i : i + size])
            await writer.drain()
            await asyncio.sleep(0)
        return goes_on

    return answer


def streamed(size: int) -> bytes:
    """An answer in chunks of `size` bytes."""
    parts = [EVENTS[i : i + size] for i in range(0, len(EVENTS), size)]
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


async def ask(answer: Answer, times: int = 1, timeout_s: float = 60.0) -> tuple[list[Trace], int]:
    """(the trace of each request, the number of connections)."""
    async with server(answer) as (url, connections, _), Client(url, "m", timeout_s) as client:
        return [await client.stream(Prompt([1], 1)) for _ in range(times)], connections()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_stream_cut_anywhere_on_one_connection(size: int) -> None:
    traces, connections = asyncio.run(ask(in_pieces(streamed(size), size), times=2))
    assert all(t.ok and t.text == "ä" and t.token_ids == [7] for t in traces), traces[0].error
    assert connections == 1


def test_closed_connection_is_replaced() -> None:
    ended = HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + streamed(50)[len(HEAD) :]
    traces, connections = asyncio.run(ask(in_pieces(ended, 10_000, goes_on=False), times=3))
    assert all(t.ok for t in traces) and connections == 3


async def _silent(request: bytes, writer: asyncio.StreamWriter) -> bool:
    writer.write(HEAD)
    await asyncio.sleep(30)
    return False


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (in_pieces(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", 100), "HTTP 429: full"),
        (in_pieces(b"SSH-2.0-OpenSSH\r\n\r\n", 100), "SSH-2.0-OpenSSH"),
        (in_pieces(HEAD + b"5\r\nhel", 100, goes_on=False), "ClientPayloadError"),
        (_silent, "Timeout"),
    ],
)
def test_errors_are_in_the_trace(answer: Answer, message: str) -> None:
    (trace,), _ = asyncio.run(ask(answer, timeout_s=0.05 if answer is _silent else 60.0))
    assert trace.error is not None and message in trace.error


def test_missing_server_is_in_trace() -> None:
    async def once() -> Trace:
        async with Client("http://127.0.0.1:9", "m") as client:
            assert await client.flush() is None
            return await client.stream(Prompt([1], 1))

    assert "ClientConnectorError" in (asyncio.run(once()).error or "")


def test_cancelled_request_closes_connection() -> None:
    ended = asyncio.Event()

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD)
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)
        ended.set()
        return False

    async def cancel() -> None:
        async with server(answer) as (url, _, _), Client(url, "m") as client:
            task = asyncio.create_task(client.stream(Prompt([1], 1)))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait_for(ended.wait(), 60.0)

    asyncio.run(cancel())


@pytest.mark.usefixtures("no_collections")
def test_256_streams_arrive_together() -> None:
    """Within 0.6 s of CPU including this server: the cost of a request does not grow with their number."""
    n, arrived = 256, list[float]()
    data = streamed(1)

    async def run() -> tuple[list[Any], int]:
        all_here = asyncio.Event()

        async def answer(request: bytes, writer: asyncio.StreamWriter) -> bool:
            arrived.append(time.thread_time())
            if len(arrived) == n:
                all_here.set()
            await all_here.wait()
            writer.write(data)
            return True

        async with server(answer) as (url, connections, _), Client(url, "m") as client:
            await client.connect(n)
            return await closed_loop(client, [Prompt([1], 1)] * n, n), connections()

    traces, connections = asyncio.run(run())
    assert all(t.ok and t.text == "ä" and t.token_ids == [7] for t in traces), traces[0].error
    assert connections == n
    assert arrived[-1] - arrived[0] < 0.6
