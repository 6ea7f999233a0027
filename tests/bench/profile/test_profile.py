"""Profiles: torch's profiler runs here; what ncu and nsys write is read from hand-made exports in their format."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fk_bench.agents import session
from fk_bench.core.rows import Machine, Row, Subject, append, read
from fk_bench.core.small_model import small_model
from fk_bench.profile import command, judged, ncu, nsys, torch_tool
from fk_bench.profile.data import Span, profile_of
from support.commands import fk_bench, fk_bench_here, last_json

# Hand-made, not recorded: the columns are those of `ncu --csv --page raw --set full`, the second line has their units.
NCU = """==PROF== Connected to process 4711
==PROF== Disconnected from process 4711
"ID","Process ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","sm__warps_active.avg.pct_of_peak_sustained_active",\
"launch__registers_per_thread","launch__shared_mem_per_block_static","launch__shared_mem_per_block_dynamic",\
"launch__occupancy_limit_registers","launch__occupancy_limit_shared_mem","launch__occupancy_limit_warps",\
"smsp__inst_executed_op_local_ld.sum","smsp__inst_executed_op_local_st.sum",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","","","ns","%","%","%","register/thread","Kbyte/block","Kbyte/block","block","block","block","inst","inst","inst","inst","inst"
"0","4711","rms_norm_kernel","2,000","60.0","0","80.0","40","0","2.048","6","16","8","0","0","12.5","0.5","3.25"
"1","4711","gemm_kernel","10,000","30.5","71.5","25.0","168","0","1.024","1","2","4","64","32","1.5","4.5","0"
"2","4711","rms_norm_kernel","3,000","70.0","0","84.0","40","0","2.048","6","16","8","0","0","13.5","0.5","3.25"
"""


def test_counters_of_each_kernel_are_read():
    found = ncu.parse(NCU, repeats=1)
    gemm, norm = found.kernels
    assert (gemm.name, gemm.launches, gemm.time_us) == ("gemm_kernel", 1, 10.0)
    assert (gemm.tensor_pct, gemm.memory_pct, gemm.registers, gemm.spills) == (71.5, 30.5, 168, 96)
    assert gemm.limit == "registers" and gemm.stalls == "barrier 4.5, long_scoreboard 1.5"
    assert (norm.launches, norm.time_us, norm.memory_pct, norm.occupancy_pct) == (2, 5.0, 65.0, 82.0)
    assert norm.stalls == "long_scoreboard 13.0, wait 3.2" and norm.spills == 0 and norm.shared_kib == 2.0
    assert found.busy_us == 15.0 and ncu.parse(NCU, repeats=2).kernels[0].time_us == 5.0
    with pytest.raises(ValueError, match="measured no kernel"):
        ncu.parse("==ERROR== no kernels were profiled\n", 1)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Hand-made, not recorded: the tables and columns of `nsys export --type sqlite` that are read. Times in ns."""
    file = tmp_path / "made.sqlite"
    base = sqlite3.connect(file)
    base.executescript(
        """
        create table StringIds (id integer, value text);
        create table CUPTI_ACTIVITY_KIND_RUNTIME (start integer, end integer, globalTid integer, correlationId integer);
        create table CUPTI_ACTIVITY_KIND_KERNEL (start integer, end integer, shortName integer, correlationId integer);
        create table CUPTI_ACTIVITY_KIND_MEMCPY (start integer, end integer, correlationId integer);
        create table NVTX_EVENTS (start integer, end integer, text text, textId integer, globalTid integer);
        insert into StringIds values (1, 'norm_kernel'), (2, 'gemm_kernel'), (3, 'fastkernels/linear');
        insert into NVTX_EVENTS values (100, 200, 'fastkernels/rms_norm', null, 7), (300, 500, null, 3, 7),
            (320, 400, 'fastkernels/silu_and_mul', null, 7), (300, 500, 'fastkernels/other_thread', null, 8),
            (90, 900, 'step', null, 7), (950, null, 'open', null, 7);
        insert into CUPTI_ACTIVITY_KIND_RUNTIME values (150, 160, 7, 11), (350, 360, 7, 12), (600, 610, 7, 13);
        insert into CUPTI_ACTIVITY_KIND_KERNEL values (1000, 3000, 1, 11), (4000, 9000, 2, 12);
        insert into CUPTI_ACTIVITY_KIND_MEMCPY values (8500, 10000, 13);
        """
    )
    base.commit()
    base.close()
    return file


def test_timeline_of_an_export_is_read_by_op(export):
    found = nsys.read(export, repeats=1)
    assert [(s.name, s.op, s.start_us, s.end_us) for s in found.spans] == [
        ("norm_kernel", "rms_norm", 0.0, 2.0), ("gemm_kernel", "linear", 3.0, 8.0), ("memcpy", "", 7.5, 9.0),
    ]  # fmt: skip
    assert (found.wall_us, found.busy_us, found.gaps, found.largest_gap_us) == (9.0, 8.0, 1, 1.0)
    assert {o.op: o.time_us for o in found.ops} == {"rms_norm": 2.0, "linear": 5.0}


def test_file_without_kernels_is_named(tmp_path, export):
    base = sqlite3.connect(export)
    base.execute("drop table CUPTI_ACTIVITY_KIND_KERNEL")
    base.commit()
    base.close()
    (tmp_path / "text.sqlite").write_text(
        "no data base at all, and long enough to be read as a header of one" * 20
    )
    for file, message in (
        (export, "recorded no kernel"), (tmp_path / "text.sqlite", "is no export"), (tmp_path / "none", "wrote no"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            nsys.read(file, 1)


def test_gaps_are_per_repeat_and_overlaps_count_once():
    spans = [
        Span("a", 10, 14, "x"),
        Span("b", 12, 15, "x"),
        Span("a", 20, 24, "y"),
        Span("a", 24, 25, "y", 0),
    ]
    found = profile_of("torch", "cuda", spans, repeats=2)
    assert (found.wall_us, found.busy_us, found.gaps_us, found.gaps, found.largest_gap_us) == (
        7.5,
        5,
        2.5,
        0.5,
        5,
    )
    assert [(k.name, k.launches, k.time_us) for k in found.kernels] == [("a", 1.0, 4.5), ("b", 0.5, 1.5)]
    assert found.launches == 1.5


def test_kernels_belong_to_the_op_that_launched_them():
    """Hand-made events with the methods of Kineto's: this machine has no GPU."""

    def event(name: str, kind: str, start: int, duration: int, linked: int) -> SimpleNamespace:
        values = {"name": name, "device_type": getattr(torch.autograd.DeviceType, kind), "start_ns": start,
                  "duration_ns": duration, "linked_correlation_id": linked}  # fmt: skip
        return SimpleNamespace(**{k: (lambda v=v: v) for k, v in values.items()})

    events = [
        event("aten::mm", "CPU", 0, 9, 0),
        event("gemm", "CUDA", 5000, 2000, 3),
        event("fill", "CUDA", 9000, 1000, 4),
    ]
    found = list(torch_tool.device_spans(events, {3: "linear"}))
    assert found == [Span("gemm", 5.0, 7.0, "linear"), Span("fill", 9.0, 10.0, "")]


def test_op_is_profiled_with_a_page_and_rows(tmp_path):
    done = fk_bench_here(
        "profile", "rms_norm", "--case", "odd_64", "--device", "cpu", "--out", tmp_path / "run"
    )
    assert done.returncode == 2 and "no case of rms_norm is named odd_64" in done.stderr
    done = fk_bench_here(
        "profile", "rms_norm", "--device", "cpu", "--repeats", "4", "--out", tmp_path / "run"
    )
    found = last_json(done)
    own = next(k for k in found["kernels"] if k["name"] == "fastkernels/rms_norm")
    assert found["tool"] == "torch" and "ncu needs a GPU" in found["remark"] and own["launches"] == 1
    assert 0 < own["time_us"] <= found["busy_us"] <= found["wall_us"] and "memory_pct" not in found
    rows, warnings = read(tmp_path / "run" / "rows.jsonl")
    assert not warnings and {r.kind for r in rows} == {"profile", "kernel", "op"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "not a speed claim" in page and "Operators by time" in page and "plotly" in page


def test_candidate_is_profiled_instead_of_our_kernel(tmp_path):
    file = tmp_path / "silu_and_mul.py"
    file.write_text(
        "import torch\n\n\ndef silu_and_mul(x):\n    d = x.shape[-1] // 2\n"
        "    return torch.nn.functional.silu(x[..., :d]) * x[..., d:]\n"
    )
    from fastkernels.core import registry

    op = registry.get("silu_and_mul").op
    try:
        found = last_json(
            fk_bench_here("profile", "silu_and_mul", "--candidate", file, "--out", tmp_path / "run")
        )
    finally:
        op.set_candidate(None)
    assert {"aten::silu", "aten::mul"} <= {k["name"] for k in found["kernels"]}
    assert [o["op"] for o in found["ops"]] == ["silu_and_mul"] and found["ops"][0]["calls"] == 1


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A set whose activation says in a range of its own that it ran."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "silu_and_mul.py").write_text(
        "import torch\n\n\ndef silu_and_mul(x):\n    d = x.shape[-1] // 2\n"
        "    return torch.ops.aten.silu_(x[..., :d].clone()) * x[..., d:]\n"
    )
    return folder


def test_set_of_candidates_is_profiled_in_a_model(tmp_path: Path, mine: Path) -> None:
    words = ("profile", small_model(), "--context", 17, "--repeats", 2, "--device", "cpu", "--json")
    stock = last_json(fk_bench("profile", *words[1:], "--out", tmp_path / "stock"))
    found = last_json(fk_bench(*words, "--set", f"mine={mine}", "--out", tmp_path / "run"))
    assert "aten::silu_" in {k["name"] for k in found["kernels"]}
    assert "aten::silu_" not in {k["name"] for k in stock["kernels"]}
    rows, _ = read(tmp_path / "run" / "rows.jsonl")
    assert rows[0].subject.candidate == "mine" and rows[0].case["candidates"] == ["silu_and_mul"]
    files = {r.subject.op: r.subject.candidate for r in rows if r.kind == "op"}
    assert files["silu_and_mul"] == str(mine / "silu_and_mul.py") and files["rms_norm"] is None


def test_set_of_candidates_is_profiled_for_an_op(tmp_path: Path, mine: Path) -> None:
    words = ("--device", "cpu", "--set", f"mine={mine}", "--json", "--out", tmp_path / "run")
    found = last_json(fk_bench("profile", "silu_and_mul", *words))
    assert "aten::silu_" in {k["name"] for k in found["kernels"]}
    refused = fk_bench("profile", "rms_norm", *words)
    assert refused.returncode == 2 and "the set mine has no rms_norm.py, only silu_and_mul" in refused.stderr


@pytest.mark.parametrize("phase", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_step_of_a_model_lists_each_op_with_its_floor(tmp_path, phase):
    model = small_model()
    words = ("--phase", phase, "--context", 17, "--repeats", 2, "--batch", 2, "--device", "cpu")
    found = last_json(fk_bench_here("profile", model, *words, "--out", tmp_path / "run", "--json"))
    ops = {o["op"]: o for o in found["ops"]}
    attention = "attention_decode" if phase == "decode" else "attention_prefill"
    assert ops["rms_norm"]["calls"] == 5 and ops["linear"]["calls"] == 8 and ops[attention]["calls"] == 2
    assert all(o["time_us"] > 0 and o["floor_us"] > 0 for o in ops.values())
    assert found["floors_of"] == "H200" and found["gaps"] > 0
    assert "Ops of the step" in (tmp_path / "run" / "report.html").read_text()


def test_tool_that_is_missing_or_forbidden_is_replaced(monkeypatch, tmp_path):
    """A program stands for ncu, so that its output and exit are those of a machine with a GPU."""
    target = command.Target("rms_norm", "decode_1", repeats=1, device="cuda")
    monkeypatch.setattr(command.torch_tool, "run", lambda target: profile_of("torch", "cuda", [], 1))
    monkeypatch.setenv("PATH", str(tmp_path))
    made, remark = command._profiled(target, "auto", "full", tmp_path)
    assert made.tool == "torch" and remark.startswith(
        "ncu is not installed: torch's profiler is used instead"
    )
    (tmp_path / "out.csv").write_text(NCU)
    tool = tmp_path / "ncu"
    for text, want in (
        (f"#!/bin/sh\n/bin/cat {tmp_path / 'out.csv'}\n", ""),
        ("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n", "no permission for the GPU's counters"),
        ("#!/bin/sh\necho broken\n", "ncu measured no kernel"),
    ):  # fmt: skip
        tool.write_text(text)
        tool.chmod(0o755)
        made, remark = command._profiled(target, "ncu", "full", tmp_path)
        assert (made.tool == "ncu") == (not want) and want in remark
        assert (tmp_path / "ncu.log").exists()


def row(**metrics: float) -> Row:
    return Row(
        run_id="r", command="kernels", machine=Machine(cpu="cpu"), subject=Subject(op="rms_norm"), baseline="vllm",
        case={"kind": "case", "name": "decode_1", "kernels": ["k"]}, metrics=metrics,
    )  # fmt: skip


def test_run_of_the_judge_has_the_profile_that_agents_get(tmp_path):
    append(
        tmp_path / "rows.jsonl", [row(time_us_p50=4.0, baseline_us_p50=6.0, speedup=1.5, gb_per_s=9.0), row()]
    )
    found = last_json(fk_bench_here("profile", tmp_path))
    (case,) = found["cases"]
    assert case == judged.profile(read(tmp_path / "rows.jsonl")[0])[0] and session.judged is judged
    assert (case["time_us"], case["speedup"], case["gb_per_s"], case["kernels"]) == (4.0, 1.5, 9.0, ["k"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rms_norm", "--tool", "perf"], "--tool 'perf' is not one of auto, torch, ncu, nsys"),
        (["rms_norm", "--sections", "all"], "--sections 'all' is not one of"),
        (["rms_norm", "--set", "all"], "--set 'all': give NAME=DIR"),
        (["rms_norm", "--set", "mine=x", "--candidate", "y.py"], "--set and --candidate exclude each other"),
        (["rms_norm", "--set", "mine=no-such-folder"], "no-such-folder"),
        (["rms_norm", "--repeats", "0"], "--repeats 0: 0 is less than 1"),
        (["rms_norm", "--device", "cuda"], "torch sees no GPU here"),
        (["no-such-thing"], "no-such-thing"),
        (["llama-3.1-8b", "--case", "x"], "--case and --candidate are for an op"),
        (["llama-3.1-8b", "--tool", "ncu"], "--tool ncu is for an op"),
        (["llama-3.1-8b", "--device", "cpu"], "GiB of weights: on a CPU give a folder with a small model"),
    ],
)
def test_bad_input_ends_in_one_line(tmp_path, words, message):
    if torch.cuda.is_available() and "cuda" in words:
        pytest.skip("there is a GPU")
    found = fk_bench_here("profile", *words, "--out", tmp_path / "run")
    assert found.returncode == 2 and message in found.stderr and "Traceback" not in found.stderr
    assert found.stderr.count("\n") == 1
