"""Ends of child processes: each is contained, and the next child works."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fk_bench.kernels.judge.cage.cgroup import Group
from fk_bench.kernels.judge.processes import forkserver
from fk_bench.kernels.judge.processes.messages import Done
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess
from fk_bench.kernels.judge.processes.zygote import OUTPUT_KEPT, Child, Exit, Zygote, ZygoteError
from support.cage.children import OPEN, OPTIONS, SUPPORT, hear, needs, run
from support.live import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cages are for Linux")


def test_only_named_descriptors_arrive(zygote: Zygote, tmp_path: Path) -> None:
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
def test_exit_describes_the_end(zygote: Zygote, steps: dict[str, str], code: str) -> None:
    if "killpg" in code:
        needs(steps, "pid")
    with zygote.spawn({"code": f"print('last words', flush=True)\n{code}"}, OPTIONS) as child:
        end = child.wait(60.0)
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
def test_hanging_child_ends_with_its_daemons(zygote: Zygote, weak: bool) -> None:
    options = replace(OPTIONS, **OPEN) if weak else OPTIONS
    with zygote.spawn({"code": HANGS}, options) as child:
        assert child.channel.recv(100) == b'"hanging"\n'
        assert child.wait(0.3) is None
        assert child.kill().killed and str(child.exit) == "ended by the judge"
        assert hear(child, 60.0) == []  # its end: no process holds the channel


COUNTS = """
import mmap, os, time
memory = mmap.mmap(fds["count"], 16)
for place in (0, 8):
    if place == 8 or os.fork() == 0:
        while True:
            memory[place:place + 8] = (int.from_bytes(memory[place:place + 8], "big") + 1).to_bytes(8, "big")
            time.sleep(0.0005)
"""


def test_stopped_child_does_nothing(zygote: Zygote) -> None:
    fd = os.memfd_create("count")
    os.ftruncate(fd, 16)
    with mmap.mmap(fd, 16) as memory, zygote.spawn({"code": COUNTS}, OPTIONS, {"count": fd}) as child:

        def both_count() -> bool:
            before, until = memory[:], time.monotonic() + 60
            while time.monotonic() < until:
                if all(memory[i : i + 8] != before[i : i + 8] for i in (0, 8)):
                    return True
                time.sleep(0.005)
            return False

        assert both_count()
        took = []
        for _ in range(8):
            start = time.monotonic()
            assert child.stop()
            took.append(time.monotonic() - start)
            before = memory[:]
            time.sleep(0.1)
            assert memory[:] == before
            child.resume()
            assert both_count()
        assert min(took) < 0.1, took  # a busy machine may delay some
        assert child.stop()
        assert child.kill().killed  # a stopped one too
    os.close(fd)


ANSWERS = """
import os, threading, time
from fk_bench.kernels.judge.processes.protocol import Channel
def spin():
    while True:
        sum(range(1000))
def fork_in_turn(depth):
    if depth and os.fork() == 0:
        fork_in_turn(depth - 1)
        spin()
fork_in_turn(2)
for _ in range(2):
    threading.Thread(target=spin, daemon=True).start()
answers = Channel(channel)
answers.send({"hello": {}})
while True:
    answers.send({"nonce": answers.receive()["nonce"]})
"""


def states(child: Child) -> list[str]:
    """The state of each task of a child, without its supervisor."""
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    found = []
    for pid in forkserver.descendants(child.pid, proc):
        with suppress(OSError):  # a task that has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    os.close(proc)
    return found


@pytest.mark.parametrize("weak", [False, True])
def test_stop_halts_threads_and_grandchildren(zygote: Zygote, weak: bool) -> None:
    options = replace(OPTIONS, **OPEN) if weak else OPTIONS
    with zygote.spawn({"code": ANSWERS}, options) as child:
        process = RunnerProcess(child, "candidate", 20.0, False)
        process.greet()
        wait_for(lambda: len(states(child)) >= 5, 60)  # the grandchild may start after the greeting
        wait_for(lambda: "R" in states(child), 60)
        for _ in range(3):
            process.stop()
            assert len(states(child)) >= 5 and child.still()
            assert process.ask("copy") == Done()  # the request resumes them
            assert not process.stopped
            wait_for(lambda: "R" in states(child), 60)


BREEDS = """
import os, signal
def breed():
    while True:
        if os.fork() == 0:
            os._exit(0)
        os.waitpid(-1, 0)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
pids = [os.getpid()]
if (child := os.fork()) == 0:
    breed()
pids.append(child)
say("up")
breed()
"""


def test_stop_wins_against_forks_and_sigcont(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes fork without end and resume the other one; a stop is confirmed or fails, and never half."""
    for frozen in (True, False):
        if not frozen:
            monkeypatch.setattr(Group, "_make", lambda *args: None)
        with zygote.spawn({"code": BREEDS}, replace(OPTIONS, seccomp=False)) as child:
            assert child.channel.recv(100) == b'"up"\n'
            for _ in range(5):
                assert child.stop()
                for _ in range(20):  # a frozen task may still be on its way through the kernel
                    assert child.still() and (frozen or "R" not in states(child))
                child.resume()


WAKES = """
import ctypes, mmap, signal, time
libc = ctypes.CDLL(None, use_errno=True)
event, timer = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0), ctypes.c_void_p()
signal.signal(signal.SIGCONT, signal.SIG_IGN)
made = libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer))
if made == 0:
    libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 50_000_000, 0, 50_000_000), None)
say(made)
memory = mmap.mmap(fds["count"], 8)
while True:
    memory[:] = (int.from_bytes(memory[:], "big") + 1).to_bytes(8, "big")
"""


@pytest.mark.parametrize(
    ("seccomp", "groups"),
    [(True, False), (False, True), pytest.param(False, False, marks=pytest.mark.slow)],
)
def test_timer_wakes_no_stopped_process_unseen(
    zygote: Zygote, steps: dict[str, str], seccomp: bool, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filter refuses the timer, a frozen process sleeps on, and a process that woke up is found out."""
    needs(steps, "seccomp")
    if not groups:
        monkeypatch.setattr(Group, "_make", lambda *args: None)
    fd = os.memfd_create("count")
    os.ftruncate(fd, 8)
    with (
        mmap.mmap(fd, 8) as memory,
        zygote.spawn({"code": WAKES}, replace(OPTIONS, seccomp=seccomp), {"count": fd}) as child,
    ):
        assert child.channel.recv(10).strip() == (b"-1" if seccomp else b"0")
        wait_for(lambda: memory[:] != bytes(8), 60)
        if groups and not child._freezes():
            pytest.skip("no control groups that can be frozen")
        process = RunnerProcess(child, "candidate", 20.0, False)
        seen = []
        for _ in range(3):
            process.stop()
            before = memory[:]
            time.sleep(0.2)
            seen.append((memory[:] == before, child.still()))
            process.resume()
        if seccomp or groups:
            assert seen == [(True, True)] * 3
        else:
            assert not any(still and not same for same, still in seen)
            for _ in range(50):  # a busy machine may not run it in time
                process.stop()
                time.sleep(0.2)
                if not child.still():
                    break
                process.resume()
            with pytest.raises(RunnerError, match="ran while it was stopped"):
                process.check_stopped()
    os.close(fd)


def test_group_disappears_with_its_child(zygote: Zygote) -> None:
    with zygote.spawn({"code": "import time; time.sleep(100)"}, OPTIONS) as child:
        made = list(child.group._made)
        assert all(folder.is_dir() for folder in made)
    assert not any(folder.exists() for folder in made)


@pytest.mark.parametrize("weak", [False, True])
def test_daemons_end_with_their_child(zygote: Zygote, weak: bool) -> None:
    code = HANGS.replace("while True:\n    time.sleep(1)", "os._exit(0)")
    said, end = run(zygote, code, replace(OPTIONS, **OPEN) if weak else OPTIONS)
    assert said == ["hanging"] and end.code == 0 and not end.killed


def test_endless_output_is_truncated(zygote: Zygote) -> None:
    code = "import os\nos.write(1, b'first ')\nwhile True:\n    os.write(2, b'x' * (1 << 16))"
    with zygote.spawn({"code": code}, OPTIONS) as child:
        wait_for(lambda: child.output_bytes >= 256 << 20, 120)  # it was never made to wait
        assert child.kill().killed
        assert child.output_tail() == "x" * OUTPUT_KEPT and child.output_tail(10) == "x" * 10


def test_all_descriptors_closed(zygote: Zygote) -> None:
    code = "import os, time\nos.closerange(0, 4096)\ntime.sleep(100)"
    with zygote.spawn({"code": code}, OPTIONS) as child:
        assert hear(child, 60.0) == [] and child.wait(0.1) is None
        assert child.kill().killed


def test_garbage_on_the_channel_is_only_bytes(zygote: Zygote) -> None:
    with zygote.spawn({"code": "import os\nchannel.sendall(os.urandom(3 << 20))"}, OPTIONS) as child:
        child.channel.settimeout(60.0)
        got = 0
        while part := child.channel.recv(1 << 20):
            got += len(part)
        assert got == 3 << 20 and child.wait(60.0) == Exit(code=0, peak_rss=child.peak_rss)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_lost_zygote_is_restarted_and_reported(zygote: Zygote) -> None:
    with zygote.spawn({"code": HANGS}, OPTIONS) as child:
        assert child.channel.recv(100) == b'"hanging"\n'
        before, notes = zygote.info["pid"], len(zygote.notes)
        os.kill(before, signal.SIGKILL)
        assert hear(child, 60.0) == []  # its children go with it
        assert str(child.wait(60.0)) == "its supervisor was lost"
    wait_for(lambda: gone(before), 60)
    assert run(zygote, "say(1)")[0] == [1]
    assert zygote.info["pid"] != before
    assert zygote.notes[notes:] == ["the zygote was lost (SIGKILL) and started again"]


def test_zygote_that_was_begun_is_used() -> None:
    with Zygote(entry="caged:main", preload=("json",), env={"PYTHONPATH": str(SUPPORT)}) as zygote:
        zygote.begin()
        assert zygote._process is not None and not zygote.info
        pid = zygote._process.pid
        assert run(zygote, "say(1)")[0] == [1] and zygote.info["pid"] == pid and zygote.notes == []
    with Zygote(preload=("no_such_module",)) as lost:
        lost.begin()
        with pytest.raises(ZygoteError, match="no_such_module"):
            lost.spawn({})


def test_interpreter_without_module_is_an_error() -> None:
    with (
        Zygote(preload=("torch", "no_such_module")) as zygote,
        pytest.raises(ZygoteError, match="no_such_module"),
    ):
        zygote.spawn({})
    assert not zygote.dir.exists()


JUDGE_DIES = """
import os, sys, time
from fk_bench.kernels.judge.cage.cage import STEPS, CageOptions
from fk_bench.kernels.judge.processes.zygote import Zygote
zygote = Zygote(entry="caged:main", preload=("json",), env={"PYTHONPATH": sys.argv[1]})
child = zygote.spawn({"code": "import time; say('up'); time.sleep(1000)"}, CageOptions(readable=(sys.argv[1],)))
assert child.channel.recv(10)
print(zygote.dir, zygote.info["pid"], child.pid, flush=True)
os._exit(1)
"""


def test_no_process_outlives_the_judge() -> None:
    done = subprocess.run(
        [sys.executable, "-c", JUDGE_DIES, str(SUPPORT)], capture_output=True, text=True, timeout=240
    )
    folder, *pids = done.stdout.split()
    assert len(pids) == 2, done.stderr
    wait_for(lambda: not any(os.path.exists(p) for p in (folder, *(f"/proc/{pid}" for pid in pids))), 60)


def test_fork_bomb_meets_its_limit(zygote: Zygote, steps: dict[str, str]) -> None:
    needs(steps, "user")
    code = (
        "import os, time\nn = 0\ntry:\n    while n < 1000:\n        if os.fork() == 0:\n            time.sleep(1000)\n"
        "        n += 1\nexcept OSError as error:\n    say([n, error.strerror])"
    )
    (said,), end = run(zygote, code, replace(OPTIONS, processes=40))
    assert 30 < said[0] < 40 and said[1] == "Resource temporarily unavailable" and end.code == 0


EATS = {
    "hidden": (
        "kept = [os.memfd_create('a') for _ in range(8)]\nfor fd in kept:\n    for _ in range(64):\n"
        "        os.write(fd, b'x' * (16 << 20))"
    ),
    "private": "kept = []\nwhile True:\n    kept.append(bytearray(os.urandom(1) * (32 << 20)))",
    "shared": "kept = mmap.mmap(-1, 8 << 30)\nfor i in range(0, 8 << 30, 4096):\n    kept[i] = 1",
    "tree": (
        "while os.fork() == 0:\n    kept = bytearray(b'x' * (100 << 20))\ntime.sleep(100)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", EATS)
def test_memory_has_a_limit(zygote: Zygote, how: str) -> None:
    """Also that of files without a name, which no process maps, if the kernel can limit it."""
    options = replace(OPTIONS, memory=1 << 30)
    with zygote.spawn({"code": ""}, options) as child:
        if how == "hidden" and not child.group.kills:
            pytest.skip("no control groups that limit memory")
    said, end = run(zygote, f"import mmap, os, time\n{EATS[how]}", options)
    assert said == [] and end.oom and end.signal == signal.SIGKILL
    assert 1 << 30 <= end.peak_rss < 5 << 30 and "GiB" in str(end)


def test_address_space_limit_raises(zygote: Zygote) -> None:
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
