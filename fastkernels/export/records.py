"""Write records, and loops over named values, of an exported file in a shorter form."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Set

from fastkernels.export.text import Text, above, blocks, walk


def fields(node: ast.ClassDef) -> list[str]:
    return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def is_record(node: ast.ClassDef) -> bool:
    return any(ast.unparse(b) == "NamedTuple" for b in node.bases) or any(
        ast.unparse(d).startswith("dataclass") for d in node.decorator_list
    )


def with_named_tuples(text: str, keep: Set[str]) -> str:
    """The file with `namedtuple` for each immutable class that has fields without defaults and nothing else."""
    code = Text(text)
    imports = [n for n in code.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    others = {a.name for n in imports if getattr(n, "module", "") == "dataclasses" for a in n.names}
    short = [n for n in code.tree.body if isinstance(n, ast.ClassDef) and n.name not in keep and _is_short(n)]
    if not short or others - {"dataclass"}:
        return text
    for node in short:
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        line = f'{node.name} = namedtuple("{node.name}", "{" ".join(fields(node))}")'
        code.replace(code.starts[first - 1], code.span(node)[1], line)
    for at in _place(imports):
        start = code.starts[at.lineno - 1]
        code.replace(start, start, "from collections import namedtuple\n")
        break
    return code.edited()


def _is_short(node: ast.ClassDef) -> bool:
    frozen = [ast.unparse(d) for d in node.decorator_list] in ([], ["dataclass(frozen=True)"])
    body = node.body[1:] if ast.get_docstring(node) else node.body
    plain = all(isinstance(n, ast.AnnAssign) and n.value is None for n in body)
    return is_record(node) and frozen and plain and bool(body)


def _place(imports: list[ast.Import | ast.ImportFrom]) -> Iterator[ast.stmt]:
    """The imports before which one from `collections` can be: those from the standard library, then all others."""
    own = [n for n in imports if isinstance(n, ast.ImportFrom) and n.module != "__future__"]
    yield from (n for n in own if (n.module or "").partition(".")[0] in sys.stdlib_module_names)
    yield from (n for n in imports if getattr(n, "module", "") != "__future__")


def without_unused_loop_names(text: str) -> str:
    """The file with loops over values alone where nothing reads the names that a literal gives them."""
    code = Text(text)
    for function in (n for n in code.python() if isinstance(n, ast.FunctionDef)):
        read = [n for n in walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        for block in (b for n in walk(function) if isinstance(n, ast.stmt) for b in blocks(n)):
            for i, loop in enumerate(block):
                if isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple):
                    _drop_name(code, loop, block, i, read)
    return code.edited()


def _drop_name(code: Text, loop: ast.For, block: list[ast.stmt], i: int, read: list[ast.Name]) -> None:
    target = loop.target
    assert isinstance(target, ast.Tuple)
    name, *rest = target.elts
    if not isinstance(name, ast.Name) or not rest or any(n.id == name.id for n in read):
        return
    made, values = None, _values(loop.iter)
    if values is None and _is_items(loop.iter):
        variable = ast.unparse(loop.iter.func.value)  # type: ignore[attr-defined]
        before = block[i - 1] if i else None
        once = sum(n.id == variable for n in read) == 1
        if once and isinstance(before, ast.Assign) and ast.unparse(before.targets[0]) == variable:
            made, values = before, _values_of(before.value)
    if values is None or not code.free(loop.target, loop.iter, made):
        return
    shown = code.of(rest[0]) if len(rest) == 1 else ", ".join(code.of(r) for r in rest)
    shown = shown[1:-1] if len(rest) == 1 and isinstance(rest[0], ast.Tuple) and shown[0] == "(" else shown
    each = [_text(code, v) for v in values]
    code.write(loop.target, shown)
    code.write(loop.iter, f"({', '.join(each)}{',' * (len(each) == 1)})")
    if made is not None:
        code.drop(made, block)


def _text(code: Text, value: ast.expr | list[ast.expr]) -> str:
    """The text of a value, or of the tuple of several."""
    if isinstance(value, list):
        return code.of(value[0]) if len(value) == 1 else f"({', '.join(map(code.of, value))})"
    return code.of(value)


def _values(node: ast.expr) -> list[ast.expr | list[ast.expr]] | None:
    """The values of a literal without their names, in the order of a loop; None for another literal."""
    if _is_items(node):
        return _values_of(node.func.value)  # type: ignore[attr-defined]
    if isinstance(node, (ast.Tuple, ast.List)) and node.elts:
        pairs = [
            e.elts for e in node.elts if isinstance(e, ast.Tuple) and isinstance(e.elts[0], ast.Constant)
        ]
        return [p[1:] for p in pairs] if len(pairs) == len(node.elts) else None
    return None


def _values_of(node: ast.expr) -> list[ast.expr | list[ast.expr]] | None:
    named = isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) for k in node.keys)
    return [*node.values] if named and node.values else None  # type: ignore[attr-defined]


def _is_items(node: ast.expr) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
    return called and node.func.attr == "items"  # type: ignore[attr-defined]


def plain_attributes(code: Text, made: ast.Assign, uses: list[ast.Name]) -> dict[int, str]:
    """{id of a use `record.field`: the argument}, {} if a record that was made has another use."""
    call = made.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        return {}
    classes = {n.name: n for n in code.tree.body if isinstance(n, ast.ClassDef) and is_record(n)}
    cls = classes.get(call.func.id)
    if cls is None or not all(isinstance(a, (ast.Name, ast.Constant)) for a in call.args):
        return {}
    given = dict(zip(fields(cls), map(code.of, call.args), strict=False))
    found = {}
    for use in uses:
        parent = above(use)
        if not isinstance(parent, ast.Attribute) or parent.attr not in given:
            return {}
        found[id(parent)] = given[parent.attr]
    return found
