"""Parts of a patched model that a user changes, hooks or looks up by class after the patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize

import fastkernels
from fastkernels.core.dispatch import counters

diffusers = pytest.importorskip("diffusers")
timm = pytest.importorskip("timm")
SIZES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TINY: dict[str, Any] = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 3}
FLUX: dict[str, Any] = {
    "patch_size": 1, "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
UNET: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 16,
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 2,
}  # fmt: skip
TOKENS = torch.arange(6)[None]
IMAGE = torch.randn(2, 3, 32, 32)


def drawn(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


def llama() -> tuple[Any, Callable[[Any], torch.Tensor]]:
    config = transformers.LlamaConfig(**SIZES, vocab_size=16)
    return drawn(transformers.LlamaModel(config)), lambda m: m(TOKENS).last_hidden_state


def gemma() -> tuple[Any, Callable[[Any], torch.Tensor]]:
    config = transformers.GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=12, vocab_size=16)
    return drawn(transformers.GemmaModel(config)), lambda m: m(TOKENS).last_hidden_state


def timm_model(name: str) -> tuple[Any, Callable[[Any], torch.Tensor]]:
    return drawn(timm.create_model(name, **TINY)), lambda m: m(IMAGE)


def unet() -> tuple[Any, Callable[[Any], torch.Tensor]]:
    noise, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 16)
    return drawn(
        diffusers.UNet2DConditionModel(**UNET)
    ), lambda m: m(noise, 3, encoder_hidden_states=text).sample


class Adapted(nn.Module):
    """A linear layer with a second product, whose weight is that of the first: as peft's."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features, bias=False)
        self.weight, self.bias, self.out_features = base.weight, base.bias, base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.more(x)


def adapted(mlp: Any) -> None:
    mlp.gate_proj = Adapted(mlp.gate_proj)


def hooked(mlp: Any) -> None:
    mlp.up_proj.register_forward_hook(lambda module, args, out: 2 * out)


def replaced(mlp: Any) -> None:
    old = mlp.gate_proj.forward
    mlp.gate_proj.forward = lambda x: 2 * old(x)


def hooked_act(mlp: Any) -> None:
    mlp.act_fn.register_forward_hook(lambda module, args, out: 2 * out)


def other_act(mlp: Any) -> None:
    mlp.act_fn = nn.ReLU()


@torch.no_grad()
@pytest.mark.parametrize("change", [adapted, hooked, replaced, hooked_act, other_act])
@pytest.mark.parametrize(("build", "op"), [(llama, "gated_mlp"), (gemma, "gated_gelu_mlp")])
def test_changed_parts_of_a_gated_mlp_run(build: Any, op: str, change: Callable[[Any], None]) -> None:
    model, run = build()
    plain = run(model)
    report = fastkernels.patch(model, ops=op)
    torch.testing.assert_close(run(model), plain)
    change(model.layers[0].mlp)
    changed = run(model)
    report.undo()
    assert (changed - plain).abs().max() > 1e-3
    torch.testing.assert_close(changed, run(model), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("vit_small_patch16_224", "attn_drop"), ("vit_small_patch16_dinov3", "attn_drop"),
        ("vit_pe_core_tiny_patch16_384", "attn_drop"), ("vit_7b_patch16_dinov3", "mlp.act"),
        ("eva02_tiny_patch14_224", "mlp.act"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", ["hook", "patch"])
def test_hooks_of_parts_that_ours_does_not_call(name: str, part: str, first: str) -> None:
    model, run = timm_model(name)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # as for timm.utils.AttentionExtract
    plain, seen = run(model), []

    def hook() -> None:
        for path, module in model.named_modules():
            if path.endswith(part):
                module.register_forward_hook(lambda module, args, out: seen.append(out))

    if first == "hook":
        hook()
    with fastkernels.patch(model, ops=["attention_dense", "gated_mlp"]):
        if first == "patch":
            hook()
        torch.testing.assert_close(run(model), plain)
    assert len(seen) == 1


@torch.no_grad()
def test_hooks_of_a_residual_blocks_activation() -> None:
    model, run = unet()
    seen: list[Any] = []
    run(model)
    with fastkernels.patch(model, ops="group_norm") as report:
        block = model.down_blocks[0].resnets[0]
        block.nonlinearity.register_forward_hook(lambda *args: seen.append(args))
        run(model)
        assert "nonlinearity has hooks" in str(report.refresh())
    assert len(seen) == 3


@torch.no_grad()
def test_the_host_finds_its_classes() -> None:
    from diffusers.hooks._helpers import AttentionProcessorRegistry, TransformerBlockRegistry

    flux, (model, run) = diffusers.FluxTransformer2DModel(**FLUX), unet()
    with fastkernels.patch(flux, ops=["gated_residual", "attention_dense"]) as report:
        assert len(report.active) >= 2
        block = flux.transformer_blocks[0]
        TransformerBlockRegistry.get(block.__class__)  # as FirstBlockCache does
        AttentionProcessorRegistry.get(block.attn.processor.__class__)
    plain = run(model)
    with fastkernels.patch(model, ops="attention_dense"):
        model.set_default_attn_processor()
        torch.testing.assert_close(run(model), plain)


@torch.no_grad()
def test_undo_leaves_a_later_parametrization() -> None:
    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    model, run = timm_model("vit_small_patch16_224")
    plain = run(model)
    report = fastkernels.patch(model, ops="layer_norm")
    norm = model.blocks[0].norm1
    parametrize.register_parametrization(norm, "weight", Twice())
    changed = run(model)
    assert (changed - plain).abs().max() > 1e-3
    report.undo()
    assert torch.equal(run(model), changed)
    parametrize.remove_parametrizations(norm, "weight", leave_parametrized=False)
    assert torch.equal(run(model), plain) and type(norm) is type(model.norm)


@torch.no_grad()
@pytest.mark.parametrize("build", [lambda: timm_model("vit_small_patch16_224"), unet])
def test_meta_tensors(build: Any) -> None:
    model, run = build()
    shape = run(model).shape
    model.to("meta")
    ops = ["patch_embedding", "layer_norm", "gated_residual", "upsample_conv"]
    with fastkernels.patch(model, ops=ops):
        out = model(IMAGE.to("meta")) if hasattr(model, "blocks") else model(
            torch.empty(1, 4, 8, 8, device="meta"), torch.tensor([3], device="meta"),
            encoder_hidden_states=torch.empty(1, 5, 16, device="meta"),
        ).sample  # fmt: skip
    assert out.is_meta and out.shape == shape


@torch.no_grad()
def test_vmap_runs_the_hosts_code() -> None:
    model, _ = llama()
    x = torch.randn(3, 2, 5, 24)
    want = torch.func.vmap(model.norm)(x)
    with fastkernels.patch(model, ops="rms_norm"):
        torch.testing.assert_close(torch.func.vmap(model.norm)(x), want)
        assert counters()["rms_norm"]["calls"] == 0
