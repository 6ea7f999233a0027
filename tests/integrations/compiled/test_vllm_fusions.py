"""Modules that vLLM's compiler fuses with their neighbours stay the host's, unless requested."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations.core.adapter import Adapter
from fk_integrations.patching.apply import Patched, apply
from fk_integrations.vllm.fusions import (
    ADDED,
    ALL_REDUCE,
    QUANTIZED,
    TRANSFORMERS,
    fused,
    quantize_tokens,
    quantized,
    take_quantization,
)
from torch import nn

from fastkernels.core.reasons import Kind, Reason
from fastkernels.patch import Request

HIDDEN, HEAD = 64, 16


class FuseQuantization:
    """A pass of ours, as `fuses` knows it."""

    quantization = True


def config(mode: int = 3, all_reduce: bool = False, ranks: int = 1, passes: tuple[Any, ...] = ()) -> Any:
    compilation = SimpleNamespace(mode=mode, pass_config=SimpleNamespace(fuse_allreduce_rms=all_reduce))
    compilation.inductor_compile_config = dict(enumerate(passes))
    return SimpleNamespace(
        compilation_config=compilation,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN),
    )


class Norm(nn.Module):
    """The parts of vLLM's RMSNorm that `apply` reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
        self.variance_epsilon, self.has_weight, self.variance_size_override = 1e-6, True, None
        self.hidden_size = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def model(quantizes: bool) -> Any:
    """A layer's norm, a norm of heads, an activation, and a linear layer whose kernel object may quantize."""
    made: Any = nn.Module()
    made.do_not_compile = False
    made.norm, made.q_norm, made.act, made.linear = Norm(HIDDEN), Norm(HEAD), nn.Module(), nn.Module()
    made.linear.input_size_per_partition = HIDDEN
    kernel = SimpleNamespace(quant_fp8=object()) if quantizes else SimpleNamespace()
    made.linear.scheme = SimpleNamespace(fp8_linear=kernel)
    return made


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("quantizes", [False, True])
def test_modules_fused_with_a_quantization_stay(mode: int, quantizes: bool) -> None:
    found = model(quantizes)
    want = Reason(Kind.LEFT_TO_HOST, QUANTIZED) if mode and quantizes else None
    assert quantized(found) == ({HIDDEN} if quantizes else set())
    assert fused(config(mode), found, "rms_norm", found.norm) == want
    assert fused(config(mode), found, "gemma_rms_norm", found.norm) == want
    assert fused(config(mode), found, "silu_and_mul", found.act) == want
    assert fused(config(mode), found, "rms_norm", found.q_norm) is None
    assert fused(config(mode), found, "rotary_emb", found.act) is None


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"all_reduce": True, "ranks": 2}, ALL_REDUCE),
        ({"all_reduce": True, "ranks": 2, "mode": 0}, None),
        ({"all_reduce": True, "ranks": 1}, None),
        ({"all_reduce": False, "ranks": 2}, None),
    ],
)
def test_norms_fused_with_an_all_reduce_stay(settings: dict[str, Any], want: str | None) -> None:
    found = model(quantizes=False)
    reason = fused(config(**settings), found, "rms_norm", found.norm)
    assert reason == (want and Reason(Kind.LEFT_TO_HOST, want))
    assert fused(config(**settings), found, "rms_norm", found.q_norm) is None
    assert fused(config(**settings), found, "silu_and_mul", found.act) is None


def test_norms_of_the_transformers_backend_stay() -> None:
    found = model(quantizes=False)
    found.__class__ = type("ForCausalLM", (nn.Module,), {"__module__": f"{TRANSFORMERS}.causal"})
    for op in ("rms_norm", "gemma_rms_norm", "layer_norm"):
        assert fused(config(), found, op, found.q_norm) == Reason(Kind.LEFT_TO_HOST, ADDED)
        assert fused(config(mode=0), found, op, found.q_norm) is None
    assert fused(config(), found, "silu_and_mul", found.act) is None
    assert fused(config(), model(quantizes=False), "layer_norm", found.norm) is None


class Host(Adapter):
    host, version = "vllm", "0.33.0"

    def targets(self, spec: Any, model: Any) -> list[Any]:
        found = [t for t in super().targets(spec, model) if spec.name == "rms_norm" and t.default]
        return [dataclasses.replace(t, path=f"{__name__}:Norm") for t in found[:1]]

    def unknown(self, target: Any, host_class: Any) -> None:
        return None

    def fused(self, model: Any, op: str, module: Any) -> Reason | None:
        return fused(config(), model, op, module)


def rows(request: Request, quantizes: bool = True) -> tuple[Patched, Any, Any]:
    found = model(quantizes)
    patched = apply(Host(), found, request)
    (row,) = patched.rows
    return patched, row, found


def test_fused_modules_are_left_to_the_host() -> None:
    _, row, found = rows(Request("patch", strict=True))
    assert (row.state, row.modules, row.reason) == ("active", 1, f"1 left to the host: {QUANTIZED}")
    assert type(found.norm) is Norm and type(found.q_norm) is not Norm


def test_requested_ops_go_in_despite_a_fusion() -> None:
    _, row, found = rows(Request("patch", ops=["rms_norm"]))
    assert (row.modules, row.reason) == (2, "") and type(found.norm) is not Norm
    _, row, _ = rows(Request("patch"), quantizes=False)
    assert (row.modules, row.reason) == (2, "")


def test_leaving_every_module_to_the_compiler_is_a_success() -> None:
    found = model(quantizes=True)
    found.q_norm = None
    (row,) = apply(Host(), found, Request("patch")).rows
    assert (row.state, row.kinds, row.reason) == (
        "off",
        [Kind.LEFT_TO_HOST],
        f"1 left to the host: {QUANTIZED}",
    )


@pytest.mark.parametrize(
    ("settings", "scale", "taken"),
    [
        ({"passes": (FuseQuantization(),)}, {}, True),
        ({"mode": 0}, {}, True),  # nothing is compiled, so nothing is fused
        ({}, {}, False),
        ({"passes": (object(),)}, {}, False),
        ({"passes": (FuseQuantization(),)}, {"static": True}, False),
        ({"passes": (FuseQuantization(),)}, {"token": False}, False),
    ],
)
def test_our_layers_quantize_with_our_op_where_it_is_fused(
    settings: dict[str, Any], scale: dict[str, bool], taken: bool
) -> None:
    found = model(quantizes=True)
    kernel = found.linear.scheme.fp8_linear
    host = kernel.quant_fp8
    group = SimpleNamespace(is_per_token=lambda: scale.get("token", True))
    key = SimpleNamespace(scale=SimpleNamespace(static=scale.get("static", False), group_shape=group))
    kernel.config = SimpleNamespace(activation_quant_key=key)
    take_quantization(config(**settings), kernel)
    assert kernel.quant_fp8 is (quantize_tokens if taken else host)
    assert quantized(found) == (set() if taken else {HIDDEN})
    if taken:
        assert fused(config(**settings), found, "rms_norm", found.norm) is None
        x = torch.randn(3, HIDDEN)
        q, scales = kernel.quant_fp8(x, None, None)
        assert q.dtype == torch.float8_e4m3fn and scales.shape == (3, 1)
        torch.testing.assert_close(q.float() * scales, x, rtol=0.07, atol=0.01)
