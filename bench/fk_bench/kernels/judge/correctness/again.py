"""A wrong case with the same values again: a text that a verdict reveals, and the trial that is made from it."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastkernels.core.spec import Case, OpSpec
from fk_bench.kernels.judge.correctness import cases, extremes
from fk_bench.kernels.judge.correctness.cases import Trial


def revealed(spec: OpSpec, trial: Trial, recipe: Mapping[str, Any] | None) -> str:
    """The values of a call as a text; '' if they are not known, or the case has sizes that are no plain numbers."""
    if recipe is None:
        return ""
    case = trial.case
    known = {
        "op": spec.name, "source": trial.source, "name": case.name, "dims": dict(case.dims), "dtype": case.dtype,
        **recipe,
    }  # fmt: skip
    try:
        packed = zlib.compress(json.dumps(known).encode(), 9)
    except TypeError:
        return ""
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def trial_of(spec: OpSpec, text: str, captures: Path | None) -> Trial:
    """The trial with these values. Raises ValueError for a text of another op, or that is none."""
    try:
        raw = zlib.decompress(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        known = json.loads(raw)
        op, source, name = known["op"], known["source"], known["name"]
    except (ValueError, KeyError, TypeError, zlib.error):
        raise ValueError(f"--values {text[:20]}...: not what a wrong case gave; copy all of it") from None
    if op != spec.name:
        raise ValueError(f"--values is of the op {op}, not of {spec.name}")
    case = Case(name, {k: _plain(v) for k, v in known["dims"].items()}, known["dtype"])
    make = cases.maker(spec, case)
    if source == "captured":
        found = cases.trials(spec, ("captured",), "cuda", (name,), captures)
        if not found:
            raise ValueError(f"--values is of the captured case {name}, which these captures do not have")
        make = found[0].make
    kind = known.get("edit") or (name.partition(":")[2] if source == "extreme" else "")
    edits = {**cases.changes(spec), **{k.name: k.edit for k in extremes.kinds(spec)}}
    nonfinite = frozenset(k.name for k in extremes.kinds(spec) if k.nonfinite and k.name == kind)
    if known.get("edit"):
        case = Case(f"{name}:{kind}", case.dims, case.dtype)
    return Trial("values", case, make, edits.get(kind), nonfinite=nonfinite, recipe=known)


def _plain(value: Any) -> Any:
    return tuple(_plain(v) for v in value) if isinstance(value, list) else value
