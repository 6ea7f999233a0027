"""The flags of `serve-compare`, `diff` and `report`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from fk_bench.core.output import last_line, table
from fk_bench.core.panels import grouped
from fk_bench.serving.config import (
    CompareConfig,
    ConfigError,
    comma_list,
    per_lane,
    per_lane_args,
    per_lane_env,
    resumed,
    slo_limits,
)

DEFAULT = CompareConfig()
_JSON = Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")]


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP as an exception in the main thread, so that every `finally` runs."""

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn the signals that end a command into Interrupted; further ones do not interrupt the cleanup."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        for n in numbers:
            signal.signal(n, signal.SIG_IGN)
        raise Interrupted(number)

    before = {n: signal.signal(n, handler) for n in numbers}
    try:
        yield
    finally:
        for n, old in before.items():
            signal.signal(n, old)


def _fail(command: str, message: str, status: int = 2, **more: Any) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    last_line({"command": command, "ok": False, "error": message.splitlines()[0], **more})
    raise SystemExit(status)


def _comma(values: tuple[Any, ...]) -> str:
    return ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)


PANELS = {
    "Servers": (
        "model", "lanes", "base", "python", "env", "server_args", "attach", "dtype", "tensor_parallel", "max_model_len",
        "kv_tokens", "resident", "together", "ready_timeout", "port",
    ),
    "Load": ("concurrency", "rate", "loads", "rounds", "num_prompts", "slo", "flush", "profile", "request_timeout"),
    "Load: arrivals, traces, search": (
        "burstiness", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "trace", "trace_speed",
        "trace_requests", "trace_block_size", "search", "slo_attainment",
    ),
    "Prompts": (
        "input_len", "output_len", "dataset", "dataset_path", "ignore_eos", "seed", "turns", "prefix_len",
        "prefix_groups",
    ),
    "Token agreement": ("agreement_prompts", "agreement_len", "min_agreement"),
    "Output": ("out", "resume", "json_only"),
}  # fmt: skip


@grouped(PANELS)
def serve_compare_command(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Option(help="a directory, or a model of the hub (default: a tiny random Llama)")
    ] = "",
    lanes: Annotated[str, typer.Option(help="vllm, vllm+fk, sglang, sglang+fk, fastkernels")] = _comma(
        DEFAULT.lanes
    ),
    python: Annotated[
        list[str] | None, typer.Option(help="LANE=PATH of its interpreter (a +fk lane uses its host's)")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="LANE:KEY=VALUE for the server's environment")] = None,
    server_args: Annotated[list[str] | None, typer.Option(help='LANE="more arguments of its server"')] = None,
    attach: Annotated[list[str] | None, typer.Option(help="LANE=URL of a running server")] = None,
    concurrency: Annotated[str, typer.Option(help="closed loops: requests in flight")] = _comma(
        DEFAULT.concurrency
    ),
    rate: Annotated[str, typer.Option(help="open loops: requests a second, Poisson arrivals")] = "",
    loads: Annotated[
        list[str] | None,
        typer.Option(
            "--load",
            help="c=8,in=2048,out=8,prompts=100: another load, with its own lengths; or rate=4 for c=8; also turns=, "
            "prefix= and groups= (default: --input-len, --output-len, --turns, --prefix-len, --prefix-groups)",
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(help="shape of the gamma arrivals of open loops: 1 is Poisson, below 1 comes in bursts"),
    ] = DEFAULT.burstiness,
    ramp_up_strategy: Annotated[
        str | None, typer.Option(help="linear or exponential: an open loop whose rate changes")
    ] = None,
    ramp_up_start_rps: Annotated[float | None, typer.Option(help="requests a second at its start")] = None,
    ramp_up_end_rps: Annotated[float | None, typer.Option(help="requests a second at its end")] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="replay this JSONL file: timestamp, input_length, output_length, hash_ids (Mooncake)"
        ),
    ] = None,
    trace_speed: Annotated[
        str, typer.Option(help="replay it this many times faster; several values are several loads")
    ] = _comma(DEFAULT.trace_speed),
    trace_requests: Annotated[
        int | None, typer.Option(help="replay its first requests only (default: all)")
    ] = None,
    trace_block_size: Annotated[
        int, typer.Option(help="prompt tokens that one hash id stands for")
    ] = DEFAULT.trace_block_size,
    search: Annotated[
        list[str] | None,
        typer.Option(
            help="rate=1-64 or concurrency=1-256: find the highest load between these that meets --slo"
        ),
    ] = None,
    slo_attainment: Annotated[
        float, typer.Option(help="a load meets --slo if this share of its requests does")
    ] = DEFAULT.slo_attainment,
    turns: Annotated[
        int,
        typer.Option(help="turns of a conversation; each waits for the last answer and sends the history"),
    ] = DEFAULT.turns,
    prefix_len: Annotated[
        int, typer.Option(help="tokens that prompts share, in front of --input-len own ones")
    ] = DEFAULT.prefix_len,
    prefix_groups: Annotated[
        int, typer.Option(help="different shared prefixes, used in turn")
    ] = DEFAULT.prefix_groups,
    rounds: Annotated[int, typer.Option(help="interleaved over the lanes")] = DEFAULT.rounds,
    input_len: Annotated[int, typer.Option(help="tokens of a random prompt")] = DEFAULT.input_len,
    output_len: Annotated[int, typer.Option(help="tokens of an output")] = DEFAULT.output_len,
    num_prompts: Annotated[
        str,
        typer.Option(
            help="requests a round: one number, or one for each of --concurrency and --rate (default: by load)"
        ),
    ] = "",
    dataset: Annotated[str, typer.Option(help="random, sharegpt or prompts")] = DEFAULT.dataset,
    dataset_path: Annotated[str | None, typer.Option(help="file of sharegpt or prompts")] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="outputs for a file's prompts have exactly the requested length")
    ] = True,
    seed: Annotated[
        int | None,
        typer.Option(
            help="round r draws its prompts from seed + r (default: a new one, recorded in the rows)"
        ),
    ] = DEFAULT.seed,
    flush: Annotated[
        bool, typer.Option(help="empty the servers' prefix caches before every round, where they can")
    ] = DEFAULT.flush,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="after its rounds, run each load once more with the servers' profilers on"
        ),
    ] = DEFAULT.profile,
    base: Annotated[
        str | None, typer.Option(help="lane that others are compared with (default: the first)")
    ] = None,
    slo: Annotated[str, typer.Option(help="ttft:500,tpot:50,e2el:5000 in ms, for goodput")] = "",
    agreement_prompts: Annotated[int, typer.Option(help="0: no agreement phase")] = DEFAULT.agreement_prompts,
    agreement_len: Annotated[int, typer.Option(help="tokens compared at most")] = DEFAULT.agreement_len,
    min_agreement: Annotated[
        float, typer.Option(help="a +fk lane is wrong below this share of its host's self-agreement")
    ] = DEFAULT.min_agreement,
    resident: Annotated[int | None, typer.Option(help="servers running at once (default: what fits)")] = None,
    together: Annotated[
        bool,
        typer.Option("--together", help="start these at once: faster, but ready_s is then not comparable"),
    ] = DEFAULT.together,
    kv_tokens: Annotated[
        int | None, typer.Option(help="KV-cache tokens of every server (default: what the loads need)")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="tokens (default: the longest request)")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto: bfloat16, or float32 on a CPU that emulates it")
    ] = DEFAULT.dtype,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs per server")] = DEFAULT.tensor_parallel,
    ready_timeout: Annotated[
        float, typer.Option(help="seconds until a server must answer")
    ] = DEFAULT.ready_timeout,
    request_timeout: Annotated[float, typer.Option(help="seconds without a byte that end a request")] = 600.0,
    port: Annotated[
        int | None, typer.Option(help="of the first lane; the others follow (default: free ports)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run (default: fk-bench-runs/TIME)")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="continue this run; finished rounds are skipped")
    ] = None,
    json_only: _JSON = False,
) -> None:
    """Compare real servers on the same prompts: interleaved rounds, confidence intervals, token agreement, a report.

    Each lane is a server in its own process and environment; +fk is the same
    host with our kernels. Rounds alternate between the lanes, and intervals are
    over rounds. The run's folder gets report.html, results.csv and rows.jsonl.

    \b
    TTFT     time to first token: from sending a request to its first chunk
    TPOT     time per output token after the first: (E2EL - TTFT) / (tokens - 1)
    ITL      inter-token latency: the gaps between chunks
    E2EL     end-to-end latency: from sending a request to its last chunk
    goodput  requests per second that meet every limit of --slo
    p50      the median; p90, p95, p99 need 10, 20, 100 requests in a round

    \b
    Example, vLLM with and without our kernels at 1 and 32 requests in flight:
    fk-bench serve-compare --model meta-llama/Llama-3.1-8B --lanes vllm,vllm+fk \\
      --python vllm=.venv-vllm/bin/python --concurrency 1,32 --rounds 5
    """

    def given(name: str) -> bool:
        source = ctx.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    values: dict[str, Callable[[], Any]] = {
        "model": lambda: model,
        "lanes": lambda: comma_list("--lanes", lanes, str),
        "python": lambda: per_lane("--python", python or ()),
        "env": lambda: per_lane_env(env or ()),
        "server_args": lambda: per_lane_args(server_args or ()),
        "attach": lambda: per_lane("--attach", attach or ()),
        "concurrency": lambda: comma_list("--concurrency", concurrency, int),
        "rate": lambda: comma_list("--rate", rate, float),
        "loads": lambda: tuple(loads or ()),
        "num_prompts": lambda: comma_list("--num-prompts", num_prompts, int),
        "slo": lambda: slo_limits(slo),
        "search": lambda: tuple(search or ()),
        "trace_speed": lambda: comma_list("--trace-speed", trace_speed, float),
    }
    plain = {
        "rounds": rounds, "input_len": input_len, "output_len": output_len, "dataset": dataset, "seed": seed,
        "dataset_path": dataset_path, "ignore_eos": ignore_eos, "base": base, "agreement_prompts": agreement_prompts,
        "agreement_len": agreement_len, "min_agreement": min_agreement, "resident": resident, "kv_tokens": kv_tokens,
        "together": together, "max_model_len": max_model_len, "tensor_parallel": tensor_parallel, "dtype": dtype,
        "ready_timeout": ready_timeout, "burstiness": burstiness, "ramp_up_strategy": ramp_up_strategy,
        "ramp_up_start_rps": ramp_up_start_rps, "ramp_up_end_rps": ramp_up_end_rps, "trace": trace,
        "trace_requests": trace_requests, "trace_block_size": trace_block_size, "slo_attainment": slo_attainment,
        "turns": turns, "prefix_len": prefix_len, "prefix_groups": prefix_groups, "flush": flush, "profile": profile,
        "request_timeout": request_timeout, "port": port,
    }  # fmt: skip
    try:
        chosen = {k: v() for k, v in values.items() if given(k)} | {
            k: v for k, v in plain.items() if given(k)
        }
        others = {"rate", "ramp_up_end_rps", "trace", "search"} & chosen.keys()
        if others and "concurrency" not in chosen and resume is None:
            chosen["concurrency"] = ()
        config, folder = _configured(chosen, out, resume)
    except ConfigError as error:
        _fail("serve-compare", str(error))
    _compare(config, folder, resume is not None, json_only)


def _configured(chosen: dict[str, Any], out: Path | None, resume: Path | None) -> tuple[CompareConfig, Path]:
    if resume is not None:
        if out is not None and out.resolve() != resume.resolve():
            raise ConfigError("--resume continues in its own folder: leave --out out")
        recorded = CompareConfig.load(resume / "run.json")
        for name in ("model", "trace"):
            if chosen.get(name) and Path(chosen[name]).exists():
                chosen[name] = str(Path(chosen[name]).absolute())
        return resumed(recorded, chosen), resume
    if not chosen.get("model"):
        from fk_bench.serving.small_model import small_model

        chosen["model"] = str(small_model())
    folder = out or Path("fk-bench-runs") / time.strftime("serve-compare-%Y%m%d-%H%M%S")
    return CompareConfig(**chosen), folder


def _compare(config: CompareConfig, folder: Path, resume: bool, json_only: bool) -> None:
    from rich.console import Console

    from fk_bench.serving.lanes import LaneError, parse_lanes
    from fk_bench.serving.load.datasets import DatasetError
    from fk_bench.serving.process import ServerError, check_port
    from fk_bench.serving.serve_compare import Compare, prepare

    command = "serve-compare"
    try:
        with signals_raise():
            found = parse_lanes(config.lanes, config.python, config.env, config.server_args, config.attach)
            if config.port is not None:
                for i, lane in enumerate(found):
                    if lane.url is None:
                        check_port(config.port + i)
            config = prepare(config, folder, resume)
            compare = Compare(config, found, folder, Console(stderr=True))
            result = compare.run()
    except (ConfigError, DatasetError, LaneError, ServerError) as error:
        _fail(command, str(error))
    except Interrupted as error:
        _fail(
            command,
            f"{error}; continue with: fk-bench serve-compare --resume {folder}",
            128 + error.number,
        )
    if not json_only:
        from fk_bench.serving.report import terminal

        terminal.show(compare.record.rows)
        print(f"report: {result['report']}\ntable:  {result['csv']}\n")
    last_line(result)
    if not result["ok"]:
        raise SystemExit(1)


def diff_command(
    run_a: Annotated[Path, typer.Argument(help="the run to compare with: its folder or its rows.jsonl")],
    run_b: Annotated[Path, typer.Argument(help="the run to evaluate")],
    fail_under: Annotated[
        float, typer.Option(help="exit status 1 if a ratio is below this (1.0: as good as RUN_A)")
    ] = 0.0,
    metrics: Annotated[str, typer.Option(help="comma-separated (default: the headline metrics)")] = "",
    json_only: _JSON = False,
) -> None:
    """The ratio of two runs per lane, load and metric, or per kernel case, with confidence intervals; above 1 is
    better."""
    from fk_bench.serving import diff

    try:
        names = comma_list("--metrics", metrics, str) or diff.METRICS
        result = diff.compare(run_a, run_b, names, fail_under)
    except ConfigError as error:
        _fail("diff", str(error))
    if not json_only:
        table(f"{run_b} against {run_a}; above 1 is better", *diff.shown(result))
        if result.get("mark"):
            print(result["mark"])
        for problem in result["problems"]:
            print(problem)
    last_line(result)
    if not result["ok"]:
        raise SystemExit(1)


def report_command(
    run: Annotated[Path, typer.Argument(help="folder of a run, or its rows.jsonl")],
    json_only: _JSON = False,
) -> None:
    """Render RUN/report.html again from RUN/rows.jsonl."""
    from fk_bench.serving.report import page

    try:
        path = page.render(run if run.is_dir() else run.parent)
    except ConfigError as error:
        _fail("report", str(error))
    if not json_only:
        print(f"report: {path}")
    last_line({"command": "report", "ok": True, "report": str(path)})
