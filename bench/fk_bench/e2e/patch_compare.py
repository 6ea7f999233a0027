"""`fk-bench patch-compare`: a host against itself, stock and patched in turn, for many models.

The states alternate: stock, patched, stock, patched, stock. Live, that is one engine, patched and undone; before
construction, a process a state. A run of a patched state is compared with the mean of the same run in the two stock
states around it; neighbouring stock states compared with each other show the noise, and whether an undo gives the speed
back. Each model of a list has a process of its own. Engines of several models can share a GPU: they start together,
then they are measured in turn, while the others are idle, which is faster and less exact.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fastkernels.core.registry import UnknownName, check_names
from fastkernels.core.tuning import NO_TABLE
from fk_bench.core import machine, rows
from fk_bench.core.gpus import check_ranks
from fk_bench.core.rows import Row
from fk_bench.core.runs import missing
from fk_bench.core.terminal.flags import ConfigError, check_choice, comma_list, json_object
from fk_bench.core.terminal.needs import NEEDS
from fk_bench.core.terminal.output import fail, last_line
from fk_bench.e2e.apart import Apart, chosen_gpus
from fk_bench.e2e.asked import CHOSEN, Asked
from fk_bench.e2e.comparison import Extent
from fk_bench.e2e.loads import EMBED, GENERATE, PRESETS, TASKS, parse_loads
from fk_bench.e2e.media import Media
from fk_bench.e2e.ratios import COMMAND, over_loads, show, show_undo, shown_model, summary

DENSE = (
    "qwen2.5-7b", "llama-3.2-3b", "phi-4", "olmo-2-1124-7b", "granite-3.3-8b", "gemma-2-9b", "qwen3-4b", "qwen2.5-0.5b",
    "llama-3.2-1b", "qwen2.5-14b", "qwen3-14b", "gemma-3-12b", "mistral-small-24b-2501", "qwen2.5-32b",
)  # fmt: skip
WITH_ENGINE = "qwen2.5-7b", "phi-4", "olmo-2-1124-7b", "granite-3.3-8b", "gemma-2-9b", "qwen3-8b"
DEFAULT_LOADS = "1x512+128,8x512+128,32x512+128"
ENGINE_LOADS = "1x512+128,32x512+128,64x1024+128"
AUDIO_LOADS = "1x4+128,32x4+128"
CYCLES, REPEATS = 2, 3
# --quick: three alternations, at least one run of each load in each state, no profiles. With a start of 60 s and
# changes of 15 s, a model of 8B takes about 4 minutes on an H200.
QUICK_CYCLES, QUICK_SECONDS, QUICK_LOAD_SECONDS = 3, 110.0, 0.5


def patch_compare_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="folders, or with random weights names such as llama-3.2-3b; all: "
            f"{len(DENSE)} dense models, with --with-engine {len(WITH_ENGINE)}"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="vllm or sglang")] = "vllm",
    python: Annotated[str, typer.Option(help="the host's interpreter (default: this one)")] = "",
    loads: Annotated[
        str,
        typer.Option(
            help="REQUESTSxINPUT+OUTPUT tokens, or REQUESTSxINPUT@CACHED_PERCENT+OUTPUT, either with "
            "/ARRIVINGxINPUT+OUTPUT for prompts that arrive later; comma-separated, or "
            f"{', '.join(PRESETS)}, whose loads are skipped where they do not fit a model "
            f"(default: {DEFAULT_LOADS}, with --with-engine {ENGINE_LOADS}, with --quick quick, with --audio "
            f"{AUDIO_LOADS}, with --task embed embed)",
            show_default=False,
        ),
    ] = "",
    task: Annotated[
        str, typer.Option(help="generate, or embed: texts/s and latency of an encoder, with loads as 32x512")
    ] = GENERATE,
    images: Annotated[
        str, typer.Option(help="IMAGESxPIXELS of each request, in front of its text: random ones, as 1x1024")
    ] = "",
    audio: Annotated[
        float | None, typer.Option(help="seconds of random audio of each request", show_default=False)
    ] = None,
    cycles: Annotated[
        int | None,
        typer.Option(
            "--cycles",
            "--alternations",
            show_default=False,
            help=f"times that the host is patched and undone (default: {CYCLES}, with --quick {QUICK_CYCLES})",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help=f"runs of each load in each state, after one more (default: {REPEATS}, with --quick fewer)",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="prompts, decodes and three alternations in about 4 minutes a model, without profiles",
        ),
    ] = False,
    model_seconds: Annotated[
        float, typer.Option(help="limit of a model's runs, about: fewer repeats, at least two (0: no limit)")
    ] = 0.0,
    load_seconds: Annotated[
        float | None,
        typer.Option(
            help="repeat a short load until its runs take so long, at most 20 times (default: 1, with --quick "
            f"{QUICK_LOAD_SECONDS})",
            show_default=False,
        ),
    ] = None,
    again: Annotated[
        float,
        typer.Option(help="measure loads once more whose output throughput is under this multiple (0: none)"),
    ] = 0.0,
    side_by_side: Annotated[
        int,
        typer.Option(
            help="models whose engines may share the GPU, where their memory fits: faster, but less exact"
        ),
    ] = 1,
    with_engine: Annotated[
        bool, typer.Option("--with-engine", help="also our engine, next to the host, with the same prompts")
    ] = False,
    no_table: Annotated[
        bool,
        typer.Option(
            "--no-table", help="without the tuned tables that ship: as for a model that was never tuned"
        ),
    ] = False,
    before_construction: Annotated[
        bool, typer.Option("--before-construction", help="FASTKERNELS=1 in a process of its own, not live")
    ] = False,
    ops: Annotated[str, typer.Option(help="comma-separated (default: what patch() chooses)")] = "",
    trace: Annotated[bool, typer.Option(help="profiled runs: the GPU's time in a step of decoding")] = True,
    load_format: Annotated[str, typer.Option(help="dummy: random weights; auto: the checkpoint's")] = "dummy",
    dtype: Annotated[str, typer.Option(help="auto: bfloat16, or float32 on a CPU that emulates it")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto: the host's default; fp8: float8_e4m3, in our engine as well")
    ] = "auto",
    tensor_parallel: Annotated[int, typer.Option(help="GPUs of the host, and of our engine")] = 1,
    gpus: Annotated[
        str, typer.Option(help="all, or entries of CUDA_VISIBLE_DEVICES: a model at a time on each of them")
    ] = "",
    gpu_share: Annotated[
        float, typer.Option(help="share of the memory (default: 0.9, on a CPU 0.3)", show_default=False)
    ] = 0.0,
    graph_sizes: Annotated[
        str,
        typer.Option(
            help="CUDA graphs of the host, in all states: all, its own; loads: those of --loads only, which starts"
            " sooner"
        ),
    ] = "all",
    engine_args: Annotated[str, typer.Option(help="JSON of more arguments of the host's engine")] = "{}",
    timeout: Annotated[float, typer.Option(help="seconds for a start, a patch or a run")] = 600.0,
    seconds: Annotated[
        float, typer.Option(help="begin no model after this time (0: no limit); continue with the same --out")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="of the prompts, which are new for every run")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder of the rows; models that it has already are only shown (default: a new one)"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="continue a run of another commit, chip or versions")
    ] = False,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """A host against itself, stock and patched in turn: latency a token, throughput and steps, for each model.

    fk-bench patch-compare qwen2.5-7b llama-3.2-3b --python .venv-vllm/bin/python --out run

    fk-bench patch-compare llama-3.1-8b --with-engine --quick

    fk-bench patch-compare qwen3-8b phi-4 --loads prompts,mixed --alternations 5 --gpus all --out run

    fk-bench patch-compare qwen3-vl-2b --images 1x1024 --loads 1x64+128,8x64+128

    fk-bench patch-compare whisper-large-v3 --audio 30

    fk-bench patch-compare bge-m3 --task embed

    A ratio above 1 means that the patched host is better, with a 95% interval; 'noise' is the same for stock against
    stock. Measured by an offline engine, token by token, without a server.
    Without a model, the rows of --out are shown.
    """
    start = time.monotonic()
    if not models and out is None:
        fail(NEEDS["patch-compare"])
    try:
        check_choice("task", task, TASKS)
        loads = loads or default_loads(task, audio is not None, quick, with_engine)
        media = Media.parse(images, audio)
        plan, presets = parse_loads(loads, task)
        media.check(host, task, plan)
        cycles = cycles if cycles is not None else QUICK_CYCLES if quick else CYCLES
        repeats = repeats if repeats is not None else REPEATS
        load_seconds = load_seconds if load_seconds is not None else QUICK_LOAD_SECONDS if quick else 1.0
        model_seconds = model_seconds or (QUICK_SECONDS if quick else 0.0)
        for name, given, allowed in (
            ("host", host, ("vllm", "sglang")),
            ("load-format", load_format, ("dummy", "auto")),
            ("dtype", dtype, ("auto", "bfloat16", "float16", "float32")),
            ("kv-cache-dtype", kv_cache_dtype, ("auto", "fp8")),
            ("graph-sizes", graph_sizes, ("all", "loads")),
        ):
            check_choice(name, given, allowed)
        if task == EMBED and kv_cache_dtype != "auto":
            raise ConfigError(f"--kv-cache-dtype {kv_cache_dtype}: --task {EMBED} has no KV cache")
        if min(cycles, repeats, side_by_side, tensor_parallel) < 1:
            raise ConfigError("--cycles, --repeats, --side-by-side and --tensor-parallel must be at least 1")
        if min(model_seconds, load_seconds, again, seconds, gpu_share) < 0 or timeout <= 0 or gpu_share > 1:
            raise ConfigError(
                "--model-seconds, --load-seconds, --again and --seconds must not be negative, --timeout must be above"
                " 0, and --gpu-share must be from 0 to 1"
            )
        chosen = check_names(comma_list("--ops", ops, str)) if ops else None
        if before_construction and (side_by_side > 1 or with_engine):
            raise ConfigError(
                "--before-construction starts a process for each state: it excludes --side-by-side and --with-engine"
            )
        if tensor_parallel > 1 and side_by_side > 1:
            raise ConfigError("--tensor-parallel excludes --side-by-side, whose models share one GPU")
        check_ranks("--tensor-parallel", tensor_parallel, machine.machine().gpus)
        if gpus and (side_by_side > 1 or tensor_parallel > 1):
            raise ConfigError(
                "--gpus measures a model on each GPU: it excludes --side-by-side and --tensor-parallel"
            )
        places = chosen_gpus(gpus, machine.machine().gpus) if gpus else []
        extra = json_object("--engine-args", engine_args)
        if graph_sizes != "all" and not isinstance(extra.get("compilation_config", {}), dict):
            raise ConfigError(
                "--graph-sizes loads needs a compilation_config of --engine-args that is an object"
            )
        interpreter = machine.absolute(python or sys.executable)
        if models:
            _check_installed(host, interpreter)
        elif out is not None and not (out / "rows.jsonl").is_file():
            raise ConfigError(missing(out))
        folder = out or Path("fk-bench-runs") / time.strftime(f"{COMMAND}-%Y%m%d-%H%M%S")
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, UnknownName) as error:
        fail(str(error))
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")
    file = folder / "rows.jsonl"
    extent = Extent(
        plan, cycles, repeats, model_seconds, load_seconds, again, trace and not quick and machine.machine().gpus > 0,
        1 if quick else 2,
    )  # fmt: skip
    asked = Asked(
        host, interpreter, folder.absolute(), timeout, before_construction,
        chosen, {"FASTKERNELS_TUNED": NO_TABLE} if no_table else {},
        machine.fast_dtype() if dtype == "auto" else dtype, kv_cache_dtype, load_format, tensor_parallel, gpu_share,
        extra, with_engine, loads.replace(" ", ""), presets, extent, seed, task, media, graph_sizes,
    )  # fmt: skip
    every = _read(file)
    if models and not force and (why := _differs(every, asked)):
        fail(f"--out {folder} holds rows of {why}: use another folder, or --force to continue with this one")
    case = asked.case() if models or not every else every[-1].case  # without a model, those of the last run
    host = host if models or not every else str(every[-1].subject.host)
    made = [
        row
        for row in every
        if all(row.case.get(k, usual) == case.get(k, usual) for k, usual in CHOSEN.items())
        and row.subject.host == host
    ]
    done = {row.subject.model for row in made if row.case["state"] == "end"}
    names = [
        name
        for given in models or ()
        for name in ((WITH_ENGINE if with_engine else DENSE) if given == "all" else (given,))
    ]
    wanted = [name for name in dict.fromkeys(names) if name not in done]
    if unfinished := [row for row in made if row.subject.model in wanted]:
        gone = set(map(id, unfinished))
        every, made = ([row for row in of if id(row) not in gone] for of in (every, made))
        rows.replace(file, every)
    late = start + seconds if seconds else float("inf")
    failed: dict[str, str] = {}
    for row in _measured(asked, wanted, side_by_side, places, late, failed):
        made.append(row)
        rows.append(file, [row])
    ended = {row.subject.model for row in made if row.case["state"] == "end"}
    left = [name for name in wanted if name not in ended and name not in failed]
    results = summary(made)
    if not json_only:
        show(results)
        show_undo(made)
        for row in made:
            if row.case["state"] in ("skipped", "failed"):
                print(f"{row.subject.model}: {row.status.value}: {row.reason.splitlines()[0]}")
        if not asked.gpu:
            print("on a CPU the ratios say nothing about a GPU")
        if left:
            print(
                f"not measured within {seconds:g} s: {', '.join(left)}; run the command again with --out {folder}"
            )
        print(f"rows: {file}\n")
    last_line({
        "command": COMMAND, "ok": not failed, "rows": str(file), "failed": list(failed), "left": left,
        "results": results, "over_loads": over_loads(results),
        "undo": [
            {"model": shown_model(row), **row.metrics, "ci95": row.ci95}
            for row in made
            if row.case["state"] == "undo" and "load" not in row.case
        ],
    })  # fmt: skip
    if failed:
        raise SystemExit(1)


def default_loads(task: str, audio: bool, quick: bool, with_engine: bool) -> str:
    if task == EMBED:
        return "embed"
    if audio:
        return AUDIO_LOADS
    return "quick" if quick else ENGINE_LOADS if with_engine else DEFAULT_LOADS


def _measured(
    asked: Asked,
    models: Sequence[str],
    at_once: int,
    gpus: Sequence[str],
    late: float,
    failed: dict[str, str],
) -> Iterator[Row]:
    """The rows of the models. `failed` gets those that could not be measured."""
    if not gpus and (at_once > 1 or len(models) < 2):
        yield from asked.measure(models, at_once, late, failed)
        return
    apart = Apart(asked, models, gpus, late)
    try:
        yield from apart.measure()
    finally:
        failed.update(apart.failed)


def _differs(found: Sequence[Row], asked: Asked) -> str:
    """The first difference between these rows' commit, chip or versions and this run's; '' without one."""
    here, versions = machine.machine(), machine.interpreter(asked.python).versions
    for row in found:
        if row.commit != machine.commit():
            return f"commit {row.commit}, and this is {machine.commit()}"
        if row.machine.gpu != here.gpu:
            return f"{row.machine.gpu or 'a CPU'}, and this is {here.gpu or 'a CPU'}"
        if row.subject.host == asked.host and row.versions != versions:
            name = next(k for k in {**row.versions, **versions} if row.versions.get(k) != versions.get(k))
            return f"{name} {row.versions.get(name)}, and this is {versions.get(name)}"
    return ""


def _read(file: Path) -> list[Row]:
    made, warnings = rows.read(file) if file.exists() else ([], [])
    for warning in warnings:
        print(warning, file=sys.stderr)
    return made


def _check_installed(host: str, python: str) -> None:
    """Raise ConfigError for an interpreter that does not run or that lacks the host."""
    try:
        found = machine.interpreter(python)
    except ValueError as error:
        raise ConfigError(f"{error}: give another one with --python") from error
    if host not in found.modules:
        raise ConfigError(
            f"{host} is not installed in {python}: give {host}'s own interpreter with --python PATH"
        )
