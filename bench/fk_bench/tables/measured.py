"""Which hosts, chips, number formats and loads have rows: how many models, and the day of the newest row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fk_bench.core.rows import Row, Status
from fk_bench.e2e import ratios
from fk_bench.e2e.gains import chip_of
from fk_bench.e2e.loads import Kind, Load
from fk_bench.explain.tables import Table
from fk_bench.tables.origin import Files, flat

SERVED = ("vLLM", "SGLang")
IN_PROCESS = ("timm", "diffusers", "transformers")
KINDS = (Kind.DECODE, Kind.PROMPTS, Kind.HITS, Kind.CONTEXT, Kind.MIXED)
SERVERS, PIPELINES = "servers over HTTP", "images"
BF16, FP8 = "bfloat16", "FP8 weights"
# Lines of the matrix, with rows or without.
ASKED = [
    *((host, BF16, kind.value) for host in SERVED for kind in KINDS),
    *((host, form, SERVERS) for host in SERVED for form in (BF16, FP8)),
    *((host, BF16, PIPELINES) for host in IN_PROCESS),
]
EMPTY = "not measured"
HOSTS = {"vllm": "vLLM", "sglang": "SGLang"}
Key = tuple[str, str, str]


def table(files: Files) -> Iterator[Table]:
    """A line for each host, format and load, a column for each chip."""
    found: dict[Key, dict[str, list[Row]]] = {}
    for row in flat(files):
        for key in _keys(row):
            found.setdefault(key, {}).setdefault(chip_of(row), []).append(row)
    chips = sorted({c for of_chips in found.values() for c in of_chips}, key=lambda c: (c[0].isdigit(), c))
    cells = [
        [*key, *(_cell(found.get(key, {}).get(name, ())) for name in chips)]
        for key in [*ASKED, *(key for key in sorted(found) if key not in ASKED)]
    ]
    if found:
        yield (
            "Patched hosts: number of models measured, and the newest day.",
            ["host", "format", "load", *chips],
            cells,
        )


def _keys(row: Row) -> Iterator[Key]:
    """The lines that a row counts for: those of patched hosts."""
    host, case = HOSTS.get(str(row.subject.host), str(row.subject.host)), row.case
    if row.status is not Status.OK:
        return
    if row.command == ratios.COMMAND and case.get("state") == "patched" and case.get("load"):
        cache = case.get("kv_cache_dtype", "auto")
        form = str(case.get("dtype", BF16)) + ("" if cache == "auto" else f", {cache} KV cache")
        kind = Load.parse(case["load"]).kind
        if kind not in (Kind.PROMPTS, Kind.HITS) or ratios.INPUT in row.metrics:
            yield host, form, kind.value
    elif row.command == "serve-compare" and row.kind == "summary" and "+fk" in (row.subject.lane or ""):
        yield host, FP8 if "FP8" in (row.subject.model or "") else BF16, SERVERS
    elif row.kind == "pictures" and (row.subject.lane or "").startswith("patched"):
        yield host, str(case.get("dtype", BF16)), PIPELINES


def _cell(rows: Iterable[Row]) -> str:
    found = list(rows)
    if not found:
        return EMPTY
    return f"{len({row.subject.model for row in found})}, {max(row.time for row in found)[:10]}"
