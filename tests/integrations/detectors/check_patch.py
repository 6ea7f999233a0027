"""ultralytics' detectors: patched before and after `fuse()`, against the library's results, and after undo."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp())  # where the library writes its settings

from ultralytics import YOLO
from ultralytics.nn.modules.block import Attention, RepVGGDW
from ultralytics.nn.modules.conv import Conv, DWConv
from ultralytics.nn.tasks import ClassificationModel, DetectionModel

import fastkernels
from fastkernels.patch import PatchError

OPS = ["conv_norm_act", "attention_dense"]
MODELS = {
    "yolov5n": DetectionModel, "yolov8n": DetectionModel, "yolov9t": DetectionModel, "yolov10n": DetectionModel,
    "yolo11n": DetectionModel, "yolo12n": DetectionModel, "yolo11n-cls": ClassificationModel,
}  # fmt: skip
# Models in which no row of attention can be: they have none
WITHOUT_ATTENTION = ("yolov5n", "yolov8n", "yolov9t")


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name](f"{name}.yaml", verbose=False).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
            torch.nn.init.normal_(module.running_mean, std=0.2)
            torch.nn.init.normal_(module.weight, 1.0, 0.1)
            torch.nn.init.normal_(module.bias, std=0.1)
    return model


def image(side: int = 64) -> torch.Tensor:
    return torch.rand(2, 3, side, side + 32, generator=torch.Generator().manual_seed(1))


def tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    values = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else ()
    return [t for value in values for t in tensors(value)]


def run(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        return tensors(model(x))


def same(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(found) == len(want) and all(map(torch.equal, found, want))


def state(model: Any) -> list[Any]:
    """Classes, and functions that an object has of its own: undo must bring them back."""
    own = (
        [(n, getattr(v, "__func__", None)) for n, v in vars(m).items() if callable(v)]
        for m in model.modules()
    )
    return [(type(m), names) for m, names in zip(model.modules(), own, strict=True)]


@pytest.mark.parametrize("when", ["never", "before", "after"])
@pytest.mark.parametrize("name", MODELS)
def test_model_is_patched_and_undone(name: str, when: str) -> None:
    """`fuse()` comes never, before the patch, or after it, as in the first `predict`."""
    model, x = make(name), image()
    if when == "before":
        model.fuse(verbose=False)
    after = copy.deepcopy(model)
    if when == "after":
        after.fuse(verbose=False)
    report = fastkernels.patch(model, ops=OPS)
    assert report.host.name == "ultralytics"
    if when == "after":
        model.fuse(verbose=False)
    found, want = run(model, x), run(after, x)
    rows = {r.op: r for r in report.refresh().rows if r.modules}
    assert set(rows) == set(OPS[:1] if name in WITHOUT_ATTENTION else OPS)
    for op, row in rows.items():
        assert row.calls > 0 and row.proof == "calls" and not row.fallbacks, (op, row)
    for t, theirs in zip(found, want, strict=True):
        assert float((t - theirs).abs().max()) < 2e-4 * max(1.0, float(theirs.abs().max()))
    report.undo()
    assert state(model) == state(after) and same(run(model, x), want)


def test_fused_layers_call_ours() -> None:
    """A fused layer has a `forward` of its own, which is ours while the patch lasts."""
    model = make("yolov8n").fuse(verbose=False)
    layers = [m for m in model.modules() if type(m) is Conv]
    report = fastkernels.patch(model, ops=OPS)
    assert all(m.forward.__func__ is type(m).forward_fuse is not Conv.forward_fuse for m in layers)
    run(model, image())
    assert sum(r.calls for r in report.refresh().rows) >= len(layers)
    report.undo()
    assert all(m.forward.__func__ is Conv.forward_fuse for m in layers)


@pytest.mark.parametrize("fused", [False, True])
def test_copies_and_unpatch(fused: bool) -> None:
    model, x = make("yolov10n"), image()
    if fused:
        model.fuse(verbose=False)
    want, before = run(model, x), state(model)
    fastkernels.patch(model, ops=OPS)
    copied = copy.deepcopy(model)
    assert state(copied) == before and same(run(copied, x), want)
    fastkernels.unpatch(model)
    assert state(model) == before and same(run(model, x), want)


@pytest.mark.parametrize("make_layer", [
    lambda: Conv(5, 7, (3, 1), 2), lambda: Conv(6, 4, 3, 1, None, 2, 2, torch.nn.ReLU()), lambda: DWConv(8, 12, 5, 2),
    lambda: Conv(4, 4, 1, act=False), lambda: RepVGGDW(6), lambda: Attention(32, 2), lambda: Attention(24, 3, 1.0),
])  # fmt: skip
def test_layer_equals_the_librarys(make_layer: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(make_layer()).eval()
    channels = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d)).in_channels
    x = torch.randn(2, channels, 11, 9)
    with torch.inference_mode():
        want = model(x)
        with fastkernels.patch(model, ops=OPS) as report:
            found = model(x)
            assert sum(r.calls for r in report.refresh().rows) > 0
        assert torch.equal(model(x), want)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_wrong_channels_raise_the_librarys_error(fused: bool) -> None:
    model = make("yolov8n")
    if fused:
        model.fuse(verbose=False)
    with fastkernels.patch(model, ops=OPS), pytest.raises(RuntimeError, match="to have 3 channels"):
        run(model, torch.rand(1, 4, 64, 64))


def test_activation_without_an_op_stays() -> None:
    model = torch.nn.Sequential(Conv(4, 4, 3, act=torch.nn.Softplus()), Conv(4, 4, 3)).eval()
    with fastkernels.patch(model, ops=OPS) as report:
        assert "its activation is Softplus" in str(report)
        assert [type(m) is Conv for m in model] == [True, False]


def test_training_runs_the_librarys_code() -> None:
    model = make("yolov8n").train()
    want = [t.detach().clone() for t in tensors(copy.deepcopy(model)(image()))]
    with fastkernels.patch(model, ops=OPS):
        found = tensors(model(image()))
        assert all(t.requires_grad for t in found) and same([t.detach() for t in found], want)


def test_yolo_object() -> None:
    """The library's own object: `predict` runs a fused copy of its model."""
    yolo = YOLO(
        "yolo11n-cls.yaml", verbose=False
    )  # a detector's `predict` needs compiled operators of torchvision
    picture = (image().numpy()[0] * 255).astype("uint8").transpose(1, 2, 0)

    def scores(model: Any) -> torch.Tensor:
        return model.predict(picture, imgsz=64, verbose=False, device="cpu")[0].probs.data

    with pytest.raises(PatchError, match="call it once with yours"):
        fastkernels.patch(yolo, ops=OPS)
    want = scores(yolo)
    report = fastkernels.patch(yolo, ops=OPS)
    found = scores(yolo)
    rows = {r.op: r for r in report.refresh().rows if r.modules}
    assert rows.keys() == set(OPS) and all(r.calls > 0 for r in rows.values())
    report.undo()
    assert torch.equal(scores(yolo), want)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
