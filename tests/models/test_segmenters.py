"""SAM 3 against transformers, on random weights in float32, with its processor before and behind the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import DETECTIONS
from safetensors.torch import load_file, save_file
from support.detectors import pictures
from support.segmenters import make_sam3, make_sam3_video, mask_of
from support.tiny import make_tiny_encoder

from fastkernels import LLM
from fastkernels.core.dispatch import counters
from fastkernels.engine.execution.runners.segmenting import runs_of
from fastkernels.engine.objects.rle import coco_rle, compress, decode_runs
from fastkernels.engine.sampling.pooling import PoolingParams
from fastkernels.models.common.checkpoints import weights
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import find
from fastkernels.models.common.interfaces.segmenter import NO_BOX, Segmenter
from fastkernels.models.common.layers.cnn import Folded
from fastkernels.models.common.plans import build

SIZES = (80, 70), (64, 64), (100, 50)
OPS = (
    "rope_nd", "attention_dense", "linear_gelu", "linear_residual", "layer_norm", "conv_norm_act", "roi_align",
    "box_position_bias", "grid_bias_attention", "refine_boxes", "group_norm", "batched_matmul",
)  # fmt: skip
IDS = torch.tensor([[0, 3, 4, 1, 1, 1, 1, 1], [0, 5, 6, 7, 8, 1, 1, 1]])
KNOWN = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]])
BOXES = torch.tensor([[[0.5, 0.5, 0.4, 0.3], [0.2, 0.3, 0.2, 0.2]], [[0.6, 0.4, 0.5, 0.7], [0, 0, 0, 0]]])
LABELS = torch.tensor([[1, 0], [1, -10]])  # -10 fills a row, for transformers


def loaded(folder: Path) -> Any:
    return build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)


def patches(images: torch.Tensor, p: int = 14) -> torch.Tensor:
    side = images.shape[2] // p
    return (
        images.unflatten(3, (side, p))
        .unflatten(2, (side, p))
        .permute(0, 2, 4, 1, 3, 5)
        .flatten(3)
        .flatten(1, 2)
    )


def uncompiled() -> Any:
    """torchvision compiles its roi_align where its C++ library does not fit PyTorch: that takes 20 s."""
    return torch.compiler.set_stance("force_eager")


def check(ours: Segmenter, model: Any, side: int, boxes: bool) -> None:
    """Compare all outputs of two images with prompts of different lengths."""
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    more = {"input_boxes": BOXES, "input_boxes_labels": LABELS} if boxes else {}
    own = (BOXES, LABELS.where(LABELS >= 0, NO_BOX)) if boxes else ()
    with torch.no_grad(), uncompiled():
        want = model(pixel_values=images, input_ids=IDS, attention_mask=KNOWN, **more)
        found = ours.segment(ours.see(patches(images)), ours.read(IDS), KNOWN.bool(), *own)
    for name, mine, theirs in (
        ("logits", found.logits, want.pred_logits),
        ("presence", found.presence, want.presence_logits),
        ("boxes", found.boxes, want.pred_boxes),
        ("masks", found.masks, want.pred_masks),
        ("semantic", found.semantic, want.semantic_seg[:, 0]),
    ):
        torch.testing.assert_close(
            mine, theirs, atol=DETECTIONS, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert theirs.std() > (1 if name == "presence" else 100) * DETECTIONS, name


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"backbone": {"image_size": 70, "num_hidden_layers": 4, "global_attn_indexes": [0, 2]}},
        {"backbone": {"image_size": 84, "window_size": 3, "pretrain_image_size": 84, "rope_parameters":
                      {"rope_type": "axial", "rope_theta": 100.0}, "hidden_act": "quick_gelu"}},
        {"backbone": {"image_size": 42, "window_size": 4, "pretrain_image_size": 56}, "text":
         {"hidden_act": "quick_gelu"}, "decoder": {"num_queries": 1, "num_layers": 1, "num_attention_heads": 4}},
        {"vision": {"scale_factors": [2.0, 1.0, 0.5, 4.0]}, "masks": {"num_upsampling_stages": 2},
         "encoder": {"num_layers": 1, "hidden_act": "gelu"}, "geometry": {"roi_size": 7, "num_layers": 1}},
        {"vision": {"scale_factors": [4.0, 1.0, 0.5]}, "decoder": {"num_queries": 33}, "backbone":
         {"num_channels": 3, "intermediate_size": 40, "global_attn_indexes": [0, 1, 2]}},
    ],
    ids=["plain", "padded_windows", "theta", "window_over_image", "levels", "global"],
)  # fmt: skip
def test_outputs_equal_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    model, ours = make_sam3(tmp_path, **more), loaded(tmp_path)
    side = more.get("backbone", {}).get("image_size", 56)
    for boxes in (False, True):
        check(ours, model, side, boxes)


def test_segment_equals_transformers_with_its_processor(tmp_path: Path) -> None:
    """Boxes, scores and masks in the image's pixels, of one batch and one by one; features of an image are shared."""
    import transformers

    model = make_sam3(tmp_path)
    processor, images = transformers.Sam3Processor.from_pretrained(tmp_path), pictures(*SIZES)
    asked = [(0, "black cat", None, None), (1, "dog", [[3, 4, 30, 40]], [1]), (2, "a red ball", None, None),
             (0, None, [[1, 2, 20, 30], [5, 5, 60, 70]], [1, 0]), (0, "dog", None, None)]  # fmt: skip
    prompts: list[dict[str, Any]] = [
        {"image": images[i], "text": text, "boxes": boxes, "box_labels": labels}
        for i, text, boxes, labels in asked
    ]
    before, llm = counters(), LLM(str(tmp_path), device="cpu", dtype="float32")
    params = PoolingParams("segment", threshold=0.02, mask_threshold=0.4, semantic=True)
    together = llm.segment(prompts, params, use_tqdm=False)
    alone = llm.segment(prompts[3], params, use_tqdm=False)
    seen = llm.llm_engine.runner.segmenting.computed
    assert (seen.images, seen.texts, seen.pairs) == (3, 4, 6)
    for output, (i, text, boxes, labels) in zip([*together, *alone], [*asked, asked[3]], strict=True):
        image, found = images[i], output.outputs
        given = {} if boxes is None else {"input_boxes": [boxes], "input_boxes_labels": [labels]}
        made = processor(images=image, text=text, return_tensors="pt", **given)
        with torch.no_grad(), uncompiled():
            raw = model(**{k: v for k, v in made.items() if k != "original_sizes"})
        size = [image.size[::-1]]
        (want,) = processor.post_process_instance_segmentation(raw, 0.02, 0.4, size)
        (semantic,) = processor.post_process_semantic_segmentation(raw, size, 0.4)
        order = want["scores"].argsort(descending=True)
        assert len(order) and found.text == (text or "visual") and found.size == image.size
        np.testing.assert_allclose(found.scores, want["scores"][order], atol=DETECTIONS)
        np.testing.assert_allclose(found.boxes, want["boxes"][order], atol=DETECTIONS * max(image.size))
        masks = want["masks"][order].numpy().astype(bool)
        assert found.masks.shape == masks.shape and (found.masks != masks).mean() < 1e-4
        assert (
            (found.semantic != semantic.numpy().astype(bool)).mean() < 1e-3
            and masks.any()
            and not masks.all()
        )
    for op in OPS:
        assert counters()[op]["calls"] > before.get(op, {"calls": 0})["calls"], op
    best = PoolingParams("segment", threshold=0, max_detections=2, masks=False)
    (few,) = llm.segment(prompts[0], best, use_tqdm=False)
    assert few.outputs.masks is None and few.outputs.scores == pytest.approx(
        together[0].outputs.scores[:2], abs=1e-5
    )


def test_features_of_an_image_are_dropped_and_computed_again(tmp_path: Path) -> None:
    make_sam3(tmp_path)
    llm, (image,) = LLM(str(tmp_path), device="cpu"), pictures((60, 60))
    prompt, params = {"image": image, "text": "cat"}, PoolingParams("segment", threshold=0, masks=False)
    (first,) = llm.segment(prompt, params, use_tqdm=False)
    assert llm.llm_engine.runner.segmenting.computed.images == 1
    llm.llm_engine.runner.capture()  # as after a patch
    running = llm.llm_engine.runner.segmenting
    (again,) = llm.segment(prompt, params, use_tqdm=False)
    assert running.computed.images == 1 and again.outputs.data.tolist() == first.outputs.data.tolist()
    many = pictures(*((40 + i, 50) for i in range(18)))
    llm.segment([{"image": one, "text": "cat"} for one in many], params, use_tqdm=False)
    assert len(running._images) == 16 and running.computed.images == 19


def test_video_checkpoint_finds_objects_in_images(tmp_path: Path) -> None:
    """The public checkpoint is one of Sam3VideoModel: images are the detector's."""
    model = make_sam3_video(tmp_path)
    check(loaded(tmp_path), model.detector_model, 56, True)


def test_video_checkpoint_without_its_tracker_is_refused(tmp_path: Path) -> None:
    make_sam3_video(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {key: tensor for key, tensor in load_file(file).items() if not key.startswith("tracker_model.")}
    save_file(state, file)
    with pytest.raises(CheckpointError, match=r"keys missing from it: tracker_model\.mask_decoder"):
        loaded(tmp_path)


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (3, 40), (40, 3)])
def test_runs_are_those_of_coco(shape: tuple[int, int]) -> None:
    rng, (height, width) = np.random.default_rng(0), shape
    for share in (0.0, 0.1, 0.5, 1.0):
        mask = rng.random(shape) < share
        (runs,) = runs_of(torch.from_numpy(mask).float()[None] * 20 - 10, (width, height), 0.5)
        assert sum(runs) == mask.size and (decode_runs(runs, height, width) == mask).all()
        rle = coco_rle(runs, (width, height))
        assert (mask_of(rle) == mask).all()


def test_long_runs_keep_their_lengths() -> None:
    runs = [0, 70_000, 3, 1, 90_000, 17, 2, 900_000, 31, 32, 33]
    size = [1, sum(runs)]
    assert (mask_of({"size": size, "counts": compress(runs)}) == decode_runs(runs, *size)).all()


def test_wrong_prompts_are_refused(tmp_path: Path) -> None:
    make_sam3(tmp_path)
    llm, (image,) = LLM(str(tmp_path), device="cpu"), pictures((64, 48))
    for prompt, message in (
        ({"text": "cat"}, "the prompt must be {'image': a PIL image"),
        (["cat"], "the prompt must be .* got str"),
        ({"image": image}, "text is missing: a prompt has a text, boxes, or both"),
        ({"image": image, "text": 3}, "text must be a text, not empty, got 3"),
        ({"image": image, "text": "cat dog " * 19}, "text has 40 tokens, and this model reads at most 32"),
        ({"image": image, "text": "cat", "points": []}, "the prompt has the fields points; known are image"),
        ({"image": image, "prompt_token_ids": [99]}, "prompt_token_ids must be integers from 0 to 15"),
        ({"image": image, "text": "a", "prompt_token_ids": [1]}, "text and prompt_token_ids are both given"),
        ({"image": image, "boxes": [[0, 0, 65, 3]]}, r"boxes\[0\] = .* right <= 64"),
        ({"image": image, "boxes": [[0, float("nan"), 6, 3]]}, "boxes"),
        ({"image": image, "boxes": "all"}, "boxes must be a list of"),
        ({"image": image, "boxes": [[0, 0, 4, 4]], "box_labels": [2]}, "box_labels must be a list of 1"),
        ({"image": image, "text": "cat", "box_labels": [1]}, "box_labels has 1 entries for 0 boxes"),
        ({"image": image.resize((5000, 4000)), "text": "cat"}, "5000 x 4000 pixels, and masks are made of images"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            llm.segment(prompt)
    for call, message in (
        (lambda: llm.embed([image]), "task 'embed' is not available: .* is for the task 'segment' only"),
        (lambda: llm.segment(image), "segment: inputs must be a dict or a list of dicts"),
        (lambda: llm.generate(["a"]), r"generate: [^ ]+ is for LLM.segment and /v1/segmentations$"),
        (lambda: PoolingParams("segment", mask_threshold=2), "mask_threshold must be a number from 0 to 1"),
        (lambda: PoolingParams("embed", semantic=True), "semantic belongs to the task 'segment'"),
        (lambda: PoolingParams("segment", masks=1), "masks must be True or False"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    plain = make_tiny_encoder(tmp_path / "dinov3", "dinov3")
    with pytest.raises(ValueError, match="finds no objects that a prompt names"):
        LLM(str(plain), device="cpu").segment({"image": image, "text": "cat"})


def test_images_of_another_size_for_the_model_are_refused(tmp_path: Path) -> None:
    make_sam3(tmp_path)
    file = tmp_path / "processor_config.json"
    fields = json.loads(file.read_text())
    fields["image_processor"]["size"] = {"height": 70, "width": 70}
    file.write_text(json.dumps(fields))
    with pytest.raises(
        ValueError, match="70 x 70 pixels after the image processor, and this model takes 56 x 56"
    ):
        LLM(str(tmp_path), device="cpu").segment({"image": pictures((64, 48))[0], "text": "cat"})


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        (
            "detr_encoder_config",
            {"hidden_size": 32},
            "detr_encoder_config.hidden_size=32 is not vision_config",
        ),
        (
            "detr_decoder_config",
            {"num_attention_heads": 3},
            "hidden_size=16 of sam3_detr_decoder is no multiple",
        ),
        ("geometry_encoder_config", {"hidden_act": "mish"}, "hidden_act='mish' of sam3_geometry_encoder"),
        ("text_config", {"num_attention_heads": 5}, "multiple of the number of attention heads (5)"),
        ("mask_decoder_config", {"num_upsampling_stages": 1}, "num_upsampling_stages=1 is fewer than the 2"),
        ("vision_config", {"scale_factors": [3.0, 1.0]}, "scale_factors=[3.0, 1.0] are not two or more of"),
    ],
)
def test_unsupported_config_names_the_field(
    part: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_sam3(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config[part] |= fields
    file.write_text(json.dumps(config))
    with pytest.raises((Unsupported, CheckpointError)) as error:
        build.skeleton(tmp_path, build.load_config(tmp_path), torch.float32)
    assert message in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_a_gpu_give_the_masks_of_the_cpu(dtype: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The first call is eager, the second captures, the third replays; each has other images and other texts."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make_sam3(tmp_path)
    params = PoolingParams("segment", threshold=0, mask_threshold=0.5)
    cpu = LLM(str(tmp_path), device="cpu", dtype="float32")
    gpu = LLM(str(tmp_path), device="cuda", dtype=dtype)
    atol = 1e-3 if dtype == "float32" else 0.1
    for i, text in enumerate(("black cat", "dog", "a red ball")):
        images = pictures((80 + i, 70), (64, 64 + i))
        prompts = [{"image": image, "text": text, "boxes": [[1, 2, 30, 40]]} for image in images]
        want, found = (llm.segment(prompts, params, use_tqdm=False) for llm in (cpu, gpu))
        for mine, theirs in zip(found, want, strict=True):
            np.testing.assert_allclose(mine.outputs.scores, theirs.outputs.scores, atol=atol)
            if dtype == "float32":
                np.testing.assert_allclose(mine.outputs.boxes, theirs.outputs.boxes, atol=atol * 80)
                assert (mine.outputs.masks != theirs.outputs.masks).mean() < 1e-2
    graphs = gpu.llm_engine.runner.graphs
    assert len(graphs) == 3 and graphs.replays == 6, "three graphs: of images, of texts, and of pairs"


@pytest.mark.slow  # modules of the real size, without memory
@torch.no_grad()
def test_real_sizes_have_the_names_of_transformers(tmp_path: Path) -> None:
    import transformers

    fields = {"model_type": "sam3", "architectures": ["Sam3Model"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = build.load_config(tmp_path)
    ours = build.skeleton(tmp_path, config, torch.bfloat16)
    with torch.device("meta"):
        state = transformers.Sam3Model(transformers.Sam3Config()).state_dict()
    tensors = [(tmp_path, key, lambda t=tensor: t) for key, tensor in state.items()]
    weights.fill(ours, tensors, find("Sam3Model").arch, config, tmp_path)
    for module in list(ours.modules()):
        if isinstance(module, Folded):
            module.merge()
    with torch.device("meta"):
        ids, boxes = torch.empty(2, 32, dtype=torch.int64), torch.empty(2, 4, 4)
        found = ours.segment(
            ours.see(torch.empty(2, 72 * 72, 588)), ours.read(ids), ids.bool(), boxes, ids[:, :4]
        )
    assert found.masks.shape == (2, 200, 288, 288) and found.semantic.shape == (2, 288, 288)
    assert found.boxes.shape == (2, 200, 4) and found.masks.dtype == torch.bfloat16
