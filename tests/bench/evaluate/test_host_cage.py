"""The process of a host has what an engine on a GPU needs: caches, compilers, loopback, memory, libraries.

CUDA's devices, whose nodes the cage shows, and NCCL are not tested here: they need a GPU.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import cast

import pytest
from fk_bench.evaluate.run import side
from fk_bench.evaluate.run.items import traced
from fk_bench.evaluate.run.side import Launcher, set_files
from fk_bench.evaluate.suites import load
from fk_bench.kernels.judge.cage.cage import PRIVATE, CageOptions
from fk_bench.kernels.judge.processes.zygote import Zygote, ZygoteError

CHECKS = """import getpass, glob, importlib.util, os, resource, shutil, subprocess, sys, tempfile
from multiprocessing import shared_memory

import torch
import torch.distributed as dist

for name in {private!r}:
    folder = os.environ[name]
    assert folder.startswith("/tmp"), (name, folder)
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
assert getpass.getuser() == "candidate", "torch.compile needs the user's name"
assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, "CUDA reserves terabytes"
assert resource.getrlimit(resource.RLIMIT_NPROC)[0] >= {processes} or os.getuid() == 0
assert os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"] == "lo"
assert os.environ["VLLM_MARK"] == "given" and "VLLM_API_KEY" not in os.environ
with open({library!r}) as file:
    assert file.read() == "library"
memory = shared_memory.SharedMemory(create=True, size=64 << 20)
memory.buf[:4] = b"fast"
memory.close(), memory.unlink()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
ones = torch.ones(3)
dist.all_reduce(ones)
dist.destroy_process_group()
with tempfile.TemporaryDirectory() as folder:
    source, program = os.path.join(folder, "a.cpp"), os.path.join(folder, "a")
    with open(source, "w") as file:
        file.write("#include <cstdio>\\nint main() {{ std::puts(\\"built\\"); }}")
    subprocess.run(["g++", source, "-o", program], check=True)
    assert subprocess.run([program], capture_output=True).stdout == b"built\\n"
assert shutil.which("ninja") or not {ninja!r}
assert subprocess.run([sys.executable, "-c", "import torch, fastkernels"]).returncode == 0


def gelu(x, approximate="none"):
    return torch.nn.functional.gelu(x, approximate=approximate)
"""
OPTIONS = {
    "host": "timm", "kind": "images", "model": "vit_tiny_patch16_224", "dtype": "float32", "gpu": False,
    "load_format": "dummy", "arguments": {"img_size": 32, "depth": 1}, "image_size": 32, "steps": 1, "compiled": False,
}  # fmt: skip


def test_host_has_caches_compilers_loopback_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "driver" / "libcuda.so.1"
    library.parent.mkdir()
    library.write_text("library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("VLLM_MARK", "given")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    file = tmp_path / "set" / "gelu.py"
    file.parent.mkdir()
    near = shutil.which("ninja", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}")
    file.write_text(
        CHECKS.format(
            private=sorted(PRIVATE), processes=side.MOST_PROCESSES, library=str(library), ninja=bool(near)
        )
    )
    with Launcher({}, 4 << 30, threads=1) as launcher:
        if os.geteuid() != 0:
            pytest.skip("without root, the cage depends on the machine")
        with launcher.spawn("timm", set_files([file.parent]), 120.0) as started:
            started.call("open", **OPTIONS)
            assert started.call("check", files={"gelu": str(file)})["failed"] == {}
            assert started.compilations() >= 1  # g++, by the import


def test_files_in_a_cage_stay_within_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate(("old", "middle", "new")):
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (i, i))
    assert [Path(p).name for p in side.newest(tmp_path.iterdir())] == ["new", "middle", "old"]
    monkeypatch.setattr(side, "MOST_COMPILED", 25)
    assert [Path(p).name for p in side.newest(tmp_path.iterdir())] == ["new", "middle"]


def test_hosts_that_compile_are_checked_for_undeployed_classes() -> None:
    entries = {e.name: e for e in load("default").entries}
    assert traced(entries["llama-3_1-8b/chat/vllm"], gpu=True)
    assert not traced(entries["llama-3_1-8b/chat/vllm"], gpu=False)  # eager there
    assert not traced(entries["llama-3_1-8b/chat/sglang"], gpu=True)
    assert traced(entries["vit-b/images/timm"], gpu=True)


def test_tuned_tables_are_readable_in_a_cage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CageOptions] = []

    class Ending:
        def spawn(self, config: object, cage: CageOptions) -> None:
            seen.append(cage)
            raise ZygoteError("the cage is known")

    (tmp_path / "own.json").touch()
    monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path / "own.json"))
    launcher = Launcher({}, 1 << 30)
    launcher._zygotes["fastkernels"] = cast(Zygote, Ending())
    with pytest.raises(side.SideFailed):
        launcher.spawn("fastkernels", (), 1.0)
    assert str((tmp_path / "own.json").resolve()) in seen[0].readable
