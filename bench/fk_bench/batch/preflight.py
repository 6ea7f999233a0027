"""Checks of a long measurement's settings before it starts; each problem is one line of text.

This module runs before the dependencies are known to be installed, so it imports none of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

MODULES = (  # dependencies of pyproject.toml and of its extra `bench`
    "torch", "triton", "numpy", "safetensors", "transformers", "tokenizers", "huggingface_hub", "jinja2", "fastapi",
    "uvicorn", "pydantic", "prometheus_client", "packaging", "xgrammar", "typer", "rich", "httpx",
    "aiohttp", "plotly", "psutil",
)  # fmt: skip


def need_modules(command: str) -> None:
    """Exit with status 2 and a line on standard error if this Python lacks one of MODULES."""
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
    """Return a line for each of these variables that is set to something other than a folder."""
    said = []
    for name in names:
        if (value := env.get(name)) and not os.path.isdir(value):
            what = "this is a file, not a folder" if os.path.exists(value) else "no such folder"
            seen = "" if os.path.isabs(value) else f" in {os.getcwd()}"
            said.append(f"{name}={value}: {what}{seen}; models are not downloaded from a hub")
    return said


def wrong_out(out: Path) -> list[str]:
    """Return a line if a folder for results cannot be created here; create nothing."""
    there = next(p for p in (out.absolute(), *out.absolute().parents) if os.path.exists(p))
    if not there.is_dir():
        return [f"OUT={out}: cannot be created: {there} is not a folder"]
    if not os.access(there, os.W_OK | os.X_OK):
        return [f"OUT={out}: cannot be created: {there} is not writable"]
    return []


def wrong_host(host: str, path: str) -> list[str]:
    """Return a line if a host cannot be patched in this Python."""
    from fk_bench.serving.lanes import Lane, not_installed

    name = host.upper()
    if shutil.which(path) is None:
        what = "is not executable" if os.path.isfile(path) else "no such file"
        return [
            f"{name}={path}: {what}; {name} is the Python of the environment that has {host}: .../bin/python"
        ]
    problem = not_installed(Lane(f"{host}+fk", host, True, path), f"{name}=PATH")
    return [f"{name}={path}: {problem}"] if problem else []


def wrong_json(env: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return a line for each of these variables that is set to something other than a JSON object."""
    said = []
    for name in names:
        try:
            found = json.loads(env.get(name) or "{}")
        except json.JSONDecodeError as error:
            found = error
        if not isinstance(found, dict):
            said.append(f"{name}={env[name]}: not a JSON object such as '{{\"name\": 1}}'")
    return said
