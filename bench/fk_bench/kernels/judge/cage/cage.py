"""The cage: privileges that a forked process drops before it runs a candidate, in three stages, each with a report.

    supervisor  leave()     namespaces; watches memory and ends the process tree; never runs candidate code
    init        settle()    process 1 of the new PID namespace: the new root; reaps orphans
    runner      lock()      limits, core, user, capabilities, system calls; then the candidate

A step is "on", or "off: why". docs/threat-model.md explains each step and the risk without it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fk_bench.kernels.judge.cage import linux, mounts

STEPS = ("net", "pid", "mounts", "ipc", "uts", "user", "seccomp")
_FIRST_ID = 1_000_000_000  # far above the ids of users, services and containers
_IDS_PER_ZYGOTE = 1000
_CHILDREN = "/proc/thread-self/children"
PRIVATE = {  # environment of the caged process, which writes only to its own /tmp
    "HOME": "home", "TMPDIR": "", "XDG_CACHE_HOME": "cache", "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor", "TORCH_EXTENSIONS_DIR": "extensions", "CUDA_CACHE_PATH": "cuda",
    "FASTKERNELS_CACHE": "fastkernels", "FLASHINFER_WORKSPACE_BASE": "home",
}  # fmt: skip


@dataclass(frozen=True)
class CageOptions:
    """The steps to take, and the limits. A disabled step is reported as "off: disabled".

    net..seccomp    network, process ids, file system, System V IPC, host name, user id and capabilities, system calls
    packages        importable in addition to what the zygote has imported
    readable        files (copied) and directories (bound read-only) that the runner sees at their own paths
    memory          bytes of private memory of the whole tree, above which it is killed (`Exit.oom`); None: no limit
    address_space   RLIMIT_AS in bytes; for the CPU only, because CUDA reserves terabytes
    processes       processes and threads of the tree (effective with its own user id)
    file_size       bytes of one file; tmp_bytes, shm_bytes: of all of /tmp and /dev/shm
    threads         of torch's CPU operations
    core            the only core that the runner and its children use; None: those of the judge
    home            PRIVATE's variables, for trusted code; None: private directories
    loopback        bring the loopback device of the own network up: engines talk to their workers over it
    user_of         number of another child, whose user id it has, because they share files; 0: one of its own
    calls           system calls that seccomp allows, which no kernel needs: an engine sets timers and cores
    """

    net: bool = True
    pid: bool = True
    mounts: bool = True
    ipc: bool = True
    uts: bool = True
    user: bool = True
    seccomp: bool = True
    packages: tuple[str, ...] = ("fastkernels", "fk_bench", "fk_integrations")
    readable: tuple[str, ...] = ()
    memory: int | None = 16 << 30
    address_space: int | None = None
    processes: int = 256
    file_size: int = 2 << 30
    open_files: int = 4096
    tmp_bytes: int = 2 << 30
    shm_bytes: int = 1 << 30
    threads: int = 1
    core: int | None = None
    home: Mapping[str, str] | None = None
    loopback: bool = False
    user_of: int = 0
    calls: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> CageOptions:
        """From JSON, which has lists instead of tuples."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**values)


def own_home() -> dict[str, str] | None:
    """CageOptions.home for trusted code, which may use this user's caches: compiled code stays for the next run.

    None if the user's home cannot be written.
    """
    home = os.path.expanduser("~")
    found = {name: os.environ[name] for name in PRIVATE if name in os.environ}
    return {"HOME": home, **found} if os.access(home, os.W_OK) else None


Report = dict[str, str]


def _step(report: Report, name: str, asked: bool) -> bool:
    report[name] = "on" if asked else "off: disabled"
    return asked


def leave(options: CageOptions, spaces: Mapping[str, int] | None = None) -> Report:
    """Supervisor: enter the namespaces. Its next child is process 1 of the new PID namespace.

    spaces  {'net' | 'pid' | 'mounts' | 'user': fd} of another rank's namespaces, which it shares; see `namespaces`
    """
    report: Report = {}
    wanted = [n for n in ("net", "ipc", "uts", "mounts", "pid") if _step(report, n, getattr(options, n))]
    refused: dict[str, OSError] = {}
    root = os.geteuid() == 0
    if spaces and "net" in wanted:
        for name in ("user", "net"):
            if name in spaces:
                linux.enter_namespace(spaces[name])
        if not root:
            report["user"] = "on"
        root = True  # in that user namespace
        wanted.remove("net")
        if "pid" in wanted and "pid" in spaces:
            linux.enter_namespace(spaces["pid"])
            wanted.remove("pid")
        if "mounts" in wanted and "mounts" in spaces:
            wanted.remove("mounts")  # entered by `settle`
    for name in wanted if root else ():
        try:
            linux.unshare(linux.CLONE[name])
        except OSError as error:
            refused[name] = error
            report[name] = f"off: {error.strerror} (root without CAP_SYS_ADMIN?)"
    if wanted and (not root or len(refused) == len(wanted)):
        _user_namespace(wanted, report)
    if options.loopback and report["net"] == "on":
        try:
            linux.loopback_up()
        except OSError as error:
            report["net"] = f"on, without loopback: {error.strerror}"
    if _step(report, "memory", options.memory is not None) and not os.path.exists(_CHILDREN):
        report["memory"] = "off: this kernel does not list the children of a process"
    return report


SPACE = "namespace:"  # of a file descriptor's name


def namespaces(supervisor: int, runner: int, report: Report) -> dict[str, int]:
    """{name of a file descriptor: it} of what the other ranks of a side share with the cage with this report.

    Its network, and, so that libraries can pass each other GPU memory, its processes and its files. Without a network
    namespace there is nothing to share: all ranks see the machine's network. The caller closes them.
    """
    if not report.get("net", "").startswith("on"):
        return {}
    files = {"net": f"{supervisor}/ns/net"}
    if os.geteuid() != 0:
        files["user"] = f"{supervisor}/ns/user"
    if report["pid"] == "on" and report["mounts"].startswith("on"):
        files |= {"pid": f"{runner}/ns/pid", "mounts": f"{runner}/ns/mnt"}
    return {f"{SPACE}{n}": os.open(f"/proc/{f}", os.O_RDONLY | os.O_CLOEXEC) for n, f in files.items()}


def _user_namespace(wanted: list[str], report: Report) -> None:
    """Without CAP_SYS_ADMIN: the same namespaces inside a user namespace, in which the user id stays the same."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        linux.unshare(linux.CLONE["user"] | sum(linux.CLONE[name] for name in wanted))
    except OSError as error:
        for name in wanted:
            report[name] = f"off: no CAP_SYS_ADMIN, and no user namespace: {error.strerror}"
        return
    report |= dict.fromkeys(wanted, "on")
    if uid != 0:
        report["user"] = "on"
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def settle(options: CageOptions, report: Report, room: str, space: int = -1) -> None:
    """Init: the new root. `room` is an empty directory of this child, which holds its files without a new root.

    space  file descriptor of another rank's mount namespace, which has its root already
    """
    if report["mounts"] != "on":
        return
    if space >= 0:
        linux.enter_namespace(space)
        return
    try:
        left_open = mounts.build(
            room, mounts.needed(options.packages, options.readable), options.tmp_bytes, options.shm_bytes
        )
        if left_open:
            report["mounts"] = f"on, but {left_open}"
    except OSError as error:
        report["mounts"] = f"off: {error}"


def lock(options: CageOptions, report: Report, room: str, slot: int) -> None:
    """Runner: private directories, limits, core, then user and capabilities, then system calls. Irreversible.

    Raises OSError if the core is not available. A thread that runs already keeps its cores.
    """
    own_root = report["mounts"].startswith("on")
    home = "/tmp" if own_root else room
    uid = _user(options, report, own_root, slot)
    os.environ.update(options.home or {})
    for variable, name in PRIVATE.items() if options.home is None else ():
        path = os.path.join(home, name) if name else home
        os.makedirs(path, mode=0o700, exist_ok=True)
        if uid is not None and path != "/tmp":  # the owner of /tmp could rename the mounts below it
            os.chown(path, uid, uid)
        os.environ[variable] = path
    if own_root:
        os.chmod("/tmp", 0o1777)
    os.chdir("/tmp" if own_root else room)
    _limits(options, report)
    if options.core is not None:
        # Threads that start later inherit it; seccomp then refuses a change.
        os.sched_setaffinity(0, {options.core})
    with contextlib.suppress(OSError):
        linux.drop_bounding_set()
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # for its own /proc/self, which the change of user has closed
    report["capabilities"] = "on"
    if _step(report, "seccomp", options.seccomp):
        from fk_bench.kernels.judge.cage import seccomp

        try:
            seccomp.enter(options.calls)
        except OSError as error:
            report["seccomp"] = f"off: {error.strerror}"


def _user(options: CageOptions, report: Report, own_root: bool, slot: int) -> int | None:
    """The user id to switch to, or None with the reason in the report."""
    if os.geteuid() != 0:
        report.setdefault("user", "off: not root, and no user namespace")
        return None
    if not _step(report, "user", options.user):
        return None
    closed = None if own_root else mounts.unreachable(mounts.needed(options.packages, options.readable))
    if closed:
        report["user"] = f"off: other users cannot enter {closed}, and there is no new root"
        return None
    uid = _unused_id(slot)
    if uid is None:
        report["user"] = "off: this user namespace has no id to spare"
    return uid


def _unused_id(slot: int) -> int | None:
    """An unused id: two runners, even of two judges, never share one."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    wanted = _FIRST_ID + slot % (1_000_000 * _IDS_PER_ZYGOTE)
    first, _, count = ranges[-1]
    if any(start <= wanted < start + n for start, _, n in ranges):
        return wanted
    # A container's 65536 ids: 63536 and up
    return first + count - 2000 + slot % 1000 if count > 4000 else None


def _limits(options: CageOptions, report: Report) -> None:
    limits = {
        resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: options.file_size, resource.RLIMIT_NOFILE: options.open_files,
    }  # fmt: skip
    if report["user"] == "on":  # the limit counts all processes of the user, without an own id also ours
        limits[resource.RLIMIT_NPROC] = options.processes
    if options.address_space is not None:
        limits[resource.RLIMIT_AS] = options.address_space
    report["limits"] = "on"
    for which, value in limits.items():
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(which, (value, value))
        except (OSError, ValueError) as error:
            report["limits"] = f"off: limit {which}: {error}"


def slot(zygote_pid: int, number: int) -> int:
    """A number for `lock` that no other child of any living zygote has."""
    return (zygote_pid % 1_000_000) * _IDS_PER_ZYGOTE + number % _IDS_PER_ZYGOTE


def end_user(slot: int) -> None:
    """As root: end all processes with the id of `slot`, including those that left the tree."""
    uid = _unused_id(slot) if os.geteuid() == 0 else None
    if uid is None:
        return
    helper = os.fork()
    if helper == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(helper, 0)
