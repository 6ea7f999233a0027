"""A candidate's source as a syntax tree of limited size and depth, so that every rule is cheap and may recurse.

The file's author chooses its size and nesting. A tree within LEVELS is safe to recurse into, and the index of nodes
and their parents replaces nested walks, so the time of a scan is linear in the size of the file.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

MAX_BYTES = 256 << 10  # the largest file of our own kernels has a fifth of this
MAX_NODES = 40_000
LEVELS = 150  # of nested syntax: a visitor takes up to three frames a level, of Python's 1000
_TOO_DEEP = "the file is nested too deeply to be read"
# The parser needs quadratic time for `import a.a.a...`.
_CHAIN = re.compile(rb"(?:\.[\s\\]*[A-Za-z_\x80-\xff][\w\x80-\xff]*[\s\\]*)+")
_SHARED = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)  # one object for all uses
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Refused(Exception):
    """The source is rejected before its rules are applied. `pattern` is the finding's."""

    def __init__(self, pattern: str, reason: str):
        super().__init__(reason)
        self.pattern = pattern


class Tree:
    """A parsed source. `nodes` lists each node before its children, `parents` maps id(node) to its parent.

    cut: takes code out of the module before the rules see it.
    Raises Refused, and SyntaxError or ValueError for a source that is not Python.
    """

    def __init__(self, source: bytes, cut: Callable[[ast.Module], ast.Module] | None = None):
        if len(source) > MAX_BYTES:
            raise Refused("too-large", f"the file has more than {MAX_BYTES >> 10} KiB")
        if any(match.group().count(b".") > LEVELS for match in _CHAIN.finditer(source)):
            raise Refused("unreadable", _TOO_DEEP)
        self.source = source
        try:
            self.module = ast.parse(source)
        except (RecursionError, MemoryError) as error:
            raise Refused("unreadable", _TOO_DEEP) from error
        except SyntaxError as error:
            if "too many nested" in str(error) or "too many levels" in str(error):
                raise Refused("unreadable", _TOO_DEEP) from error
            raise
        self._index()
        if cut is not None:
            self.module = cut(self.module)
            self._index()

    def _index(self) -> None:
        self.nodes: list[ast.AST] = []
        self.parents: dict[int, ast.AST] = {}
        waiting: deque[tuple[ast.AST, int]] = deque([(self.module, 0)])
        while waiting:
            node, level = waiting.popleft()
            if level > LEVELS:
                raise Refused("unreadable", _TOO_DEEP)
            self.nodes.append(node)
            if len(self.nodes) > MAX_NODES:
                raise Refused(
                    "too-large", f"the file has more than {MAX_NODES} names, constants and operations"
                )
            for child in children(node):
                self.parents[id(child)] = node
                waiting.append((child, level + 1))

    @classmethod
    def read(cls, path: Path, cut: Callable[[ast.Module], ast.Module] | None = None) -> Tree:
        """The tree of a file, of which at most one byte more than the limit is read. Raises OSError."""
        with open(path, "rb") as file:
            return cls(file.read(MAX_BYTES + 1), cut)

    @cached_property
    def _lines(self) -> list[bytes]:
        try:
            text = importlib.util.decode_source(self.source)
        except (SyntaxError, ValueError):
            return []
        return text.encode("utf-8", "replace").split(b"\n")

    def text(self, node: ast.AST, limit: int = 60) -> str:
        """The beginning of a node's source, up to the end of its line. ast.unparse takes long for large nodes."""
        number, start = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
        if not 0 < number <= len(self._lines):
            return type(node).__name__
        one_line = getattr(node, "end_lineno", number) == number
        end = (
            min(getattr(node, "end_col_offset", start), start + 4 * limit) if one_line else start + 4 * limit
        )
        return self._lines[number - 1][start:end].decode("utf-8", "ignore")[:limit]

    def containing(self, found: Callable[[ast.AST], bool]) -> set[int]:
        """Ids of the nodes for which `found` holds, and of all nodes around them."""
        marked: set[int] = set()
        for node in self.nodes:
            at: ast.AST | None = node if found(node) else None
            while at is not None and id(at) not in marked:
                marked.add(id(at))
                at = self.parents.get(id(at))
        return marked

    @cached_property
    def outermost(self) -> list[ast.AST]:
        """Functions and lambdas that are in no other: each part of a function's code is in one of them."""
        inside: set[int] = set()
        found: list[ast.AST] = []
        for node in self.nodes:
            parent = self.parents.get(id(node))
            if parent is not None and id(parent) in inside:
                inside.add(id(node))
            elif isinstance(node, (*FUNCTIONS, ast.Lambda)):
                inside.add(id(node))
                found.append(node)
        return found

    @cached_property
    def structures(self) -> dict[int, int]:
        """A number for each id(node), equal for nodes with equal source except for spaces and comments."""
        numbers: dict[tuple[object, ...], int] = {}
        found: dict[int, int] = {}
        for node in reversed(self.nodes):  # children before their parents
            parts: list[object] = [type(node)]
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    parts.append(tuple(_part(v, found) for v in value))
                else:
                    parts.append(_part(value, found))
            found[id(node)] = numbers.setdefault(tuple(parts), len(numbers))
        return found


def _part(value: object, numbers: dict[int, int]) -> object:
    if isinstance(value, ast.expr_context):
        return None  # x in a test is the x of an assignment
    return numbers.get(id(value), type(value)) if isinstance(value, ast.AST) else (type(value), value)


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The direct children of a node, without operators and contexts, which are shared objects."""
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            if not isinstance(value, _SHARED):
                yield value
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, ast.AST) and not isinstance(item, _SHARED):
                    yield item
