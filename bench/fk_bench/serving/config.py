"""The options of serve-compare: one frozen dataclass with the defaults of the flags, saved in RUN/run.json."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fk_bench.core.terminal.flags import ConfigError, comma_list, per_lane
from fk_bench.serving.load.metrics import parse_slo

DTYPES = ("auto", "bfloat16", "float16", "float32")
RAMPS = ("linear", "exponential")
_KINDS = {"c": "concurrency", "rate": "rate"}  # keys of --load
_NUMBERS = ("in", "out", "turns", "prefix", "groups", "prompts")
_SHAPES = {"in", "out", "turns", "prefix", "groups"}  # keys of --load that need random prompts
_NAMES = {
    "concurrency": "c", "rate": "rate", "ramp": "ramp", "trace": "trace", "max_concurrency": "max-c",
    "max_rate": "max-rate",
}  # fmt: skip
OWN = "own"  # key in a row's case: the fields of a level that are its own and not the run's


@dataclass(frozen=True)
class Level:
    """One load.

    kind       'concurrency' (a closed loop), 'rate' (an open loop), 'ramp' (an open loop whose rate changes), 'trace'
               (recorded arrival times), 'max_concurrency' or 'max_rate' (a search for the highest load within the SLOs)
    value      requests in flight, requests a second, the last rate of a ramp, the speed of a trace, the upper limit of
               a search
    input_len, output_len  tokens of a prompt (of a turn, without the shared prefix) and of an output; both None if they
               are the run's
    start      first rate of a ramp, lower limit of a search
    turns      of a conversation; None if they are the run's
    prefix     (tokens that prompts share, number of different prefixes); None if they are the run's
    prompts    requests (or conversations) of a round that --load gives; ignored in comparisons, because rows do not
               have it
    """

    kind: str
    value: float
    input_len: int | None = None
    output_len: int | None = None
    prompts: int | None = field(default=None, compare=False)
    start: float | None = None
    turns: int | None = None
    prefix: tuple[int, int] | None = None

    @property
    def own_lengths(self) -> bool:
        """Whether its requests have the run's lengths."""
        return self.input_len is None

    @property
    def plain(self) -> bool:
        """Whether it is one point of the run's curve: a constant load of the run's requests."""
        mine = self.own_lengths and self.turns is None and self.prefix is None
        return mine and self.kind in ("concurrency", "rate")

    @property
    def search(self) -> str | None:
        """'concurrency' or 'rate' for a search, else None."""
        return self.kind.removeprefix("max_") if self.kind.startswith("max_") else None

    @property
    def label(self) -> str:
        """'c=8', or 'c=8,2048-8,turns=3' with its own lengths and turns; used in file names."""
        value = f"{self.value:g}" if self.start is None else f"{self.start:g}-{self.value:g}"
        parts = [f"{_NAMES[self.kind]}={value}"]
        parts += [] if self.own_lengths else [f"{self.input_len}-{self.output_len}"]
        parts += [] if self.turns is None else [f"turns={self.turns}"]
        parts += [] if self.prefix is None else [f"prefix={self.prefix[0]}x{self.prefix[1]}"]
        return ",".join(parts)

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: the run's curve first."""
        shape = self.input_len or 0, self.output_len or 0, self.turns or 0, self.prefix or (0, 0)
        return not self.plain, self.kind, *shape, self.value

    @property
    def in_flight(self) -> int:
        """Requests that a server must hold at once; 64 for an open loop."""
        return int(self.value) if self.kind.endswith("concurrency") else 64

    @property
    def warmup(self) -> int:
        """Requests of the warm-up: as many as are in flight at once, at most 32."""
        return min(32, int(self.value)) if self.kind.endswith("concurrency") else 4

    def default_prompts(self) -> int:
        """4 if one by one, 2 waves (at least 16) at a concurrency, 10 seconds (at least 16) of a rate."""
        if self.kind == "ramp":
            return max(16, math.ceil(5 * (self.value + (self.start or 0.0))))
        if self.kind == "rate":
            return max(16, math.ceil(10 * self.value))
        return 4 if self.value <= 1 else max(16, 2 * int(self.value))

    def probe(self, value: float) -> Level:
        """The constant load that a search tries."""
        assert self.search is not None
        return Level(
            self.search, value, self.input_len, self.output_len, self.prompts, None, self.turns, self.prefix
        )

    def to_case(self) -> dict[str, Any]:
        """The fields that a row's case needs in addition to kind, value and lengths; from_case reads them."""
        own = {"start": self.start, "turns": self.turns, "prefix": self.prefix}
        return {k: v for k, v in own.items() if v is not None}

    @classmethod
    def from_case(cls, case: Mapping[str, Any], input_len: int | None, output_len: int | None) -> Level:
        own = case.get(OWN, {})
        prefix = tuple(own["prefix"]) if "prefix" in own else None
        return cls(
            str(case["load"]), float(case["value"]), input_len, output_len, start=own.get("start"),
            turns=own.get("turns"), prefix=prefix,
        )  # fmt: skip


@dataclass(frozen=True)
class CompareConfig:
    """The options of one serve-compare run. Lengths in tokens, times in seconds, SLOs in milliseconds.

    loads         texts of --load, parsed by load_level; search: texts of --search, parsed by search_level
    seed          None: prepare() draws one
    trace_requests  of a trace that are replayed; None: prepare() counts them
    """

    model: str = ""
    lanes: tuple[str, ...] = ("fastkernels",)
    concurrency: tuple[int, ...] = (1, 8)
    rate: tuple[float, ...] = ()
    loads: tuple[str, ...] = ()
    burstiness: float = 1.0
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    trace: str | None = None
    trace_speed: tuple[float, ...] = (1.0,)
    trace_requests: int | None = None
    trace_block_size: int = 512
    search: tuple[str, ...] = ()
    slo_attainment: float = 0.95
    turns: int = 1
    prefix_len: int = 0
    prefix_groups: int = 1
    rounds: int = 3
    input_len: int = 128
    output_len: int = 32
    num_prompts: tuple[int, ...] = ()
    dataset: str = "random"
    dataset_path: str | None = None
    ignore_eos: bool = True
    seed: int | None = None
    flush: bool = True
    profile: bool = False
    base: str | None = None
    slo: Mapping[str, float] = field(default_factory=dict)
    agreement_prompts: int = 6
    agreement_len: int = 32
    min_agreement: float = 0.5
    resident: int | None = None
    together: bool = False
    kv_tokens: int | None = None
    max_model_len: int | None = None
    dtype: str = "auto"
    tensor_parallel: int = 1
    ready_timeout: float = 600.0
    request_timeout: float = 600.0
    port: int | None = None
    python: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    server_args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attach: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "rounds", "input_len", "output_len", "tensor_parallel", "turns", "prefix_groups", "trace_block_size",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} must be 1 or more, got {getattr(self, name)}")
        for name in ("concurrency", "rate", "num_prompts", "trace_speed"):
            if any(not v > 0 for v in getattr(self, name)):
                raise ConfigError(f"{_flag(name)}: values must be above 0, got {getattr(self, name)}")
        if self.agreement_prompts < 0 or self.agreement_len < 1:
            raise ConfigError("--agreement-prompts must be 0 or more, --agreement-len 1 or more")
        if not self.levels:
            raise ConfigError("no load: give --concurrency, --rate, --load, --trace or --search")
        labels = [level.label for level in self.levels]
        if len(set(labels)) < len(labels):
            raise ConfigError(f"--concurrency, --rate, --load: a load is given twice: {', '.join(labels)}")
        counted = len(self.concurrency) + len(self.rate)
        if len(self.num_prompts) not in (0, 1, counted):
            raise ConfigError(
                f"--num-prompts: one number, or one for each of {counted} loads, got {len(self.num_prompts)}"
                + (" (a --load has its own: prompts=N)" if self.loads else "")
            )
        self._check_shapes()
        self._check_arrivals()
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: unknown dtype {self.dtype!r}. Known: {', '.join(DTYPES)}.")
        if self.resident is not None and self.resident < 1:
            raise ConfigError(f"--resident must be 1 or more, got {self.resident}")
        if self.base is not None and self.base not in self.lanes:
            raise ConfigError(f"--base: lane {self.base!r} is not one of --lanes {','.join(self.lanes)}")

    def _check_shapes(self) -> None:
        if self.prefix_len < 0:
            raise ConfigError(f"--prefix-len must be 0 or more, got {self.prefix_len}")
        if self.prefix_groups > 1 and not self.prefix_len:
            raise ConfigError(
                "--prefix-groups needs --prefix-len, the tokens that the prompts of a group share"
            )
        if self.dataset == "random":
            return
        for flag, given in (
            ("--turns", self.turns > 1),
            ("--prefix-len", self.prefix_len),
            ("--search", self.search),
        ):
            if given:
                raise ConfigError(f"{flag} needs --dataset random, got --dataset {self.dataset}")
        for text in self.loads:
            if own := sorted(_SHAPES & _pairs(text).keys()):
                raise ConfigError(
                    f"--load {text}: {own[0]}= needs --dataset random: the prompts of --dataset {self.dataset} have "
                    "their own lengths. Leave it out, or choose --dataset random."
                )

    def _check_arrivals(self) -> None:
        kinds = {level.kind for level in self.levels}
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness must be above 0, got {self.burstiness:g}")
        if self.burstiness != 1 and not kinds & {"rate", "ramp", "max_rate"}:
            raise ConfigError(
                "--burstiness changes the arrivals of a rate: give --rate, a ramp or --search rate=..."
            )
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if any(v is not None for v in ramp):
            if None in ramp:
                raise ConfigError(
                    "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
                )
            if self.ramp_up_strategy not in RAMPS:
                raise ConfigError(
                    f"--ramp-up-strategy: unknown {self.ramp_up_strategy!r}. Known: {', '.join(RAMPS)}."
                )
            if not all(0 < (v or 0) < math.inf for v in ramp[1:]):  # type: ignore[operator]
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps must be above 0")
        if self.trace_requests is not None and self.trace_requests < 1:
            raise ConfigError(f"--trace-requests must be 1 or more, got {self.trace_requests}")
        if self.search and not self.slo:
            raise ConfigError(
                "--search finds the highest load that meets SLOs: give --slo, as in ttft:500,tpot:50"
            )
        if not 0 < self.slo_attainment <= 1:
            raise ConfigError(f"--slo-attainment must be above 0 and at most 1, got {self.slo_attainment:g}")

    @property
    def levels(self) -> tuple[Level, ...]:
        """The loads of --concurrency, --rate, --load, the ramp, the trace and --search, in this order."""
        found = [Level("concurrency", c) for c in self.concurrency]
        found += [Level("rate", r) for r in self.rate]
        found += [load_level(text, self.input_len, self.output_len) for text in self.loads]
        if self.ramp_up_end_rps is not None:
            found.append(Level("ramp", self.ramp_up_end_rps, start=self.ramp_up_start_rps))
        if self.trace is not None:
            found += [Level("trace", speed) for speed in self.trace_speed]
        return (*found, *(search_level(text) for text in self.search))

    def lengths(self, level: Level) -> tuple[int, int]:
        """Tokens of a prompt and of an output."""
        return level.input_len or self.input_len, level.output_len or self.output_len

    def turns_of(self, level: Level) -> int:
        """Turns of a conversation; 1: single requests."""
        return 1 if level.kind == "trace" else level.turns or self.turns

    def prefix_of(self, level: Level) -> tuple[int, int]:
        """(tokens that prompts share, number of different prefixes)."""
        if level.kind == "trace":
            return 0, 1
        return (self.prefix_len, self.prefix_groups) if level.prefix is None else level.prefix

    def shares_prefixes(self, level: Level) -> bool:
        """Whether prompts of one round share a prefix, so that a prefix cache is meant to hit."""
        return level.kind == "trace" or self.turns_of(level) > 1 or self.prefix_of(level)[0] > 0

    def prompts_at(self, level: Level) -> int:
        """Requests (or conversations) of a round: from its --load, from --num-prompts, or the default.

        A list of --num-prompts applies to --concurrency and --rate, a single number to all but a trace.
        """
        if level.kind == "trace":
            assert self.trace_requests is not None, "prepare() counts the requests of the trace"
            return self.trace_requests
        at = self.levels.index(level) if level in self.levels else None
        given = level.prompts if at is None else self.levels[at].prompts
        if given is not None:
            return given
        if len(self.num_prompts) > 1:
            of_curve = at is not None and at < len(self.num_prompts)
            return self.num_prompts[at or 0] if of_curve else level.default_prompts()
        return self.num_prompts[0] if self.num_prompts else level.default_prompts()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> CompareConfig:
        """The options in RUN/run.json. Raises ConfigError if it is missing or not ours."""
        try:
            raw = json.loads(path.read_text())
            known = {f.name for f in fields(cls)}
            given: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k in known
            }
            given["server_args"] = {k: tuple(v) for k, v in raw.get("server_args", {}).items()}
            return cls(**given)
        except FileNotFoundError:
            raise ConfigError(f"{path.parent} is not a run of serve-compare: it has no {path.name}") from None
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None


MAY_CHANGE = (
    "rounds",
    "python",
    "env",
    "server_args",
    "attach",
    "ready_timeout",
    "request_timeout",
    "port",
    "resident",
    "together",
)


def resumed(recorded: CompareConfig, given: Mapping[str, Any]) -> CompareConfig:
    """The recorded options with those of the command line. Options that define the measurement may not change."""
    for name, value in given.items():
        if name not in MAY_CHANGE and getattr(recorded, name) != value:
            raise ConfigError(
                f"--resume: {_flag(name)} was {_text(getattr(recorded, name))} in that run and is {_text(value)} now. "
                "Leave it out, or start another run."
            )
    return replace(recorded, **{k: v for k, v in given.items() if k in MAY_CHANGE})


def _flag(name: str) -> str:
    return "--load" if name == "loads" else "--" + name.replace("_", "-")


def _text(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def load_level(text: str, input_len: int, output_len: int) -> Level:
    """'c=8,in=2048,out=8,turns=3,prompts=100' -> Level. Missing values, and lengths equal to the run's, are the run's.

    Raises ConfigError for an unknown, missing or repeated key, and for an invalid value.
    """
    pairs = _pairs(text)
    kinds = _KINDS.keys() & pairs.keys()
    if len(kinds) != 1:
        raise ConfigError(
            f"--load {text}: give one of c=N (requests in flight) and rate=N (requests a second)"
        )
    (kind,) = kinds
    value = _whole(text, pairs, "c") if kind == "c" else _rate(f"--load {text}: rate=", pairs["rate"])
    assert value is not None
    lengths: tuple[int | None, int | None]
    lengths = _whole(text, pairs, "in") or input_len, _whole(text, pairs, "out") or output_len
    if lengths == (input_len, output_len):
        lengths = (None, None)
    prefix, groups = _whole(text, pairs, "prefix", least=0), _whole(text, pairs, "groups")
    if groups is not None and not prefix:
        raise ConfigError(
            f"--load {text}: groups= needs prefix=N, the tokens that the prompts of a group share"
        )
    shared = None if prefix is None else (prefix, groups or 1)
    prompts, turns = _whole(text, pairs, "prompts"), _whole(text, pairs, "turns")
    return Level(_KINDS[kind], value, lengths[0], lengths[1], prompts, turns=turns, prefix=shared)


def _pairs(text: str) -> dict[str, str]:
    """{key: value} of a --load as typed."""
    known, pairs = [*_KINDS, *_NUMBERS], {}
    for part in text.split(","):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or key not in known:
            raise ConfigError(
                f"--load {text}: {part.strip()!r} is not KEY=VALUE of a known key. Known: {', '.join(known)}."
            )
        if key in pairs:
            raise ConfigError(f"--load {text}: {key}= is given twice")
        pairs[key] = value
    return pairs


def search_level(text: str) -> Level:
    """'rate=1-64' or 'concurrency=1-256' -> the Level of a search. Raises ConfigError."""
    key, equals, limits = (p.strip() for p in text.partition("="))
    low, dash, high = limits.partition("-")
    if key not in ("rate", "concurrency") or not equals or not dash:
        raise ConfigError(
            f"--search {text}: expected rate=LOW-HIGH or concurrency=LOW-HIGH, as in rate=1-64: the limits between "
            "which the highest load is searched"
        )
    values = [_rate(f"--search {text}: {key}=", v) for v in (low, high)]
    if key == "concurrency" and any(v != int(v) for v in values):
        raise ConfigError(f"--search {text}: a concurrency is a whole number")
    if not values[0] < values[1]:
        raise ConfigError(f"--search {text}: the first limit must be below the second")
    return Level(f"max_{key}", values[1], start=values[0])


def _whole(text: str, pairs: Mapping[str, str], key: str, least: int = 1) -> int | None:
    if key not in pairs:
        return None
    (value,) = comma_list(f"--load {text}: {key}=", pairs[key], int) or (least - 1,)
    if value < least:
        raise ConfigError(f"--load {text}: {key}= must be {least} or more, got {pairs[key] or 'nothing'}")
    return value


def _rate(flag: str, given: str) -> float:
    (value,) = comma_list(flag.rstrip("="), given, float) or (0.0,)
    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} must be above 0, got {given or 'nothing'}")
    return value


def per_lane_args(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """['vllm=--max-num-seqs 4'] -> {'vllm': ('--max-num-seqs', '4')}. Raises ConfigError."""
    found: dict[str, tuple[str, ...]] = {}
    for lane, text in ((i, v) for item in items for i, v in per_lane("--server-args", [item]).items()):
        try:
            found[lane] = (*found.get(lane, ()), *shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"--server-args {lane}: {error}: {text!r}") from None
    return found


def slo_limits(text: str) -> dict[str, float]:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
