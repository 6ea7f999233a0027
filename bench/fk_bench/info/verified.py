"""The test that compares an architecture of ours with its reference, on a random checkpoint in float32."""

from __future__ import annotations

from dataclasses import dataclass

from fastkernels.models.common.descriptions.registry import Model

# Absolute tolerances, which those tests import
LOGITS = 2e-4  # and relative
ENCODINGS = 3e-5
EMBEDDINGS = 2e-5
SCORES = 1e-4
RECOMMENDATIONS = 1e-5  # and relative
IMAGES = 5e-4  # of colors from 0 to 1
POINTS = 2e-5  # and relative
LATENTS = 1e-4  # and relative
ACTIONS = 2e-5  # and relative, in each denoising step
STRUCTURES = 1e-4  # of the largest value
SOUNDS = 5e-4  # of samples from -1 to 1, recorded in float16
DETECTIONS = 1e-4  # in parts of an image's side, and of scores


@dataclass(frozen=True)
class Verified:
    """test: its id in pytest. tolerance: absolute, of the largest difference; 0: greedy tokens are equal"""

    test: str
    tolerance: float

    def __str__(self) -> str:
        return f"{self.test} ({f'within {self.tolerance:g}' if self.tolerance else 'equal tokens'})"


def verified(model: Model, architecture: str) -> Verified:
    """The test of one of the architectures that a model file declares."""
    arch = model.arch
    if model.name == "sam3":
        return Verified("tests/models/test_segmenters.py::test_outputs_equal_transformers[plain]", DETECTIONS)
    if model.name == "sam3_tracker":
        return Verified("tests/models/test_marks.py::test_marks_equal_transformers[three_levels]", DETECTIONS)
    if model.name == "sam3_video":
        return Verified(
            "tests/models/test_clips.py::test_masks_of_clips_equal_transformers[plain]", DETECTIONS
        )
    if architecture in arch.text_of and not arch.media:
        kind = arch.model_type.removesuffix("_text")
        return Verified(f"tests/models/test_text_models.py::test_text_model_equals_transformers[{kind}]", 0.0)
    if arch.media == ("audio",):
        return Verified("tests/engine/media/test_whisper.py::test_whisper_logits_equal_transformers", LOGITS)
    if "audio" in arch.media:
        return Verified("tests/engine/media/test_omni.py::test_omni_logits_equal_transformers", LOGITS)
    if arch.media:
        return Verified(
            f"tests/engine/media/test_media.py::test_logits_with_images_equal_transformers[{model.name}]",
            LOGITS,
        )
    if arch.runner == "Score":
        test = "tests/integrations/test_recommenders.py::test_models_of_torchrec_and_torch_geometric"
        return Verified(f"{test}[{model.name}]", RECOMMENDATIONS)
    if arch.runner == "Act":
        test = "tests/models/test_policies.py::test_every_step_equals_the_reference"
        return Verified(f"{test}[{model.name}]", ACTIONS)
    if arch.runner == "Render":
        test = "test_gaussians_equal_their_equations"
        if model.name != "gaussian_splatting":
            test = f"test_{model.name}_equals_its_equations"
        return Verified(f"tests/models/test_rendering.py::{test}", IMAGES)
    if arch.runner == "Segment":
        test = f"tests/models/test_{model.name}.py::test_{model.name}_equals_its_equations"
        return Verified(f"{test}[segmentor]", POINTS)
    if arch.runner == "Denoise":
        return Verified(
            f"tests/engine/test_denoise.py::test_pipeline_equals_diffusers[{model.name}]", LATENTS
        )
    if arch.runner == "DenoiseVideo":
        return Verified("tests/models/test_hunyuan_video.py::test_steps_and_videos_equal_diffusers", LATENTS)
    if arch.runner == "Speak":
        return Verified("tests/engine/test_speak.py::test_sound_equals_cosyvoice[whole-more0]", SOUNDS)
    if arch.runner == "Rollout":
        return Verified("tests/models/test_oasis.py::test_frames_equal_the_reference", LATENTS)
    if arch.runner == "Fold":
        return Verified("tests/models/test_openfold3.py::test_results_equal_the_recorded_ones", STRUCTURES)
    if arch.runner == "Generate":
        return Verified(
            f"tests/models/test_models.py::test_logits_equal_transformers[{arch.model_type}]", LOGITS
        )
    if arch.runner == "Unmask":
        return Verified("tests/engine/test_unmask.py::test_llada_logits_equal_its_equations", LOGITS)
    if arch.runner == "Draft":
        return Verified(
            "tests/engine/drafts/test_draft_models.py::test_drafts_are_those_of_the_equations", LOGITS
        )
    if model.name == "colbert":
        return Verified("tests/engine/test_retrieval.py::test_colbert_scores_equal_its_own_formula", SCORES)
    if arch.inputs == "tokens" and architecture.endswith("Classification"):
        return Verified("tests/engine/test_retrieval.py::test_cross_encoders_equal_transformers", SCORES)
    if arch.inputs == "tokens":
        return Verified("tests/engine/test_encode.py::test_tiny_bert_equals_transformers", EMBEDDINGS)
    if arch.ultralytics or architecture.endswith("ObjectDetection"):
        return Verified(
            f"tests/models/test_detectors.py::test_detector_equals_reference[{model.name}]", DETECTIONS
        )
    if arch.timm:
        return Verified("tests/models/test_cnn.py::test_model_equals_timm", ENCODINGS)
    kind = f"{model.name}_classes" if architecture.endswith("Classification") else model.name
    return Verified(f"tests/models/test_vision.py::test_encoder_equals_transformers[{kind}]", ENCODINGS)
