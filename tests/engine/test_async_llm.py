"""The engine's thread: failures, slow readers and shutdown."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from fastkernels.engine.async_llm import MAX_FAILED_STEPS, AsyncLLM, EngineError
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.sampling_params import RequestOutputKind, SamplingParams
from fastkernels.engine.scheduling.request import CompletionOutput, Logprob, RequestOutput
from fastkernels.engine.scheduling.scheduler import QueueFull
from fastkernels.engine.stream import OutputStream

pytestmark = pytest.mark.asyncio
DELTA = RequestOutputKind.DELTA


def params(max_tokens=8, kind=DELTA, **more):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind, **more)


@pytest.fixture
def llm(tiny):
    llm = AsyncLLM(
        EngineConfig(str(tiny), device="cpu", max_model_len=512, num_blocks=64, max_num_seqs=4, max_waiting=4)
    )
    yield llm
    llm.shutdown()
    assert not llm._thread.is_alive() and llm._streams == {}


async def collect(llm, request_id, prompt=(5, 6), **options):
    return [o async for o in llm.generate(list(prompt), params(**options), request_id)]


def fail_steps(llm, monkeypatch, errors):
    """Make the next steps raise these errors."""
    step, left = llm.engine.step, list(errors)

    def failing():
        if left:
            raise left.pop(0)
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)


async def test_deltas_join_to_the_cumulative_output(llm):
    whole = (await collect(llm, "a", kind=RequestOutputKind.FINAL_ONLY))[-1].outputs[0]
    deltas = [o.outputs[0] for o in await collect(llm, "b")]
    assert [t for d in deltas for t in d.token_ids] == list(whole.token_ids)
    assert "".join(d.text for d in deltas) == whole.text
    last = (await collect(llm, "c", kind=RequestOutputKind.CUMULATIVE))[-1].outputs[0]
    assert (last.text, list(last.token_ids)) == (whole.text, list(whole.token_ids))


async def test_slow_reader_gets_joined_outputs(llm):
    request = llm.make_request("a", [5, 6], params(60, logprobs=1))
    stream = await llm.open([request])
    while "a" in llm._streams:
        await asyncio.sleep(0.01)
    await asyncio.wrap_future(llm.call(lambda: None))  # after the last output
    items = await stream.get()
    assert len(items) == 1 and stream.finished
    out = items[0][1].outputs[0]
    assert len(out.token_ids) == len(out.logprobs) == out.num_tokens == 60
    assert all(token in entry for token, entry in zip(out.token_ids, out.logprobs, strict=True))


async def test_failed_step_ends_requests_but_not_the_engine(llm, monkeypatch):
    before = (await collect(llm, "a", kind=RequestOutputKind.FINAL_ONLY))[-1].outputs[0]
    fail_steps(llm, monkeypatch, [RuntimeError("boom")])
    results = await asyncio.gather(*(collect(llm, f"b{i}") for i in range(3)), return_exceptions=True)
    failed = [r for r in results if isinstance(r, EngineError)]
    assert failed and all("boom" in str(e) and not e.stopped for e in failed)
    assert llm.healthy and llm.num_failed_steps == 1 and llm.engine.requests == {}
    assert (await collect(llm, "c", kind=RequestOutputKind.FINAL_ONLY))[-1].outputs[0] == before
    assert llm.engine.blocks.usage == 0


@pytest.mark.parametrize("how", ["fatal", "again and again"])
async def test_broken_engine_ends_with_a_reason(llm, monkeypatch, how):
    died = threading.Event()
    llm.on_death = died.set
    error = RuntimeError("the worker is gone")
    if how == "fatal":
        error.fatal = True
    fail_steps(llm, monkeypatch, [error] * MAX_FAILED_STEPS)
    for i in range(1 if how == "fatal" else MAX_FAILED_STEPS):
        with pytest.raises(EngineError, match="the worker is gone"):
            await asyncio.wait_for(collect(llm, f"a{i}"), 120)
    assert died.wait(120) and not llm.healthy and "the worker is gone" in llm.dead
    with pytest.raises(EngineError, match="the worker is gone") as later:
        await collect(llm, "b")
    assert later.value.stopped


async def test_batch_is_queued_completely_or_not_at_all(llm):
    ended = []
    llm.on_step = lambda stats: ended.extend(stats.finished)
    many = [llm.make_request(f"a{i}", [5], params(200)) for i in range(20)]
    with pytest.raises(QueueFull):
        await llm.open(many)
    llm.call(lambda: None).result(10)
    assert llm.engine.requests == {} and llm._streams == {}
    assert ended == []  # refused, not aborted: metrics do not count them
    few = [llm.make_request(f"b{i}", [5], params(3)) for i in range(4)]
    stream = await llm.open(few)
    assert [i for i, _ in sorted(await stream.rest())] == [0, 1, 2, 3]


async def test_an_answer_is_counted_before_it_arrives(llm):
    counted = []

    def slow(stats):
        time.sleep(0.05)  # an answer that is sent first arrives in this time
        counted.append(stats.generation_tokens)

    llm.on_step = slow
    await collect(llm, "a", max_tokens=3, kind=RequestOutputKind.FINAL_ONLY)
    assert sum(counted) == 3


async def test_stats_do_not_accumulate_without_on_step(llm):
    await collect(llm, "a")
    await collect(llm, "b")
    assert llm.call(lambda: len(llm.engine.stats.finished)).result(10) <= 1


async def test_closing_a_stream_aborts_its_request(llm):
    async for _ in llm.generate([5], params(400), "a"):
        break
    for _ in range(3000):
        await asyncio.sleep(0.02)
        if llm.call(lambda: dict(llm.engine.requests)).result(10) == {}:
            return
    raise AssertionError("the request runs on")


async def test_shutdown_ends_requests_with_an_error(llm):
    step = llm.engine.step
    llm.engine.step = lambda: time.sleep(0.05) or step()  # the request is not over at once
    task = asyncio.create_task(collect(llm, "a", max_tokens=400))
    while "a" not in llm._streams:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(llm.shutdown)
    with pytest.raises(EngineError, match="stopped"):
        await asyncio.wait_for(task, 10)
    with pytest.raises(EngineError, match="stopped"):
        await collect(llm, "b")


FORGETFUL = """
import asyncio, sys
from fastkernels import AsyncLLM, EngineConfig, SamplingParams
async def main():
    llm = AsyncLLM(EngineConfig(sys.argv[1], device="cpu", num_blocks=64))
    async for output in llm.generate([5, 6], SamplingParams(max_tokens=400, ignore_eos=True), "a"):
        break
asyncio.run(main())
"""


async def test_program_without_shutdown_exits_cleanly(tiny):
    subprocess.run([sys.executable, "-c", FORGETFUL, str(tiny)], check=True, timeout=120)


async def test_joined_outputs_of_several_choices():
    def output(index, text, finished=False, logprobs=None):
        out = CompletionOutput(index, text, [ord(c) for c in text], logprobs, num_tokens=len(text))
        return RequestOutput("a", None, [1], [out], finished)

    aborted = []
    stream = OutputStream(["a"], aborted.extend, delta=True)
    entry = [{1: Logprob(-1.0)}]
    for item in (
        output(1, "x", logprobs=entry),
        output(0, "y"),
        output(1, "z", logprobs=entry),
        output(0, "w", True),
    ):
        stream.put("a", item)
    ((index, found),) = await stream.get()
    assert index == 0 and [(o.index, o.text) for o in found.outputs] == [(0, "yw"), (1, "xz")]
    assert found.outputs[1].logprobs == entry * 2 and stream.finished
    stream.close()
    assert aborted == []
