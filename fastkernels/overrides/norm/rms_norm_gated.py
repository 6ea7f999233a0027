"""Gated root mean square normalization of Mamba 2 and gated delta nets (Dao and Gu, arXiv 2405.21060).

y = norm(x) * w * act(gate), or norm(x * act(gate)) * w; act is silu or sigmoid.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import rows, unsupported_rows, unsupported_vector

NUMBERS = 1024  # elements of a program whose rows are shorter


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    cast_x_before_out_mul: bool = False,
) -> torch.Tensor:
    """x, gate: [..., H]; weight: [H]. Returns x's shape and dtype, computed in at least float32.

    group_size: channels that a mean of squares is taken over; None: all.
    cast_x_before_out_mul: also round to x's dtype before the product with the weight, and to the wider of its
    arguments' dtypes after it (transformers, and the hosts' classes on a CPU).
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    if gate is not None:
        act = torch.sigmoid(gate.to(acc)) if activation == "sigmoid" else F.silu(gate.to(acc))
        h = h if norm_before_gate else h * act
    groups = h.unflatten(-1, (-1, group_size or h.shape[-1]))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = (y.to(x.dtype) * weight).to(acc) if cast_x_before_out_mul else y * weight.to(acc)
    return (y * act if gate is not None and norm_before_gate else y).to(x.dtype)


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_gated_kernel(
    x_ptr, gate_ptr, w_ptr, out_ptr, x_inner, x_stride0, x_stride1, gate_inner, gate_stride0, gate_stride1, n_groups,
    n_rows, D, eps,
    HAS_GATE: tl.constexpr, HAS_W: tl.constexpr, NORM_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    CAST_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # A row is a group of D channels of a token, or of a head of a token. Short rows share a program.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows)[:, None] & (cols < D)
    x_at = (row // x_inner) * x_stride0 + (row % x_inner) * x_stride1
    x = tl.load(x_ptr + x_at[:, None] + cols, mask=inside, other=0.0)
    if HAS_GATE:
        gate_at = (row // gate_inner) * gate_stride0 + (row % gate_inner) * gate_stride1
        gate = tl.load(gate_ptr + gate_at[:, None] + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_W:
        w_at = (row % n_groups) * D
        w = tl.load(w_ptr + w_at[:, None] + cols, mask=inside, other=0.0)
    h = x.to(tl.float32)
    if HAS_GATE:
        act = 1.0 / (1.0 + tl.exp(-gate))
        if not SIGMOID:
            act *= gate
        if not NORM_FIRST:
            h *= act
    y = h * tl.rsqrt(tl.sum(h * h, axis=1) / D + eps)[:, None]
    if HAS_W:
        if CAST_FIRST:
            y = y.to(x.dtype).to(tl.float32)
        y *= w.to(tl.float32)
        if CAST_FIRST and w.dtype == x.dtype:
            y = y.to(x.dtype).to(tl.float32)
    if HAS_GATE and NORM_FIRST:
        y *= act
    tl.store(out_ptr + row[:, None] * D + cols, y.to(x.dtype), mask=inside)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    group_size: int | None,
    activation: str,
) -> None:
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"rms_norm_gated: activation must be 'silu' or 'sigmoid', got {activation!r}")
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"rms_norm_gated: group_size {group_size} does not divide {x.shape[-1]} channels")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm_gated: weight {tuple(weight.shape)} is not for x {tuple(x.shape)}")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"rms_norm_gated: gate {tuple(gate.shape)} is not for x {tuple(x.shape)}")


def _in_groups(t: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """t [..., H] as [..., H / group_size, group_size], without a copy."""
    whole = group_size is None or group_size == t.shape[-1]
    return t if whole else t.unflatten(-1, (-1, group_size))


def _supports_triton(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float,
    group_size: int | None = None, *_: Any,
) -> str | None:  # fmt: skip
    if (group_size or x.shape[-1]) > 65536:
        return f"{group_size or x.shape[-1]} channels are over 65536"
    if x.dtype == torch.float64:
        return "x has dtype torch.float64, not float16, bfloat16 or float32"
    if group_size is not None and x.shape[-1] % group_size:
        return f"group_size {group_size} does not divide {x.shape[-1]} channels"
    reason = unsupported_rows(_in_groups(x, group_size)) or unsupported_vector(weight, "weight")
    return reason if gate is None else reason or unsupported_rows(_in_groups(gate, group_size), "gate")


def _triton(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float,
    group_size: int | None = None, norm_before_gate: bool = True, activation: str = "silu",
    cast_x_before_out_mul: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check(x, weight, gate, group_size, activation)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    size = group_size or x.shape[-1]
    x_rows = rows(_in_groups(x, group_size))
    gate_rows = rows(_in_groups(x if gate is None else gate, group_size))
    assert x_rows is not None and gate_rows is not None, (x.stride(), gate)
    count, block = out.numel() // size, next_power_of_2(size)
    at_once = max(1, NUMBERS // block)
    launch_kernel(
        _rms_norm_gated_kernel, (cdiv(count, at_once),),
        x, gate, weight, out, *x_rows, *gate_rows, x.shape[-1] // size, count, size, eps,
        HAS_GATE=gate is not None, HAS_W=weight is not None, NORM_FIRST=norm_before_gate,
        SIGMOID=activation == "sigmoid", CAST_FIRST=cast_x_before_out_mul,
        ROWS=at_once, BLOCK=block, num_warps=min(max(block // 512, 4), 16),
    )  # fmt: skip
    return out


def _reference(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float,
    group_size: int | None = None, norm_before_gate: bool = True, activation: str = "silu",
    cast_x_before_out_mul: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check(x, weight, gate, group_size, activation)
    how = (group_size, norm_before_gate, activation, cast_x_before_out_mul)
    return reference(x, weight, gate, eps, *how).contiguous()


rms_norm_gated = define(
    "rms_norm_gated(Tensor x, Tensor? weight, Tensor? gate, float eps, int? group_size=None,"
    " bool norm_before_gate=True, str activation='silu', bool cast_x_before_out_mul=False) -> Tensor",
    fake=lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def unsupported_activation(module: Any) -> str | None:
    """Why the op does not compute this gated norm's `activation`, or None."""
    name = getattr(module, "activation", "silu")
    return None if name in ("silu", "swish", "sigmoid") else f"activation is {name!r}, not silu or sigmoid"


class GatedRMSNorm(nn.Module):
    """Base of vLLM's and SGLang's RMSNorm with a gate: x, z [..., hidden_size] to the same.

    With norm_before_gate the norm of x times act(z), else the norm of x act(z).
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        activation: str = "swish",
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.norm_before_gate, self.activation = norm_before_gate, activation
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return unsupported_activation(module)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        activation = "sigmoid" if self.activation == "sigmoid" else "silu"
        return rms_norm_gated(x, self.weight, z, self.eps, self.group_size, self.norm_before_gate, activation)


class FusedGatedRMSNorm(nn.Module):
    """Base of vLLM's and SGLang's FusedRMSNormGated: x, g [..., hidden_size]; the norm times act(g).

    Residuals, which no model of the hosts passes, are not supported.
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.register_parameter("bias", None)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return unsupported_activation(module)

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor:
        if residual is not None or prenorm:
            raise ValueError("FusedRMSNormGated: residual and prenorm are not supported")
        activation = "sigmoid" if self.activation == "sigmoid" else "silu"
        return rms_norm_gated(x, self.weight, g, self.eps, None, True, activation)


class MixerRMSNormGated(nn.Module):
    """Base of vLLM's and SGLang's Mixer2RMSNormGated: x, gate [..., full_hidden_size]; norms x silu(gate) in groups.

    The result is rounded once, as the hosts' kernels do.
    """

    def __init__(
        self, full_hidden_size: int, full_n_groups: int, use_rms_norm: bool = True, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.tp_size, self.tp_rank = parallel.get_tp_size(), parallel.get_tp_rank()
        self.full_hidden_size = full_hidden_size
        self.group_size = full_hidden_size // full_n_groups
        self.per_rank_hidden_size = full_hidden_size // self.tp_size
        self.n_groups = full_hidden_size // self.group_size
        self.variance_epsilon, self.use_rms_norm = eps, use_rms_norm
        weight = nn.Parameter(torch.ones(self.per_rank_hidden_size)) if use_rms_norm else None
        self.register_parameter("weight", weight)
        if (reason := self.supports(self)) is not None:
            raise ValueError(f"Mixer2RMSNormGated: {reason}")

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        if not module.use_rms_norm:
            return "without use_rms_norm it is a product with the gate"
        if module.n_groups % module.tp_size:
            return f"{module.n_groups} groups of channels are sharded over {module.tp_size} ranks"
        return None

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return rms_norm_gated(x, self.weight, gate, self.variance_epsilon, self.group_size, False)


SPEC = OpSpec(
    name="rms_norm_gated",
    level=1,
    by_default=True,
    reference=reference,
    op=rms_norm_gated,
    cases=(  # Qwen3-Next 80B: heads of a gated delta net; Mamba 2 2.7B; Nemotron-H 8B, in groups
        Case("heads_32", {"tokens": 1024, "hidden": 128}, weight=36, tags=("model",)),
        Case("heads_8k", {"tokens": 262144, "hidden": 128}, weight=1, tags=("model",)),
        Case(
            "mamba_32", {"tokens": 32, "hidden": 5120, "norm_before_gate": False}, weight=64, tags=("model",)
        ),
        Case(
            "groups_32",
            {"tokens": 32, "hidden": 8192, "group_size": 1024, "norm_before_gate": False},
            weight=24,
            tags=("model",),
        ),
        Case("one", {"tokens": 1, "hidden": 1}, dtype="float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 1000, "norm_before_gate": False}, tags=("odd",)),
        Case("sigmoid", {"tokens": 5, "heads": 3, "hidden": 100, "activation": "sigmoid"}, tags=("odd",)),
        Case("odd_groups", {"tokens": 7, "hidden": 189, "group_size": 63}, "float32", tags=("odd",)),
        Case("cast", {"tokens": 9, "hidden": 576, "cast_first": True}, tags=("odd",)),
        Case(
            "cast_last",
            {"tokens": 3, "hidden": 1128, "cast_first": True, "norm_before_gate": False},
            dtype="float16",
            tags=("odd",),
        ),
        Case("plain", {"tokens": 5, "hidden": 63, "weight": False, "gate": False}, "float32", tags=("odd",)),
    ),
    arguments=(
        Tensor("x", "tokens heads? hidden"),
        Tensor("weight", "hidden", when="weight", mean=1, std=0.1),
        Tensor("gate", "tokens heads? hidden", when="gate"),
        Scalar("eps", default=1e-5),
        Scalar("group_size", default=None),
        Scalar("norm_before_gate", default=True),
        Scalar("activation", default="silu"),
        Scalar("cast_x_before_out_mul", "cast_first", default=False, rounding=True),
    ),
    outputs=(Tensor("out", "tokens heads? hidden"),),
    axes={
        "tokens": Axis.per_call(),
        "heads": Axis.count(),
        "hidden": Axis.width(),
        "weight": Axis.option(True, stated=True),
        "gate": Axis.option(True, stated=True),
    },
    constraints=("hidden % (group_size or hidden) == 0",),
    constructor={
        "hidden_size": "hidden",
        "elementwise_affine": "weight",
        "full_hidden_size": "hidden",
        "full_n_groups": "hidden // (group_size or hidden)",
        "group_size": "group_size or hidden",
        "z": "gate",
        "g": "gate",
    },
    flops="9 * tokens * heads * hidden",
    activations=("x",),
)
