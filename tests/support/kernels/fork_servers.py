"""Fork servers that judges share: each imports for 5 s of CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fk_bench.kernels.judge.processes import sides
from fk_bench.kernels.judge.processes.zygote import Zygote


class _Kept(Zygote):
    """A server that goes on when its judge ends, for the next one."""

    def begin(self) -> None:
        if self._process is None or self._process.poll() is not None:
            super().begin()

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@contextmanager
def shared() -> Iterator[None]:
    """Judges in this process have one server for each interpreter, its imports and its environment."""
    servers: dict[Any, _Kept] = {}

    def server(python: str, **options: Any) -> _Kept:
        made = _Kept(python, **options)
        key = (python, made.preload, *sorted(made._environment().items()))
        found = servers.setdefault(key, made)
        if found is not made:
            made.end()
        found.notes.clear()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "Zygote", server)
        yield
    for kept in servers.values():
        kept.end()
