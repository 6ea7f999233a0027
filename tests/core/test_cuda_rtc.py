"""The cache folder of compiled CUDA C++ kernels with a stand-in compiler, and NVRTC where it is installed."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fastkernels.core import compile_cache, cuda_rtc
from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.linear.kernels import skinny_linear_cuda as skinny

NO_NVRTC = cuda_rtc.unavailable()
CODE = b"\x7fELF" + bytes(range(256)) * 512


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path / "cache"))
    compile_cache.folder.cache_clear()
    yield tmp_path / "cache" / "nvrtc"
    compile_cache.folder.cache_clear()


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


def test_broken_cache_file_is_compiled_again(cache: Path) -> None:
    compiler = Compiler()
    get(compiler)
    (file,) = cache.iterdir()
    file.write_bytes(b"")
    assert get(compiler) == CODE and len(compiler.calls) == 2
    assert file.read_bytes() == CODE


def test_threads_compile_the_same_kernel_once(cache: Path) -> None:
    class Slow(Compiler):
        def __call__(self, source: str, options: Sequence[str]) -> bytes:
            time.sleep(0.2)
            return super().__call__(source, options)

    compiler = Slow()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda source: get(compiler, source), "aaab")) == {CODE}
    assert sorted(source for source, _ in compiler.calls) == ["a", "b"]


PROCESSES = 8
WORKER = """
import sys, time
from pathlib import Path
from fastkernels.core import cuda_rtc

def compiler(source, options):  # as slow as the slowest: all have found nothing in the folder
    barrier = Path(sys.argv[1])
    (barrier / sys.argv[2]).touch()
    until = time.monotonic() + 60
    while len(list(barrier.iterdir())) < int(sys.argv[3]):
        assert time.monotonic() < until
        time.sleep(0.002)
    if sys.argv[4] == "nvrtc":
        return cuda_rtc.nvrtc_compile(source, options)
    return b"\\x7fELF" + bytes(range(256)) * 4096

version = cuda_rtc.nvrtc_version if sys.argv[4] == "nvrtc" else lambda: "13.0"
options = ("--gpu-architecture=sm_90a",)
code = cuda_rtc.cubin("__global__ void f(float *x) { *x = 1.0f; }", options, compiler, version)
print(len(code), hash(code), cuda_rtc.counts["compiled"])
"""


@pytest.mark.parametrize(
    "compiler",
    [
        "made up",
        pytest.param(
            "nvrtc",
            marks=[pytest.mark.slow, pytest.mark.skipif(NO_NVRTC is not None, reason=str(NO_NVRTC))],
        ),
    ],
)
def test_eight_processes_share_a_fresh_folder(cache: Path, tmp_path: Path, compiler: str) -> None:
    barrier = tmp_path / "barrier"
    barrier.mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def start(i: int, of: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(barrier), str(i), str(of), compiler]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    work = [start(i, PROCESSES) for i in range(PROCESSES)]
    said = {process.communicate(timeout=120)[0].strip() for process in work}
    assert all(process.returncode == 0 for process in work)
    (one,) = said  # all have the same machine code, which each of them has compiled
    assert one.endswith(" 1")
    (file,) = cache.iterdir()  # and no partial file
    assert file.suffix == ".cubin" and file.read_bytes()[:4] == b"\x7fELF"
    late = start(PROCESSES, PROCESSES + 1).communicate(timeout=120)[0].strip()
    assert late == one.removesuffix("1") + "0"


TRITON_WORKER = """
import sys, time
from pathlib import Path
from fastkernels.core.compile_cache import set_triton_folder
set_triton_folder()
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_kernel import add_one

barrier = Path(sys.argv[1])
(barrier / sys.argv[2]).touch()
until = time.monotonic() + 120
while len(list(barrier.iterdir())) < 8:
    assert time.monotonic() < until
    time.sleep(0.002)
source = ASTSource(add_one, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 64})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"][:4])
"""
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)
"""


@pytest.mark.slow
def test_triton_uses_the_folder(cache: Path, tmp_path: Path) -> None:
    """Eight processes, one kernel, below FASTKERNELS_CACHE; it is compiled for a GPU that need not be there."""
    barrier = tmp_path / "barrier"
    barrier.mkdir()
    (tmp_path / "triton_kernel.py").write_text(KERNEL)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    environment = {k: v for k, v in environment.items() if not k.startswith("TRITON_")}
    command = [sys.executable, "-c", TRITON_WORKER, str(barrier)]
    work = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(PROCESSES)
    ]
    said = {process.communicate(timeout=240)[0].strip() for process in work}
    assert all(process.returncode == 0 for process in work) and said == {str(b"\x7fELF")}
    made = list((cache.parent / "triton").rglob("*.cubin"))
    assert len(made) == 1 and not list((cache.parent / "triton").rglob("tmp.pid*"))


def test_read_only_folder_falls_back_to_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    unwritable = tmp_path / "file" / "below"  # for root, too
    monkeypatch.setattr(compile_cache, "requested_folder", unwritable.joinpath)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiler = Compiler()
    with caplog.at_level(logging.WARNING, "fastkernels"):
        get(compiler)
        get(compiler)
    assert len(compiler.calls) == 1 and len(caplog.records) == 1
    found = compile_cache.folder("nvrtc")
    assert found == tmp_path / f"fastkernels-{os.getuid()}" / "nvrtc"
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    assert str(found) in caplog.text and "below" in caplog.text and "FASTKERNELS_CACHE" in caplog.text


def test_no_writable_folder_compiles_in_memory_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(compile_cache, "requested_folder", (tmp_path / "file").joinpath)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    compiler = Compiler()
    with caplog.at_level(logging.WARNING, "fastkernels"):
        assert get(compiler) == get(compiler) == CODE
    assert len(compiler.calls) == 2 and len(caplog.records) == 1
    assert "in memory" in caplog.text and "FASTKERNELS_CACHE" in caplog.text
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="FASTKERNELS_CACHE"):
        compile_cache.set_triton_folder()


def test_filled_read_only_folder_is_read(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler()
    get(compiler)
    compile_cache.folder.cache_clear()
    monkeypatch.setattr(compile_cache, "unwritable", lambda path: "read-only")  # root may write anywhere
    assert get(compiler) == CODE and len(compiler.calls) == 1


def test_full_disk_leaves_no_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_cache.folder("nvrtc")

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cuda_rtc.os, "replace", full)
    with caplog.at_level(logging.WARNING, "fastkernels"):
        assert get(Compiler()) == CODE
    assert not list(cache.iterdir()) and "No space left" in caplog.text


def test_temporary_folder_writable_by_others_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = tmp_path / f"fastkernels-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    assert compile_cache._temporary() != shared


def test_triton_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own; else below FASTKERNELS_CACHE; else Triton's, where that can be written."""
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    compile_cache.set_triton_folder()
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    asked_for = os.environ["FASTKERNELS_CACHE"]
    monkeypatch.delenv("FASTKERNELS_CACHE")
    compile_cache.set_triton_folder()
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setenv("FASTKERNELS_CACHE", asked_for)
    compile_cache.set_triton_folder()
    from triton import knobs

    assert knobs.cache.dir == os.environ["TRITON_CACHE_DIR"] == f"{asked_for}/triton"


def test_triton_is_hashed_in_a_thread(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import cache as triton_cache

    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    triton_cache.triton_key.cache_clear()
    compile_cache.prepare_triton()
    for thread in threading.enumerate():
        if thread.name == "fastkernels-triton-key":
            thread.join(60)
    assert triton_cache.triton_key.cache_info().currsize == 1


def test_triton_cache_folder_without_writable_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("not a folder")
    monkeypatch.delenv("FASTKERNELS_CACHE")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, "fastkernels"):
        compile_cache.set_triton_folder()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / f"fastkernels-{os.getuid()}" / "triton")
    assert len(caplog.records) == 1 and "FASTKERNELS_CACHE" in caplog.text


def test_provider_without_nvrtc_gives_the_reason() -> None:
    x = torch.randn(1, 64).bfloat16()
    reason = skinny.supports_cuda(x, x)
    assert reason is not None
    if (missing := cuda_rtc.unavailable()) is not None:
        assert reason == missing and "pip install" in reason and "\n" not in reason
    else:
        assert "Hopper" in reason


def forget() -> None:
    for function in (cuda_rtc._nvrtc, cuda_rtc.nvrtc_version, cuda_rtc.torch_cuda, cuda_rtc.driver_cuda):
        function.cache_clear()
    cuda_rtc.unavailable.cache_clear()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None, str | None], None]]:
    """cuda(built, driver): PyTorch is built for this CUDA version, and the driver supports that one; None for none."""

    def use(built: str | None, driver: str | None) -> None:
        forget()
        monkeypatch.setattr(cuda_rtc, "torch_cuda", lambda: built)
        monkeypatch.setattr(cuda_rtc, "driver_cuda", lambda: driver)

    yield use
    monkeypatch.undo()
    forget()


@pytest.mark.skipif(NO_NVRTC is not None, reason=str(NO_NVRTC))
@pytest.mark.parametrize("major", cuda_rtc.MAJORS)
def test_real_compiler(major: int) -> None:
    told = ("--gpu-architecture=sm_90a", *skinny.options(skinny.PARAMS[0], 1, 4096, True, True))
    assert cuda_rtc.nvrtc_version(major).startswith(f"{major}.")
    assert cuda_rtc.nvrtc_compile(text(skinny.SOURCE), told, major=major)[:4] == b"\x7fELF"
    with pytest.raises(cuda_rtc.CompileError, match=rf"(?s)NVRTC {major}\..*kernel\.cu"):
        cuda_rtc.nvrtc_compile("int f(", ("--gpu-architecture=sm_90a",), major=major)


@pytest.mark.parametrize(
    ("built", "driver", "majors"),
    [
        (None, None, [13, 12]),
        ("12.8", "12.8", [12]),
        ("12.6", "13.0", [12, 13]),
        ("13.0", "13.1", [13, 12]),
        ("13.0", "12.9", [12]),  # runs nothing of PyTorch, but names what is too new
        ("11.8", "11.8", []),
    ],
)
def test_nvrtc_follows_torch_within_the_driver(
    cuda: Callable[..., None], built: str | None, driver: str | None, majors: list[int]
) -> None:
    cuda(built, driver)
    assert cuda_rtc.usable_majors() == majors
    if NO_NVRTC is None and majors:
        assert cuda_rtc.nvrtc_version().startswith(f"{majors[0]}.")


@pytest.mark.skipif(NO_NVRTC is not None, reason=str(NO_NVRTC))
@pytest.mark.parametrize(
    ("driver", "says"),
    [
        ("12.8", r"cuda-bindings 13.*needs a driver for CUDA 13, .* 12\.8\).*fastkernels\[gpu-cu12\]"),
        ("11.8", r"CUDA 12 or newer, .*11\.8.*update the driver"),
    ],
)
def test_too_old_driver_is_named(cuda: Callable[..., None], driver: str, says: str) -> None:
    cuda(driver, driver)
    assert re.search(says, str(cuda_rtc.unavailable())), cuda_rtc.unavailable()


@pytest.mark.parametrize(("built", "extra"), [("12.6", "gpu-cu12"), ("13.0", "gpu"), (None, "gpu")])
def test_missing_nvrtc_names_the_extra(
    cuda: Callable[..., None], built: str | None, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    cuda(built, built)
    monkeypatch.setattr(cuda_rtc.ctypes, "CDLL", absent)
    reason = cuda_rtc.unavailable()
    assert reason is not None and "libnvrtc.so.1" in reason and reason.endswith(f"'fastkernels[{extra}]'")


def test_sizes_fit_the_chip() -> None:
    for p in skinny.PARAMS:
        for tiles in (1, 2):
            stages, shared = skinny.shared_bytes(p, tiles)
            static = 4 * skinny.CONSUMERS * 16 * 8 * tiles + 16 * stages
            assert shared + static <= 227 * 1024 and stages == 6, p
    assert skinny.choose(4096, 4096)["groups"] == 1 and skinny.choose(4096, 14336)["groups"] == 2
    assert skinny.choose(64, 14336)["groups"] == 1


def test_x_stays_in_registers_if_it_fits() -> None:
    p = skinny.PARAMS[0]
    assert skinny.x_units(p, 1, 4096) == skinny.x_units(p, 2, 4096) == 4
    assert skinny.x_units(p, 1, 4128) == 5 and skinny.x_units(p, 2, 4128) == 0
    assert skinny.x_units(p, 1, 14336) == 0 and skinny.x_units(p, 1, 576) == 1
