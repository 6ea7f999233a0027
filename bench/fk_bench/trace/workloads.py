"""Cases of ops as Definitions and Workloads: declared ones, captured calls, and the cases of a run."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastkernels.capture import FLOAT_VALUES
from fastkernels.capture.calls import digest
from fastkernels.core import registry
from fastkernels.core.case import Case
from fastkernels.core.declaration import Call, Scalar
from fastkernels.core.definition import axis_values, definition
from fastkernels.core.spec import OpSpec
from fk_bench.capture.replay import CapturedCase, captured_cases
from fk_bench.trace.schema import DTYPES, TraceError

MODEL, CAPTURED = "model", "captured"
LIMIT = 1 << 20  # bytes of one stored tensor
SEED = 0  # of the values of declared cases


@dataclass(frozen=True)
class Entry:
    """A case of an op as a Workload: what a data set states, and the tensors of its safetensors file."""

    op: str
    case: Case
    definition: Mapping[str, Any]
    workload: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def line(self) -> dict[str, Any]:
        """The workload trace."""
        return {"definition": self.definition["name"], "workload": self.workload}


def place(root: Path, kind: str, found: Mapping[str, Any], suffix: str) -> Path:
    """The file of a definition in a data set: KIND/OP_TYPE/NAME.SUFFIX."""
    return root / kind / found["op_type"] / f"{found['name']}{suffix}"


def entries(op: str, sources: tuple[str, ...], captures: Path | None, limit: int) -> Iterator[Entry | str]:
    """The op's cases from these sources, or the reason why one is left out. Raises CaptureError."""
    spec = registry.get(op)
    made: list[Case | CapturedCase] = []
    if MODEL in sources:
        made += [c for c in spec.cases if MODEL in c.tags]
    if CAPTURED in sources:
        made += captured_cases(op, captures)
    for each in made:
        try:
            yield entry(spec, each, limit)
        except TraceError as reason:
            yield str(reason)


def entry(spec: OpSpec, source: Case | CapturedCase, limit: int = LIMIT) -> Entry:
    """A case as a Workload. Raises TraceError where the schema cannot state it."""
    case = source.case if isinstance(source, CapturedCase) else source
    found = definition(spec, case)
    for name, tensor in {**found["inputs"], **found["outputs"]}.items():
        if tensor["dtype"] not in DTYPES:
            raise TraceError(f"{name} has dtype {tensor['dtype']}, which the schema does not have")
    axes = axis_values(spec, case)
    known = _captured(source, limit) if isinstance(source, CapturedCase) else _declared(spec, case, limit)
    inputs: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, stated in found["inputs"].items():
        value = known.get(name)
        if stated["shape"] is None:
            inputs[name] = {"type": "scalar", "value": value}
        elif value is None:
            inputs[name] = {"type": "random"}
        else:
            constants = {n: a["value"] for n, a in found["axes"].items() if a["type"] == "const"}
            shape = [{**axes, **constants}[n] for n in stated["shape"]]
            if math.prod(shape) != value.numel() or str(value.dtype) != f"torch.{stated['dtype']}":
                raise TraceError(
                    f"case {case.name}: {name} is {value.dtype} {list(value.shape)}, not {shape}"
                )
            tensors[name] = value.reshape(shape).contiguous().clone()
            inputs[name] = {"type": "safetensors", "path": "", "tensor_key": name}
    facts = [found["name"], case.name, axes, inputs, {n: digest(t) for n, t in tensors.items()}]
    number = str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(facts, sort_keys=True)))
    path = place(Path("blob/workloads"), "", found, "") / f"{found['name']}_{number}.safetensors"
    for stated in inputs.values():
        if "path" in stated:
            stated["path"] = path.as_posix()
    return Entry(spec.name, case, found, {"axes": axes, "inputs": inputs, "uuid": number}, tensors)


def save(root: Path, each: Entry) -> None:
    """Write the entry's tensors."""
    if each.tensors:
        stated = next(i for i in each.workload["inputs"].values() if "path" in i)
        (root / stated["path"]).parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(each.tensors), root / stated["path"])


def _captured(source: CapturedCase, limit: int) -> dict[str, Any]:
    """Numbers and recorded tensors by argument. Rows of activations are no whole tensors: those stay random."""
    known: dict[str, Any] = {}
    for argument in source.arguments:
        value = source.values.get(argument.name, argument.value)
        if argument.shape is None:
            known[argument.name] = value
        elif isinstance(value, torch.Tensor) and list(value.shape) == argument.shape:
            known[argument.name] = _small(source.case, argument.name, value, limit)
    # arguments that were added to the op after the capture
    spec = registry.get(source.op)
    sizes = spec.declaration.sizes(source.case.dims, source.case.dtype)
    return {a.name: a.of(sizes) for a in spec.arguments if isinstance(a, Scalar)} | known


def _declared(spec: OpSpec, case: Case, limit: int) -> dict[str, Any]:
    """Numbers by argument, and the tensors whose values matter: integers, and small floats with declared values."""
    declared = spec.declaration
    sizes = declared.sizes(case.dims, case.dtype)
    call = Call(declared, sizes, "cpu", torch.Generator().manual_seed(SEED))
    known: dict[str, Any] = {a.name: a.of(sizes) for a in spec.arguments if isinstance(a, Scalar)}
    wanted: list[str] = []
    for name, tensor in declared.tensors.items():
        if not tensor.there(sizes):
            continue
        dtype = tensor.torch_dtype(sizes)
        small = math.prod(tensor.shape(sizes)) * dtype.itemsize <= limit
        if not dtype.is_floating_point:
            if not small:
                raise TraceError(_too_large(case, name, limit))
            wanted.append(name)
        elif small and (tensor.values is not None or name in FLOAT_VALUES.get(spec.name, ())):
            wanted.append(name)
    if wanted:
        given = dict(declared.values(call)) if declared.values is not None else {}
        known |= {name: given[name] if name in given else call.tensor(name) for name in wanted}
    return known


def _small(case: Case, name: str, tensor: torch.Tensor, limit: int) -> torch.Tensor:
    if tensor.numel() * tensor.element_size() > limit:
        raise TraceError(_too_large(case, name, limit))
    return tensor


def _too_large(case: Case, name: str, limit: int) -> str:
    return f"case {case.name}: the values of {name} exceed {limit / 2**20:g} MiB (--limit)"
