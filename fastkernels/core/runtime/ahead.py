"""Kernels that a step will launch, compiled in parallel threads before it runs.

Triton compiles a kernel when it is launched for the first time, and a step with new shapes waits for one after the
other. In `compiling`, a call through `run` launches no kernel of ours: threads compile them, and its result is zeros.
The block ends when all of them are done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

THREADS = 16
_state = threading.local()


@contextmanager
def compiling() -> Iterator[None]:
    """See the module. Without effect inside another such block, and with a Triton that cannot compile in threads."""
    mode = None if active() else _mode()
    if mode is None:
        yield
        return
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "compile") as threads:
        _state.active = True
        try:
            with mode(threads, ignore_errors=True):  # the launch raises them
                yield
        finally:
            _state.active = False


def _mode() -> Callable[..., AbstractContextManager[Any]] | None:
    """Triton's context of compilations in threads."""
    try:
        from triton.runtime import _async_compile
    except ImportError:
        return None
    return getattr(_async_compile, "AsyncCompileMode", None)


def active() -> bool:
    """Whether this thread is in a `compiling` block."""
    return getattr(_state, "active", False)


def run(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """call(); in a `compiling` block zeros like its result, while threads compile its kernels."""
    if not active():
        return call()
    _state.only = True
    try:
        return torch.zeros_like(call())
    finally:
        _state.only = False


def only() -> bool:
    """Whether a launch in this thread is to compile its kernel only."""
    return getattr(_state, "only", False)
