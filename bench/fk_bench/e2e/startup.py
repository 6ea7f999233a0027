"""`fk-bench e2e --startup`: the time from the command to the first token in each host, by phase."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastkernels.core.env import Environment
from fk_bench.core import machine, rows
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.core.terminal.output import last_line, table
from fk_bench.offline.host import COMMAND, HostProcess, make_row, prompts_of, vocab_size

FIRST, READY = "first_token_s", "ready_s"
# {part of vLLM's start: the line of its log with the seconds}. The engine's contains those of the profile and graphs.
LOGGED = {
    "weights": r"Model loading took .* and ([\d.]+) seconds",
    "processor": r"Multi-modal warmup completed in ([\d.]+)s",
    "compile": r"torch\.compile took ([\d.]+) s in total",
    "profile run": r"Initial profiling/warmup run took ([\d.]+) s",
    "kernels": r"JIT kernel warmup finished in ([\d.]+)s",
    "graphs": r"Graph capturing finished in ([\d.]+) secs",
    "profile, cache and graphs": r"init engine .*? took ([\d.]+) s",
}


def measure_starts(
    model: str, hosts: Sequence[str], pythons: Mapping[str, str], extra: Mapping[str, dict[str, Any]],
    settings: dict[str, Any], rounds: int, input_len: int, folder: Path, timeout: float, seed: int,
) -> list[Row]:  # fmt: skip
    """Start each host `rounds` times, interleaved, one at a time, until it has generated one token of one request.

    Sizes are the hosts' defaults: graphs and caches as a user gets them. The first round may find cold caches (disk,
    kernels); rows carry their round. Raises HostFailed.
    """
    own = dict.fromkeys(("max_model_len", "max_num_seqs", "kv_tokens"))
    options = {**own, **settings, "model": model, "gpu": machine.machine().gpus > 0}
    vocab, made = vocab_size(model), []
    for r in range(rounds):
        (prompt,) = prompts_of(f"{seed} {r}", 1, input_len, vocab)
        for name in hosts:
            python = pythons.get(name, sys.executable)
            host = HostProcess(name, python, {**options, "engine_args": extra.get(name, {})}, folder)
            try:
                first = host.answer(timeout)
                ready = time.monotonic()
                answer = host.generate([prompt], 1, timeout)
                token = time.monotonic()
            finally:
                host.stop()
            made.append(_row(host, options, input_len, r, first, (ready, token), answer))
            rows.append(folder / "rows.jsonl", made[-1:])
    return made


def phases(began: float, first: Mapping[str, Any], ready: float, token: float) -> dict[str, float]:
    """Seconds of each phase, by name with unit; they add up to the time from `began` to the first token.

    first  the first line of offline.py, sent when its engine is ready
    """
    found, last = {}, began
    for name, end in first["ends"]:
        found[f"{name}_s"], last = end - last, end
    parts = (first.get("engine") or {}).get("phases")
    if parts:
        rest = found.pop("engine_s") - sum(parts.values())
        found |= {f"{name.replace(' ', '_').replace('-', '_').lower()}_s": s for name, s in parts.items()}
        found["rest_s"] = found.get("rest_s", 0.0) + rest
    found["answer_s"] = ready - last  # until the first line has arrived
    found["request_s"] = token - ready
    return found


def logged_parts(log: str) -> dict[str, float]:
    """The seconds of the parts of a host's start that its log tells, by name; of several workers the longest."""
    found = {part: re.findall(pattern, log) for part, pattern in LOGGED.items()}
    return {part: max(map(float, times)) for part, times in found.items() if times}


def _row(
    host: HostProcess, options: Mapping[str, Any], input_len: int, r: int, first: Mapping[str, Any],
    times: tuple[float, float], answer: Mapping[str, Any],
) -> Row:  # fmt: skip
    wrong = answer["output_tokens"] != 1
    case = {"kind": "startup", "input_len": input_len, "kv_tokens": first["kv_tokens"]}
    case |= {
        k: options[k] for k in ("dtype", "load_format", "tensor_parallel", "engine_args") if k in options
    }
    metrics = {FIRST: times[1] - host.started, READY: times[0] - host.started}
    metrics |= phases(host.started, first, *times)
    metrics |= {f"kernels_{k}": float(v) for k, v in (first.get("engine") or {}).get("kernels", {}).items()}
    patched = host.name != "fastkernels" and Environment.read().enabled  # the host inherits FASTKERNELS=1
    subject = Subject(
        model=Path(options["model"]).name, host=host.name, provider="fastkernels" if patched else None
    )
    return make_row(
        host.name, case, metrics, round=r, subject=subject,
        versions=machine.interpreter(host.python).versions, status=Status.WRONG if wrong else Status.OK,
        reason=f"{answer['output_tokens']} tokens generated instead of 1" if wrong else "",
    )  # fmt: skip


def show_starts(made: Sequence[Row], folder: Path, json_only: bool) -> None:
    """Print a table of all starts, and the JSON line with each host's medians, without its first start if possible."""
    ok = all(r.status is Status.OK for r in made)
    results = []
    for host in dict.fromkeys(r.subject.host for r in made):
        mine = [r for r in made if r.subject.host == host]
        warm = mine[1:] or mine
        medians = {m: statistics.median(r.metrics[m] for r in warm) for m in mine[0].metrics}
        results.append(
            {"host": host, "starts": len(warm), **medians, "cold_first_token_s": mine[0].metrics[FIRST]}
        )
        if not json_only:
            columns = ["", *(f"start {r.round}" for r in mine)]
            cells = [[m, *(f"{r.metrics[m]:.2f}" for r in mine)] for m in mine[0].metrics]
            print(
                f"{host}, {mine[0].subject.model}, load format {mine[0].case['load_format']}: seconds of each start"
            )
            table("", columns, cells)
    if not json_only:
        print(f"rows: {folder / 'rows.jsonl'}\n")
    last_line({"command": COMMAND, "ok": ok, "rows": str(folder / "rows.jsonl"), "results": results})
    if not ok:
        raise SystemExit(1)
