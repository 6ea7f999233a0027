"""The load's own HTTP: bodies however they are cut, connections used again, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fk_bench.client import Client, Prompt, closed_loop
from fk_bench.wire import Wire, WireError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKED = HEAD + b"5\r\nhello\r\nA;x=y\r\n \r\n0\r\n\r\nab\r\n0\r\n\r\n"  # a chunk that looks like the end
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[bool]]  # (request, ...) -> whether it goes on


@contextlib.asynccontextmanager
async def server(answer: Answer) -> Any:
    """(its URL, how many connections there were, the requests)."""
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


async def ask(answer: Answer, times: int = 1, timeout_s: float = 5.0) -> tuple[list[Any], list[bytes], int]:
    """(replies or errors, bodies of status 200, connections)."""
    replies, bodies = list[Any](), list[bytes]()
    async with server(answer) as (url, connections, _):
        wire = Wire(url, timeout_s)
        for _ in range(times):
            got = list[bytes]()
            try:
                replies.append(await wire.request("POST", "/x", b"body", got.append))
            except WireError as error:
                replies.append(error)
            bodies.append(b"".join(got))
        wire.close()
        return replies, bodies, connections()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_a_chunked_body_however_it_is_cut(size: int) -> None:
    replies, bodies, connections = asyncio.run(ask(in_pieces(CHUNKED, size), times=2))
    assert [r.status for r in replies] == [200, 200]
    assert bodies == [b"hello \r\n0\r\n\r\nab"] * 2
    assert connections == 1  # kept alive


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_body_of_known_length_or_until_the_end(size: int) -> None:
    known = in_pieces(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", size)
    replies, bodies, connections = asyncio.run(ask(known, times=2))
    assert [(r.status, r.body) for r in replies] == [(429, b"full")] * 2  # an error's body is the reply's
    assert bodies == [b"", b""] and connections == 1
    ended = in_pieces(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabc", size, goes_on=False)
    replies, bodies, connections = asyncio.run(ask(ended, times=2))
    assert bodies == [b"abc"] * 2 and connections == 2


def test_a_free_connection_that_the_server_has_closed_is_replaced() -> None:
    replies, _, connections = asyncio.run(ask(in_pieces(CHUNKED, 10_000, goes_on=False), times=3))
    assert [r.status for r in replies] == [200, 200, 200]
    assert connections == 3


async def _silent(request: bytes, writer: asyncio.StreamWriter) -> bool:
    writer.write(HEAD)
    await asyncio.sleep(30)
    return False


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (in_pieces(b"SSH-2.0-OpenSSH\r\n\r\n", 100), "not HTTP/1.1: it begins with b'SSH-2.0-OpenSSH'"),
        (in_pieces(HEAD + b"zz\r\n", 100), "not HTTP/1.1: invalid literal"),
        (in_pieces(HEAD + b"5\r\nhel", 100, goes_on=False), "the server closed the connection"),
        (_silent, "no byte of an answer came for 0.05 seconds"),
    ],
)
def test_what_goes_wrong_is_said(answer: Answer, message: str) -> None:
    ((error,), _, _) = asyncio.run(ask(answer, timeout_s=0.05 if answer is _silent else 5.0))
    assert isinstance(error, WireError) and message in str(error)


def test_a_silent_server_is_asked_once() -> None:
    """Also on a connection that has been used, where one that is closed would be replaced."""

    async def once() -> None:
        async def answer(request: bytes, writer: asyncio.StreamWriter) -> bool:
            if b"/x" in request:
                await asyncio.sleep(30)
            writer.write(CHUNKED)
            return True

        async with server(answer) as (url, _, requests):
            wire = Wire(url, 0.1)
            await wire.request("GET", "/first")
            with pytest.raises(WireError, match=r"no byte of an answer came for 0\.1 seconds"):
                await wire.request("POST", "/x", b"body")
            wire.close()
            assert len(requests) == 2

    asyncio.run(asyncio.wait_for(once(), 10.0))


def test_no_server_and_no_such_address() -> None:
    with pytest.raises(WireError, match="ConnectionRefusedError"):
        asyncio.run(Wire("http://127.0.0.1:9", 1.0).request("GET", "/"))
    for url in ("https://127.0.0.1:80", "127.0.0.1:80"):
        with pytest.raises(ValueError, match="http://HOST:PORT is needed"):
            Wire(url, 1.0)


def test_a_request_that_is_cancelled_closes_its_connection() -> None:
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
            await asyncio.wait_for(ended.wait(), 5.0)

    asyncio.run(cancel())


def test_a_load_of_256_streams_arrives_together_on_connections_of_its_own() -> None:
    """5 ms of CPU from the first to the last that arrives, this server included; with httpx, seconds."""
    n, arrived = 256, list[float]()
    events = b'data: {"choices":[{"text":"\xc3\xa4","token_ids":[7]}]}\n\n'  # cut within a character, too
    events += b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    data = (
        HEAD + b"".join(b"%x\r\n%b\r\n" % (1, events[i : i + 1]) for i in range(len(events))) + b"0\r\n\r\n"
    )

    async def run() -> tuple[list[Any], int]:
        all_here = asyncio.Event()

        async def answer(request: bytes, writer: asyncio.StreamWriter) -> bool:
            arrived.append(time.process_time())
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
