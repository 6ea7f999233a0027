"""What `make bench-h200` says, in lines and with status 2, where something that it needs is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fk_bench.batch import preflight
from support.h200_plan import ROOT, commands, given, planned


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and all(line.startswith("error: ") for line in lines), done.stderr
    return [line.removeprefix("error: ") for line in lines]


def test_the_modules_are_those_of_our_package_and_its_bench() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    ours = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    bench = text.partition("\nbench = [")[2].partition("]\n")[0]
    names = re.findall(r'"([a-z0-9_-]+)[<>=]', ours + bench)
    assert sorted(n.replace("-", "_") for n in names) == sorted(preflight.MODULES)


@pytest.mark.parametrize("plan", ["echo", ""])
def test_a_python_without_our_dependencies_is_a_line(tmp_path: Path, plan: str) -> None:
    done = planned(tmp_path, "-S", RUN=plan, PYTHONPATH="")  # -S: no packages at all
    (line,) = errors(done)
    assert line.startswith(f"{sys.executable} has no torch, triton, ") and "httpx" in line
    assert 'pip install "fastkernels[bench]"' in line and "make bench-h200 PYTHON=.../bin/python" in line
    assert not done.stdout and not list(tmp_path.iterdir())


def test_paths_that_are_wrong_are_said_all_at_once_and_a_plan_is_shown_beside(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    names = {
        "MODEL": f"{tmp_path}/none", "FP8_MODEL": str(file), "TEXT_MODEL": "somebody/model", "TOKENIZER": "/none",
        "VLLM": f"{tmp_path}/none", "SGLANG": str(file), "OUT": f"{file}/out", "VLLM_ENGINE": "{", "SGLANG_ENGINE": "3",
    }  # fmt: skip
    wanted = [
        f"MODEL={tmp_path}/none: there is no such folder;",
        f"FP8_MODEL={file}: this is a file, not a folder;",
        f"TEXT_MODEL=somebody/model: there is no such folder in {ROOT}; nothing is taken from a hub",
        "TOKENIZER=/none: there is no such folder;",
        f"VLLM={tmp_path}/none: is no file; VLLM is the Python of the environment that has vllm",
        f"SGLANG={file}: is not executable; SGLANG is",
        "VLLM_ENGINE={: this is no JSON object", "SGLANG_ENGINE=3: this is no JSON object",
        f"OUT={file}/out: cannot be made: {file} is no folder",
    ]  # fmt: skip
    plan, run = planned(tmp_path, **names), planned(tmp_path, **names, RUN="")
    for done in (plan, run):
        assert [said.startswith(want) for said, want in zip(errors(done), wanted, strict=True)] == [True] * 9
    assert "== servers-fp8: GPU " in plan.stdout and " on 4 GPUs (" in plan.stdout.splitlines()[-1]
    assert not run.stdout and list(tmp_path.iterdir()) == [file]


def test_a_folder_that_cannot_be_made_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    done = planned(tmp_path, RUN="", OUT="/proc/none", GPUS="0")
    (line,) = errors(done)
    assert line.startswith("OUT=/proc/none: cannot be made: ") and not done.stdout
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    said = preflight.wrong_out(closed / "a/b")
    assert said == (
        [] if os.geteuid() == 0 else [f"OUT={closed}/a/b: cannot be made: {closed} may not be written to"]
    )
    assert preflight.wrong_out(tmp_path / "a/b") == [] and not (tmp_path / "a").exists()


def test_a_python_without_the_host_or_without_us_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for answer, wanted in (
        ('{"versions": {}, "plugins": [], "modules": ["sglang"]}', "vllm is not installed in"),
        ('{"versions": {}, "plugins": [], "modules": ["vllm"]}', "fastkernels is not installed in"),
    ):
        python.write_text(f"#!/bin/sh\necho '{answer}'\n")
        python.chmod(0o755)
        (line,) = errors(planned(tmp_path, VLLM=str(python)))
        assert line.startswith(f"VLLM={python}: {wanted} {python}") and "--python" not in line


def test_servers_of_a_random_model_need_a_tokenizer(tmp_path: Path) -> None:
    (line,) = errors(planned(tmp_path, TOKENIZER=""))
    assert line.startswith("TOKENIZER is not set, and prompts needs one")
    (line,) = errors(planned(tmp_path, TOKENIZER=given(tmp_path.parent)["TEXT_MODEL"]))
    assert line.endswith("it has no tokenizer.json")
    assert planned(tmp_path, TOKENIZER="", ONLY="linear").returncode == 0


def test_a_plan_needs_no_gpu_and_says_what_it_left_out_and_what_was_done(tmp_path: Path) -> None:
    settings = {"GPUS": "", "CUDA_VISIBLE_DEVICES": "", "TEXT_MODEL": "", "ONLY": "step,startup"}
    done = planned(tmp_path, **settings)
    *_, left, assumed, total = done.stdout.splitlines()
    assert done.returncode == 0 and not done.stderr
    assert left == "not asked for is what needs TEXT_MODEL: not set"
    assert assumed == "no GPU is visible here: planned as if GPUS=0,1,2,3"
    assert total == "about 4 minutes (190 s) on 4 GPUs (240 s of a GPU)"  # linear and step; startup beside
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/parts.jsonl").write_text('{"part": "linear", "status": "ok"}\n')
    again = planned(tmp_path, **settings)
    assert (
        "== linear: was done before, in this folder" in again.stdout
        and "skinny_linear.py" not in again.stdout
    )
    assert set(commands(again)) >= {"step", "startup"}
    assert again.stdout.splitlines()[-1] == "about 1 minute (60 s) on 4 GPUs (110 s of a GPU)"
