"""The kernels tier of an evaluation: the ops of a set alone, and ops and blocks that run them, by the judge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastkernels.core import registry
from fastkernels.core.candidate import is_block
from fastkernels.models.common.descriptions.description import Unsupported
from fk_bench.core.rows import Row, Status
from fk_bench.evaluate import checkpoints
from fk_bench.evaluate.suites import Suite

if TYPE_CHECKING:
    from fk_bench.kernels.judge import Options
    from fk_bench.kernels.judge.processes.sides import Sides

ALONE, COMPOSED = (
    "independent",
    "composed",
)  # how an op is judged: by itself, or with candidates of the set inside
MOST_ABOVE = 2  # ops that call those of a set of primitives only
MOST_BLOCKS = 2  # of a model
# On an H100, 2026-11-27 (docs/judge.md), and on two CPU cores
SECONDS_OF_CASE = {"cuda": 1.7, "cpu": 2.0}
LAYERS = (2, 3)  # levels of the blocks: parts of a layer, and a layer


def judged(
    files: Mapping[str, str],
    settings: Mapping[str, Any],
    device: str,
    caged: bool,
    add: Callable[[Row, str], None],
    model: str = "",
) -> None:
    """Judge the set; `add` gets the summary row of each op, with 'independent' or 'composed'.

    settings  of the suite: sources of cases, rounds, seconds of a case, most_cases of an op and source (0: all)
    model     a name or folder; its blocks that run ops of the set are judged with the set inside them
    """
    from fk_bench.kernels.judge.rows.judging import sides_of

    options = _options(settings, device, caged)
    passed = {}
    with sides_of(options) as sides:
        for op, path in files.items():
            text = _text_of(op, model) if is_block(op) else ""
            if text is None:
                continue  # no model has such a block: the items have the reason
            (row,) = _judge([op], {op: path}, replace(options, model=text), settings, sides)
            if row.status is Status.OK:
                passed[op] = path
            add(row, ALONE)
        ops = {op: path for op, path in passed.items() if not is_block(op)}
        for row in _judge(_above(ops), ops, options, settings, sides):
            add(row, COMPOSED)
        if model and passed:
            text, blocks = _blocks(model, passed)
            for row in _judge(blocks, passed, replace(options, model=text), settings, sides):
                add(row, COMPOSED)


def estimated_minutes(files: Mapping[str, str], settings: Mapping[str, Any], device: str) -> float:
    """Minutes that `judged` takes about, without blocks of models."""
    from fk_bench.kernels.judge.correctness.cases import trials

    options, most = _options(settings, device, True), int(settings.get("most_cases", 0))
    ops = {op: path for op, path in files.items() if not is_block(op)}
    cases = [
        trial for op in [*ops, *_above(ops)] for trial in trials(registry.get(op), options.cases, device, most=most)
        if device == "cuda" or trial.gpu_only(registry.get(op)) is None
    ]  # fmt: skip
    return len(cases) * SECONDS_OF_CASE[device] / 60


def _text_of(block: str, model: str) -> str | None:
    """The text of the model that has a block: this one, or with public sizes that of the block's name."""
    from fk_bench.info import model_blocks

    for name in filter(None, (model, block.partition(".")[0])):
        with contextlib.suppress(Unsupported):
            text, names = model_blocks.register(name)
            if block in names:
                return text
    return None


def model_of(suite: Suite) -> str:
    """The first model of a suite that our engine serves, for `judged`; '' if there is none."""
    for entry in suite.entries:
        if entry.item.host == "fastkernels":
            return entry.model.public or str(checkpoints.folder(entry.model, entry.workload.kind))
    return ""


def _blocks(model: str, files: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text of a model, and the names of its blocks that run most ops of the set, the lower levels first."""
    from fk_bench.info import model_blocks

    text, names = model_blocks.register(model)
    counts = {name: len(registry.reached(name, parts=True) & files.keys()) for name in names}
    found = [n for n in names if counts[n] and registry.get(n).level in LAYERS]
    return text, sorted(found, key=lambda n: (-counts[n], registry.get(n).level, n))[:MOST_BLOCKS]


def _above(files: Mapping[str, str]) -> list[str]:
    """Ops that run those of the set: its own, else those that run most of them."""
    counts = {op: len(registry.reached(op, parts=True) & files.keys()) for op in registry.op_names()}
    own = [op for op in files if counts[op]]
    return own or sorted((op for op, n in counts.items() if n), key=lambda op: (-counts[op], op))[:MOST_ABOVE]


def _options(settings: Mapping[str, Any], device: str, caged: bool) -> Options:
    from fk_bench.kernels.judge import Options

    return Options(
        device=device, cage=caged, cases=tuple(settings.get("sources", ("random", "held-out"))),
        rounds=int(settings.get("rounds", 5)), hard=0, seconds=float(settings.get("seconds", 1.0)), timeout=120.0,
    )  # fmt: skip


def _judge(
    ops: list[str], files: Mapping[str, str], options: Options, settings: Mapping[str, Any], sides: Sides
) -> Iterator[Row]:
    """The summary row of each op."""
    from fk_bench.kernels.judge import judge_ops

    options = replace(options, most=int(settings.get("most_cases", 0)))
    candidates = {n: Path(p) for n, p in files.items()}
    for op in ops:
        found = judge_ops([op], candidates, options, sides=sides)
        summary = next((r for r in found if r.kind == "op"), found[-1])
        cases = [r for r in found if r.kind == "case" and r.status is not Status.OK]
        cases.sort(key=lambda r: r.status is Status.SKIPPED)
        summary.subject.op = op
        if summary.status is not Status.OK:
            summary.reason = ": ".join(filter(None, (summary.reason, cases[0].reason if cases else "")))[:500]
        yield summary
