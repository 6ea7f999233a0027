"""Check a name of --case against the text of the op's file and of the files that it imports; nothing is imported.

A file states its cases in code, so a name is refused only if it is no string of these files: neither a literal nor
what an f-string can make. The command checks all other names against the cases themselves.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from fastkernels.core.registry import OPS_PACKAGE, OPS_ROOT, op_modules
from fk_bench.core.terminal.flags import ConfigError

JUDGE = Path(__file__).parents[1] / "kernels" / "judge" / "correctness"
KINDS = (JUDGE / "cases.py", JUDGE / "extremes.py")  # of extreme cases, DTYPE:KIND
MOST_NAMES = 20
HOLE = ".+"  # what an f-string puts in


def check(op: str, names: Iterable[str]) -> None:
    """Raise ConfigError for the first name that no case of the op can have; the message lists names of these files."""
    for name in names:
        if not name or "/" in name:  # a captured call: CAPTURE/NUMBER
            continue
        files = _with_imports(_file(op_modules()[op]))
        _, colon, kind = name.rpartition(":")
        if not any(kind in _literals(file) for file in files) and not any(
            re.fullmatch(pattern, kind) for file in (KINDS if colon else files) for pattern in _patterns(file)
        ):
            raise ConfigError(_message(op, name, *_shown(files)))


def _message(op: str, name: str, own: list[str], imported: list[str]) -> str:
    parts = []
    for what, known in (("", own), ("in files that it imports: ", imported)):
        if known:
            parts.append(f"{what}{', '.join(known[:MOST_NAMES])}{', ...' if len(known) > MOST_NAMES else ''}")
    close = difflib.get_close_matches(name, [*own, *imported], n=1)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    return f"--case: no case of {op} is named {name}: {'; '.join(parts)}{hint}"


def _file(module: str) -> Path:
    return OPS_ROOT.joinpath(*module.removeprefix(f"{OPS_PACKAGE}.").split(".")).with_suffix(".py")


@cache
def _nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_bytes())))


@cache
def _with_imports(file: Path) -> list[Path]:
    """The file, and the files of ops that it imports, at any depth."""
    found: dict[Path, None] = {}
    left = [file]
    while left:
        file = left.pop(0)
        if file not in found and file.is_file():
            found[file] = None
            left += _imported(file)
    return [*found]


def _imported(file: Path) -> Iterator[Path]:
    for node in _nodes(file):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{OPS_PACKAGE}."):
            yield from (_file(f"{node.module}{name}") for name in ("", *(f".{a.name}" for a in node.names)))


@cache
def _literals(file: Path) -> frozenset[str]:
    return frozenset(filter(None, (_text(n, HOLE) for n in _nodes(file) if isinstance(n, ast.Constant))))


@cache
def _patterns(file: Path) -> frozenset[str]:
    """Patterns of the strings in a file; f-strings without text count only as the first argument of a call."""
    first = {id(node.args[0]) for node in _nodes(file) if isinstance(node, ast.Call) and node.args}
    found = {(_text(node, HOLE, re.escape), id(node) in first) for node in _nodes(file)}
    return frozenset(text for text, begins in found if text.replace(HOLE, "") or (text and begins))


def _text(node: ast.AST, hole: str, quote: Callable[[str], str] = str) -> str:
    """The text of a literal, or of an f-string with `hole` for each value; '' for other nodes."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, hole, quote) or hole for part in node.values)
    return quote(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _shown(files: list[Path]) -> tuple[list[str], list[str]]:
    """The names in the op's file and in those that it imports, as in `decode_*`."""
    makers = {"Case"} | {name for file in files for name in _makers(file)}
    own, *imported = (_named(file, makers) for file in files)
    return own, [*dict.fromkeys(name for names in imported for name in names if name not in own)]


def _makers(file: Path) -> Iterator[str]:
    """The functions that make a case whose name is their first argument."""
    for function in _nodes(file):
        if isinstance(function, ast.FunctionDef) and function.args.args:
            calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
            named = [call.args[0] for call in calls if _called(call) == "Case" and call.args]
            if any(isinstance(name, ast.Name) and name.id == function.args.args[0].arg for name in named):
                yield function.name


def _named(file: Path, makers: set[str]) -> list[str]:
    calls = [n for n in _nodes(file) if isinstance(n, ast.Call) and n.args and _called(n) in makers]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    names = dict.fromkeys(_text(call.args[0], "*") for call in calls)
    return [name for name in names if name.strip("*_")]


def _called(call: ast.Call) -> str:
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")
