"""Signals that end a command, as exceptions."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class EndedBySignal(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP as an exception in the main thread, so that every `finally` runs."""

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn the signals that end a command into EndedBySignal; further ones do not interrupt the cleanup."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        for n in numbers:
            signal.signal(n, signal.SIG_IGN)
        raise EndedBySignal(number)

    before = {n: signal.signal(n, handler) for n in numbers}
    try:
        yield
    finally:
        for n, old in before.items():
            signal.signal(n, old)
