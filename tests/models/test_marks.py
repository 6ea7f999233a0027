"""Points, boxes and masks for SAM 3's tracker against transformers, with its processor before and behind the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import DETECTIONS
from support.detectors import pictures
from support.segmenters import make_sam3, make_sam3_tracker, make_sam3_video

from fastkernels import LLM
from fastkernels.core.dispatch import counters
from fastkernels.engine.objects.rle import coco_rle, compress, expand, from_coco
from fastkernels.engine.sampling.pooling import PoolingParams
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.plans import build

SIZES = (80, 70), (64, 64), (100, 50)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(16, 16)).astype(np.float32)
LARGE = RNG.normal(size=(70, 80)).astype(np.float32)
HUGE = [i // 2 << 38 for i in range(1 << 14)]
MARKS: list[tuple[int, dict[str, Any]]] = [
    (0, {"points": [[3, 4], [20.5, 30]], "point_labels": [1, 0]}),
    (1, {"points": [[63, 63], [0, 0]], "point_labels": [1, 1]}),
    (2, {"box": [10, 5, 90, 44]}),
    (0, {"box": [1, 2, 30, 40], "points": [[5, 5]], "mask": LOGITS}),
    (0, {"mask": LARGE}),
    (1, {"points": [[10, 12]]}),
    (0, {"points": [[10, 12]], "point_labels": [0]}),
]


def theirs(folder: Path, model: Any, image: Any, given: dict[str, Any], several: bool) -> tuple[Any, ...]:
    """(masks in the image's pixels, overlaps, presence) of transformers."""
    import transformers

    processor = transformers.Sam3TrackerProcessor.from_pretrained(folder)
    more: dict[str, Any] = {}
    if "points" in given:
        more["input_points"] = [[given["points"]]]
        more["input_labels"] = [[given.get("point_labels", [1] * len(given["points"]))]]
    if "box" in given:
        more["input_boxes"] = [[given["box"]]]
    made = processor(images=image, return_tensors="pt", **more)
    sizes = made.pop("original_sizes")
    if "mask" in given:
        made["input_masks"] = torch.from_numpy(given["mask"])[None, None]
    with torch.no_grad():
        found = model(**made, multimask_output=several)
    (masks,) = processor.post_process_masks([found.pred_masks[0]], sizes, binarize=False)
    return masks[0].numpy(), found.iou_scores[0, 0].numpy(), found.object_score_logits.sigmoid().item()


def check(llm: LLM, folder: Path, model: Any) -> None:
    """Compare all marks, in one batch, for several masks and for one."""
    images = pictures(*SIZES)
    for several in (True, False):
        params = PoolingParams("segment", multimask_output=several)
        outputs = llm.segment([{"image": images[i], **given} for i, given in MARKS], params, use_tqdm=False)
        for (i, given), output in zip(MARKS, outputs, strict=True):
            logits, overlaps, presence = theirs(folder, model, images[i], given, several)
            order, found = np.argsort(-overlaps, kind="stable"), output.outputs
            np.testing.assert_allclose(found.scores, overlaps[order], atol=DETECTIONS)
            assert abs(found.presence - presence) < DETECTIONS
            want, unsure = logits[order] > 0, np.abs(logits[order]) < DETECTIONS
            assert found.masks.shape == want.shape and not ((found.masks != want) & ~unsure).any()
            assert 0.02 < want.mean() < 0.98
            for mask, box in zip(found.masks, found.boxes, strict=True):
                y, x = mask.nonzero()
                assert box == [x.min(), y.min(), x.max(), y.max()]


@pytest.mark.parametrize(
    ("levels", "decoder"),
    [
        (3, {}),
        (4, {"dynamic_multimask_via_stability": False}),
        (4, {"num_multimask_outputs": 2, "mlp_dim": 40}),
    ],
    ids=["three_levels", "four_levels", "two_masks"],
)
def test_marks_equal_transformers(levels: int, decoder: dict[str, Any], tmp_path: Path) -> None:
    model = make_sam3_tracker(tmp_path, levels, **decoder)
    before, llm = counters(), LLM(str(tmp_path), device="cpu", dtype="float32")
    check(llm, tmp_path, model)
    seen = llm.llm_engine.runner.segmenting.computed
    assert (seen.images, seen.pairs) == (3, 2 * len(MARKS))
    for op in ("rope_nd", "attention_dense", "conv_norm_act", "batched_matmul", "linear_residual"):
        assert counters()[op]["calls"] > before.get(op, {"calls": 0})["calls"], op


def test_video_checkpoint_takes_marks_texts_and_clips(tmp_path: Path) -> None:
    """Marks are those of a Sam3TrackerModel with the same tensors. Texts and marks run in one batch."""
    import transformers

    video = make_sam3_video(tmp_path)
    own, detector = video.config.tracker_config, video.config.detector_config
    tracker = transformers.Sam3TrackerConfig(
        vision_config=detector.vision_config.to_dict(),
        prompt_encoder_config=own.prompt_encoder_config.to_dict(),
        mask_decoder_config=own.mask_decoder_config.to_dict(),
    )
    model = transformers.Sam3TrackerModel(tracker).eval()
    state = {key.removeprefix("tracker_model."): tensor for key, tensor in video.state_dict().items()}
    names = {"detector_model.vision_encoder.backbone": "backbone", "tracker_neck": "neck"}
    for theirs_of, mine in names.items():
        for key in [key for key in state if key.startswith(f"{theirs_of}.")]:
            state[f"vision_encoder.{mine}{key.removeprefix(theirs_of)}"] = state.pop(key)
    model.load_state_dict({key: state[key] for key in model.state_dict()})
    processors = tmp_path / "processors"
    images = transformers.Sam3ImageProcessor(size={"height": 56, "width": 56})
    transformers.Sam3TrackerProcessor(images).save_pretrained(processors)
    llm = LLM(str(tmp_path), device="cpu", dtype="float32")
    check(llm, processors, model)
    (image,), params = pictures((80, 70)), PoolingParams("segment", threshold=0.0)
    marks, text = {"image": image, "points": [[9, 9]]}, {"image": image, "text": "cat"}
    both = llm.segment([marks, text, marks], params, use_tqdm=False)
    alone = [llm.segment(one, params, use_tqdm=False)[0] for one in (marks, text)]
    for one, other in ((both[0], alone[0]), (both[1], alone[1]), (both[2], alone[0])):
        np.testing.assert_allclose(one.outputs.data, other.outputs.data, atol=DETECTIONS)


def test_counts_of_coco_are_read_back() -> None:
    for shape, share in (((1, 1), 0.0), ((7, 5), 0.5), ((3, 40), 0.1), ((40, 3), 1.0), ((300, 2), 0.01)):
        mask = np.random.default_rng(1).random(shape) < share
        flat = np.concatenate(([0], mask.T.ravel(), [2]))
        runs = np.diff(np.flatnonzero(np.diff(flat) != 0), prepend=0).tolist()
        assert expand(compress(runs)).tolist() == runs
        size = shape[::-1]
        assert (from_coco(coco_rle(runs, size), size) == mask).all()


def test_mask_without_a_pixel_has_an_empty_box(tmp_path: Path) -> None:
    make_sam3_tracker(tmp_path)
    llm, (image,) = LLM(str(tmp_path), device="cpu"), pictures((64, 48))
    params = PoolingParams("segment", mask_threshold=1.0)
    (output,) = llm.segment({"image": image, "points": [[3, 4]]}, params, use_tqdm=False)
    assert not output.outputs.masks.any() and output.outputs.boxes == [[0.0] * 4] * 3


def test_mask_can_be_a_tensor_of_any_float_type(tmp_path: Path) -> None:
    make_sam3_tracker(tmp_path)
    llm, (image,) = LLM(str(tmp_path), device="cpu"), pictures((64, 48))
    logits = torch.from_numpy(LOGITS).bfloat16().requires_grad_()
    masks = logits, logits.detach().float().numpy(), logits.detach().float().tolist()
    found = llm.segment([{"image": image, "mask": mask} for mask in masks], use_tqdm=False)
    for one in found[1:]:
        assert one.outputs.scores == pytest.approx(found[0].outputs.scores, abs=1e-5)


def test_wrong_marks_are_refused(tmp_path: Path) -> None:
    make_sam3_tracker(tmp_path / "tracker")
    make_sam3(tmp_path / "sam3")
    llm, (image,) = LLM(str(tmp_path / "tracker"), device="cpu"), pictures((64, 48))
    runs = {"size": [48, 64], "counts": compress([10, 3062])}
    share, rest = divmod((1 << 64) + 3072 - sum(HUGE), len(HUGE))
    overflow = compress(
        [HUGE[0] + share + rest, *(n + share for n in HUGE[1:])]
    )  # the sum is 3072 in 64 bits
    for fields, message in (
        ({}, "points are missing: a prompt has points, a box or a mask"),
        ({"text": "cat"}, "the prompt has the fields text; known are image, points, point_labels, box, mask"),
        ({"points": [1, 2]}, r"points must be a list of \[x, y\] in pixels"),
        ({"points": [[1, float("nan")]]}, "points must be a list"),
        ({"points": [[1, True]]}, "points must be a list"),
        ({"points": [[1, 2]] * 65}, "points has 65 entries, and an object may have 64"),
        ({"points": [[65, 2]]}, r"points\[0\] = \[65, 2\] must have 0 <= x <= 64 and 0 <= y <= 48"),
        ({"points": [[1, 2]], "point_labels": [2]}, "point_labels must be a list of 1, in the object"),
        ({"points": [[1, 2]], "point_labels": []}, "point_labels has 0 entries for 1 points"),
        ({"point_labels": [1]}, "point_labels has 1 entries for 0 points"),
        ({"box": [5, 5, 5, 9]}, r"box = \[5, 5, 5, 9\] must have 0 <= left < right <= 64"),
        ({"box": "all"}, r"box must be \[left, top, right, bottom\] in pixels, got 'all'"),
        ({"mask": [[1, 2]]}, "mask must be an array .* got list of int64"),
        ({"mask": [[1.0, 2.0], [1.0]]}, "mask cannot be an array"),
        ({"mask": torch.zeros(2, 2).int()}, "mask must be an array .* int32"),
        ({"mask": np.zeros((2, 0))}, r"mask must be an array .* float64 \[2, 0\]"),
        ({"mask": np.zeros((1, 9000))}, "mask has 9000 x 1 pixels, and at most 8192 a side"),
        ({"mask": np.full((4, 4), np.nan)}, "mask has values that are infinite or NaN"),
        ({"mask": {"size": [48, 64]}}, "mask must have the fields size and counts"),
        ({"mask": {**runs, "size": [64, 48]}}, r"mask must have size \[48, 64\]"),
        ({"mask": {**runs, "counts": ""}}, "mask has counts that are no runs"),
        ({"mask": {**runs, "counts": "o" * 9 + "0"}}, "mask has counts with a run of more than 40 bits"),
        ({"mask": {**runs, "counts": "é"}}, "mask has counts that are no runs"),
        ({"mask": {**runs, "counts": overflow}}, "mask has counts with a run of less than 0 or more than 3072 pixels"),
        ({"mask": {**runs, "counts": compress([10, 3000])}}, "mask has counts of 3010 pixels, and the image has 3072"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            llm.segment({"image": image, **fields})
    for call, message in (
        (lambda: llm.segment(image), "inputs must be a dict"),
        (lambda: llm.segment([image]), "the prompt must be .*'points'"),
        (lambda: llm.segment({"image": image.resize((5000, 4000)), "box": [0, 0, 9, 9]}), "5000 x 4000 pixels"),
        (lambda: llm.segment({"image": image, "box": [0, 0, 9, 9]}, PoolingParams("segment", semantic=True)),
         "semantic applies to texts"),
        (lambda: llm.segment(video=[image], text="cat"), "takes images only"),
        (lambda: PoolingParams("segment", multimask_output=1), "multimask_output must be True or False"),
        (lambda: PoolingParams("embed", multimask_output=False), "multimask_output belongs to the task 'segment'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    other, text = LLM(str(tmp_path / "sam3"), device="cpu"), {"image": image, "text": "cat"}
    with pytest.raises(ValueError, match="multimask_output applies to points"):
        other.segment(text, PoolingParams("segment", multimask_output=False))


def test_unsupported_tracker_names_the_field(tmp_path: Path) -> None:
    make_sam3_tracker(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    for part, name, value, message in (
        ("vision_config", "scale_factors", [2.0, 1.0, 0.5], "do not begin with"),
        ("mask_decoder_config", "hidden_size", 64, "mask_decoder_config.hidden_size=64 is not"),
        ("mask_decoder_config", "num_attention_heads", 3, "no multiple of its 3 heads"),
        ("prompt_encoder_config", "image_size", 70, "image_size=70 and patch_size=14, and the backbone 56"),
        ("prompt_encoder_config", "hidden_act", "relu", "hidden_act='relu' is not supported"),
        ("prompt_encoder_config", "num_point_embeddings", 2, "num_point_embeddings=2 is less than 4"),
    ):
        file.write_text(json.dumps({**fields, part: {**fields[part], name: value}}))
        with pytest.raises(Unsupported, match=message):
            build.skeleton(tmp_path, build.load_config(tmp_path), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_marks_on_a_gpu_are_those_of_the_cpu(dtype: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The first call is eager, the second captures, the third replays; each has other images and other marks."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make_sam3_tracker(tmp_path)
    cpu = LLM(str(tmp_path), device="cpu", dtype="float32")
    gpu = LLM(str(tmp_path), device="cuda", dtype=dtype)
    atol = 1e-3 if dtype == "float32" else 0.1
    for i in range(3):
        images = pictures((80 + i, 70), (64, 64 + i))
        prompts = [{"image": image, "points": [[5 + i, 9]]} for image in images for _ in range(3)]
        want, found = (llm.segment(prompts, use_tqdm=False) for llm in (cpu, gpu))
        for mine, other in zip(found, want, strict=True):
            np.testing.assert_allclose(sorted(mine.outputs.scores), sorted(other.outputs.scores), atol=atol)
            if dtype == "float32":
                assert (mine.outputs.masks != other.outputs.masks).mean() < 1e-2
    assert gpu.llm_engine.runner.graphs.replays >= 6, "of images, and of four and two marks"
