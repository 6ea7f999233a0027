"""The part of `fk-bench e2e` for timm, transformers and diffusers."""

from __future__ import annotations

import gc
import shutil
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fastkernels.core.candidate import from_directory
from fastkernels.core.registry import UnknownName, check_names
from fastkernels.patch import PatchError
from fk_bench.core import machine
from fk_bench.core.rows import Row, Status
from fk_bench.core.terminal.flags import ConfigError, comma_list
from fk_bench.core.terminal.output import last_line, table
from fk_bench.e2e.pictures import ahead, omni, report, subjects
from fk_bench.e2e.pictures.measure import (
    COSTS,
    LANES,
    Compiler,
    DeviceLost,
    Lane,
    Measured,
    Settings,
    failed_row,
    measure,
    summary,
)
from fk_bench.e2e.pictures.saved import Saved
from fk_bench.offline.host import OMNI

WITH_GRAPHS = ("max-autotune", "reduce-overhead")
DEFAULT = {"timm": "vit_small_patch16_dinov3"}
SHOWN = ("batch", "lane", "images_per_s", "latency_ms", "speedup_over_host", "cosine_to_float32", "status")


def run(
    models: str, host: str, batches: tuple[int, ...], rounds: int, dtype: str, load_format: str, image_size: int,
    steps: int, lanes: str, ops: str, candidate: Path | None, seed: int, arguments: dict[str, Any], folder: Path,
    json_only: bool, compiler: Compiler, with_costs: bool, channels_last: bool, place: omni.Place, processes: int = 0,
) -> None:  # fmt: skip
    """Measure models one after the other, write rows.jsonl and report.html to `folder`, and print tables and JSON.

    A folder of an interrupted run with the same settings is continued. processes: that compile before. Raises
    ConfigError.
    """
    names = comma_list("--lanes", lanes or "stock,compiled,patched", str)
    if names[:1] != ("stock",) or len({*names}) < len(names) or not {*names} <= {*LANES}:
        raise ConfigError(
            f"--lanes {lanes!r}: begin with stock, then any of {', '.join(LANES[1:])}, each once;"
            " they are compared with stock"
        )
    if steps < 1 or min(image_size, processes) < 0:
        raise ConfigError("--steps must be at least 1, --image-size and --compile-ahead at least 0")
    if compiler.graphs and not compiler.blocks:
        raise ConfigError(
            "--cuda-graphs needs --compile-blocks: for whole models, choose a mode that has graphs"
        )
    if compiler.graphs and compiler.mode in WITH_GRAPHS:
        raise ConfigError(
            f"--cuda-graphs with --compile-mode {compiler.mode}, which has graphs of its own: choose default or"
            " max-autotune-no-cudagraphs"
        )
    if OMNI in names and shutil.which(place.python) is None:
        raise ConfigError(f"--python {OMNI}: no such interpreter: {place.python}")
    models = models or DEFAULT.get(host, "")
    if not models:
        raise ConfigError(
            f"--hosts {host} needs MODEL: a folder, a hub id, or one of {', '.join(subjects.NAMED)}"
        )
    if dtype == "auto":
        dtype = machine.fast_dtype()
    try:
        chosen = check_names(comma_list("--ops", ops, str)) if ops else None
    except UnknownName as error:
        raise ConfigError(f"--ops: {error}") from None
    files = {op: str(file) for op, file in from_directory(candidate).items()} if candidate else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made_with = {
        "rounds": rounds, "dtype": dtype, "load_format": load_format, "image_size": image_size, "steps": steps,
        "ops": chosen, "candidates": files, "seed": seed, "arguments": arguments, "compiler": asdict(compiler),
        "costs": with_costs, "channels_last": channels_last,
    }  # fmt: skip
    saved = Saved(folder, made_with)
    every: list[tuple[str, list[Row]]] = []
    lost: DeviceLost | None = None
    for model in models.split(","):
        own = subjects.NAMED[model][0] if model in subjects.NAMED else host
        settings = Settings(
            own, model, dtype, batches, rounds, seed, tuple(names), chosen, files, compiler, with_costs
        )  # fmt: skip
        try:
            how = (load_format, image_size, steps, arguments, channels_last)
            _measure(settings, saved, device, how, place, processes)
        except DeviceLost as error:
            lost = error
        except Exception as error:  # the other models are measured
            known = isinstance(error, (subjects.SubjectError, PatchError))
            text = str(error) if known else f"{type(error).__name__}: {error}"
            print(f"{model}: {text}" if "," in models else text, file=sys.stderr)
            if not known:
                traceback.print_exc()
            saved.add([failed_row(settings, text)])
        made = saved.of(model)
        every.append((model, made))
        if not json_only and any(r.metrics for r in made):
            _show(settings, made)
        if lost is not None:
            break
    saved.write_page()
    ok = lost is None and all(r.status is Status.OK for _, made in every for r in made)
    if not json_only:
        print(f"rows: {saved.rows}; page: {saved.page}\n")
    several = len(every) > 1
    last_line({
        "command": "e2e", "ok": ok, "rows": str(saved.rows), "report": str(saved.page),
        "results": [{"model": m, **line} if several else line for m, made in every for line in summary(made)],
    })  # fmt: skip
    if lost is not None:
        print(str(lost), file=sys.stderr)
    if not ok:
        raise SystemExit(1)


def _measure(
    settings: Settings, saved: Saved, device: str, how: tuple[str, int, int, dict[str, Any], bool], place: omni.Place,
    processes: int,
) -> None:  # fmt: skip
    """Measure what `saved` does not have of one model yet. how: the format to load, sizes, arguments, channels last."""
    settings = saved.rest(settings)
    if not settings.batches:
        print(f"{settings.model}: measured before, in {saved.rows}", file=sys.stderr)
        return
    *sizes, channels_last = how
    opened = (settings.host, settings.model, getattr(torch, settings.dtype), device, *sizes)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if processes:
        ahead.fill(opened, channels_last, settings, processes, say)
    subject = subjects.open_subject(*opened)
    found: list[Lane] = []
    elsewhere: dict[str, dict[int, Measured | str]] = {}
    try:
        if OMNI in settings.lanes:
            elsewhere[OMNI] = omni.measure(subject, settings, place, saved.folder, say)
        if channels_last:
            subject.channels_last()
        _, found = measure(subject, settings, say, saved.add, elsewhere)
        saved.add_section(settings.model, report.section(saved.of(settings.model), found))
    finally:
        for lane in found:
            lane.free()
        del subject
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _show(settings: Settings, made: list[Row]) -> None:
    """Print the tables of one model."""
    cells = [[_text(line.get(key)) for key in SHOWN] for line in summary(made)]
    title = f"{settings.model} in {settings.host}, {settings.dtype}, medians of {settings.rounds} rounds"
    table(title, list(SHOWN), cells)
    profiles = [row for row in made if row.kind == COSTS]
    kinds = list(dict.fromkeys(kind for row in profiles for kind in row.metrics))
    if kinds:
        lines = [
            [row.case["batch"], row.subject.lane, *(f"{row.metrics[kind]:.2f}" for kind in kinds)]
            for row in profiles
        ]
        names = [kind.removesuffix("_ms").replace("_", " ") for kind in kinds]
        table(
            f"{settings.model}: milliseconds of one call under the profiler", ["batch", "lane", *names], lines
        )
    for reason in sorted({r.reason for r in made if r.reason}):
        print(reason)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
