"""`fk-bench capture MODEL`: record the calls that a model makes to each op while it serves real text."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fastkernels.core.registry import UnknownName, check_names
from fk_bench.capture.captures import Capture, load
from fk_bench.capture.requests import SCENARIOS, requests
from fk_bench.core import machine
from fk_bench.core.terminal.flags import comma_list, json_object
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.core.terminal.progress import Display
from fk_bench.offline.host import HOSTS, HostFailed, HostProcess

COMMAND = "capture"
DTYPES = ("auto", "bfloat16", "float16", "float32")
SAMPLE, ROWS_BYTES = "sample", 32 << 10  # bytes of the rows of one float tensor
HOST_PROCESS = Path(__file__).with_name("host_process.py")


def capture_command(
    model: Annotated[
        str, typer.Argument(help="a folder, or a model of the hub (default: a tiny random Llama)")
    ] = "",
    host: Annotated[
        str, typer.Option(help=f"engine that runs the model, eager: {', '.join(HOSTS)}")
    ] = "fastkernels",
    python: Annotated[str, typer.Option(help="the host's interpreter")] = sys.executable,
    scenario: Annotated[str, typer.Option(help=", ".join(SCENARIOS))] = "chat",
    out: Annotated[Path, typer.Option(help="folder in which the capture's folder is created")] = Path(
        "captures"
    ),
    name: Annotated[
        str,
        typer.Option(help="name of the capture's folder (default: MODEL-SCENARIO-HOST)", show_default=False),
    ] = "",
    ops: Annotated[
        str, typer.Option(help="ops to record in vllm or sglang, comma-separated (default: all)")
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="of weights and activations; auto: the host's default")
    ] = "bfloat16",
    budget: Annotated[
        int | None,
        typer.Option(
            help="total KiB of values (default: 1024; with --values sample 8192)", show_default=False
        ),
    ] = None,
    signatures: Annotated[int, typer.Option(help="most frequent signatures to keep per op")] = 32,
    values: Annotated[
        str,
        typer.Option(help="sets of values to keep per signature; sample: 8, with rows of float tensors, too"),
    ] = "8",
    engine_args: Annotated[str, typer.Option(help="JSON of more engine arguments")] = "{}",
    timeout: Annotated[
        float, typer.Option(help="seconds for the startup, and for each wave of requests")
    ] = 900.0,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """Run a model on real text and record the calls of each op: signatures, counts, routing, block tables, slots.

    vLLM and SGLang run in their own interpreter with our modules in the live engine. All engines run eagerly, because
    a replayed CUDA graph hides its calls. Replay a capture with `fk-bench kernels --cases captured`.
    """
    try:
        extra = json_object("--engine-args", engine_args)
        wanted = check_names(comma_list("--ops", ops, str)) if ops else ()
        if host not in HOSTS:
            raise UnknownName("host", host, HOSTS)
        if wanted and host == "fastkernels":
            raise ValueError("--ops is for vllm and sglang; our engine records all its ops: leave it out")
        if dtype not in DTYPES:
            raise UnknownName("dtype", dtype, DTYPES)
        sampled = values == SAMPLE
        if not sampled and not values.isdecimal():
            raise ValueError(f"--values {values!r} is neither a number nor {SAMPLE!r}")
        sets, kib = 8 if sampled else int(values), (8192 if sampled else 1024) if budget is None else budget
        if min(kib, signatures, sets) < 1:
            raise ValueError("--budget, --signatures and --values must be at least 1")
        python = machine.absolute(python)
        _check_installed(host, python)
        model = model or _small()
        waves = requests(scenario, _resolved(model))
    except (ValueError, OSError, UnknownName) as error:
        fail(str(error))
    folder = out / (name or f"{Path(model).name}-{scenario}-{host}".lower())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {out}: {error.strerror}; give a folder")
    meta = {
        "model": Path(model).name, "host": host, "scenario": scenario, "dtype": dtype, "eager": True,
        "device": "cuda" if machine.machine().gpus else "cpu", "commit": machine.commit(),
        "time": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip
    limits = {"budget": kib << 10, "signatures": signatures, "values": sets, "floats": sampled * ROWS_BYTES}
    settings = {**_sizes(waves), "model": model, "dtype": dtype, "engine_args": extra, "ops": list(wanted)}
    try:
        off = _run(host, python, settings, waves, limits, folder, meta, timeout)
        capture = load(folder)
    except (HostFailed, ValueError) as error:
        fail(str(error), 1)
    ok = bool(capture.ops) and not capture.problems
    if not json_only:
        _show(capture, off)
    size = sum(f.stat().st_size for f in folder.iterdir() if f.suffix != ".log")
    last_line({
        "command": COMMAND, "ok": ok, "ops": len(capture.ops), "signatures": capture.signatures,
        "calls": capture.calls, "bytes": size, "out": str(folder),
    })  # fmt: skip
    if not ok:
        raise SystemExit(1)


def _small() -> str:
    from fk_bench.core.small_model import small_model

    return str(small_model())


def _resolved(model: str) -> str:
    from fastkernels.models.common.checkpoints import weights

    return str(weights.resolve(model))


def _check_installed(host: str, python: str) -> None:
    """Raises ValueError for an interpreter that does not run, or lacks the host or fastkernels."""
    found = machine.interpreter(python)
    for module, package in ((host, host), ("fastkernels", "fastkernels")):
        if module not in found.modules:
            hint = f"give {host}'s own interpreter with --python PATH, or install {package} there"
            raise ValueError(f"{module} is not installed in {python}: {hint}")


def _sizes(waves: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Engine sizes for the largest wave, so that block ids and the cache of a replay stay small."""
    longest = max(len(r["prompt"]) + r["max_tokens"] for wave in waves for r in wave)
    tokens = sum(len(r["prompt"]) + r["max_tokens"] + 16 for wave in waves for r in wave)
    return {
        "max_model_len": longest + 16, "max_num_seqs": max(len(wave) for wave in waves),
        "kv_tokens": -(-tokens // 16) * 16, "gpu": machine.machine().gpus > 0,
    }  # fmt: skip


def _environment(host: str, model: str) -> dict[str, str]:
    made = {"FASTKERNELS_CAPTURE": "1", "TOKENIZERS_PARALLELISM": "false", "FASTKERNELS": "0"}
    if Path(model).is_dir():
        made |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if host == "vllm":
        made |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if not machine.machine().gpus:
            made.setdefault("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
    return made


def _run(
    host: str, python: str, settings: dict[str, Any], waves: list[list[dict[str, Any]]], limits: dict[str, int],
    folder: Path, meta: dict[str, Any], timeout: float,
) -> dict[str, str]:  # fmt: skip
    """Let the host's process write the folder. Returns {op: why it was not recorded in this host}."""
    engine = HostProcess(
        host, python, settings, folder, script=HOST_PROCESS, env=_environment(host, settings["model"])
    )
    try:
        with Display(Console(stderr=True), len(waves) + 1) as display:
            display.doing(f"{host} starts (eager)")
            first = engine.answer(timeout)
            meta |= {"host_version": first["host_version"], "patched": first["patched"], "off": first["off"]}
            display.advance()
            work = {"waves": waves, "limits": limits, "folder": str(folder.resolve()), "meta": meta}
            engine.tell(work)
            for i, wave in enumerate(waves):
                display.doing(f"wave {i + 1}: {len(wave)} requests")
                tokens = engine.answer(timeout)["tokens"]
                display.line(f"wave {i + 1} of {len(waves)}: {len(wave)} requests, {tokens} tokens generated")
                display.advance()
            engine.answer(timeout)
        return first["off"]
    finally:
        engine.stop()


def _show(capture: Capture, off: dict[str, str]) -> None:
    rows = [
        [
            name, op.count, op.signatures, len(op.calls), sum(len(c.values) for c in op.calls),
            ", ".join(f"{n} {what}" for what, n in op.dropped.items() if n),
        ]
        for name, op in sorted(capture.ops.items(), key=lambda item: -item[1].count)
    ]  # fmt: skip
    title = f"{capture.model}, {capture.scenario}, in {capture.host} {capture.host_version} (eager)"
    table(title, ("op", "calls", "signatures", "kept", "sets of values", "dropped"), rows)
    if off:
        table("not recorded in this host", ("op", "why"), [[op, why] for op, why in off.items()])
    for problem in capture.problems:
        print(problem, file=sys.stderr)
