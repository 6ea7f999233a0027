"""One zygote for all tests of the cage."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fk_bench.kernels.judge.processes.zygote import Exit, Zygote
from support.cage.children import OPTIONS, SUPPORT, hear


@pytest.fixture(scope="session")
def one_zygote() -> Iterator[Zygote]:
    os.environ["FK_TEST_TOKEN"] = "a-secret-of-the-judge"
    with Zygote(entry="caged:main", env={"PYTHONPATH": str(SUPPORT)}) as zygote:
        yield zygote
    del os.environ["FK_TEST_TOKEN"]


@pytest.fixture
def zygote(one_zygote: Zygote) -> Iterator[Zygote]:
    """After each test: the same zygote starts a working child."""
    yield one_zygote
    with one_zygote.spawn({"code": "say('fine')"}, OPTIONS) as child:
        assert hear(child) == ["fine"] and child.wait(20.0) == Exit(code=0, peak_rss=child.peak_rss)


@pytest.fixture(scope="session")
def steps(one_zygote: Zygote) -> dict[str, str]:
    with one_zygote.spawn({"code": "say(config['cage'])"}, OPTIONS) as child:
        report: dict[str, str] = hear(child)[0]
        return report
