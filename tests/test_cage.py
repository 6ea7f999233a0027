"""What candidates do to be rid of the judge, in real processes: each is contained, and the next child works."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fk_bench.judge import forkserver, seccomp
from fk_bench.judge.cage import STEPS, CageOptions
from fk_bench.judge.zygote import OUTPUT_KEPT, Child, Exit, Zygote, ZygoteError

SUPPORT = Path(__file__).parent / "support"
OPTIONS = CageOptions(readable=(str(SUPPORT / "caged.py"),))
CAP_SYS_ADMIN = 21
OPEN = dict.fromkeys(STEPS, False)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cages are for Linux")


@pytest.fixture(scope="module")
def one_zygote() -> Iterator[Zygote]:
    os.environ["FK_TEST_TOKEN"] = "a-secret-of-the-judge"
    with Zygote(entry="caged:main", env={"PYTHONPATH": str(SUPPORT)}) as zygote:
        yield zygote
    del os.environ["FK_TEST_TOKEN"]


@pytest.fixture
def zygote(one_zygote: Zygote) -> Iterator[Zygote]:
    """After each test: the same zygote makes a child that works."""
    yield one_zygote
    with one_zygote.spawn({"code": "say('fine')"}, OPTIONS) as child:
        assert hear(child) == ["fine"] and child.wait(20.0) == Exit(code=0, peak_rss=child.peak_rss)


@pytest.fixture(scope="module")
def steps(one_zygote: Zygote) -> dict[str, str]:
    with one_zygote.spawn({"code": "say(config['cage'])"}, OPTIONS) as child:
        report: dict[str, str] = hear(child)[0]
        return report


def needs(steps: dict[str, str], *names: str) -> None:
    """Skip what this machine cannot do; a root with all its capabilities must be able to."""
    status = Path("/proc/self/status").read_text().splitlines()
    capabilities = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    for name in names:
        if steps[name] != "on":
            assert not capabilities >> CAP_SYS_ADMIN & 1, f"root, and the cage has no {name}: {steps[name]}"
            pytest.skip(f"{name} {steps[name]}")


def hear(child: Child, timeout: float = 60.0) -> list[Any]:
    """All that the child and its descendants say: to the end of the last process that holds the channel."""
    child.channel.settimeout(timeout)
    data = b""
    while part := child.channel.recv(1 << 16):
        data += part
    return [json.loads(line) for line in data.splitlines()]


def run(zygote: Zygote, code: str, options: CageOptions = OPTIONS, **config: Any) -> tuple[list[Any], Exit]:
    with zygote.spawn({"code": code, **config}, options) as child:
        said, end = hear(child), child.wait(20.0)
        assert end is not None
        assert said or end.code != forkserver.FAILED, child.output_tail()
        return said, end


def test_root_takes_every_step(steps: dict[str, str]) -> None:
    needs(steps, *steps)
    assert set(steps) == {*OPEN, "limits", "capabilities", "memory"}


def test_a_step_that_is_not_asked_for_is_reported(zygote: Zygote) -> None:
    (report,), _ = run(zygote, "say(config['cage'])", replace(OPTIONS, net=False, ipc=False, seccomp=False))
    assert {n for n, v in report.items() if v == "off: not asked for"} == {"net", "ipc", "seccomp"}


COMPILES = """
import torch
f = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2, fullgraph=True)
x = torch.randn(63, 1000)
say((f(x) - torch.nn.functional.gelu(x) * 2).abs().max().item())
"""


@pytest.mark.timeout(180)
def test_torch_compile_works_in_the_cage(zygote: Zygote) -> None:
    (error,), _ = run(zygote, COMPILES)
    assert error < 1e-5


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


def test_a_candidate_file_runs_triton_and_sees_no_other(
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


def test_descriptors_arrive_by_name_and_no_others(zygote: Zygote, tmp_path: Path) -> None:
    fd = os.memfd_create("slots")
    os.ftruncate(fd, 4096)
    code = (
        "import os, mmap\nsay(len(os.listdir('/proc/self/fd')))\nmmap.mmap(fds['slots'], 4096)[:5] = b'hello'"
    )
    with (tmp_path / "open").open("w"), zygote.spawn({"code": code}, OPTIONS, {"slots": fd}) as child:
        assert hear(child) == [6]  # 0 1 2, channel, slots, and that of listdir
        assert mmap.mmap(fd, 4096)[:5] == b"hello"
    os.close(fd)


def test_children_do_not_share_random_states(zygote: Zygote) -> None:
    code = "import random, torch\nsay([random.random(), torch.rand(1).item()])"
    (first,), _ = run(zygote, code)
    (second,), _ = run(zygote, code)
    assert all(a != b for a, b in zip(first, second, strict=True))


ENDS = {
    "import os; os._exit(0)": Exit(code=0),
    "raise SystemExit(3)": Exit(code=3),
    "raise ValueError('boom')": Exit(code=forkserver.FAILED),
    "import os; os.abort()": Exit(signal=signal.SIGABRT),
    "import ctypes; ctypes.string_at(0)": Exit(signal=signal.SIGSEGV),
    "import os; os.kill(os.getpid(), 9)": Exit(signal=signal.SIGKILL),
    "import os; os.killpg(0, 9)": Exit(signal=signal.SIGKILL),
}


@pytest.mark.parametrize("code", ENDS)
def test_how_it_ended(zygote: Zygote, steps: dict[str, str], code: str) -> None:
    if "killpg" in code:
        needs(steps, "pid")
    with zygote.spawn({"code": f"print('last words', flush=True)\n{code}"}, OPTIONS) as child:
        end = child.wait(20.0)
        assert end == replace(ENDS[code], peak_rss=child.peak_rss)
        assert child.peak_rss > 50 << 20
        assert child.output_tail().startswith("last words") and (
            "boom" not in code or "boom" in child.output_tail()
        )


HANGS = """
import os, signal, time
for leaves in (False, True):
    if os.fork() == 0:
        if leaves:
            os.setsid()
            if os.fork():
                os._exit(0)
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        time.sleep(1000)
say("hanging")
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("weak", [False, True])
def test_a_hang_is_ended_with_its_daemons(zygote: Zygote, weak: bool) -> None:
    options = replace(OPTIONS, **OPEN) if weak else OPTIONS
    with zygote.spawn({"code": HANGS}, options) as child:
        assert child.channel.recv(100) == b'"hanging"\n'
        assert child.wait(0.3) is None
        start = time.monotonic()
        assert child.kill().killed and str(child.exit) == "ended by the judge"
        assert hear(child, 5.0) == []  # its end: nobody holds the channel
        assert time.monotonic() - start < 3


@pytest.mark.parametrize("weak", [False, True])
def test_daemons_end_with_their_child(zygote: Zygote, weak: bool) -> None:
    code = HANGS.replace("while True:\n    time.sleep(1)", "os._exit(0)")
    said, end = run(zygote, code, replace(OPTIONS, **OPEN) if weak else OPTIONS)
    assert said == ["hanging"] and end.code == 0 and not end.killed


def test_a_fork_bomb_meets_its_limit(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "user")
    code = (
        "import os, time\nn = 0\ntry:\n    while n < 1000:\n        if os.fork() == 0:\n            time.sleep(1000)\n"
        "        n += 1\nexcept OSError as error:\n    say([n, error.strerror])"
    )
    (said,), end = run(zygote, code, replace(OPTIONS, processes=40))
    assert 30 < said[0] < 40 and said[1] == "Resource temporarily unavailable" and end.code == 0


EATS = {
    "private": "kept = []\nwhile True:\n    kept.append(bytearray(os.urandom(1) * (32 << 20)))",
    "shared": "kept = mmap.mmap(-1, 8 << 30)\nfor i in range(0, 8 << 30, 4096):\n    kept[i] = 1",
    "tree": (
        "while os.fork() == 0:\n    kept = bytearray(b'x' * (100 << 20))\ntime.sleep(100)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", EATS)
def test_memory_has_a_limit(zygote: Zygote, how: str) -> None:
    options = replace(OPTIONS, memory=1 << 30)
    said, end = run(zygote, f"import mmap, os, time\n{EATS[how]}", options)
    assert said == [] and end.oom and end.signal == signal.SIGKILL
    assert 1 << 30 < end.peak_rss < 5 << 30 and "GiB" in str(end)


def test_an_address_space_has_a_limit_that_raises(zygote: Zygote) -> None:
    code = "import torch\ntry:\n    torch.empty(8 << 30)\nexcept RuntimeError as error:\n    say(str(error))"
    (said,), end = run(zygote, code, replace(OPTIONS, address_space=12 << 30))
    assert "allocate memory" in said and end.code == 0 and not end.oom


def test_files_have_a_limit(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "mounts")
    code = (
        "import errno\nfor path in ('/tmp/big', '/dev/shm/big'):\n    try:\n        with open(path, 'wb') as file:\n"
        "            for _ in range(1000):\n                file.write(b'x' * (1 << 20))\n"
        "    except OSError as error:\n        say(errno.errorcode[error.errno])"
    )
    said, _ = run(zygote, code, replace(OPTIONS, tmp_bytes=8 << 20, shm_bytes=64 << 20, file_size=32 << 20))
    assert said == ["ENOSPC", "EFBIG"]


def test_output_without_end_is_cut_and_ended(zygote: Zygote) -> None:
    code = "import os\nos.write(1, b'first ')\nwhile True:\n    os.write(2, b'x' * (1 << 16))"
    with zygote.spawn({"code": code}, OPTIONS) as child:
        until = time.monotonic() + 30
        while child.output_bytes < 256 << 20 and time.monotonic() < until:
            time.sleep(0.05)
        assert child.output_bytes >= 256 << 20  # it was never made to wait
        assert child.kill().killed
        assert child.output_tail() == "x" * OUTPUT_KEPT and child.output_tail(10) == "x" * 10


def test_all_descriptors_closed(zygote: Zygote) -> None:
    code = "import os, time\nos.closerange(0, 4096)\ntime.sleep(100)"
    with zygote.spawn({"code": code}, OPTIONS) as child:
        assert hear(child, 20.0) == [] and child.wait(0.1) is None
        assert child.kill().killed


def test_garbage_on_the_channel_is_only_bytes(zygote: Zygote) -> None:
    with zygote.spawn({"code": "import os\nchannel.sendall(os.urandom(3 << 20))"}, OPTIONS) as child:
        child.channel.settimeout(20.0)
        got = 0
        while part := child.channel.recv(1 << 20):
            got += len(part)
        assert got == 3 << 20 and child.wait(20.0) == Exit(code=0, peak_rss=child.peak_rss)


def test_it_cannot_signal_others(zygote: Zygote, steps: dict[str, str]) -> None:
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


def test_it_has_no_network(zygote: Zygote, steps: dict[str, str]) -> None:
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


def test_it_reads_no_file_of_the_judge(zygote: Zygote, steps: dict[str, str], tmp_path: Path) -> None:
    needs(steps, "mounts")
    secret = tmp_path / "oracle.pt"
    secret.write_text("expected output")
    root = Path(__file__).parents[1]
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


def test_it_writes_only_to_its_own_tmp(zygote: Zygote, steps: dict[str, str]) -> None:
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


def test_it_sees_no_other_process_and_no_secret(zygote: Zygote, steps: dict[str, str]) -> None:
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


def test_it_traces_nobody(zygote: Zygote, steps: dict[str, str]) -> None:
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


def test_two_children_have_two_users(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "user")
    (first,), _ = run(zygote, "import os\nsay([os.getuid(), os.getgid(), os.getgroups()])")
    (second,), _ = run(zygote, "import os\nsay([os.getuid(), os.getgid(), os.getgroups()])")
    if os.geteuid() == 0:
        assert first[0] != second[0] and 0 not in first[:2] and first[2] == []


def test_a_lost_zygote_is_started_again_and_said(zygote: Zygote) -> None:
    with zygote.spawn({"code": HANGS}, OPTIONS) as child:
        assert child.channel.recv(100) == b'"hanging"\n'
        before, notes = zygote.info["pid"], len(zygote.notes)
        os.kill(before, signal.SIGKILL)
        assert hear(child, 10.0) == []  # its children go with it
        assert str(child.wait(10.0)) == "its supervisor was lost"
    while Path(f"/proc/{before}").exists() and "Z" not in Path(f"/proc/{before}/stat").read_text().split()[2]:
        time.sleep(0.01)
    assert run(zygote, "say(1)")[0] == [1]
    assert zygote.info["pid"] != before
    assert zygote.notes[notes:] == ["the zygote was lost (SIGKILL) and started again"]


def test_an_interpreter_that_lacks_a_module_is_said() -> None:
    with (
        Zygote(preload=("torch", "no_such_module")) as zygote,
        pytest.raises(ZygoteError, match="no_such_module"),
    ):
        zygote.spawn({})
    assert not zygote.dir.exists()


JUDGE_DIES = """
import os, sys, time
from fk_bench.judge.cage import STEPS, CageOptions
from fk_bench.judge.zygote import Zygote
zygote = Zygote(entry="caged:main", preload=("json",), env={"PYTHONPATH": sys.argv[1]})
child = zygote.spawn({"code": "import time; say('up'); time.sleep(1000)"}, CageOptions(readable=(sys.argv[1],)))
assert child.channel.recv(10)
print(zygote.dir, zygote.info["pid"], child.pid, flush=True)
os._exit(1)
"""


def test_nothing_outlives_the_judge() -> None:
    done = subprocess.run(
        [sys.executable, "-c", JUDGE_DIES, str(SUPPORT)], capture_output=True, text=True, timeout=60
    )
    folder, *pids = done.stdout.split()
    assert len(pids) == 2, done.stderr
    until = time.monotonic() + 10
    while time.monotonic() < until and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    subprocess.run(["rm", "-r", folder], check=True)
