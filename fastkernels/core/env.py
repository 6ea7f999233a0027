"""Every environment variable that FastKernels reads, in one place."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fastkernels.core import registry

log = logging.getLogger("fastkernels")
ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
DAY = 86_400.0  # seconds


def _flag(variable: str, value: str | None, default: bool | None = None) -> bool | None:
    text = (value or "").strip().lower()
    if text not in ("", *ON, *OFF):
        raise ValueError(f"{variable}: expected {', '.join(ON)}, or {', '.join(OFF)}, got {value!r}")
    return text in ON if text else default


def _names(value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


def _ops(variable: str, value: str | None) -> tuple[str, ...]:
    return _known(variable, _names(value))


def _known(variable: str, names: Iterable[str]) -> tuple[str, ...]:
    names = tuple(names)
    try:
        registry.check_names(name for name in names if name not in registry.defined)
    except registry.UnknownName as error:
        raise ValueError(f"{variable}: {error} `fk-bench list ops` lists all") from None
    return names


def _pairs(variable: str, value: str | None, separator: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in _names(value):
        key, found, rest = (part.strip() for part in item.partition(separator))
        if not found or not key or not rest:
            raise ValueError(f"{variable}: expected OP{separator}VALUE[,OP{separator}VALUE], got {item!r}")
        if pairs.setdefault(key, rest) != rest:
            raise ValueError(f"{variable}: {key} is named twice, with {pairs[key]!r} and with {rest!r}")
    _known(variable, pairs)
    return pairs


@cache
def _warn_of_unknown(names: frozenset[str], known: frozenset[str]) -> None:
    for name in sorted(names - known):
        close = difflib.get_close_matches(name, known, n=1)
        log.warning(
            "%s is not a variable that FastKernels reads%s", name, f": {close[0]} is" if close else ""
        )


def _count(variable: str, value: str | None) -> int | None:
    if value is None or not value.strip():
        return None
    if not value.strip().isdecimal():
        raise ValueError(f"{variable}: expected a number of 0 or more, got {value!r}")
    return int(value)


def _seconds(variable: str, value: str | None, default: float) -> float:
    if value is None or not value.strip():
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= DAY:
        raise ValueError(
            f"{variable}: expected a number of seconds above 0, at most {DAY:.0f}, got {value!r}"
        )
    return seconds


def _path(variable: str, value: str | None, what: str) -> Path | None:
    """The path of a variable; None for an empty one. Raises ValueError for the words of a flag."""
    text = (value or "").strip()
    if not text:
        return None
    if text.lower() in (*ON, *OFF):
        raise ValueError(
            f"{variable}: expected {what}, got {value!r}; unset it for the default, or write ./{text}"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~NAME of no user
        raise ValueError(f"{variable}: {value!r} cannot be used ({error})") from None


@cache  # of successes: kernels read the environment at their first calls
def _folder(variable: str, value: str | None, written: bool = False) -> str | None:
    """A folder that is there or can be made. written: its use is to write there. Raises ValueError."""
    if (path := _path(variable, value, "a folder")) is None:
        return None
    try:
        place = _nearest(path)
        if not place.is_dir():
            raise ValueError(f"{variable}: {value!r} is no folder, {place} is a file; name a folder")
        if written and not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(f"{variable}: {value!r} cannot be written; name a folder that can")
    except OSError as error:
        if written or not isinstance(
            error, PermissionError
        ):  # readers take a private temporary folder instead
            raise ValueError(
                f"{variable}: {value!r} cannot be used ({error.strerror}); name a folder"
            ) from None
    return str(path)


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that is there. Raises OSError."""
    for place in (path, *path.parents):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return place
    return Path()


_NO_TABLE = "`fk-bench tune` writes a table if you unset the variable, 0 uses none"


@cache
def _tables(variable: str, value: str | None) -> str | None:
    text = (value or "").strip()
    if text.lower() in OFF:
        return OFF[0]
    if (path := _path(variable, value, "a tuned table, a folder of them, or 0")) is None:
        return None
    try:
        if not path.exists():
            raise ValueError(f"{variable}: there is no file or folder {text}; {_NO_TABLE}")
    except OSError as error:
        raise ValueError(
            f"{variable}: {text[:80]!r} cannot be used ({error.strerror}); {_NO_TABLE}"
        ) from None
    if path.is_dir() and not any(path.glob("*.json")):
        raise ValueError(f"{variable}: the folder {text} has no CHIP.json; {_NO_TABLE}")
    return str(path)


def _candidates(variable: str, value: str | None) -> dict[str, str]:
    from fastkernels.core.candidate import file_of, from_directory

    folder = (value or "").strip()
    pairs = _pairs(variable, value, "=") if not folder or "=" in folder else None
    try:
        if pairs is None:
            return from_directory(folder)
        for op, file in pairs.items():
            file_of(op, file)
        return pairs
    except ValueError as error:
        raise ValueError(f"{variable}: {error}; expected a folder or OP=FILE[,OP=FILE]") from error


@dataclass(frozen=True)
class Environment:
    """The parsed environment of the process. `read()` parses it again on every call.

    Flags are 1, true, yes or on, and 0, false, no or off. Any other value is an error, as is an op, a file or a table
    that does not exist, and a folder that is a file. Empty values are as good as none.

    enabled     FASTKERNELS=1            vLLM and SGLang are patched when they build a model
    ops         FASTKERNELS_OPS          replace only these ops, comma-separated (default: those on by default); a patch
                of a live object without `ops` honours it, too
    candidates  FASTKERNELS_CANDIDATES   OP=FILE[,OP=FILE], or a folder of files OP.py: your own kernels
    provider    FASTKERNELS_PROVIDER     OP:NAME[,OP:NAME]: the provider that an op uses
    tuned       FASTKERNELS_TUNED        a tuned table, or a folder of CHIP.json, used before the tables that ship;
                0: no table, not even the shipped ones
    verify      FASTKERNELS_VERIFY=0     a patch and our engine measure nothing and use choices measured before.
                1: they also measure products of prompts, and on a CPU (default: products, decode attention, experts,
                and first calls of pipelines, timm and transformers models, on a GPU)
    disable     FASTKERNELS_DISABLE      ops that are off, comma-separated
    strict      FASTKERNELS_STRICT=1     a fallback or an unknown host version is an error
    trial_s     FASTKERNELS_TRIAL_S      seconds that the import of a candidate, and the trial step of a patch, may take
                (default: 300)
    report      FASTKERNELS_REPORT       a folder to which every patched process writes its report
    overlap     FASTKERNELS_OVERLAP=0    start each kernel only after the previous one has ended
    graph_tokens FASTKERNELS_GRAPH_TOKENS the longest prompt in CUDA graphs of a patched vLLM; 0 keeps vLLM's limit
                (default: by the size of the layers, up to 2048, or 4096 with 8-bit linear layers)
    keep_graphs FASTKERNELS_KEEP_GRAPHS=1 keep the CUDA graphs from before a live patch of vLLM for its undo
    graphs      FASTKERNELS_GRAPHS=1     what torch.compile traces in a live model will be captured in CUDA graphs by
                hand; modes with graphs of their own, such as reduce-overhead, are known without it
    capture     FASTKERNELS_CAPTURE=1    record how a host's modules are constructed, for `fk-bench capture`
    cache       FASTKERNELS_CACHE        the folder for compiled kernels, converted models and environments
                (default: ~/.cache/fastkernels)
    interpret   TRITON_INTERPRET=1       a variable of Triton: run its kernels on the CPU

    `fk-bench serve` reads FASTKERNELS_API_KEY, the key that clients must send (as --api-key). Nodes
    of our engine read FASTKERNELS_NODE_KEY, a secret that must be the same on all of them.
    """

    enabled: bool = False
    ops: tuple[str, ...] | None = None
    candidates: Mapping[str, str] = field(default_factory=dict)
    provider: Mapping[str, str] = field(default_factory=dict)
    tuned: str | None = None
    verify: bool | None = None
    disable: tuple[str, ...] = ()
    strict: bool = False
    trial_s: float = 300.0
    report: str | None = None
    overlap: bool = True
    graph_tokens: int | None = None
    keep_graphs: bool = False
    graphs: bool = False
    capture: bool = False
    cache: str = ""
    interpret: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Parse `environ` (default: os.environ). Raises ValueError with the variable and what it accepts."""
        e = os.environ if environ is None else environ
        _warn_of_unknown(frozenset(name for name in e if name.startswith("FASTKERNELS")), _KNOWN)
        default_cache = os.path.join(e.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fastkernels")
        return cls(
            enabled=bool(_flag("FASTKERNELS", e.get("FASTKERNELS"))),
            ops=_ops("FASTKERNELS_OPS", e.get("FASTKERNELS_OPS")) or None,
            candidates=_candidates("FASTKERNELS_CANDIDATES", e.get("FASTKERNELS_CANDIDATES")),
            provider=_pairs("FASTKERNELS_PROVIDER", e.get("FASTKERNELS_PROVIDER"), ":"),
            tuned=_tables("FASTKERNELS_TUNED", e.get("FASTKERNELS_TUNED")),
            verify=_flag("FASTKERNELS_VERIFY", e.get("FASTKERNELS_VERIFY")),
            disable=_ops("FASTKERNELS_DISABLE", e.get("FASTKERNELS_DISABLE")),
            strict=bool(_flag("FASTKERNELS_STRICT", e.get("FASTKERNELS_STRICT"))),
            trial_s=_seconds("FASTKERNELS_TRIAL_S", e.get("FASTKERNELS_TRIAL_S"), 300.0),
            report=_folder("FASTKERNELS_REPORT", e.get("FASTKERNELS_REPORT"), written=True),
            overlap=bool(_flag("FASTKERNELS_OVERLAP", e.get("FASTKERNELS_OVERLAP"), default=True)),
            graph_tokens=_count("FASTKERNELS_GRAPH_TOKENS", e.get("FASTKERNELS_GRAPH_TOKENS")),
            keep_graphs=bool(_flag("FASTKERNELS_KEEP_GRAPHS", e.get("FASTKERNELS_KEEP_GRAPHS"))),
            graphs=bool(_flag("FASTKERNELS_GRAPHS", e.get("FASTKERNELS_GRAPHS"))),
            capture=bool(_flag("FASTKERNELS_CAPTURE", e.get("FASTKERNELS_CAPTURE"))),
            cache=_folder("FASTKERNELS_CACHE", e.get("FASTKERNELS_CACHE")) or default_cache,
            interpret=(e.get("TRITON_INTERPRET") or "").strip().lower() in ON,
        )


_KNOWN = frozenset(re.findall(r"\bFASTKERNELS(?:_[A-Z]+)*\b", Environment.__doc__ or ""))
