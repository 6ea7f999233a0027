"""Arrival times of open loops: burstiness and ramps; conversations; the search for the highest load."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable

import pytest
from fk_bench.serving.load import search
from fk_bench.serving.load.arrivals import closed_loop, due_times, open_loop, ramp
from fk_bench.serving.load.client import Client, Prompt
from fk_bench.serving.load.metrics import Chunk, Trace


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_mean_and_burstiness(burstiness: float) -> None:
    due = due_times([5.0] * 20_000, burstiness, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert due[0] == 0.0 and statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.05)
    variation = statistics.stdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.05)  # of a gamma distribution
    assert (
        due == due_times([5.0] * 20_000, burstiness, seed=1) != due_times([5.0] * 20_000, burstiness, seed=2)
    )


def test_ramp_reaches_its_last_rate() -> None:
    assert ramp(5, "linear", 2.0, 10.0) == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert ramp(3, "exponential", 1.0, 16.0) == pytest.approx([1.0, 4.0, 16.0])
    assert ramp(1, "linear", 2.0, 10.0) == [2.0]
    gaps = [b - a for a, b in itertools.pairwise(due_times(ramp(4000, "linear", 1.0, 9.0), 1.0, seed=0))]
    assert statistics.mean(gaps[:200]) / statistics.mean(gaps[-200:]) == pytest.approx(9.0, rel=0.3)


class Answers(Client):
    """Answers in this process with two tokens, 90 and 91, or with `text`; records each prompt and when it came."""

    def __init__(self, text: str = "", fail_at: int | None = None):
        super().__init__("http://127.0.0.1:9", "m")
        self.text, self.fail_at = text, fail_at
        self.sent: list[list[int]] = []
        self.running = self.most = 0

    async def stream(self, prompt: Prompt, body: bytes | None = None) -> Trace:
        assert isinstance(prompt.tokens, list)
        self.sent.append(prompt.tokens)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        ids = [] if self.text else [90, 91]
        trace = Trace(0.0, [Chunk(0.1)], output_tokens=2, token_ids=ids, text=self.text, request=prompt)
        trace.error = "HTTP 500" if len(self.sent) - 1 == self.fail_at else None
        return trace


TALKS = [Prompt([10 * i], 2, True, ((10 * i + 1,), (10 * i + 2, 7))) for i in (1, 2, 3)]


def test_turns_wait_and_carry_the_history() -> None:
    client = Answers()
    traces = asyncio.run(closed_loop(client, TALKS, 2))
    assert client.most == 2 and [t.turn for t in traces] == [0, 1, 2] * 3
    assert [t.request.tokens for t in traces[3:6] if t.request] == [
        [20], [20, 90, 91, 21], [20, 90, 91, 21, 90, 91, 22, 7]
    ]  # fmt: skip
    assert sorted(client.sent) == sorted(t.request.tokens for t in traces if t.request)


def test_conversation_takes_ids_from_text() -> None:
    client, encode = Answers("ab"), lambda text: [ord(c) for c in text]
    traces = asyncio.run(open_loop(client, TALKS[:1], [0.0], encode))
    assert traces[1].request is not None and traces[1].request.tokens == [10, 97, 98, 11]
    assert traces[0].due is not None and traces[1].due is None
    (only,) = asyncio.run(closed_loop(Answers("ab"), TALKS[:1], 1))
    assert not only.ok and "a conversation needs token ids" in (only.error or "")


def test_failed_turn_ends_its_conversation() -> None:
    traces = asyncio.run(closed_loop(Answers(fail_at=1), TALKS[:1], 1))
    assert [t.error for t in traces] == [None, "HTTP 500"]


def find(meets: Callable[[float], bool], low: float, high: float, whole: bool) -> search.Found:
    async def probe(load: float) -> bool:
        return meets(load)

    return asyncio.run(search.highest(probe, low, high, whole))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 63, 64])
def test_search_finds_the_highest_concurrency(most: int) -> None:
    found = find(lambda load: load <= most, 1, 64, True)
    assert found.value == most and found.at_limit == (most == 64)
    assert len(found.tried) <= 13 and all(load == int(load) for load in found.tried)


def test_search_for_a_rate_is_close() -> None:
    for most in (0.6, 3.3, 40.0):
        found = find(lambda load, most=most: load <= most, 0.5, 64.0, False)
        assert most / 1.06 <= found.value <= most and not found.at_limit
    assert find(lambda load: False, 2.0, 64.0, False) == search.Found(0.0, False, {2.0: False})
