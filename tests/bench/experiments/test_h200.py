"""Tests of `make bench-h200`: its commands and options exist, and every table has a part that measures it."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from fk_bench.cli import app
from fk_bench.core.rows import read
from fk_bench.e2e.loads import Kind, Load
from fk_bench.e2e.pictures.measure import LANES
from fk_bench.serving.config import CompareConfig
from fk_bench.tables.results import GROUPS
from support.h200_plan import ROOT, commands, given, planned

from fastkernels.core import registry

sys.path.insert(0, str(ROOT / "bench"))
from experiments import h200

RANDOM = "Llama-3.1-8B shapes, random weights"
SERVERS = {
    "servers-vllm": "vllm,vllm+fk,fastkernels",
    "servers-sglang": "sglang,sglang+fk,fastkernels",
    "servers-256-vllm": "vllm,fastkernels",
    "servers-256-sglang": "sglang,fastkernels",
    "servers-ragged-vllm": "vllm,vllm+fk",
    "servers-ragged-sglang": "sglang,sglang+fk",
    "servers-tp2": "vllm,vllm+fk,sglang,sglang+fk,fastkernels",
    "servers-fp8": "vllm,vllm+fk,sglang,sglang+fk",
}


def after(words: list[str], option: str) -> list[str]:
    return [b for a, b in itertools.pairwise(words) if a == option]


def test_parts_use_existing_commands_and_options(tmp_path: Path) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen, scripts = set(), set()
    for quick in ("0", "1"):
        for line in itertools.chain(*commands(planned(tmp_path, TABLES="1", QUICK=quick)).values()):
            options = {word for word in line if word.startswith("--")}
            if line[1:3] == ["-m", "pytest"]:
                assert all((ROOT / word).is_file() for word in line if word.startswith("tests/")), line
            elif line[1:3] == ["-m", "fk_bench.cli"]:
                there = [name for p in known[line[3]].params for name in (*p.opts, *p.secondary_opts)]
                assert options <= set(there), line
                seen.add(line[3])
            else:
                scripts.add(Path(line[1]).stem)
                text = (ROOT / line[1]).read_text()
                assert all(f'"{option}"' in text for option in options), line
    assert seen == {
        "agents-table", "diff", "e2e", "eval", "explain", "kernels", "patch-compare", "profile", "quality",
        "serve-compare", "tables", "tune",
    }  # fmt: skip
    assert {
        "make_checkpoint", "ragged_prompts", "skinny_linear", "linear_fp8", "decode_attention", "decode_step",
        "works_with", "formats", "linear_int4", "collectives", "experts", "judged",
    } <= scripts  # fmt: skip


def test_sets_of_others_are_judged_scored_and_studied(tmp_path: Path) -> None:
    sets = tmp_path.parent / "sets"
    for name in ("one", "two"):
        (sets / name).mkdir(parents=True, exist_ok=True)
    found = commands(planned(tmp_path, SETS=str(sets)))
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    (judge,) = found["foreign"]
    assert judge[2:4] == [str(sets), str(tmp_path / "foreign")] and after(judge, "--limit") == ["480"]
    for host in ("vllm", "sglang"):
        (score,), (study,), (own,) = (found[f"{n}-{host}"] for n in ("eval", "study", "eval-selftest"))
        wanted = [f"{name}={tmp_path / 'foreign/passing' / name}" for name in ("one", "two")]
        assert after(score, "--set") == wanted and after(score, "--host") == [host] and "--selftest" in own
        assert study[4] == after(score, "--out")[0] and after(study, "--kernels") == [
            str(tmp_path / "foreign")
        ]
        for line in (score, study, own):
            there = [name for p in known[line[3]].params for name in (*p.opts, *p.secondary_opts)]
            assert {w for w in line if w.startswith("--")} <= set(there), line
    (*libraries, table) = found["agents-table"]
    assert table[4:] == [after(line, "--out")[0] for line in libraries]
    without = commands(planned(tmp_path))
    assert not [n for n in without if n in ("foreign", "eval-vllm", "study-vllm")] and "profile" in without
    seconds = {
        p.name: p.seconds for p in h200.parts(h200.Settings(tmp_path, "m", "", {"vllm": "p"}, sets=str(sets)))
    }
    assert seconds["eval-vllm"] == 2 * seconds["eval-selftest-vllm"] > 600


def test_every_server_load_has_a_part(tmp_path: Path) -> None:
    found = commands(planned(tmp_path))
    lines = {name: line for name, (line, *_) in found.items() if name.startswith("servers")}
    assert {name: line[line.index("--lanes") + 1] for name, line in lines.items()} == SERVERS
    for name, line in lines.items():
        lanes = line[line.index("--lanes") + 1].split(",")
        assert after(line, "--resident") == [str(len(lanes))] and "--together" in line
        pythons = given(tmp_path.parent)
        assert after(line, "--python") == [f"vllm={pythons['VLLM']}", f"sglang={pythons['SGLANG']}"]
        assert after(line, "--out") == [str(tmp_path / name)]
        longest = [int(after(line, f)[0]) for f in ("--input-len", "--output-len") if f in line]
        concurrency = tuple(map(int, after(line, "--concurrency")[0].split(",")))
        config = CompareConfig(  # the options are valid, and the cache holds all requests at once
            concurrency=concurrency, num_prompts=tuple(map(int, after(line, "--num-prompts")[0].split(","))),
            loads=tuple(after(line, "--load")), lanes=tuple(lanes),
        )  # fmt: skip
        assert len(config.levels) == len(concurrency) + len(config.loads)
        held = 2048 if len(longest) < 2 else sum(longest) + 64
        assert int(after(line, "--kv-tokens")[0]) >= max(concurrency) * held
    assert after(lines["servers-vllm"], "--load") == [
        "c=1,in=600,out=8,prompts=40", "c=8,in=512,out=8,prompts=240", "c=4,in=1920,out=8,prompts=48",
    ]  # fmt: skip
    assert after(lines["servers-tp2"], "--tensor-parallel") == ["2"]
    (write,) = found["prompts"]
    assert after(write, "--out") == after(lines["servers-ragged-vllm"], "--dataset-path")
    made = {name: line[2] for name in ("model", "model-fp8") for line in found[name]}
    assert after(lines["servers-fp8"], "--model") == [made["model-fp8"]]
    assert all(after(line, "--model") == [made["model"]] for n, line in lines.items() if n != "servers-fp8")
    assert after(lines["servers-vllm"], "--rounds") == ["5"]
    quick = commands(planned(tmp_path, QUICK="1"))
    assert all(after(quick[name][0], "--rounds") == ["3"] for name in SERVERS)


def test_one_model_is_measured_at_long_contexts(tmp_path: Path) -> None:
    for quick, most in (("0", 65536), ("1", 16384)):
        (line,) = commands(planned(tmp_path, ONLY="patch-long", QUICK=quick))["patch-long"]
        loads = [Load.parse(text) for text in after(line, "--loads")[0].split(",")]
        assert {load.kind for load in loads} == {Kind.CONTEXT} and "--with-engine" in line
        assert "1x16384+128" in map(str, loads) and max(load.input_len for load in loads) == most


def test_image_models_are_measured_with_their_hosts(tmp_path: Path) -> None:
    found = commands(planned(tmp_path, ONLY="pictures*"))
    assert len(found) == 1 + 6 + 8  # and the tables
    for name, (line, *_) in found.items():
        if name:
            host = "diffusers" if {"flux.1", "sdxl"} & set(line) else "timm"
            lanes = after(line, "--lanes")[0].split(",")
            assert lanes[0] == "stock" and {*lanes} <= {*LANES}
            assert after(line, "--hosts") == [host] and after(line, "--out") == [str(tmp_path / name)]
    assert h200.not_installed() == []


def test_two_gpu_parts_have_two_after_prerequisites(tmp_path: Path) -> None:
    lines = planned(tmp_path).stdout.splitlines()
    where = {x[3:].partition(":")[0]: x for x in lines if x.startswith("== ")}
    pairs = [f"collectives-{name}" for name in ("collectives", "experts", "judged", "tests")]
    for name in ("servers-tp2", "works-vllm-two", "works-sglang-two", *pairs):
        assert len(where[name].partition("GPU ")[2].partition(", after")[0].split(",")) == 2
    begins = {name: int(line.partition("after ")[2].split()[0]) for name, line in where.items()}
    order = list(where)
    assert max(begins["model"], begins["model-fp8"]) <= 60 and order.index("linear") < order.index("step")
    assert all(begins[name] >= 60 for name in SERVERS)
    assert {name for name in order if name.startswith(("works", "collectives"))} == set(order[-13:])
    assert lines[-1].startswith("about ") and " on 4 GPUs (" in lines[-1]
    one = planned(tmp_path, GPUS="0").stdout
    assert "== servers-tp2: left out, it needs 2 GPUs" in one and "--tensor-parallel" not in one


def test_collectives_need_one_command_and_two_gpus(tmp_path: Path) -> None:
    names = "collectives*,works-*-two"
    found = commands(planned(tmp_path, ONLY=names, GPUS="0,1"))
    assert {name for name in found if name} == {
        "collectives-collectives", "collectives-experts", "collectives-judged", "collectives-tests",
        "works-vllm-two", "works-sglang-two",
    }  # fmt: skip
    for host in ("vllm", "sglang"):
        (features,) = after(found[f"works-{host}-two"][-1], "--features")
        assert {"tp_sums", "ep_dispatch"} <= set(features.split(","))
    (tests,) = found["collectives-tests"]
    of_ranks = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b[^#]*needs (two|\{n\}) (NVIDIA )?GPUs", path.read_text())
    }
    assert of_ranks and of_ranks <= set(tests)


def test_quality_runs_text_model_in_each_host(tmp_path: Path) -> None:
    more = '{"attention_backend": "triton"}'
    found = commands(planned(tmp_path, SGLANG_ENGINE=more))
    text = given(tmp_path.parent)["TEXT_MODEL"]
    for host, engine in (("vllm", []), ("sglang", [f"sglang={more}"])):
        (line,) = found[f"quality-{host}"]
        assert line[3:5] == ["quality", text] and after(line, "--hosts") == [host] and "--exact" in line
        assert after(line, "--engine-args") == engine
    assert not [
        name for name in commands(planned(tmp_path, TEXT_MODEL="")) if name.startswith(("quality", "text"))
    ]


def test_judge_parts_have_every_op_once() -> None:
    judged = [op for part in h200.JUDGED for op in h200.judged(part)]
    assert sorted(judged) == sorted(registry.op_names())
    assert tuple(f"kernels-{name}" for name in h200.JUDGED) == GROUPS["kernels"]
    for op in judged:
        assert {case.name for case in registry.get(op).cases} & set(h200.QUICK_CASES), op


def test_tables_read_files_that_parts_write(tmp_path: Path) -> None:
    found = commands(planned(tmp_path, TABLES="1"))
    outs = {Path(o) for line in itertools.chain(*found.values()) for o in after(line, "--out")}
    written = {o.stem for o in outs if o.parent == tmp_path}
    needed = {file for files in GROUPS.values() for file in files if file not in GROUPS}
    assert needed <= written, needed - written
    every, taken = found[""]
    called = [f"model={RANDOM}", f"model-fp8={RANDOM} in FP8"]
    assert after(every, "--out") == [str(tmp_path / "tables.md")] and after(taken, "--take") == [
        str(tmp_path)
    ]
    assert after(every, "--model-name") == after(taken, "--model-name") == called
    for name in ("mine", "eight"):
        (tmp_path / name).mkdir()
    model, fp8 = str(tmp_path / "mine"), str(tmp_path / "eight")
    mine = commands(planned(tmp_path, MODEL=model, FP8_MODEL=fp8, MODEL_NAME="Mine"))
    assert after(mine[""][0], "--model-name") == ["mine=Mine", "eight=Mine in FP8"]
    assert "model" not in mine and after(mine["servers-fp8"][0], "--model") == [fp8]
    assert not after(commands(planned(tmp_path, MODEL=model))[""][0], "--model-name")


def test_host_parts_are_left_out_without_hosts(tmp_path: Path) -> None:
    found = commands(planned(tmp_path, VLLM="", SGLANG="", TEXT_MODEL=""))
    assert {"linear", "kernels-norms", "startup"} <= set(found)
    assert not [
        n
        for n in found
        if n.startswith(("servers", "works", "quality", "host", "kv", "prompts", "model-fp8"))
    ]
    found = commands(planned(tmp_path, VLLM="", TEXT_MODEL=""))
    assert "servers-sglang" in found and "servers-vllm" not in found and "quality-sglang" not in found


def test_only_selects_parts_and_mistakes_are_reported(tmp_path: Path) -> None:
    found = commands(planned(tmp_path, ONLY="step,servers-ragged*"))
    assert set(found) == {
        "", "linear", "step", "model", "prompts", "servers-ragged-vllm", "servers-ragged-sglang",
    }  # fmt: skip
    for more, said in (
        ({"ONLY": "sevrers"}, "no part 'sevrers'; parts: model, model-fp8"),
        (
            {"ONLY": "servers*", "VLLM": "", "SGLANG": ""},
            "parts that need VLLM, SGLANG are left out: not set",
        ),
        ({"LIMIT": "soon"}, "LIMIT: 'soon' is not a number"),
        ({"RUN": "plan"}, "RUN=plan: RUN=echo prints the plan"),
        ({"RUN": "", "GPUS": "", "CUDA_VISIBLE_DEVICES": ""}, "no GPU is visible"),
    ):
        done = planned(tmp_path, **more)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_run_reports_parts_keeps_logs_and_makes_tables(tmp_path: Path) -> None:
    """A run whose first part fails on a machine without a GPU."""
    settings = {
        "RUN": "",
        "GPUS": "0",
        "MODEL": str(tmp_path),
        "VLLM": "",
        "SGLANG": "",
        "LIMIT": "100",
    }
    done = planned(tmp_path / "out", **settings, ONLY="step", QUICK="1", PATH="/usr/bin:/bin")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 parts on GPU 0, about 4 minutes, commit ") and ", QUICK=1, to " in lines[0]
    assert lines[1] == "parts that need VLLM, SGLANG are left out: not set"
    assert any("begins    linear  on GPU 0, about 130 s, 100 at most; " in x for x in lines)
    assert any("FAILED    linear  exit status 1, after " in x for x in lines)
    assert any("left out  step  linear failed" in x for x in lines)
    log, out = tmp_path / "out/logs/linear.log", tmp_path / "out"
    assert lines[-3].startswith("  linear: exit status 1, after ") and lines[-3].endswith(f" ({log})")
    assert lines[-2:] == [
        "  step: linear failed",
        f"failed: linear step; other results are in {out}; OUT={out} runs the failed parts again",
    ]
    assert "skinny_linear.py" in log.read_text()
    assert "kernels: no rows." in (tmp_path / "out/tables.md").read_text()


def test_commit_of_a_copy_is_the_given_one(tmp_path: Path) -> None:
    copy = tmp_path / "fk_bench"
    shutil.copytree(ROOT / "bench/fk_bench/core", copy / "core")
    (copy / "__init__.py").write_text("")
    code = "from fk_bench.core import machine; print(machine.commit())"

    def said(**more: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "FK_BENCH_COMMIT"}
        env |= {"PYTHONPATH": str(tmp_path), "GIT_CEILING_DIRECTORIES": str(tmp_path.parent), **more}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert said() == "None" and said(FK_BENCH_COMMIT="abc123") == "abc123"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "Other history"]):
        subprocess.run([*git, *command], check=True)
    assert len(said()) == 13 and said(FK_BENCH_COMMIT="abc123") == "abc123"


@pytest.mark.parametrize("lengths", [(20, 90), (40, 40)])
def test_ragged_prompts_have_requested_lengths(
    tmp_path: Path, words_model: Path, lengths: tuple[int, int]
) -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    from experiments.checkpoints import ragged_prompts
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(words_model / "tokenizer.json"))
    made = ragged_prompts.prompts(str(words_model), 60, *lengths, seed=0)
    assert made == ragged_prompts.prompts(str(words_model), 60, *lengths, seed=0)
    assert made != ragged_prompts.prompts(str(words_model), 60, *lengths, seed=1)
    counted = [len(tokenizer.encode(text).ids) for text, _ in made]
    assert counted == [n for _, n in made]
    assert all(lengths[0] - 2 <= n <= lengths[1] for n in counted)  # a word has two tokens here
    assert lengths[0] == lengths[1] or (min(counted) < 30 and max(counted) > 80)
    assert len({text.split()[0] for text, _ in made}) == 60
    with pytest.raises(ValueError, match="--shortest 9 --longest 90: 16 or more"):
        ragged_prompts.prompts(str(words_model), 1, 9, 90, seed=0)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text, _ in made))
    assert read(file)[0] == []  # prompts are not rows
