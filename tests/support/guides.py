"""Follow a guide of docs/ literally: its code goes into a copy of the checkout, where its commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PARTS = (
    "fastkernels", "integrations", "bench/fk_bench", "tests", "tools", "docs", "pyproject.toml", "README.md",
    "CONTRIBUTING.md", "Makefile", "zensical.toml",
)  # fmt: skip
PROGRAMS = {"pytest": ["-m", "pytest", "-q"], "fk-bench": ["-m", "fk_bench.cli"], "python": []}
WHERE = re.compile(r"# (?:at the end of )?(?:`(\w+)` in )?(\S+\.py)$")


def copy(folder: Path) -> Path:
    """A copy of what guides use of the checkout."""
    skipped = shutil.ignore_patterns("__pycache__", ".*", "build")
    for part in PARTS:
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=skipped)
        else:
            shutil.copy(ROOT / part, folder / part)
    return folder


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def write_code(page: Path, checkout: Path) -> list[str]:
    """Put each block of Python that names its file into the file; the files. A block names it in its first line.

    `# FILE` is a new file, `# at the end of FILE` goes there, and `# at the end of `f` in FILE` into that function or
    table.
    """
    written = []
    for block in blocks(page, "python"):
        first, _, code = block.partition("\n")
        named = WHERE.fullmatch(first)
        if named is None:
            continue
        function, file = named[1], checkout / named[2]
        text = file.read_text() if file.exists() else ""
        assert bool(text) == ("at the end of" in first), f"{first}: new files have no text yet"
        if function:
            table = text.find(f"\n{function}: dict")
            at = text.find(
                "\n}" if table >= 0 else "\n\n\n", table if table >= 0 else text.index(f"def {function}(")
            )
            end = at if at >= 0 else len(text.rstrip())
            file.write_text(f"{text[:end].rstrip()}\n{code.rstrip()}\n{text[end:]}")
        else:
            file.write_text(f"{text}\n\n{code}" if text else code)
        written.append(named[2])
    return written


def commands(page: Path) -> list[str]:
    """The command lines of the guide, without comments."""
    joined = "".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = [line.split(" #")[0].strip() for line in joined.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def starting(page: Path, *beginnings: str) -> list[str]:
    """Command lines of the guide that begin so, at least one for each beginning.

    tests/docs/test_guide_lines.py reads these calls: the beginnings are strings, and the page is a constant.
    """
    lines = commands(page)
    for beginning in beginnings:
        assert any(line.startswith(beginning) for line in lines), f"{page.name} has no line {beginning!r}"
    return [line for line in lines if line.startswith(beginnings)]


def of(output: str) -> dict[str, Any]:
    """The last line of a command's output."""
    last: dict[str, Any] = json.loads(output.splitlines()[-1])
    return last


def run(line: str, checkout: Path, words: dict[str, str] | None = None) -> str:
    """The output of a command line that must succeed; `words` replaces the placeholders in it.

    checkout: where it runs; any folder for a command that needs no copy.
    """
    site_packages = sysconfig.get_paths()["purelib"]
    given = {"SOURCE_DIR": site_packages, **(words or {})}
    first, *rest = [given.get(word, word) for word in shlex.split(line.replace("$PWD", str(checkout)))]
    path = os.pathsep.join(str(checkout / part) for part in ("", "integrations", "bench", "tests"))
    program = [sys.executable, *PROGRAMS[first]] if first in PROGRAMS else [first]
    # As in an active environment
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*program, *rest], cwd=checkout, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": programs, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
