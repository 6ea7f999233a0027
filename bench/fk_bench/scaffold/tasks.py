"""The calls of a model's steps as task files, one for each op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastkernels.core.case import Case
from fk_bench.explain.cost_model import step
from fk_bench.scaffold import task_file

DECODE = (1, 32)  # sequences
PREFILL = (512, 2048)  # tokens of one sequence
CONTEXT = 1024  # tokens of a sequence in decode


def cases(name: str, config: Any, dtype: torch.dtype) -> dict[str, list[Case]]:
    """{op: its calls} in decode and prefill steps of a model that the registry knows."""
    most = getattr(config, "max_position_embeddings", None) or max(PREFILL)
    steps = [(f"decode_{n}", "decode", n, min(CONTEXT, most)) for n in DECODE]
    lengths = dict.fromkeys(min(n, most) for n in PREFILL)
    steps += [(f"prefill_{n}", "prefill", 1, n) for n in lengths]
    found: dict[str, list[Case]] = {}
    for label, phase, batch, context in steps:
        for call in step(name, config, phase, batch, context, dtype=dtype).calls:
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


def files(name: str, config: Any, dtype: torch.dtype, folder: str) -> tuple[dict[str, str], dict[str, str]]:
    """({op: text of its task file}, {op: why it has none})."""
    made, without = {}, {}
    for op, mine in sorted(cases(name, config, dtype).items()):
        try:
            made[op] = task_file.text(op, name, mine, f"{folder}/{op}.py")
        except task_file.NoTask as error:
            without[op] = str(error)
    return made, without
