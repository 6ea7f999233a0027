"""Detectors against transformers' RT-DETRv2, ultralytics' YOLOv10 and its equations, on random weights in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import DETECTIONS
from safetensors.torch import load_file, save_file
from support.detectors import NAMES, Yolo, make_rtdetr, make_yolo, pictures
from support.tiny import make_tiny_encoder

from fastkernels import LLM
from fastkernels.core.dispatch import counters
from fastkernels.engine.inputs.images import decode
from fastkernels.engine.inputs.letterbox import LetterboxProcessor
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs.ultralytics_config import Letterbox
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import model_class, models
from fastkernels.models.common.interfaces.detector import Detector
from fastkernels.models.common.layers import cnn
from fastkernels.models.common.plans import build
from fastkernels.models.vision.yolov10 import read_config
from fastkernels.overrides.conv.spatial import channels_last

SIZES = (80, 70), (64, 64), (100, 50)
OPS = {
    "rtdetrv2": ("conv_norm_act", "deformable_attention", "refine_boxes", "top_k_queries", "attention_dense"),
    "yolov10": ("conv_norm_act", "dfl_boxes", "top_k_queries", "attention_dense"),
}


def loaded(folder: Path) -> Any:
    return build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)


def rtdetr_expected(folder: Path, images: list[Any]) -> list[np.ndarray]:
    import transformers

    model = make_rtdetr(folder)
    processor = transformers.RTDetrImageProcessor.from_pretrained(folder)
    with torch.no_grad():
        found = model(**processor(images=images, return_tensors="pt"))
    sizes = [image.size[::-1] for image in images]
    made = processor.post_process_object_detection(found, 0.0, target_sizes=sizes)
    rows = (torch.cat((m["boxes"], m["scores"][:, None], m["labels"][:, None]), 1) for m in made)
    return [r.numpy() for r in rows]


def yolo_expected(folder: Path, images: list[Any]) -> list[np.ndarray]:
    reference, rows = Yolo(make_yolo(folder)), []
    for image in images:
        made = LetterboxProcessor(Letterbox(64))(image, "pt")
        height, width = made["pixel_values"].shape[2:]
        left, top, wide, high = made["view"]
        found = reference(made["pixel_values"] / 255)[0].numpy()
        for i, (start, size, pixels, most) in enumerate(
            ((left, wide, width, image.width), (top, high, height, image.height))
        ):
            found[:, i:4:2] = (start + found[:, i:4:2] * (size / pixels)).clip(0, most)
        rows.append(found)
    return rows


EXPECTED = {"rtdetrv2": rtdetr_expected, "yolov10": yolo_expected}


def test_every_detector_is_tested() -> None:
    names = {m.name for m in models().values() if m.arch.runner == "Encode" for n in m.arch.names
             if issubclass(model_class(n), Detector)}  # fmt: skip
    assert names == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_detector_equals_reference(name: str, tmp_path: Path) -> None:
    """Boxes, scores and labels of images of three sizes, in a batch and one by one."""
    images = pictures(*SIZES)
    wanted = EXPECTED[name](tmp_path, images)
    before, llm = counters(), LLM(str(tmp_path), device="cpu", dtype="float32")
    together = llm.detect(images, 0.0, use_tqdm=False)
    alone = llm.detect(images[-1], 0.0, use_tqdm=False)
    for output, want, image in zip(
        [*together, *alone], [*wanted, wanted[-1]], [*images, images[-1]], strict=True
    ):
        data = output.outputs.data
        assert data.shape == want.shape and output.outputs.labels == want[:, 5].astype(int).tolist()
        np.testing.assert_allclose(data[:, :4], want[:, :4], atol=DETECTIONS * max(image.size))
        np.testing.assert_allclose(data[:, 4], want[:, 4], atol=DETECTIONS)
    assert np.ptp(wanted[0][:, 4]) > 100 * DETECTIONS, "all scores are nearly the same"
    for op in OPS[name]:
        assert counters()[op]["calls"] > before.get(op, {"calls": 0})["calls"], op
    few = llm.detect(images[0], float(wanted[0][3, 4]) - DETECTIONS, 3, use_tqdm=False)[0].outputs
    assert few.scores == pytest.approx(wanted[0][:3, 4].tolist(), abs=DETECTIONS)
    assert few.label_names == [NAMES[label] for label in few.labels] and few.size == images[0].size


@pytest.mark.parametrize(
    "more",
    [
        {"kind": "bottleneck", "decoder_method": "discrete"},
        {"normalize_before": True, "eval_size": 640, "activation_function": "relu"},
        {"hidden_expansion": 0.5, "decoder_offset_scale": 1.0, "encoder_activation_function": "relu"},
        {"d_model": 16, "decoder_n_points": 2, "decoder_activation_function": "gelu", "encode_proj_layers": [1, 2]},
    ],
    ids=["discrete", "before", "narrow", "levels"],
)  # fmt: skip
@torch.no_grad()
def test_fields_of_rtdetr_change_the_model_as_in_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    model = make_rtdetr(tmp_path, **more)
    images = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    want, (logits, boxes) = model(images), loaded(tmp_path).model(images)
    torch.testing.assert_close(logits, want.logits, atol=DETECTIONS, rtol=0)
    torch.testing.assert_close(boxes, want.pred_boxes, atol=DETECTIONS, rtol=0)


def test_repeated_heads_of_a_checkpoint_are_read_once(tmp_path: Path) -> None:
    """Checkpoints of older versions of transformers have the heads under two names, or only under the other one."""
    make_rtdetr(tmp_path)
    file, images = tmp_path / "model.safetensors", torch.randn(1, 3, 64, 96)
    state, want = load_file(file), loaded(tmp_path).model(images)
    heads = {
        k: k.removeprefix("model.decoder.") for k in state if "decoder.class_embed" in k or "bbox_embed" in k
    }
    assert len(heads) > 4
    for keep in (True, False):
        kept = {k: t for k, t in state.items() if keep or k not in heads}
        save_file({**kept, **{new: state[k].clone() for k, new in heads.items()}}, file)
        torch.testing.assert_close(loaded(tmp_path).model(images), want, atol=0, rtol=0)


@pytest.mark.parametrize("scale", ["s", *(pytest.param(s, marks=pytest.mark.slow) for s in "mblx")])
@torch.no_grad()
def test_scales_of_yolo_equal_their_equations(scale: str, tmp_path: Path) -> None:
    state = make_yolo(tmp_path, scale, prefix="model.")  # as in files of the hub
    images = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    want, found = Yolo(state)(images), loaded(tmp_path).detect(images)
    torch.testing.assert_close(found[..., 4:], want[..., 4:], atol=DETECTIONS, rtol=0)
    sides = torch.tensor([96.0, 64.0, 96.0, 64.0])
    torch.testing.assert_close(found[..., :4], want[..., :4] / sides, atol=DETECTIONS, rtol=0)


@pytest.mark.parametrize("scale", ["n", "s", *(pytest.param(s, marks=pytest.mark.slow) for s in "mblx")])
@torch.no_grad()
def test_yolo_equals_ultralytics_fused_or_not(scale: str, tmp_path: Path) -> None:
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    state = make_yolo(tmp_path, scale)
    model = tasks.DetectionModel(f"yolov10{scale}.yaml", ch=3, nc=4, verbose=False).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    left_out = ("model.23.cv2.", "model.23.cv3.", "model.23.dfl.")
    assert not unexpected and all(k.startswith(left_out) or "num_batches" in k for k in missing)
    model.model[-1].end2end = True
    images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    want, sides = model(images)[0], torch.tensor([96.0, 64.0, 96.0, 64.0])
    for made in (model, model.fuse(verbose=False)):
        save_file({k: t.clone() for k, t in made.state_dict().items()}, tmp_path / "model.safetensors")
        found = loaded(tmp_path).detect(images)
        torch.testing.assert_close(found[..., 4:], want[..., 4:], atol=DETECTIONS, rtol=0)
        torch.testing.assert_close(found[..., :4], want[..., :4] / sides, atol=DETECTIONS, rtol=0)


@pytest.mark.parametrize("size", [(640, 480), (50, 100), (64, 64), (1, 200), (129, 77)])
def test_letterbox_shows_the_whole_image(size: tuple[int, int]) -> None:
    made = LetterboxProcessor(Letterbox(96))(pictures(size)[0], "pt")
    height, width = made["pixel_values"].shape[2:]
    left, top, wide, high = made["view"]
    assert max(height, width) == 96 and height % 32 == width % 32 == 0
    assert left <= 0 and top <= 0 and left + wide >= size[0] * 0.99 and top + high >= size[1] * 0.99
    assert wide / width == pytest.approx(high / height)  # one scale
    margin = 96 * min(size) < 64 * max(size) * 0.9
    assert not margin or made["pixel_values"][0, :, 0, 0].tolist() == [114] * 3


def test_other_tasks_and_inputs_are_refused(tmp_path: Path) -> None:
    make_yolo(tmp_path)
    llm, (image,) = LLM(str(tmp_path), device="cpu"), pictures((64, 64))
    for call, message in (
        (lambda: llm.embed([image]), "task 'embed' is not available: .* is for the task 'detect' only"),
        (lambda: llm.detect(["a text"]), "the prompt must be a PIL image, got str"),
        (lambda: llm.detect(None), "the prompt must be a PIL image, got NoneType"),
        (lambda: llm.detect(image, 1.5), "threshold must be a number from 0 to 1, got 1.5"),
        (lambda: llm.detect(image, 0.5, 0), "max_detections must be an integer, at least 1, got 0"),
        (
            lambda: llm.generate(["a"]),
            r"generate: [^ ]+ is for LLM.detect and /v1/detections$",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    make_rtdetr(tmp_path / "few", num_queries=200)
    fields = json.loads((tmp_path / "few" / "config.json").read_text())
    (tmp_path / "negative").mkdir()
    (tmp_path / "negative" / "config.json").write_text(json.dumps({**fields, "decoder_ffn_dim": -1}))
    with pytest.raises(
        Unsupported, match=r"config\.decoder_ffn_dim=-1 is not supported, only one integer above"
    ):
        LLM(str(tmp_path / "negative"), device="cpu", load_format="dummy")
    with pytest.raises(
        ValueError, match=r"96 x 64 pixels for the model, has 126 cells, and config\.num_queries is 200"
    ):
        LLM(str(tmp_path / "few"), device="cpu").detect(image)
    plain = make_tiny_encoder(tmp_path / "dinov3", "dinov3")
    with pytest.raises(ValueError, match=r"task 'detect' is not available: .* detects no objects"):
        LLM(str(plain), device="cpu").detect(image)


def test_images_of_too_many_pixels_are_refused_before_decoding() -> None:
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    with pytest.raises(ValueError, match="pixels"):
        decode(head + bytes(4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "yolov10z.yaml"}, "model='yolov10z.yaml' is not supported, only yolov10n.yaml, "),
        ({"task": "segment"}, "task='segment' is not supported, only 'detect'"),
        ({"names": {"1": "cat"}}, "names={'1': 'cat'} must name each class, from 0 on"),
        ({"names": 4}, "names=4 must name each class"),
        ({"imgsz": 100}, "imgsz=100 must be a multiple of 32 from 32 to 8192"),
        ({"imgsz": True}, "imgsz=True must be a multiple"),
    ],
)
def test_wrong_config_of_yolo_names_the_field(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model": "yolov10n.yaml", "names": NAMES, **fields}))
    with pytest.raises(CheckpointError) as error:
        build.load_config(tmp_path)
    assert message in str(error.value) and "config.json" in str(error.value)


def test_yolo_without_its_one_to_one_head_is_refused_by_name(tmp_path: Path) -> None:
    state = make_yolo(tmp_path)
    save_file({k: t for k, t in state.items() if "one2one" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"keys missing from it: .*model\.23\.one2one_cv2"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learn_initial_query": True}, "config.learn_initial_query=True"),
        ({"decoder_method": "nearest"}, "config.decoder_method='nearest' is not 'default' or 'discrete'"),
        ({"num_feature_levels": 4}, "config.num_feature_levels=4 is not supported"),
        (
            {"activation_function": "mish"},
            "config.activation_function='mish' is not supported, only None, relu",
        ),
        ({"decoder_attention_heads": 5}, "config.d_model=32 is no multiple of decoder_attention_heads"),
    ],
)
def test_unsupported_rtdetr_names_the_field(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_rtdetr(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(Unsupported) as error:
        build.skeleton(tmp_path, build.load_config(tmp_path), torch.float32)
    assert message in str(error.value)


def test_defaults_of_a_config_are_yolov10n_for_coco() -> None:
    found = read_config({})
    assert found["scale"] == "n" and len(found["names"]) == 80 and found["imgsz"] == 640


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_graphs_on_a_gpu_give_the_boxes_of_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # on by default
    images = pictures(*SIZES)
    wanted = EXPECTED[name](tmp_path, images)
    llm = LLM(str(tmp_path), dtype="float32")
    for _ in range(3):  # eager, captured, replayed
        found = llm.detect(images, 0.0, use_tqdm=False)
    assert llm.llm_engine.runner.graphs.replays > 0
    for output, want, image in zip(found, wanted, images, strict=True):
        data = output.outputs.data
        np.testing.assert_allclose(data[:, 4], want[:, 4], atol=1e-3)
        same = np.array(output.outputs.labels) == want[:, 5]
        assert same.mean() > 0.9  # near scores may change places
        near = np.abs(data[:, :4] - want[:, :4]).max(1) < 5e-3 * max(image.size)
        assert near.mean() > 0.9


@pytest.mark.parametrize("make", [make_yolo, make_rtdetr])
def test_images_keep_their_channels_last(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also parts of their channels: other convolutions take two to four times as long (H200)."""
    make(tmp_path)
    seen: list[bool] = []
    convolve = cnn.convolve

    def checked(x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        made = convolve(x, *rest, **more)
        seen.extend(channels_last(t) or t.shape[2:] == (1, 1) for t in (x, made))
        return made

    monkeypatch.setattr(cnn, "convolve", checked)
    images = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    with torch.no_grad():
        loaded(tmp_path).detect(images)
    assert len(seen) > 40 and all(seen)
