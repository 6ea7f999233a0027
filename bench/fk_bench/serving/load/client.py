"""An OpenAI-compatible streaming client that records the arrival of every chunk, and what a server says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass

import aiohttp

from fk_bench.serving.load.metrics import Chunk, Trace

FLUSH_ENDPOINTS = ("/reset_prefix_cache", "/flush_cache")


@dataclass(frozen=True)
class Prompt:
    """One request, or a conversation. output_len is exact with ignore_eos.

    tokens  ids, or text without a tokenizer
    later   ids of the user's later turns; each is sent after the answer to the one before, with the history
    """

    tokens: list[int] | str
    output_len: int
    ignore_eos: bool = True
    later: tuple[tuple[int, ...], ...] = ()


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

    async def stream(self, prompt: Prompt, body: bytes | None = None) -> Trace:
        """Send one request and read the whole stream. Errors go to Trace.error; only a cancellation is raised.

        body  of the prompt, serialized in advance
        """
        body = body or self.body(prompt)
        trace = Trace(time.perf_counter(), request=prompt)
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
            if await self.post(path) == 200:
                return path
        return None

    async def post(self, path: str) -> int | None:
        """The status of an empty POST; None if the server does not answer."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            # aiohttp would name a type for the body that is not there, which a server may refuse.
            async with self._http.post(self.url + path, skip_auto_headers=("content-type",)) as reply:
                await reply.read()
                return reply.status
        return None

    async def get(self, path: str) -> str:
        """The body of a GET; '' if the server does not answer or has no such path."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._http.get(self.url + path) as reply:
                text = await reply.text(errors="replace")
                return text if reply.status == 200 else ""
        return ""


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
        details = usage.get("prompt_tokens_details") or {}
        trace.cached_tokens = details.get("cached_tokens", trace.cached_tokens)
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        trace.chunks.append(Chunk(now, None if ids is None else len(ids)))
        trace.token_ids.extend(ids or ())
        trace.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        trace.finish_reason = choice.get("finish_reason") or trace.finish_reason
