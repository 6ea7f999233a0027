"""Readers find every experiment: its folder in the list, and its scripts on the page of the folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "bench" / "experiments"
FOLDERS = sorted(page.parent.name for page in ROOT.glob("*/README.md"))
SCRIPTS = sorted(file for file in ROOT.rglob("*.py") if file.stem != "__init__")


def test_every_folder_with_scripts_is_in_the_list() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)/README\.md\)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert all(name == folder for name, folder in listed)
    assert sorted(name for name, _ in listed) == FOLDERS
    assert {file.parent.name for file in SCRIPTS if file.parent != ROOT} == {*FOLDERS}


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_page_names_the_script_or_one_that_imports_it(file: Path) -> None:
    page = (file.parent / "README.md").read_text()
    names = [file.name, *(user.name for user in file.parent.glob("*.py") if file.stem in imports(user))]
    of_others = [user for user in SCRIPTS if user.parent != file.parent and file.stem in imports(user)]
    assert any(name in page for name in names) or of_others, f"{file.parent.name}/README.md: {file.name}"


def imports(file: Path) -> set[str]:
    """Last parts of the modules, and the names, that a script imports or starts."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.rpartition(".")[2] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
    return found
