"""Run the Triton kernels of recurrences in chunks, under TRITON_INTERPRET=1, and print {name of a run: problem}."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
from support.kernels.op_cases import call, make_args, mismatch, oracle, poison

from fastkernels.core import registry
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.recurrence.kernels import linear_chunks

OPS = "gated_delta_rule", "gated_linear_attention", "kda", "rwkv7", "ssd"
CASES = {
    "chunks": {"seq_lens": (65, 33), "new": 1, "padding": 0},
    "split": {"seq_lens": (141,), "new": 0, "padding": 0},
}
STRENGTHS = 0.03, 4.0
BY_CHANNEL = "gated_linear_attention", "kda"
SEGMENTED = "gated_linear_attention", "ssd"
SEGMENT = 128  # tokens
SEGMENTS = {"seq_lens": (300, 0, 5, 257, 128), "new": 1, "padding": 1}
SHARED = {"heads": 4}  # of one group: their products are computed once
OVERFLOW = {"seq_lens": (64,), "new": 1, "padding": 0}
PARTS = 70, 1, 70  # in chunks, token by token, in chunks


def args_of(spec: OpSpec, name: str) -> list[Any]:
    packed = next(c for c in spec.cases if c.name == "packed")
    dims = {**packed.dims, **CASES[name]}
    return make_args(spec, dataclasses.replace(packed, name=name, dims=dims))


def named(spec: OpSpec, args: list[Any]) -> dict[str, Any]:
    return dict(zip((a.name for a in spec.arguments), args, strict=True))


def parts(spec: OpSpec, fn: Any, args: list[Any], lens: tuple[int, ...]) -> list[torch.Tensor]:
    """The outputs and states of one sequence in several calls."""
    given, outs, start = named(spec, args), [], 0
    tokens = {a.name for a in spec.arguments if getattr(a, "axes", "") and "tokens" in str(a.axes).split()}
    tokens |= {"g"} if spec.name == "gated_linear_attention" else set()
    for n in lens:
        cut = {k: x[start : start + n] if k in tokens and x is not None else x for k, x in given.items()}
        cut["cu_seqlens"] = torch.tensor([0, n], dtype=torch.int32, device=given["state"].device)
        outs.append(fn(*cut.values()))
        start += n
    return [torch.cat(outs), given["state"]]


def problems(name: str) -> Iterator[tuple[str, str | None]]:
    spec = registry.get(name)
    fn = next(p.fn for p in spec.op.providers if p.name == "triton")
    case = next(c for c in spec.cases if c.name == "packed")
    loose = dataclasses.replace(
        spec, tolerance={"float32": dataclasses.replace(spec.tolerance["float32"], atol=3e-5)}
    )
    for kind, edit in spec.extremes.items():
        args = args_of(spec, "chunks")
        edit(args)
        want = oracle(spec, args)
        yield kind, mismatch(loose, case, call(spec.op, fn, args), want)
    for strength in STRENGTHS:
        args = args_of(spec, "chunks")
        given = named(spec, args)
        given[next(n for n in ("g", "w", "dt") if n in given)].mul_(strength)  # a chunk is one block, or many
        want = oracle(spec, args)
        yield f"decays x {strength}", mismatch(spec, case, call(spec.op, fn, args), want)
    if name in BY_CHANNEL:
        args = args_of(spec, "chunks")
        given = named(spec, args)
        given["g"][:70, :1].mul_(20)  # the first head's first chunk is halved, and no other
        want = oracle(spec, args)
        yield "mixed", mismatch(loose, case, call(spec.op, fn, args), want)
    if name in SEGMENTED:
        gates = ("head", "token") if "gates" in spec.axes else (None,)
        for (kind, edit), gate in itertools.product(
            {"none": lambda args: None, **spec.extremes}.items(), gates
        ):
            dims = {**case.dims, **SEGMENTS} | ({"gates": gate} if gate else SHARED)
            args = make_args(spec, dataclasses.replace(case, dims=dims))
            edit(args)
            want = oracle(spec, args)
            cut = linear_chunks.segment_of
            linear_chunks.segment_of = lambda p: SEGMENT
            try:
                yield f"segments-{kind}-{gate}", mismatch(loose, case, call(spec.op, fn, args), want)
            finally:
                linear_chunks.segment_of = cut
    if name == "ssd":
        half = dataclasses.replace(case, dims={**case.dims, **SHARED, **OVERFLOW}, dtype="float16")
        args = make_args(spec, half)
        given = named(spec, args)
        for key, values in (("x", (0.1, 0.2)), ("b", (70, 90)), ("c", (70, 90)), ("dt", (-6, -6))):
            given[key].uniform_(*values)
        want = oracle(spec, args)
        yield "overflow", mismatch(spec, half, call(spec.op, fn, args), want)
    args = args_of(spec, "split")
    want = oracle(spec, args)
    yield "split", mismatch(spec, case, parts(spec, fn, args, PARTS), want)


def main(*names: str) -> None:
    poison()
    print(json.dumps({f"{n}-{kind}": problem for n in names for kind, problem in problems(n)}))
