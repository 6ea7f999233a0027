"""HunyuanVideo-1.5 against diffusers: whole pipelines, each step, the decoder in tiles; parts that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from support.tiny_pipelines import make_tiny_hunyuan

from fastkernels import LLM, FrameParams
from fastkernels.engine.execution.runners.denoise import Denoise
from fastkernels.engine.scheduling.denoising import ImageParams, VideoParams
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.pipelines.video_decoder import VideoDecoder
from fastkernels.models.common.plans import build
from fastkernels.models.diffusion import hunyuan_video

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# size, frames, steps, guidance, negative prompt, prompt: long and short texts, with quoted words or without
REQUESTS = [
    ((32, 48), 9, 3, 3.0, None, "a red cat"),
    ((32, 48), 9, 4, 2.0, 'an ugly "dog"', 'a sign that says "hello" and “bye”'),
    ((32, 48), 9, 2, 1.0, None, "x" * 300),
    ((48, 32), 1, 2, 5.0, "", ""),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hunyuan(tmp_path_factory.mktemp("pipeline") / "hunyuan")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(str(folder), device="cpu", max_frames=49) as made:
        yield made


def theirs(folder: Path, index: int) -> tuple[list[torch.Tensor], np.ndarray]:
    """The latents after each step, and the video in 0 to 255, of a request in diffusers."""
    (height, width), frames, steps, scale, negative, prompt = REQUESTS[index]
    pipe = diffusers.HunyuanVideo15Pipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.guider.guidance_scale = scale
    found: list[torch.Tensor] = []
    step = pipe.scheduler.step

    def noted(*args: Any, **more: Any) -> Any:
        made = step(*args, **more)
        found.append(made[0].clone())
        return made

    pipe.scheduler.step = noted
    video = pipe(
        prompt, negative_prompt=negative, height=height, width=width, num_frames=frames, num_inference_steps=steps,
        generator=torch.Generator().manual_seed(index),
    ).frames[0]  # fmt: skip
    return found, video * 255


@pytest.mark.parametrize("device", DEVICES)
def test_steps_and_videos_equal_diffusers(folder: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """All requests in one engine, at different steps and with texts of different lengths."""
    bound = 1e-4 if device == "cpu" else 0.05
    latents: dict[tuple[str, int], torch.Tensor] = {}
    run = Denoise._step

    def noted(self: Denoise, size: Any, doubled: bool, rows: Any) -> None:
        run(self, size, doubled, rows)
        latents.update(((i, at), self.pool[i].values.cpu()) for i, at in rows)

    monkeypatch.setattr(Denoise, "_step", noted)
    params = [
        VideoParams(1, *size, steps, scale, negative, seed, frames)
        for seed, (size, frames, steps, scale, negative, _) in enumerate(REQUESTS)
    ]
    with LLM(str(folder), device=device, dtype="float32") as llm:
        outputs = llm.generate_videos([r[-1] for r in REQUESTS], params, use_tqdm=False)
    for index, output in enumerate(outputs):
        steps, video = theirs(folder, index)
        for at, want in enumerate(steps):
            found = latents[output.request_id, at]
            torch.testing.assert_close(found, want, atol=bound, rtol=1e-4)
        assert output.arrays[0].shape == video.shape
        assert np.abs(output.arrays[0] - video).max() <= (0.6 if device == "cpu" else 8)


@pytest.mark.parametrize("shape", [(1, 4, 2, 3, 5), (2, 4, 1, 4, 2), (1, 4, 4, 2, 3)])
def test_decoder_equals_diffusers(folder: Path, shape: tuple[int, ...]) -> None:
    vae = diffusers.AutoencoderKLHunyuanVideo15.from_pretrained(folder / "vae")
    config = SimpleNamespace(classes={"vae": type(vae).__name__}, parts={"vae": dict(vae.config)})
    ours = VideoDecoder(config)
    ours.load_state_dict({k: v for k, v in vae.state_dict().items() if k.startswith("decoder.")})
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for tile in (256, 32, 64):
            ours.tile = tile
            if tile < 256:
                vae.enable_tiling(tile, tile, tile // 16, tile // 16)
            # One by one: the host's mask takes no batch.
            want = torch.cat([vae.decode(one).sample for one in latents.split(1)])
            torch.testing.assert_close(ours.decode(latents), want, atol=1e-4, rtol=1e-4)


def test_numbers_and_words_of_diffusers(folder: Path) -> None:
    pipe = diffusers.HunyuanVideo15Pipeline.from_pretrained(folder)
    assert pipe.system_message == hunyuan_video.INSTRUCTION
    for target in (64, 480, 640, 960):
        want = pipe.video_processor.calculate_default_height_width(9, 16, target)
        assert hunyuan_video.default_size(target, 16) == tuple(want)
    for prompt in ("a cat", 'a "b" “c” "b"', '"a"', 'an open " quote', '""'):
        from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

        assert hunyuan_video.glyphs_of(prompt) == extract_glyph_texts(prompt)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (VideoParams(num_frames=6), "num_frames must be 1 more than a multiple of 4, got 6"),
        (VideoParams(num_frames=53), "num_frames must be at most 49, got 53"),
        (VideoParams(height=40), "height must be a multiple of 16, got 40"),
        (VideoParams(num_inference_steps=101), "num_inference_steps must be at most 100"),
        (ImageParams(), "a model that makes videos takes VideoParams, got ImageParams"),
        (FrameParams(), "a model that makes videos takes VideoParams, got FrameParams"),
    ],
)
def test_wrong_params_are_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate_videos("a cat", params, use_tqdm=False)


def test_wrong_values_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="guidance_scale must be a number from 0 to 100, got 1000"):
        VideoParams(guidance_scale=10**400)
    for prompt in (None, 3, b"a cat", {"prompt": "a cat"}):
        with pytest.raises(ValueError, match="the prompt must be text, got"):
            llm.generate_videos(prompt, use_tqdm=False)


def test_default_frames_fit_the_limit(llm: LLM) -> None:
    (request,) = llm.llm_engine.make_requests("r", "a cat")
    assert request.size == (48, 80, 49) and request.steps == 50


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("transformer", {"patch_size": 2}, "patch_size=2 is not supported, only 1"),
        ("transformer", {"use_meanflow": True}, "use_meanflow=True is not supported"),
        ("transformer", {"rope_axes_dim": [4, 6, 8]}, "only three even numbers that sum"),
        ("transformer", {"in_channels": 10}, "only 9 and 4"),
        ("guider", {"guidance_rescale": 0.5}, "guidance_rescale=0.5 is not supported"),
        ("vae", {"latent_channels": 5}, "latent_channels=5 does not divide"),
        ("vae", {"temporal_compression_ratio": 3}, "temporal_compression_ratio=3 is not supported"),
    ],
)
def test_unsupported_parts_are_refused(
    folder: Path, tmp_path: Path, part: str, fields: dict[str, Any], message: str
) -> None:
    other = shutil.copytree(folder, tmp_path / "pipeline")
    file = other / part / ("guider_config.json" if part == "guider" else "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    config = build.load_config(other)
    with pytest.raises(Unsupported, match=message), torch.device("meta"):
        hunyuan_video.HunyuanVideoPipeline(config)


def test_tokenizer_without_chat_template_is_refused(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "pipeline")
    (other / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat_template, and prompts are messages"):
        LLM(str(other), device="cpu")
