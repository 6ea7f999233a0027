"""Write loops of one test, and variables for the next statement alone, of an exported file in place."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Set

from fastkernels.export.functions import is_pure
from fastkernels.export.text import WIDTH, Text, above, blocks, is_kernel, names_in, walk

REFUSALS = ("raise Unsupported", "return 'unsupported'")
# Evaluated several times, or in quotes of their own
ELSEWHERE = (ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.JoinedStr)
LOOSE = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.Compare, ast.BinOp, ast.UnaryOp, ast.NamedExpr)
TIGHT = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Attribute, ast.Subscript)
LONGEST = 64  # of a value that needs no name


def with_any(text: str) -> str:
    """The file with `if any(TEST for x in y):` for a loop of one test that leaves the call to the host."""
    code = Text(text)
    for function in (n for n in code.python() if isinstance(n, ast.FunctionDef)):
        for loop in (n for n in walk(function) if isinstance(n, ast.For)):
            _join_loop(code, function, loop)
    return code.edited()


def _join_loop(code: Text, function: ast.FunctionDef, loop: ast.For) -> None:
    test = loop.body[0]
    if len(loop.body) > 1 or loop.orelse or not isinstance(test, ast.If) or test.orelse:
        return
    action = test.body[0]
    lines = code.lines[loop.lineno - 1 : loop.end_lineno]
    if len(test.body) > 1 or ast.unparse(action) not in REFUSALS or any("#" in line for line in lines):
        return
    bound = {n.id for n in walk(loop.target) if isinstance(n, ast.Name)}
    inside = {id(n) for n in walk(loop)}
    if any(isinstance(n, ast.Name) and n.id in bound and id(n) not in inside for n in walk(function)):
        return
    parts = (" ".join(code.of(n).split()) for n in (test.test, loop.target, loop.iter))
    head = "{}if any({} for {} in {}):".format(" " * loop.col_offset, *parts)
    if len(head) <= WIDTH and not any(isinstance(n, ast.NamedExpr) for n in walk(test.test)):
        code.write(loop, f"{head.lstrip()}\n{' ' * loop.col_offset}    {code.of(action)}")


def without_single_constants(text: str, keep: Set[str]) -> str:
    """The file without constants that one place reads, where its line has room for the value."""
    code = Text(text)
    uses = names_in(code.tree)
    for made in code.tree.body:
        if (
            not isinstance(made, ast.Assign)
            or not isinstance(made.targets[0], ast.Name)
            or len(made.targets) > 1
        ):
            continue
        found, line = uses.get(made.targets[0].id, []), code.lines[made.lineno - 1]
        if len(found) != 1 or made.targets[0].id in keep or made.lineno != made.end_lineno or "#" in line:
            continue
        use, value = found[0], code.of(made.value)
        inside = [n for n in code.above(use) if isinstance(n, ast.FunctionDef)]
        body = inside and not is_kernel(inside[-1]) and use in [n for s in inside[-1].body for n in walk(s)]
        fits = len(code.lines[use.lineno - 1]) - len(use.id) + len(value) <= WIDTH and len(value) <= LONGEST
        commented = code.lines[made.lineno - 2].startswith("#")
        if body and fits and not commented and _is_constant(made.value) and code.free(made, use):
            code.write(use, value)
            code.drop(made, code.tree.body)
    return code.edited()


def _is_constant(node: ast.expr) -> bool:
    plain = (ast.Constant, ast.Attribute, ast.Name, ast.Tuple, ast.expr_context)
    return all(isinstance(n, plain) for n in walk(node))


def without_single_uses(text: str) -> str:
    """The file without variables that only the next statement reads, once, where its line has room for the value."""
    while True:
        code = Text(text)
        for function in (n for n in code.python() if isinstance(n, ast.FunctionDef)):
            names = [n for n in walk(function) if isinstance(n, ast.Name)]
            count = Counter(n.id for n in names)
            count.update(n.arg for n in walk(function) if isinstance(n, ast.arg))
            for block in (b for n in walk(function) if isinstance(n, ast.stmt) for b in blocks(n)):
                for made, following in itertools.pairwise(block):
                    if isinstance(made, ast.Assign) and [count[ast.unparse(t)] for t in made.targets] == [2]:
                        _write_there(code, made, following, block)
        new = code.edited()
        if new == text:
            return text
        text = new


def _write_there(code: Text, made: ast.Assign, following: ast.stmt, block: list[ast.stmt]) -> None:
    """Write the value of an assignment in the place of its only use."""
    name = made.targets[0].id  # type: ignore[attr-defined]
    head = following.test if isinstance(following, ast.If) else following
    if isinstance(head, ast.stmt) and any(True for _ in blocks(head)):
        return
    use = next((n for n in walk(head) if isinstance(n, ast.Name) and n.id == name), None)
    if use is None or made.lineno != made.end_lineno or not _keeps_order(made.value, use, head):
        return
    parent, value = above(use), code.of(made.value)
    if isinstance(made.value, ast.Tuple) and not value.startswith("("):
        value = f"({value})"
    tight = isinstance(parent, TIGHT) or (isinstance(parent, ast.IfExp) and isinstance(made.value, ast.IfExp))
    value = f"({value})" if isinstance(made.value, LOOSE) and tight else value
    lines = (code.lines[made.lineno - 1], code.lines[use.lineno - 1])
    refused = isinstance(following, ast.If) and ast.unparse(following.body[0]) in REFUSALS
    short = refused or len(value) <= LONGEST or use is getattr(following, "value", None)
    room = short and len(lines[1]) - len(name) + len(value) <= WIDTH
    if room and not any("#" in line for line in lines) and code.free(made, following):
        code.write(use, value)
        code.drop(made, block)


def _keeps_order(value: ast.expr, use: ast.Name, head: ast.AST) -> bool:
    """Whether the value may be evaluated where it is used: once, and before all that it may change."""
    outer: list[ast.AST] = []
    node: ast.AST = use
    while node is not head:
        inner, node = node, above(node)
        outer.append(node)
        maybe = isinstance(node, ast.IfExp) and inner is not node.test
        maybe = maybe or (isinstance(node, ast.BoolOp) and inner is not node.values[0])
        if isinstance(node, ELSEWHERE) or (maybe and not is_pure(value)):
            return False
    if any(isinstance(n, ast.NamedExpr) for n in (*walk(value), *walk(head))):
        return False
    place = (use.lineno, use.col_offset)
    earlier = [n for n in walk(head) if isinstance(n, ast.Call) and all(n is not o for o in outer)]
    return all((n.lineno, n.col_offset) > place or is_pure(n) for n in earlier)
