"""Shorten the text of an exported file without changing what it computes."""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Set

from fastkernels.export.layout import elements
from fastkernels.export.text import parsed, walk

INVALID = ("ValueError(", "TypeError(")
DROPPED = "# dropped"
UNSUPPORTED = 'return "unsupported"'


def errors_of_the_host(text: str) -> str:
    """The file with Unsupported for each invalid argument: the host's code raises its own errors."""
    lines = text.split("\n")
    raised = [n for n in walk(parsed(text)) if isinstance(n, ast.Raise) and n.exc is not None]
    for node in sorted(raised, key=lambda n: -n.lineno):
        if ast.unparse(node.exc).startswith(INVALID):  # type: ignore[arg-type]
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + "raise Unsupported"]
    return "\n".join(_joined(lines, "raise Unsupported"))


def without_reasons(text: str) -> str:
    """The file with the same reason for all unsupported calls, which nothing shows: tests of one kind are joined."""
    lines = text.split("\n")
    functions = [n for n in walk(parsed(text)) if isinstance(n, ast.FunctionDef) and n.returns]
    returns = {
        node
        for function in functions
        if ast.unparse(function.returns) == "str | None"  # type: ignore[arg-type]
        for node in ast.walk(function)
        if isinstance(node, ast.Return)
    }
    for node in sorted(returns, key=lambda n: -n.lineno):
        reason = node.value
        if isinstance(reason, ast.JoinedStr) or (
            isinstance(reason, ast.Constant) and reason.value is not None
        ):
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + UNSUPPORTED]
        elif reason is not None and node.lineno == node.end_lineno:
            for part in (n for n in ast.walk(reason) if isinstance(n, ast.JoinedStr)):
                line = lines[node.lineno - 1]
                lines[node.lineno - 1] = (
                    line[: part.col_offset] + '"unsupported"' + line[part.end_col_offset :]
                )
    return "\n".join(_joined(lines, UNSUPPORTED))


def joined(text: str) -> str:
    """The file with tests that follow each other in one, where both leave the call to the host."""
    return "\n".join(_joined(text.split("\n"), "raise Unsupported"))


def _joined(lines: list[str], action: str) -> list[str]:
    """The lines with one test where two that follow each other have the same action."""
    tests = re.compile(r"( *)if (.*):")
    out: list[str] = []
    for line in lines:
        out.append(line)
        while len(out) >= 4 and out[-1] == out[-3] and out[-1].strip() == action:
            first, second = tests.fullmatch(out[-4]), tests.fullmatch(out[-2])
            if not first or not second or first[1] != second[1]:
                break
            joined = f"{first[1]}if {_operand(first[2])} or {_operand(second[2])}:"
            if len(joined) > 110:
                break
            out[-4:] = [joined, out[-1]]
    return out


def _operand(test: str) -> str:
    """The test as an operand of `or`, in parentheses where they are needed or help a reader."""
    node = ast.parse(test, mode="eval").body
    mixed = isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)
    return f"({test})" if mixed or isinstance(node, (ast.IfExp, ast.NamedExpr)) else test


def without_assertions(text: str) -> str:
    """The file without assertions that values are not None, which are for type checkers."""
    lines = text.split("\n")
    for node in (n for n in walk(parsed(text)) if isinstance(n, ast.Assert)):
        tests = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        if node.lineno == node.end_lineno and all(ast.unparse(t).endswith(" is not None") for t in tests):
            lines[node.lineno - 1] = DROPPED
    return "\n".join(line for line in lines if line != DROPPED)


def without_unused_methods(text: str, attributes: set[str]) -> str:
    """A class without the methods that nothing in the file calls."""
    lines, cls = text.split("\n"), ast.parse(text).body[0]
    methods = {n.name: n for n in cls.body if isinstance(n, ast.FunctionDef)}  # type: ignore[attr-defined]
    used = {name for name in methods if name.startswith("__") or name in attributes}
    while True:
        inner = {a.attr for name in used for a in ast.walk(methods[name]) if isinstance(a, ast.Attribute)}
        if (inner & methods.keys()) <= used:
            break
        used |= inner & methods.keys()
    for name in sorted(methods.keys() - used, key=lambda n: -methods[n].lineno):
        first = min([methods[name].lineno, *(d.lineno for d in methods[name].decorator_list)])
        del lines[first - 2 : methods[name].end_lineno]  # with the blank line before it
    return "\n".join(lines)


def without_private_docstrings(text: str, public: Set[str]) -> str:
    """The file without the docstrings of functions that only it calls; those of kernels stay."""
    lines = text.split("\n")
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef) and node.name not in public and not node.decorator_list:
            first = node.body[0]
            if ast.get_docstring(node) and len(node.body) > 1:
                blank = lines[first.end_lineno or 0] == ""  # before a function in the function
                del lines[first.lineno - 1 : (first.end_lineno or 0) + blank]
    return "\n".join(lines)


def _docstring(summary: str, indent: str) -> str:
    """A docstring on one line: as many of its clauses as fit."""
    while len(f'{indent}"""{summary}"""') > 110 and (cut := re.match(r"(.+)[:;,.] ", summary)):
        summary = f"{cut[1]}."
    return f'{indent}"""{summary}"""'


def compact(text: str) -> str:
    """Wrap long signatures, keep the first paragraph of docstrings, and drop runs of blank lines."""
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    lines = text.split("\n")
    for node in sorted(
        (n for n in walk(parsed(text)) if isinstance(n, (ast.FunctionDef, ast.ClassDef))),
        key=lambda n: -n.lineno,
    ):
        first = node.body[0]
        long = ast.get_docstring(node) if isinstance(first, ast.Expr) else None
        if long and len(long.splitlines()) > 1 and len(node.body) > 1:
            summary = " ".join(itertools.takewhile(str.strip, long.splitlines()))
            lines[first.lineno - 1 : first.end_lineno] = [_docstring(summary, " " * first.col_offset)]
    text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines))
    lines = text.split("\n")
    functions = [n for n in walk(parsed(text)) if isinstance(n, ast.FunctionDef)]
    for function in sorted(functions, key=lambda n: -n.lineno):
        start, stop = function.lineno - 1, function.body[0].lineno - 1
        head = lines[start:stop]
        if len(head) < 3 or any("#" in line and "fmt: skip" not in line for line in head):
            continue
        indent = " " * function.col_offset
        parameters = " ".join(line.strip() for line in head[1:-1]).rstrip(",")
        end = head[-1].partition("  #")[0].strip()
        one = f"{indent}{head[0].strip()}{parameters}{end}"
        glued = ", ".join(p.replace(" ", "\0") for p in elements(parameters))  # break between parameters only
        wrapped = [line.replace("\0", " ") for line in textwrap.wrap(glued, 106 - function.col_offset)]
        inner = [f"{indent}    {line}" for line in wrapped]
        lines[start:stop] = [one] if len(one) <= 110 else [indent + head[0].strip(), *inner, indent + end]
    return "\n".join(lines)
