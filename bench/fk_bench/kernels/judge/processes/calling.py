"""How the cases of an op are called, decided by the judge from the candidate's source, never by its process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastkernels.core.spec import OpSpec


@dataclass(frozen=True)
class Calling:
    """cls: the class whose module is called; None: the op's function. `problem`: why it cannot be called, or ''."""

    cls: str | None = None
    problem: str = ""
    unsupported: bool = False

    @property
    def mode(self) -> str:
        return "op" if self.cls is None else "module"


SHOWN = 5  # classes that a message names


def calling(spec: OpSpec, file: Path | None) -> Calling:
    """How to call the op with this candidate; without one, our own function, or our class if there is no function."""
    classes = [t.cls for t in spec.targets]
    if file is None:
        found = Calling() if spec.op is not None else Calling(classes[0])
    else:
        names = offered(file)
        if names is None or (spec.op is not None and spec.name in names):
            found = Calling()  # a file that does not parse fails when its process imports it
        else:
            offers = [c for c in classes if c in names]
            if not offers:
                several = list(dict.fromkeys(classes))
                more = f" and {len(several) - SHOWN} more" if len(several) > SHOWN else ""
                what = (
                    f"a function {spec.name}(...) nor a class ({', '.join(several[:SHOWN]) or 'none'}{more})"
                )
                return Calling(problem=f"{file.name} defines neither {what} at its top level")
            found = Calling(offers[0])
    if found.cls is not None and spec.build is None:
        problem = f"{spec.name}: its classes cannot be built from a case; offer the function"
        return Calling(found.cls, problem, unsupported=True)
    return found


def offered(file: Path) -> set[str] | None:
    """The names that the top level of a source binds; None if it cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return {name for node in _top_level(tree.body) for name in _bound(node)}


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    todo = list(body)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for part in ("body", "orelse", "finalbody"):
                todo += getattr(node, part, [])
            todo += [s for h in getattr(node, "handlers", []) for s in h.body]


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (a.asname or a.name.partition(".")[0] for a in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
