"""Tables of the documents from the rows of bench/scenarios: linear layers, decode attention, a decode step; and of
`fk-bench explain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fk_bench.core.rows import Row, Status
from fk_bench.explain import tables as explain_tables
from fk_bench.explain.tables import Table, number
from fk_bench.tables.measured import Files, flat, origin

LLAMA = {"qkv": 32, "o": 32, "gate_up": 32, "down": 32, "lm_head": 1}  # launches in a step of Llama-3.1-8B
MODEL = "llama-8b"  # what scenarios call it
SIZES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
# model of a scenario: (what a table calls it, {layer: (out, in)})
LINEARS = {
    MODEL: ("Llama-3.1-8B's shapes", SIZES),
    "llama-8b-tp2": (
        "a GPU's half of Llama-3.1-8B's shapes",
        {n: (out, k // 2) if n in ("o", "down") else (out // 2, k) for n, (out, k) in SIZES.items()},
    ),
}


def timed(files: Files, command: str, kind: str = "time") -> list[Row]:
    """The rows of a scenario that have a time."""
    return [r for r in flat(files) if (r.command, r.kind, r.status) == (command, kind, Status.OK)]


def groups(found: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by (run_id, these of the case as text), in the order of their first row."""
    by: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        by.setdefault((row.run_id, *(str(row.case.get(k)) for k in keys)), []).append(row)
    return by


def fastest(found: Iterable[Row]) -> dict[str, float]:
    """{provider: microseconds of its fastest set of parameters}."""
    best: dict[str, float] = {}
    for row in found:
        name, us = str(row.subject.provider), row.metrics["us"]
        best[name] = min(us, best.get(name, us))
    return best


def _layers(found: Iterable[Row]) -> dict[str, dict[str, float]]:
    """{layer: fastest} of those that Llama-3.1-8B has."""
    by = {name: mine for (_, name), mine in groups(found, "layer").items()}
    return {name: fastest(by[name]) for name in LLAMA if name in by}


def _of(sizes: Mapping[str, tuple[int, int]], found: Iterable[Row]) -> list[Row]:
    """The rows of layers of these sizes: a run may have timed those of several models."""
    return [r for r in found if sizes.get(str(r.case["layer"])) == (r.case["out"], r.case["in"])]


def linear(files: Files) -> Iterator[Table]:
    """All linear layers of a step of Llama-3.1-8B, on one GPU and on two: the sum by provider and number of tokens,
    and in one graph."""
    for model, (what, sizes) in LINEARS.items():
        yield from _linear(files, model, what, sizes)


def _linear(files: Files, model: str, what: str, sizes: Mapping[str, tuple[int, int]]) -> Iterator[Table]:
    graphs = [r for r in timed(files, "skinny_linear", "step") if r.case["model"] == model]
    runs = {r.run_id for r in graphs}
    layers = _of(sizes, [r for r in timed(files, "skinny_linear") if r.run_id in runs])
    names = sorted({str(r.subject.provider) for r in layers}, key=lambda n: (n != "cublas", n))
    each = groups(layers, "tokens")
    lines = []
    for at, mine in sorted(groups(graphs, "tokens").items(), key=lambda g: (int(g[0][1]), g[1][0].time)):
        us = _layers(each.get(at, []))
        whole = [n for n in names if all(n in us.get(layer, {}) for layer in LLAMA)]
        sums = {n: sum(LLAMA[layer] * us[layer][n] for layer in LLAMA) / 1e3 for n in whole}
        theirs = [r.metrics["ms"] for r in mine if r.subject.provider == "cublas"]
        ours = [r.metrics["ms"] for r in mine if r.subject.provider != "cublas"]
        step = {"cublas": min(theirs, default=None), "ours": min(ours, default=None)}
        when = f"{mine[0].time[11:16]}, {str(mine[0].commit)[:7]}"
        lines.append([at[1], when, *_best(sums, names), *_best(step, ["cublas", "ours"])])
    if lines:
        title = (
            f"All linear layers of a step of {what}, bf16, random weights, ms: the sum over layers, of each "
            "provider's fastest set of parameters for each (chosen afterwards), and all of them in one graph, of any "
            f"set of ours ({origin(layers, files)}):"
        )
        yield title, ["tokens", "run", *names, "one graph: cublas", "one graph: ours"], lines


def linear_layers(files: Files) -> Iterator[Table]:
    """Layer by layer: the fastest set of ours, cuBLAS in brackets; the last run of each number of tokens."""
    for what, sizes in LINEARS.values():
        yield from _linear_layers(files, what, sizes)


def _linear_layers(files: Files, what: str, sizes: Mapping[str, tuple[int, int]]) -> Iterator[Table]:
    found = _of(sizes, timed(files, "skinny_linear"))
    last = {int(tokens): mine for (_, tokens), mine in groups(found, "tokens").items()}
    lines = []
    for tokens, mine in sorted(last.items()):
        if set(us := _layers(mine)) == set(LLAMA):
            lines.append([str(tokens), *(_beside(times) for times in us.values())])
    if lines:
        title = (
            "us a layer of our fastest set of parameters (chosen afterwards), bf16, random weights, in brackets "
            f"cuBLAS{'' if sizes is SIZES else f', {what}'} ({origin(found, files)}):"
        )
        yield title, ["tokens", *LLAMA], lines


def _beside(us: dict[str, float]) -> str:
    ours = {k: v for k, v in us.items() if k != "cublas"}
    name = min(ours, key=ours.__getitem__, default="")
    return f"{f'{number(ours[name])} {name} ' if name else ''}({number(us.get('cublas'))})"


def attention(files: Files) -> Iterator[Table]:
    """Decode attention of Llama-3.1-8B's heads: us a layer by batch, context and provider; the last run of those that
    timed most providers, and of that the last capacity."""
    found = [r for r in timed(files, "decode_attention") if r.case.get("model") == MODEL]
    chosen: dict[tuple[int, int], list[Row]] = {}
    for (_, batch, context, _), mine in groups(found, "batch", "context", "capacity").items():
        at = int(batch), int(context)
        if len(fastest(mine)) >= len(fastest(chosen.get(at, []))):
            chosen[at] = mine
    used = [r for mine in chosen.values() for r in mine]
    names = sorted({str(r.subject.provider) for r in used}, key=lambda n: (n != "triton-split", n))
    lines = []
    for at, mine in sorted(chosen.items()):
        rate = max(r.metrics.get("tb_per_s", 0.0) for r in mine)
        lines.append(["{} x {}".format(*at), *_best(fastest(mine), names, 1), f"{rate:.2f}"])
    if lines:
        title = (
            "Decode attention, Llama-3.1-8B's heads, bf16, random values, us a layer; ours by its fastest set of "
            f"parameters (chosen afterwards) ({origin(used, files)}):"
        )
        yield title, ["batch x context", *names, "TB/s of the fastest"], lines


def decode_step(files: Files) -> Iterator[Table]:
    """A decode step in one graph by batch and variant; of the last run in the rows."""
    found = timed(files, "decode_step")
    found = [r for r in found if r.run_id == found[-1].run_id]
    names = list(dict.fromkeys(str(r.subject.provider) for r in found))
    lines = []
    for (_, context, batch), mine in sorted(
        groups(found, "context", "batch").items(), key=lambda g: [*map(int, g[0][1:])]
    ):
        ms = {str(r.subject.provider): r.metrics["ms"] for r in mine}
        lines.append([batch, context, *_best(ms, names)])
    if lines:
        title = (
            "A decode step of Llama-3.1-8B's shapes in one graph, bf16, random weights, ms "
            f"({origin(found, files)}):"
        )
        yield title, ["batch", "context", *names], lines


def explain(files: Files) -> Iterator[Table]:
    """What `fk-bench explain` prints, from its rows."""
    found = [r for r in flat(files) if r.command == "explain"]
    for title, columns, cells in explain_tables.tables(found):
        yield f"{title} ({origin(found, files)}):", columns, cells


def _best(values: Mapping[str, float | None], names: list[str], digits: int = 2) -> list[str]:
    """As cells in the order of `names`, the smallest bold."""
    least = min((v for v in values.values() if v is not None), default=None)
    shown = {n: f"{v:.{digits}f}" for n, v in values.items() if v is not None}
    return ["" if n not in shown else f"**{shown[n]}**" if values[n] == least else shown[n] for n in names]
