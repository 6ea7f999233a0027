"""An OpenAI-compatible streaming client that records the arrival of every chunk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from fk_bench.serving.metrics import Chunk, Trace

FLUSH_ENDPOINTS = ("/reset_prefix_cache", "/flush_cache")


@dataclass(frozen=True)
class Prompt:
    """One request. `tokens` are ids, or text without a tokenizer; output_len is exact with ignore_eos."""

    tokens: list[int] | str
    output_len: int
    ignore_eos: bool = True


class Client:
    """Requests to one server; an async context manager."""

    def __init__(self, url: str, model: str, timeout_s: float = 600.0):
        """timeout_s: seconds without a received byte that end a request."""
        self.url, self.model = url.rstrip("/"), model
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=timeout_s)

    async def __aenter__(self) -> Client:
        # Not httpx: with 256 streams it was slower than the servers (docs/reports/2026-11-h200-lessons.md).
        connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=3600.0)
        self._http = aiohttp.ClientSession(connector=connections, timeout=self._timeout)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    def body(self, prompt: Prompt) -> bytes:
        fields = {
            "model": self.model, "prompt": prompt.tokens, "max_tokens": prompt.output_len, "temperature": 0.0,
            "ignore_eos": prompt.ignore_eos, "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }  # fmt: skip
        return json.dumps(fields).encode()

    async def stream(self, prompt: Prompt | bytes) -> Trace:
        """Send one request, or its body, and read the whole stream. Errors go to Trace.error; only a cancellation is
        raised."""
        body = prompt if isinstance(prompt, bytes) else self.body(prompt)
        trace = Trace(time.perf_counter())
        headers, line = {"content-type": "application/json"}, b""
        try:
            async with self._http.post(f"{self.url}/v1/completions", data=body, headers=headers) as reply:
                if reply.status != 200:
                    trace.error = f"HTTP {reply.status}: {(await reply.text(errors='replace'))[:500]}"
                    return trace
                async for data in reply.content.iter_any():
                    now = time.perf_counter()
                    *whole, line = (line + data).split(b"\n")
                    for one in whole:
                        if one.startswith(b"data:"):
                            read_event(trace, one[5:].strip().decode(errors="replace"), now)
        except (aiohttp.ClientError, TimeoutError) as error:
            trace.error = f"{type(error).__name__}: {error}"
        if trace.error is None and not trace.chunks:
            trace.error = "the stream ended without a chunk"
        if trace.error is None and trace.output_tokens is None:
            trace.error = "the server sent no usage (stream_options.include_usage)"
        return trace

    async def connect(self, count: int) -> None:
        """Open `count` connections in advance, so that requests of a load do not pay for them."""

        async def one() -> None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self.url}/v1/models") as reply:
                    await reply.read()

        await asyncio.gather(*(one() for _ in range(count)))

    async def flush(self) -> str | None:
        """Empty the prefix cache. Returns the endpoint that did it, None if the server has none."""
        for path in FLUSH_ENDPOINTS:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.post(self.url + path) as reply:
                    await reply.read()
                    if reply.status == 200:
                        return path
        return None


def read_event(trace: Trace, data: str, now: float) -> None:
    """Add one server-sent event to the trace."""
    if data == "[DONE]" or trace.error is not None:
        return
    try:
        event = json.loads(data)
    except json.JSONDecodeError:
        trace.error = f"not JSON in the stream: {data[:200]!r}"
        return
    if event.get("error") or event.get("object") == "error":
        error = event.get("error") or event
        trace.error = str(error.get("message", error) if isinstance(error, dict) else error)[:500]
        return
    usage = event.get("usage")
    if usage:
        trace.prompt_tokens, trace.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        trace.chunks.append(Chunk(now, None if ids is None else len(ids)))
        trace.token_ids.extend(ids or ())
        trace.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        trace.finish_reason = choice.get("finish_reason") or trace.finish_reason


async def closed_loop(client: Client, prompts: Sequence[Prompt], concurrency: int) -> list[Trace]:
    """Send all prompts, `concurrency` at a time: each that ends starts the next. Returns traces in prompt order."""
    # Serialized before the first is sent, so that requests of one wave arrive together.
    waiting = iter(enumerate([client.body(p) for p in prompts]))
    traces: dict[int, Trace] = {}

    async def worker() -> None:
        for index, body in waiting:
            traces[index] = await client.stream(body)

    await _all([worker() for _ in range(min(concurrency, len(prompts)))])
    return [traces[i] for i in range(len(prompts))]


async def poisson(client: Client, prompts: Sequence[Prompt], rate: float, seed: int) -> list[Trace]:
    """Send all prompts at exponential intervals of mean 1 / rate seconds, whatever the server does (an open loop)."""
    rng, bodies = random.Random(seed), [client.body(p) for p in prompts]
    start, at, due = time.perf_counter(), 0.0, []
    for _ in prompts:
        due.append(at)
        at += rng.expovariate(rate)

    async def one(body: bytes, when: float) -> Trace:
        await asyncio.sleep(max(0.0, start + when - time.perf_counter()))
        return await client.stream(body)

    return await _all([one(b, t) for b, t in zip(bodies, due, strict=True)])


async def _all(coroutines: Sequence[Any]) -> list[Any]:
    """gather, but a cancellation or an error first ends every request."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
