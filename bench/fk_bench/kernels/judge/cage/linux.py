"""System calls of the cage through ctypes: Python has them only from 3.12 on, or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

CLONE = {
    "mounts": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000,
    "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_MOVE, MS_REC, MS_PRIVATE = 8192, 16384, 1 << 18
_MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _bytes(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def enter_namespace(fd: int) -> None:
    """Enter the namespace of a file /proc/PID/ns/KIND."""
    _checked("setns", _libc.setns(ctypes.c_int(fd), ctypes.c_int(0)))


def loopback_up() -> None:
    """Bring the loopback device of this network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        request = struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(device, _SIOCSIFFLAGS, request)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    done = _libc.mount(
        _bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data)
    )  # fmt: skip
    _checked(f"mount {target}", done)


def detach(target: str) -> None:
    _checked(f"umount {target}", _libc.umount2(_bytes(target), ctypes.c_int(_MNT_DETACH)))


def read_only(target: str) -> None:
    """Make the mount at `target`, and every mount below it, read-only and without set-user-id programs."""
    attr = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    done = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(-100), _bytes(target), ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attr), ctypes.c_size_t(ctypes.sizeof(attr)),
    )  # fmt: skip
    if done != 0:  # before Linux 5.12: this mount only
        mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID)


def enter_root(path: str) -> None:
    """Make the mount at `path` the root of this mount namespace and let go of the old one."""
    os.chdir(path)
    try:
        _checked("pivot_root", _libc.pivot_root(b".", b"."))
        detach(".")
    except OSError:  # the root is an initramfs, which cannot be pivoted away
        mount(".", "/", None, MS_MOVE)
        os.chroot(".")
    os.chdir("/")


def prctl(option: int, value: int = 0, third: int = 0) -> None:
    done = _libc.prctl(
        ctypes.c_int(option), ctypes.c_ulong(value), ctypes.c_ulong(third), ctypes.c_ulong(0), ctypes.c_ulong(0)
    )  # fmt: skip
    _checked(f"prctl {option}", done)


def die_with_parent(parent: int, signal_number: int) -> None:
    """Send `signal_number` to this process when its parent dies; exit at once if it is already dead."""
    prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(1)


def drop_bounding_set() -> None:
    """No program executed from here on can gain a capability. Needs CAP_SETPCAP."""
    prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        prctl(PR_CAPBSET_DROP, capability)


def drop_capabilities() -> None:
    # Version 3: two words each of effective, permitted, inheritable
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    _checked("capset", _libc.capset(ctypes.byref(header), ctypes.byref(data)))
