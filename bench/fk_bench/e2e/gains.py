"""How much faster a patch makes hosts, model by model: from rows of `patch-compare`, the newest run of each load."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fk_bench.core import rows
from fk_bench.core.checkout import checkout_path
from fk_bench.core.model_names import PUBLIC, public_name
from fk_bench.core.rows import Row
from fk_bench.e2e import ratios
from fk_bench.e2e.loads import DECODES, Kind, Load

GROUP = "models-patched"  # of bench/results/tables.json


@dataclass(frozen=True)
class Gain:
    """The ratio of one load: of the time per token when decoding, of input tokens/s of prompts. Above 1 is faster."""

    model: str
    chip: str
    host: str
    load: str
    ratio: float
    date: str

    @property
    def decoding(self) -> bool:
        return Load.parse(self.load).output_len >= DECODES

    @property
    def kind(self) -> Kind:
        return Load.parse(self.load).kind


def gains(found: Iterable[Row]) -> list[Gain]:
    """The gains in rows of patch-compare, sorted; of each model, chip, host and load those of the newest run."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in found:
        if row.command == ratios.COMMAND and row.case.get("load") and _fair(row) and _usual(row):
            key = (row.subject.model or "", chip_of(row), str(row.subject.host), row.case["load"])
            groups.setdefault(key, []).append(row)
    made = []
    for (model, chip, host, load), of_load in sorted(groups.items()):
        newest = [row for row in ratios.newest_run(of_load) if not row.case.get("traced")]
        for line in ratios.summary(newest):
            ratio = _ratio(line, Load.parse(load))
            if ratio:
                made.append(Gain(model, chip, host, load, ratio, max(row.time for row in newest)[:10]))
    return made


def shipped() -> list[Gain]:
    """The gains in the rows of bench/results. Raises FileNotFoundError outside a checkout."""
    folder = checkout_path("bench/results")
    files = json.loads((folder / "tables.json").read_text())[GROUP]
    return gains(row for name in files for row in rows.read(folder / f"{name}.jsonl.xz")[0])


def nearest(known: Sequence[Gain], model: str, kind: str, weights: float, host: str) -> list[list[Gain]]:
    """The gains of the three nearest models: of this host, architecture and size, in this order of importance.

    kind: the config's model_type. weights: its parameters outside embeddings, about; see `size`.
    """
    groups: dict[tuple[str, str, str], list[Gain]] = {}
    for gain in known:
        groups.setdefault((gain.model, gain.chip, gain.host), []).append(gain)

    def distance(group: tuple[str, str, str]) -> tuple[bool, bool, bool, float]:
        name, _, of_host = group
        other, fields = PUBLIC.get(public_name(name) or name, ("", {}))
        apart = abs(math.log(size(fields) / weights)) if fields and weights else math.inf
        return of_host != host, name != model, other != kind, apart

    return [groups[group] for group in sorted(groups, key=distance)[:3]]


def size(fields: Mapping[str, Any]) -> float:
    """A measure of a decoder's size: hidden_size squared times its layers."""
    return float(fields.get("hidden_size", 0)) ** 2 * float(fields.get("num_hidden_layers", 0)) or 1.0


def _ratio(line: Mapping[str, Any], load: Load) -> float | None:
    """None for prompts without input tokens/s: output tokens/s count steps of decoding, and TTFT alone is too noisy."""
    return line.get(f"{ratios.TPOT if load.output_len >= DECODES else ratios.INPUT}_ratio")


def _fair(row: Row) -> bool:
    """Whether both states had routing of one kind, if the model has experts."""
    fields = PUBLIC.get(row.subject.model or "", ("", {}))[1]
    return "routing" in row.case or not any("experts" in name for name in fields)


def _usual(row: Row) -> bool:
    """Whether the KV cache has the host's default type, and requests are text alone."""
    media = row.case.get("images") or row.case.get("audio")
    return row.case.get("kv_cache_dtype", "auto") == "auto" and not media


def chip_of(row: Row) -> str:
    """The name of its chip, with their number if it used several."""
    name = (row.machine.gpu or "CPU").removeprefix("NVIDIA ").split()[0]
    return name if row.machine.gpus < 2 else f"{row.machine.gpus} x {name}"
