"""Declare an op's call: arguments by name with their axes. Inputs, dims and bytes of a case follow from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core.expressions import Expr
from fastkernels.core.shapes import near, near_size

REQUIRED: Any = object()  # the default of an axis that every case names
ATTEMPTS = 2000  # at sizes that meet an op's constraints


def _each(pick: Callable[[int, random.Random], int]) -> Callable[[Any, random.Random], Any]:
    def draw(value: Any, rng: random.Random) -> Any:
        return tuple(pick(n, rng) for n in value) if isinstance(value, (tuple, list)) else pick(value, rng)

    return draw


@dataclass(frozen=True)
class Axis:
    """A name in a case's dims: a size, an option, or a dtype. Made by per_call, count, width, option, dtype, counted.

    default  value in cases without it: a constant, an Expr, or a function of the other axes (a Sizes)
    draw     draw(value, rng) -> another value for held-out cases of a case that names it; None: the value stays
    varies   between calls of one model; other axes are constants of a model. Held-out cases draw it in any case
    stated   dims_of always gives it; otherwise, only where it differs from its default
    read     read(args) -> its value, from the arguments by name, if shapes and scalars do not give it; None: unknown
    is_count  `read` counts values, such as the experts that have a token: it makes costs exact, `inputs` ignores it
    is_dtype  its value is the name of a dtype
    """

    default: Any = REQUIRED
    draw: Callable[[Any, random.Random], Any] | None = None
    varies: bool = False
    stated: bool = False
    read: Callable[[SimpleNamespace], Any] | None = None
    is_count: bool = False
    is_dtype: bool = False

    @classmethod
    def per_call(cls, default: Any = REQUIRED, **more: Any) -> Axis:
        """A count that differs between calls of one model: tokens, sequences."""
        return cls(default, **{"draw": _each(near), "varies": True, **more})

    @classmethod
    def count(cls, default: Any = REQUIRED, **more: Any) -> Axis:
        """A count that is a constant of a model: heads, experts."""
        return cls(default, **{"draw": _each(near), **more})

    @classmethod
    def width(cls, default: Any = REQUIRED, **more: Any) -> Axis:
        """A number of channels, a constant of a model. Held-out cases keep factors that kernels need, such as 64."""
        return cls(default, **{"draw": _each(near_size), **more})

    @classmethod
    def option(cls, default: Any = REQUIRED, choices: Sequence[Any] = (), **more: Any) -> Axis:
        """A setting that is a constant of a model. Held-out cases draw it from `choices`, or keep it."""
        return cls(default, (lambda _, rng: rng.choice(choices)) if choices else None, **more)

    @classmethod
    def dtype(cls, default: Any, **more: Any) -> Axis:
        """The name of a tensor's dtype."""
        return cls(default, is_dtype=True, **more)

    @classmethod
    def counted(cls, read: Callable[[SimpleNamespace], Any], default: Any) -> Axis:
        """A number that the values of a call determine; `default` is the most that it can be."""
        return cls(default, varies=True, read=read, is_count=True)


class Sizes(Mapping[str, Any]):
    """The values of all axes in a case, those that it does not name by their defaults; `dtype` is the case's dtype."""

    def __init__(self, axes: Mapping[str, Axis], dims: Mapping[str, Any], dtype: str):
        self.axes, self.dims = axes, dims
        self._values = {"dtype": dtype, **dims}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            axis = self.axes.get(name)
            if axis is None or axis.default is REQUIRED:
                raise KeyError(f"the case gives no {name}")
            default = axis.default
            self._values[name] = default(self) if callable(default) else default
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)


@dataclass(frozen=True)
class _Dim:
    expr: Expr
    optional: bool  # `heads?`: not in every case
    star: bool  # `*tokens`: a tuple of leading sizes


def _parse(text: str) -> tuple[_Dim, ...]:
    parts = text.split()
    return tuple(_Dim(Expr(p.strip("*?")), p.endswith("?"), p.startswith("*")) for p in parts)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the call.

    axes     its shape, one word per size: "tokens heads? 2*d". A size is an expression over axes, without spaces.
             `heads?` exists only in cases that name it; `*tokens` stands for a tuple of leading sizes. A mapping
             {condition: axes} gives alternatives: the first whose condition holds, "" for otherwise
    dtype    a dtype's name, or an axis that holds one; "": the case's
    when     the flag that says whether the tensor is there ("residual", "not weightless"); "": always
    mutated  whether the op writes its new values to this argument
    mean, std  of its normally distributed values
    values   values(call, shape, dtype) -> the tensor, where its values matter
    pad      an axis: so many more columns in memory, of which the tensor is a slice
    bytes    what is read and written of it, an expression over axes that counts whether the tensor is there or not;
             "": every element once, of a mutated tensor twice
    doc      one line for the table of arguments
    """

    name: str
    axes: str | Mapping[str, str]
    dtype: str = ""
    when: str = ""
    mutated: bool = False
    mean: float = 0.0
    std: float = 1.0
    values: Callable[[Call, tuple[int, ...], torch.dtype], torch.Tensor] | None = None
    pad: str = ""
    bytes: str = ""
    doc: str = ""

    @cached_property
    def shapes(self) -> tuple[tuple[Expr, tuple[_Dim, ...]], ...]:
        """(condition, sizes) of each alternative."""
        found = {"": self.axes} if isinstance(self.axes, str) else self.axes
        return tuple((Expr(condition or "1"), _parse(axes)) for condition, axes in found.items())

    @cached_property
    def condition(self) -> Expr | None:
        return Expr(self.when) if self.when else None

    @cached_property
    def flag(self) -> tuple[str, bool] | None:
        """(axis, its value where the tensor is there), if `when` is an axis or `not` an axis."""
        name = Expr(self.when.removeprefix("not ")).name if self.when else None
        return None if name is None else (name, not self.when.startswith("not "))

    @cached_property
    def cost(self) -> Expr | None:
        return Expr(self.bytes) if self.bytes else None

    @property
    def expressions(self) -> list[Expr]:
        """Everything that has to name axes."""
        found = [e for condition, dims in self.shapes for e in (condition, *(d.expr for d in dims))]
        return [*found, *(e for e in (self.condition, self.cost) if e is not None)]

    def there(self, sizes: Sizes) -> bool:
        return self.condition is None or bool(self.condition(sizes))

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Its shape in a case."""
        found: list[int] = []
        for dim in next(dims for condition, dims in self.shapes if condition(sizes)):
            if dim.star:
                found.extend(dim.expr(sizes))
            elif not dim.optional or any(name in sizes.dims for name in dim.expr.names):
                found.append(dim.expr(sizes))
        return tuple(found)

    def torch_dtype(self, sizes: Sizes) -> torch.dtype:
        name = self.dtype or "dtype"
        return getattr(torch, sizes[name] if name == "dtype" or name in sizes.axes else name)

    def sizes_of(self, shape: tuple[int, ...]) -> tuple[list[tuple[Expr, Any]], dict[str, Any]]:
        """([(size's expression, its value)], flags) of a tensor of this shape.

        Sizes in front of the declared ones count as one with the first. Of optional axes the last are there first.
        """
        condition, dims = next((a for a in self.shapes if len(a[1]) == len(shape)), self.shapes[-1])
        flags = {condition.name: True} if condition.name else {}
        if dims[0].star:
            lead = len(shape) - len(dims) + 1
            return [
                (dims[0].expr, shape[:lead]),
                *zip((d.expr for d in dims[1:]), shape[lead:], strict=True),
            ], flags
        missing = max(len(dims) - len(shape), 0)
        for dim in [d for d in dims if d.optional][:missing]:
            dims = tuple(d for d in dims if d is not dim)
        over = len(shape) - len(dims)
        if over > 0:
            shape = (torch.Size(shape[: over + 1]).numel(), *shape[over + 1 :])
        shape = (*[1] * (len(dims) - len(shape)), *shape)
        return [(d.expr, n) for d, n in zip(dims, shape, strict=True)], flags


@dataclass(frozen=True)
class Scalar:
    """An argument that is no tensor.

    dim       the axis that holds it, the argument's name if empty
    default   of that axis, where OpSpec.axes does not declare it
    index     its place in that axis, if one axis holds several scalars
    value     an expression over axes instead: the argument says nothing that the case does not say otherwise
    stated    dims_of gives it even where it equals its default
    dtype     it is a torch.dtype
    rounding  it only says how results are rounded: a class that cannot express it is built all the same
    """

    name: str
    dim: str = ""
    default: Any = REQUIRED
    index: int | None = None
    value: str = ""
    stated: bool = False
    dtype: bool = False
    rounding: bool = False
    doc: str = ""

    @property
    def axis(self) -> str:
        return self.dim or self.name

    @cached_property
    def expression(self) -> Expr | None:
        return Expr(self.value) if self.value else None

    def of(self, sizes: Sizes) -> Any:
        """Its value in a case."""
        if self.expression is not None:
            return self.expression(sizes)
        value = sizes[self.axis] if self.index is None else sizes[self.axis][self.index]
        return getattr(torch, value) if self.dtype and value is not None else value


@dataclass
class Call:
    """A case whose arguments are being made; `call["tokens"]` is the value of an axis."""

    declaration: Declaration
    sizes: Sizes
    device: str
    generator: torch.Generator

    def __getitem__(self, name: str) -> Any:
        return self.sizes[name]

    def randn(self, *size: int) -> torch.Tensor:
        """Normally distributed, in float32."""
        return torch.randn(*size, generator=self.generator, device=self.device)

    def rand(self, *size: int) -> torch.Tensor:
        """Uniformly distributed from 0 to 1, in float32."""
        return torch.rand(*size, generator=self.generator, device=self.device)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor argument of this name, as it is declared."""
        tensor = self.declaration.tensors[name]
        shape, dtype = tensor.shape(self.sizes), tensor.torch_dtype(self.sizes)
        columns = shape[-1] if shape else 0
        if tensor.pad:
            shape = (*shape[:-1], columns + self.sizes[tensor.pad])
        if tensor.values is not None:
            made = tensor.values(self, shape, dtype)
        else:
            made = self.normal(shape, dtype, tensor.mean, tensor.std)
        return made[..., :columns] if tensor.pad else made

    def normal(
        self, shape: Sequence[int], dtype: torch.dtype, mean: float = 0.0, std: float = 1.0
    ) -> torch.Tensor:
        """Normally distributed, made in place where the dtype allows it: experts have billions of weights."""
        if dtype.itemsize == 1:
            limit = torch.finfo(dtype).max
            return (mean + std * self.randn(*shape)).clamp_(-limit, limit).to(dtype)
        made = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return made.normal_(mean, std, generator=self.generator)


def uniform(low: float, high: float) -> Callable[[Call, tuple[int, ...], torch.dtype], torch.Tensor]:
    """Tensor.values: uniformly distributed between two numbers."""
    return lambda call, shape, dtype: (call.rand(*shape) * (high - low) + low).to(dtype)


def full(value: float) -> Callable[[Call, tuple[int, ...], torch.dtype], torch.Tensor]:
    """Tensor.values: one number."""
    return lambda call, shape, dtype: torch.full(shape, value, dtype=dtype, device=call.device)


def fan_in(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Tensor.values of a weight [..., K]: normally distributed with variance 1 / K."""
    return call.normal(shape, dtype, 0.0, max(shape[-1], 1) ** -0.5)


@dataclass(frozen=True)
class Declaration:
    """The arguments and outputs of an op, and their axes. Raises ValueError where an expression names no axis.

    Flags of optional tensors and axes of scalars need no entry in `axes`.
    values  values(call) -> {name: tensor} of the arguments whose values depend on each other; it may make others of
            them with call.tensor(name)
    """

    op: str
    arguments: tuple[Tensor | Scalar, ...]
    outputs: tuple[Tensor, ...]
    axes: Mapping[str, Axis]
    constraints: tuple[str, ...] = ()
    values: Callable[[Call], Mapping[str, torch.Tensor]] | None = None
    tensors: Mapping[str, Tensor] = field(init=False)
    rules: tuple[Expr, ...] = field(init=False)

    def __post_init__(self) -> None:
        tensors = {a.name: a for a in self.arguments if isinstance(a, Tensor)}
        axes = dict(self.axes)
        for tensor in (*tensors.values(), *self.outputs):
            if tensor.flag is not None:
                axes.setdefault(tensor.flag[0], Axis(False))
            for _, dims in tensor.shapes:
                for name in (n for d in dims if d.optional for n in d.expr.names):
                    if name in axes and axes[name].default is REQUIRED:
                        axes[name] = replace(axes[name], default=1)
            if tensor.pad:
                axes.setdefault(tensor.pad, Axis(0))
        for scalar in (a for a in self.arguments if isinstance(a, Scalar) and not a.value):
            axes.setdefault(scalar.axis, Axis(scalar.default, stated=scalar.stated))
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "rules", tuple(Expr(c) for c in self.constraints))
        for argument in (*self.arguments, *self.outputs):
            if isinstance(argument, Tensor):
                self._check(f"{argument.name}", *argument.expressions)
            elif argument.expression is not None:
                self._check(f"{argument.name}", argument.expression)
        self._check("constraints", *self.rules)

    def _check(self, where: str, *expressions: Expr) -> None:
        for expression in expressions:
            for name in sorted(expression.names - set(self.axes) - {"dtype"}):
                raise ValueError(
                    f"{self.op}: {where}: {expression.text!r} names {name}, which is no axis of the op"
                )

    def expression(self, text: str) -> Callable[[Any], Any]:
        """The function of a case that evaluates this expression over axes."""
        found = Expr(text)
        self._check("flops", found)
        return lambda case: found(self.sizes(case.dims, case.dtype))

    def sizes(self, dims: Mapping[str, Any], dtype: str) -> Sizes:
        return Sizes(self.axes, dims, dtype)

    @property
    def counted(self) -> tuple[str, ...]:
        """The axes that count values."""
        return tuple(name for name, axis in self.axes.items() if axis.is_count)

    @property
    def mutated(self) -> tuple[int, ...]:
        """Positions of the arguments that the op writes to."""
        return tuple(i for i, a in enumerate(self.arguments) if isinstance(a, Tensor) and a.mutated)

    @property
    def dtype_argument(self) -> int | None:
        """Position of the first argument with the case's dtype, of those that are always there."""
        for i, a in enumerate(self.arguments):
            if isinstance(a, Tensor) and not a.dtype and not a.when:
                return i
        return None

    def position(self, name: str) -> int:
        """Of an argument. Raises ValueError for an unknown one."""
        names = [a.name for a in self.arguments]
        if name not in names:
            raise ValueError(f"{self.op} has no argument {name!r}: there are {', '.join(names)}")
        return names.index(name)

    def inputs(self, case: Any, device: str, generator: torch.Generator) -> list[Any]:
        """Random arguments of a case, in order. Raises ValueError where `values` gives another shape or dtype."""
        sizes = self.sizes(case.dims, case.dtype)
        call = Call(self, sizes, device, generator)
        given = dict(self.values(call)) if self.values is not None else {}
        made: list[Any] = []
        for argument in self.arguments:
            if isinstance(argument, Scalar):
                made.append(argument.of(sizes))
            elif not argument.there(sizes):
                made.append(None)
            else:
                tensor = given[argument.name] if argument.name in given else call.tensor(argument.name)
                want = argument.shape(sizes), argument.torch_dtype(sizes)
                if (tuple(tensor.shape), tensor.dtype) != want:
                    raise ValueError(
                        f"{self.op}: {argument.name} of case {case.name} is declared as {want[1]} {list(want[0])}, its"
                        f" values are {tensor.dtype} {list(tensor.shape)}"
                    )
                made.append(tensor)
        return made

    def blank(self, case: Any) -> list[Any]:
        """The arguments of a case on the device 'meta': without values and, where an op's values need them, strides."""
        sizes = self.sizes(case.dims, case.dtype)
        return [
            a.of(sizes) if isinstance(a, Scalar)
            else torch.empty(a.shape(sizes), dtype=a.torch_dtype(sizes), device="meta") if a.there(sizes)
            else None
            for a in self.arguments
        ]  # fmt: skip

    def bytes_moved(self, case: Any) -> int:
        """Compulsory reads and writes of device memory."""
        sizes = self.sizes(case.dims, case.dtype)
        total = 0
        for tensor in (*self.tensors.values(), *self.outputs):
            if tensor.cost is not None:
                total += tensor.cost(sizes)
            elif tensor.there(sizes):
                elements = torch.Size(tensor.shape(sizes)).numel()
                total += elements * tensor.torch_dtype(sizes).itemsize * (1 + tensor.mutated)
        return total

    def bind(self, args: Sequence[Any], defaults: Mapping[str, Any]) -> SimpleNamespace:
        """The arguments by name; those that were left out have their defaults."""
        names = [a.name for a in self.arguments]
        if len(args) > len(names):
            raise ValueError(f"{self.op} takes {len(names)} arguments, not {len(args)}")
        return SimpleNamespace(
            **{n: defaults[n] for n in names[len(args) :]}, **dict(zip(names, args, strict=False))
        )

    def dims_of(self, args: Sequence[Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The dims of the case that these arguments are a call of; `defaults` are of those that were left out."""
        given = self.bind(args, defaults)
        found: dict[str, Any] = {}
        open_sizes: list[tuple[Expr, Any]] = []
        dtype = "float32"
        for tensor in reversed(list(self.tensors.values())):
            value = getattr(given, tensor.name)
            if value is not None and not tensor.dtype:
                dtype = str(value.dtype).removeprefix("torch.")
        for tensor in self.tensors.values():
            value = getattr(given, tensor.name)
            if tensor.flag is not None:
                name, present = tensor.flag
                found.setdefault(name, present == (value is not None))
            if value is None:
                continue
            sizes, flags = tensor.sizes_of(tuple(value.shape))
            open_sizes += sizes
            found.update(flags)
            if tensor.dtype in self.axes:
                found.setdefault(tensor.dtype, str(value.dtype).removeprefix("torch."))
        for scalar in (a for a in self.arguments if isinstance(a, Scalar) and not a.value):
            value = getattr(given, scalar.name)
            value = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            if scalar.index is None:
                found[scalar.axis] = value
            else:
                found[scalar.axis] = (*found.get(scalar.axis, ()), value)
        self._solve(open_sizes, found)
        for name, axis in self.axes.items():
            if axis.read is not None and (value := axis.read(given)) is not None:
                found[name] = value
        return self._stated(found, dtype)

    def _solve(self, sizes: list[tuple[Expr, Any]], found: dict[str, Any]) -> None:
        """Add the axes that these expressions over one unknown axis, with these values, give."""
        left = len(sizes) + 1
        while sizes and len(sizes) < left:
            left, todo, sizes = len(sizes), sizes, []
            for expr, value in todo:
                unknown = expr.names - set(found)
                if expr.name is not None:
                    found.setdefault(expr.name, value)
                elif len(unknown) == 1:
                    (name,) = unknown
                    found[name] = expr.solve(name, found, value)
                elif unknown:
                    sizes.append((expr, value))

    def _stated(self, found: dict[str, Any], dtype: str) -> dict[str, Any]:
        """Of these dims those that a case has to name."""

        def usual(name: str) -> Any:
            return self.sizes({k: v for k, v in found.items() if k != name}, dtype)[name]

        def always(name: str, axis: Axis) -> bool:
            return axis.default is REQUIRED or axis.stated or axis.is_count or name in self.optional

        return {n: v for n, v in found.items() if always(n, self.axes[n]) or v != usual(n)}

    @cached_property
    def optional(self) -> frozenset[str]:
        """The sizes that only some cases have."""
        shapes = [dims for t in self.tensors.values() for _, dims in t.shapes]
        return frozenset(n for dims in shapes for d in dims if d.optional for n in d.expr.names)

    def _always_drawn(self, name: str) -> bool:
        """Whether held-out cases name this axis even if the original does not: a per-call number such as an offset."""
        axis = self.axes[name]
        number = isinstance(axis.default, int) and name not in self.optional
        return number and axis.varies and axis.draw is not None

    def drawn(self, dims: Mapping[str, Any], dtype: str, rng: random.Random) -> dict[str, Any]:
        """Other values for a case's dims that meet the constraints; None: the case is without that one."""
        old = self.sizes(dims, dtype)
        for _ in range(ATTEMPTS):
            new: dict[str, Any] = {}
            for name, axis in self.axes.items():
                if name not in dims and not self._always_drawn(name):
                    continue
                computed = callable(axis.default)
                usual = computed and self.sizes({k: v for k, v in dims.items() if k != name}, dtype)[name]
                if axis.is_count or (computed and (axis.draw is None or old[name] == usual)):
                    new[name] = None
                elif axis.draw is not None and old[name] is not None:
                    new[name] = axis.draw(old[name], rng)
            sizes = self.sizes({k: v for k, v in {**dims, **new}.items() if v is not None}, dtype)
            if all(rule(sizes) for rule in self.rules):
                return new
        return {}
