"""RT-DETRv2 of transformers, patched in this process: random weights, float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.detectors import make_rtdetr

import fastkernels
from fastkernels.overrides.conv import transformers as layers
from fastkernels.overrides.detection.transformers import TransformersRTDetrV2MultiscaleDeformableAttention

OPS = ["conv_norm_act", "deformable_attention"]
LAYERS = [target.path.partition(":")[2] for target in layers.TARGETS["conv_norm_act"]]


@pytest.mark.parametrize(
    ("kind", "more"),
    [("basic", {}), ("bottleneck", {"decoder_method": "discrete", "freeze_backbone_batch_norms": False})],
)
def test_patch_keeps_the_boxes_and_is_undone(kind: str, more: dict, tmp_path: Path) -> None:
    model = make_rtdetr(tmp_path, kind, **more)
    images = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))

    def run() -> torch.Tensor:
        with torch.no_grad():
            out = model(images)
        return torch.cat((out.logits, out.pred_boxes), -1)

    before, classes = run(), [type(m) for m in model.modules()]
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    report = fastkernels.patch(model, ops=OPS)
    after, found = run(), dict.fromkeys(OPS, 0)
    for row in report.refresh().active:
        found[row.op] += row.modules
        assert row.calls, row.op
    names = [cls.__name__ for cls in classes]
    assert report.verified and found == {
        "conv_norm_act": sum(map(names.count, LAYERS)),
        "deformable_attention": model.config.decoder_layers,
    }
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)
    report.undo()
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(), before)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_training_mode_and_hooks_run_the_hosts_code(tmp_path: Path) -> None:
    model = make_rtdetr(tmp_path)
    block = model.model.encoder.fpn_blocks[0].bottlenecks[0]
    x, seen = torch.randn(1, 32, 4, 5, generator=torch.Generator().manual_seed(1)), []
    with torch.no_grad():
        want = block(x)
        with fastkernels.patch(model, ops=["conv_norm_act"]):
            hook = block.conv1.conv.register_forward_hook(lambda *_: seen.append(1))
            torch.testing.assert_close(block(x), want)
            hook.remove()
            assert seen == [1]
            block.train()
            measured = block(x)
            assert not torch.allclose(measured, want, atol=1e-3)  # the statistics of this input
            block.eval()


def test_attention_to_points_without_size_is_left_to_the_host(tmp_path: Path) -> None:
    attention = make_rtdetr(tmp_path).model.decoder.layers[0].encoder_attn
    ours = TransformersRTDetrV2MultiscaleDeformableAttention(attention_config(tmp_path))
    ours.load_state_dict(attention.state_dict())
    generator = torch.Generator().manual_seed(1)
    sizes = [(4, 6), (2, 3), (1, 2)]
    given = {
        "hidden_states": torch.randn(1, 5, 32, generator=generator),
        "encoder_hidden_states": torch.randn(1, 32, 32, generator=generator),
        "attention_mask": torch.rand(1, 32, generator=generator) > 0.3,
        "reference_points": torch.rand(1, 5, 1, 4, generator=generator),
        "spatial_shapes": torch.tensor(sizes),
        "spatial_shapes_list": sizes,
    }
    for found, want in zip(ours(**given), attention(**given), strict=True):
        torch.testing.assert_close(found, want)
    with pytest.raises(NotImplementedError):  # there is no host's class behind ours here
        ours(**{**given, "reference_points": given["reference_points"][..., :2]})


def attention_config(folder: Path):
    import transformers

    return transformers.AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_standalone_layers_equal_the_hosts(kind: str, tmp_path: Path) -> None:
    """A copy in a fork is built by its own constructor."""
    model, x = (
        make_rtdetr(tmp_path, kind),
        torch.randn(1, 24, 7, 5, generator=torch.Generator().manual_seed(1)),
    )
    config, stages = model.config.backbone_config, model.model.backbone.model.encoder.stages
    cls = {"basic": "BasicLayer", "bottleneck": "BottleNeckLayer"}[kind]
    made = getattr(layers, f"TransformersRTDetrResNet{cls}")
    more = {"should_apply_shortcut": True} if kind == "basic" else {}
    pairs = [
        (made(config, 24, 32, 2, **more), stages[2].layers[0], x),
        (made(config, 24, 24), stages[1].layers[1], x),
    ]
    csp = model.model.encoder.fpn_blocks[0]
    pairs.append(
        (layers.TransformersRTDetrV2RepVggBlock(model.config), csp.bottlenecks[0], torch.randn(1, 32, 3, 4))
    )
    with torch.no_grad():
        for ours, host, given in pairs:
            ours.load_state_dict(host.state_dict(), strict=False)
            torch.testing.assert_close(ours.eval()(given), host(given), atol=1e-5, rtol=1e-5)
