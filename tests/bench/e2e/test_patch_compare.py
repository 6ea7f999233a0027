"""`fk-bench patch-compare`: metrics of arrivals, pairs of states, and a real vLLM that is patched and undone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import Row, Status, Subject, append, read
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.e2e import patch_compare, sharing
from fk_bench.e2e.comparison import Comparison, Extent, repeats_of
from fk_bench.e2e.loads import Load
from fk_bench.e2e.ratios import COMMAND, over_loads, summary
from fk_bench.e2e.runs import INCOMPLETE, metrics_of
from fk_bench.offline.host import make_row
from support.commands import fk_bench, fk_bench_here, last_json

ROOT = Path(__file__).resolve().parents[3]
LOAD = Load(2, 4, 3)


def test_metrics_are_those_of_the_arrivals() -> None:
    metrics, problem = metrics_of([[0.1, 0.2, 0.3], [0.2, 0.3, 0.5]], LOAD)
    assert not problem
    assert metrics["ttft_ms"] == pytest.approx(150) and metrics["tpot_ms"] == pytest.approx(125)
    assert metrics["output_tokens_per_s"] == pytest.approx(12)
    assert metrics["step_ms_max"] == pytest.approx(100)  # both requests decode from 0.2 to 0.3


def test_missing_token_is_noticed() -> None:
    assert "not all tokens" in metrics_of([[0.1, 0.2, 0.3], [0.2, 0.3]], LOAD)[1]
    assert metrics_of([[0.1], []], LOAD) == ({}, INCOMPLETE)


@pytest.mark.parametrize("text", ["8", "0x5+5", "8x512@90", "8x512+-1", "ax1+1"])
def test_malformed_load_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="8x512"):
        Load.parse(text)


def run(block: int, number: int, tpot: float, again: bool = False, load: Load = LOAD) -> Row:
    state = ("stock", "patched")[block % 2]
    case: dict[str, Any] = {"load": str(load), "block": block, "run": number, "state": state}
    metrics = {"tpot_ms": tpot, "first_tokens_s": tpot, "output_tokens_per_s": 1000 / tpot}
    case |= {"again": True} if again else {}
    return make_row("vllm", case, metrics, command=COMMAND, subject=Subject(model="m", host="vllm"))


def test_patched_runs_are_compared_with_both_neighbours() -> None:
    """A machine that becomes slower by the hour changes no ratio."""
    drift = [1.0, 1.1, 1.2, 1.3, 1.4]
    made = [
        run(block, n, slow * (1.0 if block % 2 else 2.0))
        for block, slow in enumerate(drift)
        for n in (-1, 0, 1)
    ]
    (line,) = summary(made)
    assert line["tpot_ms_ratio"] == pytest.approx(2.0)
    assert line["tpot_ms_ratio_ci95"] == pytest.approx((2.0, 2.0))
    assert line["tpot_ms_noise"] == pytest.approx((2.0 + 2.4) / (2.4 + 2.8))


def test_first_runs_are_not_compared() -> None:
    (line,) = summary([run(b, n, 50.0 if n < 0 else 1.0) for b in range(3) for n in (-1, 0, 1)])
    assert line["tpot_ms_ratio"] == 1.0 and line["patched_first_run_ratio"] == 50.0


def test_load_measured_again_counts_its_second_cycle() -> None:
    """Block 2 is also the stock state before the second cycle."""
    patched = {1: 2.0, 3: 0.5}
    made = [run(b, n, patched.get(b, 1.0), again=b > 2) for b in range(5) for n in (-1, 0, 1)]
    (line,) = summary(made)
    assert line["output_tokens_per_s_ratio"] == pytest.approx(2.0)
    assert line["output_tokens_per_s_first_ratio"] == pytest.approx(0.5)
    assert line["ratios"] == pytest.approx([2.0, 2.0])


def test_throughput_over_loads_is_a_geometric_mean() -> None:
    other = Load(1, 4, 3)
    made = [run(b, n, 0.5 if b == 1 else 1.0) for b in range(3) for n in (0, 1)]
    made += [run(b, n, (2.0, 2.5)[n] if b == 1 else 1.0, load=other) for b in range(3) for n in (0, 1)]
    (line,) = over_loads(summary(made))
    assert line["output_ratio"] == pytest.approx((2.0 * 2.0 / (2.0 * 2.5) ** 0.5 * 0.5**0.5) ** 0.5, rel=0.2)
    low, high = line["output_ratio_ci95"]
    assert low < line["output_ratio"] < high and line["least"] == pytest.approx(0.45, rel=0.02)


def test_rows_are_shown_without_a_model(tmp_path: Path) -> None:
    """Those of the last kind that was measured."""
    made = [run(b, n, 0.5 if b == 1 else 1.0) for b in range(3) for n in (0, 1)]
    for row in made:
        row.case["no_table"] = True
    append(tmp_path / "rows.jsonl", [run(0, 0, 9.0), *made])
    done = fk_bench_here(COMMAND, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = last_json(done)["results"]
    assert line["tpot_ms_ratio"] == pytest.approx(2.0) and line["stock_tpot_ms"] == 1.0
    assert "geometric mean" in done.stdout


def test_rows_have_the_phases_of_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    class Process:
        def tell(self, work: Any) -> None:
            assert work == {"patch": None}

        def answer(self, timeout: float) -> Any:
            return {
                "seconds": 27.0,
                "phases": {"compile model": 20.0, "rest": 0.01},
                "memory": {"reserved": 9.0},
            }

    one: Any = object.__new__(Comparison)
    one.process, one.before, one.ops, one.model, one.timeout = Process(), False, None, "m", 1.0
    one.took = {}
    found = one._enter("patched", 1)
    assert found == {
        "change_s": 27.0, "change_s compile model": 20.0, "change_s rest": 0.01, "memory_gib reserved": 9.0,
    }  # fmt: skip
    assert capsys.readouterr().err == "m: patched after 27.0 s (20.0 s: compile model 20.0)\n"


def test_short_loads_are_repeated_more_often() -> None:
    short, long = Load(1, 600, 8), Load(64, 512, 64)
    took = {short: 0.06, long: 2.5}
    extent = Extent([short, long], cycles=1, repeats=3, load_seconds=1.0)
    assert repeats_of(extent, 1.0, took) == {short: 17, long: 3}
    assert repeats_of(replace(extent, seconds=9.0), 1.0, took) == {short: 17, long: 2}  # two at least
    assert repeats_of(replace(extent, load_seconds=60.0), 1.0, took) == {short: 20, long: 20}
    assert repeats_of(replace(extent, load_seconds=0.0), 1.0, took) == {short: 3, long: 3}


def test_unknown_host_and_bad_arguments_are_refused(tmp_path: Path) -> None:
    for args, message in (
        (["--loads", ","], "has no load"),
        (["--timeout", "-5"], "--timeout: expected seconds above 0, got -5"),
        (["--tensor-parallel", "0"], "must be at least 1"),
        (["--load-format", "zip"], "'zip': give dummy or auto"),
        (["--ops", "rms_nrm"], "unknown op 'rms_nrm'"),
        (["--python", "/no/python"], "no such interpreter: /no/python"),
        (["--python", sys.executable], "vllm is not installed in"),
        (["--host", "ollama"], "vllm or sglang"),
        (["--loads", "8"], "8x512+128"),
        (["--engine-args", "[1]"], "object"),
        (["--before-construction", "--side-by-side", "2"], "--side-by-side"),
        (["--tensor-parallel", "2", "--side-by-side", "2"], "--side-by-side"),
    ):
        done = fk_bench_here(COMMAND, "qwen2.5-0.5b", *args, "--out", tmp_path / "run")
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    done = fk_bench_here(COMMAND, "--out", tmp_path / "run")
    assert done.returncode == 2 and "no such run: " in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.fixture
def without_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose starts fail: vLLM is not in this environment."""
    monkeypatch.setattr(patch_compare, "_check_installed", lambda host, python: None)


def test_unusable_models_and_folders_are_named(tmp_path: Path, without_host: None) -> None:
    (tmp_path / "file").touch()
    for model, says in (("nosuchmodel", "unknown model 'nosuchmodel'"), (tmp_path, "has no config.json")):
        done = fk_bench_here(COMMAND, "qwen2.5-0.5b", model, "--out", tmp_path / "run")
        assert done.returncode == 2 and says in done.stderr and says in last_json(done)["error"]
    assert not (tmp_path / "run").exists()  # refused before the first model
    done = fk_bench_here(COMMAND, "qwen2.5-0.5b", "--out", tmp_path / "file")
    assert done.returncode == 2 and f"--out {tmp_path / 'file'}: File exists" in done.stderr


def test_two_engines_that_do_not_fit_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_host: None
) -> None:
    monkeypatch.setattr(sharing, "capacity", lambda gpu: sharing.GIB)
    run = tmp_path / "run"
    done = fk_bench_here(COMMAND, "qwen2.5-0.5b", "--with-engine", "--loads", "8x512+8", "--out", run)
    assert done.returncode == 1 and "GiB of weights" in done.stderr and "smaller --loads" in done.stderr
    assert last_json(done)["failed"] == ["qwen2.5-0.5b"] and not list(run.glob("*.log"))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("before", [False, True])
def test_real_vllm_is_patched_and_undone_in_turn(tmp_path: Path, before: bool) -> None:
    from support.tiny import make_tiny_llama

    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-vllm: run `make setup`")
    model, out = make_tiny_llama(tmp_path / "tiny"), tmp_path / "run"
    command = [
        COMMAND, model, "--python", python, "--loads", "1x16+8,3x16+8", "--cycles", "1", "--repeats", "2",
        "--load-seconds", "0", "--load-format", "auto", "--ops", "rms_norm", *["--before-construction"] * before,
        "--out", out,
    ]  # fmt: skip
    done = fk_bench(*command, timeout=400)
    assert done.returncode == 0, done.stderr
    rows, _ = read(out / "rows.jsonl")
    undo = [] if before else ["undo"] * 3  # two loads, and both
    assert [r.case["state"] for r in rows] == [
        *["stock"] * 6, *["patched"] * 6, *["stock"] * 6, *undo, "end",
    ]  # fmt: skip
    changes = {name for r in rows for name in r.metrics if name.startswith("change_s")}
    assert changes >= (set() if before else {"change_s", "change_s swap modules", "change_s trial step"})
    assert bool(changes) is not before
    assert {(r["load"], r["tpot_ms_ratio"] > 0) for r in last_json(done)["results"]} == {
        ("1x16+8", True), ("3x16+8", True),
    }  # fmt: skip
    again = fk_bench(*command)  # shown from its rows
    assert again.returncode == 0 and len(read(out / "rows.jsonl")[0]) == len(rows)


@pytest.mark.slow
@pytest.mark.vllm
def test_ranks_of_vllm_are_compared_with_as_many_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.tiny import make_tiny_llama

    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-vllm: run `make setup`")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model, out = make_tiny_llama(tmp_path / "tiny"), tmp_path / "run"
    done = fk_bench(
        COMMAND, model, "--python", python, "--tensor-parallel", "2", "--with-engine", "--loads", "2x16+8", "--cycles",
        "1", "--repeats", "1", "--load-seconds", "0", "--load-format", "auto", "--ops", "rms_norm", "--out", out,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, _ = read(out / "rows.jsonl")
    assert {row.case["tensor_parallel"] for row in rows} == {2}
    assert {"stock", "patched", "fastkernels", "end"} < {row.case["state"] for row in rows}
    (line,) = last_json(done)["results"]
    assert line["tpot_ms_ratio"] > 0 and line["output_tokens_per_s_fastkernels_ratio"] > 0


@pytest.mark.slow
@pytest.mark.vllm
def test_models_share_a_machine_and_runs_continue(tmp_path: Path) -> None:
    """Two engines of vLLM and two of ours at once; the file keeps no row of a model that was cut off."""
    from support.tiny import make_tiny_llama

    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-vllm: run `make setup`")
    if sharing.capacity(gpu=False) < 4 * sharing.FIXED_CPU + sharing.GIB:  # they would run one after another
        pytest.skip("four engines at once need 18 GiB of free memory")
    first, second = (make_tiny_llama(tmp_path / name) for name in ("first", "second"))
    out = tmp_path / "run"
    command = [
        COMMAND, first, second, "--python", python, "--loads", "1x16+20,2x16+8", "--cycles", "1", "--repeats", "5",
        "--model-seconds", "0.1", "--load-seconds", "0", "--again", "100", "--load-format", "auto", "--ops", "rms_norm",
        "--with-engine", "--side-by-side", "2", "--no-table", "--out", out,
    ]  # fmt: skip
    done = fk_bench(*command, timeout=400)
    assert done.returncode == 0, done.stderr
    rows, _ = read(out / "rows.jsonl")
    assert {row.subject.model for row in rows} == {str(first), str(second)}
    for model, other in ((first, second), (second, first)):
        own = [row.case for row in rows if row.subject.model == str(model)]
        assert all(case["resident"] == [str(other)] and case["no_table"] for case in own)
        runs = {(c["block"], c["run"], c["state"]) for c in own if "run" in c}
        blocks = (
            (0, "stock"),
            (0, "fastkernels"),
            (1, "patched"),
            (2, "stock"),
            (3, "patched"),
            (4, "stock"),
        )
        assert {(block, run, state) for block, state in blocks for run in (-1, 0, 1)} < runs
        assert max(run for _, run, _ in runs) == 1  # the limit reduced the repeats
    results = last_json(done)["results"]
    assert len(results) == 4 and all(line["output_tokens_per_s_fastkernels_ratio"] > 0 for line in results)
    assert len(last_json(done)["over_loads"]) == 2 and "geometric mean" in done.stdout
    kept = [row for row in rows if row.subject.model == str(first)]
    half = [row for row in rows if row.subject.model == str(second)][:5]
    (out / "rows.jsonl").unlink()
    append(out / "rows.jsonl", [*kept, *half])
    again = fk_bench(*command, timeout=400)
    assert again.returncode == 0, again.stderr
    now, _ = read(out / "rows.jsonl")
    assert now[: len(kept)] == kept
    assert not {row.time for row in half} & {row.time for row in now[len(kept) :]}


def test_model_that_fails_next_to_another_is_tried_alone(tmp_path: Path, without_host: None) -> None:
    from support.tiny import make_tiny_llama

    models = [make_tiny_llama(tmp_path / name) for name in ("a", "b")]
    done = fk_bench_here(
        COMMAND, *models, "--python", sys.executable, "--load-format", "auto", "--side-by-side", "2",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("is tried again alone") == 2
    assert sorted(last_json(done)["failed"]) == sorted(map(str, models))


def test_rows_of_an_interpreter_that_fails_name_the_log(tmp_path: Path, without_host: None) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "tiny")
    done = fk_bench_here(
        COMMAND, model, "--python", sys.executable, "--load-format", "auto", "--out", tmp_path / "run"
    )
    assert done.returncode == 1 and "-vllm.log" in done.stderr
    assert last_json(done)["failed"] == [str(model)]


@pytest.mark.slow
@pytest.mark.vllm
def test_list_has_prompts_contexts_mixed_and_undo(tmp_path: Path) -> None:
    """Each model in a process of its own; one of them has a context that is too short."""
    from support.tiny import make_tiny_llama

    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-vllm: run `make setup`")
    short, model = (
        make_tiny_llama(tmp_path / "short", max_position_embeddings=200),
        make_tiny_llama(tmp_path / "m"),
    )
    loads = ("2x64+8", "2x256@100+40", "2x300@90+8", "2x32+40/3x64+4")
    command = [
        COMMAND, short, model, "--python", python, "--loads", ",".join(loads), "--alternations", "2", "--repeats", "2",
        "--load-seconds", "0", "--load-format", "auto", "--ops", "rms_norm", "--out", tmp_path / "run",
    ]  # fmt: skip
    done = fk_bench(*command, timeout=500)
    assert done.returncode == 1 and last_json(done)["failed"] == [str(short)]
    rows, _ = read(tmp_path / "run" / "rows.jsonl")
    (failed,) = [row for row in rows if row.subject.model == str(short)]
    assert (
        failed.status is Status.UNSUPPORTED
        and "has 296 tokens" in failed.reason
        and "has 200" in failed.reason
    )
    mine = [row for row in rows if row.subject.model == str(model)]
    assert all(row.status is Status.OK for row in mine) and mine[-1].case["state"] == "end"
    assert {"seconds start", "seconds changes", *(f"seconds {load}" for load in loads)} <= mine[
        -1
    ].metrics.keys()
    for row in mine:
        if row.case.get("run", -1) >= 0:
            assert ("input_tokens_per_s" in row.metrics) is (row.case["load"] in ("2x64+8", "2x300@90+8"))
            held = row.metrics.get("cached_tokens_per_prompt")
            assert (held is not None and held >= 64) is ("@" in row.case["load"]), (row.case, held)
    undo = [row for row in mine if row.case["state"] == "undo"]
    assert [row.case.get("load") for row in undo] == [*loads, None] and undo[-1].case["alternations"] == 2
    low, high = undo[-1].ci95["output_tokens_per_s_undo_ratio"]
    assert low < undo[-1].metrics["output_tokens_per_s_undo_ratio"] < high
    assert "stock after undo over before: " in done.stdout and "within 2% of 1" in done.stdout
    again = fk_bench(*command, timeout=100)  # only the failed model is tried again
    now, _ = read(tmp_path / "run" / "rows.jsonl")
    assert again.returncode == 1 and [row for row in now if row.subject.model == str(model)] == mine
