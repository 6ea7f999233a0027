"""The process that children are forked from: it has imported torch, knows no secret and never uses the GPU.

    python -m fk_bench.kernels.judge.processes.forkserver FD PARENT MODULE,MODULE FOLDER

Started by `zygote.Zygote`. Each child has three processes: a supervisor outside the cage, process 1 of the cage's PID
namespace, and the runner. Only the standard library and the given modules are imported here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any, NoReturn

from fk_bench.kernels.judge.cage import cage, cgroup, linux, seccomp  # noqa: F401 (seccomp: nothing is imported for the first time in a cage)

HEADER = struct.Struct(">Q")
MAX_FDS = 64
FAILED = 70  # exit status of a child that could not be set up, or whose entry raised
_WATCH_S = 0.2
_LINGER_S = 0.5  # of the first rank's process 1, once its runner has ended
_PART = 1 << 14  # bytes read at once from a file of /proc
_PRIORITY = -10  # of a supervisor (root): it must get CPU time even next to a fork bomb
_HALTED = ("T", "t", "Z", "X")  # states of a task in /proc
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    body = json.dumps(message).encode()
    socket.send_fds(sock, [HEADER.pack(len(body))], fds or [])
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Raises EOFError if the other end is closed."""
    head, fds, _, _ = socket.recv_fds(sock, HEADER.size, MAX_FDS)
    head += _exactly(sock, HEADER.size - len(head))
    return json.loads(_exactly(sock, HEADER.unpack(head)[0])), fds


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError("the other end is closed")
        data += part
    return bytes(data)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    sys.path[:] = [p for p in sys.path if p not in ("", "/")]
    try:
        for name in sys.argv[3].split(","):
            importlib.import_module(name)
        opened = [p for p in _open_files() if p.startswith("/dev/nvidia")]
        if opened:
            raise RuntimeError(f"importing {sys.argv[3]} opened {opened[0]}: children could not use CUDA")
    except Exception:
        send(control, {"error": traceback.format_exc(limit=-4)})
        return
    gc.collect()
    gc.freeze()  # children share these pages for longer
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies; supervisors report how a child ended
    try:
        _serve(control, parent)
    finally:  # the judge is gone; otherwise it would have killed this process
        shutil.rmtree(sys.argv[4], ignore_errors=True)


def _serve(control: socket.socket, parent: int) -> None:
    threads = len(os.listdir("/proc/self/task"))
    send(control, {"pid": os.getpid(), "python": sys.version.split()[0], "threads": threads})
    while os.getppid() == parent:
        if not select.select([control], [], [], 1.0)[0]:
            continue
        try:
            request, fds = receive(control)
        except (EOFError, ConnectionError):
            return
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            _guarded(_supervise, request, fds, me)
        for fd in fds:
            os.close(fd)
        send(control, {"pid": pid})


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _guarded(function: Any, *args: Any) -> NoReturn:
    """Run `function` as the whole life of this process."""
    code = FAILED
    try:
        code = function(*args) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _keep_open(*kept: int) -> None:
    start = 0
    for fd in [*sorted(kept), 1 << 30]:
        if start < fd:  # for an empty range CPython asks the kernel to close everything from there on
            os.closerange(start, fd)
        start = fd + 1


def _supervise(request: dict[str, Any], fds: list[int], zygote: int) -> None:
    """Outside the cage: fork it, watch its memory, end it on SIGTERM, report how it ended, clean up."""
    channel, output, status, *extra = fds
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    os.setsid()
    os.umask(0o022)
    linux.die_with_parent(zygote, signal.SIGKILL)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    options = request["options"] = cage.CageOptions.of(request["options"])
    number = cage.slot(zygote, options.user_of or request["number"])
    names = dict(zip(request["fds"], extra, strict=True))
    spaces = {n: names.pop(n) for n in list(names) if n.startswith(cage.SPACE)}
    request["fds"], extra = list(names), list(names.values())
    report = cage.leave(options, {n.removeprefix(cage.SPACE): fd for n, fd in spaces.items()})
    request["space"] = spaces.pop(f"{cage.SPACE}mounts", -1)
    for fd in spaces.values():
        os.close(fd)
    own_pids = report["pid"] == "on"
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        _join(request["join"], report)
        run = _init if own_pids else _runner
        _guarded(run, request, report, number, channel, extra, write)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)  # the machine's, even if /proc is replaced later
    _keep_open(0, 1, 2, status, read, proc)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    end = _watch(first, options, proc, request["kills"])
    if own_pids:
        with contextlib.suppress(ValueError):
            end.update(json.loads(os.read(read, 1 << 16)))
    else:
        _sweep(number, proc)
    os.write(status, json.dumps(end).encode() + b"\n")


def _join(files: list[str], report: cage.Report) -> None:
    """Enter the control groups; everything that this process starts is in them, too."""
    try:
        cgroup.join(files)
        report["groups"] = "on" if files else "off: no writable control groups"
    except OSError as error:
        report["groups"] = f"off: {error}"


def _watch(first: int, options: cage.CageOptions, proc: int, kills: str) -> dict[str, Any]:
    end: dict[str, Any] = {"peak": 0}
    while True:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if kills and not end.get("oom") and cgroup.killed(kills):  # perhaps a child of the runner only
            end |= {"oom": True, "peak": max(end["peak"], options.memory or 0)}
            if pid != first:
                os.kill(first, signal.SIGKILL)
        if pid == first:
            return end | {"status": status, "maxrss": usage.ru_maxrss * 1024}
        if pid:
            continue
        woken = signal.sigtimedwait(_SIGNALS, _WATCH_S)
        if woken is not None and woken.si_signo == signal.SIGTERM:
            end["killed"] = True
            os.kill(first, signal.SIGKILL)
        if options.memory is None or end.get("oom"):
            continue
        tree = [first, *descendants(first, proc)]
        used = sum(_memory(p, proc, "status", ("RssAnon:", "RssShmem:")) for p in tree)
        if used > options.memory and len(tree) > 1:  # pages shared by a fork count once
            used = sum(_memory(p, proc, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for p in tree)
        end["peak"] = max(end["peak"], used)
        if used > options.memory:
            end["oom"] = True
            os.kill(first, signal.SIGKILL)


def _read(proc: int, name: str) -> str:
    try:
        fd = os.open(name, os.O_RDONLY, dir_fd=proc)
    except OSError:
        return ""  # it has ended meanwhile
    try:  # without a file object: the judge reads several of these per task before each timed request
        parts = [os.read(fd, _PART)]
        while len(parts[-1]) == _PART:
            parts.append(os.read(fd, _PART))
        return b"".join(parts).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def descendants(pid: int, proc: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        for task in _tasks(parent, proc):
            children = _children(parent, task, proc)
            found += children
            todo += children
    return found


def states(pid: int, proc: int) -> dict[int, bool]:
    """Whether each descendant of a process is stopped: all its tasks are, or have ended."""
    found: dict[int, bool] = {}
    todo = [c for task in _tasks(pid, proc) for c in _children(pid, task, proc)]
    while todo:
        one = todo.pop()
        found[one] = True
        for task in _tasks(one, proc):
            # Its state before its children: a task that is stopped starts no more of them.
            found[one] = found[one] and _halted(one, task, proc)
            todo += _children(one, task, proc)
    return found


def _halted(pid: int, task: str, proc: int) -> bool:
    state = _read(proc, f"{pid}/task/{task}/stat").rpartition(")")[2].split()  # its name may hold anything
    return not state or state[0] in _HALTED


def used_ns(pids: list[int], proc: int) -> int:
    """Nanoseconds of CPU time that the tasks of these processes have used; 0 if this kernel does not count them."""
    tasks = [f"{pid}/task/{task}/schedstat" for pid in pids for task in _tasks(pid, proc)]
    return sum(int(text.split()[0]) for file in tasks if (text := _read(proc, file)))


def _tasks(pid: int, proc: int) -> list[str]:
    try:
        fd = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    except OSError:
        return []
    try:
        return os.listdir(fd)
    except OSError:
        return []
    finally:
        os.close(fd)


def _children(pid: int, task: str, proc: int) -> list[int]:
    return [int(c) for c in _read(proc, f"{pid}/task/{task}/children").split()]


def _memory(pid: int, proc: int, file: str, names: tuple[str, ...]) -> int:
    lines = _read(proc, f"{pid}/{file}").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


def _sweep(number: int, proc: int) -> None:
    """Without a PID namespace: end all processes that the child left behind."""
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        left = descendants(os.getpid(), proc)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            continue
        break
    cage.end_user(number)


def _init(
    request: dict[str, Any], report: cage.Report, number: int, channel: int, extra: list[int], write: int
) -> None:
    """Process 1 of the cage: when it ends, the kernel ends all others. Reports how the runner ended."""
    linux.die_with_parent(0, signal.SIGKILL)
    cage.settle(request["options"], report, request["room"], request["space"])
    report["settled"] = "yes"
    runner = os.fork()
    if runner == 0:
        _guarded(_runner, request, report, number, channel, extra, write)
    _keep_open(0, 1, 2, write)
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == runner:
            end = {"status": status, "maxrss": usage.ru_maxrss * 1024}
            os.write(write, json.dumps(end).encode())
            if request[
                "options"
            ].loopback:  # other ranks' processes end with this one: it shall be seen first
                time.sleep(_LINGER_S)
            return


def _runner(
    request: dict[str, Any], report: cage.Report, number: int, channel: int, extra: list[int], write: int
) -> None:
    """In the cage: lock it, then run the entry with (channel, config, fds)."""
    options: cage.CageOptions = request["options"]
    if not report.pop("settled", ""):
        cage.settle(options, report, request["room"], request["space"])
    parent = os.getppid()
    os.setsid()  # a signal to its own group reaches no other process
    _keep_open(0, 1, 2, channel, *extra)
    cage.lock(options, report, request["room"], number)
    linux.die_with_parent(parent, signal.SIGKILL)  # again, because the change of user cleared it
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    _fresh(options)
    module, _, function = request["entry"].partition(":")
    entry = getattr(importlib.import_module(module), function)
    with socket.socket(fileno=channel) as sock:
        entry(sock, request["config"] | {"cage": report}, dict(zip(request["fds"], extra, strict=True)))


def _fresh(options: cage.CageOptions) -> None:
    """Reset what a fork must not share (random states) or inherit (the number of threads)."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.set_num_threads(options.threads)
        torch.default_generator.manual_seed(random.getrandbits(63))


if __name__ == "__main__":
    main()
