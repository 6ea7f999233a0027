"""The folder of compiled CUDA C++ kernels, with a compiler that is a function; NVRTC itself where it is installed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from fastkernels import cuda_rtc
from fastkernels.overrides.l1 import _skinny_linear_cuda as skinny

CODE = b"\x7fELF" + bytes(range(256)) * 512


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path / "cache"))
    cuda_rtc.folder.cache_clear()
    yield tmp_path / "cache" / "nvrtc"
    cuda_rtc.folder.cache_clear()


class Compiler:
    def __init__(self, code: bytes = CODE) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.code = code

    def __call__(self, source: str, options: Sequence[str]) -> bytes:
        self.calls.append((source, tuple(options)))
        return self.code


def get(
    compiler: Compiler, source: str = "a", options: Sequence[str] = ("-x",), version: str = "13.0"
) -> bytes:
    return cuda_rtc.cubin(source, options, compiler, lambda: version)


def test_compiles_once_for_each_key(cache: Path) -> None:
    compiler = Compiler()
    assert get(compiler) == get(compiler) == CODE
    assert compiler.calls == [("a", ("-x",))]
    get(compiler, "b")
    get(compiler, options=("-y",))
    get(compiler, options=("-x", "-y"))
    get(compiler, version="13.1")
    assert len(compiler.calls) == 5
    assert len(list(cache.iterdir())) == 5 and all(f.suffix == ".cubin" for f in cache.iterdir())


def test_a_broken_file_is_compiled_again(cache: Path) -> None:
    compiler = Compiler()
    get(compiler)
    (file,) = cache.iterdir()
    file.write_bytes(b"")
    assert get(compiler) == CODE and len(compiler.calls) == 2
    assert file.read_bytes() == CODE


def _compile_slowly(barrier: object) -> bytes:
    def compiler(source: str, options: Sequence[str]) -> bytes:
        barrier.wait(60)  # type: ignore[attr-defined]  # all of them have found nothing in the folder
        return CODE

    return cuda_rtc.cubin("a", (), compiler, lambda: "13.0")


def test_processes_at_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    results = context.SimpleQueue()
    work = [context.Process(target=lambda: results.put(_compile_slowly(barrier) == CODE)) for _ in range(4)]
    for process in work:
        process.start()
    for process in work:
        process.join(120)
    assert [results.get() for _ in work] == [True] * 4
    (file,) = cache.iterdir()  # and nothing half-written beside it
    assert file.read_bytes() == CODE


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(cuda_rtc.tempfile, "gettempdir", lambda: str(tmp_path))
    compiler = Compiler()
    with caplog.at_level(logging.WARNING, "fastkernels"):
        get(compiler)
        get(compiler)
    assert len(compiler.calls) == 1 and len(caplog.records) == 1
    found = cuda_rtc.folder()
    assert found == tmp_path / f"fastkernels-{os.getuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert str(found) in caplog.text and "below" in caplog.text


def test_a_temporary_folder_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_rtc.tempfile, "gettempdir", lambda: str(tmp_path))
    shared = tmp_path / f"fastkernels-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    assert cuda_rtc._temporary() != shared


def test_without_nvrtc_the_provider_says_so() -> None:
    x = torch.randn(1, 64).bfloat16()
    reason = skinny.supports_cuda(x, x)
    assert reason is not None
    if (missing := cuda_rtc.unavailable()) is not None:
        assert reason == missing and "pip install" in reason and "\n" not in reason
    else:
        assert "Hopper" in reason


@pytest.mark.skipif(cuda_rtc.unavailable() is not None, reason="NVRTC is not installed")
def test_real_compiler() -> None:
    told = ("--gpu-architecture=sm_90a", *skinny.options(skinny.PARAMS[0], 1, 4096, True, True))
    assert cuda_rtc.cubin(skinny.SOURCE.read_text(), told)[:4] == b"\x7fELF"
    with pytest.raises(cuda_rtc.CompileError, match="expected a"):
        cuda_rtc.nvrtc_compile("int f(", ("--gpu-architecture=sm_90a",))


def test_sizes_fit_the_chip() -> None:
    for p in skinny.PARAMS:
        for tiles in (1, 2):
            stages, shared = skinny.shared_bytes(p, tiles)
            static = 4 * skinny.CONSUMERS * 16 * 8 * tiles + 16 * stages
            assert shared + static <= 227 * 1024 and stages == 6, p
    assert skinny.choose(4096, 4096)["groups"] == 1 and skinny.choose(4096, 14336)["groups"] == 2
    assert skinny.choose(64, 14336)["groups"] == 1


def test_x_stays_in_registers_where_they_hold_it() -> None:
    p = skinny.PARAMS[0]
    assert skinny.x_units(p, 1, 4096) == skinny.x_units(p, 2, 4096) == 4
    assert skinny.x_units(p, 1, 4128) == 5 and skinny.x_units(p, 2, 4128) == 0
    assert skinny.x_units(p, 1, 14336) == 0 and skinny.x_units(p, 1, 576) == 1
