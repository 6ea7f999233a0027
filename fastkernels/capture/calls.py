"""Describe one call: its signature as plain JSON, and the inputs whose values are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.capture.modules import plain

# Small float inputs of routing or of requests, whose values matter; activations are drawn at random.
FLOAT_VALUES = {
    "fused_experts": ("topk_weights",),
    "fused_experts_fp8": ("topk_weights",),
    "moe_sum": ("topk_weights",),
    "sampling": ("temperature", "top_p", "min_p"),
}


def is_dynamic(argument: Any) -> bool:
    """Whether a number belongs to the data rather than the kind of call: a SymInt in the schema (max_seqlen_k)."""
    return argument.real_type.kind() == "SymIntType"


def is_value(op: str, name: str, tensor: torch.Tensor) -> bool:
    """Whether this argument's values are kept: integers, booleans, and the names in FLOAT_VALUES."""
    return not tensor.is_floating_point() or name in FLOAT_VALUES.get(op, ())


def is_sampled(tensor: torch.Tensor) -> bool:
    """Whether rows of this float tensor can be kept."""
    return (
        tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and tensor.dim() > 0
        and tensor.numel() > 0
    )


def describe(arguments: Sequence[Any], given: Sequence[Any]) -> list[dict[str, Any]]:
    """The signature: for each argument of the schema its name, and of

    a tensor        'shape', 'dtype', 'strides', and 'storage' if it shares one with another argument (see `shared`)
    another value   'value', with 'type': 'dtype' if it is one
    a dynamic one   'dynamic': true
    """
    places = shared([t for t in given if isinstance(t, torch.Tensor)])
    rows: list[dict[str, Any]] = []
    for argument, value in zip(arguments, given, strict=True):
        row: dict[str, Any] = {"name": argument.name}
        if isinstance(value, torch.Tensor):
            row["shape"], row["dtype"] = list(value.shape), str(value.dtype).removeprefix("torch.")
            row["strides"] = list(value.stride())
            if id(value) in places:
                row["storage"] = places[id(value)]
        elif is_dynamic(argument):
            row["dynamic"] = True
        else:
            row["value"] = plain(value)
            if isinstance(value, torch.dtype):
                row["type"] = "dtype"
        rows.append(row)
    return rows


def shared(tensors: Sequence[torch.Tensor]) -> dict[int, list[int]]:
    """id(tensor): [number of the storage, offset in it] for tensors that are parts of one (query and key of a qkv).

    Parts that lie far apart (two layers' parts of one cache) count as tensors of their own.
    """
    groups: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        if tensor.numel():
            groups.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(tensor)
    found: dict[int, list[int]] = {}
    number = 0
    for parts in groups.values():
        extents = [extent(t.shape, t.stride()) for t in parts]
        first = min(t.storage_offset() for t in parts)
        end = max(t.storage_offset() + n for t, n in zip(parts, extents, strict=True))
        if len(parts) > 1 and end - first <= 1.5 * sum(extents):
            found.update({id(t): [number, int(t.storage_offset() - first)] for t in parts})
            number += 1
    return found


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements that a tensor spans in memory, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def digest(tensor: torch.Tensor) -> str:
    """A hash of the contents of a contiguous CPU tensor."""
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
