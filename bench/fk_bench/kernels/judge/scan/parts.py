"""Modules that a file may import for a harmless part of them, if it uses no other; see `rules.PARTS`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fk_bench.kernels.judge.scan import rules
from fk_bench.kernels.judge.scan.state import targets
from fk_bench.kernels.judge.scan.tree import Tree


def harmless(tree: Tree) -> set[str]:
    """The imports, such as `tempfile` and `hashlib.md5`, whose every use in the file is a harmless call.

    None of a module whose names the file binds in another way, too.
    """
    imported: dict[str, list[tuple[str, str]]] = {}  # module: (name in the file, function or "")
    for node in tree.nodes:
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name in rules.PARTS:
                    imported.setdefault(a.name, []).append((a.asname or a.name, ""))
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module in rules.PARTS:
            for a in node.names:
                imported.setdefault(node.module, []).append((a.asname or a.name, a.name))
    found: set[str] = set()
    texts = _texts(tree) if imported else set()
    for module, names in imported.items():
        known = rules.PARTS[module]
        if all(not part or part in known for _, part in names) and _only_called(tree, module, names, texts):
            found |= {f"{module}.{part}" if part else module for _, part in names}
    return found


def _only_called(tree: Tree, module: str, names: list[tuple[str, str]], texts: set[str]) -> bool:
    parts = dict(names)
    if len(parts) < len({*names}):
        return False
    if {*_stored(tree), *_bound(tree)} & parts.keys():
        return False
    called = False
    for node in tree.nodes:
        if not isinstance(node, ast.Name) or node.id not in parts:
            continue
        used: ast.AST = node
        part = parts[node.id]
        if not part:
            owner = tree.parents.get(id(node))
            if not isinstance(owner, ast.Attribute) or owner.attr not in rules.PARTS[module]:
                return False
            used, part = owner, owner.attr
        call = tree.parents.get(id(used))
        if not isinstance(call, ast.Call) or call.func is not used:
            return False
        if not _may_get(tree, call, rules.PARTS[module][part], texts):
            return False
        called = True
    return called


def _stored(tree: Tree) -> list[str]:
    """The names of all assignments."""
    return [n.id for n in tree.nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]


def _bound(tree: Tree) -> Iterator[str]:
    """Names of parameters, functions, classes and imports of other modules."""
    for node in tree.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            for a in node.names:
                if a.name == "*" or (module or a.name) not in rules.PARTS:
                    yield a.asname or a.name.split(".")[0]
        else:
            for field in ("arg", "name", "rest"):
                value = getattr(node, field, None)
                if isinstance(value, str) and not isinstance(node, (ast.alias, ast.keyword)):
                    yield value


def _may_get(tree: Tree, call: ast.Call, what: str, texts: set[str]) -> bool:
    if what == "nothing":
        return not call.args and not call.keywords
    if what == "with":
        return isinstance(tree.parents.get(id(call)), ast.withitem)
    if what == "text":
        read = tree.parents.get(id(call))  # a hash that is kept could get more
        at_once = isinstance(read, ast.Attribute) and read.attr in ("hexdigest", "digest")
        return at_once and len(call.args) == 1 and not call.keywords and _is_text(call.args[0], texts)
    return True


def _texts(tree: Tree) -> set[str]:
    """Names that the file's top level gives a constant text, and nothing else."""
    stored, bound = _stored(tree), {*_bound(tree)}
    return {
        target.id
        for node in tree.module.body
        if isinstance(node, ast.Assign) and _is_text(node.value, set())
        for target in targets(node)
        if isinstance(target, ast.Name) and stored.count(target.id) == 1 and target.id not in bound
    }


def _is_text(node: ast.AST, texts: set[str]) -> bool:
    """Whether it is a constant text or its bytes: a literal, a name of one, or a sum of them."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (str, bytes))
    if isinstance(node, ast.Name):
        return node.id in texts
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and _is_text(node.left, texts) and _is_text(node.right, texts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "encode":
        given = [*node.args, *(k.value for k in node.keywords)]
        return _is_text(node.func.value, texts) and all(isinstance(a, ast.Constant) for a in given)
    return False
