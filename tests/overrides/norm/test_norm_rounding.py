"""How often a norm rounds: once, behind the product with the weight, where the hosts' own does."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_bench.kernels.judge.correctness.errors import compare, expect
from support.kernels import warm

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.block.decoder_layer import apply_norm
from fastkernels.overrides.norm.transformers import TransformersLlamaRMSNorm
from fastkernels.overrides.norm.vllm import VllmRMSNorm
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.overrides.quant.rms_norm_quant_fp8 import rms_norm_quant_fp8

EPS, HIDDEN = 1e-5, 192
SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "norm_rounding_cases.py"


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm rounded once, and rounded twice, from the same float32 values."""
    h = x.float() if residual is None else x.float() + residual.float()
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    once = (y * weight.float()).to(x.dtype)
    twice = (y.to(x.dtype).float() * weight.float()).to(x.dtype)
    assert (once != twice).float().mean() > 0.1, "the values do not distinguish the two"
    return once, twice


def with_weight(cls: Any, weight: torch.Tensor) -> Any:
    module = cls(weight.numel(), eps=EPS).to(weight.dtype)
    module.weight.data.copy_(weight)
    return module


@pytest.mark.parametrize("shape", [(5, HIDDEN), (5, 3, HIDDEN)], ids=["hidden", "heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("compiled", [True, False])
@torch.inference_mode()
def test_vllm_norm_rounds_once_compiled_twice_eager(
    shape: tuple[int, ...], dtype: torch.dtype, with_residual: bool, compiled: bool
) -> None:
    """dtype: of the weight."""
    x, weight = some(*shape), some(HIDDEN, seed=1, dtype=dtype)
    residual = some(*shape, seed=2) if with_residual else None
    once, twice = normed(x, weight, residual)
    norm = with_weight(VllmRMSNorm, weight)
    found = (torch.compile(norm, backend="eager", fullgraph=True) if compiled else norm)(x, residual)
    assert torch.equal(found[0] if with_residual else found, once if compiled else twice)


@torch.inference_mode()
def test_transformers_norm_rounds_twice() -> None:
    x, weight = some(5, HIDDEN), some(HIDDEN, seed=1)
    assert torch.equal(with_weight(TransformersLlamaRMSNorm, weight)(x), normed(x, weight, None)[1])


@pytest.mark.parametrize(
    ("flag", "eager", "compiled"),
    [({}, 2, 1), ({"cast_x_before_out_mul": False}, 1, 1), ({"cast_x_before_out_mul": True}, 2, 2)],
)
@torch.inference_mode()
def test_layer_norm_rounding_follows_flag_or_host(flag: dict[str, bool], eager: int, compiled: int) -> None:
    weight = some(HIDDEN, seed=1)
    norm = SimpleNamespace(weight=weight, variance_epsilon=EPS, **flag)
    for how, rounds in (
        (apply_norm, eager),
        (torch.compile(apply_norm, backend="eager", fullgraph=True), compiled),
    ):
        x, residual = some(5, HIDDEN), some(5, HIDDEN, seed=2)
        want = normed(x, weight, residual)[rounds - 1]
        assert torch.equal(how(norm, x, residual), want)


@pytest.mark.parametrize("with_residual", [False, True])
def test_quantized_norm_rounds_once(with_residual: bool) -> None:
    x, weight = some(5, HIDDEN), some(HIDDEN, seed=1)
    residual = some(5, HIDDEN, seed=2) if with_residual else None
    once, twice = normed(x, weight, residual)
    (values, scales), other = quantize_fp8(once, None, -1), quantize_fp8(twice, None, -1)
    found = rms_norm_quant_fp8(x, weight, EPS, None, -1, residual)
    assert torch.equal(found[0].float(), values.float()) and torch.equal(found[1], scales)
    assert not torch.equal(values.float(), other[0].float())


def test_kernels_round_like_the_reference() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run([SCRIPT], env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cast_first", [False, True])
@pytest.mark.parametrize("name", ["VllmRMSNorm", "TransformersLlamaRMSNorm", "SGLangRMSNorm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_class_passes_on_calls_of_either_rounding(name: str, cast_first: bool, dtype: str) -> None:
    """Captured calls have either value of cast_first."""
    spec = registry.get("rms_norm")
    case = Case("recorded", {"tokens": 63, "hidden": 576, "cast_first": cast_first}, dtype)
    args = spec.inputs(case, "cpu", torch.Generator().manual_seed(0))
    assert spec.build is not None
    with torch.inference_mode():
        out, _ = spec.build(registry.op_class("rms_norm", name), args)()
    assert not compare(spec, case, [out], expect(spec, case, args, "functional")).problem


# Many long rows are loaded twice. The result is bit-identical, and the residual is written after its second load.
TWICE = """
import torch
from fastkernels.overrides.norm import gemma_rms_norm, rms_norm, rms_norm_heads

launches = []
for module in (rms_norm, gemma_rms_norm):
    def noted(*args, launch=module.launch_kernel, **rest):
        launches.append((rest["TWICE"], rest["num_warps"]))
        launch(*args, **rest)
    module.launch_kernel = noted
found = {}
for rms_norm_heads.MOST, how in ((3, (False, 8)), (2, (True, 16))):
    for op in (rms_norm._triton, gemma_rms_norm._triton):
        for with_residual in (False, True):
            rng = torch.Generator().manual_seed(0)
            x, residual = (torch.randn(3, 3000, generator=rng).bfloat16() for _ in range(2))
            weight = torch.randn(3000, generator=rng).bfloat16()
            out = op(x, weight, 1e-5, residual if with_residual else None)
            assert launches.pop() == how
            found.setdefault((op, with_residual), []).append((out, residual))
for (op, with_residual), (once, twice) in found.items():
    assert torch.equal(once[0], twice[0]) and torch.equal(once[1], twice[1])
assert len(found) == 4
"""


def test_rows_loaded_twice_give_the_same_bits() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = warm.run(["-c", TWICE], env)
    assert done.returncode == 0, done.stderr
