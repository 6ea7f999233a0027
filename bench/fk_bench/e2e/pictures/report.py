"""The HTML page of a run: speeds, checks against float32, and the images of all lanes side by side."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fk_bench.core import pages
from fk_bench.core.rows import Row, Status
from fk_bench.e2e.pictures.measure import COSTS, MOST_DB, Lane, summary

AMPLIFIED = 16  # times, of a difference on the page
MOST_IMAGES = 4  # of a lane
MOST_PIXELS = 512  # of a side of an image on the page
COLUMNS = {
    "lane": "lane", "batch": "batch", "images_per_s": "images/s", "latency_ms": "latency ms",
    "speedup_over_host": "speedup over the fastest host lane", "first_call_s": "first call s",
    "cosine_to_float32": "cosine to float32", "psnr_to_float32_db": "PSNR to float32 dB",
    "psnr_to_stock_db": "PSNR to the first lane dB", "latents_psnr_to_float32_db": "PSNR of latents to float32 dB",
    "status": "status",
}  # fmt: skip


Run = tuple[Sequence[Row], dict[str, Any]]


def file_name(model: str) -> str:
    """A model's name without the characters of paths."""
    return re.sub(r"[^\w.-]+", "_", model)


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write one page. runs: the rows and the section of each model."""
    made = [row for rows, _ in runs for row in rows]
    title = runs[0][1]["title"] if len(runs) == 1 else "Image models, stock and patched"
    text = pages.render(
        "pictures.html", title=title, first=made[0], when=pages.period(made),
        sections=[section for _, section in runs], cpu=made[0].machine.gpus == 0, amplified=AMPLIFIED,
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")


def section(made: Sequence[Row], lanes: Sequence[Lane]) -> dict[str, Any]:
    """A model's part of the page, as plain JSON. lanes: as measure returns them; without any, no images."""
    made = [row for row in made if row.subject.lane is not None]
    timed = [row for row in made if row.kind != COSTS]
    case = timed[0].case
    conditions = [str(case["dtype"]), f"{case['image_size'] or 'default'} pixels"]
    if "steps" in case:
        conditions.append(f"{case['steps']} steps")
    patched = {op: n for row in timed for op, n in row.case.get("modules", {}).items()}
    lines = summary(timed)
    shown = [key for key in COLUMNS if any(line.get(key) is not None for line in lines)]
    return {
        "title": f"{pages.model_name(timed[0].subject.model)} in {timed[0].subject.host}",
        "conditions": ", ".join(conditions),
        "patched": ", ".join(f"{op} {n}" for op, n in patched.items()),
        "columns": [COLUMNS[key] for key in shown],
        "lines": [[_cell(key, line.get(key)) for key in shown] for line in lines],
        "problems": sorted({f"{r.subject.lane}: {r.reason}" for r in timed if r.status is not Status.OK}),
        "grids": _grids(lanes) if lanes and case["result"] == "images" else [],
    }


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if key.endswith("_db") and value == MOST_DB:
        return "equal"
    return f"{value:.7f}" if 0.99 < value < 1 else f"{value:.4g}"


def _grids(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """For each image of the largest batch: the images of all lanes, and their differences from float32."""
    batch = max(lanes[0].outputs)
    lanes = [lane for lane in lanes if batch in lane.outputs]
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
    """A data URL of an image [3, H, W] in [0, 1], at most MOST_PIXELS wide."""
    from PIL import Image

    small = image.float().cpu().clamp(0, 1)
    if small.shape[-1] > MOST_PIXELS:
        small = F.interpolate(small[None], scale_factor=MOST_PIXELS / small.shape[-1], mode="area")[0]
    values = (small * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
