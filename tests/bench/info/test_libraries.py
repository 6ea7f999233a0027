"""`fk-bench doctor` on kernel libraries: the copy that each environment has, and how to install a missing one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from fk_bench.info import libraries

ROOT = Path(__file__).parents[3]


def environment(folder: Path, *modules: str) -> str:
    """An interpreter that finds these modules, which fail when imported."""
    for module in modules:
        package = folder.joinpath("site", *module.split("."))
        package.mkdir(parents=True)
        for parent in [package, *package.parents][: len(module.split("."))]:
            (parent / "__init__.py").write_text("raise SystemExit('imported')\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/site exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_host_copy_is_named_without_importing_it(tmp_path: Path) -> None:
    pythons = {
        "this": environment(tmp_path / "a", "flash_attn_interface"),
        "vllm": environment(tmp_path / "b", "vllm.vllm_flash_attn"),
    }
    rows = [r for r in libraries.library_rows(pythons) if r["library"] == "FlashAttention-3"]
    copies = [(r["environment"], r["copy"], r["install"]) for r in rows]
    assert copies == [("this", "flash_attn_interface", ""), ("vllm", "vllm.vllm_flash_attn", "")]


def test_missing_library_says_how_it_is_built(tmp_path: Path) -> None:
    rows = libraries.library_rows({"this": environment(tmp_path)})
    assert [r["library"] for r in rows] == [library.name for library in libraries.LIBRARIES]
    built = {r["library"]: r["install"] for r in rows if "nvcc" in r["install"]}
    assert set(built) == {"FlashAttention-3", "FlashAttention-2", "DeepGEMM"}
    assert all(r["copy"] == "not installed" for r in rows)


@pytest.mark.parametrize("library", libraries.LIBRARIES, ids=lambda library: library.name)
def test_extras_in_hints_exist(library: libraries.Library) -> None:
    extras = re.search(
        r"\[project\.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    assert extras is not None
    for extra in re.findall(r"fastkernels\[([\w-]+)\]", library.install):
        assert re.search(rf"^{extra} = \[", extras[1], re.MULTILINE)
