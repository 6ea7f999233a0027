"""Extreme cases that follow from an op's declaration: structure, outliers in each argument, other numbers such as
another epsilon, NaN and infinity.

Values change in place. Structure is another layout of the same values, or other sizes. A kind applies to a case if the
op's reference computes it: that is the op's contract.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastkernels.core.spec import Case, OpSpec, Scalar, Tensor
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.slots import scalable

Edit = Callable[[list[Any]], None]
PAD = 8  # columns behind each row; 16 bytes or more, so that rows stay aligned
FACTOR = 64.0  # of an outlier to the largest value; it keeps its sign
OTHER_EPSILON, OTHER, SMALL = 4096.0, 3.0, 0.01  # factors of a number below SMALL, and of others
LEADING = {"one_dimension": (), "four_dimensions": (2, 1, 3)}
MOST = 1 << 22  # bytes of a case whose reference is tried


@dataclass(frozen=True)
class Kind:
    """One kind of extreme case.

    edit       changes the arguments in place; None: the sizes alone are extreme
    sizes      sizes(case) -> the case with other sizes; None if the op has none of these
    values     the change leaves the layout as it is, so it can also be tried on a timed case
    reshapes   the results have to be those of the usual shape
    nonfinite  the arguments have NaN or infinite values: where the oracle has one, any of them is right, or any value
               at all if the op contains them
    """

    name: str
    edit: Edit | None = None
    sizes: Callable[[Case], Case | None] | None = None
    values: bool = False
    nonfinite: bool = False
    reshapes: bool = False


def kinds(spec: OpSpec) -> Iterator[Kind]:
    """All kinds of an op."""
    if not spec.arguments:
        return
    for i, argument in enumerate(spec.arguments):
        if isinstance(argument, Tensor):
            yield Kind(f"outlier_{argument.name}", _on(i, _outlier), values=True)
    for number in spec.arguments:
        named = isinstance(number, Scalar) and isinstance(number.default, (str, bool))  # a group, a flag
        if isinstance(number, Scalar) and number.expression is None and not named:
            yield Kind(f"other_{number.name}", sizes=_other(spec, number))
    if spec.activations and not spec.tie_sensitive:
        first = spec.activations[0] if spec.contained is None else spec.contained
        for name in ("nan", "inf"):
            yield Kind(name, _on(first, _put(float(name))), values=True, nonfinite=True)
    placed = [*spec.activations, *(i for i in spec.declaration.mutated if i not in spec.activations)]
    yield Kind("rows_apart", _placed(placed, _rows_apart))
    yield Kind("turned", _placed(placed, _turned))
    every = [i for i, a in enumerate(spec.arguments) if isinstance(a, Tensor)]
    for size in (2, 4):
        yield Kind(f"offset_{size}_bytes", _placed(every, _offset(size)))
    for name, lead in LEADING.items():
        if any(d.star for a in spec.arguments if isinstance(a, Tensor) for _, dims in a.shapes for d in dims):
            yield Kind(name, sizes=_leading(spec, lead))
        else:
            yield Kind(name, _reshaped(spec, one=not lead), reshapes=True)
    for axis in _per_call(spec):
        yield Kind(f"no_{axis}", sizes=_empty(axis))


def apply(kind: Kind, spec: OpSpec, case: Case, rng: random.Random) -> Case | None:
    """The case with the sizes of this kind, if the op's contract has it there; else None."""
    made = case if kind.sizes is None else kind.sizes(case)
    if made is None or (made is case and kind.edit is None):
        return None
    try:
        if not all(rule(spec.declaration.sizes(made.dims, made.dtype)) for rule in spec.declaration.rules):
            return None
        if spec.bytes_moved(made) > MOST:
            return None
        args = spec.inputs(made, "cpu", torch.Generator().manual_seed(rng.getrandbits(62)))
        before = layout.mapped(list(args), torch.clone)
        if kind.edit is not None:
            kind.edit(args)
        if kind.sizes is None and _same(before, args):
            return None
        result = spec.reference(*layout.mapped(args, torch.clone))
        if kind.reshapes:
            if not _only_reshaped(spec.reference(*before), result):
                return None
            spec.op(*layout.mapped(args, torch.clone))  # the reference may compute what the op refuses
    except Exception:  # outside of the contract, whatever the reference raises
        return None
    outputs = [t for t in layout.tensors(result) if t.is_floating_point()]
    if kind.nonfinite and not all(map(scalable, layout.tensors(result))):
        return None  # integers and 8-bit floats hold no NaN that is right or wrong
    if not kind.nonfinite and kind.values and not all(t.to(torch.float32).isfinite().all() for t in outputs):
        return None  # beyond what the op's numbers can hold
    return replace(made, weight=0.0)


def _same(before: list[Any], after: list[Any]) -> bool:
    """Whether values, shapes and layout are as before: the change found nothing to change."""
    pairs = list(zip(layout.tensors(before), layout.tensors(after), strict=True))
    return all(
        (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
        and _equal(a, b)
        for a, b in pairs
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().flatten().view(torch.uint8) if t.numel() else t for t in (a, b)]
    return torch.equal(*raw)


# Values


def _on(position: int, change: Callable[[torch.Tensor], None]) -> Edit:
    def edit(args: list[Any]) -> None:
        t = args[position] if position < len(args) else None
        if isinstance(t, torch.Tensor) and scalable(t) and t.numel():
            change(t)

    return edit


def _middle(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(n // 2 for n in t.shape)


def _outlier(t: torch.Tensor) -> None:
    at = _middle(t)
    most = t.abs().max() * FACTOR
    t[at] = torch.where(t[at] < 0, -most, most)


def _put(value: float) -> Callable[[torch.Tensor], None]:
    def change(t: torch.Tensor) -> None:
        t[_middle(t)] = value

    return change


# Structure


def _placed(positions: list[int], place: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Copy these arguments to another layout; those that share memory with others stay."""

    def edit(args: list[Any]) -> None:
        storages = [t.untyped_storage().data_ptr() for t in layout.tensors(args)]
        for i in positions:
            t = args[i] if i < len(args) else None
            if (
                isinstance(t, torch.Tensor)
                and t.numel()
                and storages.count(t.untyped_storage().data_ptr()) == 1
            ):
                args[i] = place(t)

    return edit


def _rows_apart(t: torch.Tensor) -> torch.Tensor:
    """Rows with PAD more columns between them."""
    if t.dim() < 2 or not t.is_floating_point():
        return t
    wide = torch.zeros((*t.shape[:-1], t.shape[-1] + PAD), dtype=t.dtype, device=t.device)
    return wide[..., : t.shape[-1]].copy_(t)


def _turned(t: torch.Tensor) -> torch.Tensor:
    """The first two dimensions change places in memory; of a matrix, so that no row is contiguous."""
    if t.dim() < 2 or not t.is_floating_point():
        return t
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def _offset(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The first value lies so many bytes behind an aligned address."""

    def place(t: torch.Tensor) -> torch.Tensor:
        if not scalable(t) or t.element_size() > size or not t.is_contiguous():
            return t
        first = size // t.element_size()
        flat = torch.zeros(t.numel() + first, dtype=t.dtype, device=t.device)
        return flat[first:].view(t.shape).copy_(t)

    return place


def _leading(spec: OpSpec, lead: tuple[int, ...]) -> Callable[[Case], Case | None]:
    """Other leading dimensions, for ops whose declaration leaves them open (`*tokens`)."""
    tensors = [a for a in spec.arguments if isinstance(a, Tensor)]
    open_axes = {d.expr.name for t in tensors for _, dims in t.shapes for d in dims if d.star and d.expr.name}

    def sizes(case: Case) -> Case | None:
        named = {n: lead for n in open_axes if n in case.dims}
        return replace(case, dims={**case.dims, **named}) if named else None

    return sizes


def _reshaped(spec: OpSpec, one: bool) -> Edit:
    """The same call with the activations' first axis as three, or of its first token alone without that axis."""
    first = [spec.arguments[i] for i in spec.activations[:1]]
    names = {d.expr.name for t in first if isinstance(t, Tensor) for _, dims in t.shapes for d in dims[:1]}

    def edit(args: list[Any]) -> None:
        for i, (argument, t) in enumerate(zip(spec.arguments, args, strict=False)):
            if isinstance(argument, Tensor) and isinstance(t, torch.Tensor) and t.dim() > 1:
                begins = {dims[0].expr.name for _, dims in argument.shapes if dims}
                if begins & names:
                    args[i] = t[0].clone() if one else t.clone().view(1, t.shape[0], 1, *t.shape[1:])

    return edit


def _only_reshaped(usual: Any, result: Any) -> bool:
    """Whether the results are the usual ones, or those of the first token, in other shapes."""
    for a, b in zip(layout.tensors(usual), layout.tensors(result), strict=True):
        if not b.numel() or not torch.equal(a.flatten()[: b.numel()], b.flatten()):
            return False
    return True


def _other(spec: OpSpec, number: Scalar) -> Callable[[Case], Case | None]:
    """Another value of a number that is not a size, such as epsilon: production has several, and cases often one."""

    def sizes(case: Case) -> Case | None:
        value = number.of(known := spec.declaration.sizes(case.dims, case.dtype))
        if not isinstance(value, float) or not value:  # zero often means that something is off
            return None
        changed = value * (OTHER_EPSILON if abs(value) < SMALL else OTHER)
        held: Any = changed
        if number.index is not None:
            all_of = list(known[number.axis])
            all_of[number.index] = changed
            held = tuple(all_of)
        return replace(case, dims={**case.dims, number.axis: held})

    return sizes


def _per_call(spec: OpSpec) -> list[str]:
    """The counts that differ from call to call and are sizes of an activation."""
    tensors = [spec.arguments[i] for i in spec.activations if i < len(spec.arguments)]
    shapes = [dims for t in tensors if isinstance(t, Tensor) for _, dims in t.shapes]
    named = {n for dims in shapes for d in dims[:1] for n in d.expr.names}
    return [n for n, axis in spec.axes.items() if axis.varies and not axis.is_count and n in named]


def _empty(axis: str) -> Callable[[Case], Case | None]:
    def sizes(case: Case) -> Case | None:
        old: Mapping[str, Any] = case.dims
        if axis not in old:
            return None
        none = (0, *old[axis][1:]) if isinstance(old[axis], tuple) and old[axis] else 0
        return None if isinstance(old[axis], (list, str)) else replace(case, dims={**old, axis: none})

    return sizes
