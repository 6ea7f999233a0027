"""C++ kernels of the CPU: compiled once, cached, and an error of the compiler is logged once."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastkernels.core import compile_cache
from fastkernels.overrides.kit import cpp

SOURCE = """
#include <ATen/Parallel.h>
extern "C" int answer() {
  int64_t total = 0;
  at::parallel_for(0, 1, 1, [&](int64_t from, int64_t to) { total += to - from + 41; });
  return total;
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path / "cache"))
    compile_cache.folder.cache_clear()
    cpp.library.cache_clear()
    yield tmp_path / "cache" / "cpp"
    compile_cache.folder.cache_clear()
    cpp.library.cache_clear()
    cpp._kept.clear()


def test_library_is_compiled_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    with caplog.at_level(logging.INFO, "fastkernels"):
        first = cpp.library(source)
        assert not isinstance(first, str) and first.answer() == 42
        assert [r.message.split()[0] for r in caplog.records] == ["compiling", "compiled"]
        assert [f.suffix for f in cache.iterdir()] == [".so"]
        cpp.library.cache_clear()
        monkeypatch.setattr(cpp, "_torch_options", lambda: ["--no-such-option"])  # a compiler would fail
        again = cpp.library(source)
        assert not isinstance(again, str) and again.answer() == 42
        assert len(caplog.records) == 2
        assert cpp.load_kept() == [f.name for f in cache.iterdir()]
        shutil.rmtree(cache)  # as in a cage
        cpp.library.cache_clear()
        kept = cpp.library(source)
        assert not isinstance(kept, str) and kept.answer() == 42
        source.write_text(SOURCE.replace("41", "42"))
        cpp.library.cache_clear()
        assert isinstance(cpp.library(source), str)


def test_compiler_error_is_logged_once(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int answer() { return nothing; }")
    for _ in range(2):
        reason = cpp.library(source)
        assert isinstance(reason, str) and "broken.cpp cannot be compiled" in reason and "nothing" in reason
    assert len(caplog.records) == 1
    assert not list(cache.glob("*.so"))


def test_missing_compiler_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = cpp.library(tmp_path / "answer.cpp")
    assert isinstance(reason, str) and "no C++ compiler was found (no-such-compiler)" in reason
