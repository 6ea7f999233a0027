"""Run an agent's command in a cage: it sees the system read-only and its task folder, and no other process.

`python -m fk_bench.agents.caged` reads its configuration as JSON from a pipe. The cage is the judge's, without the
filter of system calls, because agents are whole programs. docs/agents.md lists what it does not stop.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from typing import Any

from fk_bench.kernels.judge.cage import cage, linux

# Flags of a mount that a user namespace may not clear: those of statvfs and those of mount(2)
_KEPT = ((os.ST_NODEV, linux.MS_NODEV), (os.ST_NOEXEC, 8))
NOT_STARTED = 126


def options(folder: str, network: bool, readable: list[str]) -> cage.CageOptions:
    return cage.CageOptions(
        net=not network, seccomp=False, readable=(folder, *readable), memory=None, processes=4096, file_size=1 << 30,
        threads=len(os.sched_getaffinity(0)), tmp_bytes=8 << 30, loopback=True,
    )  # fmt: skip


def main() -> int:
    """Run the command; returns its exit code. The report of the cage goes to the pipe `report`."""
    config: dict[str, Any] = json.loads(os.read(int(sys.argv[1]), 1 << 20))
    found = options(config["folder"], config["network"], config["readable"])
    room = tempfile.mkdtemp(prefix="fk-agent-")
    report = cage.leave(found)
    init = os.fork()
    if init == 0:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        os._exit(_init(config, found, report, room))
    _, status = os.waitpid(init, 0)
    shutil.rmtree(room, ignore_errors=True)
    return os.waitstatus_to_exitcode(status) % 256


def _init(config: dict[str, Any], found: cage.CageOptions, report: cage.Report, room: str) -> int:
    """Process 1 of the namespace: builds the root, starts the command, reaps orphans until it ends."""
    cage.settle(found, report, room)
    if report["mounts"].startswith("on"):
        try:
            _writable(config["folder"])
        except OSError as error:
            print(
                f"the task folder cannot be made writable in the cage: {error}; use --no-cage",
                file=sys.stderr,
            )
            return NOT_STARTED
    runner = os.fork()
    if runner == 0:
        try:
            cage.lock(found, report, room, cage.slot(os.getppid() + config["slot"], 0))
            os.write(config["report"], json.dumps(report).encode())
            os.close(config["report"])
            os.chdir(config["folder"])
            private = {name: os.environ[name] for name in cage.PRIVATE}
            os.execve("/bin/sh", ["/bin/sh", "-c", config["command"]], {**private, **config["env"]})
        except OSError as error:
            print(f"the agent's command was not started: {error}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)
    while True:
        ended, status = os.wait()
        if ended == runner:
            return os.waitstatus_to_exitcode(status) % 256


def _writable(folder: str) -> None:
    """The task folder, which the root binds read-only like everything else, can be written."""
    has = os.statvfs(folder).f_flag
    kept = sum(flag for seen, flag in _KEPT if has & seen)
    linux.mount(None, folder, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_NOSUID | kept)


if __name__ == "__main__":
    raise SystemExit(main())
