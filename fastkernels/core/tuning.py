"""Tuned tables: which provider an op runs on this chip, by shape, as `fk-bench tune` measured it.

A table is a JSON file for one chip. fastkernels/tuned/CHIP.json ships with the package; FASTKERNELS_TUNED names a
user's table, whose shapes take precedence. Between the two come the choices that a patch verified on this chip
(fastkernels/verify). Tables are read when an op with a `Key` first resolves its providers.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from fastkernels.core.env import Environment

log = logging.getLogger("fastkernels")
SCHEMA = "fastkernels.tuned/1"
SHIPPED = Path(__file__).resolve().parents[1] / "tuned"
DECODES = (
    64  # tokens, Key.sizes 'M', up to which a step is one of decodes; tables list prompts apart from them
)
REACH = 4  # an entry applies to sizes from its own down to a quarter of it, or to the next smaller tuned size
NO_TABLE = "0"  # as FASTKERNELS_TUNED
T = TypeVar("T")
U = TypeVar("U")


class TableError(ValueError):
    """A table cannot be used; the message names the file and the entry."""


@dataclass(frozen=True)
class Chip:
    """The facts of a chip that a proposal may depend on.

    memory_bytes_per_s  0 where it is unknown
    capability          of CUDA, major and minor
    """

    name: str
    sms: int
    memory_bytes_per_s: float
    l2_bytes: int
    capability: tuple[int, int] = (9, 0)

    @classmethod
    def of(cls, device: str) -> Chip:
        """Return the chip behind a device type, as its driver describes it."""
        if device != "cuda":
            return cls(device, torch.get_num_threads(), 0.0, 32 << 20, (0, 0))
        found = torch.cuda.get_device_properties()
        clock, bits = (getattr(found, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz
        return cls(
            found.name, found.multi_processor_count, 2e3 * clock * bits / 8, found.L2_cache_size,
            (found.major, found.minor),
        )  # fmt: skip


# propose(values of Key.shape, values of Key.sizes, chip) -> up to three (provider, its params), the best first
Propose = Callable[[tuple[Any, ...], tuple[int, ...], Chip], Sequence[tuple[str, Mapping[str, Any]]]]


@dataclass(frozen=True)
class Key:
    """How to look up an op's calls in a table; an argument of `dispatch.define`.

    shape   names of what must be equal; one that ends with 'dtype' is a torch dtype
    sizes   names of sizes; for each in turn, the smallest tuned size that is not below the call's applies
    of      of(*args) -> (values of shape, values of sizes), both tuples. Runs on every call: it reads sizes and dtypes,
            never values of tensors
    dims    dims(**shape, **sizes) -> the dims of the SPEC's case of such a call, for `fk-bench tune`
    longer  longer(**shape, **sizes) -> dims of a longer call of the same point, or None: no kernel is chosen that is
            slower there than the host's
    module  module(m) -> values of shape for a module's calls, or None if they are unknown. With it, the op replaces a
            host's modules by default where a table lists it as faster, and only there
    propose what may be faster than the production kernel at a point without an entry. A patch measures it (verify/)
    points  sizes at which a patch measures the proposals for each shape of a model, the most important ones first
    own     own(module, args) -> the arguments `args` of a call with the module's own weights
    usual   {name of shape: values that hosts have by default}, for commands about shapes that are unknown in part
    scratch scratch(**shape, **sizes) -> bytes that a measured call needs in addition to its arguments and its result
    """

    shape: tuple[str, ...]
    sizes: tuple[str, ...]
    of: Callable[..., tuple[tuple[Any, ...], tuple[int, ...]]]
    dims: Callable[..., dict[str, Any]]
    module: Callable[[Any], tuple[Any, ...] | None] | None = None
    propose: Propose | None = None
    points: tuple[tuple[int, ...], ...] = ()
    own: Callable[[Any, list[Any]], list[Any]] | None = None
    usual: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    scratch: Callable[..., int] | None = None
    longer: Callable[..., dict[str, Any] | None] | None = None


@dataclass(frozen=True)
class Entry:
    """The measured choice for one shape at one size of each kind.

    provider  the fastest provider; with None, the op's default order is used
    params    one of the provider's sets, {} for the kernel's own choice
    speedup   over `baseline`, the production kernel, with its 95% interval; 1 where the provider is the baseline
    run       key of Table.runs: date, machine and commit of the measurement
    longer    time of the baseline over the provider's in the point's longer calls (Key.longer); None: not measured
    source    file and entry, for messages; not part of the file
    shipped   whether it is of a table that ships; not part of the file
    """

    op: str
    shape: Mapping[str, Any]
    sizes: Mapping[str, int]
    provider: str | None
    baseline: str
    run: str
    params: Mapping[str, Any] = field(default_factory=dict)
    speedup: float = 1.0
    ci95: tuple[float, float] = (1.0, 1.0)
    longer: float | None = None
    source: str = field(default="a tuned table", compare=False)
    shipped: bool = field(default=False, compare=False)

    def to_json(self) -> str:
        without = {"source", "shipped", *(["longer"] if self.longer is None else [])}
        return json.dumps({name: value for name, value in asdict(self).items() if name not in without})

    @property
    def place(self) -> tuple[str, tuple[tuple[str, Any], ...], bool]:
        """Op, shape, and whether it is for prompts. A user's table replaces all shipped sizes of a place, or none."""
        return self.op, tuple(sorted(self.shape.items())), self.of_prompts

    @property
    def of_prompts(self) -> bool:
        """Whether it is for more tokens than those of decodes."""
        return self.sizes.get("M", 0) > DECODES

    @property
    def point(self) -> tuple[Any, ...]:
        """Op, shape and sizes: unique within a table."""
        return *self.place, tuple(sorted(self.sizes.items()))

    @property
    def faster(self) -> bool:
        """Whether ours is faster than the baseline."""
        return self.provider is not None and self.provider != self.baseline

    @property
    def chosen(self) -> bool:
        """Whether another kernel runs than without the entry: ours, or the baseline with other parameters."""
        return self.faster or bool(self.params)

    def __str__(self) -> str:
        sizes = {**self.shape, **self.sizes}
        return f"{self.op} " + " ".join(f"{name}={value}" for name, value in sizes.items())


@dataclass(frozen=True)
class Table:
    """A file: `runs` is {run: {date, commit, versions, ...}}."""

    chip: str
    runs: Mapping[str, Mapping[str, Any]]
    entries: tuple[Entry, ...]

    def merged(self, newer: Table) -> Table:
        """Return this table with the entries of `newer`, which replace older ones of the same point.

        Runs without remaining entries are dropped. Entries that land between two sizes only shorten their reach.
        """
        if newer.chip != self.chip:
            raise TableError(f"a table of {newer.chip} does not go into one of {self.chip}")
        points = {e.point for e in newer.entries}
        entries = (*(e for e in self.entries if e.point not in points), *newer.entries)
        used = {e.run for e in entries}
        runs = {**self.runs, **newer.runs}
        return Table(self.chip, {name: runs[name] for name in sorted(used)}, entries)

    def to_json(self) -> str:
        """Return the file's text, one entry a line, so that a diff of two tables is readable."""
        entries = sorted(
            self.entries, key=lambda e: (e.op, json.dumps(dict(e.shape)), tuple(e.sizes.values()))
        )
        lines = ",\n".join(f"    {e.to_json()}" for e in entries)
        runs = ",\n".join(f"    {json.dumps(n)}: {json.dumps(dict(r))}" for n, r in self.runs.items())
        head = f'{{\n  "schema": "{SCHEMA}",\n  "chip": {json.dumps(self.chip)},\n'
        return head + f'  "runs": {{\n{runs}\n  }},\n  "entries": [\n{lines}\n  ]\n}}\n'


def read(path: Path) -> Table:
    """The table of a file. Raises TableError, which names the file and the entry."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(f"tuned table {path}: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise TableError(
            f"tuned table {path}: its schema is not {SCHEMA}; `fk-bench tune` writes a valid table"
        )
    chip, runs, entries = (data.get(name) for name in ("chip", "runs", "entries"))
    if not isinstance(chip, str) or not isinstance(runs, dict) or not isinstance(entries, list):
        raise TableError(
            f"tuned table {path}: it needs `chip` (a name), `runs` (an object) and `entries` (a list)"
        )
    if wrong := [name for name, run in runs.items() if not isinstance(run, dict)]:
        raise TableError(f"tuned table {path}: the run {wrong[0]!r} is {runs[wrong[0]]!r}, not an object")
    seen: dict[Any, int] = {}
    found = []
    for i, raw in enumerate(entries):
        entry = replace(
            _entry(raw, f"tuned table {path}: entry {i}", runs), source=f"tuned table {path}: entry {i}"
        )
        if (first := seen.setdefault(entry.point, i)) != i:
            raise TableError(f"tuned table {path}: entries {first} and {i} are both for {entry}")
        found.append(entry)
    return Table(chip, runs, tuple(found))


_KINDS: dict[str, tuple[type, ...]] = {
    "op": (str,), "shape": (dict,), "sizes": (dict,), "provider": (str, type(None)), "baseline": (str,),
    "run": (str,), "params": (dict,), "speedup": (int, float), "ci95": (list,), "longer": (int, float),
}  # fmt: skip


def _entry(raw: Any, where: str, runs: Mapping[str, Any]) -> Entry:
    if not isinstance(raw, dict):
        raise TableError(f"{where} is {raw!r}, not an object")
    where += f" ({raw.get('op')} {raw.get('shape')} {raw.get('sizes')})"
    if wrong := [name for name in raw if name not in _KINDS]:
        raise TableError(f"{where} has {wrong[0]!r}; it may have {', '.join(_KINDS)}")
    for name, kinds in _KINDS.items():
        if name not in raw and name not in ("params", "speedup", "ci95", "longer"):
            raise TableError(f"{where} has no {name!r}")
        if name in raw and (not isinstance(raw[name], kinds) or isinstance(raw[name], bool)):
            raise TableError(
                f"{where}: {name} is {raw[name]!r}, not {' or '.join(k.__name__ for k in kinds)}"
            )
    if wrong := [
        n for n, v in raw["sizes"].items() if not isinstance(v, int) or isinstance(v, bool) or v < 0
    ]:
        raise TableError(f"{where}: {wrong[0]} is {raw['sizes'][wrong[0]]!r}, not a size")
    if wrong := [n for n, v in raw["shape"].items() if isinstance(v, list | dict)]:
        raise TableError(f"{where}: {wrong[0]} is {raw['shape'][wrong[0]]!r}, not a value of a shape")
    if raw["run"] not in runs:
        raise TableError(f"{where}: its run {raw['run']!r} is not among `runs`")
    low, *high = raw.get("ci95", [1.0, 1.0]) or [0.0]
    if len(high) != 1 or not all(isinstance(v, (int, float)) for v in (low, *high)):
        raise TableError(f"{where}: ci95 is {raw['ci95']!r}, not [low, high]")
    entry = Entry(**{**raw, "ci95": (low, high[0])})
    if entry.faster and not (entry.speedup > 1 and low > 1):
        raise TableError(
            f"{where}: speedup {entry.speedup} ({low} to {high[0]}) of {entry.provider} over {entry.baseline}: a table"
            " has only what is faster; FASTKERNELS_PROVIDER=OP:NAME uses a provider in any case"
        )
    return entry


# -- the tables of this process


def untuned(op: str, device: str) -> str | None:
    """Return a reason for an op without entries for this chip, else None. Raises TableError."""
    chip = chip_of(device)
    return None if entries(op, chip) else f"not tuned on {chip}: `fk-bench tune {op}` would measure it"


def not_faster(
    op: str, key: Key, shape: tuple[Any, ...] | None, device: str, decodes: bool = False
) -> str | None:
    """Return why a module stays with the host by the tables; None if ours is faster at some size of its shape.

    shape    values of key.shape, with None for those unknown before the first call; None: the shape is unknown
    decodes  whether sizes of prompts do not count

    At sizes without a faster entry the op runs the production kernel, or its own first provider. Raises TableError.
    """
    if shape is None:
        return "the shape of its calls is unknown"
    if (never := untuned(op, device)) is not None:
        return never
    chip = chip_of(device)
    found = entries(op, chip)
    known = {name: v for name, v in zip(key.shape, shape, strict=True) if v is not None}
    of_shape = [e for e in found if all(_value(e, name) == v for name, v in known.items())]
    said = " ".join(f"{name}={str(known.get(name, '?')).removeprefix('torch.')}" for name in key.shape)
    if not of_shape:
        return f"{said} is not tuned on {chip}: `{_command(op, key, known)}` would measure it"
    if any(e.faster and not (decodes and e.of_prompts) for e in of_shape):
        return None
    return f"no kernel of ours is faster at {said} on {chip}"


def _command(op: str, key: Key, known: Mapping[str, Any]) -> str:
    """Return the command that tunes a shape; with the usual values of what is unknown in it."""
    values = [[known[name]] if name in known else list(key.usual.get(name, ())) for name in key.shape]
    shapes = [
        ",".join(f"{name}={str(v).removeprefix('torch.')}" for name, v in zip(key.shape, each, strict=True))
        for each in itertools.product(*values)
    ]
    return " ".join([f"fk-bench tune {op}", *(f"--shape {shape}" for shape in shapes)])


def chip_of(device: str) -> str:
    """Return the name of the chip behind a device type: 'NVIDIA H200', 'cpu'."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def slug(chip: str) -> str:
    """The stem of the chip's file: nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")


def shipped_entries(op: str) -> list[Entry]:
    """The entries for an op in the shipped tables of all chips. Raises TableError for a file that cannot be used."""
    return [e for path in sorted(SHIPPED.glob("*.json")) for e in read(path).entries if e.op == op]


def entries(op: str, chip: str) -> list[Entry]:
    """All entries for an op on a chip: FASTKERNELS_TUNED's, then for other shapes the verified and the shipped ones.

    Raises TableError for a file that cannot be used.
    """
    return list(_by_op(chip, Environment.read().tuned).get(op, ()))


_VERIFIED: dict[str, tuple[Entry, ...]] = {}


def verified(chip: str) -> tuple[Entry, ...]:
    """The choices in use that a patch of this process verified on this chip."""
    return _VERIFIED.get(chip, ())


def choices() -> list[list[Any]]:
    """All verified choices in use in this process, without their times, as JSON can hold them."""
    found = [
        [chip, e.op, *map(sorted, (e.shape.items(), e.sizes.items(), e.params.items())), e.provider]
        for chip, several in _VERIFIED.items()
        for e in several
    ]
    return sorted(found, key=json.dumps)


def set_verified(chip: str, found: Iterable[Entry]) -> None:
    """Replace the verified choices of a chip. Ops that have resolved their providers keep them until `Op.forget`."""
    _VERIFIED[chip] = tuple(found)
    _by_op.cache_clear()


@lru_cache(maxsize=8)
def _by_op(chip: str, own: str | None) -> dict[str, list[Entry]]:
    found: dict[Any, list[Entry]] = {}
    if own == NO_TABLE:
        several_tables: tuple[tuple[Entry, ...], ...] = (verified(chip),)
    else:
        several_tables = (
            _entries_of(_users(chip, own), chip), verified(chip),
            tuple(replace(entry, shipped=True) for entry in _entries_of(_shipped(chip), chip)),
        )  # fmt: skip
    for several in several_tables:
        here: dict[Any, list[Entry]] = {}
        for entry in several:
            here.setdefault(entry.place, []).append(entry)
        found = {**here, **found}
    by_op: dict[str, list[Entry]] = {}
    for (op, *_), of_shape in found.items():
        by_op.setdefault(op, []).extend(of_shape)
    return by_op


def _entries_of(path: Path | None, chip: str) -> tuple[Entry, ...]:
    if path is None:
        return ()
    table = read(path)
    if table.chip != chip:
        log.warning("tuned table %s is for %s and is not used on %s", path, table.chip, chip)
        return ()
    return table.entries


def _shipped(chip: str) -> Path | None:
    path = SHIPPED / f"{slug(chip)}.json"
    return path if path.is_file() else None


def _users(chip: str, own: str | None) -> Path | None:
    if own is None:
        return None
    path = Path(own).expanduser()
    if path.is_dir():
        path /= f"{slug(chip)}.json"
        return path if path.is_file() else None
    return path


@dataclass(frozen=True)
class Lookup(Generic[T]):
    """Nested tables {shape: (sorted sizes, one sub-table per size)}; the innermost level holds the values."""

    shapes: Mapping[tuple[Any, ...], Any]
    depth: int

    def find(self, shape: tuple[Any, ...], sizes: tuple[int, ...]) -> T | None:
        """Return the value at the smallest tuned size that is not below the call's, for each kind of size."""
        level = self.shapes.get(shape)
        if level is None:
            return None
        for size in sizes:
            bounds, below = level
            at = bisect_left(bounds, size)
            if at == len(bounds) or bounds[at] > REACH * size:
                return None
            level = below[at]
        return level

    def map(self, change: Callable[[T], U]) -> Lookup[U]:
        def changed(level: Any, depth: int) -> Any:
            return change(level) if not depth else (level[0], [changed(b, depth - 1) for b in level[1]])

        return Lookup({s: changed(level, self.depth) for s, level in self.shapes.items()}, self.depth)


def lookup(key: Key, found: Iterable[Entry]) -> Lookup[Entry]:
    """Index the entries of one op by its key. Raises TableError for an entry whose names differ from the key's."""
    shapes: dict[tuple[Any, ...], list[tuple[tuple[int, ...], Entry]]] = {}
    for entry in found:
        if set(entry.shape) != set(key.shape) or set(entry.sizes) != set(key.sizes):
            names = ", ".join((*key.shape, *key.sizes))
            raise TableError(
                f"{entry.source}: {entry}: the key of {entry.op} is {names}; `fk-bench tune` writes the table again"
            )
        shape = tuple(_value(entry, name) for name in key.shape)
        shapes.setdefault(shape, []).append((tuple(entry.sizes[name] for name in key.sizes), entry))
    depth = len(key.sizes)
    return Lookup({shape: _tree(several, depth) for shape, several in shapes.items()}, depth)


def untimed(
    key: Key, found: Iterable[Entry], shape: tuple[Any, ...], sizes: Iterable[tuple[int, ...]]
) -> bool:
    """Whether a shipped entry names a kernel for one of these sizes that was not timed in its longer calls."""
    if key.longer is None:
        return False
    shipped, named = (
        lookup(key, [entry for entry in found if entry.shipped]),
        dict(zip(key.shape, shape, strict=True)),
    )
    for each in sizes:
        entry = shipped.find(shape, each)
        if entry is None or not entry.chosen or entry.longer is not None:
            continue
        if key.longer(**named, **dict(zip(key.sizes, each, strict=True))) is not None:
            return True
    return False


def _value(entry: Entry, name: str) -> Any:
    value = entry.shape[name]
    if not name.endswith("dtype"):
        return value
    if not isinstance(dtype := getattr(torch, str(value), None), torch.dtype):
        raise TableError(f"{entry.source}: {entry}: {name} {value!r} is not a torch dtype")
    return dtype


def _tree(several: list[tuple[tuple[int, ...], Any]], depth: int) -> Any:
    if not depth:
        return several[0][1]
    bounds = sorted({sizes[0] for sizes, _ in several})
    below = [[(sizes[1:], entry) for sizes, entry in several if sizes[0] == b] for b in bounds]
    return bounds, [_tree(part, depth - 1) for part in below]
