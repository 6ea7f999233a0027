"""The answer of doctor, eleven lines with the five hosts: what works here, what is missing, and what to do."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WIDTH = 12
_SHOWN = 3  # problems and notes; the others are counted


def lines(
    rows: Mapping[str, Any], problems: Sequence[str], notes: Sequence[str], whole: bool = False
) -> list[str]:
    """The verdict from the rows of doctor's report. whole: the details have been shown."""
    count = len(problems)
    more = "" if whole else " (details: fk-bench doctor --all; for programs: --json)"
    said = [("ok: nothing is broken" if not count else f"{count} problem{'s' if count > 1 else ''}") + more]
    if rows:
        said.append(_line("machine", _machine(rows["machine"])))
        versions = rows["versions"].get("this", {})
        shown = [
            f"{name} {versions[name]}"
            for name in ("fastkernels", "torch", "triton", "python")
            if name in versions
        ]
        said.append(_line("packages", ", ".join(shown)))
        said += [_line(h["host"], _host(h, rows["seams"])) for h in rows["hosts"]]
        if not rows["hosts"]:
            said.append(_line("hosts", "none found; name one with --python vllm=PATH/bin/python"))
        parts = (_providers(rows["providers"]), _libraries(rows["libraries"]))
        said.append(_line("providers", "; ".join(filter(None, parts))))
        said.append(_line("CUDA C++", _cuda(rows["cuda"])))
        said.append(
            _line("variables", ", ".join(f"{k}={v}" for k, v in rows["environment"].items()) or "none set")
        )
    for kind, found in (("problem", problems), ("note", notes)):
        said += [_line(kind, text) for text in found[:_SHOWN]]
        if len(found) > _SHOWN:
            said.append(_line(kind, f"{len(found) - _SHOWN} more: --all"))
    return said


def _line(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}} {text}"


def _machine(row: Mapping[str, Any]) -> str:
    gpus = Counter(row["gpus"])
    what = ", ".join(f"{n} x {name}" for name, n in gpus.items())
    what = (
        f"{what}, driver {row['driver'] or 'unknown'}"
        if gpus
        else "no GPU (everything runs, without speedups)"
    )
    memory = f", {row['memory_gib']} GiB" if row["memory_gib"] else ""
    return f"{what}; {row['cpu']}, {row['cores']} cores{memory}"


def _host(host: Mapping[str, Any], seams: Sequence[Mapping[str, Any]]) -> str:
    """How many ops will be replaced, and why others will not: the most frequent reason."""
    mine = [s for s in seams if s["host"] == host["host"] and s["version"] == host["version"]]
    on, asked = ({s["op"] for s in mine if s["state"] == state} for state in ("on", "asked"))
    off = {s["op"] for s in mine if s["seam"] != "standalone"} - on - asked
    parts = [f"{len(on)} ops on"]
    parts += [f"{len(asked - on)} only with ops="] if asked - on else []
    if off:
        reasons = Counter(s["reason"] for s in mine if s["op"] in off)
        parts.append(f"{len(off)} off (mostly: {reasons.most_common(1)[0][0]})")
    return f"{host['version']}: {', '.join(parts)}; {_short(host['python'])}"


def _short(path: str) -> str:
    """A path below the working directory without it."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path


def _providers(rows: Sequence[Mapping[str, Any]]) -> str:
    """For each device type, the ops that have a provider; on a GPU also those whose first choice is there."""
    said = []
    for device in dict.fromkeys(r["device"] for r in rows):
        mine: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["device"] == device:
                mine.setdefault(row["op"], []).append(row)
        served = sum(any(r["there"] for r in order) for order in mine.values())
        best = (
            f", {sum(order[0]['there'] for order in mine.values())} their first choice"
            if device == "cuda"
            else ""
        )
        said.append(f"{device}: {served} of {len(mine)} ops have one{best}")
    return "; ".join(said)


def _cuda(row: Mapping[str, Any]) -> str:
    built, driver = row["torch_cuda"], row["driver_cuda"]
    parts = [row["reason"] or f"NVRTC {row['nvrtc']}"]
    parts.append(f"PyTorch for CUDA {built}" if built else "PyTorch for CPUs")
    parts.append(f"driver for CUDA {driver}" if driver else "no driver")
    return "; ".join(parts)


def _libraries(rows: Sequence[Mapping[str, Any]]) -> str:
    missing = [r["library"] for r in rows if not r["there"]]
    there = [f"{r['library']} ({r['module']})" for r in rows if r["there"]]
    return "; ".join([*there, *([f"not installed: {', '.join(missing)} (optional)"] if missing else [])])
