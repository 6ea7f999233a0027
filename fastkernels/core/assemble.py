"""Build a host's module around existing tensors, for SPEC.build: no parameter is copied."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fastkernels.core.declaration import Declaration, Scalar, Sizes, Tensor
from fastkernels.core.expressions import Expr


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def make(cls: type, like: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """cls(*args, **kwargs) with like's dtype and device as torch's defaults."""
    with _defaults(like.dtype, like.device):
        return cls(*args, **kwargs)


def load(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> nn.Module:
    """Set the module's parameters and buffers of these names to the tensors, without a copy; None: it has none.

    Raises ValueError for an unknown name, a different shape, and a parameter that is not given.
    """
    kind = type(module).__name__
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path) if path else module
        if not hasattr(owner, attribute):
            raise ValueError(f"{kind} has no {name}")
        old = getattr(owner, attribute)
        if tensor is None or old is None:
            if old is not tensor:
                has, given = ("none", "one") if old is None else ("one", "none")
                raise ValueError(f"{name}: {kind} has {has}, the arguments have {given}")
            continue
        if old.shape != tensor.shape:
            raise ValueError(f"{kind} has {name} {tuple(old.shape)}, the argument is {tuple(tensor.shape)}")
        setattr(owner, attribute, nn.Parameter(tensor, False) if isinstance(old, nn.Parameter) else tensor)
    for name, _ in module.named_parameters():
        if name not in tensors:
            raise ValueError(f"{kind} has a parameter {name}, which the op's arguments do not give")
    return module


def filled(args: Sequence[Any], count: int, *defaults: Any) -> tuple[Any, ...]:
    """All `count` arguments of an op: left-out ones take their values from the end of `defaults`."""
    return (*args, *defaults[len(defaults) - (count - len(args)) :])


def refuse(cls: type, **given: Any) -> None:
    """Raise ValueError for the first argument that is neither None nor False: cls cannot express it."""
    for name, value in given.items():
        if value is not None and value is not False:
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{cls.__name__} cannot be called with {name}={shown}")


def takes(function: Any, name: str) -> bool:
    """Whether a function or a class's constructor has a parameter of that name."""
    return name in inspect.signature(function).parameters


def build(
    declaration: Declaration,
    constructor: Mapping[str, str],
    computes: Mapping[str, Any],
    defaults: Mapping[str, Any],
    cls: type,
    args: Sequence[Any],
) -> Callable[[], Any]:
    """Make an instance of cls around the op's arguments; calling the result runs it. See OpSpec.build.

    A constructor parameter gets the value of its expression in `constructor`, or of the axis or scalar argument with
    its name. The op's first argument becomes forward's first. Other arguments are passed to forward's parameters of
    their names, or of names that `constructor` gives; tensors without one become the module's attributes of their
    names. Raises ValueError for an argument that cls cannot express.

    computes  arguments that this class has built in
    defaults  of the op's arguments
    """
    given = declaration.bind(args, defaults)
    first = args[0]
    sizes = declaration.sizes(declaration.dims_of(args, defaults), str(first.dtype).removeprefix("torch."))
    scalars = {a.name: getattr(given, a.name) for a in declaration.arguments if isinstance(a, Scalar)}
    options: dict[str, Any] = {}
    used: set[str] = set()
    for name in _parameters(cls):
        text = constructor.get(name, name if name in sizes.axes or name in scalars else "")
        if text:
            options[name], names = _option(text, sizes, scalars)
            used |= names
    _check_complete(cls, options)
    module = make(cls, first, **options)
    forward = inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
    accepted = {constructor.get(name, name): name for name in forward}
    passed: dict[str, Any] = {}
    weights: dict[str, torch.Tensor | None] = {}
    for argument in declaration.arguments[1:]:
        name, value = argument.name, getattr(given, argument.name)
        if isinstance(argument, Tensor) and name in computes:
            refuse(cls, **{name: value})
        if name in accepted:
            passed[accepted[name]] = value
        elif isinstance(argument, Tensor):
            if value is not None and not _has(module, name):
                refuse(cls, **{name: value})
            if value is not None or _has(module, name):
                flag = argument.flag[0] if argument.flag is not None else ""
                unused = value is None and flag in used  # the constructor knows, and keeps a parameter anyway
                weights[name] = getattr(module, name).data if unused and _has(module, name) else value
        elif name in computes:
            if value != computes[name]:
                raise ValueError(
                    f"{cls.__name__} computes {name}={computes[name]!r}, and this case has {value!r}"
                )
        elif not (argument.rounding or argument.value or used & {name, argument.axis}):
            usual = _usual(argument, sizes)
            if value != usual:
                raise ValueError(
                    f"{cls.__name__} cannot be called with {name}={value!r}, only with {usual!r}"
                )
    if isinstance(module, nn.Module):
        load(module, weights)
    mutated = [getattr(given, declaration.arguments[i].name) for i in declaration.mutated]

    def call() -> Any:
        out = module(first, **passed)
        made = out if isinstance(out, tuple) else (out,)
        if len(made) > len(declaration.outputs) and not mutated:  # a residual that was not passed
            out = made[0] if len(declaration.outputs) == 1 else made[: len(declaration.outputs)]
        if len(made) == len(declaration.outputs) and mutated:
            return (*made, *mutated)
        return out

    return call


def _check_complete(cls: type, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a class of which the op is only a part."""
    if not hasattr(cls, "forward"):
        raise ValueError(f"{cls.__name__} has no forward: another module calls it")
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in kinds and name not in options:
            raise ValueError(f"{cls.__name__} needs {name}, which the op's arguments do not give")


def _parameters(cls: type) -> list[str]:
    """Names of the constructor's parameters; of a base's constructor where this one only passes them on."""
    for base in cls.__mro__ if isinstance(cls, type) else ():
        init = base.__dict__.get("__init__")
        found = inspect.signature(init).parameters.values() if init is not None else ()
        if found and all(p.kind is not p.VAR_POSITIONAL for p in found):
            return [p.name for p in found][1:]
    return list(inspect.signature(cls).parameters)


def _option(text: str, sizes: Sizes, scalars: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """(the value of a constructor's parameter, the axes and arguments that it states)."""
    if text in scalars:
        return scalars[text], {text}
    expr = Expr(text)
    value = expr({n: scalars[n] if n in scalars else sizes[n] for n in expr.names})
    if expr.name is not None and sizes.axes[expr.name].is_dtype:
        value = getattr(torch, value)
    return value, set(expr.names)


def _has(module: Any, name: str) -> bool:
    return getattr(module, name, None) is not None


def _usual(scalar: Scalar, sizes: Sizes) -> Any:
    """The value of a scalar argument in cases that do not name it; an object of its own if they all do."""
    default = sizes.axes[scalar.axis].default
    if callable(default):
        return default(sizes)
    return default if scalar.index is None or not isinstance(default, tuple) else default[scalar.index]
