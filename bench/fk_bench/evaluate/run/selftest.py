"""The do-nothing set: trivial subclasses of the classes that a host has, which must score 1 within the interval."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fastkernels.core import registry
from fk_bench.core.rows import Row

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


def write(host: str, folder: Path) -> dict[str, str]:
    """Write the set for a host to folder/HOST; returns {op: file}."""
    made, where = {}, folder / host
    where.mkdir(exist_ok=True)
    for op in registry.op_names():
        if classes := _classes(host, op):
            path = where / f"{op}.py"
            path.write_text(_FILE.format(classes=classes))
            made[op] = str(path)
    return made


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
