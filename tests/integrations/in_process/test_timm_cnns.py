"""CNNs of timm, patched in this process: random weights, float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastkernels
from fastkernels.overrides.conv import timm as ours
from fastkernels.patch import PatchError

timm = pytest.importorskip("timm")
from timm import layers  # noqa: E402
from timm.models import _efficientnet_blocks as blocks  # noqa: E402
from timm.models import convnext  # noqa: E402

OPS = ["conv_norm_act", "batch_norm", "squeeze_excite", "global_response_norm"]
TINY = {"dims": (8, 16, 24, 32), "depths": (1, 2, 1, 1)}
# No op was written for these: MobileNetV1 to V3, MnasNet, EfficientNet, RegNet, GENet, SENet, LCNet, ConvNeXt, ...
OTHERS = (
    "mobilenetv1_100", "mobilenetv2_050", "mobilenetv3_small_050", "mnasnet_small", "semnasnet_075", "fbnetc_100",
    "spnasnet_100", "tinynet_e", "efficientnet_lite0", "regnetx_002", "regnety_002", "gernet_s", "lcnet_050",
    "rexnet_100", "seresnet18", "convnext_atto", "ghostnet_050", "repvgg_a0", "mixnet_s",
    "mobileone_s0", "densenet121",
)  # fmt: skip


def settled(model: nn.Module) -> nn.Module:
    """With random norms whose statistics are about those of its activations, so that a wrong layer is visible."""
    generator = torch.Generator().manual_seed(0)
    measured = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float(key.endswith("weight")), 0.3, generator=generator)
        for module in measured:
            module.momentum = 1.0
        if measured:
            model.train()(torch.randn(8, 3, 64, 64, generator=generator))
        for module in measured:  # a channel with little variance would make rounding visible
            module.running_var += module.running_var.mean() / 10
    return model.eval()


def built(name: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    return settled(timm.create_model(name, num_classes=7, **sizes))


def runner(model: nn.Module, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(images)

    return run


def check(model: nn.Module) -> dict[str, int]:
    """The modules that a patch replaces, by op: it changes no value, and its undo is exact."""
    run, classes = runner(model), [type(m) for m in model.modules()]
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = run()
    report = fastkernels.patch(model, ops=OPS)
    after = run()
    found: dict[str, int] = {}
    for row in report.refresh().active:
        found[row.op] = found.get(row.op, 0) + row.modules
        assert row.calls, row.op
    assert report.verified
    assert before.std() > 1e-3, "the outputs are all alike"
    torch.testing.assert_close(after, before, atol=2e-4 * float(before.abs().max()), rtol=0)
    report.undo()
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(), before)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    return found


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("mobilenetv4_conv_small_035", {}, {"conv_norm_act": 56, "batch_norm": 46}),
        ("mobilenetv3_small_050", {}, {"conv_norm_act": 12, "batch_norm": 34, "squeeze_excite": 9}),
        ("convnextv2_atto", TINY, {"conv_norm_act": 5, "global_response_norm": 5}),
        ("convnextv2_tiny", TINY, {"conv_norm_act": 5, "global_response_norm": 5}),
    ],
)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_patched_cnn_gives_the_hosts_output(
    name: str, sizes: dict[str, Any], expected: dict[str, int], last: bool
) -> None:
    model = built(name, **sizes)
    form = torch.channels_last if last else torch.contiguous_format
    assert check(model.to(memory_format=form)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["efficientnetv2_rw_t", "tf_efficientnetv2_b0", "mobilenetv4_hybrid_medium", *OTHERS]
)
def test_cnn_without_its_own_op_gives_the_hosts_output(name: str) -> None:
    assert sum(check(built(name)).values()) > 3


def test_cnns_stay_with_timm_unless_requested() -> None:
    model = built("mobilenetv4_conv_small_035")
    with fastkernels.patch(model) as report:
        assert not report.active


def test_training_hooks_and_autocast_run_the_hosts_code() -> None:
    model = built("mobilenetv4_conv_small_035")
    run = runner(model)
    seen: list[str] = []
    with fastkernels.patch(model, ops=OPS):
        inside = model.blocks[2][1].pw_exp
        handles = [
            part.register_forward_hook(lambda module, given, out: seen.append(type(module).__name__))
            for part in (inside.conv, inside.bn, inside)
        ]
        hooked = run()
        for handle in handles:
            handle.remove()
        with torch.autocast("cpu", torch.bfloat16):
            mixed = run()
        model.train()
        trained = run()
        statistics = model.bn1.running_mean.clone()
        model.eval()
    assert seen == ["Conv2d", "BatchNormAct2d", "ConvNormAct"]
    other = built("mobilenetv4_conv_small_035")
    run = runner(other)
    torch.testing.assert_close(hooked, run(), atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(mixed, run(), atol=0.05, rtol=0.05)
    other.train()
    torch.testing.assert_close(trained, run(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(statistics, other.bn1.running_mean)


@pytest.mark.parametrize(
    ("theirs", "mine", "args", "options", "channels"),
    [
        (layers.ConvNormAct, ours.TimmConvNormAct, (6, 9, 3), {"stride": 2, "bias": True}, 6),
        (layers.ConvNormAct, ours.TimmConvNormAct, (6, 6, 5), {"groups": 6, "act_layer": nn.SiLU}, 6),
        (layers.BatchNormAct2d, ours.TimmBatchNormAct2d, (6,), {"act_layer": nn.Hardswish}, 6),
        (layers.BatchNormAct2d, ours.TimmBatchNormAct2d, (6,), {"apply_act": False, "affine": False}, 6),
        (blocks.ConvBnAct, ours.TimmConvBnAct, (6, 6, 3), {"skip": True}, 6),
        (blocks.DepthwiseSeparableConv, ours.TimmDepthwiseSeparableConv, (6, 6), {"pw_act": True}, 6),
        (blocks.InvertedResidual, ours.TimmInvertedResidual, (8, 8), {"exp_ratio": 3.0, "dw_kernel_size": 5}, 8),
        (blocks.EdgeResidual, ours.TimmEdgeResidual, (8, 12), {"exp_ratio": 2.0, "stride": 2}, 8),
        (blocks.UniversalInvertedResidual, ours.TimmUniversalInvertedResidual, (8, 8, 3, 5, 3),
         {"exp_ratio": 2.0, "layer_scale_init_value": None}, 8),
        (blocks.SqueezeExcite, ours.TimmSqueezeExcite, (12,), {"act_layer": nn.SiLU}, 12),
        (layers.SEModule, ours.TimmSEModule, (24,), {"rd_ratio": 0.5, "bias": False, "gate_layer": "hard_sigmoid"}, 24),
        (layers.grn.GlobalResponseNorm, ours.TimmGlobalResponseNorm, (6,), {"channels_last": False}, 6),
        (convnext.ConvNeXtBlock, ours.TimmConvNeXtBlock, (6,), {"use_grn": True, "ls_init_value": None}, 6),
        (convnext.ConvNeXtBlock, ours.TimmConvNeXtBlock, (6,), {"conv_mlp": True, "kernel_size": 3}, 6),
    ],
)  # fmt: skip
def test_class_built_anew_equals_timms(
    theirs: Any, mine: Any, args: tuple[Any, ...], options: dict[str, Any], channels: int
) -> None:
    """With timm's constructor and weights, as in a fork."""
    torch.manual_seed(0)
    host, own = theirs(*args, **options), mine(*args, **options).eval()
    with torch.no_grad():
        for tensor in [*host.parameters(), *host.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5) if tensor.dim() == 1 else tensor.normal_(0, 0.3)
        own.load_state_dict(host.eval().state_dict())
        x = torch.randn(2, channels, 7, 6)
        torch.testing.assert_close(own(x), host(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (layers.ConvNormAct(4, 4, 3, padding="same", stride=2), "its convolution is a Conv2dSame"),
        (layers.ConvNormAct(4, 4, 3, act_layer=nn.Tanh), "its activation is Tanh"),
        (layers.ConvNormAct(4, 4, 3, norm_layer=layers.LayerNorm2d), "its norm is a LayerNorm"),
        (layers.ConvNormAct(4, 4, 3, drop_layer=nn.Dropout), "its norm has a Dropout"),
        (layers.ConvNormAct(4, 4, 3, norm_kwargs={"track_running_stats": False}), "no stored statistics"),
    ],
)
def test_other_layers_stay_with_timm(module: nn.Module, reason: str) -> None:
    with pytest.raises(PatchError, match=reason):
        fastkernels.patch(nn.Sequential(module.eval()), ops="conv_norm_act")


def test_what_only_timm_builds_is_refused() -> None:
    for build, says in (
        (lambda: ours.TimmConvNormAct(4, 4, 3, padding="same"), "padding='same' is not supported"),
        (lambda: ours.TimmConvNormAct(4, 4, norm_layer=nn.GroupNorm), "only torch.nn.BatchNorm2d"),
        (lambda: ours.TimmConvNormAct(4, 4, act_layer="mish"), "act_layer must be a class or one of relu, "),
        (lambda: ours.TimmInvertedResidual(4, 4, s2d=1), "s2d=1 is not supported here"),
        (lambda: ours.TimmConvNeXtBlock(4, 8), "only in a model of timm"),
    ):
        with pytest.raises(ValueError, match=says):
            build()
