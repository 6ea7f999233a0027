"""vLLM's QuantFP8 and GroupedTopk, which run in PyTorch on a CPU, compared with ours."""

from dataclasses import replace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from fastkernels.overrides.quant.vllm import VllmQuantFP8
from fastkernels.overrides.routing.vllm import VllmGroupedTopk


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("arguments", "layout"),
    [((-1, -1), {"static": True}), ((-1, -1), {}), ((1, -1), {}), ((1, 128), {"column_major_scales": True}),
     ((1, 128), {"use_ue8m0": True})],
    ids=str,
)  # fmt: skip
def test_quant_fp8_is_the_hosts(arguments, layout, dtype):
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    shape, given = GroupShape(*arguments), {"static": False, "use_ue8m0": False, **layout}
    x = (randn(33, 512) * randn(33, 1, seed=1).exp2() * 8).to(dtype)
    scale = [torch.tensor([0.03])] if given["static"] else []
    with set_current_vllm_config(VllmConfig()):
        theirs, wanted = QuantFP8(group_shape=shape, compile_native=False, **given).forward_native(x, *scale)
    ours, found = VllmQuantFP8(group_shape=shape, **given)(x, *scale)
    assert ours.dtype == theirs.dtype and found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, rtol=2e-7, atol=0)
    # The host divides by a group's scale, ours multiplies by its inverse: values between two steps may differ.
    differ = (ours.float() != theirs.float()).sum().item()
    assert differ == 0 if shape.col != 128 else differ <= x.numel() / 500
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.13, atol=2**-9)


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_topk_is_the_hosts(biased, scoring_func):
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopk

    x, logits, bias = randn(50, 8), 2 * randn(50, 64, seed=1), randn(64, seed=2) / 20 if biased else None
    arguments = (6, True, 8, 3, scoring_func, 2.5)
    with set_current_vllm_config(VllmConfig()):
        weights, ids = GroupedTopk(*arguments).forward_native(x, logits, bias)
    found, found_ids = VllmGroupedTopk(*arguments)(x, logits, bias)
    ids, order = ids.sort(-1)  # the host does not order them
    found_ids, found_order = found_ids.sort(-1)
    assert torch.equal(found_ids, ids)
    torch.testing.assert_close(found.gather(1, found_order), weights.gather(1, order))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_own_kernels_agree_with_the_reference(name, dtype):
    """On every case of the op that the kernel supports; mutated arguments are compared, too."""
    import vllm._custom_ops  # noqa: F401 - loads the kernels
    from fk_integrations.vllm import own_kernels

    from fastkernels.core import registry

    provider, spec, checked = own_kernels.providers()[name], registry.get(name), 0
    dtype_name = str(dtype).removeprefix("torch.")
    reference = next(p for p in spec.op.providers if p.name == "reference")
    for case in spec.cases:
        if case.tags != ("odd",):
            continue
        args = spec.inputs(
            replace(case, dtype=str(dtype).removeprefix("torch.")), "cpu", torch.Generator().manual_seed(0)
        )
        if provider.supports is not None and provider.supports(*args) is not None:
            continue
        given, expected = ([a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
        pairs = [(provider.fn(*given), reference.fn(*expected)), *zip(given, expected, strict=True)]
        for found, wanted in pairs:
            if isinstance(wanted, torch.Tensor):
                tolerance = spec.tolerance[dtype_name]
                torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)
        checked += 1
    assert checked >= 2
