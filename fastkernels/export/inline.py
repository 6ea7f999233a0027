"""Write functions of an exported file that have one call in its place."""

from __future__ import annotations

import ast
from collections.abc import Set

from fastkernels.export.functions import default_of, is_pure, positional, stores
from fastkernels.export.text import WIDTH, Text, above, bound_names, is_kernel, names_in, walk

HELPERS = ("register", "guarded")


def inlined(text: str, keep: Set[str]) -> str:
    """The file with the expression of a function, or the tests of one, in the place of its only call."""
    code = Text(text)
    uses = names_in(code.tree)
    for node in code.tree.body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.name in (*keep, *HELPERS):
            continue
        found = uses.get(node.name, [])
        call = above(found[0]) if len(found) == 1 else None
        if isinstance(call, ast.Call) and call.func is found[0]:
            _inline(code, node, call)
    return code.edited()


def _inline(code: Text, node: ast.FunctionDef, call: ast.Call) -> None:
    given = _arguments_by_name(node, call)
    body = node.body[1:] if ast.get_docstring(node) else node.body
    enclosing = next((n for n in code.above(call) if isinstance(n, ast.FunctionDef)), None)
    if given is None or not body or enclosing is None or enclosing is node or is_kernel(enclosing):
        return
    impure = 0
    for name, argument in given.items():
        reads = len([n for s in body for n in walk(s) if isinstance(n, ast.Name) and n.id == name])
        if (
            reads > 1
            and not isinstance(argument, (ast.Name, ast.Constant))
            and (reads > 3 or not _is_cheap(argument))
        ):
            return
        if not is_pure(argument):
            impure += 1
            if reads != 1 or impure > 1 or not _is_always_read(body[0], name):
                return  # it would not be evaluated once, or in another order
    locals_ = bound_names(node) - given.keys()
    inner = {n.id for s in body for n in walk(s) if isinstance(n, ast.Name)} - given.keys() - locals_
    if inner & bound_names(enclosing) or not code.free(node):
        return  # a local variable would hide what the function reads
    if len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
        value = body[0].value
        if any(isinstance(n, (ast.Lambda, ast.comprehension)) for n in walk(value)) and any(
            not isinstance(a, (ast.Name, ast.Constant)) for a in given.values()
        ):
            return
        text = code.substituted(value, given)
        line = code.lines[call.lineno - 1]
        fits = len(line) - len(code.of(call)) + len(text) <= WIDTH
        if fits and "\n" not in text and code.free(call):
            code.put_text(call, value, text)
            code.drop(node, code.tree.body)
        return
    statement = above(call)
    returns = [n for s in body for n in walk(s) if isinstance(n, ast.Return)]
    if any(isinstance(n, ast.Constant) and "\n" in str(n.value) for s in body for n in walk(s)):
        return
    whole = isinstance(statement, ast.Return) or (isinstance(statement, ast.Expr) and not returns)
    result = None
    if isinstance(statement, ast.Assign) and statement.value is call and len(returns) == 1:
        result = returns[0].value if returns[0] is body[-1] else None
        whole = result is not None
    names = {n.id for n in walk(enclosing) if isinstance(n, ast.Name)} | bound_names(enclosing)
    if (
        whole
        and not locals_ & names
        and (node.end_lineno or 0) - node.lineno <= MOST_INLINED
        and code.free(statement)
    ):
        start, end = code.starts[body[0].lineno - 1], code.span(body[-1])[1]
        while (line := code.lines[code.starts.index(start) - 1]).lstrip().startswith("#") and line.startswith(
            " "
        ):
            start = code.starts[code.starts.index(start) - 1]
        lines = code.substituted(node, given, start, end).split("\n")
        if result is not None:
            target = code.raw[code.span(statement)[0] : code.span(call)[0]].decode()
            lines = code.substituted(node, given, start, code.span(body[-1])[0]).split("\n")
            lines[-1] += target + code.substituted(result, given)
        indent = " " * (statement.col_offset - body[0].col_offset)  # type: ignore[attr-defined]
        code.write(statement, "\n".join(f"{indent}{x}" if x else x for x in lines).lstrip())
        code.drop(node, code.tree.body)


MOST_INLINED = 16  # lines of a function


def _is_always_read(statement: ast.stmt, name: str) -> bool:
    """Whether a statement reads the name whatever its values are."""
    if not isinstance(statement, (ast.Return, ast.Assign)):
        return False
    nodes: list[ast.AST] = [n for n in walk(statement) if isinstance(n, ast.Name) and n.id == name]
    for node in nodes:
        while not isinstance(node, ast.stmt):
            node = above(node)
            if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension, ast.GeneratorExp)):
                return False
    return bool(nodes)


def _is_cheap(node: ast.expr) -> bool:
    """An attribute, an element of one, or a part of that."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.right, ast.Constant) and _is_cheap(node.left)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, (ast.Constant, ast.UnaryOp)) and _is_cheap(node.value)
    return isinstance(node, (ast.Attribute, ast.Name))


def _arguments_by_name(node: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """{parameter: argument}, None if that is not plain."""
    a = node.args
    if a.vararg or a.kwarg or a.kwonlyargs or any(isinstance(x, ast.Starred) for x in call.args):
        return None
    names = positional(node)
    given = dict(zip(names, call.args, strict=False))
    given.update({k.arg: k.value for k in call.keywords if k.arg})
    for i, name in enumerate(names):
        default = default_of(node, i)
        if name not in given and default is not None:
            given[name] = default
    stored = any(stores(node, name) for name in names)
    return (
        given
        if given.keys() == set(names) and not stored and not any(k.arg is None for k in call.keywords)
        else None
    )
