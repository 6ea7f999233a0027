"""Products of prompts: our tiles next to cuBLAS, in turn and each one alone at the chip's limit of power.

Kernels that are timed in turn share one clock. A kernel that runs alone for long gets the clock that its power allows,
as in a prompt of many layers: there joules decide.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from experiments.common.results import Results

from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.kit.launch import multiprocessors
from fastkernels.overrides.linear.kernels import tiled_linear_cuda as tiled
from fastkernels.overrides.linear.selection import PROMPTS

# {model: (width, intermediate, rows of packed queries, keys and values, columns of the output projection)}
MODELS = {
    "llama-3.1-8b": (4096, 14336, 6144, 4096), "yi-1.5-9b": (4096, 11008, 5120, 4096),
    "ministral-8b": (4096, 12288, 6144, 4096), "qwen3-4b": (2560, 9728, 6144, 4096),
    "llama-2-13b": (5120, 13824, 15360, 5120), "internlm2.5-7b": (4096, 14336, 6144, 4096),
}  # fmt: skip
SQUARES = tuple(
    {"rows": rows, "columns": columns, "cooperate": cooperate, "shares": "wx", "cluster": 4}
    for rows, columns, cooperate in ((128, 192, False), (128, 256, True), (256, 192, True), (256, 128, True))
)
SETS = (*PROMPTS, *SQUARES)
OPS = {"gate_up": "linear_silu_and_mul"}
ROUND_S, ROUNDS = 0.02, 5  # of kernels in turn
ALONE_S = 0.45
Calls = Sequence[Callable[[], Any]]


def name_of(p: dict[str, Any]) -> str:
    way = "in halves" if p["cooperate"] else "in turn"
    return f"{p['rows']}x{p['columns']} {way}, shares {p['shares']} of {p['cluster']}"


class Meter:
    """Joules and the clock of the device, as its driver counts them."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.library.nvmlInit_v2()
        self.device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        if self.library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self.device)):
            self.library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device))

    def joules(self) -> float:
        value = ctypes.c_ulonglong()
        self.library.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(value))
        return value.value / 1e3

    def megahertz(self) -> int:
        value = ctypes.c_uint()
        self.library.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(value))
        return value.value

    def watts(self, seconds: float, running: Callable[[], bool]) -> tuple[float, float]:
        """Mean power between two updates of the counter, and the median clock, while something is running."""
        seen, clocks = [(time.monotonic(), self.joules())], []
        while running() and time.monotonic() - seen[0][0] < seconds + 5:
            time.sleep(0.004)
            clocks.append(self.megahertz())
            if (now := self.joules()) != seen[-1][1]:
                seen.append((time.monotonic(), now))
        later = [s for s in seen[1:] if s[0] - seen[0][0] > seconds / 3]  # the clock has settled
        if len(later) < 2:
            return 0.0, float(statistics.median(clocks or [0]))
        (t0, j0), (t1, j1) = later[0], later[-1]
        return (j1 - j0) / (t1 - t0), float(statistics.median(clocks[len(clocks) // 3 :]))


def graph_of(calls: Calls) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def seconds_of(graph: torch.cuda.CUDAGraph, times: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        graph.replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / times


def in_turn(graphs: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each graph."""
    times = {name: max(1, round(ROUND_S / seconds_of(graph, 1))) for name, graph in graphs.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            found[name].append(seconds_of(graph, times[name]))
    return {name: 1e6 * statistics.median(several) for name, several in found.items()}


def alone(graph: Any, meter: Meter) -> dict[str, float]:
    """Microseconds, joules and the clock of a graph that is replayed for ALONE_S."""
    times = max(3, round(ALONE_S / seconds_of(graph, 3)))
    first, middle, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    first.record()
    for i in range(times):
        if i == times // 3:
            middle.record()
        graph.replay()
    last.record()
    watts, clock = meter.watts(ALONE_S, lambda: not last.query())
    torch.cuda.synchronize()
    us = 1e3 * middle.elapsed_time(last) / (times - times // 3)
    return {"alone_us": us, "watts": watts, "joules": watts * us / 1e6, "mhz": clock}


def compile_all(device: torch.device) -> None:
    sms = multiprocessors(device)
    wanted = {}
    for p in SETS:
        for f, parts in ((tiled.NONE, 1), (tiled.SWIGLU, 2)):
            if tiled.fits(p, f):
                plan = tiled.plan(8192, 4096, **p, sms=sms, f=f, parts=parts)
                wanted[plan._replace(tiles=0, grid=0)] = None

    def one(plan: Any) -> None:
        torch.cuda.set_device(device)
        tiled._kernel(device, plan, True)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, wanted))


def check(device: torch.device) -> int:
    """Compare all sets with float64 at odd sizes and at a model's; return how many are wrong."""
    wrong = 0
    for m, n, k in ((1, 96, 72), (129, 160, 136), (1000, 4160, 1000), (2049, 4096, 4096), (8192, 6144, 4096)):
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        weights = [torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5 for _ in range(2)]
        bias = torch.randn(n, device=device, dtype=torch.bfloat16)
        rows = torch.randperm(m, device=device)[:64]
        gate, up = (x[rows].double() @ w.double().t() for w in weights)
        for p in SETS:
            got = tiled.linear_tiled(x, weights[0], bias, **p)[rows]
            found = {"plain": (got, gate + bias.double())}
            if tiled.fits(p, tiled.SWIGLU) and n % 64 == 0:
                got = tiled.linears_tiled(x, weights, (None, None), tiled.SWIGLU, **p)[rows]
                found["gated"] = got, F.silu(gate) * up
            for kind, (got, want) in found.items():
                error = float((got.double() - want).abs().max() / want.abs().max())
                if not error < 1e-2:
                    print(f"WRONG {kind} {(m, n, k)} {name_of(p)}: {error}", flush=True)
                    wrong += 1
    return wrong


def subjects(kind: str, m: int, n: int, k: int, device: torch.device) -> dict[str, Calls]:
    """{name: calls on two weights}; n of gated products: columns of the result."""
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    rows = 2 * n if kind == "gate_up" else n
    weights = [torch.randn(rows, k, device=device, dtype=torch.bfloat16) * k**-0.5 for _ in range(2)]

    def calls(one: Callable[[torch.Tensor], Any]) -> Calls:
        return [lambda w=w: one(w) for w in weights]  # type: ignore[misc]

    if kind != "gate_up":
        made = {name_of(p): calls(lambda w, p=p: tiled.linear_tiled(x, w, **p)) for p in SETS}  # type: ignore[misc]
        return {"cublas": calls(lambda w: F.linear(x, w)), **made}
    f = tiled.SWIGLU
    return {
        "cublas": calls(lambda w: silu_and_mul(F.linear(x, w))),
        **{
            name_of(p): calls(lambda w, p=p: tiled.linears_tiled(x, w.chunk(2), (None, None), f, **p))  # type: ignore[misc]
            for p in SETS if tiled.fits(p, f)
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--tokens", default="8192,2048,512")
    parser.add_argument("--models", default=",".join(MODELS))
    given = parser.parse_args()
    device, began = torch.device("cuda", torch.cuda.current_device()), time.monotonic()
    torch.manual_seed(0)
    results, meter = Results("prompts", given.out, "cublas"), Meter()
    compile_all(device)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    wrong = check(device)
    print(f"{wrong} results are wrong; {time.monotonic() - began:.0f} s", flush=True)
    for m in map(int, given.tokens.split(",")):
        seen = set()
        for model in given.models.split(","):
            h, i, qkv, o = MODELS[model]
            for kind, n, k in (("gate_up", i, h), ("qkv", qkv, h), ("o", h, o), ("down", h, i)):
                if time.monotonic() - began > given.seconds or (kind, n, k) in seen:
                    continue
                seen.add((kind, n, k))
                graphs = {name: graph_of(calls) for name, calls in subjects(kind, m, n, k, device).items()}
                us = in_turn(graphs)
                near = sorted((u, name) for name, u in us.items() if name != "cublas")[:4]
                best = ["cublas", *(name for _, name in near)] if m >= 2048 else []
                for name, u in us.items():
                    found = {"us": u / 2, "speedup": us["cublas"] / u}
                    if name in best:
                        long = alone(graphs[name], meter)
                        found |= {**long, "alone_us": long["alone_us"] / 2, "joules": long["joules"] / 2}
                    case = {"kind": kind, "model": model, "tokens": m, "n": n, "k": k}
                    results.add(OPS.get(kind, "linear"), name, case, **found)
                    if name in best or u == min(us.values()):
                        text = " ".join(f"{what} {value:.4g}" for what, value in found.items())
                        print(f"{m} {model} {kind} {n}x{k} {name}: {text}", flush=True)
                del graphs
    print(f"{time.monotonic() - began:.0f} s; {wrong} results were wrong", flush=True)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    with torch.no_grad():
        main()
