"""Numerical probes of recurrences: the functions of a module's file that compute them, against gated_delta_rule."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastkernels.core import registry
from fk_integrations.transformers.probes import agree

SIZES = 2, 7, 4, 16, 12  # sequences, tokens, heads, channels of a key and of a value
CHUNK = 4


def recurrence_probe(module: nn.Module) -> bool:
    """Whether the class calls a function of its file that computes what the op does; one that does not fails it."""
    cls: Any = type(module)
    text, space = inspect.getsource(cls), vars(sys.modules[cls.__module__])
    found = [(probe, space[name]) for name, probe in _PROBES.items() if name in space and name in text]
    return bool(found) and all(probe(function) for probe, function in found)


def _delta_rule(function: Callable[..., Any]) -> bool:
    """flash-linear-attention's arguments: the queries are scaled, the state of a sequence is [H, K, V]."""
    b, t, h, dk, dv = SIZES
    q, k, v = torch.randn(b, t, h, dk), torch.randn(b, t, h, dk), torch.randn(b, t, h, dv)
    k = k / k.norm(dim=-1, keepdim=True)
    g, beta, state = -torch.rand(b, t, h), torch.rand(b, t, h), torch.randn(b, h, dk, dv)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state, "scale": dk**-0.5}
    ours, last = registry.get("gated_delta_rule").reference(**given)
    chunks = {"chunk_size": CHUNK} if "chunk_size" in inspect.signature(function).parameters else {}
    theirs = function(q, k, v, g, beta, initial_state=state, output_final_state=True, **chunks)
    return agree(theirs[0], ours) and agree(theirs[1], last)


def _mamba2_scan(function: Callable[..., Any]) -> bool:
    """Mamba 2's: B and C of two heads, steps behind a softplus, a state of [H, V, K], and D * x added."""
    b, t, h, dk, dv = SIZES
    x, steps, bias, a = torch.randn(b, t, h, dv), torch.randn(b, t, h), torch.randn(h), -torch.rand(h)
    keys, queries, d = torch.randn(b, t, h // 2, dk), torch.randn(b, t, h // 2, dk), torch.randn(h)
    state = torch.randn(b, h, dk, dv)
    theirs = function(
        x, steps, a, keys, queries, chunk_size=CHUNK, D=d, dt_bias=bias, dt_softplus=True,
        initial_states=state.transpose(-1, -2), return_final_states=True,
    )  # fmt: skip
    dt = torch.nn.functional.softplus(steps + bias)
    q, k = queries.repeat_interleave(2, 2), keys.repeat_interleave(2, 2)
    ours, last = registry.get("gated_delta_rule").reference(q, k, x, a * dt, dt, state, 1.0, False)
    return agree(theirs[0], ours + d[:, None] * x) and agree(theirs[1], last.transpose(-1, -2))


_PROBES = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
}
