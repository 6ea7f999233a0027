"""A private root for a caged process: system and interpreter read-only, a private /tmp, nothing else.

The new root is an allow-list: home directories, other candidates, captures and results do not exist in it. It also
makes an interpreter under /root usable by an unprivileged user, because the directories above it are new.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import shutil
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from fk_bench.kernels.judge.cage import linux

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "nix", "gnu", "sys")
LIBRARY_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH")
DEVICES = ("null", "zero", "full", "random", "urandom")
_FILE_LIMIT = 64 << 20


def needed(packages: Iterable[str], extra: Iterable[str]) -> list[str]:
    """The directories and files that this interpreter needs for its imported modules and for `packages`."""
    found = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    installed = [p for p in sys.path if glob.glob(os.path.join(glob.escape(p), "*.dist-info"))]
    found += installed
    # of a source tree on the path: its hosts and plugins are found by entry points
    found += [f for p in sys.path for f in glob.glob(os.path.join(glob.escape(p), "*.egg-info"))]
    found += [str(p) for m in list(sys.modules.values()) for p in _package_paths(m)]
    for name in packages:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            found += list(spec.submodule_search_locations or ()) if spec else []
    for variable in LIBRARY_VARIABLES:
        found += os.environ.get(variable, "").split(":")
    found += [*glob.glob("/opt/nvidia*"), *glob.glob("/opt/cuda*"), *_toolchain(), *extra]
    return [p for p in dict.fromkeys(map(str, found)) if os.path.isabs(p) and p != "/" and os.path.exists(p)]


def _toolchain() -> list[str]:
    """Folders of a compiler in an unusual place; Triton compiles its launchers with it."""
    names = [os.environ.get("CC"), "gcc", "cc", "clang"]
    found = {Path(p).resolve().parent.parent for n in names if n and (p := shutil.which(n))}
    found |= {Path(p).parent.parent for n in names if n and (p := shutil.which(n))}
    return sorted(str(p) for p in found if p != Path("/") and not p.is_relative_to("/usr"))


def _package_paths(module: object) -> list[str]:
    """The directories of a top-level package, or the file of a top-level module."""
    name, file = getattr(module, "__name__", "."), getattr(module, "__file__", None)
    if "." in name or name == "__main__":
        return []
    paths = getattr(module, "__path__", None)
    return [str(p) for p in paths] if paths else [file] if isinstance(file, str) else []


def unreachable(paths: Iterable[str]) -> str | None:
    """The first of the directories at and above `paths` that other users cannot enter."""
    for path in paths:
        part = os.path.realpath(path)
        while part != "/":
            mode = os.stat(part).st_mode
            if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
                return part
            part = os.path.dirname(part)
    return None


def targets(paths: Iterable[str]) -> dict[str, str]:
    """{where: what}, shortest first, with paths as given and resolved, none below another."""
    wanted: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        wanted[real] = real
        first = "/" + path.split("/")[1]
        if not os.path.islink(first):  # links such as /lib to usr/lib are in the new root, too
            wanted[os.path.normpath(path)] = real
    kept: dict[str, str] = {}
    for where in sorted(wanted, key=len):
        if not any(where.startswith(above + "/") for above in kept):
            kept[where] = wanted[where]
    return kept


def build(root: str, paths: Iterable[str], tmp_bytes: int, shm_bytes: int) -> str:
    """Make `root` (an empty directory; this process has its own mount namespace) the root directory.

    Returns "" or what was left open. Raises OSError if the machine does not allow it; the old root then stays in place.
    """
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("fk", root, "tmpfs", linux.MS_NOSUID, "mode=0755,size=64m")
    try:
        _tmpfs(f"{root}/tmp", tmp_bytes)
        system = _system(root)
        for where, what in targets([*system, *paths]).items():
            _bind(what, root + where)
        _devices(root, shm_bytes)
        left_open = _proc(root)
        linux.mount(None, root, None, linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID)
    except OSError:
        linux.detach(root)
        raise
    linux.enter_root(root)
    return left_open


def _system(root: str) -> list[str]:
    there = []
    for name in SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            there.append(path)
    return there


def _bind(what: str, where: str) -> None:
    if os.path.isdir(what):
        os.makedirs(where, exist_ok=True)
        linux.mount(what, where, None, linux.MS_BIND | linux.MS_REC)
        linux.read_only(where)
        return
    if os.stat(what).st_size > _FILE_LIMIT:
        raise OSError(f"{what} has more than {_FILE_LIMIT >> 20} MiB")
    os.makedirs(os.path.dirname(where), exist_ok=True)
    shutil.copyfile(what, where)  # a copy can be read whatever the mode of the original
    os.chmod(where, 0o444)


def _tmpfs(where: str, size: int) -> None:
    os.makedirs(where, exist_ok=True)
    linux.mount("fk", where, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"mode=1777,size={size}")


def _devices(root: str, shm_bytes: int) -> None:
    dev = f"{root}/dev"
    os.makedirs(dev)
    names = [f"/dev/{name}" for name in DEVICES]
    names += [p for p in glob.glob("/dev/nvidia*") if not os.path.isdir(p)]
    for path in names:
        if os.path.exists(path):
            os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY))
            linux.mount(path, root + path, None, linux.MS_BIND)
    if os.path.isdir("/dev/nvidia-caps"):
        os.makedirs(f"{dev}/nvidia-caps")
        linux.mount("/dev/nvidia-caps", f"{dev}/nvidia-caps", None, linux.MS_BIND)
    for link, to in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{to}", f"{dev}/{link}")
    _tmpfs(f"{dev}/shm", shm_bytes)


def _proc(root: str) -> str:
    proc = f"{root}/proc"
    os.makedirs(proc)
    left_open = ""
    try:
        linux.mount("proc", proc, "proc", linux.MS_NOSUID | linux.MS_NODEV)
    except OSError as error:  # a container that masks parts of its /proc allows no new one
        linux.mount("/proc", proc, None, linux.MS_BIND | linux.MS_REC)
        left_open = f"/proc is the machine's ({error.strerror})"
    for name in ("sys", "sysrq-trigger", "irq", "bus"):  # writable even for root without capabilities
        path = f"{proc}/{name}"
        if os.path.exists(path):
            with contextlib.suppress(OSError):
                linux.mount(path, path, None, linux.MS_BIND)
                linux.read_only(path)
    return left_open
