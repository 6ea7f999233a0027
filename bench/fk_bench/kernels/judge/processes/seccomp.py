"""System calls that no kernel needs and that could help to leave the cage or the core: they fail with EPERM."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from fk_bench.kernels.judge.processes import linux

# From linux/audit.h, and the numbers of the calls. Those of the scheduler and of other processes' pages would let a
# candidate leave its core or slow the other side. NUMA policies of its own memory stay: the CUDA driver may set them.
_X86_64 = 0xC000003E, {
    "ptrace": 101, "syslog": 103, "pivot_root": 155, "chroot": 161, "acct": 163, "mount": 165, "umount2": 166,
    "swapon": 167, "reboot": 169, "init_module": 175, "delete_module": 176, "add_key": 248, "request_key": 249,
    "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "kexec_load": 246, "bpf": 321,
    "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "mount_setattr": 442, "sched_setaffinity": 203, "sched_setparam": 142, "sched_setscheduler": 144,
    "sched_setattr": 314, "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279,
}  # fmt: skip
_AARCH64 = 0xC00000B7, {
    "ptrace": 117, "syslog": 116, "pivot_root": 41, "chroot": 51, "acct": 89, "mount": 40, "umount2": 39,
    "swapon": 224, "reboot": 142, "init_module": 105, "delete_module": 106, "add_key": 217, "request_key": 218,
    "keyctl": 219, "unshare": 97, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273, "kexec_load": 104, "bpf": 280,
    "userfaultfd": 282, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "mount_setattr": 442, "sched_setaffinity": 122, "sched_setparam": 118, "sched_setscheduler": 119,
    "sched_setattr": 274, "ioprio_set": 30, "migrate_pages": 238, "move_pages": 239,
}  # fmt: skip
_ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_OR_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_X32 = 0x40000000  # the x32 ABI has other numbers for the same calls
_FILTER = 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _code(arch: int, calls: list[int]) -> bytes:
    """struct seccomp_data: the number of the call at 0, the architecture at 4."""
    refuse, allow = len(calls) + 1, len(calls)
    lines = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 0, refuse + 2, arch),
        (_LOAD, 0, 0, 0),
        (_JUMP_GREATER_OR_EQUAL, refuse, 0, _X32),
        *((_JUMP_EQUAL, allow - i, 0, number) for i, number in enumerate(calls)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def enter() -> None:
    """Install the filter for this process and all its children. Raises OSError. Needs no_new_privs."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    arch, calls = _ARCHITECTURES[machine]
    code = ctypes.create_string_buffer(_code(arch, sorted(calls.values())))
    program = _Program(len(calls) + 6, ctypes.addressof(code))
    linux.prctl(linux.PR_SET_SECCOMP, _FILTER, ctypes.addressof(program))


def refused() -> tuple[str, ...]:
    """The calls by name, for the report and the tests."""
    return tuple(sorted(_ARCHITECTURES.get(os.uname().machine, (0, {}))[1]))
