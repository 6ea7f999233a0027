"""OpenEvolve: `openevolve-run` evolves the stub; its evaluator is the judge, one attempt for each program.

OpenEvolve must be installed for the interpreter `python`. Source of the interface: openevolve 0.4.1's cli.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import run

from fk_bench.agents.adapters import task_folder

NETWORK = True
ENV = ("OPENAI_API_KEY", "OPENAI_API_BASE")
OPTIONS: Mapping[str, str | None] = {"model": None, "url": "", "iterations": "50", "python": sys.executable}
EVALUATOR = """\
import json
import shutil
import subprocess


def evaluate(program_path):
    shutil.copyfile(program_path, "{folder}/{file}")
    answer = json.loads(subprocess.run(["{folder}/check"], capture_output=True, text=True).stdout)
    right = answer.get("verdict") == "ok"
    return {{"combined_score": float(answer.get("speedup") or 0.0) if right else 0.0, "right": float(right)}}
"""


def command(options: Mapping[str, str]) -> str:
    return task_folder.program("openevolve", options, OPTIONS)


def config(options: Mapping[str, str]) -> str:
    """The configuration as JSON, which is YAML: one evaluation at a time, the task as the system's message."""
    return json.dumps({
        "max_iterations": int(options["iterations"]), "diff_based_evolution": False,
        "evaluator": {"parallel_evaluations": 1, "cascade_evaluation": False, "timeout": 3600},
        "prompt": {"system_message": Path("TASK.md").read_text()},
    })  # fmt: skip


def main() -> int:
    options = task_folder.options_of(sys.argv)
    folder, file = Path.cwd(), task_folder.candidate()
    first = folder / f"_first_{file.name}"
    first.write_text(file.read_text())
    (folder / "evaluator.py").write_text(EVALUATOR.format(folder=folder, file=file))
    (folder / "openevolve.yaml").write_text(config(options))
    words = [
        options["python"],
        "-m",
        "openevolve.cli",
        str(first),
        "evaluator.py",
        "--config",
        "openevolve.yaml",
    ]
    words += ["--iterations", options["iterations"], "--primary-model", options["model"]]
    return run(words + (["--api-base", options["url"]] if options["url"] else [])).returncode


if __name__ == "__main__":
    raise SystemExit(task_folder.run(main))
