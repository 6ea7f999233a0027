"""Inductor compiles in several processes during a live patch, and as before afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fk_integrations.vllm import compile_threads
from torch._inductor import async_compile, config


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    start = classmethod(lambda cls: found.append(f"started with {config.compile_threads}"))
    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", start)
    monkeypatch.setattr(async_compile, "shutdown_compile_workers", lambda: found.append("ended"))
    with config.patch(compile_threads=1):
        yield found


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(compile_threads.os, "sched_getaffinity", lambda pid: set(range(count)))


def test_processes_end_with_the_block(pools: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 16)
    with pytest.raises(KeyError), compile_threads.several(ranks=2):
        assert config.compile_threads == 8
        raise KeyError
    assert config.compile_threads == 1 and pools == ["started with 8", "ended"]


def test_few_cores_compile_in_the_worker(pools: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 4)
    with compile_threads.several(ranks=4):
        assert config.compile_threads == 1
    assert pools == []
