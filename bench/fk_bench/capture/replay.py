"""Captured calls as cases of an op: integers like the recorded ones, new floats, the same memory layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fastkernels.capture import extent
from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec
from fk_bench.capture.captures import Argument, Capture, SignatureCalls, load_all
from fk_bench.capture.renewal import JITTER, renewed

CACHE_BYTES = 4 << 20
CACHES = ("key_cache", "value_cache")
ROUTING = ("topk_weights", "topk_ids")
SIZES = ("tokens", "experts", "topk", "hidden", "intermediate")
MULTIPLE = 128  # of sizes for another op's experts: the largest block of quantized weights


@dataclass(frozen=True)
class CapturedCase:
    """One captured call. case.weight: how often it was made, including similar calls without kept values.

    capture  name of the capture's folder
    values   {argument: its tensor or number}, as replayed
    """

    op: str
    capture: str
    case: Case
    arguments: tuple[Argument, ...]
    values: Mapping[str, Any] = field(repr=False)

    def make_args(self, device: str, generator: torch.Generator) -> list[Any]:
        """All arguments of the op's schema. Integers are like the recorded ones, as `renewed` makes them from the
        generator's seed; floats are like those of SPEC.inputs.
        """
        shapes = {a.name: tuple(a.shape) for a in self.arguments if a.shape is not None}
        with unset_fake_temporarily():  # the sizes of a call are found with fake tensors
            values = renewed(self.values, shapes, generator.initial_seed())
        return replace(self, values=values).recorded_args(device, generator)

    def recorded_args(self, device: str, generator: torch.Generator) -> list[Any]:
        """The same with the recorded integers themselves."""
        return _make(registry.get(self.op), self, device, generator)


def captured_cases(op: str, folder: Path | str | None = None) -> list[CapturedCase]:
    """The captured calls of an op, most frequent first, from the captures in `folder` or from the shipped ones.

    Other ops with experts get the routing of captured `fused_experts`, see _routed. Unusable parts are left out;
    `problems` lists them. Raises UnknownName, CaptureError.
    """
    return _collect(op, folder)[0]


def problems(op: str, folder: Path | str | None = None) -> list[str]:
    """The parts of the captures that `captured_cases` leaves out, by file."""
    return _collect(op, folder)[1]


def _collect(op: str, folder: Path | str | None) -> tuple[list[CapturedCase], list[str]]:
    spec = registry.get(op)
    captures, wrong = load_all(folder)
    found = [
        case for capture in captures for case in (*_cases(spec, capture, wrong), *_routed(spec, capture))
    ]
    return sorted(found, key=lambda c: -c.case.weight), wrong


def _cases(spec: OpSpec, capture: Capture, wrong: list[str]) -> Iterator[CapturedCase]:
    recorded = capture.ops.get(spec.name)
    if recorded is None or spec.dims_of is None:
        return
    for i, call in enumerate(recorded.calls):
        sets = list(_values(call, capture))
        seen = sum(count for count, _ in sets)
        if call.too_large or (not call.values and not sets):
            why = f"{', '.join(call.too_large)} was too large" if call.too_large else "the budget was used up"
            wrong.append(f"{capture.folder}: {spec.name} {capture.name}/{i} has no values, {why}; left out")
        for j, (count, values) in enumerate(sets):
            name = f"{capture.name}/{i}" + (f".{j}" if len(sets) > 1 else "")
            try:
                arguments, replayed = compact(tuple(call.args), values)
                dims = spec.dims_of(*(_stand_in(a, replayed) for a in arguments))
            except (AttributeError, IndexError, LookupError, RuntimeError, TypeError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
                wrong.append(
                    f"{capture.folder}: {spec.name} {name} is not a call of the op ({why}); left out"
                )
                continue
            floats = {a.name for a in arguments if _sampled(a, replayed)}
            if floats and (spec.tie_sensitive or spec.permutable is not None):
                replayed = {n: v for n, v in replayed.items() if n not in floats}  # real values have ties
                floats = set()
            tags = ("captured", "values") if floats else ("captured",)
            name += ":values" if floats else ""
            case = Case(name, dims, _dtype(arguments), call.count * count / seen, tags=tags)
            yield CapturedCase(spec.name, capture.name, case, arguments, replayed)


def _routed(spec: OpSpec, capture: Capture) -> Iterator[CapturedCase]:
    """Captured routing of fused_experts for an op whose experts have other weights, one call of each size.

    The number format is that of a model in spec.cases. Sizes are the capture's, rounded up to MULTIPLE.
    """
    names, seen = [argument.name for argument in spec.arguments], set()
    if "fused_experts" not in capture.ops or spec.name in capture.ops:
        return
    if not {"hidden_states", *ROUTING} <= set(names):
        return
    models = [case for case in spec.cases if "model" in case.tags]
    for source in _cases(registry.get("fused_experts"), capture, []):
        sizes = {name: source.case.dims[name] for name in SIZES}
        sizes |= {name: -(-sizes[name] // MULTIPLE) * MULTIPLE for name in SIZES[3:]}
        if (key := tuple(sizes.values())) in seen:
            continue
        seen.add(key)
        model = min(models, key=lambda case: abs(case.dims["experts"] - sizes["experts"]))
        blank = spec.declaration.blank(replace(model, dims={**model.dims, **sizes}))
        arguments = tuple(_argument(name, value) for name, value in zip(names, blank, strict=True))
        values = {name: source.values[name] for name in ROUTING if name in source.values}
        dims = spec.dims_of(*(_stand_in(argument, values) for argument in arguments))
        case = replace(source.case, dims=dims, dtype=model.dtype)
        yield CapturedCase(spec.name, capture.name, case, arguments, values)


def _argument(name: str, value: Any) -> Argument:
    """A tensor without values, or a value."""
    if not isinstance(value, torch.Tensor):
        return Argument(name=name, value=value)
    dtype = str(value.dtype).removeprefix("torch.")
    return Argument(name=name, shape=list(value.shape), dtype=dtype, strides=list(value.stride()))


def _values(call: SignatureCalls, capture: Capture) -> Iterator[tuple[int, dict[str, Any]]]:
    """(count, {argument: tensor or number}) of each complete set of values."""
    needed = {a.name for a in call.args if a.dynamic or (a.dtype is not None and not _is_float(a.dtype))}
    if not needed and not call.values:
        yield call.count, {}
    dtypes = {a.name: getattr(torch, a.dtype) for a in call.args if a.dtype is not None}
    for each in call.values:
        values = {k: capture.tensors.get(v) if isinstance(v, str) else v for k, v in each.args.items()}
        # To be small, a capture may store ids as int8 and weights as float16.
        values = {k: v.to(dtypes.get(k)) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        if needed <= values.keys() and not any(v is None for v in values.values()):
            yield each.count, values


def _is_float(dtype: str) -> bool:
    return getattr(torch, dtype).is_floating_point


def _dtype(arguments: tuple[Argument, ...]) -> str:
    """A case's dtype: that of the cache if there is one, else of the first float tensor."""
    tensors = {a.name: a.dtype for a in arguments if a.dtype is not None and _is_float(a.dtype)}
    return str(tensors.get("key_cache") or next(iter(tensors.values()), "float32"))


def _stand_in(argument: Argument, values: Mapping[str, Any]) -> Any:
    """The argument without memory, with all that dims_of needs."""
    if argument.name in values and not _sampled(argument, values):
        return values[argument.name]
    if argument.shape is None:
        return _value(argument)
    dtype = getattr(torch, argument.dtype or "")
    return torch.empty_strided(argument.shape, argument.strides or [], dtype=dtype, device="meta")


def _sampled(argument: Argument, values: Mapping[str, Any]) -> bool:
    """Whether the value is rows of the argument, as `capture --values sample` keeps them; see rows_of."""
    if argument.name not in values or argument.dtype is None or not _is_float(argument.dtype):
        return False
    channels = (argument.shape or [1])[-1]
    found = values[argument.name]
    return (
        isinstance(found, torch.Tensor)
        and found.dim() == 2
        and found.shape[-1] == channels
        and not (argument.name in ROUTING and list(found.shape) == argument.shape)
    )


def _rows(argument: Argument, rows: torch.Tensor, device: str, generator: torch.Generator) -> torch.Tensor:
    """Values like the recorded rows: other rows of them, each number changed by up to JITTER.

    Channels keep their outliers. The recorded numbers themselves are public.
    """
    count = math.prod(argument.shape or []) // max(rows.shape[1], 1)
    if len(rows) == count:
        at = torch.randperm(count, generator=generator, device=device)
    else:
        at = torch.randint(len(rows), (count,), generator=generator, device=device)
    found = rows.to(device)[at].float()
    change = torch.rand(found.shape, generator=generator, device=device) * 2 - 1
    return (found * (1 + JITTER * change)).view(argument.shape or [])


def _value(argument: Argument) -> Any:
    return getattr(torch, argument.value) if argument.type == "dtype" else argument.value


# Block ids


def compact(
    arguments: tuple[Argument, ...], values: Mapping[str, Any]
) -> tuple[tuple[Argument, ...], dict[str, Any]]:
    """Shrink a KV cache of more than CACHE_BYTES, of which a call uses less than half, to the blocks that it uses.

    The order of the blocks is kept, and block 0, which padding uses. block_table and slot_mapping are renumbered;
    entries of block_table beyond a sequence's end are never read and become 0.
    """
    named = {a.name: a for a in arguments}
    cache = named.get("key_cache")
    table: Any = values.get("block_table")
    slots: Any = values.get("slot_mapping")
    if cache is None or cache.shape is None or (table is None and slots is None):
        return arguments, dict(values)
    blocks, block_size = cache.shape[:2]
    if slots is not None:
        used = slots[slots >= 0] // block_size
    else:
        at = torch.arange(table.shape[1])
        read = at[None, :] * block_size < values["seq_lens"][:, None]
        table = torch.where(read, table, 0)
        used = table[read]
    kept = torch.cat([used.new_zeros(1), used]).unique()
    if int(kept[-1]) >= blocks:
        raise ValueError(f"block {int(kept[-1])} is used, but the cache has {blocks}")
    size = math.prod(cache.shape) * getattr(torch, cache.dtype or "").itemsize
    if size <= CACHE_BYTES or 2 * len(kept) >= blocks:
        return arguments, dict(values)
    number = torch.zeros(blocks, dtype=torch.int64)
    number[kept.long()] = torch.arange(len(kept))
    new = dict(values)
    if slots is not None:
        inside = slots.clamp(min=0)
        moved = number[(inside // block_size).long()] * block_size + inside % block_size
        new["slot_mapping"] = torch.where(slots >= 0, moved.to(slots.dtype), slots)
    else:
        new["block_table"] = number[table.long()].to(table.dtype)
    shrunk = {n: {"shape": [len(kept), *(named[n].shape or [])[1:]], "storage": None} for n in CACHES}
    return tuple(a.model_copy(update=shrunk.get(a.name, {})) for a in arguments), new


# Arguments


def _make(spec: OpSpec, captured: CapturedCase, device: str, generator: torch.Generator) -> list[Any]:
    made = spec.inputs(captured.case, device, generator)
    whole = _storages(captured.arguments, device)
    args: list[Any] = []
    for i, argument in enumerate(captured.arguments):
        if argument.shape is None:
            args.append(captured.values.get(argument.name, _value(argument)))
            continue
        content = captured.values.get(argument.name)
        if content is not None and _sampled(argument, captured.values):
            content = _rows(argument, content, device, generator)
        elif content is not None:
            content = content.clone()
        else:
            content = made[i] if i < len(made) else None
            if not isinstance(content, torch.Tensor) or list(content.shape) != argument.shape:
                content = _random(argument, device, generator)
        args.append(_placed(argument, content.to(device), whole))
    return args + made[len(args) :]  # arguments that were added to the op after the capture


def _random(argument: Argument, device: str, generator: torch.Generator) -> torch.Tensor:
    """Values of about 1; for weight matrices such that their products are of about 1."""
    shape = argument.shape or []
    scale = shape[-1] ** -0.5 if len(shape) > 1 and argument.name.startswith("w") else 1.0
    return torch.randn(shape, generator=generator, device=device) * scale


def _storages(arguments: tuple[Argument, ...], device: str) -> dict[int, torch.Tensor]:
    """{number: the flat tensor of which the arguments with that storage number are parts}."""
    ends: dict[int, tuple[int, str]] = {}
    for a in arguments:
        if a.storage is not None and a.shape is not None and a.strides is not None:
            number, offset = a.storage
            end = offset + extent(a.shape, a.strides)
            ends[number] = max(end, ends.get(number, (0, ""))[0]), str(a.dtype)
    return {
        number: torch.zeros(end, dtype=getattr(torch, dtype), device=device)
        for number, (end, dtype) in ends.items()
    }


def _placed(argument: Argument, content: torch.Tensor, whole: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The content in the captured layout."""
    shape, strides, dtype = argument.shape or [], argument.strides or [], getattr(torch, argument.dtype or "")
    offset = 0
    if argument.storage is None and content.dtype == dtype and list(content.stride()) == strides:
        return content
    if argument.storage is not None:
        flat, offset = whole[argument.storage[0]], argument.storage[1]
    else:
        flat = torch.zeros(extent(shape, strides), dtype=dtype, device=content.device)
    placed = flat.as_strided(shape, strides, offset)
    into, source = placed, content.to(dtype)
    for dim, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        if stride == 0 and n > 1:  # one element, repeated n times
            into, source = into.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    into.copy_(source)
    return placed
