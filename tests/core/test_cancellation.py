"""A cancelled patch: its steps end, and what they did is undone."""

from __future__ import annotations

import asyncio

import pytest

from fastkernels.core.cancellation import or_undone, to_the_end


async def cancelled(step, undo=None, times: int = 1) -> None:
    task = asyncio.ensure_future(or_undone(step, undo) if undo else to_the_end(step))
    for _ in range(times):
        await asyncio.sleep(0.02)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelled_step_ends_and_is_undone() -> None:
    done: list[str] = []

    async def step(name: str) -> str:
        await asyncio.sleep(0.05)
        done.append(name)
        return name

    assert asyncio.run(or_undone(step("patch"), lambda: step("undo"))) == "patch"
    asyncio.run(cancelled(step("patch"), lambda: step("undo"), times=2))
    assert done == ["patch", "patch", "undo"]


def test_cancellation_outweighs_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        await asyncio.sleep(0.05)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(to_the_end(fails()))
    asyncio.run(cancelled(fails()))
    assert "a cancelled step failed: a bug" in caplog.text
