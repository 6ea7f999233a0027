"""The calls of a model's steps as task files, one for each op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastkernels.core.case import Case
from fk_bench.explain.cost_model import Call, calls_of, step
from fk_bench.scaffold import task_file
from fk_bench.scaffold.matched_parts import MatchedParts

DECODE = (1, 32)  # sequences
PREFILL = (512, 2048)  # tokens of one sequence
CONTEXT = 1024  # tokens of a sequence in decode


Calls = Callable[[str, int, int], Iterable[Call]]  # of a phase, a batch and a context


def of_model(name: str, config: Any, dtype: torch.dtype) -> Calls:
    """The calls of a model that the registry knows."""
    return lambda phase, batch, context: step(name, config, phase, batch, context, dtype=dtype).calls


def of_parts(parts: MatchedParts, dtype: torch.dtype) -> Calls:
    """The calls of the matched modules of a model that no description expresses."""
    vocab = parts.config.vocab_size
    return lambda phase, batch, context: calls_of(parts, vocab, phase, batch, context, dtype)


def cases(config: Any, calls: Calls) -> dict[str, list[Case]]:
    """{op: its calls} in decode and prefill steps of a model."""
    most = getattr(config, "max_position_embeddings", None) or max(PREFILL)
    steps = [(f"decode_{n}", "decode", n, min(CONTEXT, most)) for n in DECODE]
    lengths = dict.fromkeys(min(n, most) for n in PREFILL)
    steps += [(f"prefill_{n}", "prefill", 1, n) for n in lengths]
    found: dict[str, list[Case]] = {}
    for label, phase, batch, context in steps:
        for call in calls(phase, batch, context):
            if call.case is None:
                continue
            mine = found.setdefault(call.op, [])
            same = [k for k, c in enumerate(mine) if (c.dims, c.dtype) == (call.case.dims, call.case.dtype)]
            if same:
                mine[same[0]] = replace(mine[same[0]], weight=mine[same[0]].weight + call.count)
                continue
            case = f"{call.label}_{label}"
            again = sum(c.name == case or c.name.startswith(f"{case}_") for c in mine)
            mine.append(
                replace(call.case, name=f"{case}_{again + 1}" if again else case, weight=float(call.count))
            )
    return found


def write(
    name: str, config: Any, calls: Calls, folder: Path, force: bool
) -> tuple[list[str], list[str], dict[str, str]]:
    """Write a file for each op.

    Returns (ops with a new file, those whose file was there and stays, {op: why it has none}).
    """
    made, kept, without = [], [], {}
    folder.mkdir(parents=True, exist_ok=True)
    for op, mine in sorted(cases(config, calls).items()):
        path = folder / f"{op}.py"
        if path.exists() and not force:
            kept.append(op)
            continue
        try:
            path.write_text(task_file.text(op, name, mine, str(path)), encoding="utf-8")
        except task_file.NoTask as error:
            without[op] = str(error)
            continue
        made.append(op)
    return made, kept, without
