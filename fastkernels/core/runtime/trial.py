"""Trials of a user's code: a first import in a child process, and a deadline for code that runs in this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from fastkernels.core.candidate import CandidateError

# The child imports each file as `candidate.load` does and writes which one it begins, and an error or the end.
# sys.exit() and os._exit() end only the child.
_IMPORT = """
import importlib.util, json, os, sys
paths, files = json.loads(sys.stdin.readline())
sys.path[:] = paths
for file in files:
    print(json.dumps(["begin", file]), flush=True)
    spec = importlib.util.spec_from_file_location("fastkernels_candidate", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        out.write(json.dumps(["error", f"calls sys.exit({error.code!r}) while it is imported"]))
        break
    except Exception as error:
        out.write(json.dumps(["error", f"does not import: {type(error).__name__}: {error}"]))
        break
    sys.stdout = out
else:
    print(json.dumps(["end", ""]))
sys.stdout.flush()
out.flush()
os._exit(0)  # without waiting for threads that a file has started
"""


class DeadlineError(RuntimeError):
    """The code did not end in time."""


class _Late(BaseException):
    """Raised in code that takes too long; not an Exception, which that code may catch."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Raise DeadlineError if the block takes longer than `seconds`, which ends it.

    It works in the main thread, where a signal can interrupt Python code and sleeps; elsewhere there is no deadline. A
    call that never returns to Python is not interrupted. The timer of an enclosing block goes on afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise _Late

    before, start = signal.signal(signal.SIGALRM, late), time.monotonic()
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Late:
        raise DeadlineError(f"{what} did not end within {seconds:g} s (FASTKERNELS_TRIAL_S)") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if remaining:
            left = max(remaining - (time.monotonic() - start), 0.001)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


_tried: set[tuple[str, bytes]] = set()


def import_in_child(files: Mapping[str, str], seconds: float) -> None:
    """Import candidate files, {op: path}, in a child process first, each once. Raises CandidateError.

    A sys.exit(), a crash or an endless loop ends here, before it can end or block a host's process. Missing files are
    left to `candidate.load`.
    """
    new: dict[str, tuple[str, bytes]] = {}
    for path in map(os.path.expanduser, files.values()):
        try:
            with open(path, "rb") as file:
                state = (path, file.read())
        except OSError:
            continue
        if state not in _tried:
            new[path] = state
    if not new:
        return
    request = json.dumps([sys.path, list(new)]) + "\n"
    command = [sys.executable, "-c", _IMPORT]
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        raise CandidateError(
            f"candidate {_last_begun(printed)} was not imported within {seconds:g} s (FASTKERNELS_TRIAL_S)"
        ) from None
    kind, text = _last(done.stdout)
    if kind == "error":
        raise CandidateError(f"candidate {_last_begun(done.stdout)} {text}")
    if kind == "begin":
        last = done.stderr.strip().splitlines()[-1:]
        why = f": {last[0]}" if last else ""
        raise CandidateError(
            f"candidate {text} ended the process that imported it, with exit code {done.returncode}{why}"
        )
    if kind == "":
        raise CandidateError(f"{sys.executable} cannot import candidates: {done.stderr.strip()[-500:]}")
    _tried.update(new.values())


def _lines(printed: str) -> list[tuple[str, str]]:
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('["')]
    return [(kind, text) for kind, text in found]


def _last(printed: str) -> tuple[str, str]:
    return (_lines(printed) or [("", "")])[-1]


def _last_begun(printed: str) -> str:
    return next((text for kind, text in reversed(_lines(printed)) if kind == "begin"), "")
