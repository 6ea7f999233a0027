"""The part of `fk-bench e2e` for timm, transformers and diffusers."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch

from fastkernels.core.candidate import from_directory
from fastkernels.patch import PatchError
from fk_bench.core import machine, rows
from fk_bench.core.output import fail, last_line, table
from fk_bench.core.rows import Row, Status
from fk_bench.e2e.pictures import report, subjects
from fk_bench.e2e.pictures.measure import LANES, Compiler, Lane, Settings, cost_rows, measure, summary
from fk_bench.serving.config import ConfigError, comma_list

WITH_GRAPHS = ("max-autotune", "reduce-overhead")
DEFAULT = {"timm": "vit_small_patch16_dinov3"}
SHOWN = ("batch", "lane", "images_per_s", "latency_ms", "speedup_over_host", "cosine_to_float32", "status")


def run(
    models: str, host: str, batches: tuple[int, ...], rounds: int, dtype: str, load_format: str, image_size: int,
    steps: int, lanes: str, ops: str, candidate: Path | None, seed: int, arguments: dict[str, Any], folder: Path,
    json_only: bool, compiler: Compiler, with_costs: bool, channels_last: bool,
) -> None:  # fmt: skip
    """Measure models one after the other, write rows.jsonl and report.html to `folder`, and print tables and JSON."""
    names = comma_list("--lanes", lanes or "stock,compiled,patched", str)
    unknown = [n for n in names if n not in LANES]
    if unknown or names[0] != "stock":
        raise ConfigError(f"--lanes {lanes!r}: begin with stock, then any of {', '.join(LANES[1:])}")
    if compiler.graphs and not compiler.blocks:
        raise ConfigError(
            "--cuda-graphs needs --compile-blocks: for whole models, choose a mode that has graphs"
        )
    if compiler.graphs and compiler.mode in WITH_GRAPHS:
        raise ConfigError(
            f"--cuda-graphs with --compile-mode {compiler.mode}, which has graphs of its own: choose default or"
            " max-autotune-no-cudagraphs"
        )
    models = models or DEFAULT.get(host, "")
    if not models:
        raise ConfigError(
            f"--hosts {host} needs MODEL: a folder, a hub id, or one of {', '.join(subjects.NAMED)}"
        )
    if dtype == "auto":
        dtype = machine.fast_dtype()
    chosen = tuple(comma_list("--ops", ops, str)) if ops else None
    files = {op: str(file) for op, file in from_directory(candidate).items()} if candidate else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every: list[tuple[str, list[Row], list[Lane]]] = []
    for model in models.split(","):
        own = subjects.NAMED[model][0] if model in subjects.NAMED else host
        settings = Settings(
            own, model, dtype, batches, rounds, seed, tuple(names), chosen, files, compiler, with_costs
        )  # fmt: skip
        try:
            subject = subjects.open_subject(
                own, model, getattr(torch, dtype), device, load_format, image_size, steps, arguments
            )
            if channels_last:
                subject.channels_last()
            made, found = measure(subject, settings, lambda line: print(line, file=sys.stderr))
        except (subjects.SubjectError, PatchError) as error:
            fail(f"{model}: {error}" if "," in models else str(error), 1)
        for lane in found:
            lane.free()
        del subject
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        rows.append(folder / "rows.jsonl", [*made, *cost_rows(found, settings)])
        every.append((model, made, found))
        report.write(folder / "report.html", [(made, found) for _, made, found in every])
        if not json_only:
            _show(settings, made, found)
    ok = all(r.status is Status.OK for _, made, _ in every for r in made)
    if not json_only:
        print(f"rows: {folder / 'rows.jsonl'}; page: {folder / 'report.html'}\n")
    several = len(every) > 1
    last_line({
        "command": "e2e", "ok": ok, "rows": str(folder / "rows.jsonl"), "report": str(folder / "report.html"),
        "results": [{"model": m, **line} if several else line for m, made, _ in every for line in summary(made)],
    })  # fmt: skip
    if not ok:
        raise SystemExit(1)


def _show(settings: Settings, made: list[Row], found: list[Lane]) -> None:
    """Print the tables of one model."""
    cells = [[_text(line.get(key)) for key in SHOWN] for line in summary(made)]
    title = f"{settings.model} in {settings.host}, {settings.dtype}, medians of {settings.rounds} rounds"
    table(title, list(SHOWN), cells)
    kinds = list(dict.fromkeys(kind for lane in found for parts in lane.costs.values() for kind in parts))
    if kinds:
        lines = [
            [batch, lane.name, *(f"{parts[kind]:.2f}" for kind in kinds)]
            for lane in found for batch, parts in lane.costs.items()
        ]  # fmt: skip
        table(
            f"{settings.model}: milliseconds of one call under the profiler", ["batch", "lane", *kinds], lines
        )
    for reason in sorted({r.reason for r in made if r.reason}):
        print(reason)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
