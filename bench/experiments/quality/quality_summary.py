"""quality.py: divergences, perplexities and ratios from the runs' files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.quality.quality_plan import OTHERS, Plan
from experiments.quality.quality_record import EXACT, HOST
from fk_bench.core.stats import bootstrap_ratio

RUNS = (HOST, *OTHERS, "patched")
Found = dict[int, dict[str, Any]]  # metrics of each sequence, from its line


def read(path: Path) -> Found:
    """Return the lines of a run's file; an incomplete last line is dropped."""
    found: Found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["sequence"]] = row
    return found


def partial_kl(p: dict[int, float], q: dict[int, float]) -> float:
    """Lower bound of KL(p || q): over the tokens that both have a log-probability for, with all others as one."""
    total, rest_p, rest_q = 0.0, 1.0, 1.0
    for token in p.keys() & q.keys():
        a, b = math.exp(p[token]), math.exp(q[token])
        total += a * (p[token] - q[token])
        rest_p, rest_q = rest_p - a, rest_q - b
    if rest_p > 1e-12 and rest_q > 1e-12:
        total += rest_p * math.log(rest_p / rest_q)
    return total


def prefills(runs: dict[str, Found]) -> dict[str, Found]:
    """Return the lines of prefills, with `kl`, `kl_exact` and `same` from the most probable tokens."""
    tops, exact = (
        {i: [dict(map(tuple, t)) for t in row["top"]] for i, row in runs.get(run, {}).items()}
        for run in (HOST, EXACT)
    )
    made: dict[str, Found] = {}
    for run, found in runs.items():
        if run == EXACT:
            continue
        made[run] = {}
        for i, row in found.items():
            if i not in tops:
                continue
            pairs = [(p, dict(map(tuple, t))) for p, t in zip(tops[i], row["top"], strict=True)]
            made[run][i] = {
                "logprob": row["logprob"],
                "kl": [partial_kl(p, q) for p, q in pairs],
                "same": [float(max(p, key=p.__getitem__) == max(q, key=q.__getitem__)) for p, q in pairs],
            }
            if i in exact:
                base = zip(exact[i], pairs, strict=True)
                made[run][i]["kl_exact"] = [partial_kl(p, q) for p, (_, q) in base]
    return made


def all_of(found: Found, sequences: Iterable[int], name: str) -> list[float]:
    return [value for i in sequences for value in found[i][name]]


def measured(
    runs: dict[str, Found], numbers: list[int]
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return metrics over those of these sequences that the host and every non-empty run completed, and the ratios' 95%
    intervals over sequences.
    """
    there = {run: found for run, found in runs.items() if any(i in found for i in numbers)}
    chosen = [i for i in numbers if all(i in found for found in there.values())]
    if HOST not in there or not chosen:
        return {}, {}
    own = all_of(there[HOST], chosen, "logprob")
    metrics: dict[str, float] = {"tokens": len(own), "perplexity_host": perplexity(own)}
    for run, found in there.items():
        if run == HOST:
            continue
        logprobs = all_of(found, chosen, "logprob")
        gaps = [a - b for a, b in zip(logprobs, own, strict=True)]
        metrics |= {
            f"kl_{run}": mean(all_of(found, chosen, "kl")),
            f"perplexity_{run}": perplexity(logprobs),
            f"perplexity_rel_{run}": math.expm1(-mean(gaps)),
            f"logprob_max_abs_diff_{run}": max(map(abs, gaps)),
            f"same_best_{run}": mean(all_of(found, chosen, "same")),
        }
    for run, found in there.items():
        if all("kl_exact" in found[i] for i in chosen):
            metrics[f"kl_exact_{run}"] = mean(all_of(found, chosen, "kl_exact"))
    intervals = {}
    for name, field, base in (("kl_ratio", "kl", "other"), ("exact_ratio", "kl_exact", HOST)):
        if metrics.get(f"{field}_{base}", 0.0) > 0 and f"{field}_patched" in metrics:
            sums = [[mean(there[run][i][field]) for i in chosen] for run in ("patched", base)]
            metrics[name], interval = bootstrap_ratio(*sums, paired=True)
            if interval is not None:  # a single sequence has no interval
                intervals[name] = interval
    return metrics, intervals


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-mean(logprobs))


def problem(metrics: dict[str, float], ratio: float, perplexity_limit: float) -> str:
    """Return '' if the goals are met, else the missed goal or what is missing."""
    missing = [name for name in ("kl_exact_host", "kl_exact_patched") if name not in metrics]
    if missing:
        return f"not measured: {', '.join(missing)}"
    problems = []
    if metrics["kl_exact_patched"] > ratio * metrics["kl_exact_host"]:
        kl, own = metrics["kl_exact_patched"], metrics["kl_exact_host"]
        problems.append(f"KL from float32 is {kl:.3g}, over {ratio} times the host's {own:.3g}")
    if not abs(metrics["perplexity_rel_patched"]) <= perplexity_limit:
        problems.append(
            f"perplexity differs by {metrics['perplexity_rel_patched']:+.3%}, over {perplexity_limit:.2%}"
        )
    return "; ".join(problems)


def groups(plan: Plan, folder: Path, runs: Iterable[str] = RUNS) -> list[dict[str, Any]]:
    """Return a group for all decoded tokens, one for all prefilled tokens, and one for each decode batch size."""
    decode = {run: read(folder / f"{run}.jsonl") for run in runs}
    prefill = prefills({run: read(folder / f"{run}-prefill.jsonl") for run in (*runs, EXACT)})
    wanted = [("decode", "all", decode, range(len(plan.decode)))]
    if plan.prefill:
        wanted.append(("prefill", "all", prefill, range(len(plan.prefill))))
    for batch in dict.fromkeys(s.batch for s in plan.decode):
        numbers = [i for i, s in enumerate(plan.decode) if s.batch == batch]
        wanted.append(("decode", str(batch), decode, numbers))  # type: ignore[arg-type]
    found = []
    for phase, batch, lines, chosen in wanted:
        metrics, intervals = measured(lines, list(chosen))
        found.append({"phase": phase, "batch": batch, "metrics": metrics, "ci95": intervals})
    return found
