"""The speed of each model next to its reference: of text models in vLLM and our engine, of image models in their hosts.

Of each model and chip the newest run counts: of an encoder for each size of images, of a pipeline for each batch and
number of steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fk_bench.core.model_names import PUBLIC, hub_name
from fk_bench.core.rows import Row, Status
from fk_bench.e2e import ratios
from fk_bench.e2e.gains import chip_of, gains
from fk_bench.e2e.loads import PRESETS, Kind, Load
from fk_bench.e2e.ratios import COMMAND, ENGINE, INPUT, OUTPUT
from fk_bench.explain.tables import Table
from fk_bench.tables.origin import Files, flat, machine, origin

REQUESTS = 1, 32, 64  # of the decodes of text models
PATCHED = 1, 8, 32, 64  # of the decodes of patched hosts
HOSTS = {"vllm": "vLLM", "sglang": "SGLang"}
PROMPTS = tuple(PRESETS["prompts"].split(","))
FORMATS = "formats"  # the command of bench/experiments/checkpoints/formats.py
FORMAT_LOADS = "1x512+128", "8x512+128", "32x512+128", "64x1024+128"
PUBLISHED = (
    "bitnet",
    "gemma-4-e4b",
    "gemma-4-26b-a4b",
    "mxfp4",
    "mxfp4-120b",
    "latent-sparse",
)  # a model's own format
BATCHES = 1, 8, 32
SOURCE = "paper", "measured", "rows"
# arXiv 2605.23215: speedup over the reference on an H200 (vLLM 0.18), mean of its scenarios. By model type or name.
PAPER = {
    "llama": 1.04, "deepseek_v32": 0.84, "mixtral": 0.97, "bitnet": 1.12, "gpt_oss": 1.02, "gemma4_text": 1.00,
    "mamba": 1.05, "mamba2": 0.97, "jamba": 1.02, "qwen3_next": 1.24, "kimi_linear": 1.20,
    "flux.1": 1.01, "sdxl": 1.17, "siglip2": 0.93, "dinov3": 0.99, "swinv2": 1.17, "vjepa2": 1.01,
}  # fmt: skip


def text(files: Files) -> Iterator[Table]:
    """Text models: output tokens/s of patched vLLM and of our engine over stock vLLM's, and input tokens/s of prompts.

    Of each model, chip and load the newest run counts, and of decodes with one number of requests the newest load.
    """
    models: dict[tuple[str, str], dict[str, tuple[str, list[Row]]]] = {}
    for (model, chip, load), newest in _newest(files, _is_text, ("load",)).items():
        models.setdefault((model, chip), {})[load] = newest
    lines = {
        of: {load: ratios.summary(found)[0] for load, (_, found) in loads.items() if ratios.summary(found)}
        for of, loads in models.items()
    }
    lines = {
        of: found
        for of, found in lines.items()
        if any(f"{OUTPUT}_{ENGINE}_ratio" in n for n in found.values())
    }
    prompts = [load for load in PROMPTS if any(load in found for found in lines.values())]
    cells, used = [], []
    for (model, chip), found in lines.items():
        mine = models[model, chip]
        file, newest_rows = max(mine.values(), key=lambda newest: _last(newest[1]))
        decodes = [_decode([load for load in found if _requests(load) == n], mine) for n in REQUESTS]
        columns = [
            _each([found[load].get(f"{OUTPUT}_{who}") if load else None for load in decodes])
            + _mean(found, prompts, f"{INPUT}_{who}")
            for who in ("ratio", f"{ENGINE}_ratio")
        ]
        lengths = ", ".join(dict.fromkeys(load.partition("x")[2] for load in decodes if load))
        kind = PUBLIC[model][0] if model in PUBLIC else ""
        source = _source(kind, file, newest_rows)[:2]
        cells.append([hub_name(model), chip, lengths, *columns[0], *columns[1], *source])
        used += [row for _, rows in mine.values() for row in rows]
    if cells:
        names = [*map(str, REQUESTS), *(["prompts"] if prompts else [])]
        head = [
            "model",
            "chip",
            "lengths",
            *(f"{who}, {name}" for who in ("patched", "our engine") for name in names),
        ]
        more = f"; prompts: geometric mean of input tokens/s at {_at(prompts)}" if prompts else ""
        title = (
            "Output tokens/s over stock vLLM's, by number of requests; lengths: tokens of a prompt + of its output"
            f"{more} ({origin(used, files)}):"
        )
        yield title, [*head, *SOURCE[:2]], cells


def patched(files: Files) -> Iterator[Table]:
    """Patched hosts: the stock host's time per token over the patched one's, and input tokens/s of prompts."""
    groups: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    loads: dict[tuple[str, str, str], dict[str, str]] = {}
    for gain in gains(flat(files)):
        decode = gain.kind is Kind.DECODE and _requests(gain.load) in PATCHED
        if decode or gain.kind is Kind.PROMPTS:
            of = hub_name(gain.model), HOSTS.get(gain.host, gain.host), gain.chip
            column = str(_requests(gain.load)) if decode else "prompts"
            groups.setdefault(of, {}).setdefault(column, []).append(gain.ratio)
            loads.setdefault(of, {})[gain.load] = gain.date
    columns = [*map(str, PATCHED), "prompts"]
    cells = [
        [*of, ", ".join(_lengths(loads[of])), *(_ratios(found.get(column, []))[-1] for column in columns),
         max(loads[of].values())]
        for of, found in sorted(groups.items(), key=lambda group: _order(*group[0]))
    ]  # fmt: skip
    if cells:
        used = [row for row in flat(files) if row.command == COMMAND]
        title = (
            "Stock host's time per token over the patched host's, by number of requests; lengths: tokens of a prompt +"
            " of its output; prompts: patched input tokens/s over the stock host's; geometric means over several loads"
            f" ({origin(used, files)}):"
        )
        yield title, ["model", "host", "chip", "lengths", *columns, "measured"], cells


def _order(model: str, host: str, chip: str) -> tuple[bool, str, str, str]:
    """vLLM before the other hosts, then by model."""
    return host != HOSTS["vllm"], host, model.lower(), chip


def _lengths(loads: Iterable[str]) -> list[str]:
    """The lengths of decodes, in the order of their requests."""
    decodes = sorted((load for load in loads if Load.parse(load).kind is Kind.DECODE), key=_requests)
    return list(dict.fromkeys(load.partition("x")[2] for load in decodes))


def _decode(loads: Sequence[str], newest: Mapping[str, tuple[str, list[Row]]]) -> str:
    """The load of the newest rows that is no prompt; empty without one."""
    decodes = [load for load in loads if Load.parse(load).kind is Kind.DECODE]
    return max(decodes, key=lambda load: (_last(newest[load][1])[:10], load), default="")


def _mean(lines: Mapping[str, Mapping[str, Any]], loads: Sequence[str], name: str) -> list[str]:
    """Return the cell with the geometric mean of these loads; none without a load."""
    return _ratios([lines.get(load, {}).get(name) for load in loads])[-1:] if loads else []


def formats(files: Files) -> Iterator[Table]:
    """Number formats and cut models: our engine next to vLLM, medians of runs at four loads."""
    times, rates, own, used = [], [], [], []
    for (name, chip, layers), (file, found) in _newest(files, _is_format, ("layers",)).items():
        ours, host = (_medians(found, engine) for engine in ("fastkernels", "vllm"))
        both = [load if load in ours and load in host else None for load in FORMAT_LOADS]
        if not any(both):
            continue
        each = f"{chip.split()[-1]} each" if "own_gpu" in found[0].case else chip
        shapes = str(found[0].case.get("shapes", ""))
        kind, fields = PUBLIC[shapes] if name in PUBLISHED and shapes in PUBLIC else ("", {})
        paper, measured, _ = _source(kind if layers == fields.get("num_hidden_layers") else "", file, found)
        head = [name, shapes, str(layers), each]
        times.append(
            [*head, *_ratios([None if x is None else host[x][0] / ours[x][0] for x in both]), measured]
        )
        rates.append([*head, *_ratios([None if x is None else ours[x][1] / host[x][1] for x in both]), paper])
        own.append([*head, *("" if load is None else f"{ours[load][0]:.2f}" for load in both)])
        used += found
    if used:
        head = ["format", "shapes of", "layers", "chip", *map(_at_one, FORMAT_LOADS)]
        yield (
            f"vLLM's time per output token over ours ({origin(used, files)}):",
            [*head, "mean", "measured"],
            times,
        )
        yield "Output tokens/s of our engine over vLLM's:", [*head, "mean", "paper"], rates
        yield "Milliseconds per output token of our engine:", head, own


def images(files: Files) -> Iterator[Table]:
    """Image models: images per second of the faster of the host's lanes, and the ratio of the fastest patched lane."""
    cells, used = [], []
    for (model, chip, size), (file, found) in _newest(files, _is_encoder, ("image_size",)).items():
        host = [_fastest(found, batch, False) for batch in BATCHES]
        ours = [_fastest(found, batch, True) for batch in BATCHES]
        pairs = [p / h if p and h else None for p, h in zip(ours, host, strict=True)]
        if any(pairs):
            name = str(found[0].subject.host)
            cells.append(
                [
                    model,
                    name,
                    str(size),
                    chip,
                    *_each(pairs),
                    *_source(model, file, found)[:2],
                ]
            )
            used += found
    if cells:
        at = ", ".join(map(str, BATCHES))
        columns = ["model", "host", "pixels", "chip", *(f"batch {batch}" for batch in BATCHES), *SOURCE[:2]]
        yield (
            f"Images per second, patched over the host, at batch {at} ({origin(used, files)}):",
            columns,
            cells,
        )
    yield from _pipelines(files)


def _pipelines(files: Files) -> Iterator[Table]:
    cells, used = [], []
    for (model, chip, batch, steps), (file, found) in _newest(
        files, _is_pipeline, ("batch", "steps")
    ).items():
        host, ours = _fastest(found, batch, False), _fastest(found, batch, True)
        if host and ours:
            cells.append([
                model, str(found[0].subject.host), chip, str(batch), str(steps),
                f"{batch / host:.3g}", f"{batch / ours:.3g}", f"{ours / host:.3f}", *_source(model, file, found),
            ])  # fmt: skip
            used += found
    if cells:
        columns = [
            "model", "host", "chip", "batch", "steps", "host, s", "patched, s", "host / patched", *SOURCE,
        ]  # fmt: skip
        yield f"Seconds per batch of images ({machine(used)}):", columns, cells


def _is_text(row: Row) -> bool:
    """Whether the row compares engines, with routing of one kind in both where the model has experts."""
    fields = PUBLIC.get(row.subject.model or "", ("", {}))[1]
    fair = "routing" in row.case or not any("experts" in name for name in fields)
    return (
        row.command == COMMAND
        and _is_shown(row.case.get("load", ""))
        and row.case.get("kv_cache_dtype", "auto") == "auto"
        and row.case.get("with_engine", False)
        and not row.case.get("traced")
        and fair
    )


def _is_shown(load: str) -> bool:
    return load in PROMPTS or (
        bool(load) and _requests(load) in REQUESTS and Load.parse(load).kind is Kind.DECODE
    )


def _is_format(row: Row) -> bool:
    return (
        row.command == FORMATS
        and row.status is Status.OK
        and row.case.get("load") in FORMAT_LOADS
        and row.case.get("run", -1) >= 0
    )


def _is_encoder(row: Row) -> bool:
    return _is_image(row) and row.case["result"] == "features"


def _is_pipeline(row: Row) -> bool:
    return _is_image(row) and row.case["result"] == "images"


def _is_image(row: Row) -> bool:
    return row.kind == "pictures" and row.status is Status.OK and row.subject.lane is not None


def _newest(
    files: Files, wanted: Callable[[Row], bool], fields: Sequence[str] = ()
) -> dict[tuple[Any, ...], tuple[str, list[Row]]]:
    """Return {(model, chip, *these fields of the case): (row file, rows of the newest run)}, sorted."""
    runs: dict[tuple[tuple[Any, ...], str, str], list[Row]] = {}
    for file, rows in files.items():
        for row in filter(wanted, rows):
            key = (row.subject.model or "", chip_of(row), *(row.case[name] for name in fields))
            runs.setdefault((key, row.run_id, file), []).append(row)
    newest = {}
    for (key, _, file), rows in sorted(runs.items(), key=lambda run: _last(run[1])):
        newest[key] = file, rows
    return dict(sorted(newest.items()))


def _last(rows: Iterable[Row]) -> str:
    return max(row.time for row in rows)


def _medians(rows: Sequence[Row], host: str) -> dict[str, tuple[float, float]]:
    """Return {load: (time per output token in ms, output tokens/s)} of an engine, medians of its runs."""
    runs: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.subject.host == host:
            runs.setdefault(row.case["load"], []).append((row.metrics["tpot_ms"], row.metrics[OUTPUT]))
    return {
        load: (statistics.median(t for t, _ in found), statistics.median(o for _, o in found))
        for load, found in runs.items()
    }


def _at(loads: Sequence[str]) -> str:
    return ", ".join(map(_at_one, loads))


def _at_one(load: str) -> str:
    requests, _, tokens = load.partition("x")
    return f"{requests} x ({tokens.replace('+', ', ')})"


def _fastest(rows: Sequence[Row], batch: int, patched: bool) -> float | None:
    """Return the images per second of the fastest lane of the host, or of the patched one: medians of rounds."""
    lanes: dict[str, list[float]] = {}
    for row in rows:
        lane = str(row.subject.lane)
        if row.case["batch"] == batch and lane.startswith("patched") == patched:
            lanes.setdefault(lane, []).append(batch * 1e3 / row.metrics["latency_ms"])
    return max(map(statistics.median, lanes.values()), default=None)


def _ratios(values: Sequence[float | None]) -> list[str]:
    """Return one cell per ratio, and their geometric mean."""
    found = [v for v in values if v is not None]
    return [*_each(values), f"{math.exp(statistics.fmean(map(math.log, found))):.3f}" if found else ""]


def _each(values: Sequence[float | None]) -> list[str]:
    """Return one cell per ratio."""
    return ["" if value is None else f"{value:.3f}" for value in values]


def _requests(load: str) -> int:
    return Load.parse(load).requests


def _source(paper: str, file: str, rows: Sequence[Row]) -> list[str]:
    return [f"{PAPER[paper]:.2f}" if paper in PAPER else "", _last(rows)[:10], f"`{file}`"]
