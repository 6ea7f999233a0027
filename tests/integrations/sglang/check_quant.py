"""SGLang's grouped_topk_gpu and its biased form in PyTorch, compared with ours; its FP8 scheme, replaced by ours."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fk_integrations.patching.apply import apply
from fk_integrations.sglang.scheduler import SglangAdapter

from fastkernels.core import tuning
from fastkernels.core.dispatch import OPS
from fastkernels.core.tuning import Entry, Table
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.overrides.routing.sglang import sglang_biased_grouped_topk_gpu, sglang_grouped_topk_gpu
from fastkernels.patch import Request

SERVER = SimpleNamespace(server_args=SimpleNamespace(pp_size=1))


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("apply", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_topk_is_the_hosts(biased, renormalize, apply):
    from sglang.srt.layers.moe import topk

    bias = [randn(64, seed=2) / 20] if biased else []
    theirs = topk.biased_grouped_topk_impl if biased else topk.grouped_topk_gpu
    theirs = getattr(theirs, "_torchdynamo_orig_callable", theirs)
    ours = sglang_biased_grouped_topk_gpu if biased else sglang_grouped_topk_gpu
    arguments = (randn(50, 8), 2 * randn(50, 64, seed=1), *bias, 6, renormalize, 8, 3, 0, 2.5, apply)
    weights, ids = theirs(*arguments)
    found, found_ids = ours(*arguments)
    ids, order = ids.sort(-1)  # the host does not order them
    found_ids, found_order = found_ids.sort(-1)
    assert torch.equal(found_ids, ids)
    torch.testing.assert_close(found.gather(1, found_order), weights.gather(1, order))


def quantized_layer(static: bool = False):
    """A layer of 48 outputs with SGLang's own scheme, as it is after loading."""
    from compressed_tensors.quantization import QuantizationArgs
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8

    arguments = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    layer = torch.nn.Module()
    layer.scheme = CompressedTensorsW8A8Fp8(arguments, static)
    layer.scheme.create_weights(layer, 64, [16, 32], 64, 48, torch.bfloat16, weight_loader=None)
    values, scale = quantize_fp8(randn(48, 64), None, -1)
    layer.weight.data, layer.weight_scale.data = values, scale
    layer.scheme.process_weights_after_loading(layer)
    return layer


def test_the_scheme_of_a_quantized_layer_is_replaced():
    """The host's object after loading; its own product needs CUDA, so ours is compared with the layer in float32."""
    model = torch.nn.Module()
    model.rows, model.static = quantized_layer(), quantized_layer(static=True)
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )

    before, x, bias = model.rows.scheme, randn(5, 64, seed=3).bfloat16(), randn(48, seed=4).bfloat16()
    patched = apply(SglangAdapter(SERVER), model, Request("patch", ops=("linear_fp8",)))
    (row,) = patched.rows
    assert (row.state, row.modules, row.reason) == ("active", 1, "1 unsupported: the scale of x is given")
    layer = model.rows
    assert isinstance(layer.scheme, type(before)) and type(layer.scheme) is not type(before)
    expected = x.float() @ (layer.weight.float() * layer.weight_scale.t()) + bias.float()
    method = CompressedTensorsLinearMethod(None)
    got = method.apply(layer, x, bias)
    assert (got.dtype, got.shape) == (torch.bfloat16, (5, 48))
    assert (got.float() - expected).pow(2).mean().sqrt() < 0.05 * expected.pow(2).mean().sqrt()
    assert patched.report()[0]["calls"] == 1
    patched.undo()
    assert layer.scheme is before


def test_by_table_other_sizes_run_the_hosts_method(monkeypatch, tmp_path):
    """The real scheme: its apply_weights calls apply_fp8_linear, whose product needs CUDA, with its own weights."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8 as host

    shape = {"N": 48, "K": 64, "block": 1, "out_dtype": "bfloat16"}
    entries = (
        Entry("linear_fp8", shape, {"M": 8}, "reference", "sgl_kernel", "r1", {}, 1.3, (1.2, 1.4)),
        Entry("linear_fp8", shape, {"M": 32}, "sgl_kernel", "sgl_kernel", "r1"),
    )
    (tmp_path / "own.json").write_text(Table("cpu", {"r1": {}}, entries).to_json())
    monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path / "own.json"))
    tuning._by_op.cache_clear()
    model = torch.nn.Module()
    model.rows = layer = quantized_layer()
    before, theirs, given = layer.scheme, torch.zeros(9, 48), []
    monkeypatch.setattr(host, "apply_fp8_linear", lambda **call: given.append(call) or theirs)
    patched = apply(SglangAdapter(SERVER), model, Request("patch"))
    try:
        assert [row.modules for row in patched.rows if row.op == "linear_fp8"] == [1]
        x, bias = randn(9, 64, seed=3).bfloat16(), randn(48, seed=4).bfloat16()
        assert layer.scheme.apply_weights(layer, x[:8], bias=bias).shape == (8, 48) and not given
        assert layer.scheme.apply_weights(layer, x, bias=bias) is theirs
        (call,) = given
        assert call["input"] is x and call["weight"] is layer.weight and call["bias"] is bias
        assert call["weight_scale"] is layer.weight_scale and call["input_scale"] is None
        (row,) = [row for row in patched.report() if row["op"] == "linear_fp8"]
        assert (row["calls"], list(row["left"].values())) == (1, [1])
    finally:
        patched.undo()
        tuning._by_op.cache_clear()
        OPS["linear_fp8"].reset()
    assert layer.scheme is before and type(layer.scheme) is host.CompressedTensorsW8A8Fp8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_own_kernels_agree_with_the_reference(name, dtype):
    """On every case of the op that the kernel supports; mutated arguments are compared, too."""
    from fk_integrations.sglang import own_kernels

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
