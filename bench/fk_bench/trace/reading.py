"""Read a data set: Workloads become a capture, Solutions candidates, and Traces rows."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fastkernels.capture import FLOAT_VALUES, SCHEMA
from fastkernels.capture.calls import digest, is_sampled
from fastkernels.capture.keep import rows_of, to_json
from fastkernels.core import registry
from fastkernels.core.declaration import REQUIRED, Scalar
from fastkernels.core.definition import definition as definition_of
from fastkernels.core.spec import OpSpec
from fk_bench.core import rows
from fk_bench.evaluate.adapters import trace as solutions_layout
from fk_bench.evaluate.adapters.foreign_files import Adapted, Unadapted
from fk_bench.evaluate.adapters.foreign_files import write as write_adapted
from fk_bench.trace.schema import INDEX, Definition, Trace, TraceError, Workload, read_json, read_jsonl
from fk_bench.trace.solutions import constants_of, restored
from fk_bench.trace.verdicts import row_of

ROWS = 32 << 10  # bytes of rows kept of a float tensor, as `fk-bench capture --values sample` keeps
SCALE = 1000  # of weights that are no integers: a capture counts calls


@dataclass
class Found:
    """The results of an import: cases and candidates by op, rows, and what was left out, by reason."""

    cases: Counter[str] = field(default_factory=Counter)
    candidates: dict[str, list[str]] = field(default_factory=dict)  # folder: ops
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def read(folder: Path, out: Path) -> Found:
    """Import a data set into captures/, candidates/ and rows.jsonl of `out`. Raises TraceError."""
    if not (folder / "definitions").is_dir():
        raise TraceError(f"{folder} is no data set: it has no folder definitions/")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TraceError(f"--out {out} exists: choose a new folder, or an empty one")
    found = Found()
    definitions: dict[str, Definition] = {}
    for file in sorted((folder / "definitions").rglob("*.json")):
        try:
            one = read_json(file, Definition)
        except TraceError as problem:
            found.left_out[str(problem)] += 1
            continue
        definitions[one.name] = one
    out.mkdir(parents=True, exist_ok=True)
    _cases(folder, out, definitions, found)
    _candidates(folder, out, definitions, found)
    _rows(folder, out, definitions, found)
    return found


def slug(text: str) -> str:
    """A name for a folder."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-.") or "unnamed"


def _op_of(one: Definition) -> tuple[OpSpec, tuple[str, ...]]:
    """The op with this definition, and its arguments in the order of the inputs. Raises TraceError."""
    if one.op_type in registry.op_modules():
        spec = registry.get(one.op_type)
        if unknown := sorted(set(one.inputs) - {a.name for a in spec.arguments}):
            raise TraceError(f"{one.name}: the op {spec.name} has no argument {unknown[0]}")
        return spec, tuple(one.inputs)
    try:
        name, arguments = solutions_layout.op_of(one.name)
    except Unadapted as reason:
        raise TraceError(str(reason)) from None
    if arguments is None or len(arguments) != len(one.inputs):
        raise TraceError(f"{one.name}: its inputs are not those of the op {name}")
    return registry.get(name), arguments


# Workloads


def _cases(folder: Path, out: Path, definitions: Mapping[str, Definition], found: Found) -> None:
    index = _index(folder)
    calls: dict[str, list[dict[str, Any]]] = {}
    tensors: dict[str, torch.Tensor] = {}
    weights: list[float] = []
    for one in _traces(folder / "workloads", definitions, found):
        known = index.get(one.workload.uuid)
        try:
            spec, row = _call(folder, definitions[one.definition], one.workload, tensors, known is not None)
        except TraceError as reason:
            found.left_out[f"workload: {reason}"] += 1
            continue
        weights.append(known if known is not None else 1.0)
        calls.setdefault(spec.name, []).append(row)
        row["count"] = weights[-1]
        found.cases[spec.name] += 1
    if not calls:
        return
    scale = 1 if all(float(w).is_integer() and w > 0 for w in weights) else SCALE
    for row in (r for of in calls.values() for r in of):
        row["count"] = max(1, round(row["count"] * scale))
        for each in row["values"]:
            each["count"] = row["count"]
    ops = {
        op: {"count": sum(r["count"] for r in of), "signatures": len(of), "calls": of}
        for op, of in sorted(calls.items())
    }
    head = {
        "schema": SCHEMA, "model": "", "host": "flashinfer-trace", "scenario": folder.resolve().name,
        "calls": sum(o["count"] for o in ops.values()),
        "notes": [f"counts are weights times {scale}"] if scale > 1 else [],
    }  # fmt: skip
    place = out / "captures" / slug(folder.resolve().name)
    place.mkdir(parents=True, exist_ok=True)
    (place / "capture.json").write_text(to_json({**head, "ops": ops, "modules": []}), encoding="utf-8")
    save_file(tensors, place / "values.safetensors")


def _index(folder: Path) -> dict[str, float]:
    """Weights by uuid, of a data set that was written here."""
    try:
        cases = json.loads((folder / INDEX).read_text(encoding="utf-8"))["cases"]
        weights = {str(number): float(case["weight"]) for number, case in cases.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return {number: w for number, w in weights.items() if math.isfinite(w) and w >= 0}


def _call(
    folder: Path, one: Definition, workload: Workload, tensors: dict[str, torch.Tensor], ours: bool
) -> tuple[OpSpec, dict[str, Any]]:
    """A workload as a signature of a capture, whose values are added to `tensors`. Raises TraceError."""
    spec, names = _op_of(one)
    place = dict(zip(names, one.inputs, strict=True))
    constants = constants_of(one.model_dump())
    args: list[dict[str, Any]] = []
    stand_ins: list[Any] = []
    kept: dict[str, str] = {}
    for argument in spec.arguments:
        name = place.get(argument.name)
        shape = one.shape(name, workload.axes) if name is not None else None
        if name is None or shape is None:
            value = _number(spec, argument, name, workload, constants, own=names == tuple(one.inputs))
            is_dtype = isinstance(argument, Scalar) and argument.dtype and value is not None
            args.append({"name": argument.name, "value": value, **({"type": "dtype"} if is_dtype else {})})
            stand_ins.append(getattr(torch, str(value)) if is_dtype else value)
            continue
        dtype = getattr(torch, one.inputs[name].dtype, None)
        if dtype is None:
            raise TraceError(f"{one.name}: torch has no dtype {one.inputs[name].dtype}")
        blank = torch.empty(shape, dtype=dtype, device="meta")
        args.append(
            {
                "name": argument.name,
                "shape": shape,
                "dtype": one.inputs[name].dtype,
                "strides": list(blank.stride()),
            }
        )
        value = _tensor(folder, one, name, workload, blank)
        if value is None and not dtype.is_floating_point:
            raise TraceError(f"{one.name}: {name} has random integers, which mean nothing to {spec.name}")
        stand_ins.append(blank if value is None or dtype.is_floating_point else value)
        if (
            value is not None
            and dtype.is_floating_point
            and argument.name not in FLOAT_VALUES.get(spec.name, ())
        ):
            made = spec.declaration.tensors[argument.name].values is not None
            value = None if (ours and made) or not is_sampled(value) else rows_of(value, ROWS)
        if value is not None:
            kept[argument.name] = digest(value)
            tensors[kept[argument.name]] = value
    _check(spec, one, stand_ins)
    return spec, {"count": 1, "args": args, "values": [{"count": 1, "args": kept}] if kept else []}


def _number(
    spec: OpSpec, argument: Any, name: str | None, workload: Workload, constants: Mapping[str, Any], own: bool
) -> Any:
    """The value of an argument without a tensor."""
    stated = workload.inputs.get(name) if name is not None else None
    if stated is not None:
        return stated.value
    if argument.name in constants:
        return constants[argument.name]
    if isinstance(argument, Scalar) and not own:  # a definition of others has it inside
        declared = spec.declaration.axes.get(argument.axis)
        usual = spec.defaults.get(argument.name, declared.default if declared is not None else REQUIRED)
        if usual is REQUIRED or callable(usual):
            raise TraceError(f"the definition has no {argument.name}, which {spec.name} needs")
        return usual
    return None


def _tensor(
    folder: Path, one: Definition, name: str, workload: Workload, blank: torch.Tensor
) -> torch.Tensor | None:
    """The stored values of an input; None: random ones. Raises TraceError."""
    stated = workload.inputs.get(name)
    if stated is None or stated.type == "random":
        return None
    if stated.type == "scalar":
        raise TraceError(f"{one.name}: {name} is a number, but the definition has a tensor")
    file = folder / stated.path
    if not file.resolve().is_relative_to(folder.resolve()):
        raise TraceError(f"{one.name}: {stated.path} is outside the data set")
    try:
        with safe_open(file, "pt") as stored:
            value = stored.get_tensor(stated.tensor_key)
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{one.name}: {stated.path}: {error}") from None
    if value.shape != blank.shape or value.dtype != blank.dtype:
        raise TraceError(
            f"{one.name}: {stated.path} has {value.dtype} {list(value.shape)} for {name}, not {blank.dtype}"
            f" {list(blank.shape)}"
        )
    return value.contiguous()


def _check(spec: OpSpec, one: Definition, stand_ins: list[Any]) -> None:
    """Raise TraceError for arguments that are no call of the op."""
    try:
        case = spec.case_of(stand_ins, "imported")
        made = definition_of(spec, case)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise TraceError(f"{one.name}: not a call of {spec.name} ({type(error).__name__}: {error})") from None
    if one.op_type == spec.name:
        stated = {n: (t.shape, t.dtype) for n, t in one.inputs.items()}
        if stated != {n: (t["shape"], t["dtype"]) for n, t in made["inputs"].items()}:
            raise TraceError(f"{one.name}: inputs differ from those of the op {spec.name}")


# Solutions


def _candidates(folder: Path, out: Path, definitions: Mapping[str, Definition], found: Found) -> None:
    place = folder / "solutions"
    taken: dict[tuple[str, str], Any] = {}
    for inner in sorted({f.parent for f in place.rglob("*.json")}):
        for file, adapted in solutions_layout.adapted(inner):
            document = json.loads(file.read_text(encoding="utf-8"))
            one = definitions.get(str(document["definition"]))
            if one is None:
                found.left_out[f"solution: there is no definition {document['definition']}"] += 1
                continue
            own = (
                restored(one.op_type, document, one.model_dump())
                if one.op_type in registry.op_modules()
                else None
            )
            if own is None and not isinstance(adapted, Adapted):
                found.left_out[f"solution: {adapted}"] += 1
                continue
            op = one.op_type if own is not None else adapted.op  # type: ignore[union-attr]
            content = own if own is not None else file
            author = slug(str(document.get("author") or "unknown"))
            target = _free(taken, author, op, content)
            if target is None:  # the same candidate, for another definition
                continue
            folder_out = out / "candidates" / target
            folder_out.mkdir(parents=True, exist_ok=True)
            if own is None:
                assert isinstance(adapted, Adapted)
                write_adapted(adapted, solutions_layout.LAYOUT, folder_out)
            else:
                for path, text in own.items():
                    (folder_out / path).parent.mkdir(parents=True, exist_ok=True)
                    (folder_out / path).write_text(text, encoding="utf-8")
            found.candidates.setdefault(target, []).append(op)


def _free(taken: dict[tuple[str, str], Any], author: str, op: str, content: Any) -> str | None:
    """The author's first folder without a candidate for this op; None if one of them is this very candidate."""
    for number in range(1, len(taken) + 2):
        name = author if number == 1 else f"{author}-{number}"
        if (name, op) not in taken:
            taken[name, op] = content
            return name
        if taken[name, op] == content:
            return None
    raise AssertionError("more names than candidates")


# Traces


def _rows(folder: Path, out: Path, definitions: Mapping[str, Definition], found: Found) -> None:
    made = []
    for one in _traces(folder / "traces", definitions, found):
        try:
            op = _op_of(definitions[one.definition])[0].name
        except TraceError:
            op = None  # the verdict is kept under the definition's name
        try:
            made.append(row_of(one, op, slug(folder.resolve().name)))
        except TraceError as reason:
            found.left_out[f"trace: {reason}"] += 1
    if made:
        rows.append(out / "rows.jsonl", made)
    found.rows = len(made)


def _traces(place: Path, definitions: Mapping[str, Definition], found: Found) -> Iterator[Trace]:
    for file in sorted(place.rglob("*.jsonl")):
        for one in read_jsonl(file):
            if isinstance(one, TraceError):
                found.left_out[str(one)] += 1
            elif one.definition not in definitions:
                found.left_out[f"there is no definition {one.definition}"] += 1
            else:
                yield one
