"""CNNs of timm's checkpoints against timm, on random weights in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import ENCODINGS
from PIL import Image
from support.detectors import make_yolo

from fastkernels import LLM
from fastkernels.core.dispatch import counters
from fastkernels.core.registry import UnknownName
from fastkernels.engine.inputs.pixels import Scale
from fastkernels.engine.inputs.timm_images import TimmProcessor
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs.timm_config import Preprocessing
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import models
from fastkernels.models.common.layers import cnn

timm = pytest.importorskip("timm")
TINY = {"dims": (8, 16, 24, 32), "depths": (1, 2, 1, 1)}
FAST: dict[str, dict[str, Any]] = {
    "convnextv2_atto": TINY, "convnextv2_tiny": TINY, "mobilenetv4_conv_small_035": {}, "tf_efficientnetv2_b0": {},
}  # fmt: skip
SLOW = (
    "mobilenetv4_conv_small", "mobilenetv4_conv_medium", "mobilenetv4_conv_large", "efficientnetv2_rw_t",
    "efficientnetv2_rw_m", "efficientnetv2_m", "tf_efficientnetv2_s", "tf_efficientnetv2_b3",
)  # fmt: skip
OPS = {
    "convnextv2": ("conv_norm_act", "global_response_norm", "linear_gelu", "linear_residual", "layer_norm"),
    "mobilenetv4": ("conv_norm_act",),
    "efficientnetv2": ("conv_norm_act", "squeeze_excite"),
}


def pictures(*sizes: tuple[int, int]) -> list[Image.Image]:
    """Large spots of random colors: a CNN tells them apart, unlike images of noise."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (3, 2, 3), dtype=np.uint8)).resize(size) for size in sizes]


def made(folder: Path, name: str, classes: int = 7, **sizes: Any) -> torch.nn.Module:
    """timm's model, saved by timm: random weights, images of 64 pixels."""
    from timm.models._hub import save_for_hf

    torch.manual_seed(0)
    overlay = {"input_size": (3, 64, 64), "crop_pct": 0.9}
    model = timm.create_model(name, num_classes=classes, pretrained_cfg_overlay=overlay, **sizes).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float(key.endswith("weight")), 0.3)
            else:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    measured = [m for m in model.modules() if hasattr(m, "running_mean")]
    if measured:  # on images: with other statistics, all of them would have nearly the same vector
        images = torch.nn.functional.interpolate(torch.randn(16, 3, 3, 2), (64, 64), mode="bilinear")
        for module in measured:
            module.momentum = 1.0
        with torch.no_grad():
            model.train()(images)
            for module in measured:  # a channel with little variance would make rounding visible
                module.running_var += module.running_var.mean() / 10
        model.eval()
    save_for_hf(model, str(folder), safe_serialization=True)
    return model


@torch.no_grad()
def expected(model: Any, images: list[Image.Image]) -> dict[str, np.ndarray]:
    transform = timm.data.create_transform(
        **timm.data.resolve_data_config({}, model=model), is_training=False
    )
    features = model.forward_features(torch.stack([transform(image) for image in images]))
    vectors = model.forward_head(features, pre_logits=True)
    found = {
        "token_embed": features.permute(0, 2, 3, 1).flatten(1, 2),
        "embed": torch.nn.functional.normalize(vectors, dim=-1),
        "classify": model.forward_head(features).softmax(-1),
    }
    return {task: tensor.numpy() for task, tensor in found.items()}


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_model_equals_timm(name: str, tmp_path: Path) -> None:
    """Features, vectors and classes; images of three sizes in a batch, and one by one."""
    model, images = made(tmp_path, name, **FAST.get(name, {})), pictures((80, 70), (64, 64), (100, 50))
    wanted, llm, before = expected(model, images), LLM(str(tmp_path), device="cpu"), counters()
    for task, want in wanted.items():
        together = llm.encode(images, task, use_tqdm=False)
        alone = [llm.encode([images[-1]], task, use_tqdm=False)[0]]
        for output, values in zip([*together, *alone], [*want, want[-1]], strict=True):
            scale = max(1.0, float(np.abs(values).max()))
            np.testing.assert_allclose(output.outputs.data, values, atol=ENCODINGS * scale)
            assert output.num_tokens == 4
    assert np.ptp(wanted["embed"], axis=0).max() > 50 * ENCODINGS, "the images have nearly the same vector"
    family = next(name for name in OPS if name in tmp_path.joinpath("config.json").read_text())
    for op in OPS[family]:
        assert counters()[op]["calls"] > before[op]["calls"], op


def test_every_cnn_is_tested() -> None:
    kinds = {m.name for m in models().values() if m.arch.timm}
    assert kinds == set(OPS) and all(any(kind in name for name in FAST) for kind in kinds)


def test_images_of_two_sizes_are_encoded_together(tmp_path: Path) -> None:
    """The interface allows them, although timm's preprocessing makes all images of one size."""
    made(tmp_path, "convnextv2_atto", **TINY)
    model = LLM(str(tmp_path), device="cpu").llm_engine.runner.model
    grids = [(2, 1), (1, 2), (2, 1)]
    patches = torch.randn(6, 3 * 32 * 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        together = model(patches, grids)
        alone = [model(patches[2 * i : 2 * i + 2], [grid]) for i, grid in enumerate(grids)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_model_without_classes_gives_vectors_only(tmp_path: Path) -> None:
    made(tmp_path, "convnextv2_atto", classes=0, **TINY)
    llm, (image,) = LLM(str(tmp_path), device="cpu"), pictures((64, 64))
    assert len(llm.embed([image], use_tqdm=False)[0].outputs.embedding) == TINY["dims"][-1]
    with pytest.raises(ValueError, match="task 'classify' needs a model with a classifier"):
        llm.classify([image])


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    model, images = made(tmp_path, "mobilenetv4_conv_small_035"), pictures((64, 64))
    (output,) = LLM(str(tmp_path), device="cpu", dtype="bfloat16").embed(images, use_tqdm=False)
    assert output.outputs.data @ expected(model, images)["embed"][0] > 0.999


@pytest.mark.parametrize("name", ["mobilenetv4_conv_small_035", "yolov10"])
def test_images_reach_the_device_as_bytes(tmp_path: Path, name: str) -> None:
    if name == "yolov10":
        make_yolo(tmp_path)
    else:
        made(tmp_path, name)
    llm, (image,) = LLM(str(tmp_path), device="cpu"), pictures((64, 64))
    steps = []
    runner = llm.llm_engine.runner
    launch = runner.launch
    runner.launch = lambda step: steps.append(step) or launch(step)
    llm.detect(image, use_tqdm=False) if name == "yolov10" else llm.embed(image, use_tqdm=False)
    ((patches,),) = [step.patches for step in steps]
    assert patches.dtype == np.uint8 and patches.shape == (4, 3 * 32 * 32)


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_preprocessing_equals_timms(mode: str, interpolation: str) -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    transform = timm.data.create_transform(
        (3, 48, 48), crop_pct=0.875, crop_mode=mode, interpolation=interpolation, mean=mean, std=std
    )
    processor = TimmProcessor(Preprocessing(48, 0.875, mode, interpolation, mean, std))
    for image in pictures((80, 70), (48, 48), (33, 91), (54, 54)):
        pixels = processor(images=image, return_tensors="pt")["pixel_values"][0]
        assert pixels.dtype == torch.uint8
        found = Scale(mean, std)(pixels.reshape(1, -1)).view(pixels.shape)
        torch.testing.assert_close(found, transform(image), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"architecture": "mobilenetv4_hybrid_medium"}, Unsupported,
         "architecture='mobilenetv4_hybrid_medium' is not supported, only mobilenetv4_conv_small_035, "),
        ({"architecture": "resnet18"}, UnknownName, "unknown architecture 'resnet18'"),
        ({"global_pool": "max", "model_args": {}}, Unsupported, "global_pool='max' is not supported, only 'avg'"),
        ({"model_args": {"stem_type": "overlap"}}, Unsupported, "model_args has stem_type; supported: depths, dims"),
        ({"model_args": {"dims": [8, 16]}}, Unsupported, r"dims=\[8, 16\] is not four integers above 0"),
        ({"model_args": {"in_chans": 1}}, CheckpointError, "model_args has in_chans=1, and 3 is expected"),
        ({"pretrained_cfg": {"input_size": [3, 48, 48]}}, Unsupported, "image_size=48 is not a multiple of 32"),
        ({"pretrained_cfg": {"input_size": [3, 64, 32]}}, CheckpointError, r"only \[3, N, N\]"),
        ({"pretrained_cfg": {"crop_mode": "border"}}, CheckpointError, "crop_mode='border' is not supported, only"),
        ({"pretrained_cfg": {"crop_pct": 0}}, CheckpointError, r"crop_pct=0 must be in \(0, 1\]"),
        ({"pretrained_cfg": {"mean": [0.5]}}, CheckpointError, r"mean=\[0.5\] is not 3 numbers"),
        ({"pretrained_cfg": 3}, CheckpointError, "pretrained_cfg and model_args must be tables"),
        ({"num_classes": -1, "model_args": {}}, CheckpointError, "num_classes=-1 is not a number of classes"),
    ],
)  # fmt: skip
def test_unsupported_config_is_refused(
    fields: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    config = {
        "architecture": "convnextv2_atto",
        "num_classes": 3,
        "pretrained_cfg": {"input_size": [3, 64, 64]},
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(error, match=message):
        LLM(str(tmp_path), device="cpu", load_format="dummy")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    made(tmp_path, "mobilenetv4_conv_small_035")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architecture": "mobilenetv4_conv_medium"}))
    with pytest.raises(CheckpointError, match=r"blocks\.0\.0\.bn1\.bias of shape \(16,\) does not fit"):
        LLM(str(tmp_path), device="cpu")


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    config = {"architecture": "mobilenetv4_conv_small", "num_classes": 3, "pretrained_cfg": {"input_size": [3, 32, 32]},
              "label_names": ["a", "b", "c"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), device="cpu", load_format="dummy")
    assert llm.llm_engine.hf_config.id2label == {0: "a", 1: "b", 2: "c"}
    (output,) = llm.classify(pictures((40, 40)), use_tqdm=False)
    np.testing.assert_allclose(sum(output.outputs.probs), 1, atol=1e-5)


@pytest.mark.parametrize("name", ["mobilenetv4_conv_small_035", "tf_efficientnetv2_b0"])
def test_norms_are_part_of_the_convolutions(name: str, tmp_path: Path) -> None:
    """The vectors equal timm's (see above) without a norm in any call."""
    model = made(tmp_path, name)
    ours = LLM(str(tmp_path), device="cpu").llm_engine.runner.model
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    convs = [module for module in ours.modules() if isinstance(module, cnn.Conv)]
    assert not any(isinstance(module, cnn.BatchNorm) for module in ours.modules())
    assert len(norms) > 10 and sum(conv.bias is not None for conv in convs) >= len(norms)
    assert not any("running_mean" in key for key in ours.state_dict())
    before = [conv.weight.clone() for conv in convs]
    for module in ours.modules():
        if isinstance(module, cnn.Folded):
            module.merge()  # nothing is left
    assert all(torch.equal(conv.weight, weight) for conv, weight in zip(convs, before, strict=True))


@torch.no_grad()
def test_bias_and_norm_become_one_bias() -> None:
    torch.manual_seed(0)
    conv, norm, style = cnn.Conv(3, 4, 3, bias=True), cnn.BatchNorm(4), cnn.Style("relu", 0.1)
    for p in (*conv.parameters(), *norm.parameters()):
        torch.nn.init.uniform_(p, 0.5, 1.5)
    x = torch.randn(2, 3, 5, 5)
    want = cnn.convolve(x, conv, norm, style, "relu")
    pair = cnn.Folded()
    pair.style, pair.norms, pair.conv, pair.norm = style, (("conv", "norm"),), conv, norm
    pair.merge()
    assert pair.norm is None
    torch.testing.assert_close(cnn.convolve(x, conv, pair.norm, style, "relu"), want)


@pytest.mark.parametrize("request_", ["", "conv_norm_act:torch"])
def test_request_goes_before_the_measured_choice(monkeypatch: pytest.MonkeyPatch, request_: str) -> None:
    """PyTorch's code runs where it was faster, but not in place of a provider or a candidate that the user names."""
    op, taken = cnn.OPS["conv_norm_act"], []
    monkeypatch.setenv("FASTKERNELS_PROVIDER", request_)
    op.forget()
    monkeypatch.setattr(cnn, "faster", lambda op, what, x, ours, other: other())
    monkeypatch.setattr(cnn, "library", lambda *named: lambda *given: taken.append(named))
    conv = cnn.Conv(3, 8)
    torch.nn.init.zeros_(conv.weight)
    made = cnn.convolve(torch.zeros(1, 3, 8, 8), conv, None, cnn.Style("relu"))
    assert len(taken) == (not request_) and (made is None) == (not request_)
    monkeypatch.undo()
    op.forget()


@pytest.mark.parametrize("request_", ["", "squeeze_excite:torch"])
def test_gates_are_chosen_by_measurement_or_request(monkeypatch: pytest.MonkeyPatch, request_: str) -> None:
    op = cnn.OPS["squeeze_excite"]
    asked: list[torch.Tensor] = []

    def both(name: str, what: Any, x: torch.Tensor, ours: Any, other: Any) -> Any:
        torch.testing.assert_close(ours(), other())
        asked.append(x)
        return other()

    monkeypatch.setenv("FASTKERNELS_PROVIDER", request_)
    op.forget()
    monkeypatch.setattr(cnn, "faster", both)
    gates = cnn.SqueezeExcite(cnn.Style("silu"), 8, 2)
    for parameter in gates.parameters():
        torch.nn.init.normal_(parameter)
    images = torch.randn(2, 8, 3, 4).to(memory_format=torch.channels_last)
    made = gates(images)
    assert made.stride() == images.stride() and len(asked) == (not request_)
    monkeypatch.undo()
    op.forget()


@pytest.mark.parametrize(
    ("conv", "measured"),
    [
        (cnn.Conv(8, 12), True),
        (cnn.Conv(8, 8, 3, groups=8), True),
        (cnn.Conv(8, 8, groups=8), True),
        (cnn.Conv(8, 12, 3), False),
        (cnn.Conv(1, 1, 3), False),
        (cnn.Conv(8, 12, 5, stride=2, groups=4), False),
        (cnn.Conv(8, 16, 3, groups=8), False),
    ],
)
def test_only_convolutions_with_a_kernel_of_ours_are_measured(
    monkeypatch: pytest.MonkeyPatch, conv: cnn.Conv, measured: bool
) -> None:
    """Of the others, both sides run cuDNN's convolution."""
    asked: list[str] = []
    monkeypatch.setattr(cnn, "faster", lambda op, _, x, ours, other: asked.append(op) or ours())
    torch.nn.init.normal_(conv.weight)
    x = torch.randn(2, conv.weight.shape[1] * conv.groups, 9, 9)
    made = cnn.convolve(x, conv, None, cnn.Style("relu"), "relu")
    want = torch.conv2d(x, conv.weight, None, conv.stride, conv.padding, groups=conv.groups).relu()
    torch.testing.assert_close(made, want)
    assert asked == ["conv_norm_act"] * measured
