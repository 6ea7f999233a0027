"""Tests of the checks of `make bench-h200` before anything runs: one line a problem, exit status 2."""

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


def test_modules_are_the_declared_dependencies() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    ours = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    bench = text.partition("\nbench = [")[2].partition("]\n")[0]
    names = re.findall(
        r'"([a-z0-9_-]+)[<>=][^"]*"', re.sub(r'"[^"]*; python_version < [^"]*"', "", ours + bench)
    )
    assert sorted(n.replace("-", "_") for n in names) == sorted(preflight.MODULES)


@pytest.mark.parametrize("plan", ["echo", ""])
def test_missing_dependencies_are_reported(tmp_path: Path, plan: str) -> None:
    done = planned(tmp_path, "-S", RUN=plan, PYTHONPATH="")  # -S: no packages at all
    (line,) = errors(done)
    assert line.startswith(f"{sys.executable} has no torch, triton, ") and "httpx" in line
    assert 'pip install "fastkernels[bench]"' in line and "make bench-h200 PYTHON=.../bin/python" in line
    assert not done.stdout and not list(tmp_path.iterdir())


def test_wrong_paths_are_reported_together_with_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    names = {
        "MODEL": f"{tmp_path}/none", "FP8_MODEL": str(file), "TEXT_MODEL": "owner/model", "TOKENIZER": "/none",
        "VLLM": f"{tmp_path}/none", "SGLANG": str(file), "OUT": f"{file}/out", "VLLM_ENGINE": "{", "SGLANG_ENGINE": "3",
    }  # fmt: skip
    wanted = [
        f"MODEL={tmp_path}/none: no such folder;",
        f"FP8_MODEL={file}: this is a file, not a folder;",
        f"TEXT_MODEL=owner/model: no such folder in {ROOT}; models are not downloaded from a hub",
        "TOKENIZER=/none: no such folder;",
        f"VLLM={tmp_path}/none: no such file; VLLM is the Python of the environment that has vllm",
        f"SGLANG={file}: is not executable; SGLANG is",
        "VLLM_ENGINE={: not a JSON object such as", "SGLANG_ENGINE=3: not a JSON object such as",
        f"OUT={file}/out: cannot be created: {file} is not a folder",
    ]  # fmt: skip
    plan, run = planned(tmp_path, **names), planned(tmp_path, **names, RUN="")
    for done in (plan, run):
        assert [said.startswith(want) for said, want in zip(errors(done), wanted, strict=True)] == [True] * 9
    assert "== servers-fp8: GPU " in plan.stdout and " on 4 GPUs (" in plan.stdout.splitlines()[-1]
    assert not run.stdout and list(tmp_path.iterdir()) == [file]


def test_unusable_out_folder_ends_the_run(tmp_path: Path) -> None:
    done = planned(tmp_path, RUN="", OUT="/proc/none", GPUS="0")
    (line,) = errors(done)
    assert line.startswith("OUT=/proc/none: cannot be created: ") and not done.stdout
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    said = preflight.wrong_out(closed / "a/b")
    assert said == (
        [] if os.geteuid() == 0 else [f"OUT={closed}/a/b: cannot be created: {closed} is not writable"]
    )
    assert preflight.wrong_out(tmp_path / "a/b") == [] and not (tmp_path / "a").exists()


def test_python_without_host_or_plugin_is_reported(tmp_path: Path) -> None:
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


def test_plan_needs_no_gpu_and_names_skipped_parts(tmp_path: Path) -> None:
    settings = {"GPUS": "", "CUDA_VISIBLE_DEVICES": "", "TEXT_MODEL": "", "ONLY": "step,startup"}
    done = planned(tmp_path, **settings)
    *_, left, assumed, total = done.stdout.splitlines()
    assert done.returncode == 0 and not done.stderr
    assert left == "parts that need TEXT_MODEL are left out: not set"
    assert assumed == "no GPU is visible: planned for GPUS=0,1,2,3"
    assert (
        total == "about 4 minutes (190 s) on 4 GPUs (240 s of a GPU)"
    )  # linear and step, with startup in parallel
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/parts.jsonl").write_text('{"part": "linear", "status": "ok"}\n')
    again = planned(tmp_path, **settings)
    assert "== linear: already done in this folder" in again.stdout and "skinny_linear.py" not in again.stdout
    assert set(commands(again)) >= {"step", "startup"}
    assert again.stdout.splitlines()[-1] == "about 1 minute (60 s) on 4 GPUs (110 s of a GPU)"
