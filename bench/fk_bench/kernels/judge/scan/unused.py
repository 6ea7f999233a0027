"""Code of a file that runs in no import and in no call: blocks for `python FILE`, and helpers that only they use."""

from __future__ import annotations

import ast
import re

from fk_bench.kernels.judge.scan.tree import children

# With one of these a file can change __name__, or look up a function by a name that is computed
_HIDES = frozenset(
    ("vars", "locals", "globals", "setattr", "delattr", "exec", "eval", "__import__", "import_module", "__dict__",
     "__setattr__", "__delattr__", "__getattribute__", "attrgetter", "methodcaller", "__main__", "modules")
)  # fmt: skip
_WORD = re.compile(r"\w+")
_BINDING = ("id", "arg", "name", "attr", "rest", "asname")  # fields of nodes that hold a name


def without_unused(module: ast.Module, entries: frozenset[str] | None) -> ast.Module:
    """The module with an empty body in place of each block `if __name__ == "__main__":` of its top level, and of each
    function of its top level that only those blocks reach. `module` is changed.

    A file for which it is uncertain that these do not run stays as it is: one that binds `__name__`, imports all names
    of a module, or could look up names by strings.

    entries: names that callers look up in the module, such as the op's; None: any of its functions may be one
    """
    blocks = [s for s in module.body if isinstance(s, ast.If) and _is_main(s.test)]
    if not blocks or not _is_plain(module, blocks):
        return module
    unused: set[int] = {id(part) for block in blocks for part in block.body}
    helpers = [] if entries is None else _helpers(module, unused, entries)
    cut: list[ast.If | ast.FunctionDef] = [*blocks, *helpers]
    for statement in cut:
        statement.body = [ast.copy_location(ast.Pass(), statement)]
    return module


def _is_main(test: ast.expr) -> bool:
    """Whether it is exactly `__name__ == "__main__"`."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = [test.left, test.comparators[0]]
    return any(isinstance(s, ast.Name) and s.id == "__name__" for s in sides) and any(
        isinstance(s, ast.Constant) and s.value == "__main__" for s in sides
    )


def _is_plain(module: ast.Module, blocks: list[ast.If]) -> bool:
    tests = {id(part) for block in blocks for part in ast.walk(block.test)}
    written: set[int] = set()
    for node in ast.walk(module):  # each before its parts
        if id(node) in tests:
            continue
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and "__name__" in node.value:
                return False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id == "__name__":
            continue  # as in logging.getLogger(__name__)
        if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            written.add(id(node.func))  # getattr(x, "name")
        if isinstance(node, ast.Name) and node.id == "getattr" and id(node) not in written:
            return False
        for name in _names(node):
            if name in _HIDES or name == "*" or (name == "__name__" and not _is_read(node)):
                return False
    return True


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def _names(node: ast.AST) -> list[str]:
    """All names that a node binds or uses, and the parts of those that it imports."""
    found: list[str] = []
    for field in _BINDING:
        value = getattr(node, field, None)
        if isinstance(value, str):
            found += value.split(".")
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        found += node.names
    if isinstance(node, ast.ImportFrom):
        found += (node.module or "").split(".")
    return found


def _helpers(module: ast.Module, unused: set[int], entries: frozenset[str]) -> list[ast.FunctionDef]:
    """Plain functions whose names occur in the blocks, and otherwise only in each other."""
    bound: dict[str, list[ast.stmt]] = {}
    for s in module.body:
        if isinstance(s, ast.FunctionDef):
            bound.setdefault(s.name, []).append(s)
    found = {
        name: function
        for name, (function, *more) in bound.items()
        if not more and isinstance(function, ast.FunctionDef) and not function.decorator_list
        and name not in entries and not name.startswith("__")
    }  # fmt: skip
    uses: dict[
        str, set[str]
    ] = {}  # name: where it occurs: "" at a place that runs, "if" in a block, or a helper
    waiting: list[tuple[ast.AST, str]] = [(s, "") for s in module.body]
    while waiting:
        node, place = waiting.pop()
        if id(node) in unused:
            place = "if"
        if isinstance(node, ast.FunctionDef) and found.get(node.name) is node:
            body = {id(part) for part in node.body}
            waiting += [(c, node.name if id(c) in body else place) for c in children(node)]
            continue
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        for name in (*_names(node), *_WORD.findall(text)):
            if name in found:
                uses.setdefault(name, set()).add(place)
        waiting += [(c, place) for c in children(node)]
    used_in: dict[str, list[str]] = {}
    for name, at in uses.items():
        for place in at:
            used_in.setdefault(place, []).append(name)
    reached = _closure("if", used_in) - {"if"}
    for runs in [name for name in reached if uses[name] - reached - {"if"}]:
        if runs in reached:
            reached -= _closure(runs, used_in)
    return [function for name, function in found.items() if name in reached]


def _closure(start: str, used_in: dict[str, list[str]]) -> set[str]:
    """A place and all helpers that it reaches."""
    found, waiting = {start}, [start]
    while waiting:
        for name in used_in.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found
