"""Nsight Compute: hardware counters of each kernel, from the CSV of `ncu --csv --page raw`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from fk_bench.profile.data import Kernel, Profile

SETS = ("basic", "detailed", "full", "roofline")
NO_PERMISSION = "ERR_NVGPUCTRPERM"
MICROSECONDS = {
    "ns": 1e-3,
    "nsecond": 1e-3,
    "us": 1.0,
    "usecond": 1.0,
    "ms": 1e3,
    "msecond": 1e3,
    "s": 1e6,
    "second": 1e6,
}
KIB = {"byte": 1 / 1024, "byte/block": 1 / 1024, "Kbyte": 1000 / 1024, "Kbyte/block": 1000 / 1024}
TIME = "gpu__time_duration.sum"
MEMORY = (
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
)
TENSOR = re.compile(r"sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_(active|elapsed)")
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
REGISTERS = "launch__registers_per_thread"
SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
LIMITS = "launch__occupancy_limit_"
SPILLS = re.compile(
    r"sass__inst_executed_register_spilling(_mem_local)?|smsp__inst_executed_op_local_(ld|st)\.sum"
)
STALL = re.compile(r"smsp__average_warps?_issue_stalled_(\w+?)_per_issue_active\.ratio")
REASONS = 2  # of stalls


def command(ncu: str, collected: str, program: Sequence[str]) -> list[str]:
    """The command line that profiles a program between start and stop of CUDA's profiler."""
    return [ncu, "--csv", "--page", "raw", "--set", collected, "--profile-from-start", "off",
            "--target-processes", "all", *program]  # fmt: skip


def parse(text: str, repeats: int, device: str = "cuda") -> Profile:
    """The kernels of ncu's output, by time. Raises ValueError for output without kernels.

    Counters serialize the kernels, so there are no gaps and no timeline.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:])))) if start is not None else []
    if len(rows) < 2:
        raise ValueError("ncu measured no kernel")
    units, launches = rows[0], rows[1:]
    by_name: dict[str, list[Mapping[str, str]]] = {}
    for row in launches:
        by_name.setdefault(row["Kernel Name"], []).append(row)
    kernels = sorted((_kernel(n, of, units, repeats) for n, of in by_name.items()), key=lambda k: -k.time_us)
    total = sum(k.time_us for k in kernels)
    return Profile("ncu", device, kernels, wall_us=total, busy_us=total, launches=len(launches) / repeats)


def _kernel(name: str, of: Sequence[Mapping[str, str]], units: Mapping[str, str], repeats: int) -> Kernel:
    first = of[0]
    limits = {
        k.removeprefix(LIMITS): n
        for k in first
        if k.startswith(LIMITS) and (n := _number(first[k])) is not None
    }
    least = min(limits.values(), default=0.0)
    stalls = {m[1]: _mean(of, k) or 0.0 for k in first if k is not None and (m := STALL.fullmatch(k))}
    waits = sorted(stalls.items(), key=lambda item: -item[1])[:REASONS]
    spills = [_number(first[k]) for k in first if SPILLS.fullmatch(k)]
    shared = [KIB.get(units.get(k, ""), 1.0) * (_number(first[k]) or 0.0) for k in SHARED if k in first]
    registers = _number(first.get(REGISTERS))
    known = [s for s in spills if s is not None]
    unit = MICROSECONDS.get(units.get(TIME, ""), 1.0)
    return Kernel(
        name, len(of) / repeats, unit * (_mean(of, TIME) or 0.0) * len(of) / repeats,
        memory_pct=next((v for k in MEMORY if (v := _mean(of, k)) is not None), None),
        tensor_pct=max((v for k in first if TENSOR.fullmatch(k) and (v := _mean(of, k)) is not None), default=None),
        occupancy_pct=_mean(of, OCCUPANCY),
        limit=", ".join(sorted(k for k, n in limits.items() if n == least)),
        registers=None if registers is None else int(registers),
        spills=int(sum(known)) if known else None,
        shared_kib=sum(shared) if shared else None,
        stalls=", ".join(f"{reason} {value:.1f}" for reason, value in waits if value > 0),
    )  # fmt: skip


def _mean(of: Sequence[Mapping[str, str]], key: str) -> float | None:
    values = [n for row in of if (n := _number(row.get(key))) is not None]
    return fmean(values) if values else None


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None
