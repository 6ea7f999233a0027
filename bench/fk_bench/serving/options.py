"""The options of `serve-compare`: a class for each panel of its help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from fk_bench.core.terminal import panels
from fk_bench.core.terminal.flags import comma_list, per_lane, per_lane_env
from fk_bench.serving.config import CompareConfig, per_lane_args, slo_limits

DEFAULT = CompareConfig()
JSON = Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")]


def _comma(values: tuple[Any, ...]) -> str:
    return ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)


@dataclass(frozen=True)
class Servers:
    PANEL: ClassVar[str] = "Servers"

    model: Annotated[
        str, typer.Option(help="a directory, or a model of the hub (default: a tiny random Llama)")
    ] = ""
    lanes: Annotated[str, typer.Option(help="vllm, vllm+fk, sglang, sglang+fk, fastkernels")] = _comma(
        DEFAULT.lanes
    )
    python: Annotated[
        list[str] | None, typer.Option(help="LANE=PATH of its interpreter (a +fk lane uses its host's)")
    ] = None
    env: Annotated[list[str] | None, typer.Option(help="LANE:KEY=VALUE for the server's environment")] = None
    server_args: Annotated[list[str] | None, typer.Option(help='LANE="more arguments of its server"')] = None
    attach: Annotated[list[str] | None, typer.Option(help="LANE=URL of a running server")] = None
    base: Annotated[
        str | None, typer.Option(help="lane that others are compared with (default: the first)")
    ] = None
    resident: Annotated[int | None, typer.Option(help="servers running at once (default: what fits)")] = None
    together: Annotated[
        bool,
        typer.Option("--together", help="start these at once: faster, but ready_s is then not comparable"),
    ] = DEFAULT.together
    kv_tokens: Annotated[
        int | None, typer.Option(help="KV-cache tokens of every server (default: what the loads need)")
    ] = None
    max_model_len: Annotated[int | None, typer.Option(help="tokens (default: the longest request)")] = None
    dtype: Annotated[str, typer.Option(help="auto: bfloat16, or float32 on a CPU that emulates it")] = (
        DEFAULT.dtype
    )
    tensor_parallel: Annotated[int, typer.Option(help="GPUs per server")] = DEFAULT.tensor_parallel
    ready_timeout: Annotated[float, typer.Option(help="seconds until a server must answer")] = (
        DEFAULT.ready_timeout
    )
    port: Annotated[
        int | None, typer.Option(help="of the first lane; the others follow (default: free ports)")
    ] = None


@dataclass(frozen=True)
class Load:
    PANEL: ClassVar[str] = "Load"

    concurrency: Annotated[str, typer.Option(help="closed loops: requests in flight")] = _comma(
        DEFAULT.concurrency
    )
    rate: Annotated[str, typer.Option(help="open loops: requests a second, Poisson arrivals")] = ""
    loads: Annotated[
        list[str] | None,
        typer.Option(
            "--load",
            help="c=8,in=2048,out=8,prompts=100: another load, with its own lengths; or rate=4 for c=8; also turns=, "
            "prefix= and groups= (default: --input-len, --output-len, --turns, --prefix-len, --prefix-groups)",
        ),
    ] = None
    rounds: Annotated[int, typer.Option(help="interleaved over the lanes")] = DEFAULT.rounds
    num_prompts: Annotated[
        str,
        typer.Option(
            help="requests a round: one number, or one for each of --concurrency and --rate (default: by load)"
        ),
    ] = ""
    flush: Annotated[
        bool, typer.Option(help="empty the servers' prefix caches before every round, where they can")
    ] = DEFAULT.flush
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="after its rounds, run each load once more with the servers' profilers on"
        ),
    ] = DEFAULT.profile
    slo: Annotated[str, typer.Option(help="ttft:500,tpot:50,e2el:5000 in ms, for goodput")] = ""
    request_timeout: Annotated[float, typer.Option(help="seconds without a byte that end a request")] = 600.0


@dataclass(frozen=True)
class Arrivals:
    PANEL: ClassVar[str] = "Load: arrivals, traces, search"

    burstiness: Annotated[
        float,
        typer.Option(help="shape of the gamma arrivals of open loops: 1 is Poisson, below 1 comes in bursts"),
    ] = DEFAULT.burstiness
    ramp_up_strategy: Annotated[
        str | None, typer.Option(help="linear or exponential: an open loop whose rate changes")
    ] = None
    ramp_up_start_rps: Annotated[float | None, typer.Option(help="requests a second at its start")] = None
    ramp_up_end_rps: Annotated[float | None, typer.Option(help="requests a second at its end")] = None
    trace: Annotated[
        str | None,
        typer.Option(
            help="replay this JSONL file: timestamp, input_length, output_length, hash_ids (Mooncake)"
        ),
    ] = None
    trace_speed: Annotated[
        str, typer.Option(help="replay it this many times faster; several values are several loads")
    ] = _comma(DEFAULT.trace_speed)
    trace_requests: Annotated[
        int | None, typer.Option(help="replay its first requests only (default: all)")
    ] = None
    trace_block_size: Annotated[int, typer.Option(help="prompt tokens that one hash id stands for")] = (
        DEFAULT.trace_block_size
    )
    search: Annotated[
        list[str] | None,
        typer.Option(
            help="rate=1-64 or concurrency=1-256: find the highest load between these that meets --slo"
        ),
    ] = None
    slo_attainment: Annotated[
        float, typer.Option(help="a load meets --slo if this share of its requests does")
    ] = DEFAULT.slo_attainment


@dataclass(frozen=True)
class Prompts:
    PANEL: ClassVar[str] = "Prompts"

    turns: Annotated[
        int,
        typer.Option(help="turns of a conversation; each waits for the last answer and sends the history"),
    ] = DEFAULT.turns
    prefix_len: Annotated[
        int, typer.Option(help="tokens that prompts share, in front of --input-len own ones")
    ] = DEFAULT.prefix_len
    prefix_groups: Annotated[int, typer.Option(help="different shared prefixes, used in turn")] = (
        DEFAULT.prefix_groups
    )
    input_len: Annotated[int, typer.Option(help="tokens of a random prompt")] = DEFAULT.input_len
    output_len: Annotated[int, typer.Option(help="tokens of an output")] = DEFAULT.output_len
    dataset: Annotated[str, typer.Option(help="random, sharegpt or prompts")] = DEFAULT.dataset
    dataset_path: Annotated[str | None, typer.Option(help="file of sharegpt or prompts")] = None
    ignore_eos: Annotated[
        bool, typer.Option(help="outputs for a file's prompts have exactly the requested length")
    ] = True
    seed: Annotated[
        int | None,
        typer.Option(
            help="round r draws its prompts from seed + r (default: a new one, recorded in the rows)"
        ),
    ] = DEFAULT.seed


@dataclass(frozen=True)
class Agreement:
    PANEL: ClassVar[str] = "Token agreement"

    agreement_prompts: Annotated[int, typer.Option(help="0: no agreement phase")] = DEFAULT.agreement_prompts
    agreement_len: Annotated[int, typer.Option(help="tokens compared at most")] = DEFAULT.agreement_len
    min_agreement: Annotated[
        float, typer.Option(help="a +fk lane is wrong below this share of its host's self-agreement")
    ] = DEFAULT.min_agreement


@dataclass(frozen=True)
class Output:
    PANEL: ClassVar[str] = "Output"

    out: Annotated[Path | None, typer.Option(help="folder of the run (default: fk-bench-runs/TIME)")] = None
    resume: Annotated[Path | None, typer.Option(help="continue this run; finished rounds are skipped")] = None
    json_only: JSON = False


# From the text of an option to the field of CompareConfig; the others are the same
PARSERS: dict[str, Callable[[Any], Any]] = {
    "lanes": lambda text: comma_list("--lanes", text, str),
    "python": lambda texts: per_lane("--python", texts),
    "env": per_lane_env,
    "server_args": per_lane_args,
    "attach": lambda texts: per_lane("--attach", texts),
    "concurrency": lambda text: comma_list("--concurrency", text, int),
    "rate": lambda text: comma_list("--rate", text, float),
    "loads": tuple,
    "num_prompts": lambda text: comma_list("--num-prompts", text, int),
    "slo": slo_limits,
    "search": tuple,
    "trace_speed": lambda text: comma_list("--trace-speed", text, float),
}


def chosen(context: typer.Context, *groups: Any) -> dict[str, Any]:
    """The fields of CompareConfig that are on the command line. Raises ConfigError."""
    given = panels.given(context, *groups)
    return {name: PARSERS[name](value) if name in PARSERS else value for name, value in given.items()}
