"""The operators and architectures that a complete benchmark of inference covers, and where each is judged.

`targets.tsv` has one row for each: a group (level 1 or 2 of the published benchmark, what it lacks, its architectures),
the tasks that judge it (ops, and blocks as MODEL.KIND), or the reason why nothing does. The rows of architectures
follow from the registry: `tools/targets.py` writes them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

FILE = Path(__file__).with_name("targets.tsv")
GROUPS = ("1", "2", "needed", "model")
MODEL = "model"  # the group of architectures
FILES = {  # {architecture: our model file, if it has another name}
    "deepseek": "deepseek_v32", "siglip2": "siglip2_vision", "pointtransformerv3": "ptv3", "dlrmv2": "dlrm_v2",
    "bge_m3": "xlm_roberta", "colbertv2": "colbert", "glm": "glm_moe_dsa",
}  # fmt: skip
BESIDE = {"colbertv2": ("maxsim",)}  # ops that an engine runs on a model's outputs
LEVELS = (4, 3)  # of blocks that are layers or more: the highest that a model has judges it
COLUMNS = ("group", "target", "tasks", "reason")


@dataclass(frozen=True)
class Target:
    """tasks: ops and blocks that judge it; reason: why there are none."""

    group: str
    name: str
    tasks: tuple[str, ...]
    reason: str


def targets() -> tuple[Target, ...]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(
            Target(row["group"], row["target"], tuple(filter(None, row["tasks"].split(","))), row["reason"])
            for row in csv.DictReader(file, delimiter="\t")
        )


def tasks_of(architecture: str) -> tuple[str, ...]:
    """The tasks of an architecture: its blocks of the highest level. Without a layer among them, its ops, too."""
    from fastkernels.core import registry
    from fastkernels.models.common.descriptions.description import Unsupported
    from fastkernels.models.common.plans.ops import ops_of_model
    from fk_bench.info import model_blocks

    name = FILES.get(architecture, architecture)
    blocks: tuple[str, ...] = ()
    with suppress(Unsupported):
        _, blocks = model_blocks.register(name)
    levels = [tuple(b for b in blocks if registry.get(b).level == level) for level in LEVELS]
    found = next(filter(None, levels), ())
    if not found:
        inside = {op for block in blocks for op in registry.reached(block, parts=True)}
        found = *blocks, *(op for op in ops_of_model(name) if op not in inside)
    return *found, *BESIDE.get(architecture, ())


def renewed(found: Iterable[Target]) -> tuple[Target, ...]:
    """The targets, those of architectures with the tasks that the registry has now."""
    return tuple(replace(t, tasks=tasks_of(t.name), reason="") if t.group == MODEL else t for t in found)


def write(found: Iterable[Target]) -> None:
    with FILE.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, delimiter="\t", lineterminator="\n")
        out.writerows([COLUMNS, *([t.group, t.name, ",".join(t.tasks), t.reason] for t in found)])
