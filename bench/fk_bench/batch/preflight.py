"""What a long measurement needs before it begins, and what of it is not there, in lines for people.

This module is imported before it is known whether our dependencies are there: it needs none of them itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

MODULES = (  # of pyproject.toml's dependencies and of its extra `bench`
    "torch", "triton", "numpy", "safetensors", "transformers", "tokenizers", "huggingface_hub", "jinja2", "fastapi",
    "uvicorn", "pydantic", "prometheus_client", "packaging", "typer", "rich", "httpx", "aiohttp", "plotly", "psutil",
)  # fmt: skip


def need_modules(command: str) -> None:
    """End with status 2 and a line on standard error, where this Python has not all of MODULES."""
    lacking = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if not lacking:
        return
    print(
        f'error: {sys.executable} has no {", ".join(lacking)}: pip install "fastkernels[bench]" there (in this '
        f"checkout: pip install -e .[bench]), or name a Python that has it: {command} PYTHON=.../bin/python",
        file=sys.stderr,
    )
    raise SystemExit(2)


def wrong_folders(env: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """A line for each of these variables that is set and no folder."""
    said = []
    for name in names:
        if (value := env.get(name)) and not os.path.isdir(value):
            what = "this is a file, not a folder" if os.path.exists(value) else "there is no such folder"
            seen = "" if os.path.isabs(value) else f" in {os.getcwd()}"
            said.append(f"{name}={value}: {what}{seen}; nothing is taken from a hub")
    return said


def wrong_out(out: Path) -> list[str]:
    """A line if a folder for results cannot be made here; nothing is made."""
    there = next(p for p in (out.absolute(), *out.absolute().parents) if os.path.exists(p))
    if not there.is_dir():
        return [f"OUT={out}: cannot be made: {there} is no folder"]
    if not os.access(there, os.W_OK | os.X_OK):
        return [f"OUT={out}: cannot be made: {there} may not be written to"]
    return []


def wrong_host(host: str, path: str) -> list[str]:
    """A line if this is no Python in which a host can be patched."""
    from fk_bench.serving.lanes import Lane, not_installed

    name = host.upper()
    if shutil.which(path) is None:
        what = "is not executable" if os.path.isfile(path) else "is no file"
        return [
            f"{name}={path}: {what}; {name} is the Python of the environment that has {host}: .../bin/python"
        ]
    problem = not_installed(Lane(f"{host}+fk", host, True, path), f"{name}=PATH")
    return [f"{name}={path}: {problem}"] if problem else []


def wrong_json(env: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """A line for each of these variables that is set and no JSON object."""
    said = []
    for name in names:
        try:
            found = json.loads(env.get(name) or "{}")
        except json.JSONDecodeError as error:
            found = error
        if not isinstance(found, dict):
            said.append(f"{name}={env[name]}: this is no JSON object, such as '{{\"name\": 1}}'")
    return said
