"""Numerical probes of recurrences: the functions of a module's file that compute them, against our ops."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import registry
from fk_integrations.transformers.probes import agree, safely

SIZES = 2, 7, 4, 16, 12  # sequences, tokens, heads, channels of a key and of a value
CHUNK = 4


def recurrence_op(module: nn.Module) -> str:
    """The op that the functions of its file compute which the class calls; '' if one of them does not."""
    cls: Any = type(module)
    text, space = inspect.getsource(cls), vars(sys.modules[cls.__module__])
    found = [
        (op, probe, space[name]) for name, (op, probe) in _PROBES.items() if name in space and name in text
    ]
    return found[0][0] if found and all(safely(probe, function) for _, probe, function in found) else ""


def _delta_rule(function: Callable[..., Any]) -> bool:
    """flash-linear-attention's arguments: the queries are scaled, the state of a sequence is [H, K, V]."""
    b, t, h, dk, dv = SIZES
    q, k, v = torch.randn(b, t, h, dk), torch.randn(b, t, h, dk), torch.randn(b, t, h, dv)
    k = k / k.norm(dim=-1, keepdim=True)
    g, beta, state = -torch.rand(b, t, h), torch.rand(b, t, h), torch.randn(b, h, dk, dv)
    ours, last = _packed("gated_delta_rule", q, k, v, g, beta, state=state, scale=dk**-0.5)
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
    more = {"a": a, "d": d, "dt_bias": bias}
    ours, last = _packed(
        "ssd", x=x, dt=steps, b=keys, c=queries, state=state.transpose(-1, -2), constants=more
    )
    return agree(theirs[0], ours) and agree(theirs[1], last)


def _mamba_scan(function: Callable[..., Any]) -> bool:
    """Mamba's: [sequences, channels, tokens], from a state of 0."""
    b, t, _, n, d = SIZES
    u, delta, z = (torch.randn(b, d, t) for _ in range(3))
    keys, queries, a = torch.randn(b, n, t), torch.randn(b, n, t), -torch.rand(d, n)
    skip, bias = torch.randn(d), torch.randn(d)
    more = {"D": skip, "delta_bias": bias, "delta_softplus": True}
    theirs = function(u, delta, a, keys, queries, z=z, return_last_state=True, **more)
    u, delta, z, keys, queries = (x.transpose(1, 2) for x in (u, delta, z, keys, queries))
    ours, last = _packed(
        "mamba_scan", x=u, dt=delta, b=keys, c=queries, z=z, state=torch.zeros(b, d, n),
        constants={"a": a, "d": skip, "dt_bias": bias},
    )  # fmt: skip
    return agree(theirs[0].transpose(1, 2), ours) and agree(theirs[1], last)


def _linear_recurrence(q: Any, k: Any, v: Any, g: Any, state: Any, scale: float = 1.0) -> Any:
    return _packed("gated_linear_attention", q, k, v, g, state=state, scale=scale)


def _packed(
    op: str, *tensors: Any, state: Any, constants: Any = None, scale: float | None = None, **named: Any
) -> Any:
    """The outputs [B, T, ...] and new states of the op's reference, for B sequences [B, T, ...] with these states."""
    batch, tokens = (*tensors, *named.values())[0].shape[:2]
    rows = [x.flatten(0, 1) for x in tensors]
    given = {name: x.flatten(0, 1) for name, x in named.items()} | (constants or {})
    out, new = registry.get(op).reference(
        *rows, **given, state=torch.cat([state[:1], state]), slots=torch.arange(1, batch + 1, dtype=torch.int32),
        cu_seqlens=torch.arange(batch + 1, dtype=torch.int32) * tokens, fresh=torch.zeros(batch, dtype=torch.bool),
        **({} if scale is None else {"scale": scale}),
    )  # fmt: skip
    return out.unflatten(0, (batch, tokens)), new[1:]


def _rg_lru(cls: Any) -> bool:
    """RG-LRU's scan: each channel is a head with one key of 1, and a reset is a decay to 0."""
    b, t, _, _, d = SIZES
    x, decay, state, reset = (
        torch.randn(b, t, d),
        torch.rand(b, t, d),
        torch.randn(b, d),
        torch.zeros(b, t, 1),
    )
    reset[0, 3] = 1
    theirs = cls._rnn_scan(None, x, decay, reset.bool(), state)
    ones = torch.ones(b, t, d, 1)
    g = (decay * (1 - reset)).log()
    ours, last = _linear_recurrence(ones, ones, x[..., None], g, state[..., None, None])
    return agree(theirs[0], ours[..., 0]) and agree(theirs[1], last[..., 0, 0])


def _mlstm(function: Callable[..., Any]) -> bool:
    """xLSTM's: the normalizer is one more channel of values, the running maximum is part of the gates."""
    b, h, dk, dv, t = 2, 3, 16, 12, 2 * CHUNK
    q, k, v = torch.randn(b, h, t, dk), torch.randn(b, h, t, dk), torch.randn(b, h, t, dv)
    i, f, c = torch.randn(b, h, t), torch.randn(b, h, t), torch.randn(b, h, dk, dv)
    n, m = torch.randn(b, h, dk), torch.randn(b, h, 1)
    chunks = {"chunk_size": CHUNK} if "chunk_size" in inspect.signature(function).parameters else {}
    theirs = function(q, k, v, i, f, c_initial=c, n_initial=n, m_initial=m, return_last_states=True, **chunks)
    least = [m[..., 0]]
    for step in range(t):
        least.append(torch.maximum(F.logsigmoid(f[..., step]) + least[-1], i[..., step]))
    new, old = torch.stack(least[1:], -1), torch.stack(least[:-1], -1)
    values, decay = torch.cat([v, torch.ones(b, h, t, 1)], -1), F.logsigmoid(f) + old - new
    turned = (x.transpose(1, 2) for x in (q, k, values * (i - new).exp()[..., None], decay))
    out, _ = _packed(
        "gated_linear_attention", *turned, state=torch.cat([c, n[..., None]], -1), scale=dk**-0.5
    )
    out = out.transpose(1, 2)
    return agree(theirs[0], out[..., :-1] / torch.maximum(out[..., -1:].abs(), (-new).exp()[..., None]), 1e-4)


def _lightning(cls: Any) -> bool:
    """MiniMax's whole module: one decay for each head."""
    kind = vars(sys.modules[cls.__module__])["MiniMaxConfig"]
    made = cls(kind(hidden_size=24, num_attention_heads=4, head_dim=8, block_size=CHUNK), 0).eval()
    b, t = 2, 7
    x = torch.randn(b, t, 24)
    q, k, v = made.act_fn(made.qkv_proj(x)).unflatten(-1, (4, 24)).split(8, -1)
    g = -made.slope_rate.flatten().expand(b, t, 4)
    out, last = _linear_recurrence(q, k, v, g, torch.zeros(b, 4, 8, 8))
    ours = made.out_proj(made.output_gate(x).sigmoid() * made.norm(out.flatten(2)))
    theirs = made(x, None, None)
    return agree(theirs[0], ours) and agree(theirs[1], last)


def lstm_probe(module: nn.LSTM) -> bool:
    """torch's LSTM, of any number of layers and directions: linear layers and the op, one direction after the other."""
    b, t, n, d = 2, 5, 6, 8
    names = ("num_layers", "bias", "batch_first", "bidirectional")
    made = nn.LSTM(n, d, **{name: getattr(module, name) for name in names})
    x = torch.randn(b, t, n)
    theirs, _ = made(x if module.batch_first else x.transpose(0, 1))
    op = registry.get("lstm").reference
    for layer in range(module.num_layers):
        outs = []
        for end in ("", "_reverse")[: 1 + module.bidirectional]:
            each = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            w: list[Any] = [getattr(made, f"{name}_l{layer}{end}", None) for name in each]
            gates = F.linear(x.flip(1) if end else x, w[0], w[2] + w[3] if module.bias else None)
            out, _, _ = op(gates, w[1], torch.zeros(b, d), torch.zeros(b, d))
            outs.append(out.flip(1) if end else out)
        x = torch.cat(outs, -1)
    return module.proj_size == 0 and agree(theirs if module.batch_first else theirs.transpose(0, 1), x)


_PROBES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "torch_chunk_gated_delta_rule": ("gated_delta_rule", _delta_rule),
    "torch_recurrent_gated_delta_rule": ("gated_delta_rule", _delta_rule),
    "mamba2_chunk_scan": ("ssd", _mamba2_scan),
    "mamba_selective_scan": ("mamba_scan", _mamba_scan),
    "RecurrentGemmaRglru": ("gated_linear_attention", _rg_lru),
    "mlstm_recurrent_sequence_native": ("gated_linear_attention", _mlstm),
    "mlstm_chunkwise_native_autograd": ("gated_linear_attention", _mlstm),
    "MiniMaxLightningAttention": ("gated_linear_attention", _lightning),
}
