"""Loads of `fk-bench patch-compare`: their syntax and presets, cached prompts, late arrivals, and what fits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import Row, Status, Subject, append
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.e2e import asked, patch_compare, sharing
from fk_bench.e2e.apart import Apart, chosen_gpus
from fk_bench.e2e.asked import Asked, measure_one
from fk_bench.e2e.comparison import Extent
from fk_bench.e2e.loads import EMBED, GENERATE, PRESETS, Kind, Load, held_tokens, parse_loads, room_for
from fk_bench.e2e.media import MediaPlace
from fk_bench.e2e.ratios import COMMAND, summary, undo_rows, undo_verdict
from fk_bench.e2e.runs import Prompts, first_run, metrics_of, too_little_cached
from fk_bench.offline.host import make_row
from fk_bench.offline.offline import Sent, _step, requests_of
from support.commands import fk_bench_here, last_json

MIXED = "32x512+256/8x2048+8"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("8x2048+8", Kind.PROMPTS),
        ("1x512+128", Kind.DECODE),
        ("8x16384@90+8", Kind.HITS),
        ("1x65536@100+64", Kind.CONTEXT),
        ("1x16384+128", Kind.CONTEXT),
        (MIXED, Kind.MIXED),
    ],
)
def test_load_is_read_and_written(text: str, kind: Kind) -> None:
    load = Load.parse(text)
    assert str(load) == text and load.kind is kind


@pytest.mark.parametrize(
    "text", ["8x512@101+8", "8x512+8/", "8x512+8/0x5+5", "8x512+4/4x5+5", "8x512@+8", "8x512+8/1x5"]
)
def test_malformed_load_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("+", "[+]")):
        Load.parse(text)


def test_presets_are_declared_lists() -> None:
    for name, text in PRESETS.items():
        loads, preset = parse_loads(name, EMBED if name == "embed" else GENERATE)
        assert ",".join(map(str, loads)) == text and preset == set(loads)
    loads, preset = parse_loads("prompts, 1x512+16")
    assert [str(load) for load in loads] == [*PRESETS["prompts"].split(","), "1x512+16"]
    assert Load(1, 512, 16) not in preset and len(preset) == 3
    with pytest.raises(ConfigError, match="prompts"):
        parse_loads("promts")


def test_cached_prompts_are_prefixes_of_each_other() -> None:
    """The longest load fills the cache for the others; only what is not cached is new in a run."""
    loads = [Load.parse(text) for text in ("2x64@100+8", "1x128@100+8", "2x100@50+8", "3x10+5")]
    assert held_tokens(loads) == [128, 64]
    one = Prompts("m", loads, MediaPlace(texts=1000))
    assert list(map(len, one.held)) == [128, 64]
    assert one.of(loads[0], "a") == [one.held[0][:64], one.held[1]] == one.of(loads[0], "b")
    half = [one.of(loads[2], seed) for seed in "ab"]
    assert [p[:50] for p in half[0]] == [p[:50] for p in half[1]] and half[0][0][50:] != half[1][0][50:]
    assert all(len(p) == 100 for p in half[0]) and one.of(loads[3], "a") != one.of(loads[3], "b")


def test_cache_has_room_for_prompts_and_one_round() -> None:
    assert room_for([Load(2, 1000, 23)]) == 2 * 1024
    assert room_for([Load(2, 1000, 23), Load(1, 100, 8)]) == 2 * 1024  # they run in turn, and leave nothing
    assert room_for([Load(2, 1024, 23, cached=100), Load(1, 100, 8)]) == 2 * 1024 + 2 * 128 + 128


def test_late_arrivals_are_measured_from_when_they_were_sent() -> None:
    load = Load.parse("2x4+4/1x5+2")
    arrivals = [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.5, 4.0], [3.5, 5.0]]
    metrics, problem = metrics_of(arrivals, load, [0.0, 0.0, 3.0], [0, 0, 0])
    assert (
        not problem and metrics["ttft_ms"] == pytest.approx(500) and metrics["tpot_ms"] == pytest.approx(1000)
    )
    assert metrics["output_tokens_per_s"] == pytest.approx(10 / 5) and metrics[
        "step_ms_max"
    ] == pytest.approx(1500)
    assert "input_tokens_per_s" not in metrics
    assert metrics_of(arrivals[:2], load)[1] and metrics_of([*arrivals[:2], [3.5]], load)[1]


def test_prompts_have_input_throughput() -> None:
    metrics, _ = metrics_of([[0.5, 0.6], [1.0, 1.1]], Load(2, 100, 2))
    assert metrics["input_tokens_per_s"] == pytest.approx(200)
    assert "input_tokens_per_s" not in metrics_of([[0.1] * 40], Load(1, 100, 40))[0]


def test_run_without_its_cached_prompts_is_wrong() -> None:
    load = Load.parse("2x4096@100+40")
    metrics, problem = metrics_of([[0.1] * 40] * 2, load, [0.0, 0.0], [4080, 64])
    assert not problem and metrics["cached_tokens_per_prompt"] == 64
    assert "held 64 tokens of a prompt, not 4096" in too_little_cached(load, 0, metrics)
    assert not too_little_cached(load, -1, metrics) and not too_little_cached(
        load, 0, {"cached_tokens_per_prompt": 3968}
    )
    assert not too_little_cached(load, 0, {})  # the host does not tell


def test_first_run_of_arrivals_is_whole() -> None:
    assert first_run(Load.parse(MIXED)) == Load.parse(MIXED)
    assert first_run(Load(1, 512, 128)) == Load(1, 512, 16)


def test_arrivals_are_sent_after_tokens_of_the_first_request() -> None:
    class Engine:
        """Generates a token of each request in a step."""

        def __init__(self) -> None:
            self.left: dict[str, int] = {}
            self.sent: list[tuple[int, int]] = []
            self.steps = 0

        def add_request(self, name: str, prompt: list[int], tokens: int) -> None:
            self.left[name] = tokens
            self.sent.append((prompt[0], self.steps))

        def has_unfinished_requests(self) -> bool:
            return bool(self.left)

        def step(self) -> list[Any]:
            class Output:
                def __init__(self, name: str):
                    self.request_id, self.outputs, self.num_cached_tokens = name, [self], 3
                    self.token_ids = [0]

            self.steps += 1
            made = [Output(name) for name in self.left]
            self.left = {name: n - 1 for name, n in self.left.items() if n > 1}
            return made

    work = {
        "prompts": [[1], [2]], "output_len": 6,
        "later": {"prompts": [[3], [4]], "output_len": 3, "after": [2, 4]},
    }  # fmt: skip
    requests, engine = requests_of(work), Engine()
    read = pytest.fail  # there are no media
    _step(engine, requests, lambda request: request.prompt, lambda tokens: tokens, read)
    assert engine.sent == [(1, 0), (2, 0), (3, 2), (4, 4)]
    assert [len(r.tokens) for r in requests] == [6, 6, 3, 3] and [r.cached for r in requests] == [3] * 4
    assert 0 <= requests[0].at <= requests[2].at <= requests[2].tokens[0]
    alone = [Sent([1], 2), Sent([2], 1, after=9)]  # the first one ends before
    _step(Engine(), alone, lambda request: request.prompt, lambda tokens: tokens, read)
    assert [len(r.tokens) for r in alone] == [2, 1]


def stock(block: int, run: int, rate: float, load: str = "1x8+8", model: str = "m") -> Row:
    case = {"kind": "toggled", "state": "stock", "block": block, "run": run, "load": load}
    return make_row(
        "vllm",
        case,
        {"output_tokens_per_s": rate},
        command=COMMAND,
        subject=Subject(model=model, host="vllm"),
    )


def undone(rates: list[list[float]]) -> Row:
    """The row over all loads of stock states with these rates of their runs."""
    made = [stock(2 * block, run, rate) for block, runs in enumerate(rates) for run, rate in enumerate(runs)]
    (_, of_load), (where, metrics, intervals) = [
        (found, found) if i == 0 else found for i, found in enumerate(undo_rows(made))
    ]
    assert of_load[1] == metrics  # one load
    return make_row(
        "vllm", {**where, "state": "undo"}, metrics, ci95=intervals, subject=Subject(model="m", host="vllm")
    )


def test_undo_that_gives_the_speed_back_is_within_two_percent() -> None:
    row = undone([[100, 100.2], [100.1, 100.3], [99.9, 100.1], [100, 100.2], [100.2, 100.1], [100, 100.2]])
    low, high = row.ci95["output_tokens_per_s_undo_ratio"]
    assert 0.99 < low < 1 < high < 1.01 and row.case["alternations"] == 5
    assert ": within 2% of 1;" in undo_verdict(row)
    assert row.metrics["output_tokens_per_s_undo_within_ratio"] == pytest.approx(1.0014, abs=1e-3)


def test_undo_that_costs_five_percent_is_not_within_two() -> None:
    """Once, or with every undo; `first` shows both."""
    once = undone([[100, 100.1], *[[95, 95.1]] * 5])
    assert "not within 2% of 1 (the interval includes 1" in undo_verdict(once)
    assert once.metrics["output_tokens_per_s_undo_first_ratio"] == pytest.approx(0.95, abs=1e-3)
    every = undone([[100 * 0.95**i] * 2 for i in range(6)])
    assert "not within 2% of 1;" in undo_verdict(every)
    assert every.metrics["output_tokens_per_s_undo_ratio"] == pytest.approx(0.95)
    assert "no interval" in undo_verdict(undone([[100.0], [99.0]]))


def test_rows_of_undo_are_no_runs() -> None:
    """Rows without what is new are read, too."""
    made = [stock(0, 0, 1.0), stock(2, 0, 1.0)]
    where, metrics, intervals = next(undo_rows(made))
    row = make_row(
        "vllm", {**where, "state": "undo"}, metrics, ci95=intervals, subject=Subject(model="m", host="vllm")
    )
    assert Row.model_validate_json(row.to_json()) == row
    assert summary([*made, row]) == summary(made)


@pytest.fixture
def without_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose starts fail: vLLM is not in this environment."""
    monkeypatch.setattr(patch_compare, "_check_installed", lambda host, python: None)


def config(folder: Path, context: int) -> Path:
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 1000,
        "max_position_embeddings": context, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_load_beyond_the_context_is_refused(tmp_path: Path, without_host: None) -> None:
    model = config(tmp_path / "m", 4096)
    done = fk_bench_here(COMMAND, model, "--loads", "1x4096+8", "--out", tmp_path / "run")
    assert (
        done.returncode == 1
        and "has 4104 tokens, and the context of" in done.stderr
        and "has 4096" in done.stderr
    )
    assert last_json(done)["failed"] == [str(model)] and not list((tmp_path / "run").glob("*.log"))
    (row,) = map(Row.model_validate_json, (tmp_path / "run" / "rows.jsonl").read_text().splitlines())
    assert row.status is Status.UNSUPPORTED and "4104" in row.reason and row.case["state"] == "failed"


def test_load_beyond_the_memory_is_refused(
    tmp_path: Path, without_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "limit", lambda gpu: 6 * sharing.GIB)
    model = config(tmp_path / "m", 1 << 20)
    done = fk_bench_here(
        COMMAND, model, "--loads", "1x100000+8", "--dtype", "bfloat16", "--out", tmp_path / "run"
    )
    assert done.returncode == 1 and not list((tmp_path / "run").glob("*.log"))
    assert (
        "needs 6.5 GiB of keys and values for 106" in done.stderr and "GiB are left for them" in done.stderr
    )


def of_model(loads: str, folder: Path, **more: Any) -> Asked:
    plan, presets = parse_loads(loads)
    given: dict[str, Any] = {
        "host": "vllm", "python": "python", "folder": folder, "timeout": 1.0, "before_construction": False, "ops": None,
        "env": {}, "dtype": "bfloat16", "kv_cache_dtype": "auto", "load_format": "auto", "tensor_parallel": 1,
        "gpu_share": 0.0, "engine_args": {}, "with_engine": False, "loads": loads, "presets": presets,
        "extent": Extent(plan), "seed": 0,
    }  # fmt: skip
    return Asked(**{**given, **more})


def test_loads_of_a_preset_that_do_not_fit_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "limit", lambda gpu: 8 * sharing.GIB)
    model = str(config(tmp_path / "m", 16500))
    found, skipped = of_model("prompts,mixed", tmp_path).prepared(model)
    assert [str(load) for load in found.loads] == ["8x2048+8", "4x8192+8", MIXED]
    assert "has 32776 tokens, and the context" in skipped[Load.parse("1x32768+8")]
    monkeypatch.setattr(sharing, "limit", lambda gpu: int(5.3 * sharing.GIB))
    found, skipped = of_model("prompts", tmp_path).prepared(model)
    assert [str(load) for load in found.loads] == ["8x2048+8"]
    assert "GiB are left" in skipped[Load.parse("4x8192+8")]
    found, skipped = of_model("prompts", tmp_path, kv_cache_dtype="fp8").prepared(model)
    assert [str(load) for load in found.loads] == ["8x2048+8", "4x8192+8"]
    with pytest.raises(ValueError, match="16600 tokens, and the context"):
        of_model("prompts,1x16592+8", tmp_path).prepared(model)
    monkeypatch.setattr(sharing, "limit", lambda gpu: int(8.6 * sharing.GIB))
    both, skipped = of_model("prompts", tmp_path, with_engine=True, kv_cache_dtype="fp8").prepared(model)
    assert both.need is not None and both.loads and Load.parse("4x8192+8") in skipped


def test_engine_next_to_a_host_has_the_same_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "limit", lambda gpu: 40 * sharing.GIB)
    monkeypatch.setattr(asked.machine, "interpreter", lambda python: asked.machine.Interpreter(python))
    model = str(config(tmp_path / "m", 4096))
    found = {}
    for ranks in (1, 2):
        one = of_model("1x2048+8", tmp_path, with_engine=True, tensor_parallel=ranks)
        found[ranks] = one._comparison(model, one.prepared(model)[0])
    for ranks, comparison in found.items():
        engine = comparison.engine_settings
        assert engine is not None and engine["tensor_parallel"] == ranks
        assert comparison.settings["tensor_parallel"] == ranks
        assert engine["kv_bytes"] == comparison.settings["kv_bytes"]
    assert found[2].settings["kv_bytes"] == found[1].settings["kv_bytes"] / 2
    with pytest.raises(ValueError, match=r"num_attention_heads=\d+.* cannot be shared by 3 ranks"):
        of_model("1x2048+8", tmp_path, with_engine=True, tensor_parallel=3).prepared(model)


def test_memory_of_a_rank_decides_which_loads_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asked, "gpu", True)
    model = str(config(tmp_path / "m", 1 << 20))

    def refusal(gib: float, **more: Any) -> str:
        monkeypatch.setattr(sharing, "limit", lambda gpu: int(gib * sharing.GIB))
        try:
            of_model("1x100000+8", tmp_path, **more).prepared(model)
        except ValueError as error:
            return str(error)
        return ""

    for engine in (False, True):
        least = next(gib for gib in range(1, 99) if not refusal(gib, with_engine=engine))
        assert not refusal(least - 1, with_engine=engine, tensor_parallel=2)
        assert "on each of 2 ranks" in refusal(2, with_engine=engine, tensor_parallel=2)


def test_measurement_is_the_same_in_another_process(tmp_path: Path) -> None:
    one = of_model("prompts,1x16@50+8", tmp_path, ops=["rms_norm"], engine_args={"a": 1})
    assert Asked.from_json(one.to_json(["m", "n"])) == (one, ["m", "n"])


def test_failure_in_a_process_is_a_row_and_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked.machine, "interpreter", lambda python: asked.machine.Interpreter(python))
    one = of_model("1x4096+8", tmp_path)
    lines = list(map(json.loads, measure_one(one.to_json([str(config(tmp_path / "m", 512))]))))
    assert (
        lines[0]["status"] == "unsupported" and "4104" in lines[0]["reason"] and "4104" in lines[1]["failed"]
    )


def test_failed_model_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own: the first is refused, the others end without a word."""
    one = of_model("1x4096+8", tmp_path, python=sys.executable)
    small = str(config(tmp_path / "m", 512))
    rows = []
    apart = Apart(one, [small, "b", "c"], [], float("inf"))
    for row in apart.measure():
        rows.append(row)
        monkeypatch.setattr(sys, "executable", "/bin/false")
    assert rows[0].status is Status.UNSUPPORTED and rows[-1].status is Status.DIED
    assert next(iter(apart.failed)) == small and "4104" in apart.failed[small]
    assert "ended with status" in apart.failed["c"] and [r.case["state"] for r in rows] == ["failed"] * 3
    assert not list(Apart(one, [small], [], late=0.0).measure())  # no time left


def test_rows_of_another_commit_are_not_continued(
    tmp_path: Path, without_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = stock(0, 0, 1.0)
    row.case["loads"], row.commit = "prompts", "0123456789ab"
    append(tmp_path / "rows.jsonl", [row])
    model = config(tmp_path / "m", 512)
    command = [COMMAND, model, "--loads", "1x4096+8", "--out", tmp_path]
    done = fk_bench_here(*command)
    assert (
        done.returncode == 2
        and "commit 0123456789ab, and this is" in done.stderr
        and "--force" in done.stderr
    )
    done = fk_bench_here(*command, "--force")
    assert done.returncode == 1 and "4104" in done.stderr


def test_gpus_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert chosen_gpus("all", 3) == ["0", "1", "2"] and chosen_gpus("2,0,2", 3) == ["2", "0"]
    with pytest.raises(ConfigError, match="no GPU '3': give all, or some of 0, 1, 2"):
        chosen_gpus("3", 3)
    with pytest.raises(ConfigError, match="this machine has no GPU"):
        chosen_gpus("all", 0)
