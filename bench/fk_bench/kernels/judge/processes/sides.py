"""The processes of a run: a fork server for each interpreter, and a runner for each side."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastkernels.core.candidate import sources_folder
from fastkernels.core.env import Environment
from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.cage.cage import STEPS, CageOptions, own_home
from fk_bench.kernels.judge.memory.arena import memory_file
from fk_bench.kernels.judge.memory.gate import CallGate
from fk_bench.kernels.judge.processes.runner_process import RunnerProcess
from fk_bench.kernels.judge.processes.zygote import Zygote

# Imports that all runner processes need, made once before they are forked; torch.compile alone takes seconds.
PRELOAD = (
    "torch",
    "triton",
    "fastkernels",
    "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd",
    "fk_bench.kernels.judge.processes.runner",
)
# Modules that a first compiled call imports, on a GPU only there, because an import that opens the device is an error;
# and our C++ kernels
CPU_PRELOAD = (
    "torch._inductor.scheduler",
    "torch.distributed.tensor.experimental",
    "fk_bench.kernels.judge.processes.compiled",
)
CPU_MEMORY = 6 << 30  # bytes of a candidate's processes
CPU_ADDRESS_SPACE = 32 << 30  # of one of them: an allocation of more fails at once
GPU_MEMORY = 32 << 30  # of the host, or half of it if that is more: pinned memory and copies of weights
PACKAGES = (
    "fastkernels",
    "fk_bench",
    "fk_integrations",
    "vllm",
    "sglang",
    "sgl_kernel",
    "flashinfer",
    "deep_gemm",
    "fla",
)
WHO = ("candidate", "baseline")
T = TypeVar("T")


@dataclass(frozen=True)
class Seat:
    """Where a process runs: its core (None: any), the memfds of its gate and arena, and more file descriptors by name.

    loopback  its network, which it may share with others, has a loopback device
    user_of   number of the process whose user it has; 0: it has one of its own
    """

    core: int | None
    gate: int
    arena: int = -1
    fds: Mapping[str, int] = field(default_factory=dict)
    loopback: bool = False
    user_of: int = 0


def tuned_tables() -> list[Path]:
    """The user's tuned tables, a file or a folder, which ops that call others need in a cage, too."""
    own = Environment.read().tuned
    return [path] if own and (path := Path(own).resolve()).exists() else []


class Sides:
    """Starts and ends the processes of both sides; each side has memory of its own.

    python   {'candidate' | 'baseline': interpreter}
    cage     False: files of a user run as this user
    timeout  seconds for one command
    memory   bytes of inputs and outputs of one case; None: 2 GiB on a CPU, on a GPU half of what is
             free, at most 64 GiB (a batch of few calls scatters by more than a call takes)
    """

    def __init__(
        self, device: str, python: Mapping[str, str], cage: bool, timeout: float, memory: int | None
    ) -> None:
        self.device, self.python, self.caged, self.timeout = device, python, cage, timeout
        self.memory = memory or _memory_of(device)
        self.cage: dict[str, str] = {}  # the report of the last candidate's cage
        self._zygotes: dict[str, Zygote] = {}
        self._trusted: dict[str, RunnerProcess] = {}
        self._groups: dict[tuple[str, int], Any] = {}  # of several ranks that run our own code
        cpu = device == "cpu"
        # On a CPU both sides share one core, so that extra threads of a candidate gain nothing.
        self.core = random.choice(sorted(os.sched_getaffinity(0))) if cpu else None
        self._files = {who: memory_file() if cpu else -1 for who in WHO}
        self._gates = {who: memory_file() for who in WHO}

    @property
    def files(self) -> tuple[int, int]:
        """The memfds of candidate and baseline; -1 on a GPU."""
        return self._files["candidate"], self._files["baseline"]

    def begin(self) -> None:
        """Start the fork servers, which import for seconds, without waiting for them. Raises ZygoteError."""
        for who in WHO:
            self._zygote(who, begin=True)

    def _zygote(self, who: str, begin: bool = False) -> Zygote:
        python = self.python.get(who, sys.executable)
        if python not in self._zygotes:
            more = CPU_PRELOAD if self.device == "cpu" else ()
            env = {"FASTKERNELS_CACHE": Environment.read().cache}  # its home is "/"
            self._zygotes[python] = Zygote(python, preload=(*PRELOAD, *more), env=env)
            if begin:
                self._zygotes[python].begin()
        return self._zygotes[python]

    @PHASES.of("start")
    def spawn(self, who: str, files: Sequence[Path] = (), seat: Seat | None = None) -> RunnerProcess:
        """A process for one side, caged if it runs files of a user. seat: of one rank; None: the side's own."""
        zygote = self._zygote(who)
        seat = seat or Seat(self.core, self._gates[who], self._files[who])
        if files and self.caged:
            own_sources = [d for f in files if (d := sources_folder(f)).is_dir()]
            cage = CageOptions(
                readable=tuple(str(f.resolve()) for f in (*files, *own_sources, *tuned_tables())),
                packages=PACKAGES,
                memory=_host_memory() if self.device == "cuda" else CPU_MEMORY,
                address_space=None if self.device == "cuda" else CPU_ADDRESS_SPACE, core=seat.core,
                loopback=seat.loopback, user_of=seat.user_of,
            )  # fmt: skip
        else:
            off: dict[str, Any] = dict.fromkeys(STEPS, False)
            home = None if files else own_home()
            cage = CageOptions(**off, memory=None, home=home, core=seat.core)
        fds = {"gate": seat.gate, **seat.fds}
        if self.device == "cpu":
            fds["arena"] = seat.arena
        gate = CallGate(seat.gate)
        gate.reset()
        side = RunnerProcess(zygote.spawn({}, cage, fds), who, self.timeout, not files, gate)
        side.greet()
        if cage.mounts:
            self.cage = side.cage
        if self.device == "cuda":
            side.channel.spin_s = 0.05
        return side

    def trusted(self, who: str) -> RunnerProcess:
        """The process for our own code on one side, shared by all ops while it lives."""
        if who not in self._trusted:
            self._trusted[who] = self.spawn(who)
        return self._trusted[who]

    def group(self, who: str, size: int, start: Callable[[], T]) -> T:
        """The processes of so many ranks for our own code on one side, shared by all ops; `start` starts them."""
        if (who, size) not in self._groups:
            self._groups[who, size] = start()
        found: T = self._groups[who, size]
        return found

    def lost_group(self, who: str, size: int) -> None:
        """End them; the next op gets new ones."""
        if (group := self._groups.pop((who, size), None)) is not None:
            group.close()

    def lost(self, who: str) -> None:
        """End the trusted process of that side; the next op gets a new one."""
        if (side := self._trusted.pop(who, None)) is not None:
            side.close()

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for side in (*self._trusted.values(), *self._groups.values()):
            side.close()
        for zygote in self._zygotes.values():
            zygote.close()
        for fd in (*self._files.values(), *self._gates.values()):
            if fd >= 0:
                os.close(fd)
        for owned in (self._trusted, self._groups, self._zygotes, self._files, self._gates):
            owned.clear()


def _host_memory() -> int:
    """Bytes of host memory for a candidate that uses a GPU."""
    return max(GPU_MEMORY, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def _memory_of(device: str) -> int:
    if device == "cpu":
        return 2 << 30
    return min(torch.cuda.mem_get_info()[0] // 2, 64 << 30)
