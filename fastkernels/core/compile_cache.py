"""The folder that keeps compiled kernels between processes: under FASTKERNELS_CACHE, or a temporary one."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import threading
from functools import lru_cache
from pathlib import Path

from fastkernels.core.env import Environment

log = logging.getLogger("fastkernels")
HOW = "FASTKERNELS_CACHE names a folder for them"


def requested_folder(name: str) -> Path:
    """FASTKERNELS_CACHE/name. A container image may ship it, filled and read-only."""
    return Path(Environment.read().cache) / name


@lru_cache
def folder(name: str) -> Path | None:
    """Return FASTKERNELS_CACHE/name, else a folder of this user's under the temporary one, else None.

    Logs one warning per process and name if FASTKERNELS_CACHE/name is not writable.
    """
    wanted = requested_folder(name)
    if (reason := unwritable(wanted)) is None:
        return wanted
    temporary = _temporary()
    other = None if temporary is None else temporary / name
    if other is not None and unwritable(other) is None:
        log.warning(
            "compiled kernels are kept in %s: %s cannot be written (%s); %s", other, wanted, reason, HOW
        )
        return other
    log.warning(
        "compiled kernels are kept in memory, and every process compiles them again: %s cannot be written (%s), nor a"
        " temporary folder; %s",
        wanted, reason, HOW,
    )  # fmt: skip
    return None


def unwritable(path: Path) -> str | None:
    """Create the folder and return why no file can be created in it; None if one can."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return str(error)


def _temporary() -> Path | None:
    """A folder that only this user can write to, shared by all processes where possible."""
    try:
        shared = Path(tempfile.gettempdir()) / f"fastkernels-{os.getuid()}"
        shared.mkdir(mode=0o700, exist_ok=True)
        found = shared.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return shared
        return Path(tempfile.mkdtemp(prefix="fastkernels-"))
    except OSError:
        return None


def prepare_triton() -> None:
    """For our own engine, before its first kernel: set_triton_folder, and Triton's hash of its own files in a thread.

    The first kernel waits for that hash of 416 MB: 0.5 s of a Xeon core (Triton 3.6), in which Python may go on.
    """
    set_triton_folder()
    from triton.runtime import cache

    made = getattr(cache, "triton_key", None)  # kept by Triton; not there in every version
    if made is not None:
        threading.Thread(target=made, name="fastkernels-triton-key", daemon=True).start()


def set_triton_folder() -> None:
    """Give Triton a folder that can be written, in this process and in those that it starts.

    TRITON_CACHE_DIR is left as it is; then comes FASTKERNELS_CACHE, if it is set; then Triton's own, in the home
    folder, if that can be written. Raises ValueError where nothing can: Triton cannot run from memory.
    """
    if os.environ.get("TRITON_CACHE_DIR"):
        return
    if not os.environ.get("FASTKERNELS_CACHE"):
        home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"))
        if unwritable(home / ".triton" / "cache") is None:
            return
    found = folder("triton")
    if found is None:
        raise ValueError(f"Triton needs a folder that can be written, and there is none: {HOW}")
    os.environ["TRITON_CACHE_DIR"] = str(found)
