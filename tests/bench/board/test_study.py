"""Predicted and realized savings, from rows of the judge and of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fk_bench.board import study
from fk_bench.board.study import FASTER, NOT_RUN, SAME, SLOWER, WRONG, Timed
from fk_bench.cli import main
from fk_bench.core.rows import Machine, Row, Status, Subject
from fk_bench.evaluate.macro_eval import Item
from fk_bench.evaluate.run import results
from fk_bench.evaluate.run.results import Context
from fk_bench.evaluate.suites import load
from fk_bench.explain.cost_model import Call

SUITE = """
about = "One small model."
device = "cpu"
categories = ["text"]
[kernels]
sources = ["random"]
[workloads.chat]
kind = "text"
about = "four at once; one for the latency"
lengths = [[20, 8], [12, 16]]
throughput = 4
[models.tiny]
category = "text"
weights = "dummy"
[models.tiny.config]
model_type = "qwen3"
architectures = ["Qwen3ForCausalLM"]
vocab_size = 512
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 32
max_position_embeddings = 4096
tie_word_embeddings = false
[[items]]
model = "tiny"
workload = "chat"
host = "vllm"
minutes = 1
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(SUITE)
    return path


def main_status(words: list[str], status: int) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == status


def case(name: str, op: str, dims: dict[str, Any], moved: float, us: float, saved: float, **more: Any) -> Row:
    """A case of the judge that moves so many bytes in `us` microseconds, and saves `saved`."""
    metrics = {"time_us_p50": us, "baseline_us_p50": us + saved, "gb_per_s": moved / us * 1e-3}
    return Row(
        run_id="k", command="kernels", status=more.pop("status", Status.OK), metrics=metrics,
        subject=Subject(op=op, provider="candidate", candidate=f"out/adapted/{name}/{op}.py"),
        machine=Machine(gpu="NVIDIA H200", gpus=1, cpu="cpu", cores=8),
        case={"kind": "case", "name": f"b{moved:.0f}", "dims": dims}, **more,
    )  # fmt: skip


def item(digest: str, name: str, kept: list[str], latency: float | None = None, **more: Any) -> list[Row]:
    of = Context(
        f"run-{name}",
        "c",
        Machine(gpu="NVIDIA H200", gpus=1, cpu="cpu", cores=8),
        {},
        "mine",
        digest,
        {name: "f"},
    )
    i = Item("text", "tiny", "chat", "vllm")
    known = {"category": i.category, "workload": i.workload, "ranks": i.ranks, "level": i.level}
    subject = Subject(model="tiny", host="vllm")
    rounds = [
        of.row(
            name, {"kind": results.ROUND, "variant": "record", "phase": phase, **known}, subject, round=r,
            metrics={"baseline_output_tokens_per_s": rate + r, "set_output_tokens_per_s": rate},
        )
        for phase, rate in (("latency", 999.0), ("throughput", 3999.0)) for r in range(3)
    ]  # fmt: skip
    metrics, ci95 = {}, {}
    if latency is not None:
        metrics = {"throughput_speedup": 1.0, "latency_speedup": latency, "correctness": 1.0}
        ci95 = {"latency_speedup": (latency - 0.01, latency + 0.01), "throughput_speedup": (0.99, 1.01)}
    values = {
        "kind": results.ITEM,
        "variant": "record",
        **known,
        "kept": kept,
        "dropped": [],
        "unused": [],
        **more,
    }
    status = Status.OK if latency is not None else Status.FAILED
    return [*rounds, of.row(name, values, subject, status=status, metrics=metrics, ci95=ci95)]


def lines(path: Path, evaluated: list[Row], kernels: list[Row]) -> list[study.Line]:
    return study.lines_of(evaluated, load(str(path)), study.judged(kernels))


def test_prediction_is_calls_times_what_a_call_saves(suite: Path) -> None:
    digest = load(str(suite)).digest
    kernels = [case("a", "silu_and_mul", {"tokens": 1, "d": 256}, 1536, 2.0, 0.5)]
    (one, four) = sorted(
        lines(suite, item(digest, "a", ["silu_and_mul"], 1.05), kernels), key=lambda x: x.sequences
    )
    assert one.predicted == pytest.approx(3 * 0.5) and one.timed == 1.0  # three layers
    assert one.step_us == pytest.approx(1e6 / 1000) and one.realized == pytest.approx(1 - 1 / 1.05)
    assert one.realized_us == pytest.approx(1000 * (1 - 1 / 1.05)) and one.verdict == FASTER
    assert four.sequences == 4 and four.verdict == SAME and four.step_us == pytest.approx(4e6 / 4000)
    assert four.predicted == pytest.approx(3 * 0.5 * 4)  # four times the bytes of the largest judged case


def test_options_of_a_call_choose_its_cases(suite: Path) -> None:
    digest = load(str(suite)).digest
    plain, added = {"eps": 1e-6, "cast_first": True}, {"residual": True, "eps": 1e-6, "cast_first": True}
    kernels = [
        case("a", "rms_norm", plain, 1e6, 2.0, 1.0), case("a", "rms_norm", added, 1e6, 2.0, 10.0),
        case("a", "rms_norm", added, 1e6, 2.0, 99.0, status=Status.WRONG), case("b", "rms_norm", added, 1e6, 2.0, 77.0),
    ]  # fmt: skip
    found = next(
        x for x in lines(suite, item(digest, "a-rms_norm", ["rms_norm"], 1.02), kernels) if x.sequences == 1
    )
    # a step has the first norm, two norms of heads in each of three layers, and six norms with a residual
    assert found.predicted == pytest.approx(7 * 1.0 + 6 * 10.0)


@pytest.mark.parametrize(
    ("size", "saved"), [(10.0, 1.0), (100.0, 1.0), (1000.0, 2.0), (10_000.0, 3.0), (20_000.0, 6.0)]
)
def test_savings_between_judged_sizes(size: float, saved: float) -> None:
    cases = [Timed({}, 10_000.0, 3.0), Timed({}, 100.0, 1.0), Timed({}, 100.0, 1.0)]
    call = Call("silu_and_mul", "mlp", "bfloat16", int(size), 0)
    assert study.saved_us(call, cases) == pytest.approx(saved)


def test_lines_are_ranked_and_those_that_did_not_run_say_why(suite: Path) -> None:
    digest = load(str(suite)).digest
    gone = [{"op": "silu_and_mul", "reason": "not deployed", "text": "t"}]
    rows = [
        *item(digest, "slow", ["silu_and_mul"], 0.9),
        *item(digest, "gone", [], None, dropped=gone),
        *item(digest, "fast", ["silu_and_mul"], 1.2),
    ]
    kernels = [
        case(name, "silu_and_mul", {}, 1536, 2.0, saved) for name, saved in (("slow", 0.4), ("fast", 0.5))
    ]
    found = lines(suite, rows, kernels)
    assert [(x.name, x.verdict) for x in found[:1] + found[3:]] == [
        ("fast", FASTER), ("slow", SLOWER), ("gone", NOT_RUN), ("gone", NOT_RUN),
    ]  # fmt: skip
    assert found[-1].left_out == "silu_and_mul: not deployed" and found[-1].predicted is None
    text = study.page(found)
    assert (
        "6 lines: 1 faster, 2 no difference, 1 slower, 0 wrong, 2 did not run." in text and "+16.7%" in text
    )


def test_wrong_answers_save_no_time(suite: Path) -> None:
    digest = load(str(suite)).digest
    rows = item(digest, "a", ["silu_and_mul"], 1.2)
    rows[-1].metrics["correctness"] = 0.5
    rows[-1].status, rows[-1].reason = Status.WRONG, "apart by 0.05"
    found = lines(suite, rows, [case("a", "silu_and_mul", {}, 1536, 2.0, 0.5)])
    assert {(x.verdict, x.realized, x.left_out) for x in found} == {(WRONG, None, "apart by 0.05")}
    assert study.rank_correlation(study._pairs(found)) is None and "2 wrong" in study.page(found)


def test_provisional_times_predict_nothing(suite: Path) -> None:
    kernels = [case("a", "silu_and_mul", {}, 1536, 2.0, 0.5, provisional="no libraries")]
    found = lines(suite, item(load(str(suite)).digest, "a", ["silu_and_mul"], 1.1), kernels)
    assert {x.predicted for x in found} == {None}


def test_a_set_without_judged_times_has_no_prediction(suite: Path) -> None:
    found = lines(suite, item(load(str(suite)).digest, "a", ["silu_and_mul"], 1.1), [])
    assert {x.predicted for x in found} == {None} and {x.timed for x in found} == {0.0}


def test_rank_correlation() -> None:
    assert study.rank_correlation([(1, 2), (2, 3), (3, 9)]) == pytest.approx(1)
    assert study.rank_correlation([(1, 9), (2, 3), (3, 2)]) == pytest.approx(-1)
    assert study.rank_correlation([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx(0.8)
    assert study.rank_correlation([(1, 1), (2, 2)]) is None
    assert study.rank_correlation([(1, 1), (1, 2), (1, 3)]) is None


def test_command_prints_a_table_and_json(
    suite: Path, run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = run("eval", item(load(str(suite)).digest, "a", ["silu_and_mul"], 1.1))
    judge = run("judge", [case("a", "silu_and_mul", {}, 1536, 2.0, 0.5)])
    page = tmp_path / "page.md"
    main_status(
        ["study", str(evaluated), "--kernels", str(judge), "--suite", str(suite), "--markdown", str(page)], 0
    )
    out = capsys.readouterr().out
    assert "1 faster, 1 no difference" in out and "| a | tiny | vllm | 1 |" in page.read_text()
    last = json.loads(out.strip().splitlines()[-1])
    assert last["ok"] and last["lines"][0]["predicted"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--suite", "nope"], "nope"), ([], "give it with --suite"),
        (["--kernels", "/nowhere"], "/nowhere"), (["--suite", "SUITE", "--markdown", "/nowhere/page"], "No such file"),
    ],
)  # fmt: skip
def test_bad_input_is_said(
    suite: Path, run: Callable[..., Path], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    evaluated = run("eval", item(load(str(suite)).digest, "a", ["silu_and_mul"], 1.1))
    main_status(["study", str(evaluated), *(w.replace("SUITE", str(suite)) for w in words)], 2)
    assert said in capsys.readouterr().err


def test_rows_without_text_are_said(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    main_status(["study", str(run("judge", [case("a", "gelu", {}, 10, 2.0, 0.5)]))], 2)
    assert "no item with text" in capsys.readouterr().err
