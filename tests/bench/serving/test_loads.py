"""Loads with other lengths (--load) in serve-compare: their meaning, and a run with stub servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import read
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.serving.compare.serve_compare import Compare
from fk_bench.serving.config import CompareConfig, Level, resumed
from fk_bench.serving.estimate import Estimate
from rich.console import Console
from support.commands import fk_bench, last_json


def config(*loads: str, **more: Any) -> CompareConfig:
    return CompareConfig(loads=loads, **{"concurrency": (1, 8), **more})


def test_load_flag_adds_a_level() -> None:
    made = config("c=8,in=2048,out=8,prompts=100", " rate=0.5, in=1024", "c=4", rate=(2.0,))
    assert [level.label for level in made.levels] == [
        "c=1", "c=8", "rate=2", "c=8,2048-8", "rate=0.5,1024-32", "c=4"
    ]  # fmt: skip
    assert [made.prompts_at(level) for level in made.levels] == [4, 16, 20, 100, 16, 16]
    assert [made.lengths(level) for level in made.levels[2:5]] == [(128, 32), (2048, 8), (1024, 32)]
    assert made.levels[5] == Level("concurrency", 4)
    assert config("c=4,in=128,out=32").levels[2] == Level("concurrency", 4)  # equal to the run's lengths


def test_num_prompts_by_run_and_load() -> None:
    made = config("c=8,in=9", "c=2,in=9,prompts=7", num_prompts=(2, 6))
    assert [made.prompts_at(level) for level in made.levels] == [2, 6, 16, 7]
    made = config("c=8,in=9", "c=2,in=9,prompts=7", num_prompts=(5,))
    assert [made.prompts_at(level) for level in made.levels] == [5, 5, 5, 7]
    with pytest.raises(ConfigError, match=r"one for each of 2 loads, got 3 .*prompts=N"):
        config("c=8,in=9", num_prompts=(1, 2, 3))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("c=8", "--load: a load is given twice: c=1, c=8, c=8"),
        ("c=8,in=128,out=32", "given twice: c=1, c=8, c=8"),
        ("c=0", "--load c=0: c= must be 1 or more, got 0"),
        ("c=8,in=0", "in= must be 1 or more, got 0"),
        ("c=8,out=-1", "out= must be 1 or more, got -1"),
        ("c=8,in=9,prompts=0", "prompts= must be 1 or more, got 0"),
        ("c=8,in=", "in= must be 1 or more, got nothing"),
        ("rate=0", "rate= must be above 0, got 0"),
        ("rate=nan", "rate= must be above 0, got nan"),
        ("c=1.5", "c=: '1.5' is not a whole number"),
        (
            "c=8,len=9",
            "'len=9' is not KEY=VALUE of a known key. Known: c, rate, in, out, turns, prefix, groups, prompts.",
        ),
        ("c=8,in", "'in' is not KEY=VALUE"),
        ("c=8,in=9,in=10", "in= is given twice"),
        ("in=9", "give one of c=N .* and rate=N"),
        ("c=8,rate=2", "give one of c=N .* and rate=N"),
    ],
)
def test_invalid_load_is_an_error(load: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(load)


def test_duplicate_load_is_an_error() -> None:
    with pytest.raises(ConfigError, match="given twice: c=1, c=8, c=8,9-9, c=8,9-9"):
        config("c=8,in=9,out=9", "c=8,in=9,out=9,prompts=3")
    assert len(config("c=8,in=9,out=9", "c=8,in=9,out=10").levels) == 4


@pytest.mark.parametrize("load", ["c=2,in=9", "c=2,out=9"])
def test_lengths_need_random_prompts(load: str) -> None:
    with pytest.raises(ConfigError, match=f"{load}: .*prompts of --dataset sharegpt have their own lengths"):
        config(load, dataset="sharegpt", dataset_path="x")
    assert config("c=2", dataset="sharegpt", dataset_path="x").levels[2].label == "c=2"


def test_run_json_and_resume(tmp_path: Path) -> None:
    made = config("c=8,in=2048,out=8", "c=1,in=9")
    made.save(tmp_path / "run.json")
    assert CompareConfig.load(tmp_path / "run.json") == made
    old = {k: v for k, v in json.loads((tmp_path / "run.json").read_text()).items() if k != "loads"}
    (tmp_path / "run.json").write_text(json.dumps(old))
    assert CompareConfig.load(tmp_path / "run.json") == config()
    assert resumed(made, {"loads": made.loads}) == made
    with pytest.raises(
        ConfigError, match="--load was c=8,in=2048,out=8, c=1,in=9 in that run and is c=1 now"
    ):
        resumed(made, {"loads": ("c=1",)})


def sizing(model: Path, out: Path, *loads: str, **more: Any) -> tuple[int, int, int]:
    given = config(*loads, model=str(model), rounds=1, **more)
    made = Compare(given, [], out, Console()).fleet.sizing
    return made.max_model_len, made.max_num_seqs, made.kv_tokens


def test_servers_are_sized_for_largest_level(words_model: Path, tmp_path: Path) -> None:
    """64 x (128 + 32) and 2 x (3000 + 8) tokens plus a margin, but not 64 x 3008."""
    few = {"concurrency": (64,), "num_prompts": (1,)}
    assert sizing(words_model, tmp_path, **few) == (256, 64, 20480)
    assert sizing(words_model, tmp_path, "c=2,in=3000,out=8", **few) == (3072, 64, 20480)
    assert sizing(words_model, tmp_path, "c=16,in=3000,out=8", **few) == (3072, 64, 61440)
    assert sizing(words_model, tmp_path, "c=100,in=3,out=8", **few) == (256, 100, 20480)


def test_estimate_uses_lengths_of_load() -> None:
    def seconds(*loads: str) -> float:
        made = config(*loads)
        step = Estimate(made, 0, gpu=False)
        return sum(step.rounds(level, made.rounds) for level in made.levels)

    long, short, own = (
        seconds(f"c=2,in={a},out={b},prompts=10") - seconds() for a, b in ((2000, 10), (20, 10), (128, 33))
    )
    assert long == pytest.approx(short * 110 / 11)
    assert own == pytest.approx(seconds("c=2,prompts=10") - seconds(), rel=0.05)


@pytest.mark.slow
def test_run_with_other_lengths_is_resumed(words_model: Path, stub_python: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lanes = ("--lanes", "vllm,sglang", "--python", f"vllm={stub_python}", "--python", f"sglang={stub_python}")
    size = [
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
    ]
    loads = ("--load", "c=4,in=70,out=2,prompts=8", "--load", "rate=200,in=30,prompts=3")
    more = ("--agreement-prompts", "0", "--ready-timeout", "20", "--env", "sglang:STUB_DIE_AT=40")
    first = fk_bench("serve-compare", "--model", words_model, *lanes, *size, *loads, *more, "--out", run)
    # 1 and 2 x 2 of c=1, 4 and 2 x 6 of c=4, 4 and 2 x 8 of the load: the 40th is in its second round
    line = last_json(first)
    assert (first.returncode, line["at"], line["lanes"][0]["status"]) == (1, "c=4", "ok"), first.stderr
    before, _ = read(run / "rows.jsonl")
    mine = [r for r in before if r.kind == "round" and r.subject.lane == "vllm"]
    keys = ("load", "value", "input_len", "output_len", "num_prompts")
    assert [tuple(r.case[k] for k in keys) for r in mine if r.round == 0] == [
        ("concurrency", 1, 9, 5, 2),
        ("concurrency", 4, 9, 5, 6),
        ("concurrency", 4, 70, 2, 8),
        ("rate", 200.0, 30, 5, 3),
    ]
    assert [r.case.get("run_lengths") for r in mine if r.round == 0] == [None, None, [9, 5], [9, 5]]
    asked = [json.loads(x) for x in (run / "requests/vllm.c=4,70-2.r1.jsonl").read_text().splitlines()]
    assert len(asked) == 8 and {(x["prompt_tokens"], x["output_tokens"]) for x in asked} == {(70, 2)}
    assert (run / "requests/vllm.rate=200,30-5.r0.jsonl").is_file()
    command = (run / "servers/sglang/command.sh").read_text()
    assert "--context-length 192" in command  # 72 tokens and room
    again = fk_bench("serve-compare", "--resume", run, "--env", "sglang:STUB_DIE_AT=-1", *loads)
    assert again.returncode == 0 and last_json(again)["ok"], again.stderr
    after, _ = read(run / "rows.jsonl")
    new = [r for r in after[len(before) :] if r.kind == "round"]
    assert [(r.subject.lane, r.case["input_len"], r.round) for r in new] == [
        ("sglang", 70, 1), ("sglang", 30, 0), ("sglang", 30, 1)
    ]  # fmt: skip
    means = {
        (r.subject.lane, r.case["load"], r.case["input_len"]): r.case["num_prompts"]
        for r in after
        if r.kind == "summary"
    }
    assert len(means) == 6 and means["sglang", "concurrency", 70] == 8  # c=1 and c=4 do not differ here
    report = (run / "report.html").read_text()
    assert "<h2>up to 4 requests in flight, 70 tokens in and 2 out " in report
    other = fk_bench("serve-compare", "--resume", run, "--load", "c=4,in=71,out=2")
    assert other.returncode == 2 and "--load was c=4,in=70,out=2,prompts=8, rate=200" in other.stderr
