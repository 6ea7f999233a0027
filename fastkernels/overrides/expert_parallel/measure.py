"""For which messages kernels for tokens and experts are faster than what a group has: measured in captured graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.communicator import Communicator
from fastkernels.overrides.collective import words
from fastkernels.overrides.collective.measure import Times, limit, slowest, times_of

# Bytes of a rank's tokens, 4 KiB to 1 MiB. A kernel is compiled for each.
EXPERT_SIZES = tuple(4096 << i for i in range(0, 9, 2))
EXPERT_OPS = ("ep_dispatch", "ep_dispatch_fp8", "ep_combine")
CHANNELS, EXPERTS, BLOCK = 2048, 8, 128  # of such a token, and channels of a scale


def measure_experts(
    made: Communicator, theirs: Callable[[list[torch.Tensor]], torch.Tensor],
    capture: Callable[[], Any] = contextlib.nullcontext,
) -> Times:  # fmt: skip
    """As `collective.measure.measure`, of a dispatch and a combine of tokens with EXPERTS experts each, in bfloat16."""
    symmetric = made.symmetric
    assert symmetric is not None, made.without

    def ours(tensors: list[torch.Tensor]) -> torch.Tensor:
        return words.scatter_words(words.gather_words(tensors, symmetric)[0], symmetric)

    def made_of(size: int) -> list[torch.Tensor]:
        tokens = max(1, size // (2 * CHANNELS))
        x = torch.ones(tokens, size // (2 * tokens), dtype=torch.bfloat16, device=made.device)
        weights = torch.ones(tokens, EXPERTS, device=made.device)
        return [x, weights, torch.ones(tokens, EXPERTS, dtype=torch.int32, device=made.device)]

    return times_of(made, ours, theirs, capture, EXPERT_SIZES, made_of)


def choose_experts(made: Communicator) -> dict[str, int]:
    """As `collective.measure.choose`, for each op of EXPERT_OPS against its composed provider.

    Returns the limits of those for which ours is faster: bytes that a rank's tokens have as they are sent.
    """
    if made.device.type != "cuda" or made.size == 1 or made.connect() is not None:
        return {}
    limits = {}
    for name in EXPERT_OPS:
        providers = {p.name: p for p in registry.get(name).op.providers}
        supports = providers["triton"].supports
        assert supports is not None
        sizes = [size for size in EXPERT_SIZES if supports(*expert_arguments(name, size, made)) is None]
        if not sizes:
            continue
        ours, theirs = (_calling(providers[provider].fn) for provider in ("triton", "composed"))
        arguments = partial(expert_arguments, name, made=made)
        times = times_of(made, ours, theirs, contextlib.nullcontext, sizes, arguments)
        most = limit(slowest(made, times), sizes)
        if most > 0:
            limits[name] = most
    made.faster.update(limits)
    return limits


def _calling(fn: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda arguments: fn(*arguments)


def expert_arguments(op: str, size: int, made: Communicator) -> list[Any]:
    """Arguments of an op of EXPERT_OPS whose tokens of a rank have so many bytes as they are sent."""
    itemsize = 1 if op == "ep_dispatch_fp8" else 2
    tokens = max(1, size // (itemsize * CHANNELS))
    width = size // (itemsize * tokens)
    if op == "ep_combine":
        every = made.size * tokens
        rows = torch.ones(every, width, dtype=torch.bfloat16, device=made.device)
        return [rows, torch.arange(every, dtype=torch.int32, device=made.device), made.name]
    x = torch.ones(tokens, width, dtype=torch.bfloat16, device=made.device)
    experts = EXPERTS * made.size
    ids = torch.arange(tokens * EXPERTS, dtype=torch.int32, device=made.device) % experts
    weights = torch.ones(tokens, EXPERTS, device=made.device)
    block = [BLOCK] if op == "ep_dispatch_fp8" else []
    return [x, ids.view(tokens, EXPERTS), weights, experts, *block, made.name]
