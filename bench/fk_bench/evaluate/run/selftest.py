"""The do-nothing set: trivial subclasses of the classes that a host has, which must score 1 within the interval.

For requests to the other runners of our engine, whose models call ops more than modules, it has functions that run the
shipped providers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fastkernels.core import registry
from fk_bench.core.rows import Row
from fk_bench.evaluate.macro_eval import Item

NAME = "do-nothing"  # of the set
PASSED = "passed"
SEAMS = ("leaf", "module")  # whose classes can be subclassed as they are
OURS = "fastkernels"
_FILE = '''"""A candidate that does nothing: the host's own classes under the names of an op's."""

import importlib

for _name, _module, _class in {classes!r}:
    try:
        _base = getattr(importlib.import_module(_module), _class)
    except (ImportError, AttributeError):
        continue
    globals().setdefault(_name, type(_name, (_base,), {{}}))
'''


_FUNCTION = '''"""A candidate that does nothing: the shipped providers, in their order."""

from fastkernels.core import dispatch, registry

_op = registry.get({op!r}).op
_shipped = dispatch.Op(_op.name, _op.providers, _op.key)


def {op}({parameters}):
    return _shipped.run({arguments})
'''


def write(host: str, folder: Path, kind: str = "text") -> dict[str, str]:
    """Write the set for a host and a kind of workload to folder/HOST-KIND; returns {op: file}."""
    made, where = {}, folder / f"{host}-{kind}"
    where.mkdir(exist_ok=True)
    for op in registry.op_names():
        if kind == "requests":
            text = _function(op)
        else:
            text = _FILE.format(classes=classes) if (classes := _classes(host, op)) else ""
        if text:
            path = where / f"{op}.py"
            path.write_text(text)
            made[op] = str(path)
    return made


def _function(op: str) -> str:
    """The file of a function with the op's signature; '' for an op without a function."""
    if registry.get(op).op is None:
        return ""
    from fk_bench.info.stubs import source

    tree = ast.parse(source(op))
    found = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == op), None)
    if found is None:
        return ""
    arguments = [*found.args.posonlyargs, *found.args.args]
    for one in arguments:
        one.annotation = None
    return _FUNCTION.format(
        op=op, parameters=ast.unparse(found.args), arguments=", ".join(a.arg for a in arguments)
    )


def _classes(host: str, op: str) -> list[tuple[str, str, str]]:
    """(name of our class, module, class) for the classes that a host has; in our engine they are ours."""
    found = []
    for target in registry.get(op).targets:
        module, _, name = target.path.partition(":")
        if host == OURS and target.host in ("vllm", "torch") and target.module:
            if isinstance(registry.target_class(target), type):  # not a function
                found.append((target.cls, target.module, target.cls))
        elif host != OURS and target.host in (host, "torch") and target.seam in SEAMS:
            found.append((target.cls, module, name))
    return found


def verdicts(items: Sequence[Item], done: Mapping[Item, Row]) -> dict[str, str]:
    """{host: 'passed', 'failed: ...' or 'not run'} for these items, with the rows that the do-nothing set has."""
    found = {}
    for host in dict.fromkeys(i.host for i in items):
        mine = [i for i in items if i.host == host]
        rows = [done[i] for i in mine if i in done]
        wrong = outside(rows)
        missing = "not run" if not rows else f"{len(rows)} of {len(mine)} items run"
        found[host] = (
            f"failed: {'; '.join(wrong)}" if wrong else PASSED if len(rows) == len(mine) else missing
        )
    return found


def outside(rows: Iterable[Row]) -> list[str]:
    """Items whose speedup differs from 1 by more than its interval, or whose outputs differ."""
    found = []
    for row in rows:
        for name, (low, high) in row.ci95.items():
            if not low <= 1 <= high:
                found.append(f"{row.subject.model} in {row.subject.host}: {name} in [{low:.3f}, {high:.3f}]")
        if row.metrics.get("correctness", 0.0) < 1:
            found.append(
                f"{row.subject.model} in {row.subject.host}: correctness {row.metrics.get('correctness')}"
            )
    return found
