"""Gated feed-forward block, y = (silu(x Wg^T) * (x Wu^T)) Wd^T (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import assemble
from fastkernels.core.shapes import drawn, varied
from fastkernels.core.spec import Case, OpSpec, Target
from fastkernels.overrides.activation.sglang import SGLangSiluAndMul
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.activation.vllm import VllmSiluAndMul
from fastkernels.overrides.linear.parallel_linear import (
    SGLangMergedColumnParallelLinear,
    SGLangMergedColumnParallelLinear_0_5_16,
    SGLangRowParallelLinear,
    SGLangRowParallelLinear_0_5_17,
    VllmMergedColumnParallelLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.linear.parallel_linear_base import Row


def reference(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x: [..., H]; gate_up: [2 I, H], the gate's rows first; down: [H, I]. Returns [..., H] in x's dtype."""
    acc = torch.promote_types(x.dtype, torch.float32)
    gate, up = (x.to(acc) @ gate_up.to(acc).t()).chunk(2, dim=-1)
    return ((F.silu(gate) * up) @ down.to(acc).t()).to(x.dtype)


def _check_act(hidden_act: str) -> None:
    if hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act {hidden_act!r} is not supported, only 'silu'")


def _unsupported(module: nn.Module) -> str | None:
    """None if a packed gated MLP (ours or a host's) computes plain silu between unquantized layers."""
    for name in ("gate_up_proj", "act_fn", "down_proj"):
        if not hasattr(module, name):
            return f"it has no {name}"
    act = type(module.act_fn).__name__
    if not act.endswith("SiluAndMul"):
        return f"act_fn is {act}, not SiluAndMul"
    for name in ("gate_up_proj", "down_proj"):
        # The hosts fuse the activation with the quantization of the next layer's input.
        layer = getattr(module, name)
        layer = getattr(layer, "base_layer", layer)  # inside a LoRA wrapper, which our forward calls
        method = type(getattr(layer, "quant_method", None)).__name__
        if not method.endswith("UnquantizedLinearMethod") and "UnquantizedLinearMethod" not in method:
            return f"{name} is quantized by {method}"
    return None


class _PackedMLP(nn.Module):
    """LlamaMLP of vLLM and SGLang: x [T, hidden_size] to [T, hidden_size]; hidden_act must be 'silu'."""

    gate_up_proj: nn.Module
    act_fn: nn.Module
    down_proj: nn.Module

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """None if our forward serves this module (ours or the host's), else the reason."""
        return _unsupported(module)


class VllmLlamaMLP(_PackedMLP):
    """vllm.model_executor.models.llama.LlamaMLP; see _PackedMLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: Any = None,
        bias: bool = False,
        prefix: str = "",
        reduce_results: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        _check_act(hidden_act)
        self.gate_up_proj = VllmMergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=bias, quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj", disable_tp=disable_tp,
        )  # fmt: skip
        self.down_proj = VllmRowParallelLinear(
            intermediate_size, hidden_size, bias=bias, quant_config=quant_config, reduce_results=reduce_results,
            prefix=f"{prefix}.down_proj", disable_tp=disable_tp,
        )  # fmt: skip
        self.act_fn = VllmSiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(silu_and_mul(gate_up))
        return out


class SGLangLlamaMLP_0_5_16(_PackedMLP):
    """sglang.srt.models.llama.LlamaMLP before 0.5.23; see _PackedMLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: Any = None,
        prefix: str = "",
        reduce_results: bool = True,
        tp_rank: int | None = None,
        tp_size: int | None = None,
        use_dp_attention_reduce: bool = False,
    ) -> None:
        super().__init__()
        _check_act(hidden_act)
        self.gate_up_proj = SGLangMergedColumnParallelLinear_0_5_16(
            hidden_size, [intermediate_size] * 2, bias=False, quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj", tp_rank=tp_rank, tp_size=tp_size,
        )  # fmt: skip
        self.down_proj: Row = SGLangRowParallelLinear_0_5_17(
            intermediate_size, hidden_size, bias=False, quant_config=quant_config, reduce_results=reduce_results,
            prefix=f"{prefix}.down_proj", use_dp_attention_reduce=use_dp_attention_reduce, tp_rank=tp_rank,
            tp_size=tp_size,
        )  # fmt: skip
        self.act_fn = SGLangSiluAndMul()

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(silu_and_mul(gate_up))
        return out


class SGLangLlamaMLP(_PackedMLP):
    """sglang.srt.models.llama.LlamaMLP; see _PackedMLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: Any = None,
        prefix: str = "",
        reduce_results: bool = True,
        parallel_group: Any = "tp",
        use_dp_attention_reduce: bool = False,
    ) -> None:
        super().__init__()
        _check_act(hidden_act)
        self.gate_up_proj = SGLangMergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=False, quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj", parallel_group=parallel_group,
        )  # fmt: skip
        self.down_proj: Row = SGLangRowParallelLinear(
            intermediate_size, hidden_size, bias=False, quant_config=quant_config, reduce_results=reduce_results,
            prefix=f"{prefix}.down_proj", use_dp_attention_reduce=use_dp_attention_reduce,
            parallel_group=parallel_group,
        )  # fmt: skip
        self.act_fn = SGLangSiluAndMul()

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(silu_and_mul(gate_up))
        return out


class TransformersLlamaMLP(nn.Module):
    """transformers.models.llama.modeling_llama.LlamaMLP and its like: gate_proj, up_proj, down_proj are nn.Linear.

    config: hidden_size, intermediate_size, hidden_act (silu) and, if there, mlp_bias. x [..., H] to [..., H].
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check_act(config.hidden_act)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        self.act_fn = nn.SiLU()

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """None if our forward serves this module (ours or the host's), else the reason."""
        for name in ("gate_proj", "up_proj", "down_proj"):
            child = getattr(module, name, None)
            if type(child) is not nn.Linear:
                return f"{name} is {type(child).__name__}, not nn.Linear"
            if "forward" in vars(child) or child._forward_hooks or child._forward_pre_hooks:
                return f"somebody else hooks into {name}"
        act = type(getattr(module, "act_fn", None)).__name__
        return None if act in ("SiLU", "SiLUActivation") else f"act_fn is {act}, not SiLU"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_mul(_side_by_side(x, self.gate_proj, self.up_proj)))


def _side_by_side(x: torch.Tensor, gate: nn.Linear, up: nn.Linear) -> torch.Tensor:
    """[gate(x), up(x)] along the last dimension."""
    plain = gate.bias is None and up.bias is None and x.dtype == gate.weight.dtype == up.weight.dtype
    eager = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
    if not plain or not eager or torch.is_autocast_enabled(x.device.type):
        return torch.cat((gate(x), up(x)), dim=-1)
    # The products go straight into their halves: a concatenation would cost what the fused activation saves.
    # Dynamo cannot trace a product into part of a tensor; a compiler places the parts of a concatenation itself.
    out = torch.empty((*x.shape[:-1], gate.out_features + up.out_features), dtype=x.dtype, device=x.device)
    rows, halves = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]).split(gate.out_features, dim=-1)
    torch.mm(rows, gate.weight.t(), out=halves[0])
    torch.mm(rows, up.weight.t(), out=halves[1])
    return out


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    dtype = getattr(torch, case.dtype)
    h, i = d["hidden"], d["intermediate"]

    def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*size, generator=generator, device=device)).to(dtype)

    return [
        randn(d["tokens"], h),
        randn(2 * i, h, scale=1 / math.sqrt(h)),
        randn(h, i, scale=1 / math.sqrt(i)),
    ]


def _bytes(case: Case) -> int:
    d, size = case.dims, torch.finfo(getattr(torch, case.dtype)).bits // 8
    return size * d["hidden"] * (2 * d["tokens"] + 3 * d["intermediate"])


def _dims(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, Any]:
    return {"tokens": x.shape[:-1].numel(), "hidden": down.shape[0], "intermediate": down.shape[1]}


def _vary(case: Case, rng: random.Random) -> Case:
    return varied(
        case, lambda: drawn(case, rng, ("tokens",), ("hidden", "intermediate")), SPEC.bytes_moved, SPEC.flops
    )


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, gate_up, down = args
    hidden, inner = down.shape
    if assemble.takes(cls, "config"):
        config = SimpleNamespace(
            hidden_size=hidden, intermediate_size=inner, hidden_act="silu", mlp_bias=False
        )
        parts = dict(zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True))
        module = assemble.make(cls, x, config)
    else:
        parts = {"gate_up_proj": gate_up, "down_proj": down}
        module = assemble.make(cls, x, hidden, inner, "silu", prefix="mlp")
    return partial(assemble.load(module, {f"{name}.weight": t for name, t in parts.items()}), x)


def _case(name: str, tokens: int, hidden: int, intermediate: int, tag: str, dtype: str = "bfloat16") -> Case:
    return Case(name, {"tokens": tokens, "hidden": hidden, "intermediate": intermediate}, dtype, tags=(tag,))


_VLLM, _SGLANG = "vllm.model_executor.models.llama:LlamaMLP", "sglang.srt.models.llama:LlamaMLP"
_NOTE = "the host's own layers stay, silu_and_mul between them is ours; put in only when named"
_TRANSFORMERS = (
    ("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("smollm3", "SmolLM3"),
    ("granite", "Granite"), ("olmo2", "Olmo2"),
)  # fmt: skip

SPEC = OpSpec(
    name="gated_mlp",
    level=2,
    reference=reference,
    cases=(
        _case("decode_1", 1, 4096, 14336, "model"),
        _case("decode_32", 32, 4096, 14336, "model"),
        _case("prefill_8k", 8192, 4096, 14336, "model"),
        _case("one", 1, 1, 1, "odd", "float32"),
        _case("odd_63", 63, 72, 130, "odd"),
        _case("odd_5", 5, 100, 63, "odd", "float32"),
        _case("odd_9", 9, 33, 257, "odd", "float32"),
        _case("narrow", 70, 8, 3, "odd", "float32"),
        _case("smollm2", 1, 192, 512, "odd", "float32"),
        _case("wide", 3, 257, 40, "odd", "float32"),
        _case("half", 7, 64, 48, "odd", "float16"),
    ),
    inputs=_inputs,
    dims_of=_dims,
    vary=_vary,
    build=_build,
    bytes_moved=_bytes,
    flops=lambda case: 6 * case.dims["tokens"] * case.dims["hidden"] * case.dims["intermediate"],
    calls=("linear", "silu_and_mul"),
    targets=(
        Target("vllm", _VLLM, "VllmLlamaMLP", "module", default=False, note=_NOTE),
        Target("sglang", _SGLANG, "SGLangLlamaMLP_0_5_16", "module", "<0.5.23", False, _NOTE),
        Target("sglang", _SGLANG, "SGLangLlamaMLP", "module", ">=0.5.23", False, _NOTE),
        *(
            Target(
                "transformers", f"transformers.models.{model}.modeling_{model}:{prefix}MLP", "TransformersLlamaMLP",
                "module",
            )
            for model, prefix in _TRANSFORMERS
        ),
    ),
)  # fmt: skip
