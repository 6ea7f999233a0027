"""The HTML page of a run: speeds, checks against float32, and the images of all lanes side by side."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fk_bench.core import pages
from fk_bench.core.rows import Row, Status
from fk_bench.e2e.pictures.measure import Lane, summary

AMPLIFIED = 16  # times, of a difference on the page
MOST_IMAGES = 4  # of a lane
COLUMNS = {
    "batch": "batch", "lane": "lane", "images_per_s": "images/s", "latency_ms": "latency ms",
    "speedup_over_host": "speedup over the fastest host lane", "first_call_s": "first call s",
    "cosine_to_float32": "cosine to float32", "psnr_to_float32_db": "PSNR to float32 dB",
    "psnr_to_stock_db": "PSNR to the first lane dB", "status": "status",
}  # fmt: skip


def write(path: Path, made: Sequence[Row], lanes: Sequence[Lane]) -> None:
    """Write the page. lanes: as measure returns them, the reference first."""
    first = made[0]
    lines = [[_cell(line.get(key)) for key in COLUMNS] for line in summary(made)]
    problems = sorted({f"{r.subject.lane}: {r.reason}" for r in made if r.status is not Status.OK})
    text = pages.render(
        "pictures.html", title=f"{pages.model_name(first.subject.model)} in {first.subject.host}", first=first,
        when=pages.period(made), columns=list(COLUMNS.values()), lines=lines, problems=problems,
        cpu=first.machine.gpus == 0, grids=_grids(lanes) if first.case["result"] == "images" else [],
        amplified=AMPLIFIED,
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.7f}" if 0.99 < value < 1 else f"{value:.4g}"


def _grids(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """For each image of the largest batch: the images of all lanes, and their differences from float32."""
    batch = max(lanes[0].outputs)
    wanted = lanes[0].outputs[batch]
    grids = []
    for i in range(min(batch, MOST_IMAGES)):
        cells = [
            {
                "name": "float32" if lane is lanes[0] else lane.name,
                "image": _png(lane.outputs[batch][i]),
                "difference": ""
                if lane is lanes[0]
                else _png((lane.outputs[batch][i] - wanted[i]).abs() * AMPLIFIED),
            }
            for lane in lanes
        ]
        grids.append({"title": f"image {i}", "cells": cells})
    return grids


def _png(image: torch.Tensor) -> str:
    """A data URL of an image [3, H, W] in [0, 1]."""
    from PIL import Image

    values = (image.float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
