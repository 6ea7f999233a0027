"""The outputs of a GPU's calls where a process put them: checked places, mapped into the judge."""

from __future__ import annotations

import torch

from fk_bench.kernels.judge.memory import ipc, layout
from fk_bench.kernels.judge.memory.arena import Arena
from fk_bench.kernels.judge.memory.place import Place


class BadPlace(Exception):
    """A process names a place that an output cannot have; the message says why."""


def map_outputs(
    arena: Arena, results: list[list[Place]], mapping: ipc.Mapping, over_inputs: bool
) -> list[list[torch.Tensor]]:
    """Map the outputs of all slots. Calls must not share any of that memory, nor use an argument's. Raises BadPlace.

    over_inputs  kernels of production: some write their result over an input, which the op does not allow a candidate
    """
    slots = arena.slots
    if len(results) != slots.count or any(len(r) != len(slots.outs) for r in results):
        raise BadPlace("the process named the outputs of other calls than those to capture")
    found: list[list[torch.Tensor]] = []
    known: set[int] = set()
    for slot, result in enumerate(results):
        views = []
        for out, place in zip(slots.outs, result, strict=True):
            if not out.bytes:
                views.append(torch.empty(out.shape, dtype=out.dtype, device="cuda"))
                continue
            reach = 1 + sum((n - 1) * s for n, s in zip(out.shape, place.stride, strict=False))
            if (
                len(place.stride) != len(out.shape)
                or max(out.bytes, reach * out.dtype.itemsize) > place.nbytes
            ):
                raise BadPlace(
                    f"an output has {place.nbytes} bytes and strides {place.stride} for {out.shape}"
                )
            raw = _bytes(arena, slot, place, mapping, over_inputs)
            if raw.data_ptr() % out.dtype.itemsize or place.nbytes % out.dtype.itemsize:
                raise BadPlace(f"an output lies at an address that no {out.dtype} has")
            if raw.data_ptr() in known:
                raise BadPlace("two calls returned the same memory: the first one's result is lost")
            known.add(raw.data_ptr())
            views.append(raw.view(out.dtype).as_strided(out.shape, place.stride))
        found.append(views)
    return found


def _bytes(arena: Arena, slot: int, place: Place, mapping: ipc.Mapping, over_inputs: bool) -> torch.Tensor:
    if place.arena is not None:
        raw = arena.bytes[place.arena :][: place.nbytes]
        written = [
            t for i, a in enumerate(arena.args_of(slot)) if i in arena.slots.may_change for t in layout.tensors(a)
        ]  # fmt: skip
        if len(raw) < place.nbytes or not (over_inputs or any(_within(raw, t) for t in written)):
            raise BadPlace("an output lies in memory of an argument that the op does not write")
        return raw
    if place.handle is None or place.offset is None:
        raise BadPlace("the process names no memory for an output")
    try:
        return mapping.bytes_at({"handle": place.handle, "offset": place.offset, "nbytes": place.nbytes})
    except RuntimeError as error:
        raise BadPlace(f"an output lies in memory that cannot be mapped: {error}") from None


def _within(raw: torch.Tensor, t: torch.Tensor) -> bool:
    start = t.data_ptr()
    reach = (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()
    return start <= raw.data_ptr() and raw.data_ptr() + raw.nbytes <= start + reach
