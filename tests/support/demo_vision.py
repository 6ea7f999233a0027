"""`make demo-vision`: a tiny random SDXL pipeline and a timm model, stock and patched on the CPU, on one page."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import diffusers
import torch
import transformers
from fk_bench.core import rows
from fk_bench.core.rows import Row, Status
from fk_bench.e2e.pictures import report
from fk_bench.e2e.pictures.measure import Settings, measure
from fk_bench.e2e.pictures.subjects import open_subject
from support.tiny import make_tiny_pipeline

OPS = ("attention_dense", "layer_norm", "gelu")
VIT: dict[str, Any] = {"img_size": 64, "embed_dim": 96, "depth": 4, "num_heads": 3}


def demo(out: Path, rounds: int = 3) -> bool:
    """Write rows.jsonl and report.html to `out`. Returns whether all results are right."""
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
            made, lanes = measure(
                subject, settings, lambda line, name=name: print(f"{name}, {line}", file=sys.stderr)
            )
            print(summary(name, host, made))
            rows.append(out / "rows.jsonl", made)
            runs.append((made, report.section(made, lanes)))
    report.write(out / "report.html", runs)
    return all(row.status is Status.OK for made, _ in runs for row in made)


def summary(name: str, host: str, made: list[Row]) -> str:
    """One line about a model: the modules replaced, and how close its results are to float32, by the last rows."""
    last = {row.subject.lane: row for row in made}
    if failed := [f"{lane}: {row.reason}" for lane, row in last.items() if row.status is not Status.OK]:
        return f"{name} in {host}: {'; '.join(failed)}"
    replaced = ", ".join(f"{n} {op}" for op, n in last["patched"].case["modules"].items())
    patched, stock = (last[lane].metrics["cosine_to_float32"] for lane in ("patched", "stock"))
    return (
        f"{name} in {host}: replaced {replaced}; cosine to float32 {patched:.6f} patched, {stock:.6f} stock"
    )


if __name__ == "__main__":
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    target = Path(sys.argv[1])
    right = demo(target)
    print(f"{'all results are right' if right else 'some results are wrong'}, see {target / 'report.html'}")
    sys.exit(not right)
