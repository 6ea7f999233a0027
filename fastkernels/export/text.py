"""The text of a Python file with edits by syntax node."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache

KEPT_NODES, KEPT_NAMES = "kept_nodes", "kept_names"  # attributes of a node: what was found in it
# fields that hold no node with a place in the text
PLAIN = {
    "arg",
    "asname",
    "attr",
    "conversion",
    "ctx",
    "id",
    "kind",
    "level",
    "module",
    "simple",
    "type_comment",
}
FIELDS = {
    cls: tuple(name for name in cls._fields if name not in PLAIN)
    for cls in vars(ast).values()
    if isinstance(cls, type) and issubclass(cls, ast.AST)
}


def is_kernel(node: ast.AST) -> bool:
    return any("triton.jit" in ast.unparse(d) for d in getattr(node, "decorator_list", ()))


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly in a node."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, name, None), list):
            yield block


def walk(node: ast.AST) -> list[ast.AST]:
    """The node of a parsed file and all nodes in it, in the order of the text."""
    kept: list[ast.AST] | None = getattr(node, KEPT_NODES, None)
    return _visited(node, []) if kept is None else kept


def _visited(node: ast.AST, found: list[ast.AST]) -> list[ast.AST]:
    """`found` with the node and all nodes in it, each with its parent as `above`; a statement keeps its own.

    Contexts and operators, which all nodes share, are left out.
    """
    first = len(found)
    found.append(node)
    for name in FIELDS[type(node)]:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            value.above = node  # type: ignore[attr-defined]
            if value._fields:
                _visited(value, found)
        elif isinstance(value, list):
            for child in value:
                if isinstance(child, ast.AST):
                    child.above = node  # type: ignore[attr-defined]
                    _visited(child, found)
    if isinstance(node, (ast.stmt, ast.Module)):
        setattr(node, KEPT_NODES, found[first:])
    return found


@lru_cache(maxsize=4)
def parsed(text: str) -> ast.Module:
    """The tree of a file, in which each node has its parent as `above`."""
    tree = ast.parse(text)
    _visited(tree, [])
    return tree


def names_in(tree: ast.Module) -> dict[str, list[ast.Name]]:
    """Every read of each global name."""
    kept: dict[str, list[ast.Name]] | None = getattr(tree, "global_names", None)
    if kept is not None:
        return kept
    found: dict[str, list[ast.Name]] = {}

    def visit(node: ast.AST, hidden: frozenset[str]) -> None:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and node.id not in hidden:
                found.setdefault(node.id, []).append(node)
            return
        inner = hidden | bound_names(node) if isinstance(node, (ast.FunctionDef, ast.Lambda)) else hidden
        for name in FIELDS[type(node)]:
            value = getattr(node, name, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    visit(child, inner if name == "body" else hidden)

    visit(tree, frozenset())
    tree.global_names = found  # type: ignore[attr-defined]
    return found


def bound_names(node: ast.FunctionDef | ast.Lambda) -> frozenset[str]:
    """The names that a function binds itself."""
    kept: frozenset[str] | None = getattr(node, KEPT_NAMES, None)
    if kept is not None:
        return kept
    a = node.args
    names = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x}
    free: set[str] = set()
    if isinstance(node, ast.FunctionDef):
        inner: set[int] = set()  # of functions in it
        for n in (n for s in node.body for n in walk(s)):
            if id(n) in inner:
                continue
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
                names.add(n.name)
                inner |= {id(x) for x in walk(n)}
            elif isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load):
                names.add(n.id)
            elif isinstance(n, (ast.Import, ast.ImportFrom)):
                names |= {x.asname or x.name.partition(".")[0] for x in n.names}
            elif isinstance(n, ast.Global):
                free |= set(n.names)
    found = frozenset(names - free)
    setattr(node, KEPT_NAMES, found)
    return found


def above(node: ast.AST) -> ast.AST:
    return node.above  # type: ignore[attr-defined,no-any-return]


WIDTH = 110


class Text:
    """A file; edits are collected, and those inside an edited range are left for another time."""

    def __init__(self, text: str):
        self.raw = text.encode()
        self.tree = parsed(text)
        self.lines = text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line.encode()) + 1)
        self.edits: list[tuple[int, int, str]] = []
        self.dropped: dict[int, int] = {}

    def python(self) -> Iterator[ast.AST]:
        """All nodes of functions and classes, those that enclose others first, without Triton kernels."""
        for statement in self.tree.body:
            if not is_kernel(statement):
                yield from walk(statement)

    def span(self, node: ast.AST) -> tuple[int, int]:
        n: ast.expr = node  # type: ignore[assignment]
        start = self.starts[n.lineno - 1] + n.col_offset
        return start, self.starts[(n.end_lineno or 1) - 1] + (n.end_col_offset or 0)

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.raw[start:end].decode()

    def operand(self, node: ast.expr) -> str:
        """The text of an operand of and / or, in parentheses where it has them."""
        text = self.of(node)
        return f"({text})" if isinstance(node, (ast.BoolOp, ast.IfExp, ast.NamedExpr)) else text

    def free(self, *nodes: ast.AST | None) -> bool:
        """Whether no edit touches the nodes so far."""
        for node in nodes:
            if node is None or isinstance(node, ast.arguments):
                parts = arguments(node) if isinstance(node, ast.arguments) else []
                if not self.free(*parts):
                    return False
                continue
            start, end = self.span(node)
            if any(s < end and start < e for s, e, _ in self.edits):
                return False
        return True

    def write(self, node: ast.AST, text: str) -> None:
        start, end = self.span(node)
        self.replace(start, end, text)

    def put(self, node: ast.AST, inner: ast.expr) -> None:
        """Replace an expression by one in it."""
        self.put_text(node, inner, self.of(inner))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that enclose a node, from inside."""
        while not isinstance(node, ast.Module):
            node = node.above  # type: ignore[attr-defined]
            yield node

    def substituted(self, node: ast.AST, given: dict[str, ast.expr], start: int = -1, end: int = -1) -> str:
        """The text of a node, or of a range of it, with other expressions in place of names."""
        first, last = self.span(node)
        start, end = (first, last) if start < 0 else (start, end)
        out, at = [], start
        names = [
            n
            for n in walk(node)
            if isinstance(n, ast.Name) and n.id in given and start <= self.span(n)[0] < end
        ]
        for name in sorted(names, key=lambda n: self.span(n)):
            first, last = self.span(name)
            inner = given[name.id]
            text = self.of(inner)
            loose = isinstance(
                inner, (ast.BoolOp, ast.IfExp, ast.Lambda, ast.Compare, ast.BinOp, ast.UnaryOp)
            )
            out += [self.raw[at:first].decode(), f"({text})" if loose and name is not node else text]
            at = last
        return "".join([*out, self.raw[at:end].decode()])

    def put_text(self, node: ast.AST, inner: ast.expr, text: str) -> None:
        """Replace an expression, with its own parentheses, by the text of another one; add those that it needs."""
        parent, (start, end), raw = above(node), self.span(node), self.raw
        tight = (
            ast.BoolOp,
            ast.BinOp,
            ast.UnaryOp,
            ast.Compare,
            ast.IfExp,
            ast.Attribute,
            ast.Subscript,
            ast.Starred,
        )
        loose = isinstance(inner, (ast.BoolOp, ast.IfExp, ast.Lambda, ast.Compare, ast.BinOp))
        needed = loose and isinstance(parent, tight)
        if isinstance(parent, ast.BoolOp) and isinstance(inner, (ast.Compare, ast.BinOp)):
            needed = False
        if (
            raw[start - 1 : start] == b"("
            and raw[end : end + 1] == b")"
            and raw[start - 2 : start - 1] in b" ("
        ):
            start, end = start - 1, end + 1
        self.replace(start, end, f"({text})" if needed else text)

    def is_test(self, node: ast.AST) -> bool:
        """Whether only the truth of the expression matters."""
        parent = above(node)
        if isinstance(parent, (ast.If, ast.IfExp)):
            return parent.test is node
        if isinstance(parent, ast.UnaryOp):
            return isinstance(parent.op, ast.Not)
        return isinstance(parent, ast.BoolOp) and self.is_test(parent)

    def drop(self, node: ast.stmt, block: list[ast.stmt]) -> None:
        """Drop a statement with the comments right above it; the last one of a block becomes `pass`."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        while first > 1 and self.lines[first - 2].startswith(f"{' ' * node.col_offset}#"):
            first -= 1
        start, end = self.starts[first - 1], self.starts[node.end_lineno or 0]
        gone = self.dropped.get(id(block), 0)
        text = "" if gone + 1 < len(block) else f"{' ' * node.col_offset}pass\n"
        if self.replace(start, end, text):
            self.dropped[id(block)] = gone + 1

    def replace_if(self, node: ast.If, held: bool, block: list[ast.stmt]) -> None:
        """Replace the statement by the branch that runs."""
        start, end = self.starts[node.lineno - 1], self.starts[node.end_lineno or 0]
        branch = node.body if held else node.orelse
        if self.raw[self.span(node)[0] :][:2] != b"if":
            return  # elif: the text of the enclosing statement
        if not branch:
            self.drop(node, block)
            return
        last = branch[-1].end_lineno or 0
        before = node.test.end_lineno if held else node.body[-1].end_lineno
        first = (before or 0) + 1
        while self.lines[first - 1].strip() in ("else:", "):"):
            first += 1
        lines = self.lines[first - 1 : last]
        by = branch[0].col_offset - node.col_offset
        if self.lines[branch[0].lineno - 1].lstrip().startswith("elif"):
            lines[0] = lines[0].replace("elif", "if", 1)
            by = 0
        self.replace(start, end, "".join(f"{line[by:]}\n" for line in lines))

    def drop_parameter(self, function: ast.FunctionDef | ast.Lambda, i: int) -> None:
        parts = arguments(function.args)
        every = [*function.args.posonlyargs, *function.args.args]
        defaults = function.args.defaults
        at = i - (len(every) - len(defaults))
        last: ast.AST = defaults[at] if at >= 0 else every[i]
        self._cut(self.span(every[i])[0], self.span(last)[1], only=len(parts) == 1)

    def drop_argument(self, call: ast.Call, argument: ast.expr) -> None:
        node: ast.AST = next((k for k in call.keywords if k.value is argument), argument)
        self._cut(*self.span(node), only=len(call.args) + len(call.keywords) == 1)

    def drop_of_schema(self, node: ast.expr, i: int) -> None:
        """Drop an argument of an op's schema."""
        text = ast.literal_eval(node)
        name, arguments, returned = re.fullmatch(
            r"(\w+)\((.*?)\)( -> .*)", re.sub(r"\(([a-z])!\)", r"<\1!>", text)
        ).groups()  # type: ignore[union-attr]
        kept = arguments.split(", ")
        del kept[i : i + 1]  # a kernel may have more parameters
        new = re.sub(r"<([a-z])!>", r"(\1!)", f"{name}({', '.join(kept)}){returned}")
        self.write(node, literal(new))

    def _cut(self, start: int, end: int, only: bool) -> None:
        """Drop an element of a list with its comma."""
        raw = self.raw
        after = re.match(rb"\s*,[ \n]*", raw[end:])
        before = re.search(rb",\s*\Z", raw[:start])
        if after and (after.end() == 0 or raw[end + after.end() :][:1] not in b")" or only or not before):
            end += after.end()
        elif before:
            start = before.start()
        self.replace(start, end, "")

    def replace(self, start: int, end: int, text: str) -> bool:
        """Whether the range is replaced: no edit touches it so far."""
        if any(s < end and start < e for s, e, _ in self.edits):
            return False
        self.edits.append((start, end, text))
        return True

    def edited(self) -> str:
        out, at = [], 0
        for start, end, text in sorted(self.edits):
            out += [self.raw[at:start], text.encode()]
            at = end
        return b"".join([*out, self.raw[at:]]).decode()


def arguments(a: ast.arguments) -> list[ast.AST]:
    found = (*a.posonlyargs, *a.args, *a.defaults, *a.kwonlyargs, *a.kw_defaults, a.vararg, a.kwarg)
    return [x for x in found if x is not None]


def literal(text: str) -> str:
    """A string as a literal, in parentheses where it takes several lines."""
    quote = "'" if '"' in text else '"'
    if len(text) <= 104:
        return f"{quote}{text}{quote}"
    lines = textwrap.wrap(text, 102, break_long_words=False, break_on_hyphens=False)
    quoted = [f"{quote}{' ' * (i > 0)}{line}{quote}" for i, line in enumerate(lines)]
    return "(\n    " + "\n    ".join(quoted) + "\n)"
