"""Layers that keep a state instead of keys and values, built from their description: positions [T] and hidden_states
[T, H] to [T, H].

Ranks share the heads, or for Mamba the channels. The engine binds `states`; see fastkernels.core.layer_state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.forward_context import get_forward_context
from fastkernels.core.layer_state import StateSpec
from fastkernels.models.common.descriptions.description import (
    GatedDelta,
    KimiDelta,
    LinearAttention,
    Mamba,
    Mamba2,
    Norm,
    Recurrent,
    Rwkv7,
    ShortConv,
)
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmMergedColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmReplicatedLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.l2_norm import l2_norm
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.norm.rms_norm_gated import rms_norm_gated
from fastkernels.overrides.recurrence.causal_conv1d import causal_conv1d
from fastkernels.overrides.recurrence.delta_gates import delta_gates
from fastkernels.overrides.recurrence.gated_delta_rule import gated_delta_rule
from fastkernels.overrides.recurrence.gated_linear_attention import gated_linear_attention
from fastkernels.overrides.recurrence.kda import kda
from fastkernels.overrides.recurrence.mamba_scan import mamba_scan
from fastkernels.overrides.recurrence.rwkv7 import rwkv7
from fastkernels.overrides.recurrence.ssd import ssd
from fastkernels.overrides.rope.vllm import get_rope

MakeNorm = Callable[[Norm, int], nn.Module]
Tail = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]  # cu_seqlens, slots and fresh of a step
LEAST_DECAY = -math.exp(-0.5)  # the logarithm of RWKV-7's smallest decay


class Part:
    """Rows of a weight that the ranks share evenly; with `copies`, each rank has all of them."""

    def __init__(self, size: int, copies: bool = False) -> None:
        self.size, self.copies = size, copies

    @property
    def own(self) -> int:
        return self.size if self.copies else parallel.divide(self.size, parallel.get_tp_size(), "rows")

    def of(self, loaded: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the whole part."""
        return loaded if self.copies else loaded.narrow(0, self.own * parallel.get_tp_rank(), self.own)


def vector(
    parts: Sequence[Part], *more: int, what: str, dtype: torch.dtype | None = torch.float32, fill: float = 1.0,
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> nn.Parameter:  # fmt: skip
    """A parameter [rows of the parts, *more] with a loader of one part or of all, whose tensor may have axes of 1 more.

    what: where its size is from, for the error of another one. fill: the value of random weights, if it is a vector
    """
    made = nn.Parameter(torch.empty(sum(p.own for p in parts), *more, dtype=dtype), requires_grad=False)

    def load(parameter: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
        given = parts if shard is None else parts[shard : shard + 1]
        shape = (sum(p.size for p in given), *more)
        if [n for n in loaded.shape if n != 1] != [n for n in shape if n != 1]:
            raise ValueError(f"expected {list(shape)}: {what}")
        whole = loaded.reshape(shape).split([p.size for p in given])
        rows = torch.cat([p.of(t) for p, t in zip(given, whole, strict=True)])
        start = 0 if shard is None else sum(p.own for p in parts[:shard])
        parameter.data[start : start + len(rows)].copy_(rows if convert is None else convert(rows.float()))

    made.weight_loader = load  # type: ignore[attr-defined]
    made.fill = fill  # type: ignore[attr-defined]
    return made


def rates(part: Part, *more: int, what: str) -> nn.Parameter:
    """-exp(A_log) of the checkpoint's A_log, in float32."""
    return vector([part], *more, what=what, fill=-1.0, convert=lambda t: -t.exp())


class Stateful(nn.Module):
    """A module whose states the engine binds as `states`."""

    keeps: StateSpec
    states: dict[str, torch.Tensor] | None = None

    def bound_states(self) -> tuple[dict[str, torch.Tensor], Tail]:
        """The states, and what ops read of the step's batch."""
        m, states = get_forward_context(), self.states
        if states is None or m.state_slots is None or m.fresh is None:
            raise RuntimeError(
                f"{type(self).__name__} has no state: set states = {{name: tensor [slots, ...]}} as `keeps` declares"
                " them, and state_slots and fresh of the step's AttentionMetadata"
            )
        return states, (None if m.decode_only else m.cu_seqlens_q, m.state_slots, m.fresh)


class StateLayer(Stateful):
    """A layer with a short convolution and a recurrence."""

    ops: tuple[str, ...] = ()

    def _keep(self, channels: int, kernel: int, state: tuple[int, ...], swapped: bool = False) -> None:
        self.keeps = StateSpec(
            {"conv": ((channels, kernel - 1), None), "recurrent": (state, torch.float32)},
            frozenset({"conv", "recurrent"} if swapped else {"conv"}),
        )  # fmt: skip

    def _bound(self) -> tuple[torch.Tensor, torch.Tensor, Tail]:
        """The states of the convolution and the recurrence, and what ops read of the step's batch."""
        states, batch = self.bound_states()
        return states["conv"], states["recurrent"], batch


class Conv(nn.Module):
    """The weights of a causal depthwise convolution."""

    def __init__(
        self, parts: Sequence[Part], kernel: int, bias: bool, what: str, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.activation = activation
        self.weight = vector(parts, kernel, what=f"{what}, kernel {kernel}", dtype=None)
        self.bias = vector(parts, what=what, dtype=None, fill=0.0) if bias else None

    def forward(self, x: torch.Tensor, state: torch.Tensor, batch: Tail) -> torch.Tensor:
        """x: [T, channels] to the same."""
        return causal_conv1d(x, self.weight, self.bias, state, *batch, self.activation)


class GatedNorm(nn.Module):
    """RMS norm of groups of `size` channels, multiplied by a gate before or after it."""

    def __init__(self, norm: Norm, part: Part, size: int, gate_first: bool, activation: str = "silu") -> None:
        super().__init__()
        self.eps, self.size, self.gate_first, self.activation = norm.eps, size, gate_first, activation
        self.weight = vector([part], what="the channels of the gated norm", dtype=None)

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """x, gate: [..., channels] to the same. gate: None, if there is none."""
        if self.size <= x.shape[-1]:
            return rms_norm_gated(
                x, self.weight, gate, self.eps, self.size, not self.gate_first, self.activation
            )
        # One group on several ranks
        assert gate is not None
        wide = x.float() * F.silu(gate.float())
        squares = parallel.all_reduce(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self.size + self.eps) * self.weight.float()).to(x.dtype)


class MambaLayer(StateLayer):
    """Mamba."""

    ops = ("causal_conv1d", "mamba_scan")

    def __init__(self, a: Mamba, make_norm: MakeNorm, hidden: int, prefix: str) -> None:
        super().__init__()
        part = Part(a.inner)
        self.sizes = [a.rank, a.size, a.size]
        self.in_proj = VllmMergedColumnParallelLinear(
            hidden, [a.inner] * 2, bias=a.bias, prefix=f"{prefix}.in_proj"
        )
        self.conv1d = Conv([part], a.kernel, a.conv_bias, f"{a.inner} channels")
        self.x_proj = VllmRowParallelLinear(a.inner, sum(self.sizes), bias=False, prefix=f"{prefix}.x_proj")
        self.dt_proj = VllmColumnParallelLinear(
            a.rank, a.inner, bias=True, skip_bias_add=True, prefix=f"{prefix}.dt_proj"
        )
        self.dt_proj.bias = vector([part], what=f"{a.inner} channels", fill=0.0)  # in float32, for the scan
        self.A = rates(part, a.size, what=f"{a.inner} channels with states of {a.size} numbers")
        self.D = vector([part], what=f"{a.inner} channels")
        self.out_proj = VllmRowParallelLinear(a.inner, hidden, bias=a.bias, prefix=f"{prefix}.out_proj")
        names = ("dt_layernorm", "b_layernorm", "c_layernorm")
        self.norms = names if a.part_norm is not None else ()
        for name, size in zip(self.norms, self.sizes, strict=False):
            assert a.part_norm is not None
            self.add_module(name, make_norm(a.part_norm, size))
        self._keep(part.own, a.kernel, (part.own, a.size))

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        conv, recurrent, batch = self._bound()
        x, z = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        x = self.conv1d(x, conv, batch)
        parts = self.x_proj(x)[0].split(self.sizes, dim=-1)
        if self.norms:
            norms = (getattr(self, name) for name in self.norms)
            parts = [norm(part.contiguous()) for norm, part in zip(norms, parts, strict=True)]
        dt, bias = self.dt_proj(parts[0])
        y = mamba_scan(x, dt, self.A, parts[1], parts[2], self.D, z, bias, recurrent, *batch)
        return self.out_proj(y)[0]


class Mamba2Layer(StateLayer):
    """Mamba-2. If there is one group, all ranks have its B and C."""

    ops = ("causal_conv1d", "ssd", "rms_norm_gated")

    def __init__(self, a: Mamba2, make_norm: MakeNorm, hidden: int, prefix: str) -> None:
        super().__init__()
        self.described, ranks = a, parallel.get_tp_size()
        heads, inner = Part(a.heads), Part(a.inner)
        group = Part(a.groups * a.size, copies=a.groups == 1)
        copies = ranks if a.groups == 1 else 1
        self.in_proj = VllmMergedColumnParallelLinear(
            hidden, [a.inner, a.inner, *[a.groups * a.size * copies] * 2, a.heads], bias=a.bias,
            prefix=f"{prefix}.in_proj",
        )  # fmt: skip
        if copies > 1:
            for parameter in self.in_proj.parameters():
                parameter.weight_loader = self._load_copied  # type: ignore[attr-defined]
        what = f"{a.heads} heads of {a.head_size} and twice {a.groups} groups of {a.size}"
        self.conv1d = Conv([inner, group, group], a.kernel, a.conv_bias, what)
        self.A = rates(heads, what=f"{a.heads} heads")
        self.D = vector([heads], what=f"{a.heads} heads")
        self.dt_bias = vector([heads], what=f"{a.heads} heads", fill=0.0)
        self.norm = GatedNorm(a.norm, inner, a.inner // a.groups, gate_first=True)
        self.out_proj = VllmRowParallelLinear(a.inner, hidden, bias=a.bias, prefix=f"{prefix}.out_proj")
        self.sizes = [inner.own, inner.own + 2 * group.own, heads.own]
        self.conv_sizes = [inner.own, group.own, group.own]
        self._keep(self.sizes[1], a.kernel, (heads.own, a.head_size, a.size))

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        a = self.described
        conv, recurrent, batch = self._bound()
        z, xbc, dt = self.in_proj(hidden_states)[0].split(self.sizes, dim=-1)
        x, b, c = self.conv1d(xbc, conv, batch).split(self.conv_sizes, dim=-1)
        y = ssd(
            x.unflatten(-1, (-1, a.head_size)), dt, self.A, b.unflatten(-1, (-1, a.size)),
            c.unflatten(-1, (-1, a.size)), self.D, self.dt_bias, recurrent, *batch, *a.dt_limits,
        )  # fmt: skip
        return self.out_proj(self.norm(y.flatten(-2), z))[0]

    def _load_copied(self, param: nn.Parameter, loaded: torch.Tensor, shard: Any = None) -> None:
        """Copy the rows of B and C for each rank, which then takes its part."""
        a = self.described
        sizes = [a.inner, a.inner, a.size, a.size, a.heads]
        if shard is None and loaded.dim() and loaded.shape[0] == sum(sizes):
            parts = list(loaded.split(sizes))
            parts[2:4] = [torch.cat([t] * parallel.get_tp_size()) for t in parts[2:4]]
            loaded = torch.cat(parts)
        self.in_proj.weight_loader(param, loaded, shard)


class GatedDeltaLayer(StateLayer):
    """The gated delta rule. in_proj: q, k, v, z, b and a, each for all heads of this rank."""

    ops = ("causal_conv1d", "delta_gates", "gated_delta_rule", "rms_norm_gated")

    def __init__(self, a: GatedDelta, make_norm: MakeNorm, hidden: int, prefix: str) -> None:
        super().__init__()
        self.described = a
        key, value = a.key_heads * a.key_size, a.value_heads * a.value_size
        self.rows = [key, key, value, value, a.value_heads, a.value_heads]  # of all ranks
        self.in_proj = VllmMergedColumnParallelLinear(
            hidden, self.rows, bias=False, prefix=f"{prefix}.in_proj"
        )
        for parameter in self.in_proj.parameters():
            parameter.weight_loader = self._load_several if a.projections else self._load_by_head  # type: ignore[attr-defined]
        keys, values, heads = Part(key), Part(value), Part(a.value_heads)
        what = (
            f"twice {a.key_heads} key heads of {a.key_size} and {a.value_heads} value heads of {a.value_size}"
        )
        self.conv1d = Conv([keys, keys, values], a.kernel, False, what)
        self.A = rates(heads, what=f"{a.value_heads} value heads")
        self.dt_bias = vector([heads], what=f"{a.value_heads} value heads", fill=0.0)
        self.norm = GatedNorm(a.norm, Part(a.value_size, copies=True), a.value_size, gate_first=False)
        self.out_proj = VllmRowParallelLinear(value, hidden, bias=False, prefix=f"{prefix}.out_proj")
        self.conv_sizes = [keys.own, keys.own, values.own]
        self.sizes = [sum(self.conv_sizes), values.own, heads.own, heads.own]
        self._keep(self.sizes[0], a.kernel, (heads.own, a.key_size, a.value_size), swapped=True)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        a = self.described
        conv, recurrent, batch = self._bound()
        qkv, z, beta, dt = self.in_proj(hidden_states)[0].split(self.sizes, dim=-1)
        q, k, v = self.conv1d(qkv, conv, batch).split(self.conv_sizes, dim=-1)
        gates: tuple[torch.Tensor, ...] = (self.A, self.dt_bias)
        if a.rate_scale != 1.0:
            dt, beta = delta_gates(dt, beta, *gates)
            beta, gates = beta * a.rate_scale, ()
        y = gated_delta_rule(
            q.unflatten(-1, (-1, a.key_size)), k.unflatten(-1, (-1, a.key_size)),
            v.unflatten(-1, (-1, a.value_size)), dt, beta, recurrent, *batch, a.key_size**-0.5, True, *gates,
        )  # fmt: skip
        y = self.norm(y, z.unflatten(-1, (-1, a.value_size)))
        return self.out_proj(y.flatten(-2))[0]

    def _load_by_head(self, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
        """Load in_proj_qkvz (shard 0) or in_proj_ba (1), whose rows are sorted by key head, or all in our order."""
        if shard is None:
            self.in_proj.weight_loader(param, loaded)
            return
        a, each = self.described, self.described.value_heads // self.described.key_heads
        sizes = (
            [a.key_size, a.key_size, each * a.value_size, each * a.value_size] if shard == 0 else [each, each]
        )
        if not loaded.dim() or loaded.shape[0] != a.key_heads * sum(sizes):
            raise ValueError(
                f"expected {a.key_heads * sum(sizes)} rows, for each of {a.key_heads} key heads {sum(sizes)}"
            )
        parts = loaded.reshape(a.key_heads, sum(sizes), *loaded.shape[1:]).split(sizes, dim=1)
        for i, part in enumerate(parts, 4 * shard):
            self.in_proj.weight_loader(param, part.flatten(0, 1), i)

    def _load_several(self, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
        """Load the projection of this number, which has one or more of our parts, or all in our order."""
        if shard is None:
            self.in_proj.weight_loader(param, loaded)
            return
        counts = self.described.projections
        first = sum(counts[:shard])
        rows = self.rows[first : first + counts[shard]]
        if not loaded.dim() or loaded.shape[0] != sum(rows):
            raise ValueError(f"expected {sum(rows)} rows")
        for i, part in enumerate(loaded.split(rows), first):
            self.in_proj.weight_loader(param, part, i)


class ShortConvLayer(StateLayer):
    """A convolution between two gates, as LFM2 has it. in_proj: the first gate, the second gate and x."""

    ops = ("causal_conv1d",)

    def __init__(self, a: ShortConv, make_norm: MakeNorm, hidden: int, prefix: str) -> None:
        super().__init__()
        part = Part(a.channels)
        self.in_proj = VllmMergedColumnParallelLinear(
            hidden, [a.channels] * 3, bias=a.bias, prefix=f"{prefix}.in_proj"
        )
        self.conv1d = Conv([part], a.kernel, a.bias, f"{a.channels} channels", "none")
        self.out_proj = VllmRowParallelLinear(a.channels, hidden, bias=a.bias, prefix=f"{prefix}.out_proj")
        self.keeps = StateSpec({"conv": ((part.own, a.kernel - 1), None)}, frozenset({"conv"}))

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        states, batch = self.bound_states()
        before, after, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        return self.out_proj(after * self.conv1d(before * x, states["conv"], batch))[0]


class KimiDeltaLayer(StateLayer):
    """The delta rule with a decay for each channel of a key, as Kimi Linear has it."""

    ops = ("causal_conv1d", "delta_gates", "kda", "rms_norm_gated")

    def __init__(self, a: KimiDelta, make_norm: MakeNorm, hidden: int, prefix: str) -> None:
        super().__init__()
        self.described, wide = a, a.heads * a.head_size
        heads, channels = Part(a.heads), Part(wide)
        self.qkv_proj = VllmQKVParallelLinear(
            hidden, a.head_size, a.heads, a.heads, bias=False, prefix=f"{prefix}.qkv_proj"
        )
        what = f"three times {a.heads} heads of {a.head_size}"
        self.conv1d = Conv([channels] * 3, a.kernel, False, what)
        self.fg_a_proj = VllmMergedColumnParallelLinear(
            hidden, [a.head_size] * 2, bias=False, prefix=f"{prefix}.fg_a_proj", disable_tp=True
        )
        self.f_b_proj, self.g_b_proj = (
            VllmColumnParallelLinear(a.head_size, wide, bias=False, prefix=f"{prefix}.{name}")
            for name in ("f_b_proj", "g_b_proj")
        )
        self.b_proj = VllmColumnParallelLinear(hidden, a.heads, bias=False, prefix=f"{prefix}.b_proj")
        self.A = rates(heads, what=f"{a.heads} heads")
        self.dt_bias = vector([channels], what=f"{a.heads} heads of {a.head_size}", fill=0.0)
        self.o_norm = GatedNorm(a.norm, Part(a.head_size, copies=True), a.head_size, False, "sigmoid")
        self.o_proj = VllmRowParallelLinear(wide, hidden, bias=False, prefix=f"{prefix}.o_proj")
        self.conv_sizes = [channels.own] * 3
        self._keep(3 * channels.own, a.kernel, (heads.own, a.head_size, a.head_size), swapped=True)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        by_head = (-1, self.described.head_size)
        conv, recurrent, batch = self._bound()
        qkv = self.conv1d(self.qkv_proj(hidden_states)[0], conv, batch)
        q, k, v = (t.unflatten(-1, by_head) for t in qkv.split(self.conv_sizes, dim=-1))
        f, g = self.fg_a_proj(hidden_states)[0].chunk(2, dim=-1)
        steps = self.f_b_proj(f)[0].unflatten(-1, by_head)
        bias = self.dt_bias.unflatten(-1, by_head)
        beta = self.b_proj(hidden_states)[0]
        y = kda(q, k, v, steps, beta, recurrent, *batch, by_head[1] ** -0.5, True, self.A, bias)
        y = self.o_norm(y, self.g_b_proj(g)[0].unflatten(-1, by_head))
        return self.o_proj(y.flatten(-2))[0]


class LinearAttentionLayer(StateLayer):
    """Linear attention with a decay for each channel (GLA), or with a constant one for each head (RetNet)."""

    decay: torch.Tensor

    def __init__(self, a: LinearAttention, make_norm: MakeNorm, hidden: int, prefix: str) -> None:
        super().__init__()
        self.described, ranks = a, parallel.get_tp_size()
        heads, kv_heads = (parallel.divide(n, ranks, "heads") for n in (a.heads, a.kv_heads))
        self.groups, values = a.heads // a.kv_heads, a.heads * a.value_size
        self.qkv_proj = VllmQKVParallelLinear(
            hidden, a.key_size, a.heads, a.kv_heads, bias=False, prefix=f"{prefix}.qkv_proj",
            v_head_size=a.value_size,
        )  # fmt: skip
        self.sizes = [heads * a.key_size, kv_heads * a.key_size, kv_heads * a.value_size]
        self.ops = ("gated_linear_attention", "rms_norm_gated")
        self.conv1d: Conv | None = None
        state = (heads, a.key_size, a.value_size)
        if a.kernel > 1:
            parts = [Part(size * ranks) for size in self.sizes]  # of all ranks
            what = f"{a.heads} and {a.kv_heads} heads of {a.key_size}, and {a.kv_heads} of {a.value_size}"
            self.conv1d = Conv(parts, a.kernel, False, what)
            self.ops += ("causal_conv1d",)
            self._keep(sum(self.sizes), a.kernel, state, swapped=True)
        else:
            self.keeps = StateSpec({"recurrent": (state, torch.float32)}, frozenset({"recurrent"}))
        if a.rank is None:
            first = heads * parallel.get_tp_rank()
            own = torch.arange(first, first + heads, dtype=torch.float32)
            self.register_buffer("decay", torch.log1p(-torch.exp2(-5.0 - own)), persistent=False)
        else:
            self.gk_proj = nn.ModuleList([
                VllmReplicatedLinear(hidden, a.rank, bias=False, prefix=f"{prefix}.gk_proj.0"),
                VllmColumnParallelLinear(a.rank, a.kv_heads * a.key_size, prefix=f"{prefix}.gk_proj.1"),
            ])  # fmt: skip
        self.rotary_emb: Any = None
        if a.rope is not None:
            self.rotary_emb = get_rope(a.key_size, a.max_positions, True, a.rope)
        self.g_proj = (
            VllmColumnParallelLinear(hidden, values, bias=False, prefix=f"{prefix}.g_proj")
            if a.gated
            else None
        )
        norm = GatedNorm(a.norm, Part(a.value_size, copies=True), a.value_size, gate_first=False)
        self.add_module(a.norm_name, norm)
        self.o_proj = VllmRowParallelLinear(values, hidden, bias=False, prefix=f"{prefix}.o_proj")

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        a, (states, batch) = self.described, self.bound_states()
        qkv = self.qkv_proj(hidden_states)[0]
        if self.conv1d is not None:
            qkv = self.conv1d(qkv, states["conv"], batch)
        q, k, v = qkv.split(self.sizes, dim=-1)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        q, k = (t.unflatten(-1, (-1, a.key_size)) for t in (q, k))
        v, g = v.unflatten(-1, (-1, a.value_size)), self._decay(hidden_states)
        if self.groups > 1:
            k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
            g = g.repeat_interleave(self.groups, dim=1) if g.dim() == 3 else g
        y = gated_linear_attention(q, k, v, g, states["recurrent"], *batch, a.key_size**-0.5)
        gate = None
        if self.g_proj is not None:
            gate = self.g_proj(hidden_states)[0].unflatten(-1, (-1, a.value_size))
        return self.o_proj(getattr(self, a.norm_name)(y, gate).flatten(-2))[0]

    def _decay(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The logarithms of the decays, in float32: [T, heads, key_size] or [heads]."""
        a = self.described
        if a.rank is None:
            return self.decay
        low, high = self.gk_proj
        g = F.logsigmoid(high(low(hidden_states)[0])[0].float()) / a.normalizer
        g = g if a.least_decay is None else g.clamp_min(a.least_decay)
        return g.unflatten(-1, (-1, a.key_size))


class TokenShift(Stateful):
    """`count` mixes of each token and the one before it in its sequence, with a learned weight for each channel."""

    ops = ("causal_conv1d",)

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        parts = [Part(1, copies=True)] * count
        self.weight = vector(parts, hidden, what=f"{hidden} channels", dtype=None)
        before = torch.tensor([1.0, 0.0]).expand(hidden, 2)  # x[t - 1] and x[t]
        self.register_buffer("before", before.contiguous(), persistent=False)
        self.keeps = StateSpec({"conv": ((hidden, 1), None)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, H] to [count, T, H]: x + weight * (the token before - x)."""
        states, batch = self.bound_states()
        before = causal_conv1d(x, self.before, None, states["conv"], *batch, "none")
        return torch.lerp(x, before, self.weight[:, None])


class LowRank(nn.Module):
    """A product of two matrices with an activation between them: x [T, H] to this rank's part of [T, H]."""

    def __init__(
        self, hidden: int, rank: int, bias: bool, prefix: str, activation: type[nn.Module] = nn.Identity
    ) -> None:
        super().__init__()
        self.lora = nn.ModuleList([
            VllmReplicatedLinear(hidden, rank, bias=False, prefix=f"{prefix}.lora.0"),
            activation(),
            VllmColumnParallelLinear(rank, hidden, bias=bias, prefix=f"{prefix}.lora.2"),
        ])  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, activation, high = self.lora
        return high(activation(low(x)[0]))[0]


class HeadNorm(nn.Module):
    """LayerNorm of each head with a weight and bias of its own: [T, heads, size] to the same."""

    def __init__(self, norm: Norm, heads: int, size: int) -> None:
        super().__init__()
        self.eps, part, what = norm.eps, Part(heads * size), f"{heads} heads of {size}"
        self.weight = vector([part], what=what, dtype=None)
        self.bias = vector([part], what=what, dtype=None, fill=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (t.view(x.shape[1:]) for t in (self.weight, self.bias))
        return torch.addcmul(bias, layer_norm(x, None, None, self.eps), weight)


class FirstValues:
    """The values of the step in the first layer: [T, channels of this rank]."""

    values: torch.Tensor | None = None


class Rwkv7Layer(Stateful):
    """RWKV-7's time mixing. The layers of a model share the values of the first one.

    before: the block of the layer before
    """

    ops = ("l2_norm", "rwkv7", "layer_norm")
    first: FirstValues

    def __init__(
        self, a: Rwkv7, make_norm: MakeNorm, hidden: int, prefix: str, before: Rwkv7Layer | None = None
    ) -> None:
        super().__init__()
        self.described, heads = a, Part(a.heads)
        self.shifts = TokenShift(6, hidden)
        self.r_proj, self.k_proj, self.v_proj = (
            VllmColumnParallelLinear(hidden, hidden, bias=False, prefix=f"{prefix}.{name}_proj")
            for name in "rkv"
        )
        self.w_lora = LowRank(hidden, a.decay_rank, True, f"{prefix}.w_lora", nn.Tanh)
        self.a_lora = LowRank(hidden, a.rate_rank, True, f"{prefix}.a_lora")
        self.g_lora = LowRank(hidden, a.gate_rank, False, f"{prefix}.g_lora", nn.Sigmoid)
        self.v_lora = (
            None if a.value_rank is None else LowRank(hidden, a.value_rank, True, f"{prefix}.v_lora")
        )
        what = f"{a.heads} heads of {a.head_size}"
        self.k_k, self.k_a = (vector([Part(hidden)], what=what, dtype=None) for _ in range(2))
        self.r_k = vector([heads], a.head_size, what=what, dtype=None)
        self.g_norm = HeadNorm(a.norm, a.heads, a.head_size)
        self.o_proj = VllmRowParallelLinear(hidden, hidden, bias=False, prefix=f"{prefix}.o_proj")
        state = (heads.own, a.head_size, a.head_size)
        self.keeps = StateSpec({"recurrent": (state, torch.float32)}, frozenset({"recurrent"}))
        self.first = FirstValues() if before is None else before.first

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        a, (states, batch) = self.described, self.bound_states()
        by_head = (-1, a.head_size)
        xr, xw, xk, xv, xa, xg = self.shifts(hidden_states)
        r, k, v = self.r_proj(xr)[0], self.k_proj(xk)[0], self.v_proj(xv)[0]
        if self.v_lora is None:
            self.first.values = v
        else:
            assert self.first.values is not None
            v = torch.lerp(v, self.first.values, self.v_lora(xv).sigmoid())
        decay = LEAST_DECAY * self.w_lora(xw).float().sigmoid()
        rate, gate = self.a_lora(xa).sigmoid(), self.g_lora(xg)
        erased = l2_norm((k * self.k_k).unflatten(-1, by_head), a.key_eps)
        k = torch.addcmul(k, k * (rate - 1), self.k_a)
        r, k, v, decay, rate = (t.unflatten(-1, by_head) for t in (r, k, v, decay, rate))
        y = rwkv7(r, decay, k, v, -erased, erased * rate, states["recurrent"], *batch)
        own = (r * k * self.r_k).sum(-1, keepdim=True)  # of a token's value in its own output
        y = torch.addcmul(self.g_norm(y), own, v).flatten(-2) * gate
        return self.o_proj(y)[0]


LAYERS: dict[type[Recurrent], Any] = {
    Mamba: MambaLayer,
    Mamba2: Mamba2Layer,
    GatedDelta: GatedDeltaLayer,
    KimiDelta: KimiDeltaLayer,
    LinearAttention: LinearAttentionLayer,
    ShortConv: ShortConvLayer,
}


def make(
    a: Recurrent, make_norm: MakeNorm, hidden: int, prefix: str, before: nn.Module | None = None
) -> nn.Module:
    """The layer of a description. before: that of the layer before"""
    if isinstance(a, Rwkv7):
        return Rwkv7Layer(a, make_norm, hidden, prefix, before if isinstance(before, Rwkv7Layer) else None)
    return LAYERS[type(a)](a, make_norm, hidden, prefix)
