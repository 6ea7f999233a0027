"""A control group for the processes of one runner: the kernel freezes them, and limits their memory.

A candidate cannot leave or thaw its group: the cage shows the file system of control groups read-only, to another user.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PREFIX = "fk-judge-"  # then the judge's process id
_NAP = 2e-5


class Group:
    """freezes: whether the kernel can freeze this group (version 2); kills: the file that counts tasks which the kernel
    has ended because the group used too much memory, '' if it has no limit.
    """

    def __init__(self, name: str, memory: int | None) -> None:
        self._empty()
        unified = self._make("cgroup2", "", name)
        if unified is not None:
            with contextlib.suppress(OSError):
                self._freeze = self._open(unified / "cgroup.freeze", os.O_WRONLY)
                self._events = self._open(unified / "cgroup.events", os.O_RDONLY)
                self.freezes = True
        if memory is None:
            return
        if unified is not None and _write(unified / "memory.max", memory):
            self.kills = str(unified / "memory.events")
            return
        folder = self._make("cgroup", "memory", name)
        if folder is not None and _write(folder / "memory.limit_in_bytes", memory):
            self.kills = str(folder / "memory.oom_control")

    @classmethod
    def none(cls) -> Group:
        """A group that does nothing."""
        found = cls.__new__(cls)
        found._empty()
        return found

    def _empty(self) -> None:
        self.freezes, self.kills = False, ""
        self._made: list[Path] = []
        self._fds: list[int] = []

    @property
    def joins(self) -> list[str]:
        """The files to which a process writes 0 to join."""
        return [str(folder / "cgroup.procs") for folder in self._made]

    def _make(self, kind: str, controller: str, name: str) -> Path | None:
        """A new group below the group of this process; None if there is no such hierarchy, or it cannot be written."""
        parent = _own(kind, controller)
        if parent is None:
            return None
        folder = parent / name
        try:
            folder.mkdir()
        except OSError:
            return None
        self._made.append(folder)
        return folder

    def _open(self, file: Path, flags: int) -> int:
        self._fds.append(os.open(file, flags | os.O_CLOEXEC))
        return self._fds[-1]

    def holds(self, pids: list[int]) -> bool:
        """Whether all these processes are in the group."""
        return set(pids) <= set(map(int, (self._made[0] / "cgroup.procs").read_text().split()))

    def freeze(self, timeout: float) -> bool:
        """Freeze all tasks; whether all were frozen within `timeout` seconds."""
        os.pwrite(self._freeze, b"1", 0)
        until = time.monotonic() + timeout
        while not self.frozen:
            if time.monotonic() > until:
                return False
            time.sleep(_NAP)  # a task needs its core, which may be this one
        return True

    @property
    def frozen(self) -> bool:
        return b"frozen 1" in os.pread(self._events, 256, 0)

    def thaw(self) -> None:
        os.pwrite(self._freeze, b"0", 0)

    def close(self, timeout: float = 2.0) -> None:
        """Remove the group, whose processes have ended."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        until = time.monotonic() + timeout
        while self._made:
            try:
                self._made[-1].rmdir()
            except FileNotFoundError:
                pass
            except OSError:  # the last process is still ending
                if time.monotonic() < until:
                    time.sleep(1e-3)
                    continue
            self._made.pop()


def _own(kind: str, controller: str) -> Path | None:
    """The folder of this process's own group in a mounted hierarchy."""
    try:
        mounts, groups = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        found, _, options = after.split(" ")[:3]
        if found != kind or (controller and controller not in options.split(",")):
            continue
        root, mounted = before.split()[3:5]
        for group in groups.splitlines():
            _, controllers, path = group.split(":", 2)
            if controller in controllers.split(","):
                inner = os.path.relpath(path, root)
                folder = Path(mounted) if inner.startswith("..") else Path(mounted, inner)
                return folder if folder.is_dir() else Path(mounted)
    return None


def _write(file: Path, value: int) -> bool:
    try:
        file.write_text(str(value))
    except OSError:
        return False
    return True


def sweep() -> None:
    """Remove the empty groups of judges that were killed."""
    for kind, controller in (("cgroup2", ""), ("cgroup", "memory")):
        for folder in parent.glob(f"{PREFIX}*") if (parent := _own(kind, controller)) is not None else ():
            if not os.path.exists(f"/proc/{folder.name.split('-')[2]}"):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def killed(file: str) -> bool:
    """Whether the kernel has ended a task of a group, by the file that counts this."""
    try:
        counts = dict(line.split() for line in Path(file).read_text().splitlines())
    except OSError:
        return False
    return int(counts.get("oom_kill", 0)) > 0


def join(files: list[str]) -> None:
    """Put this process into groups. Raises OSError."""
    for file in files:
        with open(file, "w") as procs:
            procs.write("0")
