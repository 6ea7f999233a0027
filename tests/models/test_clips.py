"""Clips of SAM 3 against transformers, on random weights in float32, with its processor before and behind the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import DETECTIONS
from support.segmenters import TRACKER, config, frames_of, make_sam3_video, mask_of

from fastkernels import LLM
from fastkernels.core.dispatch import counters
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces import tracks

TEXTS = ["cat", "red ball"]


class Kernels:
    """The functions of cv-utils that transformers loads from the Hub, by their meaning."""

    def generic_nms(self, ious: Any, scores: Any, most: float, use_iou_matrix: bool) -> Any:
        kept: list[int] = []
        for i in scores.argsort(descending=True).tolist():
            if all(ious[i, j] <= most for j in kept):
                kept.append(i)
        return torch.tensor(kept)

    def cc_2d(self, masks: Any, get_counts: bool) -> Any:
        labels, counts = (torch.zeros_like(masks, dtype=torch.int32) for _ in range(2))
        for n, (mask,) in enumerate(masks):
            seen: set[tuple[int, int]] = set()
            for start in map(tuple, mask.nonzero().tolist()):
                part, ahead = [], [] if start in seen else [start]
                while ahead:
                    y, x = ahead.pop()
                    inside = 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1] and bool(mask[y, x])
                    if inside and (y, x) not in seen:
                        seen.add((y, x))
                        part.append((y, x))
                        ahead += [(y + a, x + b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
                for y, x in part:
                    counts[n, 0, y, x], labels[n, 0, y, x] = len(part), 1 + min(part)[0] * mask.shape[1]
        return labels, counts


def reference(folder: Path, model: Any, frames: list[Any], texts: list[str]) -> tuple[list[Any], list[Any]]:
    """(outputs of the model, outputs of the processor) of each frame."""
    import transformers

    processor = transformers.Sam3VideoProcessor.from_pretrained(folder)
    session = processor.init_video_session(video=frames)
    processor.add_text_prompt(session, texts)
    with torch.compiler.set_stance("force_eager"):
        raw = list(model.propagate_in_video_iterator(session))
    return raw, [processor.postprocess_outputs(session, one) for one in raw]


SURE = {"high_conf_thresh": 0.2, "high_iou_thresh": 0.0, "recondition_every_nth_frame": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (5, {"hotstart_dup_thresh": 15, "hotstart_unmatch_thresh": 15, "det_nms_thresh": 0.9}),
    "removed": (8, {"hotstart_dup_thresh": 3, "hotstart_unmatch_thresh": 3, "det_nms_thresh": 0.8}),
    "specks": (5, {"fill_hole_area": 6, "det_nms_thresh": 0.5, "new_det_thresh": 0.2, "max_num_objects": 3}),
    "confirmed": (5, {**SURE, "det_nms_thresh": 0.5, "tracker": {"max_cond_frame_num": 2}}),
    "corrected": (5, {**SURE, "det_nms_thresh": 0.5, "recondition_on_trk_masks": False,
                      "suppress_overlapping_based_on_recent_occlusion_threshold": 0.1}),
    "single_mask": (4, {"det_nms_thresh": 0.5, "hotstart_delay": 0, "hotstart_unmatch_thresh": 2,
                        "suppress_unmatched_only_within_hotstart": False, "init_trk_keep_alive": 1,
                        "decrease_trk_keep_alive_for_empty_masklets": True, "tracker": {
                            "multimask_output_for_tracking": False, "enable_occlusion_spatial_embedding": False,
                            "enable_temporal_pos_encoding_for_object_pointers": False}}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "plain")]
)
def test_masks_of_clips_equal_transformers(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Numbers, masks, boxes and scores of all objects in all frames."""
    from transformers.models.sam3_video import modeling_sam3_video

    monkeypatch.setattr(modeling_sam3_video, "cv_utils_kernel", Kernels())
    count, rules = CASES[name]
    model, frames = make_sam3_video(tmp_path, **rules), frames_of(count)
    raw, want = reference(tmp_path, model, frames, TEXTS)
    before, llm = counters(), LLM(str(tmp_path), device="cpu", dtype="float32")
    (output,) = llm.segment(video=frames, text=TEXTS, use_tqdm=False)
    found = output.outputs
    assert found.texts == TEXTS and found.size == (64, 48) and len(found.frames) == count
    removed, shown = set(), 0
    for frame, one, theirs in zip(found.frames, raw, want, strict=True):
        gone, removed = one.removed_obj_ids - removed, set(one.removed_obj_ids)
        assert frame.object_ids == theirs["object_ids"].tolist(), one.frame_idx
        names = {i: text for text, numbers in theirs["prompt_to_obj_ids"].items() for i in numbers}
        assert frame.labels == [names[i] for i in frame.object_ids]
        if gone:  # transformers gives the masks of the objects before the removal to those after it
            continue
        shown += len(frame.object_ids)
        np.testing.assert_allclose(frame.scores, theirs["scores"], atol=DETECTIONS)
        masks = theirs["masks"].numpy()
        assert frame.masks.shape == masks.shape and (frame.masks != masks).sum() <= masks.size / 1000
        np.testing.assert_allclose(np.reshape(frame.boxes, (-1, 4)), theirs["boxes"].numpy(), atol=1)
        assert all((mask_of(rle) == mask).all() for rle, mask in zip(frame.rles, frame.masks, strict=True))
    assert shown and (name != "removed" or removed)
    for op in ("memory_attention", "rope_nd", "attention_dense", "conv_norm_act", "batched_matmul"):
        assert counters()[op]["calls"] > before.get(op, {"calls": 0})["calls"], op


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clips_on_a_gpu_are_those_of_the_cpu(dtype: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Twice: the second time, the backbone and the detector replay CUDA graphs."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make_sam3_video(tmp_path, **CASES["plain"][1])
    frames, found = frames_of(9), []
    for device, kind in (("cpu", "float32"), ("cuda", dtype)):
        with LLM(str(tmp_path), device=device, dtype=kind) as llm:
            found += [llm.segment(video=frames, text=TEXTS, use_tqdm=False)[0].outputs for _ in range(2)]
            if device == "cuda":
                assert llm.llm_engine.runner.graphs.replays
    want, _, *rest = found
    for output in rest:
        assert len(output.frames) == 9
        if dtype == "float32":
            for mine, theirs in zip(output.frames, want.frames, strict=True):
                assert mine.object_ids == theirs.object_ids
                assert (mine.masks != theirs.masks).sum() <= theirs.masks.size / 100


@pytest.mark.parametrize(("most", "shape"), [(1, (5, 7)), (4, (16, 16)), (9, (1, 30)), (30, (12, 3))])
def test_specks_are_removed_as_by_their_meaning(most: int, shape: tuple[int, int], monkeypatch: Any) -> None:
    """Against transformers' function with connected parts that are found one by one."""
    from transformers.models.sam3_video import modeling_sam3_video

    monkeypatch.setattr(modeling_sam3_video, "cv_utils_kernel", Kernels())
    masks = torch.randn(6, 1, *shape, generator=torch.Generator().manual_seed(most))
    want = modeling_sam3_video.fill_holes_in_mask_scores(masks.clone(), most)
    assert torch.equal(tracks.without_specks(masks[:, 0], most), want[:, 0]) and not torch.equal(want, masks)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_attention_hidden_size": 64}, "memory_attention_hidden_size=64 is not vision_config"),
        ({"memory_attention_rope_feat_sizes": [3, 4]}, r"rope_feat_sizes=\[3, 4\] are not"),
        ({"memory_attention_num_attention_heads": 3}, "no multiple of its 3 heads"),
        ({"memory_fuser_hidden_act": "mish"}, "memory_fuser_hidden_act='mish' is not supported"),
        ({"max_object_pointers_in_encoder": 1}, "max_object_pointers_in_encoder=1 is not supported, only 2 to 1024"),
        ({"mask_downsampler_total_stride": 8}, "mask_downsampler_total_stride=8 is not 16"),
    ],
)  # fmt: skip
def test_unsupported_trackers_name_the_field(fields: dict[str, Any], message: str) -> None:
    import transformers

    from fastkernels.models.vision.sam3_video import check

    detector = config(vision={"fpn_hidden_size": 128})
    prompts = {"hidden_size": 128, "image_size": 56, "patch_size": 14}
    own = {
        **TRACKER, "vision_config": detector.vision_config.to_dict(), "prompt_encoder_config": prompts,
        "mask_decoder_config": {"hidden_size": 128},
    }  # fmt: skip
    made = transformers.Sam3VideoConfig(detector_config=detector.to_dict(), tracker_config=own)
    check(made)
    for name, value in fields.items():
        setattr(made.tracker_config, name, value)
    with pytest.raises(Unsupported, match=message):
        check(made)
