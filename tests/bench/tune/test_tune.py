"""`fk-bench tune`: what is judged and written, and that dispatch follows the table. CPU times are no speed claim."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench import cli
from fk_bench.core.rows import Row, Status, Subject, read
from fk_bench.tune import command, tuner
from fk_bench.tune.choice import Choice
from fk_bench.tune.model_shapes import shapes_of_model
from fk_bench.tune.screen import Screen, Screened
from fk_bench.tune.tuner import Tuner
from support.commands import fk_bench, last_json

from fastkernels.core import registry, tuning
from fastkernels.core.dispatch import Key, Op, Provider
from fastkernels.core.tuning import REACH, Entry, Table
from fastkernels.verify.measure import Ratio

SHAPE = {"N": 17, "K": 63, "dtype": "float32"}
TEXT = "N=17,K=63,dtype=float32"
DECODE = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16, "window": 0, "dtype": "bfloat16"}


# -- the command, as a user runs it


@pytest.fixture(scope="module")
def tuned_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Row], Table]:
    """(last line, rows, table) of a run in a temporary folder; production is oneDNN there."""
    folder = tmp_path_factory.mktemp("tune")
    result = fk_bench(
        "tune", "linear", "--device", "cpu", "--shape", TEXT, "--batch", "1,6", "--rounds", 3, "--finalists", 1,
        "--run", folder / "run", timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows, warnings = read(folder / "run" / "rows.jsonl")
    assert not warnings
    return last_json(result), rows, tuning.read(folder / "run" / "cpu.json")


@pytest.mark.slow
def test_all_providers_are_judged_best_in_full(tuned_run: Any) -> None:
    line, rows, _ = tuned_run
    judged = [r for r in rows if r.kind == "case"]
    assert line["judged"] == len(judged) and line["failed"] == 0 and line["ok"]
    for m in (1, 6):
        here = [r for r in judged if r.case["sizes"] == {"M": m}]
        screened = {str(r.subject.provider) for r in here if r.case["stage"] == "screen"}
        assert screened == {"onednn", "reference"}
        assert sum(r.case["stage"] == "final" for r in here) == 1
    assert {r.case["stage"] for r in judged} <= set(tuner.STAGES)
    assert {(r.command, r.case["timer"]) for r in judged} == {("tune", "cpu")}
    assert {r.status for r in judged} <= {Status.OK, Status.INVALID}  # a busy machine
    assert all(r.case["shape"] == SHAPE and r.metrics["time_us_p50"] for r in judged)


def test_table_matches_rows(tuned_run: Any) -> None:
    line, rows, table = tuned_run
    assert line["points"] == 2 and line["table"].endswith("cpu.json") and table.chip == line["chip"] == "cpu"
    assert [(e.shape, e.sizes) for e in table.entries] == [(SHAPE, {"M": 1}), (SHAPE, {"M": 6})]
    (run,) = table.runs.values()
    assert run["versions"]["torch"] == torch.__version__ and len(run["date"]) == 10
    finals = {str(r.case["sizes"]): r for r in rows if r.case.get("stage") == "final"}
    for e in table.entries:
        row = finals[str(dict(e.sizes))]
        assert e.baseline == row.baseline == "onednn"
        if e.faster:
            assert tuner.beats(row) and e.provider == row.subject.provider
        else:
            assert e.provider == "onednn"
    assert line["faster"] == sum(e.faster for e in table.entries)
    assert [r.subject.provider for r in rows if r.kind == "entry"] == [e.provider for e in table.entries]


def test_interrupted_run_is_continued(
    tuned_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, table = tuned_run
    path = tmp_path / "table.json"
    first = table.entries[0]
    path.write_text(text := Table("cpu", table.runs, (first,)).to_json())
    words = ["tune", "linear", "--device", "cpu", "--shape", TEXT, "--json", "--missing", "--out", str(path)]
    for batch, seconds, left in (("1", "0", 0), ("1,6", "0.000001", 1)):
        with pytest.raises(SystemExit):
            run = str(tmp_path / f"run{left}")
            cli.main([*words, "--batch", batch, "--seconds", seconds, "--run", run])
        line = json.loads(capsys.readouterr().out)
        assert (line["points"], line["left"], line["ok"]) == (0, left, not left)
        assert "nothing was judged: no time" in line.get("error", "") if left else "error" not in line
    assert path.read_text() == text


@pytest.mark.parametrize("name", tuner.tunable())
def test_printed_shapes_are_accepted(name: str) -> None:
    """The command that `doctor` and `describe` print for shapes without an entry."""
    spec, _, key = tuner.key_of(name)
    for shape in tuner.distinct(tuner._shape_of_case(spec, key, case) for case in spec.cases):
        words = shlex.split(tuning._command(name, key, shape))
        assert words[:4] == ["fk-bench", "tune", name, "--shape"]
        assert [command._shape(text, name, key) for text in words[4:]] == [shape]


def test_dispatch_follows_the_table(tuned_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    line, _, table = tuned_run
    monkeypatch.setenv("FASTKERNELS_TUNED", line["table"])
    op = registry.get("linear").op
    op.reset()
    try:
        for e in table.entries:
            m = e.sizes["M"]
            x, weight = torch.randn(m, 63), torch.randn(17, 63)
            torch.testing.assert_close(torch.ops.fastkernels.linear(x, weight), x @ weight.T)
            order = op._chosen("cpu", (x, weight), {})
            assert order is not None and order[0].name == e.provider
    finally:
        monkeypatch.undo()
        op.reset()


def test_last_line_without_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--shape", "N=8192,K=8192,dtype=float32", "--batch", "64"]
    with pytest.raises(SystemExit) as end:
        cli.main(["tune", "linear", "--device", "cpu", *large, "--run", str(tmp_path), "--json"])
    line = json.loads(capsys.readouterr().out)
    assert end.value.code == 1 and not line["ok"] and line["table"] is None
    assert "nothing was judged: GPU only" in line["error"] and not (tmp_path / "cpu.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rms_norm"], "rms_norm is not dispatched by shape (it has no key); ops with a key: "),
        (["linaer"], "unknown op 'linaer'. Did you mean 'linear'?"),
        (["--batch", "1,x"], "--batch '1,x': expected numbers from 1"),
        (["--shape", "N=4"], "--shape 'N=4': the shape of linear is N=, K=, dtype="),
        (["--shape", "N=x,K=4,dtype=float32"], "--shape 'N=x,K=4,dtype=float32': N is 'x', not a number"),
        (
            ["--shape", "N=4,K=4,dtype=float7"],
            "--shape 'N=4,K=4,dtype=float7': dtype is 'float7', not a torch dtype",
        ),
        (["--provider", "skiny"], "unknown provider of linear 'skiny'"),
        (["--model", "lama"], "unknown model 'lama'"),
        (["--dtype", "half-ish"], "--dtype 'half-ish' is not a torch dtype"),
        (["--against", "mine"], "--against 'mine' is not production or host"),
        (["--rounds", "2"], "--rounds must be at least 3"),
        (["--out", str(tuning.SHIPPED / "cpu.json")], "a CPU's times are no claim about speed"),
        (["--out", f"{__file__}/cpu.json"], "cpu.json cannot be written: "),
    ],
)
def test_wrong_arguments_run_nothing(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ops = [] if arguments[0][0] != "-" else ["linear"]
    with pytest.raises(SystemExit) as end:
        cli.main(["tune", *ops, "--device", "cpu", "--run", str(tmp_path / "run"), *arguments])
    assert end.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "rows.jsonl").exists()


def test_table_of_another_chip_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.json"
    path.write_text(text := Table("NVIDIA H200", {}, ()).to_json())
    with pytest.raises(SystemExit):
        cli.main(["tune", "linear", "--device", "cpu", "--out", str(path), "--run", str(tmp_path / "run")])
    assert "is a table of NVIDIA H200, but this is cpu" in capsys.readouterr().err
    assert path.read_text() == text


# -- what is judged


def test_shapes_of_models_and_ranks() -> None:
    _, _, key = tuner.key_of("linear")
    whole = shapes_of_model("linear", key, "llama", torch.bfloat16)
    sizes = [(s["N"], s["K"]) for s in whole]
    assert sizes == [(6144, 4096), (4096, 4096), (2 * 14336, 4096), (4096, 14336)]  # Llama-3.1-8B
    half = shapes_of_model("linear", key, "llama", torch.float16, tp=2)
    assert [(s["N"], s["K"], s["dtype"]) for s in half] == [
        (3072, 4096, "float16"), (4096, 2048, "float16"), (14336, 4096, "float16"), (4096, 7168, "float16"),
    ]  # fmt: skip


def test_shapes_come_from_model_cases() -> None:
    spec, _, key = tuner.key_of("linear")
    shapes = [(s["N"], s["K"]) for s in tuner.shapes_of_cases(spec, key, "cuda")]
    assert shapes == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    assert 1 <= len(tuner.shapes_of_cases(spec, key, "cpu")) <= 2


def test_grid_has_low_end_of_each_entry() -> None:
    _, _, key = tuner.key_of("linear")
    found = tuner.grid(key, [(8, 1, 2, 4, 64, 64), (512,)])
    low = {at["M"]: lowest["M"] if lowest else None for at, lowest in found}
    assert low == {1: None, 2: None, 4: 3, 8: 5, 64: 64 // REACH}


def test_two_kinds_of_sizes_make_a_grid() -> None:
    key = Key(("H",), ("B", "L"), of=lambda: ((), ()), dims=lambda **named: named)
    found = tuner.grid(key, [(1, 4), (512, 2048)])
    assert [at for at, _ in found] == [{"B": b, "L": n} for b in (1, 4) for n in (512, 2048)]
    assert [low for _, low in found] == [{"B": b, "L": n} for b in (1, 2) for n in (128, 513)]


def test_choices_are_providers_with_all_parameters() -> None:
    providers = (
        Provider("gpu", lambda x: x, params=({"a": 1},)),
        Provider("sized", lambda x: x, ("cpu",), params=({"a": 1}, {}, {"a": 2, "b": 3})),
        Provider("reference", lambda x: x, ("cpu",)),
    )
    op = Op("linear", providers)
    assert [str(c) for c in tuner.choices(op, "cpu")] == ["sized", "sized a=1", "sized a=2 b=3", "reference"]
    assert [str(c) for c in tuner.choices(op, "cpu", ["reference"])] == ["reference"]


def test_parameters_are_measured_for_fitting_cases() -> None:
    spec, op, key = tuner.key_of("linear")
    skinny = next(p for p in op.providers if p.name == "triton-skinny")
    several = [Choice("triton"), Choice(skinny.name), *(Choice(skinny.name, p) for p in skinny.params)]
    shape = {"N": 4096, "K": 4096, "dtype": "bfloat16"}
    assert skinny.fits is not None
    for m in (1, 16, 64):
        case = tuner.trial_of(spec, key, shape, {"M": m}, "tune").case
        found = tuner.fitting(several, spec, case)
        args = (torch.empty(m, 4096), torch.empty(4096, 4096, device="meta"))
        meant = [p for p in skinny.params if skinny.fits(p, *args)]
        assert found == several[:2] + [Choice(skinny.name, p) for p in meant]
        assert 0 < len(meant) < len(skinny.params)


def test_baselines_are_no_choices_on_gpu() -> None:
    providers = tuple(Provider(n, lambda x: x, ("cpu", "cuda")) for n in ("cublas", "triton", "reference"))
    assert [c.provider for c in tuner.choices(Op("linear", providers), "cuda")] == ["triton"]


# -- in the judge's processes


def test_choice_runs_alone_with_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate side's part of `Judge.provider`."""
    from fk_bench.kernels.judge.processes.answers import Failure
    from fk_bench.kernels.judge.processes.runner import RunnerState

    def times(x: Any, weight: Any, bias: Any = None, by: float = 1.0) -> Any:
        return by * (x @ weight.T)

    def square(x: Any, weight: Any, bias: Any = None) -> str | None:
        return None if x.shape[0] == x.shape[1] else "not square"

    op = registry.get("linear").op
    sized = Provider("sized", times, ("cpu",), supports=square, params=({"by": 3.0},))
    monkeypatch.setattr(op, "providers", (*op.providers, sized))
    runner = RunnerState.__new__(RunnerState)
    runner.changed = set()
    x, weight = torch.randn(4, 4), torch.randn(5, 4)
    try:
        runner._only("linear", "sized", {"by": 3.0})
        torch.testing.assert_close(op(x, weight), 3 * (x @ weight.T))
        with pytest.raises(Failure, match="sized: not square") as refused:
            op(x[:3], weight)
        assert refused.value.status == "unsupported" and op.fallbacks == {}
        assert runner.changed == {"linear"}  # reset when the next op is loaded
    finally:
        op.set_candidate(None)
        op.reset()


def test_judged_processes_see_tuned_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fk_bench.kernels.judge.processes.zygote import Zygote

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.json").touch()
    monkeypatch.setenv("FASTKERNELS_TUNED", "own.json")
    zygote = Zygote()
    try:
        assert zygote._environment()["FASTKERNELS_TUNED"] == str(tmp_path.resolve() / "own.json")
        monkeypatch.setenv("FASTKERNELS_TUNED", "no")
        assert zygote._environment()["FASTKERNELS_TUNED"] == "0"
    finally:
        zygote.close()


# -- what is written


def row(
    provider: str, speedup: float, low: float, time: float = 1.0, status: Status = Status.OK, **more: Any
) -> Row:
    return Row(
        run_id="r", command="kernels", status=status, subject=Subject(op="linear", provider=provider),
        case={"kind": "case", "significant": True, "name": "x", **more}, baseline="onednn",
        metrics={"speedup": speedup, "time_us_p50": time}, ci95={"speedup": (low, speedup + 0.1)},
    )  # fmt: skip


def test_faster_means_interval_above_one_and_noise() -> None:
    assert tuner.beats(row("reference", 1.1, 1.01))
    assert not tuner.beats(row("reference", 1.1, 0.99))
    assert not tuner.beats(row("reference", 1.1, 1.01, status=Status.WRONG))
    assert not tuner.beats(row("reference", 1.1, 1.01, significant=False))
    assert not tuner.beats(row("onednn", 1.1, 1.01))  # the baseline itself
    unsteady = row("reference", 1.1, 1.01)
    unsteady.metrics.clear()
    unsteady.ci95.clear()
    assert not tuner.beats(unsteady)


class Script(Tuner):
    """A tuner with scripted verdicts: {(stage, provider): row}."""

    def __init__(self, said: dict[tuple[str, str], Row]) -> None:
        from fk_bench.kernels.judge import Options

        self.said, self.finalists, self.run, self.final = said, 2, "r1", Options()
        self.requested: list[tuple[str, str]] = []
        self.seconds = {}
        self._screen = None

    def _judged(self, name: str, choice: Choice, shape: Any, sizes: Any, stage: str) -> Row:
        self.requested.append((stage, choice.provider))
        return self.said[stage, choice.provider]

    def entry(self, *providers: str, low: Any = None) -> Entry | None:
        return self.point("linear", SHAPE, {"M": 8}, low, [Choice(p) for p in providers])


def test_fastest_finalist_is_written() -> None:
    said = {
        ("screen", "a"): row("a", 1.0, 0.9, time=3.0), ("screen", "b"): row("b", 1.0, 0.9, time=1.0),
        ("screen", "c"): row("c", 1.0, 0.9, time=2.0), ("screen", "d"): row("d", 9.0, 8.0, 0.1, Status.WRONG),
        ("final", "b"): row("b", 1.2, 1.1), ("final", "c"): row("c", 1.3, 1.2),
        ("control", "onednn"): row("onednn", 0.98, 0.97),
    }  # fmt: skip
    script = Script(said)
    entry = script.entry("a", "b", "c", "d")
    assert entry is not None and (entry.provider, entry.speedup, entry.ci95) == ("c", 1.3, (1.2, 1.4))
    assert script.requested[-3:] == [("final", "b"), ("final", "c"), ("control", "onednn")]
    assert entry.faster and entry.baseline == "onednn"


def test_slower_at_low_end_is_not_written() -> None:
    said = {
        ("final", "b"): row("b", 1.2, 1.1), ("final", "c"): row("c", 1.3, 1.2),
        ("low end", "c"): row("c", 0.9, 0.8), ("low end", "b"): row("b", 1.1, 1.05),
        ("control", "onednn"): row("onednn", 1.02, 1.01),
    }  # fmt: skip
    entry = Script(said).entry("b", "c", low={"M": 5})
    assert entry is not None and (entry.provider, entry.speedup) == ("b", 1.2)


@pytest.mark.parametrize(
    ("status", "speedup", "low", "longer"),
    [
        (Status.OK, 0.7, 0.65, None),
        (Status.WRONG, 1.2, 1.1, None),
        (Status.OK, 1.1, 1.05, 1.1),
        (Status.OK, 0.98, 0.9, 0.98),  # as fast as production, within the interval
    ],
)
def test_slower_in_longer_calls_is_not_written(
    status: Status, speedup: float, low: float, longer: float | None, linear: Op
) -> None:
    linear.key = dataclasses.replace(linear.key, longer=lambda N, K, dtype, M: {"tokens": (64,)})
    said = {
        ("final", "b"): row("b", 1.2, 1.1), ("control", "onednn"): row("onednn", 0.98, 0.97),
        ("longer", "b"): row("b", speedup, low, status=status),
    }  # fmt: skip
    script = Script(said)
    script.final = dataclasses.replace(script.final, device="cpu")
    entry = script.entry("b")
    assert script.requested[-1] == ("longer", "b")
    assert entry is not None and entry.longer == longer and entry.faster == (longer is not None)


def test_longer_calls_are_judged_as_cases_of_their_own() -> None:
    spec, _, key = tuner.key_of("attention_decode")
    sizes = {"batch": 8, "context": 131072}
    plain, longer = (tuner.trial_of(spec, key, DECODE, sizes, "tune", which).case for which in (False, True))
    assert plain.dims["seq_lens"] == [4096] * 8 and longer.dims["seq_lens"] == [32768] * 8
    assert plain.name != longer.name


def test_missing_includes_entries_without_longer_times() -> None:
    old = Entry("attention_decode", DECODE, {"batch": 8, "context": 32768}, "cuda-split", "fa3", "r", {}, 1.2)
    assert command._untimed(old) and not command._untimed(dataclasses.replace(old, longer=1.1))
    assert not command._untimed(dataclasses.replace(old, sizes={"batch": 8, "context": 4096}))
    assert not command._untimed(dataclasses.replace(old, provider="fa3"))


def test_gain_of_production_over_itself_is_no_gain() -> None:
    said = {("final", "b"): row("b", 1.2, 1.1), ("control", "onednn"): row("onednn", 1.15, 1.05)}
    entry = Script(said).entry("b")
    assert entry is not None and (entry.provider, entry.faster) == ("onednn", False)


def test_production_is_written_if_nothing_is_faster() -> None:
    lost = {("final", "b"): row("b", 0.9, 0.8)}
    entry = Script(lost).entry("b")
    assert entry is not None and (entry.provider, entry.baseline, entry.faster) == ("onednn", "onednn", False)
    lost["final", "b"].baseline = "vllm"  # not a provider of ours
    entry = Script(lost).entry("b")
    assert entry is not None and (entry.provider, entry.baseline) == (None, "vllm")
    skipped = {("final", "b"): row("b", 0.9, 0.8, status=Status.SKIPPED)}
    assert Script(skipped).entry("b") is None and Script({}).entry() is None


# -- choices timed in one process


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> Op:
    """The op with more providers: one is half of production's work, others are wrong or fail."""

    def half(x: Any, weight: Any, bias: Any = None) -> Any:
        return x @ weight.T

    def twice(x: Any, weight: Any, bias: Any = None) -> Any:
        for _ in range(20):
            x @ weight.T
        return x @ weight.T

    def wrong(x: Any, weight: Any, bias: Any = None) -> Any:
        return x.new_zeros(x.shape[0], weight.shape[0])

    def broken(x: Any, weight: Any, bias: Any = None) -> Any:
        raise RuntimeError("no such kernel")

    op = registry.get("linear").op
    more = (Provider(f.__name__, f, ("cpu",)) for f in (half, wrong, broken))
    monkeypatch.setattr(op, "providers", (Provider("onednn", twice, ("cpu",)), *more))
    monkeypatch.setattr(op, "key", op.key)
    return op


def test_screen_ranks_correct_choices_against_production(linear: Op) -> None:
    shape, several = {"N": 64, "K": 64, "dtype": "float32"}, [Choice(p.name) for p in linear.providers]
    screen = Screen("cpu", "r")
    with screen.compiling([("linear", shape, {"M": 4}, several)]):
        pass
    (found,), row = screen.time("linear", shape, {"M": 4}, several)
    assert found.choice == Choice("half") and found.faster and found.ratio is not None and found.ratio.low > 1
    assert row.baseline == "onednn" and set(row.metrics) == {"us half", "us onednn, production"}
    assert set(row.case["rejected"]) == {"wrong", "broken"}
    assert "no such kernel" in row.case["rejected"]["broken"]


@pytest.mark.parametrize(
    ("ratio", "worth"),
    [
        (Ratio(1.02, 1.01, 1.03), True),
        (Ratio(1.01, 1.005, 1.015), False),
        (Ratio(1.1, 0.99, 1.2), False),
        (None, True),
    ],
)
def test_gains_that_no_judge_confirms_are_not_judged(ratio: Ratio | None, worth: bool) -> None:
    assert Screened(Choice("half"), 1.0, ratio).faster == worth


def test_processes_compile_only_kernels_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    class Apart:
        def __init__(self, points: Any, device: str, end: float, ready: Any) -> None:
            asked["apart"] = [str(choice) for (choice,) in points.values()]

        def wait(self) -> dict[Any, str]:
            return {("p", "apart"): "no"}

    def here(subjects: Any, device: torch.device, generator: Any, end: float) -> dict[Any, str]:
        assert torch.is_inference_mode_enabled()
        asked["here"] = [subject.name for several in subjects.values() for subject in several]
        return {("p", "here"): "no"}

    screen = Screen("cpu", "r")
    screen.device = torch.device("cuda")
    monkeypatch.setattr(screen, "_generator", lambda: None)
    monkeypatch.setattr("fk_bench.tune.screen.Compiling", Apart)
    monkeypatch.setattr("fk_bench.tune.screen.measure.compiled", here)
    shape = {"N": 64, "K": 64, "dtype": "bfloat16"}
    first = [Choice("cublas"), Choice("triton-skinny"), Choice("cuda-wgmma", {"rows": 64})]
    with screen.compiling(
        [("linear", shape, {"M": 4}, first), ("linear", shape, {"M": 8}, [Choice("cublas")])]
    ):
        pass
    assert asked == {"apart": ["triton-skinny"], "here": ["cublas", "cuda-wgmma rows=64", "cublas"]}
    assert screen._failed == {("p", "apart"): "no", ("p", "here"): "no"}


def test_only_choices_faster_in_the_screen_are_judged(linear: Op) -> None:
    shape = {"N": 64, "K": 64, "dtype": "float32"}
    script = Script({("final", "half"): row("half", 1.2, 1.1)})
    script._screen, script._on_screen = Screen("cpu", "r"), lambda row: None
    several = [Choice(p.name) for p in linear.providers]
    entry = script.point("linear", shape, {"M": 4}, {"M": 2}, several)
    assert entry is not None and (entry.provider, entry.speedup) == ("half", 1.2)
    assert script.requested == [("final", "half")]
    slow = script.point("linear", shape, {"M": 4}, None, [Choice("wrong"), Choice("onednn")])
    assert slow is not None and (slow.provider, slow.faster) == ("onednn", False)
    assert len(script.requested) == 1 and script.seconds["screened"] > 0


@pytest.mark.parametrize("slow", [True, False])
def test_longer_calls_are_timed_before_the_judge(linear: Op, slow: bool) -> None:
    """With 512 tokens, where the choice is slower than production or not."""

    def short_only(x: Any, weight: Any, bias: Any = None) -> Any:
        for _ in range(60 if slow and len(x) > 4 else 1):
            found = x @ weight.T
        return found

    linear.providers = (*linear.providers, Provider("short_only", short_only, ("cpu",)))
    linear.key = dataclasses.replace(linear.key, longer=lambda N, K, dtype, M: {"tokens": (512,)})
    rows: list[Row] = []
    script = Script({("final", "short_only"): row("short_only", 1.2, 1.1)})
    script.final = dataclasses.replace(script.final, device="cpu")
    script._screen, script._on_screen = Screen("cpu", "r"), rows.append
    shape = {"N": 64, "K": 64, "dtype": "float32"}
    entry = script.point("linear", shape, {"M": 4}, None, [Choice("short_only")])
    assert entry is not None and entry.faster == bool(script.requested) == (not slow)
    assert (entry.longer is None) == slow and [r.case["longer"] for r in rows] == [False, True]


@pytest.mark.parametrize(
    ("status", "asked"),
    [
        (Status.OK, ["first"]),
        (Status.INVALID, ["first", "second"]),  # other parameters of the same kernel are invalid as well
        (Status.WRONG, ["first", "first"]),
    ],
)
def test_next_finalist_is_judged_if_the_fastest_is_not_valid(status: Status, asked: list[str]) -> None:
    said = {
        ("final", "first"): row("first", 1.05, 0.98, status=status),
        ("final", "second"): row("second", 1.1, 1.02),
    }
    script = Script(said)
    script._on_screen = lambda row: None
    found = [
        Screened(Choice(name, p), 1.0, None)
        for name, p in (("first", {}), ("first", {"rows": 8}), ("second", {}))
    ]

    class Both:
        time = staticmethod(lambda *_: (found, row("first", 1.0, 0.9)))

    entry = script._screened(Both, "linear", SHAPE, {"M": 8}, None, [])  # type: ignore[arg-type]
    assert [provider for _, provider in script.requested] == asked
    assert entry is not None and entry.faster == (status is Status.INVALID)


def test_seconds_of_judging_are_added_by_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = command._State(tmp_path / "rows.jsonl", 2, "cpu", Table("cpu", {}, ()), tmp_path / "table.json")
    for seconds in ({"inputs": 0.5, "start": 2.0}, {"inputs": 0.25, "stop": 0.01}):
        state.judged.append(row("first", 1.1, 1.02))
        state.judged[-1].case["seconds"] = seconds
    state.done, state.seconds = 2, {"judged": 2.76}
    assert state._judging() == {"start": 2.0, "inputs": 0.8}
    state.show("cpu")
    shown = capsys.readouterr().out
    assert "2 of 2 points: judged 2.8 s\nof judging: start 2.0 s, inputs 0.8 s\n" in shown


def test_model_is_tuned_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "tiny")
    words = [
        "tune", str(model), "--device", "cpu", "--dtype", "float32", "--provider", "reference", "--json", "--batch",
        "1", "--context", "8", "--rounds", "3", "--finalists", "1", "--run", str(tmp_path / "run"),
    ]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    line = json.loads(capsys.readouterr().out)
    assert end.value.code == 0 and line["left"] == 0 and line["ops"] == 2
    phases = set(line["phases"])
    assert {"planned", "compiled", "screened"} <= phases <= {"planned", "compiled", "screened", "judged"}
    judged = sum(line["judging"].values())  # of it, each phase that took at least 50 ms
    assert judged <= line["phases"].get("judged", 0.0) + 0.1 * len(line["judging"])
    assert bool(line["judging"]) == bool(line["judged"])
    found = {e.op for e in tuning.read(Path(line["table"])).entries}
    assert found == {"linear", "attention_decode"}
    screened = [r for r in read(Path(line["rows"]))[0] if r.kind == "screened"]
    assert len(screened) >= line["points"] == 5


@pytest.mark.slow
def test_stopped_run_prints_the_command_that_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.tiny import make_tiny_llama

    judged = tuner.Tuner.point

    def interrupted(self: Tuner, name: str, *rest: Any) -> Entry | None:
        if name == "linear" and len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(name)
        return judged(self, name, *rest)

    seen: list[str] = []
    monkeypatch.setattr(tuner.Tuner, "point", interrupted)
    model, table = make_tiny_llama(tmp_path / "tiny"), tmp_path / "table.json"
    words = [
        "tune", str(model), "--device", "cpu", "--dtype", "float32", "--provider", "reference", "--batch", "1",
        "--context", "8", "--out", str(table), "--json",
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        cli.main([*words, "--rounds", "3", "--run", str(tmp_path / "first")])
    said = capsys.readouterr()
    assert json.loads(said.out)["left"] == 3 and len(tuning.read(table).entries) == 2
    hint = next(line for line in said.err.splitlines() if "To continue: " in line)
    assert hint.startswith("interrupted: 3 of 5 points are left.")
    again = shlex.split(hint.partition("To continue: ")[2])
    assert again[:3] == ["fk-bench", "tune", str(model)]
    monkeypatch.setattr(tuner.Tuner, "point", judged)
    with pytest.raises(SystemExit) as end:
        cli.main([*again[1:], "--rounds", "3", "--json", "--run", str(tmp_path / "second")])
    line = json.loads(capsys.readouterr().out)
    assert end.value.code == 0 and (line["points"], line["left"]) == (3, 0)
    assert len(tuning.read(table).entries) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qwen9-8b"], "unknown model 'qwen9-8b'. Did you mean 'qwen3-8b'"),
        (["qwen3-8b"], "torch sees no GPU here, and a table is for the GPU that serves the model; --device cpu"),
        (["linear", "--quantization", "fp8"], "--quantization is for a model: fk-bench tune MODEL"),
        (["qwen3-8b", "--quantization", "int3"], "--quantization 'int3' is not fp8 or fp8-block"),
        (["qwen3-8b", "--device", "cpu", "--provider", "fa4"], "unknown provider 'fa4'"),
        (["qwen3-8b", "--device", "cpu", "--tp", "3"], "32 attention heads cannot be shared by 3 ranks"),
        (["fused_experts", "qwen3-8b", "--device", "cpu"], "nothing to tune: the model calls none of fused_experts"),
    ],
)  # fmt: skip
def test_wrong_models_run_nothing(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        cli.main(["tune", *words, "--run", str(tmp_path / "run")])
    assert end.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "rows.jsonl").exists()


def test_most_important_sizes_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def point(self: Tuner, name: str, shape: Any, sizes: Any, *rest: Any) -> None:
        seen.append((name, next(iter(sizes.values()))))

    monkeypatch.setattr(tuner.Tuner, "point", point)
    monkeypatch.setattr(tuner.Tuner, "warm", lambda self, points: None)
    monkeypatch.setattr(Screen, "compiling", lambda self, points: contextlib.nullcontext())
    with pytest.raises(SystemExit):
        cli.main(["tune", "qwen3-8b", "--device", "cpu", "--batch", "8,1", "--run", str(tmp_path), "--json"])
    batches = [batch for _, batch in seen]
    assert batches == sorted(batches, reverse=True) and {name for name, _ in seen} == {
        "linear",
        "attention_decode",
    }
    capsys.readouterr()


def test_two_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["tune", "llama-3.2-1b", "--model", "llama", "--device", "cpu", "--run", str(tmp_path)])
    assert end.value.code == 2 and "one model at a time, got llama-3.2-1b, llama" in capsys.readouterr().err


def test_written_table_is_read_back(tmp_path: Path) -> None:
    said = {("final", "b"): row("b", 1.2, 1.1), ("control", "onednn"): row("onednn", 1.0, 0.9)}
    entry = Script(said).entry("b")
    assert entry is not None and entry.faster
    table = Table("NVIDIA X", {"r1": {"date": "2026-11-21"}}, (entry,))
    tuner.written(tmp_path / "sub" / "t.json", table.to_json())
    assert tuning.read(tmp_path / "sub" / "t.json") == table
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["t.json"]
    assert json.loads(table.to_json())["entries"][0]["provider"] == "b"
