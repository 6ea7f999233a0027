"""Lay out the statements and signatures of an exported file on as few lines as they need."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from fastkernels.export.text import WIDTH, arguments, is_kernel, parsed, walk

SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Raise, ast.Expr, ast.Assert)


def reflowed(text: str) -> str:
    """The file with each statement and signature on as few lines as it needs."""
    tree, lines = parsed(text), text.split("\n")
    for node in sorted((n for n in walk(tree) if isinstance(n, ast.stmt)), key=lambda n: -n.lineno):
        first, last = _head(node)
        head = lines[first - 1 : last]
        if (first == last and len(head[0]) <= WIDTH) or any("#" in x and "# fmt" not in x for x in head):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if any(isinstance(n, ast.Constant) and "\n" in str(n.value) for n in _shown(node)):
            continue
        new = _filled(node, " " * node.col_offset, " ".join(x.partition("  # fmt")[0].strip() for x in head))
        if new is not None and (len(new) < len(head) or max(map(len, head)) > WIDTH):
            lines[first - 1 : last] = new
    return "\n".join(lines)


def _head(node: ast.stmt) -> tuple[int, int]:
    """First and last line of a simple statement, or of what is above a block."""
    body = getattr(node, "body", None)
    if isinstance(node, SIMPLE):
        return node.lineno, node.end_lineno or 0
    if isinstance(node, (ast.FunctionDef, ast.If, ast.While)) and body and not is_kernel(node):
        if isinstance(node, ast.FunctionDef):
            every = [node.returns, *arguments(node.args)]
            ends = [x.end_lineno for x in every if x is not None and hasattr(x, "end_lineno")]
        else:
            ends = [node.test.end_lineno]
        end = max([node.lineno, *(e or 0 for e in ends)])
        return node.lineno, end + (end < body[0].lineno - 1 and end > node.lineno)
    return node.lineno, node.lineno


def _shown(node: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of the lines that `_head` counts."""
    for name, value in ast.iter_fields(node):
        if name not in ("body", "orelse", "finalbody"):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    yield from walk(part)


def _filled(node: ast.stmt, indent: str, joined: str) -> list[str] | None:
    """The text on one line, or broken in its last brackets; None if neither keeps its meaning or width."""
    block = not isinstance(node, SIMPLE)
    for tight in (re.sub(r",? ([)\]}])", r"\1", re.sub(r"([(\[{]) ", r"\1", joined)),
                  re.sub(r" ([)\]}])", r"\1", re.sub(r"([(\[{]) ", r"\1", joined))):  # fmt: skip
        if _meaning(tight, block) == _meaning(joined, block):
            break
    else:
        return None
    if len(indent + tight) <= WIDTH:
        return [indent + tight]
    at = _last_bracket(tight)
    if at is None:
        return None
    start, end = at
    parts = [p.replace(" ", "\0") for p in elements(tight[start + 1 : end])]
    inner = textwrap.wrap(
        ", ".join(parts), WIDTH - len(indent) - 4, break_long_words=False, break_on_hyphens=False
    )
    made = [f"{indent}    {line}".replace("\0", " ") for line in inner]
    found = [indent + tight[: start + 1], *made, indent + tight[end:]]
    if (
        not made
        or max(map(len, found)) > WIDTH
        or _meaning(" ".join(x.strip() for x in found), block) != _meaning(joined, block)
    ):
        return None
    return found


def _meaning(text: str, block: bool) -> str | None:
    try:
        return ast.dump(ast.parse(f"def f():\n {text} {'pass' if block else ''}"))
    except SyntaxError:
        return None


def _last_bracket(text: str) -> tuple[int, int] | None:
    """Where the last outermost brackets open and close."""
    depth, start, found, quote = 0, 0, None, ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "([{":
            start = i if depth == 0 else start
            depth += 1
        elif c in ")]}":
            depth -= 1
            found = (start, i) if depth == 0 else found
    return found


def elements(text: str) -> list[str]:
    """The elements between outermost commas."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        depth += 0 if quote else (c in "([{") - (c in ")]}")
        if c == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += c
    found: list[str] = []
    for part in (p.strip() for p in parts if p.strip()):
        if found and found[-1].startswith("lambda") and ":" not in found[-1]:
            found[-1] += f", {part}"
        else:
            found.append(part)
    return found
