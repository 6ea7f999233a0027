"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastkernels.core import cuda_rtc

NVRTC = [
    pytest.param(m, id=f"nvrtc{m}", marks=[pytest.mark.slow] if i else [])
    for i, m in enumerate(cuda_rtc.MAJORS)
]


@pytest.fixture(params=NVRTC)
def nvrtc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The major version of the NVRTC that compiles kernels in a test, which runs with each."""
    remembered = (cuda_rtc._nvrtc, cuda_rtc.nvrtc_version, cuda_rtc.unavailable)

    def forget() -> None:
        for function in remembered:
            function.cache_clear()

    monkeypatch.setattr(cuda_rtc, "usable_majors", lambda: [request.param])
    forget()
    if (missing := cuda_rtc.unavailable()) is not None:
        pytest.skip(missing)
    yield request.param
    forget()
