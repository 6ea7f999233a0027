"""The part of `fk-bench e2e` for timm, transformers and diffusers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fastkernels.core.candidate import from_directory
from fastkernels.patch import PatchError
from fk_bench.core import machine, rows
from fk_bench.core.output import fail, last_line, table
from fk_bench.core.rows import Status
from fk_bench.e2e.pictures import report, subjects
from fk_bench.e2e.pictures.measure import LANES, Settings, measure, summary
from fk_bench.serving.config import ConfigError, comma_list

DEFAULT = {"timm": "vit_small_patch16_dinov3"}
SHOWN = ("batch", "lane", "images_per_s", "latency_ms", "speedup_over_host", "cosine_to_float32", "status")


def run(
    model: str, host: str, batches: tuple[int, ...], rounds: int, dtype: str, load_format: str, image_size: int,
    steps: int, lanes: str, ops: str, candidate: Path | None, seed: int, arguments: dict[str, Any], folder: Path,
    json_only: bool,
) -> None:  # fmt: skip
    """Measure one model, write rows.jsonl and report.html to `folder`, and print a table and the line of JSON."""
    names = comma_list("--lanes", lanes or "stock,compiled,patched", str)
    unknown = [n for n in names if n not in LANES]
    if unknown or names[0] != "stock":
        raise ConfigError(f"--lanes {lanes!r}: begin with stock, then any of {', '.join(LANES[1:])}")
    model = model or DEFAULT.get(host, "")
    if not model:
        raise ConfigError(f"--hosts {host} needs MODEL: a folder or a hub id")
    if dtype == "auto":
        dtype = machine.fast_dtype()
    settings = Settings(
        host, model, dtype, batches, rounds, seed, tuple(names), tuple(comma_list("--ops", ops, str)) if ops else None,
        {op: str(file) for op, file in from_directory(candidate).items()} if candidate else None,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        subject = subjects.open_subject(
            host, model, getattr(torch, dtype), device, load_format, image_size, steps, arguments
        )
        made, found = measure(subject, settings, lambda line: print(line, file=sys.stderr))
    except (subjects.SubjectError, PatchError) as error:
        fail(str(error), 1)
    rows.append(folder / "rows.jsonl", made)
    report.write(folder / "report.html", [(made, found)])
    lines, ok = summary(made), all(r.status is Status.OK for r in made)
    if not json_only:
        cells = [[_text(line.get(key)) for key in SHOWN] for line in lines]
        table(f"{model} in {host}, {dtype}, medians of {rounds} rounds", list(SHOWN), cells)
        for reason in sorted({r.reason for r in made if r.reason}):
            print(reason)
        print(f"rows: {folder / 'rows.jsonl'}; page: {folder / 'report.html'}\n")
    last_line({
        "command": "e2e", "ok": ok, "rows": str(folder / "rows.jsonl"), "report": str(folder / "report.html"),
        "results": lines,
    })  # fmt: skip
    if not ok:
        raise SystemExit(1)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
