"""Runner processes for the judge: forked from a clean interpreter, caged, watched, and ended with all descendants.

with Zygote() as zygote, zygote.spawn({"op": "rms_norm"}, CageOptions(), fds={"slots": fd}) as child:
    child.channel.sendall(...)
    print(child.wait(10.0), child.output_tail())
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fastkernels.core import multicast
from fastkernels.core.env import Environment
from fastkernels.core.tuning import NO_TABLE
from fk_bench.kernels.judge.cage import cgroup
from fk_bench.kernels.judge.cage.cage import CageOptions
from fk_bench.kernels.judge.cage.cgroup import Group
from fk_bench.kernels.judge.processes import forkserver

log = logging.getLogger("fastkernels")

OUTPUT_KEPT = 64 << 10
_KEPT = (
    "PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "CC", "CXX", "CPATH", "LIBRARY_PATH", "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH", "FASTKERNELS_PROVIDER", "FASTKERNELS_TUNED",
)  # fmt: skip
_KEPT_PREFIXES = (
    "LC_",
    "OMP_",
    "MKL_",
    "KMP_",
    "CUDA",
    "NVIDIA_",
    "TRITON_",
    "TORCH",
    "PYTORCH_",
    "NCCL_",
    "NVCC_",
)
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


class ZygoteError(RuntimeError):
    """A runner process cannot be started; the message has the end of the zygote's output."""


@dataclass(frozen=True)
class Exit:
    """How a child ended. One of `code` and `signal` is set, unless its supervisor was lost.

    killed    ended by the judge (`Child.kill`)
    oom       ended by its supervisor: more than `CageOptions.memory`
    peak_rss  peak bytes of the runner itself, or of the whole tree if that was higher
    """

    code: int | None = None
    signal: int | None = None
    killed: bool = False
    oom: bool = False
    peak_rss: int = 0

    def __str__(self) -> str:
        if self.oom:
            return f"used too much memory ({self.peak_rss / 2**30:.1f} GiB)"
        if self.killed:
            return "ended by the judge"
        if self.signal is not None:
            return f"signal {signal.Signals(self.signal).name}"
        return "its supervisor was lost" if self.code is None else f"exit status {self.code}"


class Child:
    """One runner. `channel` is the judge's end of a private socket pair."""

    def __init__(
        self, pid: int, channel: socket.socket, output: int, status: int, room: Path, group: Group | None = None,
        number: int = 0,
    ):  # fmt: skip
        self.pid, self.channel, self.room = pid, channel, room
        self.group, self.number = group or Group.none(), number
        self.exit: Exit | None = None
        self.output_bytes = 0
        self._status = status
        self._tail = bytearray()
        self._first: list[int] = []  # pidfds of the cage's process 1 and the runner
        self._stopped: list[int] = []
        self._joined = False
        self._used = 0  # CPU time of the tree when it got SIGSTOP
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._pump = threading.Thread(target=self._read_output, args=(output,), daemon=True)
        self._pump.start()

    def _read_output(self, output: int) -> None:
        """Read to the end, so that a child with endless output never blocks and fills nothing."""
        with open(output, "rb", buffering=0) as file:
            while part := file.read(1 << 16):
                self.output_bytes += len(part)
                self._tail += part
                del self._tail[:-OUTPUT_KEPT]

    def wait(self, timeout: float | None = None) -> Exit | None:
        """How it ended; None if it has not ended within `timeout` seconds."""
        if self.exit is None and select.select([self._status], [], [], timeout)[0]:
            text = os.read(self._status, 1 << 16)
            self.exit = _ended(json.loads(text)) if text else Exit()
            if not text:  # the supervisor was killed: only the child's session is known
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
        return self.exit

    @property
    def peak_rss(self) -> int:
        return self.exit.peak_rss if self.exit else 0

    def kill(self) -> Exit:
        """End the child and all its descendants; returns how it ended."""
        if self.wait(0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            if self.wait(3.0) is None:  # the supervisor is too slow: kill it, and the kernel ends the tree
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self.wait(10.0)
        self.exit = self.exit or Exit(killed=True)
        return self.exit

    def stop(self, timeout: float = 5.0) -> bool:
        """Stop the child with all descendants; True when every task of them is stopped, False after `timeout` s.

        The kernel freezes them where it can. Elsewhere they get SIGSTOP; a task that still runs could resume another
        one that was seen stopped, so all must be seen stopped twice.
        """
        if self._freezes():
            return self.group.freeze(timeout)
        until, clean = time.monotonic() + timeout, 0
        for fd in self._first:  # most trees have no others, and are then found stopped at once
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGSTOP)
        time.sleep(2e-5)  # it needs its core, which may be this one
        while clean < 2:
            states = forkserver.states(self.pid, self._proc)
            moving = [pid for pid, stopped in states.items() if not stopped]
            clean = 0 if moving else clean + 1
            for pid in moving:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            if moving:
                time.sleep(2e-5)
            if time.monotonic() > until:
                return False
        self._stopped = list(states)
        self._used = forkserver.used_ns(self._stopped, self._proc)
        return True

    def _freezes(self) -> bool:
        """Whether the kernel can freeze the tree: its first process is in the group, and so are all that it starts."""
        if self.group.freezes and not self._joined:
            tree = self._tree()[:1]
            self._joined = bool(tree) and self.group.holds(tree)
            self.group.freezes = self._joined or not tree
            return self._joined
        return self.group.freezes

    def still(self) -> bool:
        """Whether everything is stopped, and has not run since `stop`."""
        if self._freezes():
            return self.group.frozen  # only the judge can thaw it
        if not all(forkserver.states(self.pid, self._proc).values()):
            return False
        return forkserver.used_ns(self._stopped, self._proc) == self._used

    def resume(self) -> None:
        """Resume what `stop` has stopped; the tree cannot have changed meanwhile."""
        if self._freezes():
            self.group.thaw()
            return
        for pid in reversed(self._stopped):  # the runner first: the clock may run
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def newest(self) -> int:
        """The last process of the tree: the runner itself, as long as it has started no other."""
        tree = self._tree()
        if not self._first:
            with contextlib.suppress(OSError):  # an old kernel, or one has ended
                self._first = [os.pidfd_open(pid) for pid in tree]
        return (tree or [self.pid])[-1]

    def signal(self, number: int) -> None:
        """Send a signal to the child and all its descendants; the supervisor gets none."""
        for pid in self._tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _tree(self) -> list[int]:
        """The processes of the child without its supervisor."""
        return forkserver.descendants(self.pid, self._proc)

    def output_tail(self, limit: int = OUTPUT_KEPT) -> str:
        """The last `limit` bytes of its standard output and error."""
        if self.exit is not None:
            self._pump.join(1.0)
        return bytes(self._tail[-limit:]).decode(errors="replace")

    def close(self) -> None:
        """Kill it and remove its files."""
        self.kill()
        self._pump.join(5.0)
        self.channel.close()
        if self._status >= 0:
            os.close(self._status)
            os.close(self._proc)
            for fd in self._first:
                os.close(fd)
            self._first = []
            self._status = -1
            self.group.close()
        shutil.rmtree(self.room, ignore_errors=True)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ended(end: dict[str, Any]) -> Exit:
    code, number, status = None, None, end["status"]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
    else:
        code = os.WEXITSTATUS(status)
    peak = max(end["maxrss"], end["peak"])
    return Exit(code, number, bool(end.get("killed")), bool(end.get("oom")), peak)


class Zygote:
    """A fork server in its own interpreter, started at the first `spawn`, and again when it is lost.

    python   may be of another environment, which needs the modules of `preload` and our package
    env      variables to set, in addition to those kept from os.environ
    notes    incidents for the report, such as a lost zygote
    """

    def __init__(
        self,
        python: str = sys.executable,
        preload: Sequence[str] = ("torch", "triton", "fastkernels"),
        env: Mapping[str, str] | None = None,
        entry: str = "fk_bench.kernels.judge.processes.entry:main",
        start_timeout_s: float = 180.0,
    ):
        self.python, self.preload, self.entry = python, tuple(preload), entry
        self.env, self.start_timeout_s = dict(env or {}), start_timeout_s
        self.notes: list[str] = []
        self.info: dict[str, Any] = {}
        self.dir = Path(tempfile.mkdtemp(prefix="fk-judge-"))
        self.dir.chmod(0o711)  # children of another user find their own directory, but cannot list the others
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._begun = False  # but not yet ready
        self._lock = threading.Lock()

    def _environment(self) -> dict[str, str]:
        kept = {
            k: v
            for k, v in {**os.environ, **self.env}.items()
            if k in self.env
            or ((k in _KEPT or k.startswith(_KEPT_PREFIXES)) and not any(s in k for s in _SECRET))
        }
        if kept.pop("FASTKERNELS_TUNED", None) and (tables := Environment.read().tuned):
            kept["FASTKERNELS_TUNED"] = tables if tables == NO_TABLE else str(Path(tables).resolve())
        roots = []
        for name in ("fk_bench", "fastkernels", "fk_integrations"):
            spec = importlib.util.find_spec(name)
            roots += [str(Path(p).parent) for p in (spec.submodule_search_locations or ())] if spec else []
        roots = [p for p in roots if Path(p).name not in ("site-packages", "dist-packages")]
        paths = dict.fromkeys([*roots, *kept.get("PYTHONPATH", "").split(os.pathsep)])
        kept["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        # An environment that is not activated has its ninja and its compilers next to the interpreter.
        folder = os.path.dirname(os.path.abspath(shutil.which(self.python) or self.python))
        kept["PATH"] = os.pathsep.join(
            [*filter(None, kept.get("PATH", os.defpath).split(os.pathsep)), folder]
        )
        # Inductor names its cache after the user; a cage's user has no name of its own.
        own = {"HOME": "/", "USER": "candidate", "LOGNAME": "candidate"}
        return {
            **multicast.variables(),
            **kept,
            **own,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def begin(self) -> None:
        """Start the interpreter, which imports for seconds; `start` waits for it. Raises ZygoteError."""
        self._stop()
        cgroup.sweep()
        python = shutil.which(self.python)
        if python is None:
            raise ZygoteError(f"there is no interpreter {self.python}")
        ours, theirs = socket.socketpair()
        name = self.dir / "zygote.log"
        with theirs, open(name, "wb") as out:
            self._process = subprocess.Popen(
                [os.path.abspath(python), "-m", "fk_bench.kernels.judge.processes.forkserver", str(theirs.fileno()),
                 str(os.getpid()), ",".join(self.preload), str(self.dir)],
                env=self._environment(), cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self._control, self._begun = ours, True
        ours.settimeout(self.start_timeout_s)

    def start(self) -> None:
        """Raises ZygoteError if a module of `preload` does not import, or takes too long."""
        if not self._begun:
            self.begin()
        assert self._control is not None
        self._begun = False
        try:
            self.info, _ = forkserver.receive(self._control)
        except (OSError, EOFError) as error:
            said = (self.dir / "zygote.log").read_text(errors="replace")[-4000:]
            self.info = {"error": f"{type(error).__name__}: {error}\n{said}"}
        if "error" in self.info:
            self._stop()
            raise ZygoteError(f"{self.python} cannot serve as a runner: {self.info['error'].strip()}")

    def _stop(self) -> None:
        self._begun = False
        if self._process is not None:
            self._process.kill()  # its supervisors and their cages die with it
            self._process.wait()
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None

    def spawn(
        self, config: Mapping[str, Any], cage: CageOptions | None = None, fds: Mapping[str, int] | None = None
    ) -> Child:
        """Fork a runner, which cages itself and calls `entry(channel, {**config, "cage": report}, fds)`.

        `config` is JSON. `fds` stay open here; the runner gets copies with their names. Raises ZygoteError.
        """
        with self._lock:
            if self._process is not None and not self._begun and self._process.poll() is not None:
                self.notes.append(f"the zygote was lost ({_how(self._process.returncode)}) and started again")
                log.warning("%s", self.notes[-1])
                self._stop()
            if self._process is None or self._begun:
                self.start()
            self._count += 1
            return self._spawn(dict(config), cage or CageOptions(), dict(fds or {}))

    def _spawn(self, config: dict[str, Any], cage: CageOptions, fds: dict[str, int]) -> Child:
        assert self._control is not None
        room = self.dir / f"{self._count}-{time.time_ns():x}"
        room.mkdir(mode=0o711)
        group = Group(f"{cgroup.PREFIX}{os.getpid()}-{room.name}", _limit(cage.memory))
        channel, theirs = socket.socketpair()
        read, write = os.pipe()
        status, status_write = os.pipe()
        request = {
            "config": config, "options": asdict(cage), "entry": self.entry, "fds": list(fds), "room": str(room),
            "number": self._count, "join": group.joins, "kills": group.kills,
        }  # fmt: skip
        try:
            forkserver.send(self._control, request, [theirs.fileno(), write, status_write, *fds.values()])
            pid = forkserver.receive(self._control)[0]["pid"]
        except (OSError, EOFError) as error:
            for fd in (read, status):
                os.close(fd)
            channel.close()
            group.close()
            raise ZygoteError(f"the zygote was lost while it started a runner: {error}") from error
        finally:
            theirs.close()
            os.close(write)
            os.close(status_write)
        return Child(pid, channel, read, status, room, group, self._count)

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _how(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"


def _limit(memory: int | None) -> int | None:
    """The bytes at which the kernel ends the tree: more than those at which its supervisor does, which says so."""
    return None if memory is None else memory + memory // 8
