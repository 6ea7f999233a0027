"""The generated reference pages in git are what the code of this checkout says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "tools" / "docs_reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = generator()


@pytest.mark.parametrize("name", GENERATOR.PAGES)
def test_reference_page_equals_the_code(name: str) -> None:
    text = GENERATOR.page(name)
    same = (FOLDER / name).read_text() == text
    assert same, f"docs/reference/{name} is out of date: run python tools/docs_reference.py"
    assert sys.prefix not in text and str(ROOT) not in text  # nothing of this machine


def test_reference_pages_are_in_git() -> None:
    done = subprocess.run(
        ["git", "check-ignore", *(f"docs/reference/{name}" for name in GENERATOR.PAGES)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.stdout
