"""Run `make bench-h200` with RUN=echo and parse its plan."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from pathlib import Path

from support.kernels import warm

ROOT = Path(__file__).resolve().parents[2]
NOT_SET = (
    "MODEL", "FP8_MODEL", "ONLY", "GPUS", "LIMIT", "QUICK", "CUDA_VISIBLE_DEVICES", "TABLES", "VLLM_ENGINE",
    "SGLANG_ENGINE", "SETS",
)  # fmt: skip


# the answer of a Python that has both hosts and our plugin
ANSWER = """#!/bin/sh
echo '{"versions": {}, "plugins": ["vllm.general_plugins", "sglang.srt.plugins"], "modules": ["vllm", "sglang"]}'
"""


@functools.cache
def given(root: Path) -> dict[str, str]:
    """Folders and Pythons that exist on disk."""
    folder = root / "given"
    for name in ("t", "s", "v", "g"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("v", "g"):
        (folder / name / "python").write_text(ANSWER)
        (folder / name / "python").chmod(0o755)
    (folder / "t/tokenizer.json").write_text("{}")
    return {
        "TOKENIZER": f"{folder}/t", "TEXT_MODEL": f"{folder}/s", "VLLM": f"{folder}/v/python",
        "SGLANG": f"{folder}/g/python",
    }  # fmt: skip


def planned(out: Path, *flags: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in NOT_SET}
    env |= {"RUN": "echo", "OUT": str(out), "GPUS": "0,1,2,3", **given(out.parent), **more}
    script = ROOT / "bench/experiments/h200.py"
    if not flags:
        return warm.run([script], env, timeout=60)
    command = [sys.executable, *flags, str(script)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def commands(done: subprocess.CompletedProcess[str]) -> dict[str, list[list[str]]]:
    """Return {part: its commands, from the interpreter on}; commands that make tables are under ''."""
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[str]]] = {"": []}
    name = ""
    for line in done.stdout.splitlines():
        if line.startswith("== "):
            name = line[3:].partition(":")[0]
            assert name not in found
            found[name] = []
        elif line.startswith("env "):
            words = shlex.split(line)
            words = words[
                next(i for i, w in enumerate(words) if w.endswith("python") or w == sys.executable) :
            ]
            found["" if "tables" in words else name].append(words)
    return found
