"""Candidates as Solutions: a candidate's files, unchanged, and an entry point that calls its function."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastkernels.core import registry
from fastkernels.core.candidate import sources, sources_folder
from fastkernels.core.declaration import Scalar, Tensor
from fastkernels.core.definition import CONSTANT
from fastkernels.core.spec import OpSpec
from fk_bench.trace.schema import TraceError

ENTRY = "main.py"
HEADER = '"""Calls the function {op} of {op}.py as the definition states. Written by `fk-bench trace export`."""\n\n'


def solution(op: str, file: Path, found: Mapping[str, Any], author: str) -> dict[str, Any]:
    """The Solution of a candidate for a definition. The candidate's code is not run. Raises TraceError."""
    texts = texts_of(file)
    tree = _parsed(file, texts.get(f"{op}.py", ""))
    text = entry_point(registry.get(op), found, count_of(op, tree))
    needed = sorted(
        {name for path, t in texts.items() if path.endswith(".py") for name in _imported(path, t, texts)}
    )
    return {
        "name": f"{author}-{found['name']}",
        "definition": found["name"],
        "author": author,
        "spec": {
            "language": "triton" if "triton" in needed else "python", "target_hardware": ["cuda"],
            "entry_point": f"{ENTRY}::run", "dependencies": needed, "destination_passing_style": False,
        },
        "sources": [{"path": p, "content": t} for p, t in {ENTRY: text, **texts}.items()],
    }  # fmt: skip


def texts_of(file: Path) -> dict[str, str]:
    """{path: text} of a candidate: OP.py, and the files of its folder _OP. Raises TraceError."""
    try:
        own = {f"_{file.stem}/{p.relative_to(sources_folder(file)).as_posix()}": p for p in sources(file)}
        found = {f"{file.stem}.py": file.read_text(encoding="utf-8")}
        found |= {
            name: p.read_text(encoding="utf-8") for name, p in own.items() if "__pycache__" not in p.parts
        }
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{file}: one of its files is no text, and a Solution has text only") from None
    return {name: text for name, text in found.items() if text}  # the schema allows no empty file


def count_of(op: str, tree: ast.Module) -> int | None:
    """How many arguments the candidate's function takes; None: unknown, or any. Raises TraceError without one."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == op:
            taken = node.args
            return None if taken.vararg else len(taken.posonlyargs) + len(taken.args)
        if isinstance(node, ast.Assign):
            names = [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            names = [a.asname or a.name for a in node.names]
        else:
            continue
        if op in names:
            return None
    raise TraceError(
        f"{op}.py has no function {op}: a Solution is a function, a class has its host's constructor"
    )


def entry_point(spec: OpSpec, found: Mapping[str, Any], count: int | None) -> str:
    """The text of ENTRY: `run` with the definition's inputs and outputs. Written arguments are copied before."""
    constants = constants_of(found)
    given: list[str] = []
    for argument in spec.arguments:
        if argument.name in found["inputs"]:
            given.append(argument.name)
        elif argument.name in constants:
            value = constants[argument.name]
            is_dtype = isinstance(argument, Scalar) and argument.dtype
            given.append(f"torch.{value}" if is_dtype else repr(value))
        else:
            given.append("None")
    for name, value in (
        zip([a.name for a in spec.arguments][count:], given[count:], strict=True) if count else ()
    ):
        if name in found["inputs"] or value != repr(spec.defaults.get(name)):
            raise TraceError(f"{spec.name}.py takes {count} arguments, and the definition has {name} too")
    written = [
        a.name for a in spec.arguments if isinstance(a, Tensor) and a.mutated and a.name in found["inputs"]
    ]
    lines = [f"def run({', '.join(found['inputs'])}):"]
    lines += [f"    {name} = {name}.clone()" for name in written]
    lines += [
        f"    found = {spec.name}({', '.join(given[:count])})",
        "    found = found if isinstance(found, (tuple, list)) else (found,)",
        f"    found = [*(t for t in found if t is not None), {', '.join(written)}]".replace(", ]", "]"),
        "    return found[0] if len(found) == 1 else tuple(found)",
    ]
    imports = [f"from .{spec.name} import {spec.name}"]
    if any(g.startswith("torch.") for g in given):
        imports = ["import torch", "", *imports]
    return HEADER.format(op=spec.name) + "\n".join([*imports, "", "", *lines]) + "\n"


def constants_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are constants of a definition, from its tags. Raises TraceError."""
    constants: dict[str, Any] = {}
    for tag in found["tags"]:
        if tag.startswith(CONSTANT):
            name, _, text = tag.removeprefix(CONSTANT).partition("=")
            try:
                value = json.loads(text)
            except ValueError:
                raise TraceError(f"definition {found['name']}: tag {tag!r} is not NAME=JSON") from None
            constants[name] = tuple(value) if isinstance(value, list) else value
    return constants


def restored(op: str, document: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str] | None:
    """{path: text} of a candidate that `solution` made into this document; None for another document."""
    texts = {str(s["path"]): str(s["content"]) for s in document["sources"]}
    entry = texts.pop(ENTRY, None)
    if entry is None or f"{op}.py" not in texts or document["spec"].get("entry_point") != f"{ENTRY}::run":
        return None
    try:
        tree = _parsed(Path(f"{op}.py"), texts[f"{op}.py"])
        made = entry_point(registry.get(op), found, count_of(op, tree))
    except TraceError:
        return None
    inside = all(p == f"{op}.py" or p.startswith(f"_{op}/") for p in texts)
    return texts if made == entry and inside and not any(".." in Path(p).parts for p in texts) else None


def _parsed(file: Path, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise TraceError(f"{file} is not a Python file: {error}") from None


def _imported(path: str, text: str, texts: Mapping[str, str]) -> Iterator[str]:
    """The packages that a source needs, by the names they are imported by."""
    own = {Path(p).stem for p in texts} | {Path(p).parts[0] for p in texts}
    for node in ast.walk(_parsed(Path(path), text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in (n.partition(".")[0] for n in names):
            if name and name not in sys.stdlib_module_names and name not in own:
                yield name
