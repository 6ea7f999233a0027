"""`fk-bench agent-loop` with scripted agents: an autotuner, failing commands, cheats, hostile folders."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bench.agents.conftest import BLOCKS, CASE, CHEATS, OP, begin, row
from fk_bench.agents import transcript
from fk_bench.agents.loop import BadSource, Command, Loop, take
from fk_bench.agents.session import Session, Settings
from fk_bench.core.checkout import checkout_path
from fk_bench.core.rows import Status, read
from fk_bench.track.store import Store

# The agent sees its task folder and the feedback alone: it tries block sizes and keeps the fastest right one.
TUNER = f'''
import json, pathlib, subprocess
SOURCE = {BLOCKS!r}
file, times = pathlib.Path("{OP}.py"), {{}}
for block in (4, 4096):
    file.write_text(SOURCE.format(block=block))
    answer = json.loads(subprocess.run(["./check"], capture_output=True, text=True).stdout)
    assert answer["verdict"] == "ok", answer
    times[block] = min((t["time_us"] for t in answer["times"]), default=1e9)
file.write_text(SOURCE.format(block=min(times, key=times.get)))
print("visible:", *(str(p) for p in ("{{hidden}}", "TASK.md") if pathlib.Path(p).exists()))
'''


def run(*words: str, **env: str) -> tuple[int, dict[str, object], str]:
    done = subprocess.run(
        [sys.executable, "-m", "fk_bench.cli", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=500,
    )
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_autotuner_improves_a_slow_stub_end_to_end(tmp_path: Path) -> None:
    begin_folder, out, hidden = tmp_path / "begin", tmp_path / "run", tmp_path / "hidden.txt"
    begin_folder.mkdir()
    hidden.write_text("secret")
    (begin_folder / f"{OP}.py").write_text(BLOCKS.format(block=1))
    script = TUNER.replace("{hidden}", str(hidden))
    status, last, said = run(
        "agent-loop", "--command", f"python3 -c {shlex.quote(script)}", "--ops", OP, "--begin", str(begin_folder),
        "--case", CASE, "--final", "held-out", "--rounds", "3", "--attempts", "5", "--suffix", "a", "--out", str(out),
        "--json", MLFLOW_TRACKING_URI=(tmp_path / "mlflow").as_uri(),
    )  # fmt: skip
    assert status == 0 and last["ok"], said
    rows, warnings = read(out / "rows.jsonl")
    assert not warnings
    tried = [r for r in rows if r.kind == "attempt"]
    assert [r.case["attempt"] for r in tried] == [0, 1, 2]
    assert [r.case["stub"] for r in tried] == [True, False, False]
    (task,) = [r for r in rows if r.kind == "task"]
    assert (task.case["exit_code"], task.case["suffix"], task.metrics["attempts"]) == (0, "a", 2)
    assert "TASK.md" in task.case["tail"]
    if task.case["agent_cage"]["mounts"] == "on":
        assert "hidden" not in task.case["tail"]
    seen = {r.case["attempt"]: r.metrics.get("speedup_geomean") for r in tried}
    if all(seen.values()):  # a busy machine may leave a case without a time
        best = max(seen, key=lambda n: seen[n] or 0.0)
        assert task.case["best"] == best and best != 0
    if task.case["best"]:
        assert (out / "set" / f"{OP}.py").read_text() != BLOCKS.format(block=1)
        final = [r for r in rows if r.command == "kernels" and r.kind == "case"]
        assert final and all(r.case["source"] == "held-out" for r in final)
    tracked = Store((tmp_path / "mlflow").as_uri()).candidates(OP)
    assert [(c.stage, c.digest) for c in tracked][:3] == [
        ("stub" if r.case["stub"] else "attempt", r.case["digest"]) for r in tried
    ]
    page = (out / "transcript.html").read_text()
    assert "attempt 2" in page and "BLOCK = 4096" in page and "Feedback" in page


@pytest.mark.slow
def test_five_cheats_gain_nothing_through_the_loop(tmp_path: Path, settings: Callable[..., Settings]) -> None:
    """Each is an attempt of one command; the scan is off, so that the judge itself decides."""
    given = settings(attempts=9)
    given = replace(given, seen=replace(given.seen, scan=False))
    with Session(tmp_path, given) as session:
        folder = begin(session)
        for name in CHEATS:
            (folder / f"_{name}.txt").write_text((checkout_path("tests/cheats") / f"{name}.py").read_text())
        text = f"for f in _*.txt; do cp $f {OP}.py; ./check; done; true"
        ended = Loop(session, OP, folder, Command(text), tmp_path / "agent.log").run()
        assert ended.code == 0
        row = session.finish(OP, ended.as_case())
    tried = session.tasks[OP].attempts[1:]
    assert len(tried) == len(CHEATS)
    assert all(a.status is not Status.OK for a in tried), [a.status for a in tried]
    assert row.case["best"] is None and "speedup_geomean" not in row.metrics
    assert not (tmp_path / "set").exists()


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Callable[..., Settings]) -> Session:
    """A session whose attempts get a verdict without a judge: this is a test of commands and budgets."""
    session = Session(tmp_path, settings(seconds=60, attempts=3, tokens=100))
    template = row("a")

    def rows(task: object, file: Path, options: object) -> list[object]:
        session._judge.rows.append(template)
        return [template]

    monkeypatch.setattr(session, "_judged", rows)
    return session


def loop(session: Session, text: str, caged: bool = True) -> Loop:
    folder = begin(session)
    return Loop(session, OP, folder, Command(text, caged=caged), session.run / "agent.log")


def test_failing_command_leaves_code_and_last_lines(judged: Session) -> None:
    ended = loop(judged, "echo first; echo 'no such model' >&2; exit 7").run()
    assert (ended.code, ended.starts, ended.why) == (7, 1, "exit code 7")
    assert "no such model" in ended.tail


def test_failing_command_is_in_the_row_and_on_the_page(judged: Session) -> None:
    """A right attempt from before the failure is kept."""
    rows = []
    for text in ("echo '#' >> {op}.py; ./check; echo '<no> such model' >&2; exit 7", "exit 3"):
        folder = judged.run / "tasks" / OP / "work"
        shutil.rmtree(folder, ignore_errors=True)
        ended = loop(judged, text.format(op=OP)).run()
        rows.append(judged.finish(OP, ended.as_case()))
    kept, empty = rows
    assert (kept.status, kept.case["exit_code"], kept.case["best"]) == (Status.FAILED, 7, 1)
    assert kept.reason == "the command ended with exit code 7: <no> such model; attempt 1 is kept"
    assert (judged.run / "set" / f"{OP}.py").is_file()
    assert (empty.status, empty.case["exit_code"]) == (Status.FAILED, 3)
    assert "exit code 3" in empty.reason and "the agent made no attempt" in empty.reason
    page = transcript.write(judged.run).read_text()
    assert page.count("the command ended with exit code") >= 4 and "&lt;no&gt; such model" in page


@pytest.mark.slow
def test_next_task_begins_after_a_failing_command(tmp_path: Path) -> None:
    status, last, _ = run(
        "agent-loop", "--command", "echo no such model; exit 7", "--ops", f"{OP},rms_norm", "--final", "random",
        "--case", CASE, "--rounds", "3", "--device", "cpu", "--out", str(tmp_path / "run"), "--json",
    )  # fmt: skip
    tasks = last["tasks"]
    assert status == 1 and not last["ok"] and isinstance(tasks, list)
    assert {t["op"] for t in tasks} == {OP, "rms_norm"}
    assert all((t["status"], t["exit_code"], t["tail"]) == ("failed", 7, "no such model") for t in tasks)


def test_task_without_a_right_attempt_has_failed(judged: Session) -> None:
    ended = loop(judged, "./check --lost 'no answer within 5 s'; true").run()
    row = judged.finish(OP, ended.as_case())
    assert (row.status, row.reason) == (Status.FAILED, "no attempt of 1 was right: no answer within 5 s")


@pytest.mark.parametrize(
    "request_",
    ["[" * 60000, '{"do": "usage", "tokens": 1' + "0" * 400 + "}", '{"do": "usage", "tokens": NaN}', "null"],
)
def test_nonsense_of_a_command_is_answered(judged: Session, request_: str) -> None:
    send = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect('.check.sock');"
        "s.sendall(open('sent').read().encode() + b'\\n'); print(s.recv(999).decode())"
    )
    runner = loop(judged, f"{sys.executable} -c {shlex.quote(send)}", caged=False)
    (judged.run / "tasks" / OP / "work" / "sent").write_text(request_)
    ended = runner.run()
    assert ended.code == 0 and "a request is check" in ended.tail, ended.tail
    assert judged.finish(OP, ended.as_case()).metrics["tokens"] == 0


def test_unknown_program_is_a_failure(judged: Session) -> None:
    ended = loop(judged, "there-is-no-such-program").run()
    assert ended.code == 127 and "not found" in ended.tail
    row = judged.finish(OP, ended.as_case())
    assert row.status is Status.FAILED and "the command ended with exit code 127: " in row.reason
    assert row.reason.endswith("not found; the agent made no attempt")


def test_command_that_changes_nothing_is_started_once(judged: Session) -> None:
    ended = loop(judged, "true").run()
    assert (ended.starts, ended.why) == (1, "the command changed nothing more")


def test_command_runs_again_until_attempts_are_used_up(judged: Session) -> None:
    ended = loop(judged, f"echo '#' >> {OP}.py; test ! -e feedback.json || grep verdict feedback.json").run()
    assert ended.starts == 3 and ended.why == "the budget is used up: 3 attempts"
    assert '"verdict": "ok"' in ended.tail


def test_endless_command_ends_at_the_limit_of_time(judged: Session) -> None:
    runner = loop(judged, "sleep 1000 & sleep 1000")
    judged.tasks[OP].spent.started -= 58
    ended = runner.run()
    assert ended.code is None and ended.why == "the time of the budget is used up"


def test_tokens_end_the_command(judged: Session) -> None:
    ended = loop(judged, "./check --usage 70 0.5; ./check --usage 40; sleep 1000").run()
    assert ended.code is None or ended.why
    assert judged.tasks[OP].spent.tokens == 110
    assert judged.tasks[OP].spent.cost_usd == 0.5


def test_lost_attempts_are_counted_with_reasons(judged: Session) -> None:
    loop(judged, "./check --lost 'no answer within 5 s'; true").run()
    task = judged.tasks[OP]
    assert task.lost == ["no answer within 5 s"] and task.spent.attempts == 1


def test_same_source_costs_no_second_attempt(judged: Session) -> None:
    folder = begin(judged)
    (folder / f"{OP}.py").write_text("one = 1\n")
    first = judged.submit(OP, folder / f"{OP}.py")
    again = judged.submit(OP, folder / f"{OP}.py")
    assert first["attempt"] == again["attempt"] == 1
    assert judged.tasks[OP].spent.attempts == 1


@pytest.mark.parametrize("caged", [True, False])
def test_agent_gets_no_variables_of_the_session(
    judged: Session, caged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc-secret-xyz")
    ended = loop(
        judged, "env | cut -d= -f1 | grep -e FK_TASK -e SECRET -e ^HOME -e ^PATH | sort", caged
    ).run()
    assert ended.tail.split() == ["FK_TASK", "HOME", "PATH"]


def test_cage_hides_files_processes_and_network(judged: Session) -> None:
    text = "ls /proc | grep -c '^[0-9]'; touch /usr/fk-test; cat /proc/net/dev | wc -l; touch ok; ls ok"
    ended = loop(judged, text).run()
    cage = ended.cage or {}
    if any(not cage.get(step, "").startswith("on") for step in ("mounts", "pid", "net")):
        pytest.skip(f"this machine has no whole cage: {cage}")
    lines = ended.tail.splitlines()
    assert int(lines[0]) < 12
    assert "Read-only file system" in ended.tail or "Permission denied" in ended.tail
    assert "3" in lines and lines[-1] == "ok"  # the loopback device alone, under two lines of heading


def test_links_and_devices_are_no_source(tmp_path: Path) -> None:
    work, secret = tmp_path / "work", tmp_path / "secret.py"
    work.mkdir()
    secret.write_text("secret = 1")
    (work / "rms_norm.py").symlink_to(secret)
    with pytest.raises(BadSource, match="regular file"):
        take(work, "rms_norm", tmp_path / "taken")
    (work / "rms_norm.py").unlink()
    os.mkfifo(work / "rms_norm.py")
    with pytest.raises(BadSource, match="regular file"):
        take(work, "rms_norm", tmp_path / "taken")
    (work / "rms_norm.py").unlink()
    (work / "rms_norm.py").write_text("x = 1")
    (work / "_rms_norm").symlink_to(tmp_path)
    assert [p.name for p in (take(work, "rms_norm", tmp_path / "t2")).parent.iterdir()] == ["rms_norm.py"]


def test_large_source_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "rms_norm.py", "wb") as file:
        file.truncate((20 << 20) + 1)
    with pytest.raises(BadSource, match="20 MB"):
        take(tmp_path, "rms_norm", tmp_path / "taken")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give an agent and ops"),
        (["--ops", "rms_norm"], "give --command"),
        (["--command", "true"], "give --ops"),
        (["--command", "true", "--ops", "rms_nrm"], "Did you mean"),
        (["--command", "true", "--ops", "rms_norm", "--budget", "soon"], "is no duration"),
        (["--agent", "codx", "--ops", "rms_norm"], "codex"),
        (["--agent", "openai", "--ops", "rms_norm"], "needs --agent-option model=VALUE"),
        (["--command", "true", "--ops", "rms_norm", "--mode", "both"], "sequential"),
        (["--command", "true", "--ops", "rms_norm", "--case", "nothing"], "nothing"),
        (["--command", "true", "--ops", "rms_norm", "--env", "NOT_SET_HERE"], "this variable is not set"),
        (
            ["--command", "true", "--ops", "rms_norm", "--final", ","],
            "names no source: give some of captured",
        ),
        (["--command", "true", "--ops", "rms_norm", "--against", "vllm"], "production"),
        (["--command", "true", "--ops", "rms_norm", "--suffix", "../mine"], "at most 64 letters"),
        (["--command", "true", "--ops", "rms_norm", "--suffix", "a" * 300], "at most 64 letters"),
        (["--command", "true", "--ops", "rms_norm", "--suffix", "_2"], "the first is a letter or a digit"),
        (["--command", "true", "--ops", "rms_norm", "--begin", "/no/such"], "there is no file for rms_norm"),
        (["--command", "true", "--ops", "rms_norm", "--readable", "/no/such"], "there is no such file"),
        (["--command", "true", "--ops", "rms_norm", "--tokens", "0"], "--tokens 0: must be at least 1"),
        (["--command", "true", "--ops", "rms_norm", "--level", "9"], "9"),
        (["--command", "true" + " " * 40000, "--ops", "rms_norm"], "put them into a script"),
        (["--command", "true " + "é" * 6000, "--ops", "rms_norm"], "have 36"),  # six bytes each in JSON
    ],
)
def test_bad_options_are_errors_of_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fk_bench.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["agent-loop", *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "70000"], "--port 70000: give a number from 1 to 65535"),
        (["--port", "-1"], "--port: expected a number of 0 or more, got -1"),
        (["--final", ""], "names no source: give some of captured"),
        (["--against", "eager"], "reference"),
        (["--suffix", "a/b"], "at most 64 letters"),
        (["--attempts", "0"], "--attempts 0: must be at least 1"),
    ],
)
def test_bad_options_of_the_server_are_errors_of_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fk_bench.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["mcp", "--ops", "rms_norm", *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_command_with_a_file_of_this_folder_says_how_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fk_bench.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuner.py").touch()
    with pytest.raises(SystemExit) as ended:
        main(["agent-loop", "--command", f"python -c {'x' * 999} tuner.py --fast", "--ops", "rms_norm"])
    assert ended.value.code == 2
    assert f"name {tmp_path / 'tuner.py'}, and give --readable tuner.py" in capsys.readouterr().err
