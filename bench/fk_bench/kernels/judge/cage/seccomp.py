"""System calls that no kernel needs and that could help to leave the cage or the core, or to wake a stopped process.

They fail with EPERM, some of them only with certain arguments. clone3, whose arguments no filter can read, does not
exist for a caged process: the C library then uses clone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Collection

from fk_bench.kernels.judge.cage import linux

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
    "timer_create": 222, "setitimer": 38, "alarm": 37, "mq_notify": 244,
}  # fmt: skip
_AARCH64 = 0xC00000B7, {
    "ptrace": 117, "syslog": 116, "pivot_root": 41, "chroot": 51, "acct": 89, "mount": 40, "umount2": 39,
    "swapon": 224, "reboot": 142, "init_module": 105, "delete_module": 106, "add_key": 217, "request_key": 218,
    "keyctl": 219, "unshare": 97, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273, "kexec_load": 104, "bpf": 280,
    "userfaultfd": 282, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "mount_setattr": 442, "sched_setaffinity": 122, "sched_setparam": 118, "sched_setscheduler": 119,
    "sched_setattr": 274, "ioprio_set": 30, "migrate_pages": 238, "move_pages": 239,
    "timer_create": 107, "setitimer": 103, "mq_notify": 184,
}  # fmt: skip
_ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}

# Calls that are refused with certain arguments, by number: on x86-64, on AArch64.
_NUMBERS = {
    "clone": (56, 220), "clone3": (435, 435), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "fcntl": (72, 25), "ioctl": (16, 29), "prctl": (157, 167),
}  # fmt: skip
# SIGCONT wakes a stopped process. These can send it: another process, a timer, a file, a child that ends.
_SIGCONT = {
    "kill": 1, "tkill": 1, "tgkill": 2, "rt_sigqueueinfo": 1, "rt_tgsigqueueinfo": 2, "pidfd_send_signal": 1,
}  # fmt: skip
_OWNERS = 8, 10, 15, 1024, 1026  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
_OWNERS_OF_DEVICES = 0x8901, 0x8902  # ioctl: FIOSETOWN, SIOCSPGRP
_NAMESPACES = 0x7E020000  # flags of clone: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_ENDS_WITH = 0xFF  # flags of clone: the signal that the parent gets

_LOAD, _JUMP, _JUMP_EQUAL, _JUMP_GREATER_OR_EQUAL, _JUMP_SET = 0x20, 0x05, 0x15, 0x35, 0x45
_AND, _RETURN = 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_X32 = 0x40000000  # the x32 ABI has other numbers for the same calls
_FILTER = 2
_Line = tuple[int, int, int, int]  # an instruction: code, lines to skip if true and if false, value


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _code(arch: int, calls: list[int], more: list[_Line]) -> bytes:
    """struct seccomp_data: the number of the call at 0, the architecture at 4, the arguments from 16 on.

    more  instructions for calls that depend on their arguments; each returns, or leaves the number of the call loaded
    """
    refuse = len(calls)
    lines = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, 0),
        (_JUMP_GREATER_OR_EQUAL, refuse + 1, 0, _X32),
        *((_JUMP_EQUAL, refuse - i, 0, number) for i, number in enumerate(calls)),
        (_JUMP, 0, 0, 1),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        *more,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _by_argument(which: int) -> list[_Line]:
    """The instructions for calls that depend on their arguments. which: 0 for x86-64, 1 for AArch64."""
    number = {name: both[which] for name, both in _NUMBERS.items()}
    lines = _if_call(number["clone3"], [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)])
    for name, position in _SIGCONT.items():
        lines += _if_call(number[name], [_argument(position), *_refuse(signal.SIGCONT)])
    lines += _if_call(number["fcntl"], [_argument(1), *_refuse(*_OWNERS)])
    lines += _if_call(number["ioctl"], [_argument(1), *_refuse(*_OWNERS_OF_DEVICES)])
    at_death = [_argument(1), *_refuse(signal.SIGCONT)]
    lines += _if_call(
        number["prctl"],
        [
            _argument(0), (_JUMP_EQUAL, 0, len(at_death), linux.PR_SET_PDEATHSIG), *at_death,
            (_RETURN, 0, 0, _ALLOW),
        ],
    )  # fmt: skip
    lines += _if_call(
        number["clone"],
        [
            _argument(0), (_JUMP_SET, 3, 0, _NAMESPACES), (_AND, 0, 0, _ENDS_WITH),
            (_JUMP_EQUAL, 2, 0, 0), (_JUMP_EQUAL, 1, 0, signal.SIGCHLD),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW),
        ],
    )  # fmt: skip
    return lines


def _argument(position: int) -> _Line:
    return _LOAD, 0, 0, 16 + 8 * position  # its lower half: both architectures are little-endian


def _refuse(*values: int) -> list[_Line]:
    """Refuse the call if the loaded argument is one of these, and allow it otherwise."""
    tests = [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*tests, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]


def _if_call(number: int, lines: list[_Line]) -> list[_Line]:
    return [(_JUMP_EQUAL, 0, len(lines), number), *lines]


def enter(allowed: Collection[str] = ()) -> None:
    """Install the filter for this process and all its children, without the calls `allowed`. Raises OSError.

    Needs no_new_privs.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    arch, calls = _ARCHITECTURES[machine]
    refused = sorted(number for name, number in calls.items() if name not in allowed)
    lines = _code(arch, refused, _by_argument(list(_ARCHITECTURES).index(machine)))
    code = ctypes.create_string_buffer(lines, len(lines))
    program = _Program(len(lines) // struct.calcsize("HBBI"), ctypes.addressof(code))
    linux.prctl(linux.PR_SET_SECCOMP, _FILTER, ctypes.addressof(program))


def refused() -> tuple[str, ...]:
    """The calls by name, for the report and the tests."""
    return tuple(sorted(_ARCHITECTURES.get(os.uname().machine, (0, {}))[1]))
