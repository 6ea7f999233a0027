"""`make bench-h200` asks for commands and options that there are."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
from pathlib import Path

import typer
from fk_bench.cli import app

ROOT = Path(__file__).resolve().parents[2]
RANDOM = "Llama-3.1-8B shapes, random weights"


def test_every_part_has_its_command_and_options(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "RUN": "echo",
        "OUT": str(tmp_path),
        "TOKENIZER": "t",
        "TEXT_MODEL": "s",
        "VLLM": "v/python",
        "PYTHON": "python",
        "TABLES": "1",
    }
    env.pop("MODEL", None)
    done = subprocess.run(
        ["bash", str(ROOT / "bench/h200.sh")], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = [
        shlex.split(line.partition("FASTKERNELS=1 ")[2] or line)
        for line in done.stdout.splitlines()
        if line.startswith(("python ", "v/python ", "env FASTKERNELS=1 "))
    ]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen, scripts = set(), set()
    for line in lines:
        options = [word for word in line if word.startswith("--")]
        if line[1:3] == ["-m", "fk_bench.cli"]:
            known = [name for p in commands[line[3]].params for name in (*p.opts, *p.secondary_opts)]
            assert set(options) <= set(known), line
            seen.add(line[3])
        else:
            scripts.add(Path(line[1]).stem)
            text = (ROOT / line[1]).read_text()
            assert all(f'"{option}"' in text for option in options), line
    assert seen == {"kernels", "diff", "explain", "e2e", "serve-compare", "tables"}
    servers = next(line for line in lines if "serve-compare" in line)
    assert "vllm=v/python" in servers and "vllm,vllm+fk,fastkernels" in servers
    loads = [after for word, after in itertools.pairwise(servers) if word == "--load"]
    assert loads == ["c=1,in=1920,out=8,prompts=30", "c=8,in=1920,out=8,prompts=48"]
    (fp8,) = (line for line in lines if any("servers-fp8" in word for word in line))
    made = next(line for line in lines if "--quantize" in line)
    assert made[2] == fp8[fp8.index("--model") + 1] and fp8[fp8.index("--lanes") + 1] == "vllm,vllm+fk"
    (taken,) = (" ".join(line) for line in lines if "--take" in line)
    assert taken.endswith(f"--model-name {RANDOM}")
    assert {"quality", "host_step"} <= scripts


def test_a_part_that_fails_is_said_and_the_rest_runs(tmp_path: Path) -> None:
    env = {**os.environ, "RUN": "false", "OUT": str(tmp_path), "MODEL": "m"}
    done = subprocess.run(
        ["bash", str(ROOT / "bench/h200.sh")], env=env, capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 1
        and "failed: linear fp8 experts attention step" in done.stdout
        and "servers" in done.stdout
    )
