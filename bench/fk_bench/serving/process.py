"""One server process: start it, detect when it is ready or dead, and end it with all its descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

_PR_SET_PDEATHSIG = 1
# Below the range of ports that Linux gives to connections and port 0: a host binds its port after half a minute.
PORTS = range(18_000, 32_000)
NOISE = ("GET /health", "GET /v1/models")


class ServerError(RuntimeError):
    """A server did not start, or ended. `status` is a value of rows.Status."""

    def __init__(self, message: str, status: str = "died"):
        super().__init__(message)
        self.status = status


def free_port() -> int:
    """A free port of 127.0.0.1, which no other process gets by chance before a server binds it."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", port))
            return port


def check_port(port: int) -> None:
    """Raises ServerError if the port is in use or may not be bound."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(
                f"port {port} is in use: {error.strerror}. Choose another with --port.", "failed"
            ) from None


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """A child process in its own session, with its output in a log file."""

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, port: int
    ):
        self.name, self.argv, self.log, self.port = name, list(argv), log, port
        self.url = f"http://127.0.0.1:{port}"
        self._known: dict[int, float] = {}
        self.started = time.monotonic()
        merged = {k: v for k, v in {**os.environ, **env}.items() if v != "" or k not in env}
        cwd.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                self.argv, env=merged, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = 25) -> str:
        """The end of the log, without the lines of our own health checks."""
        try:
            text = self.log.read_bytes()[-60_000:].decode(errors="replace")
        except OSError:
            return ""
        kept = [
            line.rstrip()[:400]
            for line in text.splitlines()
            if line.strip() and not any(n in line for n in NOISE)
        ]
        return "\n".join(kept[-lines:])

    def death(self) -> ServerError:
        code = self.process.poll()
        how = (
            f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        )
        return ServerError(
            f"the server of lane {self.name} ended ({how}). End of its log, {self.log}:\n{self.tail()}"
        )

    def wait_ready(self, timeout_s: float) -> float:
        """Seconds from the start until /health and /v1/models answer. Raises ServerError if it ends or times out."""
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            while True:
                if not self.alive():
                    raise self.death()
                if _answers(http, self.url):
                    self.remember()
                    return time.monotonic() - self.started
                if time.monotonic() - self.started > timeout_s:
                    raise ServerError(
                        f"the server of lane {self.name} was not ready after {timeout_s:.0f} s (--ready-timeout). "
                        f"End of its log, {self.log}:\n{self.tail()}",
                        "timeout",
                    )
                time.sleep(0.25)

    def remember(self) -> None:
        """Record the descendants, so that stop() also finds those that leave the session."""
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                self._known[process.pid] = process.create_time()

    def _descendants(self) -> list[psutil.Process]:
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            found = {p.pid: p for p in psutil.Process(self.pid).children(recursive=True)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (os.getsid(process.pid) == self.pid and process.pid != self.pid) or self._known.get(
                    process.pid
                ) == process.create_time():
                    found[process.pid] = process
        return list(found.values())

    def terminate(self) -> None:
        """Send SIGTERM to the server; its descendants are recorded for stop()."""
        self.remember()
        if self.alive():
            with contextlib.suppress(OSError):
                self.process.terminate()

    def stop(self, grace_s: float = 15.0) -> None:
        """Send SIGTERM to the server, then SIGKILL to it and to every remaining descendant. Never raises."""
        self.terminate()
        if self.alive():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        left = self._descendants()
        _, left = psutil.wait_procs(left, timeout=2.0 if not self.alive() else 0.0)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.alive():
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10.0)
        psutil.wait_procs(left, timeout=5.0)


def _answers(http: httpx.Client, url: str) -> bool:
    try:
        return all(http.get(url + path).status_code == 200 for path in ("/health", "/v1/models"))
    except httpx.HTTPError:
        return False


def served_model(url: str) -> tuple[str, str]:
    """(name, folder or hub id) of the first model that a server offers. Raises ServerError if it does not answer."""
    try:
        with httpx.Client(trust_env=False, timeout=10.0) as http:
            reply = http.get(url + "/v1/models")
            reply.raise_for_status()
            first = reply.json()["data"][0]
            return str(first["id"]), str(first.get("root") or first["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ServerError(
            f"{url}/v1/models does not answer as an OpenAI server: {type(error).__name__}: {error}"
        ) from None
