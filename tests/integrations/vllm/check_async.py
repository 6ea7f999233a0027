"""AsyncLLM: a patch waits for the requests that run, and new ones wait for the patch."""

import asyncio
import os

import pytest

import fastkernels
from fastkernels.patch import PatchError


async def tokens(engine, request_id, max_tokens=64):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    async for output in engine.generate("Hello my name is", params, request_id):
        last = output
    return list(last.outputs[0].token_ids)


async def run():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        os.environ["TINY_LLAMA"], max_model_len=512, max_num_seqs=4, enforce_eager=True
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        with pytest.raises(PatchError, match="patch_async"):
            fastkernels.patch(engine)
        stock = await tokens(engine, "0")
        running = asyncio.create_task(tokens(engine, "1"))
        await asyncio.sleep(0.05)
        report = await fastkernels.patch_async(engine, ops=["rms_norm"])
        assert await running == stock  # it ended before the swap
        assert len(await tokens(engine, "2")) == 64
        await report.refresh_async()
        assert report.verified and report.patched_calls >= 64 * 5
        await report.undo_async()
        assert await tokens(engine, "3") == stock
        for number, delay in enumerate((0, 0.02, 0.1)):
            await cancelled(engine, stock, number, delay)
        live = await fastkernels.patch_async(engine, ops=["rms_norm"])
    finally:
        engine.shutdown()
    with pytest.raises(PatchError, match="the engine has ended"):
        await fastkernels.patch_async(engine)
    with pytest.raises(PatchError, match="the engine has ended"):
        await live.refresh_async()
    assert not (await report.refresh_async()).rows  # undone before: without a call


async def cancelled(engine, stock, number, delay):
    """A patch that is cancelled while it waits leaves the engine running, without a change."""
    from fk_integrations.vllm.host import HOST

    from fastkernels.patch import Request

    running = asyncio.create_task(tokens(engine, f"long {number}", 480))
    await asyncio.sleep(0.05)
    patch = asyncio.create_task(fastkernels.patch_async(engine, ops=["rms_norm"]))
    await asyncio.sleep(delay)
    assert not running.done()
    patch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await patch
    assert not await engine.is_paused()
    assert await asyncio.wait_for(tokens(engine, f"next {number}"), 60) == stock
    (reply,) = await HOST.call_async(engine, Request("report"))
    assert reply["rows"] == []
    assert (await running)[:64] == stock


def test_async_engine():
    asyncio.run(run())
