"""Extreme cases that follow from an op's declaration: structure, outliers in each argument, heavy tails, other numbers
such as another epsilon, NaN and infinity.

Values change in place. Structure is another layout of the same values, or other sizes. A kind applies to a case if the
op's reference computes it: that is the op's contract.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastkernels.core.spec import Case, OpSpec, Scalar, Tensor
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.slots import scalable, weights

Edit = Callable[[list[Any]], None]
Place = Callable[[torch.Tensor], torch.Tensor]
PAD = 8  # columns behind each row; 16 bytes or more, so that rows stay aligned
FACTOR = 64.0  # of an outlier to the largest value
HUGE = 3e4  # a value that float16 holds
PARTS = 4  # of the last dimension, each with an outlier, a NaN or an infinity
TAIL = 5  # a power: about six of 4,096 normal values then hold most of the sum of squares
HEAVY = "heavy_tails"  # checked on every case that has it
OTHER_EPSILON, OTHER, SMALL = 4096.0, 3.0, 0.01  # factors of a number below SMALL, and of others
LEADING = {"one_dimension": (), "four_dimensions": (2, 1, 3)}
HEADROOM = 2  # between the largest value of one draw and the largest number of its dtype
MOST = 1 << 22  # bytes of a case whose reference is tried


@dataclass(frozen=True)
class Kind:
    """One kind of extreme case.

    edit       changes the arguments in place; None: the sizes alone are extreme
    sizes      sizes(case) -> the case with other sizes; None if the op has none of these
    values     the change leaves the layout as it is, so it can also be tried on a timed case
    reshapes   the results have to be those of the usual shape
    accepted   our op has to accept it, too: a layout that a reference computes may be outside of the op's contract
    nonfinite  the arguments have NaN or infinite values: where the oracle has one, any of them is right, or any value
               at all if the op contains them
    """

    name: str
    edit: Edit | None = None
    sizes: Callable[[Case], Case | None] | None = None
    values: bool = False
    nonfinite: bool = False
    reshapes: bool = False
    accepted: bool = False


def kinds(spec: OpSpec) -> Iterator[Kind]:
    """All kinds of an op."""
    if not spec.arguments:
        return
    for i, argument in enumerate(spec.arguments):
        if isinstance(argument, Tensor) and i not in spec.bounded:
            # Several in a table or a weight are beyond what its op's numbers resolve
            most = PARTS if i in spec.activations else 1
            yield Kind(f"outlier_{argument.name}", _on(i, _outlier(most)), values=True)
        if i in spec.activations:
            yield Kind(f"huge_{argument.name}", _on(i, _huge), values=True)
    for number in spec.arguments:
        named = isinstance(number, Scalar) and isinstance(number.default, (str, bool))  # a group, a flag
        if isinstance(number, Scalar) and number.expression is None and not named:
            yield Kind(f"other_{number.name}", sizes=_other(spec, number))
    if spec.activations and not spec.tie_sensitive:
        yield Kind(HEAVY, _each(spec.activations, _heavy), values=True)
        yield from _nonfinite(spec)
    placed = [*spec.activations, *(i for i in spec.declaration.mutated if i not in spec.activations)]
    yield Kind("rows_apart", _placed(placed, _of_floats(_rows_apart)))
    yield Kind("turned", _placed(placed, _of_floats(_turned)))
    every = [i for i, a in enumerate(spec.arguments) if isinstance(a, Tensor)]
    for size in (2, 4):
        yield Kind(f"offset_{size}_bytes", _placed(every, _of_floats(_offset(size))))
    free = [i for i in every if i not in weights(spec)]  # packed weights have the layout of their library
    yield Kind("rows_apart_integers", _placed(free, _of_integers(_rows_apart)), accepted=True)
    yield Kind("offset_integers", _placed(free, _of_integers(_offset(0))), accepted=True)
    for name, lead in LEADING.items():
        if any(d.star for a in spec.arguments if isinstance(a, Tensor) for _, dims in a.shapes for d in dims):
            yield Kind(name, sizes=_leading(spec, lead))
        else:
            yield Kind(name, _reshaped(spec, one=not lead), reshapes=True, accepted=True)
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
        if kind.reshapes and not _only_reshaped(spec.reference(*before), result):
            return None
        if kind.accepted:
            spec.op(*layout.mapped(args, torch.clone))
    except Exception:  # outside of the contract, whatever the reference raises
        return None
    if kind.values and not any(t.numel() for t in layout.tensors(result)):
        return None  # no result shows the change
    outputs = [t for t in layout.tensors(result) if t.is_floating_point()]
    if kind.nonfinite and not all(map(scalable, layout.tensors(result))):
        return None  # integers and 8-bit floats hold no NaN that is right or wrong
    if not kind.nonfinite and kind.values and not all(map(fits, outputs)):
        return None  # beyond what the op's numbers can hold
    return replace(made, weight=0.0)


def fits(t: torch.Tensor) -> bool:
    """Whether the numbers of its dtype hold its values, and those of other draws of the same case."""
    largest = t.to(torch.float64).abs().nan_to_num(math.inf).amax() if t.numel() else 0.0
    room = HEADROOM if scalable(t) else 1  # 8-bit floats are scaled so that they use all of their range
    return bool(room * largest <= torch.finfo(t.dtype).max)


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


def _each(positions: Sequence[int], change: Callable[[torch.Tensor], None]) -> Edit:
    def edit(args: list[Any]) -> None:
        for i in positions:
            _on(i, change)(args)

    return edit


def places(t: torch.Tensor) -> list[tuple[int, ...]]:
    """An element in each of the PARTS of the last dimension: in the first, the last and other rows, at most half.

    A kernel may read a half of the last dimension in another way, as a gate. The places follow from the values, which
    are secret, so the same values give the same places again.
    """
    if not t.dim():
        return [()]
    rng = random.Random(t.flatten()[:64].double().nan_to_num().sum().item())
    columns, rows = t.shape[-1], t.numel() // t.shape[-1]
    ends = [*dict.fromkeys((0, rows - 1))]
    rng.shuffle(ends)
    others = range(1, rows - 1)
    chosen = [*ends, *rng.sample(others, min(PARTS - len(ends), len(others)))][: max(1, rows // 2)]
    parts = [*range(min(PARTS, columns))]
    rng.shuffle(parts)
    found = []
    for i, part in enumerate(parts):
        begin, end = part * columns // len(parts), (part + 1) * columns // len(parts)
        row = torch.unravel_index(torch.tensor(chosen[i % len(chosen)]), t.shape[:-1]) if t.dim() > 1 else ()
        found.append((*(int(n) for n in row), rng.randrange(begin, end)))
    return found


def put_signed(t: torch.Tensor, value: float | torch.Tensor, most: int = PARTS) -> None:
    """This value at all places or `most` of them, of both signs in each half if the tensor has both."""
    chosen = sorted(places(t)[:most], key=lambda at: at[-1:])
    signs = [sign for sign, found in ((1, t.max() > 0), (-1, t.min() < 0)) if found] or [1]
    if t[chosen[0]] < 0:
        signs.reverse()
    for i, at in enumerate(chosen):
        t[at] = signs[i % len(signs)] * value


def _outlier(most: int) -> Callable[[torch.Tensor], None]:
    return lambda t: put_signed(t, t.abs().max() * FACTOR, most)


def _huge(t: torch.Tensor) -> None:
    put_signed(t, HUGE)


def _put(value: float) -> Callable[[torch.Tensor], None]:
    def change(t: torch.Tensor) -> None:
        for at in places(t):
            t[at] = value

    return change


def _heavy(t: torch.Tensor) -> None:
    """The same rms, most of it in few values of each row: a sum that leaves out some values is wrong."""
    wide = t.double()
    tails = wide.sign() * wide.abs().pow(TAIL)
    t.copy_(tails * (wide.pow(2).mean() / tails.pow(2).mean().clamp(min=1e-300)).sqrt())


def _nonfinite(spec: OpSpec) -> Iterator[Kind]:
    """NaN and infinity of both signs in each activation; a NaN alone in an argument that contains it.

    An infinite query can have no score but minus infinity, which references take for masked keys.
    """
    if spec.mixed:
        return
    if spec.contained is not None:
        yield Kind("nan", _on(spec.contained, _put(float("nan"))), values=True, nonfinite=True)
        return
    found = [*spec.activations]
    for number, i in enumerate(found):
        for value, given in (("nan", "nan"), ("inf", "inf"), ("minus_inf", "-inf")):
            name = f"{value}_{spec.arguments[i].name}" if number else value
            yield Kind(name, _on(i, _put(float(given))), values=True, nonfinite=True)


# Structure


def _placed(positions: list[int], place: Place) -> Edit:
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


def _of_floats(place: Place) -> Place:
    return lambda t: place(t) if t.is_floating_point() else t


def _of_integers(place: Place) -> Place:
    """Of int32 and int64: tables, places, ids and lengths. Bytes are packed numbers."""
    return lambda t: place(t) if t.dtype in (torch.int32, torch.int64) else t


def _rows_apart(t: torch.Tensor) -> torch.Tensor:
    """Rows with PAD more columns between them."""
    if t.dim() < 2 or t.numel() == t.shape[-1]:
        return t
    wide = torch.zeros((*t.shape[:-1], t.shape[-1] + PAD), dtype=t.dtype, device=t.device)
    return wide[..., : t.shape[-1]].copy_(t)


def _turned(t: torch.Tensor) -> torch.Tensor:
    """The first two dimensions change places in memory; of a matrix, so that no row is contiguous."""
    return t if t.dim() < 2 else t.transpose(0, 1).contiguous().transpose(0, 1)


def _offset(size: int) -> Place:
    """The first value lies so many bytes behind an aligned address; 0: one value."""

    def place(t: torch.Tensor) -> torch.Tensor:
        each = t.element_size()
        if each == 1 or (size and each > size) or not t.is_contiguous():
            return t
        first = size // each or 1
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
