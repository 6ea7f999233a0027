"""The cage: processes, files, network and the judge are out of reach, and compilers still work."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fk_bench.kernels.judge.cage import mounts, seccomp
from fk_bench.kernels.judge.cage.cage import STEPS, own_home
from fk_bench.kernels.judge.processes.sides import CPU_ADDRESS_SPACE, CPU_MEMORY
from fk_bench.kernels.judge.processes.zygote import Zygote
from support.cage.children import OPEN, OPTIONS, SUPPORT, hear, needs, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cages are for Linux")


def test_root_takes_every_step(steps: dict[str, str]) -> None:
    needs(steps, *steps)
    assert set(steps) == {*OPEN, "limits", "capabilities", "memory", "groups"}


def test_disabled_step_is_reported(zygote: Zygote) -> None:
    (report,), _ = run(zygote, "say(config['cage'])", replace(OPTIONS, net=False, ipc=False, seccomp=False))
    assert {n for n, v in report.items() if v == "off: disabled"} == {"net", "ipc", "seccomp"}


def test_caches_are_private_except_for_trusted_code(zygote: Zygote) -> None:
    """Compiled code of production's libraries stays for the next run; a candidate's is deleted."""
    code = (
        "import os; say(os.environ.get('HOME'), os.environ.get('TRITON_CACHE_DIR'), os.environ.get('TMPDIR'))"
    )
    off = dict.fromkeys(STEPS, False)
    (home, triton, temporary), _ = run(zygote, code, replace(OPTIONS, **off, home=own_home()))
    assert home == os.path.expanduser("~")
    assert [triton, temporary] == [os.environ.get(name) for name in ("TRITON_CACHE_DIR", "TMPDIR")]
    private, _ = run(zygote, code, replace(OPTIONS, **off))
    assert all(private) and home not in private


COMPILES = """
import torch
f = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2, fullgraph=True, backend=config["backend"])
x = torch.randn(63, 1000)
say((f(x) - torch.nn.functional.gelu(x) * 2).abs().max().item())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_works_in_cage(zygote: Zygote, backend: str) -> None:
    with zygote.spawn({"code": COMPILES, "backend": backend}, OPTIONS) as child:
        (error,) = hear(child, 240.0)
        assert error < 1e-5


BUILDS = """
import ctypes, subprocess
with open("/tmp/code.c", "w") as file:
    file.write("int twice(int x) { return 2 * x; }")
done = subprocess.run(["gcc", "-shared", "-fPIC", "-o", "/tmp/code.so", "/tmp/code.c"], capture_output=True, text=True)
say(done.stderr, ctypes.CDLL("/tmp/code.so").twice(21))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_compiler_works_in_cage(zygote: Zygote) -> None:
    """Triton builds its launchers this way."""
    assert run(zygote, BUILDS)[0] == ["", 42]


EXTENSION = """
import os
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
import torch
from torch.utils.cpp_extension import load_inline
twice = load_inline("twice", "torch::Tensor twice(torch::Tensor x) { return x * 2; }", functions=["twice"])
say(twice.twice(torch.ones(3)).tolist(), twice.__file__)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_extension_is_built_in_cage(zygote: Zygote, steps: dict[str, str]) -> None:
    """With the limits of a candidate on a CPU."""
    needs(steps, "mounts")
    limits = replace(
        OPTIONS, memory=CPU_MEMORY, address_space=CPU_ADDRESS_SPACE, core=min(os.sched_getaffinity(0))
    )
    with zygote.spawn({"code": EXTENSION}, limits) as child:
        said = hear(child, 500.0)
        assert said[:1] == [[2.0, 2.0, 2.0]], child.output_tail()
        assert said[1].startswith("/tmp/extensions/")


TOOLS = """
import os, shutil, subprocess, torch.utils.cpp_extension as found
say(found.is_ninja_available(), bool(shutil.which("g++")), os.environ["TORCH_EXTENSIONS_DIR"],
    os.access(os.environ["TORCH_EXTENSIONS_DIR"], os.W_OK), os.access(os.environ["HOME"], os.W_OK))
nvcc = shutil.which("nvcc")
say(subprocess.run([nvcc, "--version"], capture_output=True).returncode if nvcc else None)
"""


def test_compilers_of_extensions_are_visible(zygote: Zygote, steps: dict[str, str]) -> None:
    """Those of this environment, too, if it is not activated: ninja lies next to its interpreter."""
    needs(steps, "mounts")
    (*found, nvcc), _ = run(zygote, TOOLS)
    assert found == [True, bool(shutil.which("g++")), "/tmp/extensions", True, True]
    assert nvcc == (0 if shutil.which("nvcc") else None)


KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

def call(x):
    add_one[(triton.cdiv(x.numel(), 64),)](x, x.numel(), BLOCK=64)
"""

CALLS_KERNEL = """
import importlib.util, os, torch
os.environ["TRITON_INTERPRET"] = "1"
spec = importlib.util.spec_from_file_location("candidate_file", config["path"])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
x = torch.arange(1000.0)
module.call(x)
say(torch.equal(x, torch.arange(1000.0) + 1), sorted(os.listdir(os.path.dirname(config["path"]))))
"""


def test_candidate_runs_triton_and_sees_no_other_file(
    zygote: Zygote, steps: dict[str, str], tmp_path: Path
) -> None:
    for name in ("mine.py", "other.py"):
        (tmp_path / name).write_text(KERNEL)
        (tmp_path / name).chmod(0o600)
    path = str(tmp_path / "mine.py")
    (right, files), _ = run(
        zygote, CALLS_KERNEL, replace(OPTIONS, readable=(*OPTIONS.readable, path)), path=path
    )
    assert right
    needs(steps, "mounts")
    assert files == ["mine.py"]


def test_caged_process_cannot_signal_others(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "pid")
    code = """
import os, time
for pid in (os.getppid(), 1, *config["pids"], -1):
    try:
        os.kill(pid, 9)
        say(pid)
    except OSError as error:
        say(type(error).__name__)
time.sleep(0.2)
say("alive")
"""
    pid = zygote.info["pid"]
    said, end = run(zygote, code, pids=[os.getpid(), pid])
    assert end.code == 0 and said[-1] == "alive" and zygote.info["pid"] == pid
    assert said[2:4] == ["ProcessLookupError"] * 2
    if os.geteuid() == 0 and steps["user"] == "on":
        assert said[:2] == ["PermissionError"] * 2


def test_caged_process_has_no_network(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "net")
    code = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", config["port"])), (socket.AF_UNIX, config["name"])):
    try:
        socket.socket(family).connect(address)
        say("connected")
    except OSError as error:
        say(type(error).__name__)
say(sorted(name for _, name in socket.if_nameindex()))
"""
    name = f"\0fk-test-{os.getpid()}"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        unix.bind(name)
        tcp.listen()
        unix.listen()
        said, _ = run(zygote, code, port=tcp.getsockname()[1], name=name)
    assert "connected" not in said and set(said[2]) <= {"lo", "sit0", "tunl0", "ip6tnl0"}


def test_caged_process_reads_no_file_of_judge(zygote: Zygote, steps: dict[str, str], tmp_path: Path) -> None:
    needs(steps, "mounts")
    secret = tmp_path / "oracle.pt"
    secret.write_text("expected output")
    root = Path(__file__).parents[4]
    assert (root / "pyproject.toml").exists()
    paths = [
        secret,
        Path(__file__),
        root / "pyproject.toml",
        root / "bench" / "results",
        Path.home() / ".bashrc",
    ]
    paths += [Path("/var/log"), Path("/home"), zygote.dir / "zygote.log"]
    code = "import os\nsay([p for p in config['paths'] if os.path.exists(p)])"
    (seen,), _ = run(zygote, code, paths=[str(p) for p in paths])
    assert seen == []
    if os.geteuid() == 0 and steps["user"] == "on":
        (tried,), _ = run(zygote, "try: say(open('/etc/shadow').read())\nexcept OSError: say('refused')")
        assert tried == "refused"


def test_caged_process_writes_only_to_its_tmp(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "mounts", "user")
    code = """
import os, sys
package = os.path.dirname(sys.modules["torch"].__file__)
written = []
for place in ("/", "/usr", "/etc", "/dev", "/sys", "/proc/sys/kernel", "/root", sys.prefix, package, *config["dirs"],
              "/tmp", "/dev/shm"):
    try:
        with open(os.path.join(place, config["name"]), "w") as file:
            file.write("left behind")
        written.append(place)
    except OSError:
        pass
try:
    os.rename(config["dirs"][0], "/tmp/moved")
    written.append("moved")
except OSError:
    pass
say(written)
"""
    name = f"fk-left-{os.getpid()}"
    (written,), _ = run(zygote, code, name=name, dirs=[str(SUPPORT), str(zygote.dir)])
    if os.geteuid() == 0:  # another user owns the directories in its /tmp that lead to what is bound there
        assert written == ["/tmp", "/dev/shm"]
    assert not any(
        os.path.exists(f"{place}/{name}") for place in (SUPPORT, zygote.dir, "/tmp", "/dev/shm", "/usr")
    )
    assert SUPPORT.is_dir()
    (left,), _ = run(
        zygote, f"import os\nsay([os.path.exists(f'{{p}}/{name}') for p in ('/tmp', '/dev/shm')])"
    )
    assert left == [False, False]


def test_caged_process_sees_no_process_or_secret(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "pid", "mounts")
    code = """
import os
def read(path):
    try:
        return open(path, "rb").read().decode(errors="replace")
    except OSError as error:
        return type(error).__name__
say([int(p) for p in os.listdir("/proc") if p.isdigit()], read("/proc/1/environ"), read("/proc/1/mem"),
    read(f"/proc/{config['judge']}/environ"), dict(os.environ))
"""
    (pids, environ, memory, judge, own), _ = run(zygote, code, judge=os.getpid())
    assert pids == [1, 2]
    assert memory in ("PermissionError", "OSError") and judge == "FileNotFoundError"
    assert "a-secret" not in environ + json.dumps(own)
    assert own["HOME"].startswith("/tmp") and own["TRITON_CACHE_DIR"].startswith("/tmp")
    if os.geteuid() == 0 and steps["user"] == "on":
        assert environ == "PermissionError"


def test_caged_process_cannot_trace(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "pid")
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, os.getppid(), config["judge"]):
    say(libc.ptrace(16, pid, None, None))
    data = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(data), 8)
    say(libc.process_vm_readv(pid, vector, 1, vector, 1, 0))
"""
    said, _ = run(zygote, code, judge=os.getpid())
    assert said == [-1] * 6


def test_system_calls_are_refused(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "seccomp")
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for call, args in (("unshare", (0x10000000,)), ("syscall", (425, 1, None)), ("chroot", (b"/tmp",))):
    say([getattr(libc, call)(*args), os.strerror(ctypes.get_errno())])
say(os.popen("echo a shell works").read())
"""
    said, _ = run(zygote, code)
    assert said == [[-1, "Operation not permitted"]] * 3 + ["a shell works\n"]
    assert {"unshare", "io_uring_setup", "chroot", "ptrace"} <= set(seccomp.refused())


# Call numbers on x86-64; -1 as a process is this one's error, and not the filter's.
BY_ARGUMENT = """
import ctypes, errno, fcntl, os, subprocess, threading, faulthandler
libc = ctypes.CDLL(None, use_errno=True)
def refused(number, *args):
    return libc.syscall(number, *args) == -1 and errno.errorcode[ctypes.get_errno()]
me, cont = os.getpid(), 18
spaces = {flag: refused(56, flag | 17, 0, 0, 0, 0) for flag in config["spaces"]}
say(spaces, refused(435, 0, 0))
say({name: refused(*call) for name, call in {
    "child's end": (56, cont, 0, 0, 0, 0), "kill": (62, me, cont), "tkill": (200, me, cont),
    "tgkill": (234, me, me, cont), "sigqueue": (129, me, cont, None), "tgsigqueue": (297, me, me, cont, None),
    "pidfd": (424, -1, cont, None, 0), "timer": (222, 0, None, None), "setitimer": (38, 0, None, None),
    "alarm": (37, 0), "mq_notify": (244, 0, None), "F_SETOWN": (72, 1, 8, me), "F_SETSIG": (72, 1, 10, cont),
    "F_SETOWN_EX": (72, 1, 15, None), "F_NOTIFY": (72, 1, 1026, 1), "FIOSETOWN": (16, 1, 0x8901, None),
    "parent's death": (157, 1, cont),
}.items()})
"""
HONEST = """
import faulthandler, os, signal, subprocess, threading
import torch
os.kill(os.getpid(), 0)
child = os.fork()
if child == 0:
    signal.pause()
os.kill(child, signal.SIGTERM)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done = []
thread = threading.Thread(target=done.append, args=(1,))
thread.start(), thread.join()
faulthandler.dump_traceback_later(60), faulthandler.cancel_dump_traceback_later()
torch.set_num_threads(2)
total = (torch.ones(512, 512) @ torch.ones(512, 512)).sum().item()
text = subprocess.run(["sh", "-c", "echo a shell"], capture_output=True, text=True, timeout=60).stdout
say(ended, done, total, text)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
def test_arguments_that_wake_or_escape_are_refused(zygote: Zygote, steps: dict[str, str]) -> None:
    """A namespace of its own would give all capabilities inside, and SIGCONT wakes a stopped process."""
    needs(steps, "seccomp")
    spaces = [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000]
    (found, clone3, wakes), _ = run(zygote, BY_ARGUMENT, spaces=spaces)
    assert list(found.values()) == ["EPERM"] * len(spaces) and clone3 == "ENOSYS"
    assert set(wakes.values()) == {"EPERM"}, wakes


def test_threads_processes_and_signals_still_work(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "seccomp")
    assert run(zygote, HONEST)[0] == [-15, [1], 512.0**3, "a shell\n"]


AFFINITY = """
import ctypes, os, threading
libc = ctypes.CDLL(None, use_errno=True)
said = []
def cores():
    said.append(sorted(os.sched_getaffinity(0)))
thread = threading.Thread(target=cores)
cores(), thread.start(), thread.join()
try:
    os.sched_setaffinity(0, config["cores"])
    said.append("changed")
except PermissionError:
    said.append("refused")
cores()
say(*said)
"""


def test_caged_process_stays_on_its_core(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "seccomp")
    cores = sorted(os.sched_getaffinity(0))
    said, _ = run(zygote, AFFINITY, replace(OPTIONS, core=cores[-1]), cores=cores)
    assert said == [[cores[-1]], [cores[-1]], "refused", [cores[-1]]]


def test_uncaged_process_starts_on_its_core(zygote: Zygote) -> None:
    cores = sorted(os.sched_getaffinity(0))
    said, _ = run(zygote, AFFINITY, replace(OPTIONS, **OPEN, core=cores[-1]), cores=cores)
    assert said == [[cores[-1]], [cores[-1]], "changed", cores]


SCHEDULER = """
import os
for change in (
    lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    lambda: os.sched_setparam(0, os.sched_param(0)),
):
    try:
        change()
        say("changed")
    except PermissionError:
        say("refused")
"""


def test_caged_process_keeps_its_scheduler(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "seccomp")
    assert run(zygote, SCHEDULER)[0] == ["refused"] * 2


def test_two_children_have_two_users(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "user")
    (first,), _ = run(zygote, "import os\nsay([os.getuid(), os.getgid(), os.getgroups()])")
    (second,), _ = run(zygote, "import os\nsay([os.getuid(), os.getgid(), os.getgroups()])")
    if os.geteuid() == 0:
        assert first[0] != second[0] and 0 not in first[:2] and first[2] == []


def test_compiler_in_an_unusual_place_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles its launchers with it, in the processes of models, too."""
    compiler = tmp_path / "gcc" / "bin" / "gcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert str(tmp_path / "gcc") in mounts.needed((), ())


def test_metadata_of_a_source_tree_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "fastkernels.egg-info"
    metadata.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = mounts.needed((), ())
    assert str(metadata) in found and str(tmp_path) not in found
