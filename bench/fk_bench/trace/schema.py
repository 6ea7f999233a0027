"""The parts of the FlashInfer-Trace schema that are read here, and the check by flashinfer-bench's own models.

Documents are written as plain dicts. Keys that the schema has and this module does not name are ignored when read.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

DTYPES = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1", "int64", "int32", "int16", "int8",
    "bool",
)  # fmt: skip
INDEX = (
    "fastkernels.json"  # in a data set that `fk-bench trace export` wrote: what the schema has no place for
)
PACKAGE = "flashinfer-bench"


class TraceError(ValueError):
    """A data set that cannot be written or read. The message names the file or value."""


class Axis(BaseModel):
    """A named size: a constant with its value, or a variable."""

    type: Literal["const", "var"]
    value: int | None = None


class TensorSpec(BaseModel):
    """Names of axes and a dtype; a scalar has no shape."""

    shape: list[str] | None
    dtype: str


class Definition(BaseModel):
    """The contract of a kernel."""

    name: str = Field(min_length=1)
    op_type: str
    axes: dict[str, Axis]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    reference: str
    tags: list[str] = []

    def shape(self, name: str, axes: Mapping[str, int]) -> list[int] | None:
        """The sizes of an input for these values of the variable axes. Raises TraceError for an unknown axis."""
        names = self.inputs[name].shape
        if names is None:
            return None
        sizes: list[int] = []
        for axis in names:
            value = self.axes[axis].value if axis in self.axes else None
            value = axes.get(axis) if value is None else value
            if value is None:
                raise TraceError(f"no value for axis {axis} of {name}")
            sizes.append(value)
        return sizes


class Input(BaseModel):
    """The values of an input: random, one number, or a tensor of a safetensors file."""

    type: Literal["random", "scalar", "safetensors"]
    value: bool | int | float | None = None
    path: str = ""
    tensor_key: str = ""


class Workload(BaseModel):
    """One call of a definition."""

    axes: dict[str, int]
    inputs: dict[str, Input]
    uuid: str


class Correctness(BaseModel):
    """Errors of a solution; NaN and infinity may be strings."""

    max_relative_error: float = 0.0
    max_absolute_error: float = 0.0
    extra: dict[str, Any] | None = None


class Performance(BaseModel):
    """Times in ms."""

    latency_ms: float = Field(0.0, ge=0)
    reference_latency_ms: float = Field(0.0, ge=0)
    speedup_factor: float = Field(0.0, ge=0)


class Environment(BaseModel):
    """The machine and versions of an evaluation."""

    hardware: str
    libs: dict[str, str] = {}


class Evaluation(BaseModel):
    """The result of a solution on a workload."""

    status: str
    environment: Environment
    timestamp: str
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None


class Trace(BaseModel):
    """A workload, with a solution's result if there is one."""

    definition: str
    workload: Workload
    solution: str | None = None
    evaluation: Evaluation | None = None


def read_json(file: Path, model: type[BaseModel]) -> Any:
    """One document. Raises TraceError with the file and the first problem."""
    try:
        return model.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise TraceError(f"{file}: {first_problem(error)}") from None


def read_jsonl(file: Path) -> Iterator[Trace | TraceError]:
    """The traces of a file; for a line that is none, its problem."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        yield TraceError(f"{file}: {first_problem(error)}")
        return
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield Trace.model_validate(json.loads(line))
            except ValueError as error:
                yield TraceError(f"{file}:{number}: {first_problem(error)}")


def first_problem(error: Exception) -> str:
    """One line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'document'}: {first['msg']}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def finite(value: float | None) -> float:
    """A number that JSON can hold; 0 for none."""
    return value if value is not None and math.isfinite(value) else 0.0


def checked_by_theirs(folder: Path) -> str | None:
    """Read the data set with flashinfer-bench's own models; returns its version, None if it is not installed.

    Raises TraceError for a document that they refuse.
    """
    if importlib.util.find_spec("flashinfer_bench") is None:
        return None
    from flashinfer_bench.data import TraceSet

    try:
        found = TraceSet.from_path(str(folder))
    except Exception as error:
        raise TraceError(f"{folder}: {PACKAGE} refuses it: {first_problem(error)}") from error
    for kind in (found.solutions, found.workloads, found.traces):
        if unknown := sorted(set(kind) - set(found.definitions)):
            raise TraceError(f"{folder}: there is no definition {unknown[0]}")
    return metadata.version(PACKAGE)
