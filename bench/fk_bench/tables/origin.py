"""Where the numbers of a table come from: machine, versions, dates and row files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fk_bench.core.rows import Row

Files = Mapping[str, list[Row]]  # {name of a row file: its rows}
PACKAGES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "flashinfer": "FlashInfer",
    "torch": "torch",
    "triton": "Triton",
}


def flat(files: Files) -> list[Row]:
    return [row for found in files.values() for row in found]


def machine(used: Sequence[Row]) -> str:
    """Return the GPU (or CPU), package versions and dates of these rows."""
    machines = [(r.machine.gpus, r.machine.gpu or r.machine.cpu) for r in used]
    chips = dict.fromkeys(f"{n} x {name}" if n > 1 else str(name) for n, name in machines)
    versions = {k: v for r in used for k, v in r.versions.items() if k in PACKAGES}
    listed = ", ".join(f"{PACKAGES[name]} {versions[name]}" for name in PACKAGES if name in versions)
    dates = sorted({r.time[:10] for r in used})
    return f"{', '.join(chips)}; {listed}; {dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'}"


def origin(used: Sequence[Row], files: Files) -> str:
    """Return machine, versions, dates and the row files that these rows are in."""
    mine = {id(r) for r in used}
    names = [name for name, found in files.items() if any(id(r) in mine for r in found)]
    return f"{machine(used)}; rows: {_joined(names)}"


def _joined(names: Sequence[str]) -> str:
    """Join file names, with a common date and chip once: `2026-11-21-h200-{kernels,servers}`."""
    dated = re.match(r"\d{4}-\d\d-\d\d-[a-z0-9]+-", names[0])
    if dated is None or len(names) < 2 or not all(n.startswith(dated[0]) for n in names):
        return ", ".join(f"`{n}`" for n in names)
    return f"`{dated[0]}{{{','.join(n[len(dated[0]) :] for n in names)}}}`"
