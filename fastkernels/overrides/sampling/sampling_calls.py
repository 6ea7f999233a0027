"""The calls of the op sampling, for its SPEC: inputs and cost of a case, the case of real arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core import assemble
from fastkernels.core.shapes import drawn, optional, varied
from fastkernels.core.spec import Case

_DEFAULTS: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_ALIKE = 32  # rows whose values are kept in a case's dims, one by one


def inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    rows, vocab = d["rows"], d["vocab"]
    logits = d.get("scale", 4.0) * torch.randn(rows, vocab, generator=generator, device=device)
    if d.get("banned"):
        logits[:, ::3] = -torch.inf
    row = torch.arange(rows, device=device)

    def each(name: str) -> torch.Tensor:
        """One value for all rows, or a tuple of which the rows take turns."""
        values = d.get(name, _DEFAULTS[name])
        values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
        dtype = torch.int32 if name == "top_k" else torch.float32
        return torch.tensor(values, dtype=dtype, device=device)[row % len(values)]

    return [
        logits.to(getattr(torch, case.dtype)), *map(each, _DEFAULTS), row * 0x9E3779B97F + 7,
        row * 3 + d.get("offset", 0),
    ]  # fmt: skip


def bytes_moved(case: Case) -> int:
    d = case.dims
    return d["rows"] * (d["vocab"] * getattr(torch, case.dtype).itemsize + 40)


def flops(case: Case) -> int:
    return 8 * case.dims["rows"] * case.dims["vocab"]


def dims_of(logits: torch.Tensor, *each: torch.Tensor) -> dict[str, Any]:
    """temperature, top_k, top_p and min_p, where they have values: of the first rows, or one that all rows have."""
    dims: dict[str, Any] = {"rows": logits.shape[0], "vocab": logits.shape[1]}
    for name, values in zip(_DEFAULTS, each[:4], strict=True):
        found = [] if values.is_meta else values[:_ALIKE].tolist()
        if found:
            dims[name] = found[0] if len(set(found)) == 1 else tuple(found)
    offsets = each[5]
    return {**dims, **optional(offset=int(offsets[0]) or None if offsets.numel() else None)}


def vary(case: Case, rng: random.Random) -> Case:
    return varied(
        case,
        lambda: {**drawn(case, rng, ("rows", "vocab")), "offset": rng.randrange(1 << 40)},
        bytes_moved,
        flops,
    )


def build(cls: type, args: list[Any]) -> Callable[[], Any]:
    logits, temperature, top_k, top_p, min_p, seeds, offsets = args
    if not assemble.takes(cls.forward, "sampling_info"):  # type: ignore[attr-defined]
        raise ValueError(f"{cls.__name__} draws its seeds from torch's generators: it cannot be given them")
    info = SimpleNamespace(
        is_all_greedy=False, temperatures=temperature[:, None], top_ks=top_k, top_ps=top_p, min_ps=min_p,
        sampling_seed=seeds, has_custom_logit_processor=False,
    )  # fmt: skip
    output, module = SimpleNamespace(next_token_logits=logits), assemble.make(cls, logits)
    return lambda: module(output, info, False, [], [], offsets).long()


def _equal(args: list[Any]) -> None:
    args[0].fill_(1.0)


def _masked(args: list[Any]) -> None:
    logits = args[0]
    row = torch.arange(len(logits), device=logits.device)
    logits.fill_(-torch.inf)
    logits[row, (7 * row + 3) % logits.shape[1]] = 0.5


def _cold(args: list[Any]) -> None:
    args[1].fill_(0.01)


def _greedy(args: list[Any]) -> None:
    args[1].fill_(1e-6)


# Not much colder than 0.01: of two equal logits the noise decides, and float32 has few bits left for it.
EXTREMES = {"equal_logits": _equal, "one_allowed": _masked, "cold": _cold, "nearly_greedy": _greedy}
