"""The options of serve-compare: one frozen dataclass with the defaults of the flags, saved in RUN/run.json."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fk_bench.serving.metrics import parse_slo

T = TypeVar("T")
DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_KINDS = {"c": "concurrency", "rate": "rate"}  # keys of --load
LOAD_LENGTHS = {"in", "out"}


class ConfigError(ValueError):
    """An invalid option; the message is one line for the user."""


@dataclass(frozen=True)
class Level:
    """One load: a closed loop of `value` requests at a time, or an open loop of `value` requests a second.

    input_len, output_len  tokens of a prompt and of an output; both None if they are the run's
    prompts                requests of a round that --load gives; ignored in comparisons, because rows do not have it
    """

    kind: str  # 'concurrency' or 'rate'
    value: float
    input_len: int | None = None
    output_len: int | None = None
    prompts: int | None = field(default=None, compare=False)

    @property
    def own_lengths(self) -> bool:
        """Whether its requests have the run's lengths."""
        return self.input_len is None

    @property
    def label(self) -> str:
        """'c=8', or 'c=8,2048-8' with other lengths; used in file names."""
        load = f"c={self.value:g}" if self.kind == "concurrency" else f"rate={self.value:g}"
        return load if self.own_lengths else f"{load},{self.input_len}-{self.output_len}"

    @property
    def order(self) -> tuple[bool, str, int, int, float]:
        """Sort key: the run's lengths first."""
        return not self.own_lengths, self.kind, self.input_len or 0, self.output_len or 0, self.value

    @property
    def in_flight(self) -> int:
        """Requests that a server must hold at once; 64 for an open loop."""
        return int(self.value) if self.kind == "concurrency" else 64

    @property
    def warmup(self) -> int:
        """Requests of the warm-up: as many as are in flight at once, at most 32."""
        return min(32, int(self.value)) if self.kind == "concurrency" else 4

    def default_prompts(self) -> int:
        """4 if one by one, 2 waves (at least 16) at a concurrency, 10 seconds (at least 16) of a rate."""
        if self.kind == "rate":
            return max(16, math.ceil(10 * self.value))
        return 4 if self.value <= 1 else max(16, 2 * int(self.value))


@dataclass(frozen=True)
class CompareConfig:
    """The options of one serve-compare run. Lengths in tokens, times in seconds, SLOs in milliseconds.

    loads  texts of --load, parsed by load_level
    """

    model: str = ""
    lanes: tuple[str, ...] = ("fastkernels",)
    concurrency: tuple[int, ...] = (1, 8)
    rate: tuple[float, ...] = ()
    loads: tuple[str, ...] = ()
    rounds: int = 3
    input_len: int = 128
    output_len: int = 32
    num_prompts: tuple[int, ...] = ()
    dataset: str = "random"
    dataset_path: str | None = None
    ignore_eos: bool = True
    seed: int = 0
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
        for name in ("rounds", "input_len", "output_len", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} must be 1 or more, got {getattr(self, name)}")
        for name in ("concurrency", "rate", "num_prompts"):
            if any(not v > 0 for v in getattr(self, name)):
                raise ConfigError(f"{_flag(name)}: values must be above 0, got {getattr(self, name)}")
        if self.agreement_prompts < 0 or self.agreement_len < 1:
            raise ConfigError("--agreement-prompts must be 0 or more, --agreement-len 1 or more")
        if not self.levels:
            raise ConfigError("no load: give --concurrency, --rate or --load")
        labels = [level.label for level in self.levels]
        if len(set(labels)) < len(labels):
            raise ConfigError(f"--concurrency, --rate, --load: a load is given twice: {', '.join(labels)}")
        counted = len(self.concurrency) + len(self.rate)
        if len(self.num_prompts) not in (0, 1, counted):
            raise ConfigError(
                f"--num-prompts: one number, or one for each of {counted} loads, got {len(self.num_prompts)}"
                + (" (a --load has its own: prompts=N)" if self.loads else "")
            )
        if self.dataset != "random":
            for text in self.loads:
                if LOAD_LENGTHS & _pairs(text).keys():
                    raise ConfigError(
                        f"--load {text}: in= and out= need --dataset random: the prompts of --dataset "
                        f"{self.dataset} have their own lengths. Leave them out, or choose --dataset random."
                    )
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: unknown dtype {self.dtype!r}. Known: {', '.join(DTYPES)}.")
        if self.resident is not None and self.resident < 1:
            raise ConfigError(f"--resident must be 1 or more, got {self.resident}")
        if self.base is not None and self.base not in self.lanes:
            raise ConfigError(f"--base: lane {self.base!r} is not one of --lanes {','.join(self.lanes)}")

    @property
    def levels(self) -> tuple[Level, ...]:
        """The loads of --concurrency, --rate and --load, in this order."""
        plain = (
            *(Level("concurrency", c) for c in self.concurrency),
            *(Level("rate", r) for r in self.rate),
        )
        return (*plain, *(load_level(text, self.input_len, self.output_len) for text in self.loads))

    def lengths(self, level: Level) -> tuple[int, int]:
        """Tokens of a prompt and of an output."""
        return level.input_len or self.input_len, level.output_len or self.output_len

    def prompts_at(self, level: Level) -> int:
        """Requests of a round at one of the run's levels: from its --load, from --num-prompts, or the default.

        A list of --num-prompts applies to --concurrency and --rate, a single number to all.
        """
        at = self.levels.index(level)
        if (given := self.levels[at].prompts) is not None:
            return given
        if len(self.num_prompts) > 1:
            return self.num_prompts[at] if at < len(self.num_prompts) else level.default_prompts()
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
    """'c=8,in=2048,out=8,prompts=100' -> Level. Missing values, and lengths equal to the run's, are the run's.

    Raises ConfigError for an unknown, missing or repeated key, and for an invalid value.
    """
    pairs = _pairs(text)
    kinds = LOAD_KINDS.keys() & pairs.keys()
    if len(kinds) != 1:
        raise ConfigError(
            f"--load {text}: give one of c=N (requests in flight) and rate=N (requests a second)"
        )
    (kind,) = kinds
    lengths = _whole(text, pairs, "in") or input_len, _whole(text, pairs, "out") or output_len
    value = _whole(text, pairs, "c") if kind == "c" else _rate(text, pairs["rate"])
    assert value is not None
    prompts = _whole(text, pairs, "prompts")
    if lengths == (input_len, output_len):
        return Level(LOAD_KINDS[kind], value, prompts=prompts)
    return Level(LOAD_KINDS[kind], value, *lengths, prompts)


def _pairs(text: str) -> dict[str, str]:
    """{key: value} of a --load as typed."""
    known, pairs = [*LOAD_KINDS, "in", "out", "prompts"], {}
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


def _whole(text: str, pairs: Mapping[str, str], key: str) -> int | None:
    if key not in pairs:
        return None
    (value,) = comma_list(f"--load {text}: {key}=", pairs[key], int) or (0,)
    if value < 1:
        raise ConfigError(f"--load {text}: {key}= must be 1 or more, got {pairs[key] or 'nothing'}")
    return value


def _rate(text: str, given: str) -> float:
    (value,) = comma_list(f"--load {text}: rate=", given, float) or (0.0,)
    if not 0 < value < math.inf:
        raise ConfigError(f"--load {text}: rate= must be above 0, got {given or 'nothing'}")
    return value


def comma_list(flag: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """'1,8' -> (1, 8). Raises ConfigError with the flag and the value."""
    values = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        try:
            values.append(kind(part))
        except ValueError:
            what = {"int": "a whole number", "float": "a number"}.get(
                getattr(kind, "__name__", ""), "a value"
            )
            raise ConfigError(f"{flag}: {part!r} is not {what}") from None
    return tuple(values)


def per_lane(flag: str, items: Iterable[str]) -> dict[str, str]:
    """['vllm=PATH'] -> {'vllm': 'PATH'}. Raises ConfigError."""
    found = {}
    for item in items:
        lane, equals, value = item.partition("=")
        if not equals or not lane or not value:
            raise ConfigError(f"{flag}: expected LANE=VALUE, got {item!r}")
        found[lane] = value
    return found


def per_lane_env(items: Iterable[str]) -> dict[str, dict[str, str]]:
    """['vllm:KEY=VALUE'] -> {'vllm': {'KEY': 'VALUE'}}; an empty value removes the variable. Raises ConfigError."""
    found: dict[str, dict[str, str]] = {}
    for item in items:
        lane, colon, pair = item.partition(":")
        key, equals, value = pair.partition("=")
        if not colon or not equals or not lane or not key:
            raise ConfigError(f"--env: expected LANE:KEY=VALUE, got {item!r}")
        found.setdefault(lane, {})[key] = value
    return found


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
