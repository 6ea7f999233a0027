"""Clips of SAM 3 against transformers, on random weights in float32, with its processor before and behind the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.segmenters import frames_of, make_sam3_video, mask_of

from fastkernels import LLM
from fastkernels.core.dispatch import counters

TEXTS = ["cat", "red ball"]
MASKS = 1e-4  # the largest difference of logits; their standard deviation is about 1


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
        np.testing.assert_allclose(frame.scores, theirs["scores"], atol=1e-4)
        masks = theirs["masks"].numpy()
        assert frame.masks.shape == masks.shape and (frame.masks != masks).sum() <= masks.size / 1000
        np.testing.assert_allclose(np.reshape(frame.boxes, (-1, 4)), theirs["boxes"].numpy(), atol=1)
        assert all((mask_of(rle) == mask).all() for rle, mask in zip(frame.rles, frame.masks, strict=True))
    assert shown and (name != "removed" or removed)
    for op in ("memory_attention", "rope_nd", "attention_dense", "conv_norm_act", "batched_matmul"):
        assert counters()[op]["calls"] > before.get(op, {"calls": 0})["calls"], op
