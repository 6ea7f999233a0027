"""Reads captures, the folders of capture.json and values.safetensors that fastkernels.capture writes. xz may compress
the files, as in the captures that ship.

Integer inputs come from the capture. Float inputs are random, as the op's SPEC makes them, with the captured shape,
strides and dtype. Damaged parts are listed in `problems`; the rest is used.
"""

from __future__ import annotations

import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastkernels.capture import SCHEMA
from fastkernels.capture.calls import digest

SHIPPED = Path(__file__).with_name("data")
HEAD, VALUES = "capture.json", "values.safetensors"  # or with .xz
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


class CaptureError(ValueError):
    """A capture without any usable part; the message names the file."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Argument(_Strict):
    """An argument of a call: a tensor (shape, dtype, strides), a value, or a number that varies (dynamic).

    storage  [number, offset]: arguments with the same number are parts of one tensor
    type     'dtype' for the name of a dtype
    """

    name: str
    shape: list[int] | None = None
    dtype: str | None = None
    strides: list[int] | None = None
    storage: tuple[int, int] | None = None
    value: Any = None
    type: str | None = None
    dynamic: bool = False


class ValueSet(_Strict):
    """The values of some calls: {argument: name of its tensor in values.safetensors, or a number}."""

    count: int = Field(gt=0)
    args: dict[str, int | float | str]


class SignatureCalls(_Strict):
    """The calls of one signature; `values` may be fewer than the calls, or none."""

    count: int = Field(gt=0)
    args: list[Argument]
    values: list[ValueSet] = []
    too_large: list[str] = []


class CapturedOp(_Strict):
    """All calls of an op; `dropped` counts what is missing in `calls`."""

    count: int
    signatures: int
    dropped: dict[str, int] = {}
    calls: list[SignatureCalls]


class Module(_Strict):
    """Modules with the same constructor call: 'module.path:Name', arguments by name, count."""

    cls: str
    args: dict[str, Any]
    count: int


class Capture(BaseModel):
    """The contents of a capture. Other keys of capture.json, which say how it was made, are kept."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True, populate_by_name=True)

    schema_: str = Field(alias="schema")
    name: str = ""
    folder: Path = Path()
    model: str = ""
    host: str = ""
    host_version: str | None = None
    scenario: str = ""
    commit: str | None = None
    calls: int = 0
    notes: list[str] = []
    ops: dict[str, CapturedOp] = {}
    modules: list[Module] = []
    tensors: dict[str, torch.Tensor] = Field(default={}, exclude=True)
    problems: list[str] = []

    @property
    def signatures(self) -> int:
        return sum(len(op.calls) for op in self.ops.values())


def folders(folder: Path | str | None = None) -> list[Path]:
    """The captures in a folder, or the folder itself if it is one; None: the shipped ones.

    Raises CaptureError if there are none.
    """
    root = SHIPPED if folder is None else Path(folder).expanduser()
    if is_capture(root):
        return [root]
    found = sorted(p for p in root.glob("*") if is_capture(p))
    if not found:
        what = "has no capture in it" if root.is_dir() else "is not a folder"
        raise CaptureError(f"{root} {what} (a folder with capture.json); `fk-bench capture` makes one")
    return found


def load_all(folder: Path | str | None = None) -> tuple[list[Capture], list[str]]:
    """The captures in a folder (see `folders`), and their problems.

    Raises CaptureError if none is usable.
    """
    captures, problems = [], []
    for path in folders(folder):
        try:
            captures.append(load(path))
            problems += captures[-1].problems
        except CaptureError as error:
            problems.append(str(error))
    if not captures:
        raise CaptureError("; ".join(problems))
    return captures, problems


def load(folder: Path | str) -> Capture:
    """One capture. Damaged parts are left out and listed in `problems`.

    Raises CaptureError if capture.json is missing, is not JSON, or has another schema.
    """
    path = Path(folder)
    stamps = [f.stat().st_mtime_ns if f.is_file() else 0 for f in (_file(path, HEAD), _file(path, VALUES))]
    return _load(path, *stamps)


def is_capture(folder: Path) -> bool:
    return _file(folder, HEAD).is_file()


def _file(folder: Path, name: str) -> Path:
    file, packed = folder / name, folder / f"{name}.xz"
    return packed if packed.is_file() and not file.is_file() else file


def _read(file: Path) -> bytes:
    return lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()


@lru_cache(maxsize=64)
def _load(folder: Path, *stamps: int) -> Capture:
    file = _file(folder, HEAD)
    try:
        raw = json.loads(_read(file))
    except (OSError, lzma.LZMAError) as error:
        raise CaptureError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise CaptureError(f"{file} is not JSON: {error}") from None
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise CaptureError(f"{file} has schema {schema!r}, but this version reads {SCHEMA!r}")
    problems: list[str] = []
    ops = raw.get("ops")
    if not isinstance(ops, dict):
        problems.append(f"{file}: ops is {type(ops).__name__}, not an object; it has no calls")
        ops = {}
    kept = {name: _op(f"{file}: ops.{name}", op, problems) for name, op in ops.items()}
    modules = _valid(Module, f"{file}: modules", raw.get("modules"), problems)
    head = {
        k: v for k, v in raw.items() if k not in ("ops", "modules", "problems", "tensors", "name", "folder")
    }
    try:
        capture = Capture.model_validate(head)
    except ValidationError as error:
        raise CaptureError(f"{file}: {_first(error)}") from None
    capture.ops = {name: op for name, op in kept.items() if op is not None}
    capture.modules, capture.name, capture.folder = modules, folder.resolve().name, folder
    wanted = {v for op in capture.ops.values() for c in op.calls for s in c.values for v in s.args.values()}
    routing = raw.get("routing", [])  # the tensors of each layer and text, read by fk_bench.routing.study
    wanted |= {r.get(name) for r in routing for name in ("topk_ids", "topk_weights")}
    capture.tensors = _tensors(_file(folder, VALUES), {v for v in wanted if isinstance(v, str)}, problems)
    capture.problems = problems
    return capture


def _op(where: str, raw: Any, problems: list[str]) -> CapturedOp | None:
    if not isinstance(raw, dict):
        problems.append(f"{where} is {type(raw).__name__}, not an object; left out")
        return None
    calls = _valid(SignatureCalls, f"{where}.calls", raw.get("calls"), problems)
    try:
        return CapturedOp.model_validate({**raw, "calls": calls})
    except ValidationError as error:
        problems.append(f"{where}: {_first(error)}; left out")
        return None


def _valid(kind: Any, where: str, raw: Any, problems: list[str]) -> list[Any]:
    if not isinstance(raw, list):
        problems.append(f"{where} is {type(raw).__name__}, not a list; left out")
        return []
    made = []
    for i, item in enumerate(raw):
        try:
            made.append(kind.model_validate(item))
        except ValidationError as error:
            problems.append(f"{where}.{i}: {_first(error)}; left out")
    return made


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _tensors(file: Path, wanted: set[str], problems: list[str]) -> dict[str, torch.Tensor]:
    """The wanted tensors of a safetensors file, even a truncated one. A tensor's name is its digest."""
    if not wanted:
        return {}
    try:
        data = _read(file)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if not isinstance(header, dict):
            raise ValueError("no header")
    except OSError as error:
        problems.append(f"{file}: {error.strerror}; calls that need values are left out")
        return {}
    except (ValueError, lzma.LZMAError) as error:
        problems.append(f"{file} is not a safetensors file: {error}; calls that need values are left out")
        return {}
    found: dict[str, torch.Tensor] = {}
    for name in sorted(wanted):
        try:
            found[name] = _tensor(header, data[8 + size :], name)
        except ValueError as error:
            problems.append(f"{file}: tensor {name} {error}; calls that need it are left out")
    return found


def _tensor(header: dict[str, Any], data: bytes, name: str) -> torch.Tensor:
    if name not in header:
        raise ValueError("is missing")
    try:
        entry = header[name]
        dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if end > len(data):
            raise ValueError(f"is truncated: the file ends {end - len(data)} bytes too early")
        if start == end:
            return torch.empty(shape, dtype=dtype)
        made = torch.frombuffer(bytearray(data[start:end]), dtype=dtype).view(shape)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"has an unusable header ({type(error).__name__}: {error})") from None
    if digest(made) != name:
        raise ValueError("has other contents than its name says")
    return made
