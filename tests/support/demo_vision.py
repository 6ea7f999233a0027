"""`make demo-vision`: a tiny random SDXL pipeline and a timm model, stock and patched on the CPU, on one page."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from fk_bench.core import rows
from fk_bench.core.rows import Status
from fk_bench.e2e.pictures import report
from fk_bench.e2e.pictures.measure import Settings, measure
from fk_bench.e2e.pictures.subjects import open_subject
from support.tiny import make_tiny_pipeline

OPS = ("attention_dense", "layer_norm", "gelu")
VIT: dict[str, Any] = {"img_size": 64, "embed_dim": 96, "depth": 4, "num_heads": 3}


def demo(out: Path, rounds: int = 3) -> bool:
    """Write rows.jsonl and report.html to `out`. Returns whether every lane was right."""
    out.mkdir(parents=True, exist_ok=True)
    runs: list[report.Run] = []
    with tempfile.TemporaryDirectory() as folder:
        pipeline = str(make_tiny_pipeline(Path(folder) / "tiny-sdxl"))
        for host, model, batch, arguments in (
            ("diffusers", pipeline, 2, {}), ("timm", "vit_small_patch16_dinov3", 8, VIT),
        ):  # fmt: skip
            size, load_format = (32, "auto") if host == "diffusers" else (0, "dummy")
            subject = open_subject(host, model, torch.bfloat16, "cpu", load_format, size, 4, arguments)
            name = Path(model).name
            settings = Settings(host, name, "bfloat16", (batch,), rounds, 0, ("stock", "patched"), OPS, None)
            made, lanes = measure(subject, settings, lambda line: print(line, file=sys.stderr))
            rows.append(out / "rows.jsonl", made)
            runs.append((made, report.section(made, lanes)))
    report.write(out / "report.html", runs)
    return all(row.status is Status.OK for made, _ in runs for row in made)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    right = demo(target)
    print(f"{'all lanes are right' if right else 'a lane is wrong'}: {target / 'report.html'}")
    sys.exit(not right)
