"""The parent's end of a host's process: messages with limits of time and size, and how the process failed."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastkernels.core.compile_cache import requested_folder
from fk_bench.core import machine
from fk_bench.evaluate.reasons import Reason
from fk_bench.kernels.judge.cage.cage import STEPS, CageOptions, own_home
from fk_bench.kernels.judge.processes.forkserver import HEADER, send
from fk_bench.kernels.judge.processes.sides import tuned_tables
from fk_bench.kernels.judge.processes.zygote import Zygote, ZygoteError

MOST_BYTES = 256 << 20  # of an answer
PACKAGES = (
    "fastkernels", "fk_bench", "fk_integrations", "vllm", "sglang", "sgl_kernel", "flashinfer", "timm", "transformers",
    "diffusers",
)  # fmt: skip
CALLS = (  # of engines and ZeroMQ; no side is stopped and resumed
    "setitimer", "timer_create", "alarm", "sched_setaffinity", "sched_setparam", "sched_setscheduler",
)  # fmt: skip
SETTINGS = ("VLLM_", "SGLANG_", "SGL_", "HF_HUB_OFFLINE", "NVSHMEM_")  # variables that the hosts get
LOOPBACK = {  # addresses of processes in a cage, which has no other network
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip
ASKED, WHERE_S = signal.SIGUSR1, 2.0  # the process prints its traceback; seconds to wait for it
_FRAMES = ('File "', "Current thread 0x", "Thread 0x")  # lines of faulthandler
TAIL = 16000  # characters of its output in which tracebacks are looked for
MOST_PROCESSES = 4096  # and threads, of one process tree: compilers of a host start some for each core
COMPILED = ("cpp", "nvrtc")  # folders of the cache with kernels of ours, by hash of their source
MOST_COMPILED = 32 << 20  # bytes of them in a cage
_COMMON = ("torch", "triton", "fastkernels")
PRELOAD = {
    "fastkernels": (*_COMMON, "transformers"), "transformers": (*_COMMON, "transformers"), "timm": (*_COMMON, "timm"),
    "diffusers": (*_COMMON, "diffusers"),
}  # fmt: skip


class SideFailed(RuntimeError):
    """A host's process raised, ended, or exceeded a limit.

    files  of the traceback, the innermost first
    """

    def __init__(self, reason: Reason, text: str, files: Sequence[str] = ()):
        super().__init__(text)
        self.reason, self.files = reason, tuple(files)


class Launcher:
    """Starts the processes of all items: one fork server for each host and interpreter.

    memory, threads  of one process tree: bytes above which it is killed, threads of torch's CPU operations
    logs             a folder for the end of each process's output: 01-vllm.log, ...
    """

    def __init__(
        self, pythons: dict[str, str], memory: int, threads: int = 0, caged: bool = True, gpu: bool = False,
        logs: Path | None = None,
    ):  # fmt: skip
        self.pythons, self.memory, self.caged, self.gpu, self.logs = pythons, memory, caged, gpu, logs
        self.threads = threads or len(os.sched_getaffinity(0))
        self.cage: dict[str, str] = {}  # the report of the last process
        self._zygotes: dict[str, Zygote] = {}

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        for zygote in self._zygotes.values():
            zygote.close()

    def spawn(self, host: str, readable: Sequence[str], timeout: float, trusted: bool = False) -> Side:
        """A process for a host, which sees these files and folders. Raises SideFailed.

        trusted  no candidate will run in it: it is not caged, and fills this user's cache of compiled kernels, of which
                 each caged process gets a copy
        """
        if host not in self._zygotes:
            python = self.pythons.get(host, sys.executable)
            if host not in machine.interpreter(python).versions:
                missing = f"{host} is not installed in {python}: give --python {host}=PATH of its interpreter"
                raise SideFailed(Reason.IMPORT, missing)
            more = ("fk_bench.evaluate.run.hosts.ready",) if host in PRELOAD and not self.gpu else ()
            preload = (*PRELOAD.get(host, ("torch", "fastkernels")), "fk_bench.evaluate.run.worker", *more)
            env = {
                k: v
                for k, v in os.environ.items()
                if k.startswith(SETTINGS) and not k.endswith(("KEY", "TOKEN"))
            }
            self._zygotes[host] = Zygote(
                python, preload, {**LOOPBACK, **env}, "fk_bench.evaluate.run.worker:main"
            )
        off: dict[str, Any] = {} if self.caged and not trusted else dict.fromkeys(STEPS, False)
        compiled = [] if off else newest([f for name in COMPILED for f in requested_folder(name).glob("*.*")])
        seen = (*map(os.path.realpath, readable), *compiled, *map(str, tuned_tables()))
        cage = CageOptions(
            **off, readable=seen, packages=PACKAGES, memory=self.memory,
            home=own_home() if trusted else None, processes=MOST_PROCESSES, threads=self.threads, shm_bytes=4 << 30,
            tmp_bytes=8 << 30, loopback=True, calls=CALLS,
        )  # fmt: skip
        try:
            side = Side(self._zygotes[host].spawn({"compiled": compiled}, cage), timeout, self._log(host))
        except ZygoteError as error:
            raise SideFailed(Reason.RUN_TIME, str(error)) from error
        report = side.receive()["cage"]
        self.cage = self.cage if trusted else report
        return side

    def _log(self, host: str) -> Path | None:
        if self.logs is None:
            return None
        self.logs.mkdir(parents=True, exist_ok=True)
        return self.logs / f"{len(list(self.logs.iterdir())) + 1:02d}-{host}.log"


class Side:
    """One process. timeout: seconds for one message; log: a file for the end of its output."""

    def __init__(self, child: Any, timeout: float, log: Path | None = None):
        self.child, self.timeout, self.log = child, timeout, log
        child.channel.setblocking(False)
        if log is not None:
            log.touch()  # takes its number

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self.child.close()
        if self.log is not None:
            self.log.write_text(self.child.output_tail(), encoding="utf-8")

    def call(self, do: str, **given: Any) -> dict[str, Any]:
        """The answer to one message. Raises SideFailed."""
        self.tell(do, **given)
        return self.receive()

    def compilations(self) -> int:
        """Compilations of the host until now. Compilers are counted from the first call on."""
        found = self.call("compilations").get("compilations")
        if type(found) is not int:
            raise SideFailed(Reason.RUN_TIME, f"a number of compilations that is none: {found!r:.80}")
        return found

    def timed(self, do: str, **given: Any) -> tuple[float, dict[str, Any]]:
        """Seconds from the message to the answer by this process's clock, and the answer."""
        start = time.perf_counter()
        found = self.call(do, **given)
        return time.perf_counter() - start, found

    def tell(self, do: str, **given: Any) -> None:
        self.child.channel.settimeout(self.timeout)
        try:
            send(self.child.channel, {"do": do, **given})
        except TimeoutError:
            raise self._ended(f"{do}: the process does not read", Reason.TIME_LIMIT) from None
        except OSError:
            raise self._ended(f"{do}: the process has ended") from None

    def receive(self) -> dict[str, Any]:
        until = time.monotonic() + self.timeout
        size = HEADER.unpack(self._read(HEADER.size, until))[0]
        if size > MOST_BYTES:
            raise self._ended(f"an answer of {size} bytes, more than {MOST_BYTES}")
        try:
            found = json.loads(self._read(size, until))
        except ValueError as error:
            raise self._ended(f"an answer that is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise self._ended(f"an answer that is no object: {type(found).__name__}")
        if isinstance(raised := found.get("error"), dict):
            try:
                raise SideFailed(
                    Reason(raised["reason"]), str(raised["text"])[:500], [str(f) for f in raised["files"]]
                )
            except (KeyError, TypeError, ValueError):
                raise self._ended("an error without reason, text and files") from None
        return found

    def _read(self, count: int, until: float) -> bytes:
        data = bytearray()
        channel: socket.socket = self.child.channel
        channel.setblocking(False)
        while len(data) < count:
            left = until - time.monotonic()
            if left <= 0 or not select.select([channel], [], [], left)[0]:
                self._ask_where()
                raise self._ended(f"no answer within {self.timeout:g} s", Reason.TIME_LIMIT)
            try:
                part = channel.recv(min(count - len(data), 1 << 20))
            except BlockingIOError:
                continue
            except OSError:
                part = b""
            if not part:
                raise self._ended("the process has ended")
            data += part
        return bytes(data)

    def _ask_where(self) -> None:
        """Let the process print where it is, so that a candidate that hangs is named without more probes."""
        before, until = self.child.output_bytes, time.monotonic() + WHERE_S
        self.child.signal(ASKED)
        while self.child.output_bytes == before and time.monotonic() < until:
            time.sleep(0.05)

    def _ended(self, what: str, reason: Reason = Reason.RUN_TIME) -> SideFailed:
        """End the process; the failure says how it ended, with the last line of its output."""
        exit_ = self.child.wait(1.0) or self.child.kill()
        if exit_.oom:
            reason = Reason.MEMORY_LIMIT
        said = self.child.output_tail(TAIL).strip().splitlines()
        own = [line for line in said if line.strip() and not line.strip().startswith(_FRAMES)]
        tail = f"; its last output: {own[-1].strip()[:200]}" if own else ""
        return SideFailed(reason, f"{what} ({exit_}){tail}", files_in("\n".join(said)))


def newest(files: Iterable[Path]) -> list[str]:
    """The newest of these files that fit together into the cage's root, which holds 64 MiB."""
    kept, left = [], MOST_COMPILED
    for file in sorted(files, key=lambda f: (-f.stat().st_mtime, f.name)):
        left -= file.stat().st_size
        if left < 0:
            break
        kept.append(str(file))
    return kept


def set_files(folders: Iterable[str | Path]) -> list[str]:
    """All files of these folders. A cage gets copies, so that it reads them whatever the modes of the folders are."""
    found = (p for folder in folders for p in sorted(Path(folder).rglob("*")))
    return [str(p) for p in found if p.is_file() and "__pycache__" not in p.parts]


def files_in(text: str) -> list[str]:
    """The files of the tracebacks in a log, the innermost of the last one first.

    Python's own tracebacks end with the innermost call; those of faulthandler, which say so, begin with it.
    """
    found: list[list[str]] = [[]]
    first = False  # whether the innermost call of this traceback comes first
    for line in map(str.strip, text.splitlines()):
        if line.endswith(("(most recent call last):", "(most recent call first):")):
            first = line.endswith("first):")
            found.append([])
        elif line.startswith('File "'):
            name = line.split('"')[1]
            found[-1] = [*found[-1], name] if first else [name, *found[-1]]
    return [name for one in reversed(found) for name in one]
