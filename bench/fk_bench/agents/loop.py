"""An agent's command on one task: it runs in a cage, checks through a socket, and is started again while it helps."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels.core.candidate import sources_folder
from fk_bench.agents.session import Session
from fk_bench.agents.tasks import SOCKET
from fk_bench.core.digests import digest_of
from fk_bench.core.terminal.text import printable

MOST_SOURCE, MOST_FILES = 20 << 20, 200  # bytes and files of a candidate
MOST_REQUEST, WAIT_S = 64 << 10, 5.0  # bytes of a request, seconds for it to arrive
MOST_USED = 1e12  # tokens or dollars of one report
TAIL_LINES, TAIL_BYTES = 12, 16 << 10
POLL_S = 0.1
KEPT = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH")
KEPT_PREFIXES = ("LC_", "CUDA", "NVIDIA_", "TRITON_")


class BadSource(ValueError):
    """A candidate in a task folder that is not taken; the message says why."""


@dataclass(frozen=True)
class Command:
    """A shell command, and what its cage leaves open.

    network   whether it may reach servers
    env       {name: value} of variables that it gets
    readable  files and folders that it sees read-only
    """

    text: str
    network: bool = False
    env: Mapping[str, str] | None = None
    readable: Sequence[str] = ()
    caged: bool = True


@dataclass
class Ended:
    """How the last start of the command ended. code: None if it was ended at the limit of time."""

    code: int | None = None
    tail: str = ""
    starts: int = 0
    cage: Mapping[str, str] | None = None
    why: str = ""

    def as_case(self) -> dict[str, Any]:
        return {
            "exit_code": self.code,
            "tail": self.tail,
            "starts": self.starts,
            "agent_cage": self.cage,
            "ended": self.why,
        }


def take(folder: Path, op: str, to: Path) -> Path:
    """Copy the candidate out of a folder that the agent owns: regular files alone, never through a link.

    Raises BadSource.
    """
    own = sources_folder(folder / f"{op}.py")
    wanted = [folder / f"{op}.py"]
    if own.is_dir() and not own.is_symlink():
        wanted += [Path(top) / name for top, _, names in os.walk(own) for name in sorted(names)]
    if len(wanted) > MOST_FILES:
        raise BadSource(f"{len(wanted)} files: a candidate has at most {MOST_FILES}")
    size = 0
    for file in wanted:
        data = _read(file, MOST_SOURCE - size)
        size += len(data)
        target = to / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return to / f"{op}.py"


def _read(file: Path, most: int) -> bytes:
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BadSource(f"{file.name}: {error.strerror}; it must be a regular file") from error
    with open(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise BadSource(f"{file.name} is not a regular file")
        data = opened.read(most + 1)
    if len(data) > most:
        raise BadSource(f"the candidate has more than {MOST_SOURCE >> 20} MB")
    return data


class Loop:
    """One task with one command. `run` returns when the command stops helping or the budget is used up."""

    def __init__(self, session: Session, op: str, folder: Path, command: Command, log: Path):
        self.session, self.op, self.folder, self.command, self.log = session, op, folder, command, log
        self.ended = Ended()
        self._taken = 0

    def run(self) -> Ended:
        """Start the command until it fails, changes nothing more, or the budget is used up."""
        _open_to_agent(self.folder)
        task = self.session.tasks[self.op]
        with _Server(self.folder) as server:
            while True:
                known = {a.digest for a in task.attempts}
                self._start(server)
                with contextlib.suppress(BadSource):
                    if digest_of(self._take()) not in known:
                        self._check({"do": "check"})
                if self.ended.code is None:
                    self.ended.why = "the time of the budget is used up"
                elif self.ended.code != 0:
                    self.ended.why = f"exit code {self.ended.code}"
                elif limit := task.spent.used_up:
                    self.ended.why = f"the budget is used up: {limit}"
                elif {a.digest for a in task.attempts} == known:
                    self.ended.why = "the command changed nothing more"
                else:
                    continue
                return self.ended

    def _take(self) -> Path:
        self._taken += 1
        return take(self.folder, self.op, self.log.parent / "taken" / f"{self._taken:03d}")

    def _check(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            file = self._take()
        except BadSource as error:
            return self.session.lose(self.op, str(error))
        answer = self.session.submit(self.op, file, profile=request.get("profile") is True)
        _replace(self.folder, "feedback.json", json.dumps(answer, indent=1))
        return answer

    def _answer(self, request: Any) -> dict[str, Any]:
        do = request.get("do") if isinstance(request, dict) else None
        if do == "check":
            return self._check(request)
        if do == "lost" and isinstance(request.get("reason"), str):
            return self.session.lose(self.op, request["reason"])
        if do == "usage":
            tokens, cost = request.get("tokens"), request.get("cost_usd", 0.0)
            if isinstance(tokens, int) and isinstance(cost, (int, float)) and _is_count(tokens, cost):
                return self.session.use(self.op, tokens, float(cost))
        return {
            "error": f"a request is check, lost with a reason, or usage with 0 to {MOST_USED:g} tokens and dollars"
        }

    def _start(self, server: _Server) -> None:
        """Run the command once, and answer its checks."""
        self.ended.starts += 1
        with open(self.log, "ab") as log:
            started = _Started(self.command, self.folder, log)
        try:
            while started.process.poll() is None:
                spent = self.session.tasks[self.op].spent
                if spent.seconds_left == 0.0 or _over_tokens(spent):
                    started.end()
                    self.ended.code = None
                    break
                server.serve(self._answer)
            else:
                self.ended.code = started.process.returncode
        finally:
            started.end()
        self.ended.cage = started.report()
        self.ended.tail = tail(self.log)


def _is_count(*values: float) -> bool:
    return all(0 <= v <= MOST_USED for v in values)  # NaN, infinity and integers beyond float are not


def _over_tokens(spent: Any) -> bool:
    return spent.budget.tokens is not None and spent.tokens >= spent.budget.tokens


def tail(log: Path) -> str:
    """The last lines of a log, printable."""
    with open(log, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return printable("\n".join(text.strip().splitlines()[-TAIL_LINES:]), lines=True)


class _Started:
    """A started command. Its whole process tree ends with `end`."""

    def __init__(self, command: Command, folder: Path, log: Any):
        kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith(KEPT_PREFIXES)}
        env = {**kept, "FK_TASK": str(folder), **(command.env or {})}
        self._report = -1
        if not command.caged:
            words, given, passed = (
                ["/bin/sh", "-c", command.text],
                {**env, "HOME": os.environ.get("HOME", "/")},
                (),
            )
            self.process = _popen(words, given, folder, log, passed)
            return
        out, into = os.pipe(), os.pipe()  # the report of the cage, and its configuration
        config = {
            "folder": str(folder.resolve()), "network": command.network, "readable": list(command.readable),
            "command": command.text, "env": env, "report": out[1], "slot": os.getpid(),
        }  # fmt: skip
        os.write(into[1], json.dumps(config).encode())
        os.close(into[1])
        words = [sys.executable, "-m", "fk_bench.agents.caged", str(into[0])]
        self.process = _popen(words, dict(os.environ), None, log, (into[0], out[1]))
        os.close(into[0])
        os.close(out[1])
        self._report = out[0]

    def end(self) -> None:
        """Kill the tree: the cage's first process ends with its parent, and all others with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def report(self) -> dict[str, str] | None:
        """The steps of the cage; None without one."""
        if self._report < 0:
            return None
        with open(self._report, "rb") as file:
            text = file.read()
        self._report = -1
        return json.loads(text) if text else {"cage": "off: the command was not started"}


def _popen(
    words: list[str], env: dict[str, str], folder: Path | None, log: Any, passed: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=passed,
        start_new_session=True,
    )  # fmt: skip


class _Server:
    """A socket in the task folder. One request at a time, as one line of JSON; the answer ends with the connection."""

    def __init__(self, folder: Path):
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._socket = socket.socket(socket.AF_UNIX)
        # Through the folder's handle, because an address has at most 107 characters
        path = f"/proc/self/fd/{self._folder}/{SOCKET}"
        self._socket.bind(path)
        os.chmod(path, 0o666)
        self._socket.listen(4)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(SOCKET, dir_fd=self._folder)
        os.close(self._folder)

    def serve(self, answer: Any) -> None:
        """Answer one request, if one comes within POLL_S."""
        if not self._selector.select(POLL_S):
            return
        connection, _ = self._socket.accept()
        with connection, contextlib.suppress(OSError):
            try:
                request = json.loads(_line(connection))
            except (ValueError, RecursionError):
                request = None
            connection.settimeout(WAIT_S)
            connection.sendall(json.dumps(answer(request)).encode())


def _line(connection: socket.socket) -> bytes:
    data, until = b"", time.monotonic() + WAIT_S
    while not data.endswith(b"\n") and len(data) < MOST_REQUEST:
        connection.settimeout(max(0.01, until - time.monotonic()))
        part = connection.recv(4096)
        if not part:
            break
        data += part
    return data


def _open_to_agent(folder: Path) -> None:
    """Let the cage's own user write the folder and the files that it may change."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() or os.access(path, os.X_OK) else 0o666)


def _replace(folder: Path, name: str, text: str) -> None:
    """Write a file into a folder that the agent owns: a link in its place is replaced, not followed.

    The agent can prevent it, and then has no file: the answer of `check` is the same.
    """
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            new = f".{name}.{os.getpid()}"
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=place)
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=place)
            with open(handle, "w") as file:
                file.write(text)
            os.chmod(new, 0o666, dir_fd=place)
            os.rename(new, name, src_dir_fd=place, dst_dir_fd=place)
        finally:
            os.close(place)
