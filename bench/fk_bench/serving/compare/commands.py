"""The flags of `serve-compare`, `diff` and `report`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fk_bench.core import machine
from fk_bench.core.gpus import check_ranks
from fk_bench.core.runs import missing
from fk_bench.core.terminal.flags import ConfigError, comma_list
from fk_bench.core.terminal.output import last_line, table
from fk_bench.core.terminal.panels import grouped
from fk_bench.core.terminal.signals import EndedBySignal, signals_raise
from fk_bench.serving import options
from fk_bench.serving.config import CompareConfig, resumed
from fk_bench.serving.options import JSON


def _fail(command: str, message: str, status: int = 2, **more: Any) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    last_line({"command": command, "ok": False, "error": message.splitlines()[0], **more})
    raise SystemExit(status)


@grouped
def serve_compare_command(
    ctx: typer.Context,
    servers: options.Servers,
    load: options.Load,
    arrivals: options.Arrivals,
    prompts: options.Prompts,
    agreement: options.Agreement,
    output: options.Output,
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
    try:
        chosen = options.chosen(ctx, servers, load, arrivals, prompts, agreement)
        others = {"rate", "ramp_up_end_rps", "trace", "search"} & chosen.keys()
        if others and "concurrency" not in chosen and output.resume is None:
            chosen["concurrency"] = ()
        config, folder = _configured(chosen, output.out, output.resume)
    except ConfigError as error:
        _fail("serve-compare", str(error))
    _compare(config, folder, output.resume is not None, output.json_only)


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
        from fk_bench.core.small_model import small_model

        chosen["model"] = str(small_model())
    folder = out or Path("fk-bench-runs") / time.strftime("serve-compare-%Y%m%d-%H%M%S")
    return CompareConfig(**chosen), folder


def _compare(config: CompareConfig, folder: Path, resume: bool, json_only: bool) -> None:
    from rich.console import Console

    from fk_bench.serving.compare.serve_compare import Compare, prepare
    from fk_bench.serving.lanes import LaneError, parse_lanes
    from fk_bench.serving.load.datasets import DatasetError
    from fk_bench.serving.process import ServerError, check_port

    command = "serve-compare"
    try:
        with signals_raise():
            found = parse_lanes(config.lanes, config.python, config.env, config.server_args, config.attach)
            if any(lane.url is None for lane in found):
                check_ranks("--tensor-parallel", config.tensor_parallel, machine.machine().gpus)
            if config.port is not None:
                for i, lane in enumerate(found):
                    if lane.url is None:
                        check_port(config.port + i)
            config = prepare(config, folder, resume)
            compare = Compare(config, found, folder, Console(stderr=True))
            result = compare.run()
    except (ConfigError, DatasetError, LaneError, ServerError) as error:
        _fail(command, str(error))
    except EndedBySignal as error:
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
    json_only: JSON = False,
) -> None:
    """The ratio of two runs per lane, load and metric, per kernel case, or per task of agents, with confidence
    intervals; above 1 is better."""
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
    json_only: JSON = False,
) -> None:
    """Render RUN/report.html again from RUN/rows.jsonl."""
    folder = run if run.is_dir() else run.parent
    if not (run.exists() and (folder / "rows.jsonl").is_file()):
        _fail("report", missing(run))
    from fk_bench.serving.report import page

    try:
        path = page.render(folder)
    except ConfigError as error:
        _fail("report", str(error))
    if not json_only:
        print(f"report: {path}")
    last_line({"command": "report", "ok": True, "report": str(path)})
