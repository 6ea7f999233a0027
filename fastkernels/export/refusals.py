"""Write functions that return a reason against a call as functions that raise Unsupported themselves."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Set

from fastkernels.export.text import Text, above, blocks, names_in, walk

REFUSAL = "raise Unsupported"


def with_raised_refusals(text: str, keep: Set[str]) -> str:
    """The file with `f(x)` for `if f(x) is not None: raise Unsupported`, where nothing else calls such a function."""
    code = Text(text)
    uses = names_in(code.tree)
    for node in code.tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name in keep or node.decorator_list:
            continue
        found = [_checked(use) for use in uses.get(node.name, [])]
        returns = [n for n in walk(node) if isinstance(n, ast.Return)]
        new = [_raised(code, r, node) for r in returns]
        if not found or not returns or any(c is None for c in found) or any(n is None for n in new):
            continue
        if not code.free(node, *(n for c in found if c is not None for n in c[:2])):
            continue
        for statement, replacement in zip(returns, new, strict=True):
            if replacement:
                code.write(statement, replacement)
            else:
                code.drop(statement, node.body)
        if node.returns is not None:
            code.write(node.returns, "None")
        for first, test, call in (c for c in found if c is not None):
            code.write(test, code.of(call))
            if first is not test:
                code.drop(first, _block(first))
    return code.edited()


def _checked(use: ast.Name) -> tuple[ast.stmt, ast.If, ast.Call] | None:
    """(first statement, test, call) where the call's reason is only tested; None for another use."""
    call = above(use)
    if not isinstance(call, ast.Call) or call.func is not use:
        return None
    at = above(call)
    if isinstance(at, ast.Assign) and len(at.targets) == 1 and isinstance(at.targets[0], ast.Name):
        block, name = _block(at), at.targets[0].id
        i = block.index(at)
        test = block[i + 1] if i + 1 < len(block) else None
        if isinstance(test, ast.If) and ast.unparse(test.test) == f"{name} is not None" and _refuses(test):
            function = at
            while not isinstance(function, ast.FunctionDef):
                function = above(function)  # type: ignore[assignment]
            count = Counter(n.id for n in walk(function) if isinstance(n, ast.Name))
            return (at, test, call) if count[name] == 2 else None
        return None
    tested = above(at) if isinstance(at, ast.Compare) and at.left is call else None
    if isinstance(tested, ast.If) and tested.test is at and ast.unparse(at).endswith(" is not None"):
        return (tested, tested, call) if _refuses(tested) else None
    return None


def _refuses(test: ast.If) -> bool:
    return not test.orelse and [ast.unparse(n) for n in test.body] == [REFUSAL]


def _block(statement: ast.stmt) -> list[ast.stmt]:
    return next(b for b in blocks(above(statement)) if statement in b)


def _raised(code: Text, node: ast.Return, function: ast.FunctionDef) -> str | None:
    """The text for the return of a reason: '' for none at the end; None where that is not plain."""
    value, last = node.value, function.body[-1] is node
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return REFUSAL
    if isinstance(value, ast.Constant) and value.value is None:
        return "" if last and len(function.body) > 1 else None
    if not last or not isinstance(value, ast.IfExp):
        return None
    given = [n.value if isinstance(n, ast.Constant) else 0 for n in (value.body, value.orelse)]
    if {type(v) for v in given} != {str, type(None)}:
        return None
    test = code.of(value.test)
    plain = isinstance(value.test, (ast.Name, ast.Attribute, ast.Call))
    if given[0] is None:
        test = f"not {test}" if plain else f"not ({test})"
    return f"if {test}:\n{' ' * node.col_offset}    {REFUSAL}"
