"""Features of diffusers, timm and transformers combined with a patch: CPU offload, LoRA, torchao, bitsandbytes.

The hooks of offload have the CPU as execution device. Tests of peft, torchao and bitsandbytes skip where these are not
installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny import make_tiny_pipeline

import fastkernels
from fastkernels.core.dispatch import counters
from fastkernels.patch import PatchError

timm = pytest.importorskip("timm")
diffusers = pytest.importorskip("diffusers")
accelerate = pytest.importorskip("accelerate")
CPU = torch.device("cpu")
OPS = ["attention_dense", "layer_norm", "gelu"]
VIT = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}


def vit() -> tuple[Any, Callable[[Any], torch.Tensor]]:
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_dinov3", **VIT).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
    images = torch.randn(2, 3, 32, 32)
    return model, lambda m: m(images)


def unet(folder: Any) -> tuple[Any, Callable[[Any], torch.Tensor]]:
    pipe = diffusers.StableDiffusionXLPipeline.from_pretrained(make_tiny_pipeline(folder))
    noise, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 64)
    more = {"text_embeds": torch.randn(1, 32), "time_ids": torch.ones(1, 6)}

    def run(model: Any) -> torch.Tensor:
        return model(noise, 10, encoder_hidden_states=text, added_cond_kwargs=more).sample

    return pipe.unet, run


def siglip() -> tuple[Any, Callable[[Any], torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(
        hidden_size=48,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    model = transformers.SiglipVisionModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
    images = torch.randn(2, 3, 32, 32)
    return model, lambda m: m(images).pooler_output


def sequential(model: Any) -> None:
    accelerate.cpu_offload(model, execution_device=CPU)


def whole(model: Any) -> None:
    accelerate.cpu_offload_with_hook(model, execution_device=CPU)


def group(model: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        model, onload_device=CPU, offload_device=CPU, offload_type="block_level", num_blocks_per_group=1
    )


def lora(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    names = ["to_q", "to_v", "to_out.0", "q_proj", "fc1"] if hasattr(model, "config") else ["qkv", "proj"]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def quantized(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def bits8(model: Any) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    _replace_linears(
        model,
        lambda *size, **has: bnb.nn.Linear8bitLt(*size, **has, has_fp16_weights=False),
        lambda weight: bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False),
    )


def bits4(model: Any) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    _replace_linears(
        model,
        lambda *size, **has: bnb.nn.Linear4bit(*size, **has, compute_dtype=torch.float32, quant_type="nf4"),
        lambda weight: bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4"),
    )


def _replace_linears(model: Any, layer: Callable[..., Any], parameter: Callable[..., Any]) -> None:
    """As transformers and diffusers do while they load a model."""
    for module in list(model.modules()):
        for name, old in list(module.named_children()):
            if type(old) is torch.nn.Linear:
                new = layer(old.in_features, old.out_features, bias=old.bias is not None)
                new.weight, new.bias = parameter(old.weight.data.clone()), old.bias
                setattr(module, name, new.to(CPU))


def active(report: Any) -> set[str]:
    return {row.op for row in report.refresh().active if row.calls}


@torch.no_grad()
@pytest.mark.parametrize("feature", [whole, group, lora, quantized, bits8, bits4])
@pytest.mark.parametrize("host", ["timm", "diffusers", "transformers"])
@pytest.mark.parametrize("first", ["feature", "patch"])
def test_feature_gives_the_hosts_outputs(
    feature: Callable[[Any], None], host: str, first: str, tmp_path: Any
) -> None:
    if feature is group and host != "diffusers":
        pytest.skip("group offload is diffusers' own")
    model, run = {"timm": vit, "transformers": siglip}[host]() if host != "diffusers" else unet(tmp_path)
    plain = run(model)
    if first == "feature":
        feature(model)
        before = run(model)
    own = {"diffusers": ["geglu", "group_norm", "timestep_embedding"], "transformers": ["gelu"]}.get(host, [])
    report = fastkernels.patch(model, ops=[*OPS, *own])
    if first == "patch":
        feature(model)
    after = run(model)
    assert active(report) >= {"attention_dense", "layer_norm", *own}
    report.undo()
    calls = counters()["layer_norm"]["calls"]
    again = run(model)
    assert counters()["layer_norm"]["calls"] == calls
    if first == "feature":
        assert torch.equal(again, before)
    torch.testing.assert_close(after, again, rtol=1e-4, atol=1e-4 * float(again.abs().max()))
    if feature in (lora, quantized, bits8, bits4):
        assert (after - plain).abs().max() > 1e-3 * plain.abs().max()


@torch.no_grad()
def test_sequential_offload_keeps_modules_with_weights() -> None:
    model, run = vit()
    sequential(model)
    before = run(model)
    with fastkernels.patch(model, ops=OPS) as report:
        torch.testing.assert_close(run(model), before)
        assert active(report) == {"attention_dense", "gelu"}
        assert any(
            "its forward was replaced by other code" in r.reason for r in report.rows if r.op == "layer_norm"
        )
    assert torch.equal(run(model), before)


@torch.no_grad()
def test_undo_under_later_offload_hooks_is_refused() -> None:
    model, run = vit()
    before = run(model)
    report = fastkernels.patch(model, ops=OPS)
    sequential(model)
    torch.testing.assert_close(run(model), before)
    with pytest.raises(
        PatchError, match=r"5 replaced modules \(.*\) were wrapped after the patch, as CPU offload"
    ):
        report.undo()
    assert active(report) >= {"layer_norm"}
    accelerate.hooks.remove_hook_from_submodules(model)
    report.undo()
    calls = counters()["layer_norm"]["calls"]
    assert torch.equal(run(model), before) and counters()["layer_norm"]["calls"] == calls
