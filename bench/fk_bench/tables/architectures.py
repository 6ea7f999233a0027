"""Architectures that are called with requests: the time of a call of our engine, next to the fastest reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fk_bench.core.rows import Row, Status
from fk_bench.explain.tables import Table
from fk_bench.tables.origin import Files, flat, origin

COMMANDS = (
    "architectures",
    "nine_models",
    "policies",
)  # scripts in bench/experiments; nine_models: until b00758ae
OURS, PREPARED, PLAIN = "fastkernels", "fastkernels, prepared", "engine with PyTorch's ops"
PATCHED = ", patched"  # the end of the name of a reference that runs our kernels
TIMES = ("call_ms_p50", "chunk_ms_p50")
# arXiv 2605.23215: speedup over the reference on an H200, mean of its scenarios
PAPER = {
    "bge-m3": 1.06, "colbertv2": 3.08, "convnextv2": 0.99, "cosyvoice3": 2.13, "dinov3": 0.99, "dlrmv2": 1.06,
    "dp3": 1.42, "efficientnetv2": 1.05, "flux": 1.01, "gaussians": 0.99, "gla": 1.85, "hunyuan-video": 0.97,
    "instant-ngp": 0.97, "lightgcn": 1.03, "llada": 1.07, "mobilenetv4": 1.15, "oasis": 1.29, "openfold3": 1.03,
    "pi0": 3.48, "ptv3": 1.00, "qwen2-vl": 0.91, "qwen2.5-omni": 2.02, "qwen3-vl": 1.39,
    "retnet": 1.86, "rtdetrv2": 1.08, "rwkv7": 1.18, "sam3": 1.05, "sdxl": 1.17, "siglip2": 0.93, "swinv2": 1.17,
    "ttt-e2e": 1.10, "vjepa2": 1.01, "whisper": 0.95, "yolov10": 1.06,
}  # fmt: skip
HEAD = ["architecture", "case", "ours, ms", "reference", "its ms", "speedup", "patched", "paper", "measured"]


def table(files: Files) -> Iterator[Table]:
    """The table of `lines_of`, with its origin."""
    lines, used = lines_of(flat(files))
    if lines:
        yield f"Milliseconds of a call ({origin(used, files)}):", HEAD, lines


def lines_of(rows: Iterable[Row]) -> tuple[list[list[str]], list[Row]]:
    """The lines below HEAD, and the rows that they are made of.

    Of each case and lane the newest row counts. Cases without a reference are left out. References that take prepared
    inputs are compared with our engine from checked requests on. PyTorch's ops in our engine are the reference where
    there is no other. The speedup of the fastest patched reference is over the same one without our kernels.
    """
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in sorted(filter(_counts, rows), key=lambda r: r.time):
        case = ", ".join(f"{k} {v}" for k, v in row.case.items() if k not in ("kind", "dtype"))
        cases.setdefault((row.subject.model or "", case), {})[str(row.subject.provider)] = row
    lines, used = list[list[str]](), list[Row]()
    order = list(dict.fromkeys(model for model, _ in cases))
    for (model, case), lanes in sorted(cases.items(), key=lambda found: order.index(found[0][0])):
        others = [p for p in lanes if p not in (OURS, PREPARED, PLAIN) and not p.endswith(PATCHED)]
        ours = lanes.get(PREPARED if PREPARED in lanes and others else OURS)
        reference = min((lanes[p] for p in others or [PLAIN] if p in lanes), key=_ms, default=None)
        if ours is None or reference is None:
            continue
        stocks = [p for p in others if p + PATCHED in lanes]
        stock = min(stocks, key=lambda p: _ms(lanes[p + PATCHED]), default=None)
        lines.append([
            model, case, _text(_ms(ours)), str(reference.subject.provider), _text(_ms(reference)),
            f"{_ms(reference) / _ms(ours):.2f}",
            f"{_ms(lanes[stock]) / _ms(lanes[stock + PATCHED]):.2f}" if stock else "",
            f"{PAPER[model]:.2f}" if model in PAPER else "", ours.time[:10],
        ])  # fmt: skip
        used += [ours, reference, *([lanes[stock], lanes[stock + PATCHED]] if stock else [])]
    return lines, used


def _counts(row: Row) -> bool:
    return row.command.removesuffix(".py") in COMMANDS and row.status is Status.OK and _ms(row) > 0


def _ms(row: Row) -> float:
    return next((row.metrics[name] for name in TIMES if name in row.metrics), 0.0)


def _text(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
