"""MLPs whose weights a sequence changes while it is read: test-time training, end to end (TTT-E2E).

The state of a sequence is the weights of these MLPs. At the border of a chunk of tokens they make one step of SGD on
the mean loss of the chunk's next tokens. The gradient passes through the layers from the first with such an MLP on:
they run again on what entered them, and then backward, by the equations. So steps may split a chunk anywhere.

Positions before the first border use the weights of the checkpoint, which are in slot 0 of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.forward_context import get_forward_context, once_per_step
from fastkernels.core.layer_state import StateSpec
from fastkernels.models.common.descriptions import description
from fastkernels.models.common.layers.state_layers import Stateful
from fastkernels.overrides.attention.attention_grad import attention_grad
from fastkernels.overrides.attention.attention_prefill import attention_prefill
from fastkernels.overrides.linear.vllm import (
    VllmMergedColumnParallelLinear,
    VllmRowParallelLinear,
    VllmUnquantizedLinearMethod,
)
from fastkernels.overrides.norm.rms_norm_grad import rms_norm_grad
from fastkernels.overrides.recurrence.ttt_mlp import ttt_mlp
from fastkernels.overrides.recurrence.ttt_mlp_grad import products, ttt_mlp_grad
from fastkernels.overrides.recurrence.ttt_sgd import ttt_sgd

T = torch.Tensor
LOGITS = 1 << 26  # that are computed at once


def _token_slots(positions: T) -> T:
    """The slot of each token of the step [T] int32; 0 for padding."""
    m = get_forward_context()
    assert m.state_slots is not None
    if m.decode_only:
        return m.state_slots
    at = torch.arange(len(positions), device=positions.device)
    row = torch.searchsorted(m.cu_seqlens_q[1:].contiguous(), at, right=True).clamp(max=len(m.seq_lens) - 1)
    return torch.where(at < m.cu_seqlens_q[-1], m.state_slots[row], 0)


def _inner_slots(positions: T, chunk: int) -> T:
    """The slot of the weights that each token reads [T] int32: those of the checkpoint in the first chunk."""
    slots = once_per_step(_token_slots, positions, captured=True)
    return torch.where(positions < chunk, 0, slots).to(torch.int32)


class InnerMlp(Stateful):
    """A gated MLP with weights of each sequence: positions [T] and x [T, H] to [T, H].

    gate_up_proj, down_proj  its weights in the checkpoint, with which each sequence begins
    states  gate_up [slots, 2 I, H] and down [slots, H, I], and in bfloat16 the rests of both, see ttt_sgd
    """

    def __init__(self, m: description.InnerMlp, hidden: int, prefix: str) -> None:
        super().__init__()
        self.chunk, dtype = m.chunk, torch.get_default_dtype()
        if dtype == torch.float16:
            raise description.Unsupported(
                "config.dtype='float16' is not supported for weights that change, only 'bfloat16' and 'float32'"
            )
        self.gate_up_proj = VllmMergedColumnParallelLinear(
            hidden, [m.intermediate] * 2, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = VllmRowParallelLinear(
            m.intermediate, hidden, bias=False, prefix=f"{prefix}.down_proj"
        )
        inner = parallel.divide(m.intermediate, parallel.get_tp_size(), "channels of an inner MLP")
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {
            name: (shape, None) for name, shape in shapes.items()
        }
        if dtype == torch.bfloat16:
            tensors |= {f"{name}_rest": (shape, None) for name, shape in shapes.items()}
        self.keeps = StateSpec(tensors)

    def begin(self) -> None:
        """Write the weights of the checkpoint to slot 0 of new states."""
        assert self.states is not None
        self.states["gate_up"][0].copy_(self.gate_up_proj.weight)
        self.states["down"][0].copy_(self.down_proj.weight)

    def weights(self) -> tuple[tuple[T, T | None], ...]:
        """The states (weight, rest) of both matrices."""
        assert self.states is not None
        return tuple((self.states[n], self.states.get(f"{n}_rest")) for n in ("gate_up", "down"))

    def forward(self, positions: T, x: T) -> T:
        states, _ = self.bound_states()
        slots = once_per_step(_inner_slots, positions, self.chunk, captured=True)
        longest = get_forward_context().max_seqlen_q
        return parallel.all_reduce(ttt_mlp(x, states["gate_up"], states["down"], slots, longest))


@dataclass
class _Norm:
    """A norm whose input is kept for its gradient. Without a module it is the identity."""

    module: Any

    def __call__(self, x: T) -> T:
        self.x = x
        return x if self.module is None else self.module(x)

    def grad(self, dy: T) -> T:
        if self.module is None:
            return dy
        return rms_norm_grad(self.x, dy, self.module.weight, self.module.variance_epsilon)


def _turn(x: T, cos: T, sin: T) -> T:
    """Turn pairs of neighbours in x [C, heads, D] by angles [C, D / 2]; with -sin, back."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class _Block:
    """A layer's forward pass over one chunk, and the gradient of its input."""

    def __init__(self, layer: Any, slot: T, chunk: _Chunk) -> None:
        self.layer, self.slot, self.chunk = layer, slot, chunk
        norms = [_Norm(layer.norm_at(i)) for i in range(6)]
        (
            self.before_attention,
            self.after_attention,
            self.before_mlp,
            self.after_mlp,
            self.before,
            self.after,
        ) = norms
        self.attention, self.mlp = (getattr(layer, part) for part in layer.parts)
        self.inner: InnerMlp = getattr(layer, layer.inner)
        self.q_norm, self.k_norm = (
            _Norm(getattr(self.attention, name, None)) for name in ("q_norm", "k_norm")
        )

    def forward(self, x: T) -> T:
        x = x + self.after_attention(self._attend(self.before_attention(x)))
        (gate_up, _), (down, _) = self.inner.weights()
        self.read = self.before(x)
        slots = self.slot.expand(len(x)).contiguous()
        y = parallel.all_reduce(ttt_mlp(self.read, gate_up, down, slots, len(x)))
        x = x + self.after(y)
        self.read_mlp = self.before_mlp(x)
        return x + self.after_mlp(self.mlp(self.read_mlp))

    def backward(self, dx: T) -> tuple[T, tuple[T, T]]:
        """The gradients of the input, as far as `first` needs it, and of gate_up and down."""
        d = self.after_mlp.grad(dx)
        d = products(self.read_mlp, d, self.mlp.gate_up_proj.weight, self.mlp.down_proj.weight)
        dx = dx + self.before_mlp.grad(parallel.all_reduce(d))
        (gate_up, _), (down, _) = self.inner.weights()
        d = self.after.grad(dx)
        d, dgate_up, ddown = ttt_mlp_grad(self.read[None], d[None], gate_up, down, self.slot)
        if self.chunk.blocks[0] is self:  # no parameter that changes is before it
            return dx, (dgate_up[0], ddown[0])
        dx = dx + self.before.grad(parallel.all_reduce(d[0]))
        return dx + self.before_attention.grad(self._attend_grad(self.after_attention.grad(dx))), (
            dgate_up[0], ddown[0],
        )  # fmt: skip

    def _attend(self, x: T) -> T:
        a, c = self.attention, self.chunk
        qkv, _ = a.qkv_proj(x)
        q, k, v = (
            part.unflatten(-1, (-1, a.head_dim)) for part in qkv.split([a.q_size, a.kv_size, a.kv_size], -1)
        )
        self.cos, self.sin = a.rotary_emb.cos_sin_cache[c.start : c.end].float().chunk(2, -1)
        self.q = _turn(self.q_norm(q.contiguous()), self.cos, self.sin)
        k = _turn(self.k_norm(k.contiguous()), self.cos, self.sin)
        before = self._cached(a.attn)
        scales = a.attn.k_scale, a.attn.v_scale
        self.k, self.v = (
            torch.cat((old.to(new.dtype) if scale == 1.0 else old.to(new.dtype) * scale, new))
            for old, new, scale in zip(before, (k, v), scales, strict=True)
        )
        device = x.device
        starts = torch.arange(2, dtype=torch.int32, device=device) * len(x)
        keys = torch.full((1,), c.end, dtype=torch.int32, device=device)
        out = attention_prefill(
            self.q, *a.attn.kv_cache, starts, keys, c.table(a.attn)[None], len(x), c.end, a.attn.scale,
            a.attn.window_left, 0.0, a.attn.k_scale, a.attn.v_scale,
        )  # fmt: skip
        return a.o_proj(out.flatten(1))[0]

    def _attend_grad(self, dy: T) -> T:
        a = self.attention
        dout = (dy @ a.o_proj.weight).unflatten(-1, (-1, a.head_dim))
        dq, dk, dv = attention_grad(self.q, self.k, self.v, dout, a.attn.scale, a.attn.window_left)
        dq, dk = (
            norm.grad(_turn(d, self.cos, -self.sin)) for norm, d in ((self.q_norm, dq), (self.k_norm, dk))
        )
        dqkv = torch.cat([d.flatten(1) for d in (dq, dk, dv)], -1)
        return parallel.all_reduce(dqkv @ a.qkv_proj.weight)

    def _cached(self, attn: Any) -> tuple[T, ...]:
        """Keys and values before the chunk that its queries see, from the paged cache."""
        c, size = self.chunk, attn.kv_cache[0].shape[1]
        first = 0 if attn.window_left < 0 else max(0, c.start - attn.window_left)
        blocks = c.table(attn)[first // size : -(-c.start // size)].long()
        skip = first // size * size
        return tuple(
            cache.index_select(0, blocks).flatten(0, 1)[first - skip : c.start - skip]
            for cache in attn.kv_cache
        )


@dataclass
class _Chunk:
    """The chunk of positions start to end of a sequence whose blocks are `tables`, and the layers that run on it."""

    start: int
    end: int
    tables: Sequence[T]
    blocks: Sequence[_Block] = ()

    def table(self, attn: Any) -> T:
        return self.tables[attn.kv_group]


class Learner(Stateful):
    """Changes the weights of the inner MLPs in `layers` at the end of each chunk.

    states  what entered the first of these layers [slots, chunk, H], and the token ids [slots, chunk]
    """

    layers: list[Any]
    norm: nn.Module

    def __init__(self, d: description.Decoder, first: int, layers: Sequence[Any], norm: nn.Module) -> None:
        super().__init__()
        described = d.layers[first:]
        inner = described[0].inner
        assert inner is not None and all(layer.inner is not None for layer in described)
        self.chunk, self.rate, self.clip, self.vocab = inner.chunk, inner.rate, inner.clip, d.vocab
        # Modules of the model, not one more time of this one
        self.__dict__["layers"], self.__dict__["norm"] = list(layers), norm
        self.keeps = StateSpec(
            {"entered": ((inner.chunk, d.hidden), None), "ids": ((inner.chunk,), torch.int64)}
        )
        for layer in layers:
            attention, mlp = (getattr(layer, part) for part in layer.parts)
            attention.attn.kept_behind = inner.chunk
            linears = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
            if not all(isinstance(x.quant_method, VllmUnquantizedLinearMethod) for x in linears):
                raise description.Unsupported(
                    "config.quantization_config is not supported: gradients pass through the last layers"
                )

    def keep(self, ids: T, positions: T, entered: T) -> None:
        """Keep the step's tokens, and what enters the first layer [T, H]."""
        states, _ = self.bound_states()
        at = once_per_step(_token_slots, positions, captured=True).long(), positions % self.chunk
        states["entered"].index_put_(at, entered.to(states["entered"].dtype))
        states["ids"].index_put_(at, ids)

    def learn(
        self, slot: int, end: int, next_id: T, tables: Sequence[T], compute_logits: Callable[[T], T], head: T
    ) -> None:
        """Change the weights in `slot` after the chunk that ends at `end`. next_id [1]: the token after it."""
        assert self.states is not None and slot > 0, "slot 0 is for the weights of the checkpoint"
        x = self.states["entered"][slot]
        targets = torch.cat((self.states["ids"][slot, 1:], next_id))
        source, target = (
            torch.full((1,), n, dtype=torch.int32, device=x.device)
            for n in (0 if end == self.chunk else slot, slot)
        )
        chunk = _Chunk(end - self.chunk, end, tables)
        chunk.blocks = [_Block(layer, source, chunk) for layer in self.layers]
        for block in chunk.blocks:
            x = block.forward(x)
        last = _Norm(self.norm)
        dx = last.grad(self._loss_grad(last(x), targets, compute_logits, head))
        grads: list[tuple[T, T]] = []
        for block in reversed(chunk.blocks):
            dx, own = block.backward(dx)
            grads.append(own)
        rate = self._rate([g for pair in grads for g in pair])
        for block, own in zip(reversed(chunk.blocks), grads, strict=True):
            for (weight, rest), grad in zip(block.inner.weights(), own, strict=True):
                ttt_sgd(weight, rest, grad[None], rate, source, target)

    def _loss_grad(self, hidden: T, targets: T, compute_logits: Callable[[T], T], head: T) -> T:
        """The gradient of the mean loss of `targets` in the hidden states [C, H] before the head."""
        count, made = max(1, LOGITS // self.vocab), []
        rows = len(head) * parallel.get_tp_rank()  # of the vocabulary, the first on this rank
        for part, wanted in zip(hidden.split(count), targets.split(count), strict=True):
            grad = compute_logits(part).float().softmax(-1)
            grad.scatter_add_(1, wanted[:, None], grad.new_full((len(wanted), 1), -1.0))
            own = (grad / len(targets))[:, rows : rows + len(head)].to(part.dtype)
            made.append(own @ head[: own.shape[1]])
        return parallel.all_reduce(torch.cat(made))

    def _rate(self, grads: Sequence[T]) -> T:
        """The factor of the gradients [1], which are scaled down to a global norm of `clip`."""
        rate = torch.full((1,), self.rate, dtype=torch.float32, device=grads[0].device)
        if not self.clip:
            return rate
        squares = (
            torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]).square().sum()
        )
        norm = parallel.all_reduce(squares.view(1)).sqrt()
        return torch.where(norm < self.clip, rate, rate * self.clip / norm)
