"""The runners that a model file may name: the class that runs the model on a rank, and the engine that feeds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.plans import build


@dataclass(frozen=True)
class RunnerKind:
    """runner: a Runner (execution/forward/runner.py); engine: an Engine (engines/engine.py). Both as "module:Class".

    use: how to call a model of this kind, for error messages. A draft model has neither runner nor engine: that of its
    target runs it.
    """

    runner: str
    engine: str
    use: str


RUNNERS = {
    "Generate": RunnerKind(
        "fastkernels.engine.execution.runners.generate:Generate",
        "fastkernels.engine.engines.llm_engine:LLMEngine",
        "LLM.generate, /v1/completions and /v1/chat/completions",
    ),
    "Unmask": RunnerKind(
        "fastkernels.engine.execution.runners.unmask:Unmask",
        "fastkernels.engine.engines.unmask_engine:UnmaskEngine",
        "LLM.generate, /v1/completions and /v1/chat/completions",
    ),
    "Encode": RunnerKind(
        "fastkernels.engine.execution.runners.encode:Encode",
        "fastkernels.engine.engines.encode_engine:EncodeEngine",
        "LLM.embed and /v1/embeddings, or LLM.detect and /v1/detections, or LLM.segment and /v1/segmentations",
    ),
    "Score": RunnerKind(
        "fastkernels.engine.execution.runners.score:Score",
        "fastkernels.engine.engines.score_engine:ScoreEngine",
        "LLM.score and /v1/scores",
    ),
    "Act": RunnerKind(
        "fastkernels.engine.execution.runners.act:Act",
        "fastkernels.engine.engines.action_engine:ActionEngine",
        "LLM.act and /v1/actions",
    ),
    "Render": RunnerKind(
        "fastkernels.engine.execution.runners.render:Render",
        "fastkernels.engine.engines.render_engine:RenderEngine",
        "LLM.render and /v1/render",
    ),
    "Segment": RunnerKind(
        "fastkernels.engine.execution.runners.segment:Segment",
        "fastkernels.engine.engines.segment_engine:SegmentEngine",
        "LLM.segment and /v1/segmentations",
    ),
    "Fold": RunnerKind(
        "fastkernels.engine.execution.runners.fold:Fold",
        "fastkernels.engine.engines.fold_engine:FoldEngine",
        "LLM.fold and /v1/structures",
    ),
    "Denoise": RunnerKind(
        "fastkernels.engine.execution.runners.denoise:Denoise",
        "fastkernels.engine.engines.denoise_engine:DenoiseEngine",
        "LLM.generate_images, /v1/images/generations and /v1/images/edits",
    ),
    "DenoiseVideo": RunnerKind(
        "fastkernels.engine.execution.runners.denoise:Denoise",
        "fastkernels.engine.engines.video_engine:VideoEngine",
        "LLM.generate_videos and /v1/videos",
    ),
    "Rollout": RunnerKind(
        "fastkernels.engine.execution.runners.rollout:Rollout",
        "fastkernels.engine.engines.rollout_engine:RolloutEngine",
        "LLM.generate_frames and /v1/frames",
    ),
    "Speak": RunnerKind(
        "fastkernels.engine.execution.runners.speak:Speak",
        "fastkernels.engine.engines.speech_engine:SpeechEngine",
        "LLM.speak and /v1/audio/speech",
    ),
    "Draft": RunnerKind(
        "",
        "",
        'the speculative_config {"method": "eagle3", "model": ..., "num_speculative_tokens": 3} of its target',
    ),
}


def runner_name(hf_config: Any, folder: Path) -> str:
    """The key of RUNNERS that the model file of this config names. Raises CheckpointError, UnknownName."""
    name = registry.find(build.architecture_of(hf_config, folder), hf_config).arch.runner
    if name not in RUNNERS:
        raise registry.UnknownName("runner", name, RUNNERS)
    return name


def runner_class(hf_config: Any, folder: Path) -> Any:
    """The Runner subclass for this config."""
    return registry.load(RUNNERS[runner_name(hf_config, folder)].runner)
