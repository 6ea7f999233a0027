"""Tables of linear layers and decode attention, from the rows of bench/experiments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fk_bench.core.rows import Row, Status
from fk_bench.explain.tables import Table
from fk_bench.tables.origin import Files, flat, origin

LLAMA = {"qkv": 32, "o": 32, "gate_up": 32, "down": 32, "lm_head": 1}  # calls in a step of Llama-3.1-8B
MODEL = "llama-8b"  # its name in rows of experiments
SIZES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
# model in rows: (name in a table, {layer: (out, in)})
LINEARS = {
    MODEL: ("Llama-3.1-8B", SIZES),
    "llama-8b-tp2": (
        "Llama-3.1-8B, half of each layer",
        {n: (out, k // 2) if n in ("o", "down") else (out // 2, k) for n, (out, k) in SIZES.items()},
    ),
}


def timed(files: Files, command: str, kind: str = "time") -> list[Row]:
    """Return the successful rows of an experiment of this kind."""
    return [r for r in flat(files) if (r.command, r.kind, r.status) == (command, kind, Status.OK)]


def groups(found: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Group rows by (run_id, these fields of the case as text), in the order of their first row."""
    by: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        by.setdefault((row.run_id, *(str(row.case.get(k)) for k in keys)), []).append(row)
    return by


def fastest(found: Iterable[Row]) -> dict[str, float]:
    """Return {provider: microseconds with its fastest parameters}."""
    best: dict[str, float] = {}
    for row in found:
        name, us = str(row.subject.provider), row.metrics["us"]
        best[name] = min(us, best.get(name, us))
    return best


def _layers(found: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return {layer: fastest times} of the layers of Llama-3.1-8B."""
    by = {name: mine for (_, name), mine in groups(found, "layer").items()}
    return {name: fastest(by[name]) for name in LLAMA if name in by}


def _of(sizes: Mapping[str, tuple[int, int]], found: Iterable[Row]) -> list[Row]:
    """Return the rows of layers of these sizes; a run may time those of several models."""
    return [r for r in found if sizes.get(str(r.case["layer"])) == (r.case["out"], r.case["in"])]


def linear(files: Files) -> Iterator[Table]:
    """All linear layers of a decode step, of the last run of each number of tokens."""
    lines: list[list[str]] = []
    used: list[Row] = []
    for model, (name, sizes) in LINEARS.items():
        graphs = [r for r in timed(files, "skinny_linear", "step") if r.case["model"] == model]
        layers = _of(
            sizes, [r for r in timed(files, "skinny_linear") if r.run_id in {g.run_id for g in graphs}]
        )
        each = groups(layers, "tokens")
        last = {int(at[1]): (at, mine) for at, mine in groups(graphs, "tokens").items()}
        for tokens, (at, mine) in sorted(last.items()):
            us = _layers(each.get(at, []))
            if us.keys() != LLAMA.keys() or not all("cublas" in of and len(of) > 1 for of in us.values()):
                continue
            ours = {layer: min(v for k, v in of.items() if k != "cublas") for layer, of in us.items()}
            sums = [
                sum(n * us[x]["cublas"] for x, n in LLAMA.items()),
                sum(n * ours[x] for x, n in LLAMA.items()),
            ]
            whole = [
                min(
                    (r.metrics["ms"] for r in mine if (r.subject.provider == "cublas") == theirs),
                    default=None,
                )
                for theirs in (True, False)
            ]
            lines.append([name, str(tokens), *_pair([x / 1e3 for x in sums]), *_pair(whole)])
            used += [r for r in layers if (r.run_id, str(r.case["tokens"])) == at] + mine
    if lines:
        title = (
            "All linear layers of a decode step, bf16, random weights, ms: the sum over layers timed alone, each with "
            f"its fastest parameters (chosen afterwards), and all layers in one graph ({origin(used, files)}):"
        )
        columns = ["shapes", "tokens", "cuBLAS, sum", "ours, sum", "cuBLAS, one graph", "ours, one graph"]
        yield title, columns, lines


def _pair(values: Iterable[float | None]) -> list[str]:
    return _best({str(i): v for i, v in enumerate(values)}, ["0", "1"])


def attention(files: Files) -> Iterator[Table]:
    """Decode attention with Llama-3.1-8B's heads: us a layer by batch, context and provider. Of several runs of a case,
    the last with the most providers counts, with its last capacity."""
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
            "Decode attention, Llama-3.1-8B's heads, bf16, random values, us a layer; our kernels with their fastest "
            f"parameters (chosen afterwards) ({origin(used, files)}):"
        )
        yield title, ["batch x context", *names, "TB/s of the fastest"], lines


def _best(values: Mapping[str, float | None], names: list[str], digits: int = 2) -> list[str]:
    """Return cells in the order of `names`, the smallest in bold."""
    least = min((v for v in values.values() if v is not None), default=None)
    shown = {n: f"{v:.{digits}f}" for n, v in values.items() if v is not None}
    return ["" if n not in shown else f"**{shown[n]}**" if values[n] == least else shown[n] for n in names]
