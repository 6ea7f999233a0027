"""Trials of a user's code: imports in a child process, and deadlines in this one."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from fastkernels.core import candidate
from fastkernels.core.candidate import CandidateError
from fastkernels.core.env import Environment
from fastkernels.core.runtime.trial import DeadlineError, import_in_child, within

ENDLESS = (
    "while True:\n    try:\n        while True:\n            pass\n    except Exception:\n        pass\n"
)
BROKEN = {
    "exit": ("import sys\nsys.exit(3)\n", r"calls sys.exit\(3\) while it is imported"),
    "end": ("import os\nprint('bye', flush=True)\nos._exit(7)\n", "ended the process .* exit code 7: bye"),
    "crash": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "exit code -11"),
    "error": (
        "import nothing_of_that_name\n",
        r"does not import: ModuleNotFoundError: .*nothing_of_that_name",
    ),
    "endless": (ENDLESS, r"was not imported within 3 s \(FASTKERNELS_TRIAL_S\)"),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_file_ends_only_the_child(source: str, message: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n")
    bad.write_text(source)
    import_in_child(
        {"rms_norm": str(good), "linear": str(tmp_path / "missing.py")}, 59
    )  # the thread takes 60 s
    with pytest.raises(CandidateError, match=f"{bad}.*{message}"):
        import_in_child({"rms_norm": str(good), "silu_and_mul": str(bad)}, 3 if source is ENDLESS else 120)


def test_file_is_tried_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    file, log = tmp_path / "kernel.py", tmp_path / "log"
    for text, runs in (("", 1), ("", 1), ("# changed\n", 2)):
        file.write_text(f"import helper\nopen({str(log)!r}, 'a').write('x')\n{text}")
        import_in_child({"rms_norm": str(file)}, 120)
        assert len(log.read_text()) == runs
    assert "helper" not in sys.modules


def test_exit_at_import_is_an_error_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("raise SystemExit('no GPU')\n")
    with pytest.raises(CandidateError, match=r"calls sys.exit\('no GPU'\) while it is imported"):
        candidate.load("rms_norm", str(tmp_path / "kernel.py"))


def test_deadline_ends_code_that_catches_exceptions() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(DeadlineError, match=r"the step did not end within 0.1 s"), within(0.1, "the step"):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(60)
    with within(5, "the step"):
        pass
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert signal.getsignal(signal.SIGALRM) is handler and (left == 0 or left > 5)  # pytest's own timer


def test_outer_deadline_survives_an_inner_block() -> None:
    with pytest.raises(DeadlineError, match="the outer"), within(0.2, "the outer"):
        with within(60, "the inner"):
            time.sleep(0.01)
        time.sleep(60)


def test_no_deadline_outside_the_main_thread() -> None:
    done: list[bool] = []

    def run() -> None:
        with within(0.01, "the step"):
            time.sleep(0.05)
            done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True]


def test_trial_seconds_of_the_environment() -> None:
    assert Environment.read({}).trial_s == 300
    assert Environment.read({"FASTKERNELS_TRIAL_S": "2.5"}).trial_s == 2.5
    for wrong in ("soon", "0", "-1", "inf", "nan"):
        with pytest.raises(ValueError, match="FASTKERNELS_TRIAL_S: expected a number of seconds above 0"):
            Environment.read({"FASTKERNELS_TRIAL_S": wrong})
