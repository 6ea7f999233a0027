"""Sends prompts: as a closed loop, at given times (Poisson, gamma, ramps, a trace), and as conversations."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from fk_bench.serving.load.client import Client, Prompt
from fk_bench.serving.load.metrics import Trace

Encode = Callable[[str], list[int] | str]


def due_times(rates: Sequence[float], burstiness: float, seed: int) -> list[float]:
    """Due times in seconds of requests at these rates (requests a second), the first at 0.

    The gap after a request has a gamma distribution of shape `burstiness` and mean 1 / rate, as in `vllm bench serve`:
    1 is a Poisson process, less comes in bursts, more is nearer to a constant gap.
    """
    rng, at, due = random.Random(seed), 0.0, []
    for rate in rates:
        due.append(at)
        at += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return due


def ramp(count: int, strategy: str, start: float, end: float) -> list[float]:
    """The rate at each of `count` requests, from `start` to `end` requests a second."""
    shares = [i / max(1, count - 1) for i in range(count)]
    if strategy == "linear":
        return [start + (end - start) * share for share in shares]
    return [start * (end / start) ** share for share in shares]


async def closed_loop(
    client: Client, prompts: Sequence[Prompt], concurrency: int, encode: Encode | None = None
) -> list[Trace]:
    """Send all prompts, `concurrency` at a time: each that ends starts the next. Returns traces in prompt order."""
    # Serialized before the first is sent, so that requests of one wave arrive together.
    waiting = iter(enumerate([(p, client.body(p)) for p in prompts]))
    traces: dict[int, list[Trace]] = {}

    async def worker() -> None:
        for index, (prompt, body) in waiting:
            traces[index] = await _converse(client, prompt, body, encode)

    await _all([worker() for _ in range(min(concurrency, len(prompts)))])
    return [trace for i in range(len(prompts)) for trace in traces[i]]


async def open_loop(
    client: Client, prompts: Sequence[Prompt], due: Sequence[float], encode: Encode | None = None
) -> list[Trace]:
    """Send prompt i `due[i]` seconds after the start, whatever the server does. Returns traces in prompt order."""
    bodies = [client.body(p) for p in prompts]
    start = time.perf_counter()

    async def one(prompt: Prompt, body: bytes, when: float) -> list[Trace]:
        await asyncio.sleep(max(0.0, start + when - time.perf_counter()))
        traces = await _converse(client, prompt, body, encode)
        traces[0].due = start + when
        return traces

    work = [one(p, b, t) for p, b, t in zip(prompts, bodies, due, strict=True)]
    return [trace for traces in await _all(work) for trace in traces]


async def _converse(client: Client, prompt: Prompt, body: bytes, encode: Encode | None) -> list[Trace]:
    """The traces of all turns; the last one has the error if a turn failed, and later turns are not sent."""
    traces = [await client.stream(prompt, body)]
    history = prompt.tokens
    for turn, said in enumerate(prompt.later, start=1):
        last = traces[-1]
        answer = last.token_ids or (encode(last.text) if encode else "")
        if not last.ok:
            break
        if not isinstance(answer, list) or not isinstance(history, list):
            last.error = (
                "a conversation needs token ids: the server sent none, and the model has no tokenizer.json"
            )
            break
        history = [*history, *answer, *said]
        trace = await client.stream(Prompt(history, prompt.output_len, prompt.ignore_eos))
        trace.turn = turn
        traces.append(trace)
    return traces


async def _all(coroutines: Sequence[Any]) -> list[Any]:
    """gather, but a cancellation or an error first ends every request."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
