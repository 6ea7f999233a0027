"""serve-compare from the command line against real server processes (stubs that speak the protocol)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fk_bench.core.rows import Row, read
from fk_bench.serving import options
from fk_bench.serving.process import free_port
from support.commands import BIN, fk_bench, last_json
from support.live import wait_for
from support.serving.attached import wait_for_port

SMALL = (
    "--rounds",
    "2",
    "--concurrency",
    "1,4",
    "--num-prompts",
    "2,6",
    "--input-len",
    "9",
    "--output-len",
    "5",
    "--agreement-prompts",
    "2",
    "--agreement-len",
    "4",
    "--ready-timeout",
    "120",
    "--resident",  # the default follows the free memory, which other tests take, too
    "5",
)


@pytest.fixture
def compare(words_model: Path, stub_python: Path, tmp_path: Path):
    """compare(lanes, *more) -> the finished process; every lane's interpreter is the stub."""

    def run(lanes: str, *more: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        pythons = [x for h in ("vllm", "sglang", "fastkernels") for x in ("--python", f"{h}={stub_python}")]
        base = ("serve-compare", "--model", words_model, "--lanes", lanes, *pythons)
        out = () if "--resume" in more else ("--out", tmp_path / "run")
        return fk_bench(*base, *(() if "--resume" in more else SMALL), *out, *more, env=env)

    return run


def rounds(rows: list[Row]) -> list[tuple[str | None, str, int | None]]:
    return [(r.subject.lane, f"c={r.case['value']:g}", r.round) for r in rows if r.kind == "round"]


def test_whole_run(compare, tmp_path: Path) -> None:
    lanes, envs = "vllm,vllm+fk,sglang", ("--env", "vllm+fk:STUB_CALLS=7", "--env", "sglang:STUB_SHIFT=3")
    # On a busy machine the client would otherwise read several tokens at once, without time between them.
    done = compare(lanes, *envs, env={"STUB_DELAY": "0.02"})
    line = last_json(done)
    assert done.returncode == 0 and line["ok"], done.stderr
    assert (line["command"], line["at"]) == ("serve-compare", "c=4")
    by = {x["lane"]: x for x in line["lanes"]}
    assert list(by) == ["vllm", "vllm+fk", "sglang"]
    for lane in by.values():
        assert lane["output_tokens_per_s"] > 0 and lane["ttft_ms_p50"] > 0 and lane["tpot_ms_p50"] > 0
        assert (lane["status"], lane["self_agreement"]) == ("ok", 1.0)
    assert (by["vllm+fk"]["token_agreement"], by["vllm+fk"]["base"]) == (1.0, "vllm")
    # The stub shifts its second half
    assert (by["sglang"]["token_agreement"], by["sglang"]["base"]) == (0.5, "vllm")
    # 2 ranks; a counter is per op
    assert (by["vllm+fk"]["patched_modules"], by["vllm+fk"]["patched_calls"]) == (12, 14)
    assert by["vllm"]["patched_calls"] == 0
    rows, warnings = read(Path(line["rows"]))
    assert warnings == []
    lanes = ("vllm", "vllm+fk", "sglang")
    # A B C A B C
    assert rounds(rows) == [(lane, level, r) for level in ("c=1", "c=4") for r in (0, 1) for lane in lanes]
    (first,) = {r.case["seed"] for r in rows if r.kind == "round" and r.round == 0}
    assert {r.case["seed"] for r in rows if r.kind == "round" and r.round == 1} == {first + 1}
    assert Path(line["report"]).stat().st_size > 1_000_000
    command = (tmp_path / "run/servers/vllm+fk/command.sh").read_text()
    assert "FASTKERNELS=1" in command and "vllm.entrypoints.cli.main serve" in command
    assert "FASTKERNELS=1" not in (tmp_path / "run/servers/vllm/command.sh").read_text()
    assert "stub: starting" in (tmp_path / "run/servers/sglang/server.log").read_text()


def test_json_flag_leaves_one_line(compare) -> None:
    done = compare("fastkernels", "--json")
    assert done.stdout.count("\n") == 1 and json.loads(done.stdout)["ok"]


def test_environment_does_not_patch_plain_lane(compare, tmp_path: Path) -> None:
    done = compare("vllm", env={"FASTKERNELS": "1", "STUB_CALLS": "5"})
    assert last_json(done)["lanes"][0]["patched_calls"] == 0


def test_dead_lane_fails_and_others_continue(compare, tmp_path: Path) -> None:
    done = compare("vllm,sglang", "--env", "sglang:STUB_DIE_AT=4")
    line = last_json(done)
    assert done.returncode == 1 and not line["ok"]
    by = {x["lane"]: x for x in line["lanes"]}
    assert by["vllm"]["status"] == "ok" and by["vllm"]["output_tokens_per_s"] > 0
    assert by["sglang"]["status"] == "died"
    rows, _ = read(Path(line["rows"]))
    failed = [r for r in rows if r.status.value == "died"]
    assert {r.kind for r in failed} == {"round", "lane"}
    assert all("exit status 3" in r.reason and "something terrible happened" in r.reason for r in failed)
    assert "something terrible" in Path(line["report"]).read_text()


def test_server_that_dies_at_start_is_reported_at_once(compare) -> None:
    start = time.monotonic()
    done = compare("vllm,sglang", "--env", "sglang:STUB_CRASH=1")
    assert time.monotonic() - start < 110  # before --ready-timeout
    line = last_json(done)
    assert [x["status"] for x in line["lanes"]] == ["ok", "died"]
    assert "out of stubs" in done.stderr
    page = Path(line["report"]).read_text()  # its lane has the first row, and is not the baseline
    assert "<h2>sglang against vllm</h2>" in page and "no load was measured on both" in page


def test_server_not_ready_in_time(compare) -> None:
    done = compare("vllm", "--env", "vllm:STUB_NEVER_READY=1", "--ready-timeout", "1")
    line = last_json(done)
    assert done.returncode == 1 and line["lanes"][0]["status"] == "timeout"
    assert "not ready after 1 s" in done.stderr and "stub: starting" in done.stderr


@pytest.mark.slow
def test_servers_start_together(compare) -> None:
    """The second server is ready while the first is still awaited; a failure affects only its own lane."""
    never = ("--env", "vllm:STUB_NEVER_READY=1", "--ready-timeout", "10")
    line = last_json(compare("vllm,sglang", "--together", "--resident", "2", *never))
    assert [x["status"] for x in line["lanes"]] == ["timeout", "ok"]
    lanes = {r.subject.lane: r for r in read(Path(line["rows"]))[0] if r.kind == "lane"}
    assert lanes["sglang"].case["started_with"] == ["vllm"]
    assert lanes["sglang"].metrics["ready_s"] >= 10


def test_patched_lane_without_calls_fails(compare) -> None:
    line = last_json(compare("vllm,vllm+fk", "--env", "vllm+fk:STUB_CALLS=0"))
    assert not line["ok"]
    assert line["lanes"][1]["status"] == "failed" and "no call was counted" in line["lanes"][1]["reason"]


def test_patched_lane_with_other_tokens_is_wrong(compare) -> None:
    more = ("--env", "vllm+fk:STUB_CALLS=1", "--env", "vllm+fk:STUB_SHIFT=1", "--min-agreement", "0.9")
    line = last_json(compare("vllm,vllm+fk", *more))
    assert not line["ok"] and line["lanes"][1]["status"] == "wrong"


def test_outputs_of_other_length_are_invalid(compare) -> None:
    line = last_json(compare("vllm", "--env", "vllm:STUB_SHORT=1"))
    assert not line["ok"] and line["lanes"][0]["status"] == "invalid"
    assert line["lanes"][0]["output_tokens_per_s"] is None
    assert "4 tokens instead of 5" in line["lanes"][0]["reason"]


def test_resume_measures_missing_rounds(compare, tmp_path: Path) -> None:
    first = compare("vllm,sglang", "--env", "sglang:STUB_DIE_AT=6")
    assert first.returncode == 1
    file = tmp_path / "run/rows.jsonl"
    before, _ = read(file)
    done_before = {
        k for k, r in zip(rounds(before), [r for r in before if r.kind == "round"], strict=True) if r.metrics
    }
    with file.open("a") as f:
        f.write('{"schema": "fastkernels.row/1", "run_')
    second = fk_bench("serve-compare", "--resume", tmp_path / "run", "--env", "sglang:STUB_DIE_AT=-1")
    line = last_json(second)
    assert second.returncode == 0 and line["ok"], second.stderr
    assert "half-written line, skipped" in second.stderr
    after, warnings = read(file)
    assert len(warnings) == 1
    new = rounds(after)[len(rounds(before)) :]
    assert new and not done_before & set(new)
    assert {lane for lane, _, _ in new} == {"sglang"}  # vllm was done
    ok = {k for k, r in zip(rounds(after), [r for r in after if r.kind == "round"], strict=True) if r.metrics}
    assert ok == {(lane, level, r) for lane in ("vllm", "sglang") for level in ("c=1", "c=4") for r in (0, 1)}
    assert len({r.run_id for r in after}) == 1
    other = fk_bench("serve-compare", "--resume", tmp_path / "run", "--input-len", "10")
    assert other.returncode == 2 and "--input-len was 9 in that run and is 10 now" in other.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signals_end_every_child_process(
    words_model: Path, stub_python: Path, tmp_path: Path, number: int
) -> None:
    child, requests = tmp_path / "child", tmp_path / "requests"
    command = [
        str(BIN),
        "serve-compare",
        "--model",
        str(words_model),
        "--lanes",
        "vllm,sglang",
        "--python",
        f"vllm={stub_python}",
        "--python",
        f"sglang={stub_python}",
        *SMALL,
        "--num-prompts",
        "500",
        "--env",
        f"sglang:STUB_CHILD={child}",
        "--env",
        f"vllm:STUB_LOG={requests}",
        "--out",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        rows = tmp_path / "run/servers/sglang/server.log"
        wait_for(lambda: child.exists() and child.read_text() and rows.exists(), 120)
        mine = psutil.Process(process.pid).children(recursive=True)
        assert len(mine) >= 3 and int(child.read_text()) in {p.pid for p in mine}
        wait_for(lambda: requests.exists() and "/v1/completions" in requests.read_text(), 120)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    line = json.loads(out.splitlines()[-1])
    assert not line["ok"] and "--resume" in line["error"]
    _, alive = psutil.wait_procs(mine, timeout=30)
    assert not alive, [p.cmdline() for p in alive]
    lanes = [r for r in read(tmp_path / "run/rows.jsonl")[0] if r.kind == "lane"]
    assert [(r.subject.lane, r.status) for r in lanes] == [("vllm", "skipped"), ("sglang", "skipped")]
    assert all("interrupted" in r.reason and "ready_s" in r.metrics for r in lanes)


def test_attach(words_model: Path, stub_python: Path, tmp_path: Path) -> None:
    port = free_port()
    server = subprocess.Popen([str(stub_python), "-m", "x", "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        wait_for_port(port, server)
        done = fk_bench(
            "serve-compare",
            "--model",
            words_model,
            "--lanes",
            "vllm",
            "--attach",
            f"vllm=http://127.0.0.1:{port}",
            *SMALL,
            "--rate",
            "200",
            "--num-prompts",
            "4",
            *("--burstiness", "2", "--prefix-len", "6", "--turns", "2", "--seed", "3", "--no-flush"),
            "--slo",
            "ttft:5000,tpot:500",
            "--out",
            tmp_path / "run",
        )
        assert server.poll() is None  # an attached server is not ended
    finally:
        server.kill()
        server.wait()
    line = last_json(done)
    assert done.returncode == 0 and line["ok"], done.stderr
    rows, _ = read(Path(line["rows"]))
    rate = next(r for r in rows if r.kind == "round" and r.case["load"] == "rate")
    assert (rate.case["burstiness"], rate.case["prefix_len"], rate.case["turns"]) == (2, 6, 2)
    assert rate.case["seed"] == 3 and rate.metrics["requests"] == 8 and "flushed_by" not in rate.case
    assert rate.metrics["goodput_requests_per_s"] == pytest.approx(rate.metrics["requests_per_s"])
    gone = fk_bench(
        "serve-compare",
        "--model",
        words_model,
        "--lanes",
        "vllm",
        "--attach",
        f"vllm=http://127.0.0.1:{port}",
        *SMALL,
        "--out",
        tmp_path / "other",
    )
    assert gone.returncode == 1 and "does not answer" in gone.stderr


def test_port_in_use(compare) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        done = compare("vllm", "--port", str(port))
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr and last_json(done)["ok"] is False


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lanes", "vlm"], "unknown lane 'vlm'. Known: vllm, vllm+fk, sglang, sglang+fk, fastkernels"),
        (["--lanes", "vllm,vllm"], "given twice"),
        (["--python", "vllm=/nowhere/python"], "no such interpreter: /nowhere/python"),
        (["--python", f"vllm={sys.executable}"], "vllm is not installed in"),
        (["--python", "vllm"], "expected LANE=VALUE, got 'vllm'"),
        (["--env", "vllm=K"], "expected LANE:KEY=VALUE"),
        (["--attach", "sglang=http://x"], "not one of --lanes"),
        (["--concurrency", "1,x"], "'x' is not a whole number"),
        (["--concurrency", "0"], "must be above 0"),
        (["--rounds", "0"], "--rounds must be 1 or more, got 0"),
        (["--num-prompts", "1,2,3"], "one for each of 2 loads, got 3"),
        (["--dataset", "none"], "unknown data set 'none'"),
        (["--base", "sglang"], "--base: lane 'sglang' is not one of"),
        (["--slo", "foo:1"], "--slo: 'foo' is not one of"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
        (["--model", "/nowhere"], "model '/nowhere' is neither a folder nor a hub id"),
        (["--server-args", 'vllm="'], "--server-args"),
        (["--frobnicate"], "--frobnicate"),
        (["--resume", "/nowhere"], "/nowhere is not a run of serve-compare"),
    ],
)
def test_usage_errors_are_one_line(
    args: list[str], message: str, words_model: Path, stub_python: Path, tmp_path: Path
) -> None:
    base = [
        "serve-compare",
        "--lanes",
        "vllm",
        "--model",
        str(words_model),
        "--python",
        f"vllm={stub_python}",
    ]
    out = [] if "--resume" in args else ["--out", str(tmp_path / "run")]
    done = fk_bench(*base, *out, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not re.search("Traceback", done.stderr)


def test_host_missing_from_its_environment(compare) -> None:
    done = compare("vllm", env={"STUB_MISSING": "vllm"})
    assert done.returncode == 2 and "lane vllm: vllm is not installed in" in done.stderr
    done = compare("vllm+fk", env={"STUB_MISSING": "plugin"})
    assert done.returncode == 2 and "fastkernels is not installed in" in done.stderr


def test_run_is_not_overwritten(compare, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rows.jsonl").write_text("")
    done = compare("vllm")
    assert done.returncode == 2 and "already holds a run" in done.stderr


def test_help_explains_metrics_and_groups_options() -> None:
    done = fk_bench("serve-compare", "--help", env={"COLUMNS": "100"})
    assert done.returncode == 0
    for said in (
        "TTFT     time to first token",
        "TPOT     time per output token",
        "Example",
        "--lanes vllm,vllm+fk",
    ):
        assert said in done.stdout
    panels = re.findall(r"╭─ (.+?) ─+╮", done.stdout)
    groups = (
        options.Servers,
        options.Load,
        options.Arrivals,
        options.Prompts,
        options.Agreement,
        options.Output,
    )
    assert panels == ["Options", *(group.PANEL for group in groups)]
    own = done.stdout[done.stdout.index("─ Options") : done.stdout.index("─ Servers")]
    assert re.findall(r"--[\w-]+", own) == ["--help"]  # every other option is in a group


def test_unknown_command_and_help() -> None:
    done = fk_bench("serve-compar")
    assert done.returncode == 2 and "Did you mean 'serve-compare'?" in done.stderr
    before = os.times()
    done = fk_bench("--help")
    assert done.returncode == 0 and "serve-compare" in done.stdout
    assert os.times().children_user - before.children_user < 3
    code = "import sys\nfrom fk_bench.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'plotly', 'transformers', 'vllm', 'pydantic') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert shown.stdout.splitlines()[-1] == "[]"
