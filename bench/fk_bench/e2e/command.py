"""`fk-bench e2e`: whole models offline in several hosts; --startup: their startup times; --scheduler-only: the CPU cost
of a step, without a model.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fastkernels.core.candidate import CandidateError, from_directory
from fk_bench.core import machine, rows
from fk_bench.core.gpus import check_ranks
from fk_bench.core.hub import ModelError
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.core.terminal.flags import ConfigError, check_choice, comma_list, per_lane_env
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.e2e import sharing
from fk_bench.e2e.loads import EMBED, GENERATE, PRESETS, TASKS, Load, parse_loads, room_for
from fk_bench.e2e.media import Media, MediaPlace, placed
from fk_bench.e2e.model_configs import sizes_of
from fk_bench.e2e.runs import Prompts, first_run, metrics_of_answer, too_little_cached
from fk_bench.offline.host import (
    COMMAND,
    HOSTS,
    IN_PROCESS,
    OMNI,
    WITH,
    HostFailed,
    HostProcess,
    make_row,
    prompts_of,
    vocab_size,
)


def e2e_command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="a folder, or a model of the hub (default: a tiny random Llama); for images, also names"
        ),
    ] = "",
    hosts: Annotated[
        str, typer.Option(help=f"{', '.join(HOSTS)}; or one of {', '.join(IN_PROCESS)}, for images")
    ] = "fastkernels",
    python: Annotated[
        list[str] | None, typer.Option(help="HOST=PATH of its interpreter, also vllm-omni=PATH")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="images: vllm-omni:KEY=VALUE of its process, as PYTHONPATH")
    ] = None,
    requests: Annotated[
        str, typer.Option(help="concurrent requests, or images of a batch, comma-separated")
    ] = "1,8",
    input_len: Annotated[int, typer.Option(help="tokens of a random prompt")] = 128,
    output_len: Annotated[int, typer.Option(help="tokens of an output")] = 32,
    loads: Annotated[
        str,
        typer.Option(
            help="in place of --requests, --input-len and --output-len: loads of patch-compare, as 8x2048+8, or "
            f"{', '.join(PRESETS)}; adds TTFT, TPOT and input tokens/s"
        ),
    ] = "",
    task: Annotated[
        str,
        typer.Option(help="generate, or embed: texts/s and latency of an encoder, with --loads as 32x512"),
    ] = GENERATE,
    images: Annotated[
        str, typer.Option(help="IMAGESxPIXELS of each request of --loads: random ones, as 1x1024")
    ] = "",
    audio: Annotated[
        float | None,
        typer.Option(help="seconds of random audio of each request of --loads", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(help="interleaved over the hosts")] = 3,
    dtype: Annotated[str, typer.Option(help="auto: bfloat16, or float32 on a CPU that emulates it")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(help="GPUs per host")] = 1,
    gpu_share: Annotated[
        float,
        typer.Option(
            help="share of the GPU for each host (default: 0.9 over their number)", show_default=False
        ),
    ] = 0.0,
    engine_args: Annotated[list[str] | None, typer.Option(help="HOST=JSON of more engine arguments")] = None,
    candidate: Annotated[
        Path | None,
        typer.Option(help="folder of OP.py files: every host runs both without and with them"),
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds for a startup or a round")] = 600.0,
    seed: Annotated[int, typer.Option(help="of the prompts; combined with round and concurrency")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="folder of the run (default: fk-bench-runs/e2e-TIME)")
    ] = None,
    image_size: Annotated[int, typer.Option(help="images: pixels of a side (0: the model's own)")] = 0,
    steps: Annotated[int, typer.Option(help="images: denoising steps of a pipeline")] = 4,
    lanes: Annotated[
        str,
        typer.Option(
            help="images: stock, compiled, vllm-omni, patched, patched-compiled (default: stock,compiled,patched)"
        ),
    ] = "",
    ops: Annotated[str, typer.Option(help="images: ops to patch (default: those that patch() selects)")] = "",
    compile_mode: Annotated[
        str, typer.Option(help="images: torch.compile's mode of the compiled lanes, on a GPU")
    ] = "max-autotune",
    compile_blocks: Annotated[
        bool,
        typer.Option("--compile-blocks", help="images: compile repeated blocks only: seconds, not minutes"),
    ] = False,
    compile_ahead: Annotated[
        int,
        typer.Option(
            help="images: processes that compile all lanes and batches before; each has a copy of the model"
        ),
    ] = 0,
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs", help="images: run compiled lanes in CUDA graphs (max-autotune has its own)"
        ),
    ] = False,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="images: convolutions with channels last, in all lanes")
    ] = False,
    costs: Annotated[
        bool, typer.Option("--costs", help="images: the time of a call by kind of kernel, from a profile")
    ] = False,
    scheduler_only: Annotated[
        bool,
        typer.Option("--scheduler-only", help="no model: CPU cost of scheduling and bookkeeping per step"),
    ] = False,
    startup: Annotated[
        bool,
        typer.Option("--startup", help="start each host --rounds times instead; seconds to the first token"),
    ] = False,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """Throughput and latency of a model offline, in interleaved rounds: our engine, real vLLM, real SGLang; or an
    image model of timm, transformers or diffusers: as it is, compiled, and patched, checked against float32.

    --startup measures from the command to the first token, by phase, with each host's default sizes. With --load-format
    dummy, MODEL may be a public name such as llama-3.1-8b.
    """
    try:
        counts = comma_list("--requests", requests, int)
        names = comma_list("--hosts", hosts, str)
        given = _by_host("--python", python)
        variables = per_lane_env(env or ())
        pythons = {host: machine.absolute(path) for host, path in given.items()}
        extra = {host: json.loads(text) for host, text in _by_host("--engine-args", engine_args).items()}
        unknown = [n for n in names if n not in (IN_PROCESS if names[0] in IN_PROCESS else HOSTS)]
        if unknown or not names:
            known = f"{', '.join(HOSTS)}; or one of {', '.join(IN_PROCESS)}, for images"
            raise ConfigError(f"--hosts: unknown host {', '.join(unknown[:1])!r}. Known: {known}")
        if not variables.keys() <= {OMNI}:
            raise ConfigError(f"--env: expected {OMNI}:KEY=VALUE, got {(env or [])[0]!r}")
        if min(counts) < 1 or min(rounds, input_len, output_len) < 1:
            raise ConfigError("--requests, --rounds, --input-len and --output-len must be at least 1")
        check_ranks("--tensor-parallel", tensor_parallel, machine.machine().gpus)
        if startup and (candidate is not None or scheduler_only):
            raise ConfigError("--startup excludes --candidate and --scheduler-only")
        if names[0] in IN_PROCESS and (len(names) > 1 or startup or scheduler_only):
            raise ConfigError(f"--hosts {names[0]} is measured alone, without --startup and --scheduler-only")
        if names[0] not in IN_PROCESS and (image_size or lanes or ops):
            raise ConfigError(f"--image-size, --lanes and --ops are for --hosts {', '.join(IN_PROCESS)}")
        if loads and (names[0] in IN_PROCESS or startup or scheduler_only or candidate is not None):
            raise ConfigError(
                "--loads is for hosts of text: it excludes --startup, --scheduler-only and --candidate"
            )
        if loads and (ignored := _on_the_line(context, "requests", "input_len", "output_len")):
            raise ConfigError(
                f"--loads names requests and tokens itself: leave out {' and '.join(ignored)}, or leave out --loads"
            )
        media = Media.parse(images, audio)
        check_choice("task", task, TASKS)
        if (media or task != GENERATE) and not loads:
            raise ConfigError(
                "--task embed, --images and --audio need --loads, as in --loads 32x512 and --loads 8x64+32"
            )
        plan, presets = parse_loads(loads, task) if loads else ([], frozenset())
        for name in names:
            media.check(name, task, plan)
        if candidate is not None:
            from_directory(candidate, blocks=names == ["fastkernels"])
    except (ConfigError, CandidateError, json.JSONDecodeError) as error:
        fail(str(error))
    folder = out or Path("fk-bench-runs") / time.strftime("e2e-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    if names[0] in IN_PROCESS:
        from fk_bench.e2e.pictures import command as pictures
        from fk_bench.e2e.pictures.measure import Compiler
        from fk_bench.e2e.pictures.omni import Place

        place = Place(pythons.get(OMNI, sys.executable), variables.get(OMNI, {}), timeout)
        try:
            pictures.run(
                model, names[0], tuple(counts), rounds, dtype, load_format, image_size, steps, lanes, ops, candidate,
                seed, extra.get(names[0], {}), folder, json_only,
                Compiler(compile_mode, compile_blocks, cuda_graphs), costs, channels_last, place, compile_ahead,
            )  # fmt: skip
        except ConfigError as error:
            fail(str(error))
        return
    if scheduler_only:
        from fk_bench.e2e.scheduler_cost import measure

        made = [
            make_row("scheduler", {"kind": "scheduler", "requests": n, "context": context}, metrics)
            for n in counts
            for context in (128, 2048)
            for metrics in [measure(n, context)]
        ]
        rows.append(folder / "rows.jsonl", made)
        _show(made, folder, json_only)
        return
    if not model:
        from fk_bench.core.small_model import small_model

        model = str(small_model())
    elif load_format == "dummy":
        try:
            model = sizes_of(model, folder)
        except ModelError as error:
            fail(str(error))
    if startup:
        from fk_bench.e2e.startup import measure_starts, show_starts

        own = {
            "dtype": machine.fast_dtype() if dtype == "auto" else dtype, "load_format": load_format,
            "tensor_parallel": tensor_parallel, "gpu_share": gpu_share or None,
        }  # fmt: skip
        try:
            made = measure_starts(model, names, pythons, extra, own, rounds, input_len, folder, timeout, seed)
        except (HostFailed, ValueError) as error:
            fail(str(error), 1)
        show_starts(made, folder, json_only)
        return
    if plan:
        from fk_bench.e2e.asked import longest_of

        try:
            model, media_place = placed(model, model, folder, plan, task, media, load_format == "dummy")
        except ValueError as error:
            fail(str(error))
        plan = _fitting(model, plan, presets, media_place)
        counts = tuple(load.requests + load.arriving for load in plan)
        longest = longest_of(model, plan, media_place)
        room = room_for(plan) + max(counts) * (media_place.features + media_place.states)
        kv_tokens = sharing.kv_tokens([(1, room)], longest)
    else:
        longest = input_len + output_len + 16
        kv_tokens = -(-max(counts) * longest * 33 // 32 // 16) * 16
        media_place = MediaPlace(texts=vocab_size(model))
    with_them = [] if candidate is None else [str(candidate.expanduser().resolve())]
    runs = [(name, files) for name in names for files in (None, *with_them)]
    dtype = machine.fast_dtype() if dtype == "auto" else dtype
    settings: dict[str, Any] = {
        "model": model, "dtype": dtype, "load_format": load_format,
        "max_model_len": longest, "max_num_seqs": max(counts), **_cache(model, dtype, task, kv_tokens, max(counts)),
        "gpu": machine.machine().gpus > 0, "gpu_share": gpu_share or 0.9 / len(runs),
        "tensor_parallel": tensor_parallel, "task": task, "media": vars(media) if media else None,
    }  # fmt: skip
    made = []
    started: list[HostProcess] = []
    try:
        for name, files in runs:
            own = {**settings, "engine_args": extra.get(name, {})}
            started.append(HostProcess(name, pythons.get(name, sys.executable), own, folder, files))
            held = started[-1].answer(timeout)["kv_tokens"]
            if settings["kv_tokens"] is not None:
                _check_size(started[-1].lane, held, kv_tokens)
        for row in _loaded(started, settings, plan, rounds, seed, media_place, media, timeout):
            made.append(row)
            rows.append(folder / "rows.jsonl", [row])
        for count in () if plan else counts:
            for r in range(-1, rounds):  # round -1 is the warm-up
                prompts = prompts_of(f"{seed} {count} {r}", count, input_len, media_place.texts)
                for host in started:
                    found = host.generate(prompts, output_len, timeout)
                    if r >= 0:
                        made.append(_round(host, settings, count, input_len, output_len, r, found))
                        rows.append(folder / "rows.jsonl", made[-1:])
    except (HostFailed, ValueError) as error:
        fail(str(error), 1)
    finally:
        for host in started:
            host.stop()
    _show(made, folder, json_only)


def _on_the_line(context: typer.Context, *names: str) -> list[str]:
    """Those of these options that are on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        f"--{n.replace('_', '-')}" for n, found in sources.items() if found and found.name == "COMMANDLINE"
    ]


def _cache(model: str, dtype: str, task: str, tokens: int, sequences: int) -> dict[str, Any]:
    """The size of each host's cache, for so many tokens: with recurrent states in bytes, since blocks differ."""
    if task == EMBED:
        return {"kv_tokens": None, "kv_bytes": sharing.NO_CACHE}
    from fastkernels.models.common.checkpoints.weights import resolve

    folder = str(resolve(model))
    if not sharing.is_recurrent(folder, dtype):
        return {"kv_tokens": tokens}
    need = sharing.need(model, folder, dtype, tokens, False, sequences=sequences)
    return {"kv_tokens": None, "kv_bytes": need.kv}


def _fitting(
    model: str, loads: Sequence[Load], presets: Collection[Load], place: MediaPlace
) -> list[Load]:  # fmt: skip
    """The loads that fit the model's context. Those of a preset that do not are skipped; others end the command."""
    from fk_bench.e2e.asked import too_long

    found = {load: too_long(model, model, load, place) for load in loads}
    for load, why in found.items():
        if why and load not in presets:
            fail(why)
        if why:
            print(f"skipped {why}", file=sys.stderr)
    kept = [load for load in loads if not found[load]]
    if not kept:
        fail(next(iter(found.values())))
    return kept


def _loaded(
    started: Sequence[HostProcess], settings: dict[str, Any], loads: Sequence[Load], rounds: int, seed: int,
    place: MediaPlace, media: Media, timeout: float,
) -> Iterator[Row]:  # fmt: skip
    """Rows of the loads, in rounds over the hosts; the first one warms up, and fills the prefix cache."""
    prompts = Prompts(str(seed), loads, place, media)
    for r in range(-1, rounds):
        for load in loads:
            work = prompts.work(load if r >= 0 else first_run(load), f"{seed} {load} {r}")
            for host in started:
                host.tell(work)
                found = host.answer(timeout)
                if r < 0:
                    continue
                metrics, problem = metrics_of_answer(found, load, place)
                problem = too_little_cached(load, r, metrics) or problem
                case = {
                    "kind": "offline",
                    "load": str(load),
                    "requests": load.requests,
                    "kind of load": load.kind,
                }
                case |= {
                    k: settings[k] for k in ("dtype", "load_format", "tensor_parallel", "kv_tokens", "task")
                }
                case |= media.case()
                yield make_row(
                    host.name, case, metrics, round=r, subject=Subject(model=settings["model"], host=host.name),
                    versions=machine.interpreter(host.python).versions,
                    status=Status.WRONG if problem else Status.OK, reason=problem,
                )  # fmt: skip


def _check_size(host: str, held: int, wanted: int) -> None:
    if held < 0.98 * wanted:
        raise HostFailed(
            f"{host} has a KV cache of {held} tokens, but a fair comparison needs {wanted}: increase its memory"
            " (--gpu-share), or use fewer requests or tokens"
        )


def _by_host(flag: str, given: Sequence[str] | None) -> dict[str, str]:
    pairs = [item.partition("=") for item in given or ()]
    for host, equals, _ in pairs:
        if host not in (*HOSTS, *IN_PROCESS, OMNI) or not equals:
            known = ", ".join((*HOSTS, *IN_PROCESS, OMNI))
            raise ConfigError(f"{flag} {host!r}: give HOST=VALUE, HOST one of {known}")
    return {host: value for host, _, value in pairs}


def _round(
    host: HostProcess, settings: dict[str, Any], count: int, input_len: int, output_len: int, r: int,
    found: dict[str, Any],
) -> Row:  # fmt: skip
    seconds, expected = found["seconds"], count * output_len
    wrong = found["output_tokens"] != expected
    reason = f"{found['output_tokens']} tokens generated instead of {expected}" if wrong else ""
    status = Status.WRONG if wrong else Status.OK
    live = found.get("live")
    if live is not None and not any(live.values()):
        status, reason = Status.FAILED, "none of the candidates ran"
    metrics = {
        "seconds": seconds,
        "output_tokens_per_s": found["output_tokens"] / seconds,
        "total_tokens_per_s": (found["output_tokens"] + count * input_len) / seconds,
        "ms_per_output_token_and_request": 1000 * seconds / output_len,
    }
    case = {"kind": "offline", "requests": count, "input_len": input_len, "output_len": output_len}
    case |= {k: settings[k] for k in ("dtype", "load_format", "tensor_parallel", "kv_tokens")}
    case |= {} if live is None else {"live": live}
    subject = Subject(model=settings["model"], host=host.name, candidate=host.candidate)
    return make_row(
        host.name, case, metrics, round=r, subject=subject, baseline=host.name if host.candidate else None,
        versions=machine.interpreter(host.python).versions, status=status, reason=reason,
    )  # fmt: skip


def _show(made: Sequence[Row], folder: Path, json_only: bool) -> None:
    found: dict[tuple[str, str, int, int], list[Row]] = {}
    for row in made:
        lane = (row.subject.host or "") + (WITH if row.subject.candidate else "")
        key = (lane, row.case.get("load", ""), row.case["requests"], row.case.get("context", 0))
        found.setdefault(key, []).append(row)
    lines = []
    for (host, load, count, context), group in found.items():
        medians = {
            m: statistics.median(r.metrics[m] for r in group if m in r.metrics) for m in group[0].metrics
        }
        line: dict[str, Any] = {
            "host": host,
            **({"load": load} if load else {"requests": count}),
            **({"context": context} if context else {}),
            **medians,
        }
        lines.append(line)
    ok = all(r.status is Status.OK for r in made)
    if not json_only:
        keys = [
            key
            for key in dict.fromkeys(key for line in lines for key in line)
            if not key.startswith("step_ms")
        ]
        cells = [
            [f"{v:.1f}" if isinstance(v, float) else v for v in (line.get(key, "") for key in keys)]
            for line in lines
        ]
        table("e2e, medians of the rounds", keys, cells)
        for last in (group[-1] for group in found.values() if "live" in group[-1].case):
            ran = ", ".join(f"{op} {n}" for op, n in last.case["live"].items())
            print(f"{last.subject.host} with {last.subject.candidate}: calls of the candidates: {ran}")
        print(f"rows: {folder / 'rows.jsonl'}\n")
    last_line({"command": COMMAND, "ok": ok, "rows": str(folder / "rows.jsonl"), "results": lines})
    if not ok:
        raise SystemExit(1)
