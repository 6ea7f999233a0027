"""Oasis against numbers recorded from open-oasis, batches of requests, and inputs and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import worlds

from fastkernels import LLM, VideoParams
from fastkernels.engine.execution.runners.rollout import Rollout
from fastkernels.engine.scheduling.rollout import FrameParams
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.plans import build
from fastkernels.models.diffusion import oasis

RECORDED = json.loads((Path(worlds.__file__).parent / "oasis.json").read_text())
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.oasis(tmp_path_factory.mktemp("oasis"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(str(folder), device="cpu", max_num_seqs=3, max_frames=20, max_steps=12) as made:
        yield made


def latents_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.Tensor]]:
    """(number of a frame, its latents) of all frames that are made from here on."""
    found: list[tuple[int, torch.Tensor]] = []
    finish = Rollout._finish

    def noted(self: Rollout, ended: Any) -> Any:
        made = finish(self, ended)
        found.extend((frame, window.latents[frame].cpu()) for _, window, frame in ended)
        return made

    monkeypatch.setattr(Rollout, "_finish", noted)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_frames_equal_the_reference(folder: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Eight frames, of which the model sees five: the window moves. On a GPU the second request replays graphs."""
    bound = 1e-4 if device == "cpu" else 0.1  # products in TF32 and in other orders
    with LLM(str(folder), device=device, dtype="float32") as llm:
        for _ in range(2):
            found = latents_of(llm, monkeypatch)
            (output,) = llm.generate_frames(worlds.walk(2, 6, 7), FrameParams(3, seed=11), use_tqdm=False)
            monkeypatch.undo()
            latents = dict(found)
            assert sorted(latents) == [2, 3, 4, 5, 6, 7] and output.finished and output.start == 0
            for frame in (2, 7):
                want = torch.tensor(RECORDED["latents"][str(frame)]).view(4, 8, 6)
                torch.testing.assert_close(latents[frame], want, atol=bound, rtol=1e-4)
            want = np.array(RECORDED["pixels"]).clip(0, 1) * 255
            pixels = output.arrays[5].transpose(2, 0, 1).flatten()[::13]
            assert np.abs(pixels - want).max() <= (1.01 if device == "cpu" else 8)


def test_images_are_encoded_as_by_the_reference(llm: LLM) -> None:
    images = llm.llm_engine.make_request("r", worlds.walk(2, 1, 7)).images
    with torch.inference_mode():
        found = llm.llm_engine.model.encode(torch.from_numpy(images))
    want = torch.tensor(RECORDED["latents"]["0"]).view(4, 8, 6)
    torch.testing.assert_close(found[0], want, atol=1e-5, rtol=1e-5)


def test_requests_in_one_batch_do_not_change_each_other(llm: LLM) -> None:
    """Of different lengths, numbers of images and steps; more than run at once."""
    kinds = [(1, 7, 4), (2, 2, 3), (4, 6, 5), (1, 1, 1), (3, 5, 2)]
    prompts = [worlds.walk(first, later, i) for i, (first, later, _) in enumerate(kinds)]
    params = [FrameParams(steps, seed=i) for i, (_, _, steps) in enumerate(kinds)]
    together = llm.generate_frames(prompts, params, use_tqdm=False)
    assert [len(o.arrays) for o in together] == [later for _, later, _ in kinds]
    for prompt, one, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate_frames(prompt, one, use_tqdm=False)
        for a, b in zip(alone.arrays, output.arrays, strict=True):
            assert np.abs(a.astype(int) - b).max() <= 1
    assert sorted(llm.llm_engine.runner._free) == [0, 1, 2]


def test_earlier_frames_are_computed_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame a pass: a step, or the frame before. A window that moves is computed again."""
    sizes: list[tuple[int, int]] = []
    forward = oasis.OasisTransformer.forward

    def counted(self: Any, latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append((latents.shape[0], latents.shape[1]))
        return forward(self, latents, *rest)

    monkeypatch.setattr(oasis.OasisTransformer, "forward", counted)
    llm.generate_frames(worlds.walk(2, 4), FrameParams(2), use_tqdm=False)
    step, before = [(1, 1)] * 2, [(1, 1)]
    assert sizes == [(1, 2), *step, *before, *step, *before, *step, (1, 4), *step]


def test_seeds_and_actions_change_the_frames(llm: LLM) -> None:
    def frames(seed: int | None, **changes: Any) -> np.ndarray:
        prompt = {**worlds.walk(1, 2, 3), **changes}
        (found,) = llm.generate_frames(prompt, FrameParams(2, seed=seed), use_tqdm=False)
        return np.stack(found.arrays)

    still = [{}, {"attack": 1}]
    assert np.array_equal(frames(4), frames(4)) and not np.array_equal(frames(4), frames(5))
    assert not np.array_equal(frames(4, actions=still), frames(4))
    listed = [[0.0] * 25, [float(k == "attack") for k in oasis.KEYS]]
    assert np.array_equal(frames(4, actions=still), frames(4, actions=listed))


def test_aborted_requests_leave_their_slots(llm: LLM) -> None:
    engine = llm.llm_engine
    for i in range(4):
        engine.add_request(str(i), worlds.walk(1, 3, i), FrameParams(3))
    for _ in range(3):
        engine.step()
    engine.abort_request(["0", "3"])
    while engine.has_unfinished_requests():
        engine.step()
    engine.add_request("last", worlds.walk(1, 3), FrameParams(3))
    engine.step()
    engine.abort_request("last")
    assert sorted(engine.runner._free) == [0, 1, 2] and not engine.runner._windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": []}, "images must be a PIL image, or a list of them, got"),
        ({"images": "text"}, "images must be a PIL image"),
        ({"images": 5}, "images must be at most 4, the frames that the model sees, got 5"),
        ({"actions": []}, "actions must have at least one action"),
        ({"actions": None}, "actions must be a list of actions, got None"),
        ({"actions": [{}] * 21}, "actions must be at most 20, got 21"),
        ({"actions": [[0.0] * 24]}, r"actions\[0\] must be an object of keys, or a list of 25 numbers"),
        ({"actions": [{}, {"jmp": 1}]}, r"actions\[1\] has the unknown key 'jmp'; known: inventory, ESC"),
        ({"actions": [{"jump": 2}]}, r"actions\[0\]: jump must be a number from 0 to 1, got 2"),
        ({"actions": [{"cameraX": float("nan")}]}, r"cameraX must be a number from -1 to 1, got nan"),
        ({"actions": [{"jump": True}]}, "jump must be a number from 0 to 1, got True"),
        ({"prompt_actions": []}, "prompt_actions must have one action for each of 1 images, got 0"),
        ({"prompt_actions": [{}, {}]}, "prompt_actions must be at most 1, got 2"),
        ({"action": []}, "the prompt has the unknown field 'action'"),
    ],
)
def test_wrong_prompts_are_refused(llm: LLM, changes: dict[str, Any], message: str) -> None:
    prompt = {**worlds.walk(1, 1), **changes}
    if type(prompt["images"]) is int:
        prompt["images"] = worlds.walk(prompt["images"], 1)["images"]
    with pytest.raises(ValueError, match=message):
        llm.generate_frames(prompt, use_tqdm=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps must be an integer of at least 1, got 0"),
        ({"num_inference_steps": 13}, "num_inference_steps must be at most 12, got 13"),
        ({"seed": -1}, "seed must be an integer from 0"),
    ],
)
def test_wrong_params_are_refused(llm: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate_frames(worlds.walk(1, 1), FrameParams(**fields), use_tqdm=False)
    with pytest.raises(ValueError, match="takes FrameParams, got VideoParams"):
        llm.generate_frames(worlds.walk(1, 1), VideoParams(), use_tqdm=False)
    with pytest.raises(ValueError, match="the prompt must be an object with images and actions, got None"):
        llm.generate_frames(None, use_tqdm=False)
    assert len(llm.generate_frames([], use_tqdm=False)) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "config.depth=0 is not supported, only integers above 0"),
        ({"mlp_ratio": "4"}, "config.mlp_ratio='4' is not supported, only numbers above 0"),
        ({"num_heads": 3}, "3 heads of 64 channels are not supported"),
        ({"input_h": 7}, "latents of 8 x 6 with 4 channels are not the transformer's 7 x 6"),
        ({"patch_size": 4}, "config.patch_size=4 does not divide 8 x 6"),
        ({"vae": {**worlds.OASIS["vae"], "dec_depth": -1}}, "config.vae.dec_depth=-1 is not supported"),
        ({"vae": {**worlds.OASIS["vae"], "depth": 1}}, "config.vae.depth=1 is not supported"),
        ({"vae": 3}, "config.vae=3 is not an object"),
    ],
)
def test_wrong_configs_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**worlds.OASIS, **changes}))
    with pytest.raises(CheckpointError, match=message):
        build.load_config(tmp_path)


def test_options_of_token_models_are_refused(folder: Path) -> None:
    for options, message in (
        ({"num_blocks": 3}, "num_blocks applies to models of tokens"),
        ({"kv_cache_memory": 100}, "the window of a request needs 61440 bytes, and 100 are free"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2 is not supported for world models"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(str(folder), device="cpu", **options)


def test_checkpoint_without_the_image_model_is_refused(tmp_path: Path) -> None:
    (worlds.oasis(tmp_path) / "vit-l-20.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"keys missing from it: dec_norm\.bias"):
        LLM(str(tmp_path), device="cpu")


def test_published_sizes() -> None:
    """608 million parameters of the transformer, as of the checkpoint of October 2024."""
    config = build.config_file.plain({"model_type": "oasis", "architectures": ["Oasis"]})
    with torch.device("meta"):
        model = oasis.Oasis(config)
    assert sum(p.numel() for p in model.dit.parameters()) == 607_943_744
    assert (model.size, model.latent, model.tokens, model.window) == ((360, 640), (16, 18, 32), 144, 32)
