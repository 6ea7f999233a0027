"""A server in this process, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastkernels.engine.http import process as serving
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.server import Server
from fastkernels.engine.options.config import EngineConfig

# httpx's 5 s are too short for an answer on a busy machine.
inspect.signature(httpx.get).parameters["timeout"].default.read = 60.0
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]  # on a GPU with CUDA graphs


@contextlib.contextmanager
def live_server(
    model: Path, server_config: ServerConfig | None = None, send_buffer: int | None = None, **config: Any
) -> Iterator[tuple[str, Server]]:
    """(url, server). Ends it as SIGINT does, and asserts that no thread is left.

    send_buffer: bytes of an answer that the kernel buffers before the client reads
    """
    before = set(threading.enumerate())
    defaults = {"device": "cpu", "max_model_len": 512, "num_blocks": 200, "max_num_seqs": 8}
    server = Server(EngineConfig(str(model), **{**defaults, **config}), server_config or ServerConfig("tiny"))
    process = serving.Process(server)
    with serving.bind("127.0.0.1", 0) as sock:
        host, port = sock.getsockname()
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=process.run, kwargs={"sockets": [sock]})
        thread.start()
        url = f"http://{host}:{port}"
        try:
            wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
            yield url, server
        finally:
            process.handle_exit(2, None)
            thread.join(120)
    assert not thread.is_alive()
    others = ("asyncio_", "tqdm_monitor")  # threads that the standard library and tqdm keep

    def left() -> list[threading.Thread]:
        return [t for t in set(threading.enumerate()) - before if not t.name.startswith(others)]

    until = time.monotonic() + 60  # threads of a pool end soon after it is shut down
    while left() and time.monotonic() < until:
        time.sleep(0.02)
    assert left() == [], left()


@contextlib.contextmanager
def before_steps(server: Server, wait: Callable[[], None]) -> Iterator[None]:
    """Call wait() before each step of the server's engine."""
    engine, step = server.llm.engine, server.llm.engine.step

    def late() -> Any:
        wait()
        return step()

    engine.step = late
    try:
        yield
    finally:
        engine.step = step


def unmerged(server: Server) -> contextlib.AbstractContextManager[None]:
    """Outputs are not merged: each step waits until the previous outputs have been taken. For streamed requests."""
    streams = server.llm._streams

    async def pending() -> bool:  # after the event loop has delivered the outputs
        return any(stream._pending for stream in streams.values())

    def read() -> None:
        for loop in {stream.loop for stream in streams.values()}:
            wait_for(
                lambda loop=loop: not asyncio.run_coroutine_threadsafe(pending(), loop).result(60),
                pause=0.001,
            )

    return before_steps(server, read)


def wait_for(condition: Callable[[], Any], seconds: float = 60.0, pause: float = 0.02) -> None:
    """Wait until the condition holds. Connection errors count as false."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        time.sleep(pause)
    raise AssertionError(f"not within {seconds} s")


def replayed(server: Server) -> bool:
    """Whether steps with decoding only ran as CUDA graphs; on a CPU, whether there are none."""
    graphs = server.llm.engine.runner.graphs
    return graphs is None if server.llm.engine.config.device == "cpu" else graphs.replays["decode"] > 0


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    total = 0.0
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        head, _, value = line.rpartition(" ")
        base, _, given = head.partition("{")
        if base == name and all(f'{k}="{v}"' in given for k, v in labels.items()):
            total += float(value)
    return total
