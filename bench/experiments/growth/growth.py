"""Time of kernels of 3-D, science and recommendation over one more order of magnitude of work than a model's case.

    growth.py --out rows.jsonl [--ops fused_mlp,...] [--seconds 560]    measure what the file does not have yet
    growth.py --plot growth.svg rows.jsonl ...                          draw it

See README.md. Times are medians of replayed CUDA graphs on warm inputs.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.results import Results, described
from fk_bench.core.baselines import baselines
from fk_bench.core.rows import Row, Status, read

from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec

OURS, PRODUCTION, COMMAND = "ours", "production", "growth"
STEPS = 5  # points of a line, the last with ten times the work of the first
CALLS, REPLAYS = 4, 7


@dataclass(frozen=True)
class Grown:
    """A case, the axes that grow together, and the power of their factor with which the work grows.

    masked   tensors of which rows are read only where the argument `masks` is true
    decided  values decide what is read, so that the bytes of a call are unknown
    """

    case: str
    axes: tuple[str, ...]
    power: float = 1.0
    masked: tuple[str, ...] = ()
    decided: bool = False


GROWN = {
    "project_gaussians": Grown("million_1080p", ("gaussians",)),
    "spherical_harmonics": Grown("million", ("gaussians",), masked=("dirs", "coeffs")),
    "intersect_tiles": Grown("million_1080p", ("gaussians", "capacity"), decided=True),
    "rasterize_gaussians": Grown("million_1080p", ("gaussians", "intersections"), decided=True),
    "hash_encoding": Grown("samples_256k", ("points",)),
    "fused_mlp": Grown("color_256k", ("points",)),
    "march_rays": Grown("lego_800", ("rays",), decided=True),
    "composite_rays": Grown("rays_256k", ("rays",), decided=True),
    "serialize_points": Grown("room", ("rows",)),
    "voxel_neighbors": Grown("room", ("rows",)),
    "subm_conv3d": Grown("room_64", ("rows",)),
    "segment_reduce": Grown("room_64", ("rows", "segments")),
    "triangle_multiplication": Grown("pairs_400", ("tokens",), 2.44),
    "attention_pair_bias": Grown("triangle_400", ("rows", "queries", "keys"), 3),
    "swiglu_transition": Grown("pairs_400", ("tokens",)),
    "outer_product_mean": Grown("aligned_400", ("tokens",), 2),
    "conditioned_layer_norm": Grown("tokens_400", ("tokens",)),
    "atom_attention": Grown("residues_400", ("atoms",)),
    "embedding_bag": Grown("dlrm_one_2048", ("batch", "ids")),
    "cross_low_rank": Grown("dlrm_2048", ("samples",)),
    "cross_layer": Grown("full_2048", ("samples",)),
    "graph_propagate": Grown("gowalla", ("nodes", "edges", "users")),
    "top_k_scores": Grown("yelp2018_256", ("users", "seen")),
    "conv1d_norm_mish": Grown("middle_100", ("samples",)),
}


def grown(spec: OpSpec, of: Grown, factor: float) -> Case:
    """The case with `factor` times its work, in whole numbers of its axes' steps."""
    case = next(c for c in spec.cases if c.name == of.case)
    by = factor ** (1 / of.power)
    dims = {**case.dims, **{a: max(1, round(case.dims[a] * by)) for a in of.axes if a in case.dims}}
    return replace(case, name=f"{case.name}_x{factor:.3g}", dims=dims)


def factors(steps: int = STEPS) -> list[float]:
    return [10 ** (i / (steps - 1)) for i in range(steps)]


def work(spec: OpSpec, case: Case) -> float:
    """Operations of a call; the bytes that it moves if it computes little."""
    found = spec.flops(case) if spec.flops is not None else 0
    return float(found or spec.bytes_moved(case))


def bytes_of(spec: OpSpec, of: Grown, case: Case, args: Sequence[Any]) -> float | None:
    """Bytes that a call has to move, without rows that a mask leaves out; None if other values decide."""
    if of.decided:
        return None
    found, declared = float(spec.bytes_moved(case)), spec.declaration
    if of.masked:
        sizes = declared.sizes(case.dims, case.dtype)
        masks = args[[a.name for a in declared.arguments].index("masks")]
        off = 0.0 if masks is None else 1.0 - float(masks.float().mean())
        for tensor in (declared.tensors[name] for name in of.masked):
            elements = torch.Size(tensor.shape(sizes)).numel() * tensor.torch_dtype(sizes).itemsize
            found -= off * (elements if tensor.cost is None else tensor.cost(sizes))
    return found


def microseconds(call: Callable[[], Any], device: str) -> float:
    """Median time of a call: in a CUDA graph if it can be captured, on a CPU by the clock."""
    call()
    if device == "cpu":
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)
    call()
    torch.cuda.synchronize()
    run: Callable[[], Any] = lambda: [call() for _ in range(CALLS)]  # noqa: E731
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    except RuntimeError:  # it waits for the GPU
        torch.cuda.synchronize()
    run()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def production(op: str, device: str, args: Sequence[Any]) -> tuple[str, Callable[..., Any]] | None:
    """The code of production for the call: the first baseline that is installed, supports it, and needs no compiler."""
    for b in baselines(op, "production", device):
        if b.kind != "compiler" and not b.available() and not b.supports(*args):
            return b.name, b.ready()
    return None


def measure(
    results: Results, op: str, factor: float, device: str, tiny: float, done: Sequence[str] = ()
) -> None:
    """Write a row of ours, and one of production's code, for one size; without a baseline, a skipped one.

    done: those of OURS and PRODUCTION that the file has
    """
    spec, of = registry.get(op), GROWN[op]
    case = grown(spec, of, factor * tiny)
    where = {"kind": "growth", "factor": round(factor, 4), "work": work(spec, case), **described(case)}
    with torch.inference_mode():
        for side in (OURS, PRODUCTION):
            if side in done:
                continue
            provider = side
            try:
                args = spec.inputs(case, device, torch.Generator(device).manual_seed(0))
                found = (OURS, spec.op) if side == OURS else production(op, device, args)
                if found is None:
                    results.say(op, provider, where, "no baseline supports the call", Status.SKIPPED)
                    continue
                provider, fn = found
                took = microseconds(functools.partial(fn, *args), device)
                moved = bytes_of(spec, of, case, args)
                rate = {} if moved is None else {"gb_per_s": moved / took * 1e-3}
                results.say(op, provider, where, time_us_p50=took, **rate)
            except Exception as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                results.say(op, provider, where, problem, Status.FAILED)


def run(options: argparse.Namespace) -> int:
    end = time.monotonic() + options.seconds
    names = options.ops.split(",") if options.ops else list(GROWN)
    if unknown := [n for n in names if n not in GROWN]:
        print(f"--ops: no line for {', '.join(unknown)}; known: {', '.join(GROWN)}", file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: there is no GPU; --device cpu --tiny 1e-4 tries the script", file=sys.stderr)
        return 2
    rows = read(options.out)[0] if options.out.exists() else []
    done: dict[tuple[str, float], set[str]] = {}
    for r in rows:
        side = OURS if r.subject.provider == OURS else PRODUCTION
        done.setdefault((str(r.subject.op), r.case["factor"]), set()).add(side)
    results, left = Results(COMMAND, options.out, "production"), list[str]()
    for op in names:
        for factor in factors():
            has = done.get((op, round(factor, 4)), set())
            if len(has) == 2:
                continue
            if time.monotonic() > end:
                left.append(f"{op} x{factor:.3g}")
                continue
            measure(results, op, factor, options.device, options.tiny, sorted(has))
            if options.device == "cuda":
                torch.cuda.empty_cache()
    if left:
        print(f"not measured; run the same command again: {', '.join(left)}")
    return 1 if results.wrong else 0


WIDE, TALL, COLUMNS, LEFT, TOP, GAP_X, GAP_Y = 190, 120, 4, 52, 56, 58, 62
COLORS = {True: "#3b6fb6", False: "#e08a3c"}
TEXT = 'font-family="system-ui, sans-serif" fill="#24292f"'


def plot(rows: Iterable[Row]) -> str:
    """An SVG with a panel for each op: time over work, both on logarithmic scales. A dashed line has slope one."""
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row.kind == COMMAND and row.status is Status.OK and row.metrics.get("time_us_p50"):
            of = lines.setdefault(str(row.subject.op), {}).setdefault(str(row.subject.provider), [])
            of.append((float(row.case["work"]), row.metrics["time_us_p50"]))
    if not lines:
        raise ValueError("the rows have no times of `growth.py --out`")
    parts = [_text(LEFT, 20, "Time of a call over one order of magnitude of work", 14, "start", "600")]
    parts.append(
        _text(
            LEFT, 38, "blue: ours; orange: what production runs; dashed: in proportion to work", 11, "start"
        )
    )
    for n, (op, found) in enumerate(lines.items()):
        x = LEFT + n % COLUMNS * (WIDE + GAP_X)
        parts += _panel(op, found, x, TOP + 20 + n // COLUMNS * (TALL + GAP_Y))
    width = LEFT + min(COLUMNS, len(lines)) * (WIDE + GAP_X)
    height = TOP + 20 + math.ceil(len(lines) / COLUMNS) * (TALL + GAP_Y)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    title = "<title>Time of kernels over one order of magnitude of work</title>"
    return "\n".join([head, title, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>", ""])


def _panel(op: str, found: dict[str, list[tuple[float, float]]], x: float, y: float) -> list[str]:
    points = [p for line in found.values() for p in line]
    (w0, w1), (t0, t1) = ((min(v), max(v)) for v in zip(*points, strict=True))
    w1, t1 = max(w1, 1.01 * w0), max(t1, 10 * t0)  # a decade at least, so that a flat line is drawn flat

    def at(of: tuple[float, float]) -> str:
        across = math.log(of[0] / w0) / math.log(w1 / w0)
        up = math.log(of[1] / t0) / math.log(t1 / t0)
        return f"{x + WIDE * min(max(across, 0), 1):.1f},{y + TALL * (1 - min(max(up, 0), 1)):.1f}"

    parts = [
        f'<rect x="{x}" y="{y}" width="{WIDE}" height="{TALL}" fill="none" stroke="#d0d7de"/>',
        _text(x + WIDE / 2, y - 6, op, 12, weight="600"),
        _text(x - 4, y + 8, _time(t1), 10, "end"), _text(x - 4, y + TALL, _time(t0), 10, "end"),
        _text(x, y + TALL + 14, f"{w0:.1e}", 10), _text(x + WIDE, y + TALL + 14, f"{w1:.1e}", 10),
    ]  # fmt: skip
    if OURS in found:
        start = min(found[OURS])
        last = min(w1, start[0] * t1 / start[1])  # where the line leaves the panel
        end = last, start[1] * last / start[0]
        parts.append(
            f'<polyline points="{at(start)} {at(end)}" fill="none" stroke="#8c959f" stroke-dasharray="4 3"/>'
        )
    for provider, line in found.items():
        color, places = COLORS[provider == OURS], [at(p) for p in sorted(line)]
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" stroke-width="2"/>')
        for place, (of, took) in zip(places, sorted(line), strict=True):
            cx, cy = place.split(",")
            label = escape(f"{op}, {provider}: {_time(took)} for {of:.2e}")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{color}"><title>{label}</title></circle>')
    return parts


def _time(us: float) -> str:
    return f"{us / 1e6:.3g} s" if us >= 1e6 else f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} us"


def _text(x: float, y: float, text: str, size: int, anchor: str = "middle", weight: str = "400") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {TEXT} {style}>{escape(text)}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", type=Path, help="of --plot")
    parser.add_argument("--out", type=Path, help="rows; what they have is not measured again")
    parser.add_argument("--ops", help="comma-separated; default: all that have a line")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", type=float, default=1.0, help="factor of all work, to try the script on a CPU"
    )
    parser.add_argument("--plot", type=Path, help="write the SVG of the rows")
    options = parser.parse_args()
    if options.plot is None:
        return run(options) if options.out else parser.error("give --out, or --plot and rows")
    try:
        options.plot.write_text(plot(row for path in options.rows for row in read(path)[0]), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"--plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
