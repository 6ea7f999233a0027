"""`fk-bench explain MODEL`: where a step's time goes, module by module, and what patching is expected to save.

Floors are computed from the model's config (cost_model) and the GPU's peaks (clock.roofline). Times are measured on
this machine's GPU if there is one, one provider at a time (provider_times); hosts need neither be patched nor run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from fastkernels.core import registry
from fk_bench.core import machine, rows
from fk_bench.core.hub import ModelError
from fk_bench.core.rows import Row, Subject
from fk_bench.core.terminal.flags import ConfigError, comma_list
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.e2e import gains
from fk_bench.e2e.model_configs import load_config
from fk_bench.explain import tables
from fk_bench.explain.cost_model import PHASES, Call, Step, step
from fk_bench.explain.provider_times import HOSTS, Measured, ProviderTime, measure
from fk_bench.kernels.judge.clock import roofline

COMMAND = "explain"
MODEL, GPU = "llama-3.1-8b", "NVIDIA H200"  # defaults
BATCHES = {"decode": "1,8,32,256", "prefill": "1,8"}
DTYPES = ("auto", "bfloat16", "float16", "float32")
NOT_TIMED = {"floor": "times were not measured", "cpu": "timer: cpu, not a speed claim"}


@dataclass(frozen=True)
class TimedCall:
    """A call of the step, its measurements, and whether patch() replaces it in the host by default."""

    call: Call
    floor_us: float | None
    patched: bool
    measured: Measured | None = None

    def us(self, who: str) -> float | None:
        """Microseconds of one call; who: 'host', 'ours' or 'best'."""
        found: ProviderTime | None = getattr(self.measured, who) if self.measured is not None else None
        return None if found is None else found.us

    @property
    def gain_us(self) -> float | None:
        """Time that patching saves in a step: 0 if the call stays with the host, None if a time is missing."""
        host, ours = self.us("host"), self.us("ours")
        if host is None or (self.patched and ours is None):
            return None
        return self.call.count * (host - (ours or 0.0)) if self.patched else 0.0


@cache
def patched(op: str, host: str) -> bool:
    """Whether patch() without a list of ops puts this op into a live host."""
    from fk_integrations.patching import seam_interface

    return any(t.default and seam_interface.find(t.seam).live for t in registry.get(op).targets_for(host))


def totals(found: Step, lines: Sequence[TimedCall]) -> dict[str, float]:
    """Milliseconds of the step, in total and by group, as far as known, and tokens a second at its floor.

    step_ms, total and by group, exists only if every call was measured; measured_ms covers the measured ones.
    """
    sums: dict[str, float] = {}
    values = {
        "floor": lambda x: None if x.floor_us is None else x.call.count * x.floor_us,
        "step": lambda x: None if x.us("host") is None else x.call.count * x.us("host"),
        "best": lambda x: None if x.us("best") is None else x.call.count * x.us("best"),
        "gain": lambda x: x.gain_us,
    }
    for name, value in values.items():
        by_group: dict[str, list[float | None]] = {}
        for line in lines:
            by_group.setdefault(line.call.group, []).append(value(line))
        for group, each in by_group.items():
            if None not in each:
                sums[f"{name}_{group}_ms"] = sum(v or 0.0 for v in each) / 1e3
        known = [v for each in by_group.values() for v in each if v is not None]
        if len(known) == len(lines):
            sums[f"{name}_ms"] = sum(known) / 1e3
        if name in ("step", "gain") and known:
            sums["measured_ms" if name == "step" else "predicted_gain_ms"] = sum(known) / 1e3
    sums.pop("gain_ms", None)
    made = found.sampled if found.phase == "decode" else found.tokens
    for name, ms in (("floor", sums.get("floor_ms")), ("step", sums.get("step_ms"))):
        if ms:
            sums[f"{name}_tokens_per_s"] = 1e3 * made / ms
    return sums


def explain_command(
    model: Annotated[
        str,
        typer.Argument(help="a folder with a config.json, a hub id, or a public model: llama-3.1-8b, ..."),
    ] = MODEL,
    host: Annotated[str, typer.Option(help="host of the providers: vllm or sglang")] = "vllm",
    batch: Annotated[str, typer.Option(help="sequences in a step, comma-separated")] = "",
    context: Annotated[
        str, typer.Option(help="tokens of each sequence including this step's, comma-separated")
    ] = "1024",
    phase: Annotated[str, typer.Option(help="decode (one token each) or prefill (all tokens)")] = "decode",
    tensor_parallel: Annotated[int, typer.Option(help="ranks; the step is that of rank 0")] = 1,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32")
    ] = "auto",
    gpu: Annotated[str, typer.Option(help=f"GPU of the floors (default: this machine's, else {GPU})")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu, to time on (default: cuda if available)")] = "",
    no_time: Annotated[bool, typer.Option("--no-time", help="floors only")] = False,
    compilers: Annotated[
        bool, typer.Option("--compilers", help="also time torch.compile: seconds per shape")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="folder of the run (default: fk-bench-runs/explain-TIME)")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print the tables as Markdown")] = False,
    json: Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")] = False,
) -> None:
    """List a model's step, one line a module: calls, bytes, operations and floor; on a GPU also the host's time, the
    best provider's, and the predicted gain. Installs, patches and downloads nothing but a config."""
    for name, value, known in (
        ("--host", host, tuple(HOSTS)), ("--phase", phase, PHASES), ("--dtype", dtype, DTYPES),
        ("--device", device, ("", "cpu", "cuda")),
    ):  # fmt: skip
        if value not in known:
            fail(f"{name} {value!r} is not one of {', '.join(k for k in known if k)}")
    try:
        batches = tuple(dict.fromkeys(comma_list("--batch", batch or BATCHES[phase], int)))
        contexts = tuple(dict.fromkeys(comma_list("--context", context, int)))
        for flag, values in (("--batch", batches), ("--context", contexts)):
            if not values or min(values) < 1:
                raise ConfigError(
                    f"{flag} {','.join(map(str, values))!r}: needs one or more numbers, each at least 1"
                )
        timer = _timer(device, no_time)
        peaks = _peaks(gpu, timer)
        name, config = load_config(model)
        steps = [
            step(name, config, phase, n, length, tensor_parallel, _dtype(dtype, config, timer))
            for length in contexts
            for n in batches
        ]
    except (ConfigError, ModelError, ValueError, LookupError) as error:
        fail(str(error))
    measured = _measured(name, config, host)
    _run(steps, host, timer, peaks, compilers, _directory(out), markdown, json, measured)


def _run(
    steps: list[Step], host: str, timer: str, peaks: roofline.Peaks | None, compilers: bool, folder: Path,
    markdown: bool, quiet: bool, measured: list[list[gains.Gain]],
) -> None:  # fmt: skip
    path, base = folder / "rows.jsonl", _base()
    known: dict[str, Measured] = {}
    made, answers = [], []
    for each in steps:
        lines = list(_lines(each, host, timer, peaks, compilers, known))
        found = [_row(base, each, host, timer, peaks, line) for line in lines]
        sums = totals(each, lines)
        found.append(_step_row(base, each, host, timer, peaks, sums))
        rows.append(path, found)
        made += found
        missing = [
            f"{x.call.op} of {x.call.label}" for x in lines if timer != "floor" and x.us("host") is None
        ]
        answers.append(
            {"batch": each.batch, "context": each.context, **_answer(sums), "not_measured": missing}
        )
    if not quiet:
        for title, columns, cells in tables.tables(made, NOT_TIMED.get(timer, "")):
            print(tables.markdown(title, columns, cells)) if markdown else table(title, columns, cells)
        for reason in tables.reasons(made):
            print(reason)
        if not markdown:
            for title, columns, cells in tables.measured(measured):
                table(title, columns, cells)
        print(f"rows: {path}\n")
    first = steps[0]
    last_line({
        "command": COMMAND, "ok": True, "model": first.model, "architecture": first.architecture, "host": host,
        "gpu": peaks.name if peaks is not None else None, "timer": timer, "phase": first.phase,
        "tensor_parallel": first.tensor_parallel, "dtype": first.dtype, **answers[0],
        "steps": answers, "measured": [asdict(gain) for group in measured for gain in group], "rows": str(path),
    })  # fmt: skip


def _measured(name: str, config: Any, host: str) -> list[list[gains.Gain]]:
    """Measured gains of the models nearest to this one; none in an installation without bench/results."""
    try:
        known = gains.shipped()
    except FileNotFoundError:
        return []
    sizes = {key: getattr(config, key, None) or 0 for key in ("hidden_size", "num_hidden_layers")}
    return gains.nearest(known, name, config.model_type, gains.size(sizes), host)


def _answer(sums: dict[str, float]) -> dict[str, Any]:
    names = (
        "step_ms", "floor_ms", "measured_ms", "best_ms", "predicted_gain_ms", "floor_tokens_per_s", "step_tokens_per_s",
    )  # fmt: skip
    return {name: round(sums[name], 6) if name in sums else None for name in names}


def _lines(
    found: Step,
    host: str,
    timer: str,
    peaks: roofline.Peaks | None,
    compilers: bool,
    known: dict[str, Measured],
) -> Iterator[TimedCall]:
    """The lines of the step. Each call is timed once for all steps that have it; `known` caches measurements."""
    for call in found.calls:
        measured = None
        if call.case is None:
            measured = (
                Measured(reasons={"host": "collectives are not timed alone"}) if timer != "floor" else None
            )
        elif timer != "floor":
            key = f"{call.op} {call.dtype} {sorted(call.case.dims.items())}"
            if key not in known:
                print(f"timing {call.op} of {call.label}, batch {found.batch}", file=sys.stderr, flush=True)
                device = "cuda" if timer == "cuda-graph" else "cpu"
                known[key] = measure(call.op, call.case, device, host, compilers)
            measured = known[key]
        mine = call.case is not None and patched(call.op, host)
        yield TimedCall(call, call.floor_us(peaks), mine, measured)


# -- rows


def _base() -> dict[str, Any]:
    return {
        "run_id": uuid4().hex[:12], "commit": machine.commit(), "command": COMMAND, "machine": machine.machine(),
        "versions": machine.interpreter(sys.executable).versions,
    }  # fmt: skip


def _about(found: Step, timer: str, peaks: roofline.Peaks | None) -> dict[str, Any]:
    return {
        "architecture": found.architecture, "phase": found.phase, "batch": found.batch, "context": found.context,
        "tensor_parallel": found.tensor_parallel, "dtype": found.dtype, "timer": timer,
        "floors_of": peaks.name if peaks is not None else None,
    }  # fmt: skip


def _row(
    base: dict[str, Any], found: Step, host: str, timer: str, peaks: roofline.Peaks | None, line: TimedCall
) -> Row:
    call, measured = line.call, line.measured or Measured()
    case: dict[str, Any] = {
        "kind": "call", **_about(found, timer, peaks), "label": call.label, "group": call.group, "count": call.count,
        "patched": line.patched,
    }  # fmt: skip
    if call.case is not None:
        plain = (int, float, bool, str)
        case["dims"] = {k: v if isinstance(v, plain) else repr(v)[:200] for k, v in call.case.dims.items()}
    if measured.all:
        case["us"] = {t.name: t.us for t in measured.all if t.us is not None}
        case["passed_over"] = {t.name: t.problem[:200] for t in measured.all if t.us is None}
    metrics = {
        "bytes": call.bytes, "flops": call.flops, "weight_bytes": call.weights, "floor_us": line.floor_us,
        **{f"{who}_us": line.us(who) for who in ("host", "ours", "best")}, "gain_us": line.gain_us,
    }  # fmt: skip
    named = {who: getattr(measured, who) for who in ("host", "ours", "best")}
    case |= {who: t.name for who, t in named.items() if t is not None}
    if peaks is not None:
        case["bound"] = tables.bound(call.bytes, call.flops, call.dtype, peaks)
    return Row(
        **base, reason="; ".join(f"{who}: {why}" for who, why in measured.reasons.items()), case=case,
        subject=Subject(op=call.op, model=found.model, host=host), baseline=case.get("host"),
        metrics={k: v for k, v in metrics.items() if v is not None},
    )  # fmt: skip


def _step_row(
    base: dict[str, Any],
    found: Step,
    host: str,
    timer: str,
    peaks: roofline.Peaks | None,
    sums: dict[str, float],
) -> Row:
    sizes = {"weight_bytes": found.weights, "tokens": found.tokens, "sampled": found.sampled}
    return Row(
        **base, case={"kind": "step", **_about(found, timer, peaks)}, subject=Subject(model=found.model, host=host),
        metrics={**sizes, **sums},
    )  # fmt: skip


# -- options


def _timer(device: str, no_time: bool) -> str:
    """'cuda-graph', 'cpu' or 'floor' (no timing)."""
    import torch

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("--device cuda: torch sees no GPU here; without the flag you get the floors")
    if no_time or (not device and not there):
        return "floor"
    return "cpu" if device == "cpu" else "cuda-graph"


def _peaks(gpu: str, timer: str) -> roofline.Peaks | None:
    """The peaks of the named GPU, or of this machine's; on a CPU only of a named GPU."""
    here = machine.machine().gpu
    name = gpu or here or (GPU if timer == "floor" else "")
    found = roofline.peaks(name)
    if gpu and found is None:
        raise ConfigError(f"--gpu {gpu!r}: unknown peaks; known GPUs: {', '.join(roofline.known())}")
    if gpu and timer == "cuda-graph" and found != roofline.peaks(here):
        raise ConfigError(f"--gpu {gpu!r}: times would be those of this machine ({here}); add --no-time")
    return None if timer == "cpu" and not gpu else found


def _dtype(name: str, config: Any, timer: str) -> Any:
    import torch

    from fastkernels.engine.execution.forward.runner import pick_dtype

    return pick_dtype(name, config, torch.device("cpu" if timer == "cpu" else "cuda"))


def _directory(out: Path | None) -> Path:
    folder = out or Path("fk-bench-runs") / time.strftime("explain-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {folder}: {error.strerror}")
    return folder
