"""Task folders: all that an author of a kernel needs to know about one op, and nothing that the final score hides."""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.declaration import Tensor
from fastkernels.core.definition import definition, standalone
from fastkernels.core.spec import OpSpec
from fk_bench.agents.budget import TaskBudget
from fk_bench.agents.session import copy_candidate
from fk_bench.capture.replay import captured_cases
from fk_bench.core import machine
from fk_bench.core.terminal.text import NAME, NAME_RULE
from fk_bench.info import model_blocks, stubs
from fk_bench.kernels.judge.memory import layout

CHECK, SOCKET, STATEMENT, FACTS = "check", ".check.sock", "TASK.md", "task.json"
INPUT_BYTES, INPUTS = 1 << 20, 4  # of one example, and how many
RULES = """\
- The judge runs the candidate in a process of its own. Inputs, clock and checks of outputs are outside that process.
- Inputs that the op does not mutate stay unchanged. Outputs are new dense tensors and keep their values.
- A call works inside a CUDA graph: no synchronization with the host, no sizes that depend on data.
- Values differ in every call. Outputs of timed calls are checked against a float64 oracle.
- The final score has cases that no check shows: other sizes, captured calls, extreme values and layouts. A kernel
  that is wrong in one of them is no winner.
- A static scan rejects code that no kernel needs: patched clocks, `ctypes`, inspection of the caller.
- Caching results, skipping work and recognizing the judge are found and lose the attempt."""
TEXT = """\
# Task: a faster `{op}`
{about}
Edit `{op}.py`, which is the stub to start from. Keep names, arguments, shapes and dtypes.

| file | content |
| --- | --- |
| `{op}.py` | the candidate: the only file that is judged, with the folder `_{op}/` for sources of its own |
| `reference.py` | the meaning of the op |
| `task.json` | level, cases, tolerances, machine and budget as data |
| `inputs/*.pt` | examples: `torch.load(file)` gives `arguments` and `expected` |
{below}
`./check` judges the candidate and prints JSON: the verdict, the first failing case with an expected and an
actual value, and each case's time against the baseline and the floor. `./check --profile` adds what the judge measured.
Each check of a new source is one attempt.

Budget: {budget}. Device: {device}.

## Rules

{rules}

## Cases

{cases}
"""
CHECK_SCRIPT = '''\
#!{python}
"""Judge the candidate of this folder: prints the feedback as JSON. --profile: with all that was measured."""

import json
import os
import socket
import sys

os.chdir(os.path.dirname(os.path.abspath(__file__)))
words = sys.argv[1:]
request = {{"do": "check", "profile": "--profile" in words}}
if words[:1] == ["--usage"]:  # tokens and dollars that the agent has used since the last report
    request = {{"do": "usage", "tokens": int(words[1]), "cost_usd": float(words[2]) if words[2:] else 0.0}}
elif words[:1] == ["--lost"]:  # an attempt without a source, and why
    request = {{"do": "lost", "reason": words[1]}}
with socket.socket(socket.AF_UNIX) as judge:
    judge.connect("{socket}")
    judge.sendall(json.dumps(request).encode() + b"\\n")
    answer = b""
    while part := judge.recv(1 << 16):
        answer += part
found = json.loads(answer)
print(json.dumps(found, indent=1))
sys.exit(0 if found.get("verdict", "ok") == "ok" else 1)
'''


def chosen(ops: Sequence[str], level: int | None, model: str) -> tuple[list[str], str]:
    """(names of ops and blocks by level, the text of the model whose blocks are among them).

    Raises UnknownName, CheckpointError, Unsupported, ValueError.
    """
    inferred = model or model_blocks.model_of(ops)
    text, blocks = model_blocks.register(inferred) if inferred else ("", ())
    if ops:
        names = list(dict.fromkeys(registry.check_names(ops)))
        if level is not None:
            names = [n for n in names if registry.get(n).level == level]
    elif level == 4:
        if not inferred:
            raise ValueError("--level 4 is a whole model: name it with --model")
        names = model_blocks.of_level(blocks, [4])
    else:
        names = stubs.selected_ops((), level, model or None)
        names += [b for b in blocks if level is None or registry.get(b).level == level]
    if not names:
        given = {"--ops": ",".join(ops), "--level": level, "--model": model}
        words = " ".join(f"{flag} {value}" for flag, value in given.items() if value)
        raise ValueError(
            f"no op matches {words} together: leave one out; `fk-bench list` has the level of each op"
        )
    return sorted(names, key=lambda n: registry.get(n).level), text


def check_cases(names: Sequence[str], cases: Sequence[str]) -> None:
    """Raise UnknownName for a case that none of these ops has."""
    known = {c.name for n in names for c in registry.get(n).cases}
    if wrong := [c for c in cases if c not in known]:
        raise registry.UnknownName("case", wrong[0], sorted(known))


def check_suffix(suffix: str) -> None:
    """Raise ValueError for a label that is no part of a folder's name."""
    if suffix and not NAME.fullmatch(suffix):
        raise ValueError(f"--suffix {suffix[:80]!r}: {NAME_RULE}")


def write(
    op: str, folder: Path, budget: TaskBudget, device: str, names: Sequence[str] = (),
    below: Mapping[str, Path] | None = None, begin: Path | None = None,
) -> Path:  # fmt: skip
    """Write the folder of a task; returns the stub, a copy of `begin` if given.

    names: only these cases are in attempts
    """
    folder.mkdir(parents=True)
    spec = registry.get(op)
    stub = folder / f"{op}.py"
    if begin is None:
        stub.write_text(stubs.source(op, folder="."), encoding="utf-8")
    else:
        copy_candidate(begin, stub)
    (folder / "reference.py").write_text(_reference(spec), encoding="utf-8")
    shown = [c for c in spec.cases if not names or c.name in names]
    facts = {
        "op": op, "level": spec.level, "device": device, "machine": machine.machine().model_dump(),
        "budget": {k: v for k, v in vars(budget).items() if v is not None},
        "tolerance": {k: {"atol": t.atol, "rtol": t.rtol} for k, t in spec.tolerance.items()},
        "cases": [{"name": c.name, "dims": _plain(c.dims), "dtype": c.dtype, "weight": c.weight} for c in shown],
        "definition": _definition(spec),
    }  # fmt: skip
    (folder / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    _inputs(spec, folder / "inputs", names)
    for name, file in (below or {}).items():
        copy_candidate(file, folder / "below" / f"{name}.py")
    (folder / STATEMENT).write_text(statement(op, budget, device, shown, bool(below)), encoding="utf-8")
    check = folder / CHECK
    check.write_text(CHECK_SCRIPT.format(python=sys.executable, socket=SOCKET))
    check.chmod(check.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return stub


def statement(op: str, budget: TaskBudget, device: str, cases: Sequence[Any], below: bool) -> str:
    """The task as text, for a person or a language model."""
    about = "" if "." in op else (registry.op_module(op).__doc__ or "").strip().partition("\n\n")[0]
    about = f"\n{about}\n" if about else ""
    limits = [
        f"{budget.seconds:g} seconds" if budget.seconds else "",
        f"{budget.attempts} attempts" if budget.attempts else "",
    ]
    limits.append(f"{budget.tokens} tokens" if budget.tokens else "")
    lines = ["| case | dtype | sizes | weight |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {c.name} | {c.dtype} | {', '.join(f'{k}={v}' for k, v in _plain(c.dims).items())} | {c.weight:g} |"
        for c in cases
    ]  # fmt: skip
    return TEXT.format(
        op=op, about=about,
        below="| `below/*.py` | winners of lower levels, which run inside this op |\n" if below else "",
        budget=", ".join(limits) or "none", device=device, rules=RULES, cases="\n".join(lines),
    )  # fmt: skip


def _reference(spec: OpSpec) -> str:
    """The reference as a file that needs PyTorch alone; for a block the stub, which is built from our modules."""
    if spec.op is None or "." in spec.name:
        return (
            f'"""{spec.name} means its stub on plain PyTorch providers: FASTKERNELS_PROVIDER=reference."""\n'
        )
    try:
        imports, parts = standalone(spec.reference)
    except (TypeError, ValueError, OSError):
        imports, parts = (f"from {spec.reference.__module__} import {spec.reference.__name__}",), ()
    name = spec.reference.__name__
    named = [] if name == "reference" else [f"reference = {name}"]
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join([*parts, *named]) + "\n"


def _plain(dims: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v if isinstance(v, (int, float, bool, str)) or v is None else repr(v)[:200]
        for k, v in dims.items()
    }


def _definition(spec: OpSpec) -> Any:
    """The FlashInfer-Trace definition; None for an op without one."""
    try:
        return definition(spec)
    except (ValueError, LookupError, TypeError):
        return None


def _inputs(spec: OpSpec, folder: Path, names: Sequence[str]) -> None:
    """Examples of small calls with their results, captured ones first. Values are new in each run."""
    folder.mkdir()
    if spec.op is None:
        return
    generator = torch.Generator().manual_seed(torch.seed() % (1 << 62))
    made: list[tuple[str, Any]] = [
        (c.case.name, lambda c=c: c.make_args("cpu", generator)) for c in captured_cases(spec.name)
    ]
    made += [
        (c.name, lambda c=c: spec.inputs(c, "cpu", generator))
        for c in spec.cases
        if spec.bytes_moved(c) <= INPUT_BYTES and (not names or c.name in names)
    ]
    written = 0
    for name, make in made:
        if written == INPUTS:
            return
        arguments = make()
        if sum(t.nbytes for t in layout.tensors(arguments)) > INPUT_BYTES:
            continue
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        expected = spec.reference(*copies)
        mutated = [a.name for a in spec.arguments if isinstance(a, Tensor) and a.mutated]
        kept = {"arguments": arguments, "expected": expected, "mutated": mutated}
        torch.save(kept, folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.pt")
        written += 1
