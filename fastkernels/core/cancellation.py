"""Steps of asynchronous engines that a cancellation must not leave half done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("fastkernels")


async def to_the_end(step: Coroutine[Any, Any, Any]) -> Any:
    """Await a step to its end, even if this task is cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])  # which neither cancels the step nor raises its error
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.warning("a cancelled step failed: %s", failure)
        raise cancelled
    return task.result()


async def or_undone(
    step: Coroutine[Any, Any, Any], undo: Callable[[], Coroutine[Any, Any, Any]] | None
) -> Any:
    """Await a step to its end. A cancellation meanwhile undoes it: the caller gets no report with which to do so."""
    try:
        return await to_the_end(step)
    except asyncio.CancelledError:
        if undo is not None:
            await to_the_end(undo())
        raise
