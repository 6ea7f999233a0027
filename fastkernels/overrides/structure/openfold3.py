"""Drop-in modules for openfold3: attention with pair bias, triangle updates, transitions, outer products, AdaLN.

The flags of a call choose among openfold3's kernels, or chunks, and are without effect here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.structure import layer_inits
from fastkernels.overrides.structure.attention_pair_bias import attention_pair_bias
from fastkernels.overrides.structure.conditioned_layer_norm import conditioned_layer_norm
from fastkernels.overrides.structure.outer_product_mean import outer_product_mean
from fastkernels.overrides.structure.swiglu_transition import swiglu_transition
from fastkernels.overrides.structure.triangle_multiplication import triangle_multiplication

T = torch.Tensor


def _linear(layer: Any, x: T) -> T:
    """The weight may be of another dtype than x, as in openfold3's Linear."""
    bias = layer.bias
    return linear(x, layer.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _norm(layer: Any, x: T) -> T:
    weights = (None if t is None else t.to(x.dtype) for t in (layer.weight, layer.bias))
    return layer_norm(x, *weights, layer.eps)


def _not_plain(*layers: Any) -> str | None:
    """Why these linear layers are not what our forward reads, or None."""
    for layer in layers:
        if getattr(layer, "precision", None) is not None:
            return f"a linear layer computes in {layer.precision}"
    return None


def _check_filled(x: T) -> None:
    if not x.numel():
        raise UnsupportedArgument(f"an input of shape {list(x.shape)} is empty")


class _Attention(nn.Module):
    """openfold3's Attention, of which our modules read the layers."""

    def __init__(self, c_q: int, c_k: int, c_v: int, c_hidden: int, no_heads: int, bias: bool) -> None:
        super().__init__()
        width = c_hidden * no_heads
        self.c_hidden, self.no_heads, self.gating = c_hidden, no_heads, True
        self.linear_q = nn.Linear(c_q, width, bias=bias)
        self.linear_k, self.linear_v, self.linear_g = (
            nn.Linear(c, width, bias=False) for c in (c_k, c_v, c_q)
        )
        self.linear_o = nn.Linear(width, c_q, bias=False)


def _layers(mha: Any) -> list[Any]:
    return [
        x for x in (mha.linear_q, mha.linear_k, mha.linear_v, mha.linear_g, mha.linear_o) if x is not None
    ]


def _heads(mha: Any, layer: Any, x: T) -> T | None:
    return None if layer is None else _linear(layer, x).unflatten(-1, (mha.no_heads, -1))


def _self_attention(mha: Any, a: T, bias: T, mask: T | None) -> T:
    """a: [*, N, C] of samples; bias: [*, H, N, N], of each sample or of all; mask: [*, N]. Returns [*, N, C]."""
    lead, (n, width) = a.shape[:-2], a.shape[-2:]
    rows, own = math.prod(lead), math.prod(bias.shape[:-3])
    if own not in (1, rows):
        bias, own = bias.expand(*lead, *bias.shape[-3:]), rows
    batch = 1 if own == 1 else rows
    x = a.reshape(batch, rows // batch, n, width)
    seen = None
    if mask is not None:
        seen = mask.expand(*lead, n).reshape(batch, rows // batch, n) > 0
    q, k, v, gate = (
        _heads(mha, layer, x) for layer in (mha.linear_q, mha.linear_k, mha.linear_v, mha.linear_g)
    )
    assert q is not None and k is not None and v is not None
    found = attention_pair_bias(
        q, k, v, bias.reshape(batch, *bias.shape[-3:]).contiguous(), mha.c_hidden**-0.5, seen, gate
    )
    return _linear(mha.linear_o, found.flatten(-2)).view(a.shape)


class Openfold3AttentionPairBias(nn.Module):
    """AttentionPairBias: a [*, N, c_q], z [*, N, N, c_z] and mask [*, N] to [*, N, c_q]."""

    def __init__(
        self, c_q: int, c_k: int, c_v: int, c_s: int, c_z: int, c_hidden: int, no_heads: int, gating: bool = True,
        inf: Any = 1000000000.0, linear_init_params: Any = layer_inits.ATT,
    ) -> None:  # fmt: skip
        super().__init__()
        self.c_q, self.c_s, self.c_z, self.inf = c_q, c_s, c_z, inf
        self.layer_norm_a, self.layer_norm_z = nn.LayerNorm(c_q), nn.LayerNorm(c_z)
        self.linear_z = nn.Linear(c_z, no_heads, bias=False)
        self.mha = _Attention(c_q, c_k, c_v, c_hidden, no_heads, bias=True)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _not_plain(module.linear_z, *_layers(module.mha))

    def forward(
        self, a: T, z: T, mask: T | None = None, use_deepspeed_evo_attention: bool = False,
        use_cueq_triangle_kernels: bool = False, use_triton_triangle_kernels: bool = False, use_lma: bool = False,
        use_high_precision_attention: bool = False,
    ) -> T:  # fmt: skip
        bias = _linear(self.linear_z, _norm(self.layer_norm_z, z)).movedim(-1, -3)
        return _self_attention(self.mha, _norm(self.layer_norm_a, a), bias, mask)


class Openfold3DiffusionAttentionPairBias(nn.Module):
    """DiffusionAttentionPairBias: the same with conditions s [*, N, c_s], a and s of S samples, and z of all."""

    def __init__(
        self, c_q: int, c_k: int, c_v: int, c_s: int, c_z: int, c_hidden: int, no_heads: int, gating: bool = True,
        inf: Any = 1000000000.0, linear_init_params: Any = layer_inits.DIFFUSION,
    ) -> None:  # fmt: skip
        super().__init__()
        self.c_q, self.c_s, self.c_z, self.inf = c_q, c_s, c_z, inf
        self.layer_norm_a = Openfold3AdaLN(c_q, c_s)
        self.linear_ada_out, self.linear_z = nn.Linear(c_s, c_q), nn.Linear(c_z, no_heads, bias=False)
        self.mha = _Attention(c_q, c_k, c_v, c_hidden, no_heads, bias=True)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _not_plain(module.linear_z, module.linear_ada_out, *_layers(module.mha))

    def forward(
        self, a: T, z: T, s: T, mask: T | None = None, use_deepspeed_evo_attention: bool = False,
        use_cueq_triangle_kernels: bool = False, use_triton_triangle_kernels: bool = False, use_lma: bool = False,
        use_high_precision_attention: bool = False,
    ) -> T:  # fmt: skip
        bias = _linear(self.linear_z, z).movedim(-1, -3)
        found = _self_attention(self.mha, self.layer_norm_a(a, s), bias, mask)
        return _linear(self.linear_ada_out, s).sigmoid() * found


class Openfold3TriangleAttention(nn.Module):
    """TriangleAttention: x [*, I, J, c_in] and mask [*, I, J] to the update of x."""

    def __init__(
        self, c_in: Any, c_hidden: Any, no_heads: Any, starting: Any = True, inf: Any = 1000000000.0,
        linear_init_params: Any = layer_inits.TRI_ATT,
    ) -> None:  # fmt: skip
        super().__init__()
        self.c_in, self.c_hidden, self.no_heads, self.starting, self.inf = (
            c_in,
            c_hidden,
            no_heads,
            starting,
            inf,
        )
        self.layer_norm, self.linear_z = nn.LayerNorm(c_in), nn.Linear(c_in, no_heads, bias=False)
        self.mha = _Attention(c_in, c_in, c_in, c_hidden, no_heads, bias=False)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _not_plain(module.linear_z, *_layers(module.mha))

    def forward(
        self, x: T, mask: T | None = None, transpose_bias: bool = False, chunk_size: int | None = None,
        use_deepspeed_evo_attention: bool = False, use_cueq_triangle_kernels: bool = False,
        use_triton_triangle_kernels: bool = False, use_lma: bool = False, inplace_safe: bool = False,
    ) -> T:  # fmt: skip
        _check_filled(x)
        # openfold3 calls it with a transposed view, too: norm and projections read what lies behind that, in order
        turned = not x.is_contiguous() and x.transpose(-2, -3).is_contiguous()
        base = x.transpose(-2, -3) if turned else x.contiguous()
        columns = turned == bool(self.starting)  # of base, whether its columns attend
        y = (
            _norm(self.layer_norm, base).flatten(0, -4)
            if base.dim() > 3
            else _norm(self.layer_norm, base)[None]
        )
        seen = None
        if mask is not None:
            seen = (mask.transpose(-1, -2) if not self.starting else mask).expand(
                base.shape[:-1] if not columns else (*base.shape[:-3], base.shape[-2], base.shape[-3])
            )
            seen = seen.reshape(-1, *seen.shape[-2:]) > 0
        bias = _linear(self.linear_z, y).permute(0, 3, 1, 2)
        if columns != bool(transpose_bias):  # lies in base as [query, key], or as [key, query]
            bias = bias.transpose(2, 3)
        parts = [
            _heads(self.mha, layer, y) for layer in (self.mha.linear_q, self.mha.linear_k, self.mha.linear_v)
        ]
        gate = _heads(self.mha, self.mha.linear_g, y)
        q, k, v, g = (p if p is None or not columns else p.transpose(1, 2) for p in (*parts, gate))
        assert q is not None and k is not None and v is not None
        found = attention_pair_bias(q, k, v, bias.contiguous(), self.c_hidden**-0.5, seen, g)
        found = found.transpose(1, 2) if columns else found
        out = _linear(self.mha.linear_o, found.flatten(-2)).view(base.shape)
        return out.transpose(-2, -3) if turned else out


class _TriangleMultiplication(nn.Module):
    def __init__(
        self, c_z: Any, c_hidden: Any, _outgoing: Any = True, linear_init_params: Any = layer_inits.TRI_MUL
    ) -> None:
        super().__init__()
        self.c_z, self.c_hidden, self._outgoing = c_z, c_hidden, _outgoing
        self.linear_g, self.linear_z = nn.Linear(c_z, c_z, bias=False), nn.Linear(c_hidden, c_z, bias=False)
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(c_z), nn.LayerNorm(c_hidden)
        for name in ("linear_a_p", "linear_a_g", "linear_b_p", "linear_b_g"):
            self.add_module(name, nn.Linear(c_z, c_hidden, bias=False))

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        layers = [getattr(module, f"linear_{n}") for n in ("a_p", "a_g", "b_p", "b_g", "g", "z")]
        if any(layer.bias is not None for layer in layers):
            return "its linear layers have a bias"
        return _not_plain(*layers)

    def forward(
        self, z: T, mask: T | None = None, inplace_safe: bool = False, use_cueq_triangle_kernels: bool = False,
        use_triton_triangle_kernels: bool = False, _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
    ) -> T:  # fmt: skip
        _check_filled(z)
        before, after = self.layer_norm_in, self.layer_norm_out
        layers: list[Any] = [getattr(self, f"linear_{n}") for n in ("a_p", "a_g", "b_p", "b_g")]
        x = z.reshape(-1, *z.shape[-3:])
        seen = None if mask is None else mask.expand(z.shape[:-1]).reshape(x.shape[:-1]).to(z.dtype)
        weights = (before.weight, before.bias, *(x.weight for x in layers), after.weight, after.bias)
        found = triangle_multiplication(
            x.contiguous(), seen, *(t.to(z.dtype) for t in (*weights, self.linear_z.weight, self.linear_g.weight)),
            bool(self._outgoing), before.eps,
        ).view(z.shape)  # fmt: skip
        if not inplace_safe or use_cueq_triangle_kernels:
            return found
        return z.add_(found) if _add_with_inplace else z.copy_(found)


class Openfold3TriangleMultiplicationOutgoing(_TriangleMultiplication):
    """TriangleMultiplicationOutgoing: z [*, N, N, c_z] and mask [*, N, N] to the update of z, or to z with it added."""


class Openfold3TriangleMultiplicationIncoming(_TriangleMultiplication):
    """TriangleMultiplicationIncoming: the same along the other axis."""

    def __init__(
        self, c_z: Any, c_hidden: Any, _outgoing: Any = True, linear_init_params: Any = layer_inits.TRI_MUL
    ) -> None:
        super().__init__(c_z, c_hidden, False, linear_init_params)  # whatever is given, as the host's


class _SwiGLU(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.linear_a, self.linear_b = (nn.Linear(c_in, c_out, bias=False) for _ in range(2))


class Openfold3SwiGLUTransition(nn.Module):
    """SwiGLUTransition: x [..., c_in] and mask [...] to the update of x."""

    def __init__(self, c_in: int, n: int, linear_init_params: Any = layer_inits.SWIGLU) -> None:
        super().__init__()
        self.c_in, self.n = c_in, n
        self.layer_norm, self.swiglu = nn.LayerNorm(c_in), _SwiGLU(c_in, n * c_in)
        self.linear_out = nn.Linear(n * c_in, c_in, bias=False)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        layers = (module.swiglu.linear_a, module.swiglu.linear_b, module.linear_out)
        if any(layer.bias is not None for layer in layers):
            return "its linear layers have a bias"
        return _not_plain(*layers)

    def forward(
        self, x: T, mask: T | None = None, chunk_size: int | None = None, ckpt_chunk_size: int | None = None
    ) -> T:
        norm, mlp = self.layer_norm, self.swiglu
        weights = (norm.weight, norm.bias, mlp.linear_a.weight, mlp.linear_b.weight, self.linear_out.weight)
        turned = x.dim() > 2 and not x.is_contiguous() and x.transpose(-2, -3).is_contiguous()
        base = x.transpose(-2, -3) if turned else x
        rows = base.reshape(-1, x.shape[-1]).contiguous()
        found = swiglu_transition(rows, *(w.to(x.dtype) for w in weights), norm.eps).view(base.shape)
        found = found.transpose(-2, -3) if turned else found
        return found if mask is None else found * mask[..., None]


class Openfold3OuterProductMean(nn.Module):
    """OuterProductMean: m [*, S, N, c_m] and mask [*, S, N] to [*, N, N, c_z]."""

    def __init__(
        self, c_m: Any, c_z: Any, c_hidden: Any, eps: Any = 0.001, linear_init_params: Any = layer_inits.OPM
    ) -> None:
        super().__init__()
        self.c_m, self.c_z, self.c_hidden, self.eps = c_m, c_z, c_hidden, eps
        self.layer_norm = nn.LayerNorm(c_m)
        self.linear_1, self.linear_2 = (nn.Linear(c_m, c_hidden, bias=False) for _ in range(2))
        self.linear_out = nn.Linear(c_hidden**2, c_z)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        if module.linear_out.bias is None:
            return "its last layer has no bias"
        return _not_plain(module.linear_1, module.linear_2, module.linear_out)

    def forward(
        self, m: T, mask: T | None = None, chunk_size: int | None = None, inplace_safe: bool = False
    ) -> T:
        _check_filled(m)
        x = _norm(self.layer_norm, m).reshape(-1, *m.shape[-3:])
        seen = x.new_ones(x.shape[:-1]) if mask is None else mask.expand(m.shape[:-1]).reshape(x.shape[:-1])
        out = self.linear_out
        found = outer_product_mean(
            _linear(self.linear_1, x), _linear(self.linear_2, x), seen.to(x.dtype), out.weight.to(x.dtype),
            out.bias.to(x.dtype), self.eps,
        )  # fmt: skip
        return found.view(*m.shape[:-3], *found.shape[1:])


class Openfold3AdaLN(nn.Module):
    """AdaLN: a [*, N, c_a] with conditions s [*, N, c_s], of each sample or of all, to [*, N, c_a]."""

    def __init__(
        self, c_a: int, c_s: int, eps: float = 1e-05, linear_init_params: Any = layer_inits.ADA_LN
    ) -> None:
        super().__init__()
        self.c_a, self.c_s, self.eps = c_a, c_s, eps
        self.layer_norm_a = nn.LayerNorm(c_a, eps, elementwise_affine=False)
        self.layer_norm_s = nn.LayerNorm(c_s, eps, bias=False)
        self.linear_g, self.linear_s = nn.Linear(c_s, c_a), nn.Linear(c_s, c_a, bias=False)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _not_plain(module.linear_g, module.linear_s)

    def forward(self, a: T, s: T) -> T:
        s = _norm(self.layer_norm_s, s)
        gate, shift = _linear(self.linear_g, s), _linear(self.linear_s, s)
        lead, (n, width) = a.shape[:-2], a.shape[-2:]
        rows, own = math.prod(lead), math.prod(s.shape[:-2])
        if s.shape[-2] != n or own not in (1, rows):
            gate, shift = gate.expand(a.shape), shift.expand(a.shape)
            own = rows
        parts = (t.reshape(own, n, width) for t in (gate, shift))
        x, eps = a.reshape(rows, n, width), self.layer_norm_a.eps
        return conditioned_layer_norm(x, *parts, None, None, eps)[1].view(a.shape)


def _target(path: str, cls: str) -> Target:
    return Target("openfold3", f"openfold3.core.model.{path}", cls, "module")


_PAIR = "layers.attention_pair_bias:"
_TRIANGLE = "layers.triangular_multiplicative_update:TriangleMultiplication"
TARGETS = {
    "attention_pair_bias": (
        _target("layers.triangular_attention:TriangleAttention", "Openfold3TriangleAttention"),
        _target(f"{_PAIR}AttentionPairBias", "Openfold3AttentionPairBias"),
        _target(f"{_PAIR}DiffusionAttentionPairBias", "Openfold3DiffusionAttentionPairBias"),
    ),
    "triangle_multiplication": (
        _target(f"{_TRIANGLE}Outgoing", "Openfold3TriangleMultiplicationOutgoing"),
        _target(f"{_TRIANGLE}Incoming", "Openfold3TriangleMultiplicationIncoming"),
    ),
    "swiglu_transition": (_target("layers.transition:SwiGLUTransition", "Openfold3SwiGLUTransition"),),
    "outer_product_mean": (
        _target("layers.outer_product_mean:OuterProductMean", "Openfold3OuterProductMean"),
    ),
    "conditioned_layer_norm": (_target("primitives.normalization:AdaLN", "Openfold3AdaLN"),),
}
