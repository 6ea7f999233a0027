"""The arguments of a call as plain data: the bytes of a slot that hold each tensor, and all other values."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

ALIGN = 512


@dataclass
class Layout:
    """The places of the tensors of one call.

    args     the arguments; a tensor is {'tensor': {region, dtype, shape, stride, offset (elements)}}
    regions  one for each storage, so that views of one tensor stay views of one: {offset, nbytes, shared}.
             A shared region is the same memory in all slots and lies behind them
    stride   bytes from one slot to the next
    shared   bytes of all shared regions
    """

    args: list[Any]
    regions: list[dict[str, Any]] = field(default_factory=list)
    stride: int = 0
    shared: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "args": self.args,
            "regions": self.regions,
            "stride": self.stride,
            "shared": self.shared,
        }

    def arena_bytes(self, slots: int) -> int:
        return slots * self.stride + self.shared


def describe(args: list[Any], share_from: int, written: set[int] = frozenset()) -> Layout:  # type: ignore[assignment]
    """The layout of these arguments. Storages of at least `share_from` bytes are shared by all slots, unless an
    argument at a position in `written` lies in them: then each slot needs its own.
    """
    found: dict[int, int] = {}
    layout = Layout([])
    own: set[int] = set()

    def tensor(t: torch.Tensor, position: int) -> dict[str, Any]:
        storage = t.untyped_storage()
        key = storage.data_ptr() if storage.nbytes() else -len(found) - 1
        if key not in found:
            found[key] = len(layout.regions)
            layout.regions.append({"offset": 0, "nbytes": storage.nbytes(), "shared": False})
        if position in written:
            own.add(found[key])
        return {
            "region": found[key], "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape),
            "stride": list(t.stride()), "offset": t.storage_offset(),
        }  # fmt: skip

    layout.args = [_encode(a, lambda t, i=i: tensor(t, i)) for i, a in enumerate(args)]  # type: ignore[misc]
    for i, region in enumerate(layout.regions):
        size = -(-max(region["nbytes"], 1) // ALIGN) * ALIGN
        if region["nbytes"] >= share_from and i not in own:
            region.update(shared=True, offset=layout.shared)
            layout.shared += size
        else:
            region["offset"] = layout.stride
            layout.stride += size
    return layout


def bind(
    layout: dict[str, Any], arena: torch.Tensor, slot: int, slots: int, apart: bool = False
) -> list[Any]:
    """The arguments of a slot, in the memory of the arena (uint8, Layout.arena_bytes long), which must outlive them.

    apart  a storage for each region instead of views of the arena, as arguments have in a model: torch.compile accepts
           neither two dtypes in one storage nor views with another dtype
    """
    places = []
    for region in layout["regions"]:
        start = slots * layout["stride"] if region["shared"] else slot * layout["stride"]
        places.append(arena[start + region["offset"] :][: region["nbytes"]])
    storages = [torch.from_dlpack(p).untyped_storage() if apart and len(p) else None for p in places]

    def tensor(t: dict[str, Any]) -> torch.Tensor:
        dtype, storage = getattr(torch, t["dtype"]), storages[t["region"]]
        if storage is not None:
            return torch.empty(0, dtype=dtype, device=arena.device).set_(
                storage, t["offset"], t["shape"], t["stride"]
            )
        raw = places[t["region"]].view(dtype)
        return raw.as_strided(t["shape"], t["stride"], raw.storage_offset() + t["offset"])

    return [_decode(a, tensor) for a in layout["args"]]


def tensors(args: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments, in order."""
    if isinstance(args, torch.Tensor):
        return [args]
    if isinstance(args, dict):
        return [t for a in args.values() for t in tensors(a)]
    if isinstance(args, (list, tuple)):
        return [t for a in args for t in tensors(a)]
    return []


def mapped(args: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same arguments with `change` applied to every tensor."""
    if isinstance(args, torch.Tensor):
        return change(args)
    if isinstance(args, dict):
        return {k: mapped(a, change) for k, a in args.items()}
    if isinstance(args, (list, tuple)):
        return type(args)(mapped(a, change) for a in args)
    return args


def _encode(value: Any, tensor: Callable[[torch.Tensor], dict[str, Any]]) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": {k: _encode(v, tensor) for k, v in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"list": [_encode(v, tensor) for v in value], "tuple": isinstance(value, tuple)}
    if isinstance(value, float):
        return {"float": value.hex()}  # exact, and also for infinities
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if callable(value) and (name := getattr(value, "__name__", "")):
        module = getattr(value, "__module__", None) or "torch"  # torch's builtins have none
        return {"function": f"{module}:{name}"}
    raise TypeError(f"an argument of type {type(value).__name__} cannot be sent to another process")


def _decode(value: Any, tensor: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items()))
    if kind == "tensor":
        return tensor(inner)
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "dict":
        return {k: _decode(v, tensor) for k, v in inner.items()}
    if kind == "list":
        items = [_decode(v, tensor) for v in inner]
        return tuple(items) if value["tuple"] else items
    if kind == "float":
        return float.fromhex(inner)
    module, _, name = inner.partition(":")
    return getattr(importlib.import_module(module), name)
