"""Diffusion pipelines in our engine, against diffusers' pipelines on the same tiny random checkpoints in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import LATENTS
from safetensors.torch import load_file, save_file
from support.tiny_pipelines import make_tiny_flux, make_tiny_sdxl

import fastkernels
from fastkernels import LLM, EngineConfig, ImageParams
from fastkernels.core.registry import UnknownName
from fastkernels.engine.engines.denoise_engine import DenoiseEngine
from fastkernels.engine.engines.engine import make_engine
from fastkernels.engine.scheduling.scheduler import QueueFull
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported

MAKE = {"flux": make_tiny_flux, "sdxl": make_tiny_sdxl}
PROMPT = "A red cat, 3 m high"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(tmp_path_factory.mktemp("pipeline") / kind) for kind, make in MAKE.items()}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, DenoiseEngine]:
    """Their requests must end with each test."""
    return {kind: engine_of(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def flux(engines: dict[str, DenoiseEngine]) -> DenoiseEngine:
    return engines["flux"]


def engine_of(folder: Path, **config: Any) -> DenoiseEngine:
    made = make_engine(EngineConfig(str(folder), device="cpu", **config))
    assert isinstance(made, DenoiseEngine)
    return made


def run(engine: DenoiseEngine, request_id: str = "a", **params: Any) -> tuple[list[torch.Tensor], Any]:
    """(latents after each step but the last, output) of one request."""
    engine.add_request(request_id, params.pop("prompt", PROMPT), ImageParams(**params))
    latents = []
    while True:
        (output,) = engine.step() or (None,)
        if output is not None:
            assert not engine.has_unfinished_requests() and len(engine.runner.pool) == 0
            return latents, output
        latents.append(engine.runner.pool[request_id].values)


def theirs(folder: Path, **options: Any) -> tuple[list[torch.Tensor], np.ndarray]:
    """The same of diffusers' pipeline: (latents, pixels)."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    latents = []

    def keep(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents.append(values["latents"])
        return values

    generator = torch.Generator().manual_seed(options.pop("seed"))
    made = pipe(PROMPT, generator=generator, callback_on_step_end=keep, output_type="np", **options)
    return latents[:-1], (made.images[0] * 255).round().astype(np.uint8)


@pytest.mark.parametrize("kind", MAKE)
def test_pipeline_equals_diffusers(
    kind: str, folders: dict[str, Path], engines: dict[str, DenoiseEngine]
) -> None:
    options: dict[str, Any] = {"height": 32, "width": 48, "num_inference_steps": 4, "seed": 7}
    negative = {"negative_prompt": "blue"} if kind == "sdxl" else {}
    for more in ({}, {"guidance_scale": 2.5, **negative}):
        latents, output = run(engines[kind], **options, **more)
        wanted, pixels = theirs(
            folders[kind], **options, **{"guidance_scale": engines[kind].model.scale, **more}
        )
        assert len(latents) == len(wanted) == 3
        for ours, other in zip(latents, wanted, strict=True):
            torch.testing.assert_close(ours, other, atol=LATENTS, rtol=LATENTS)
        assert output.arrays[0].shape == (32, 48, 3)
        assert np.abs(output.arrays[0].astype(int) - pixels).max() <= 1 and pixels.std() > 20


def test_schnell_and_no_guidance_equal_diffusers(folders: dict[str, Path], tmp_path: Path) -> None:
    """FLUX.1 schnell has no guidance; SDXL with a scale of 1 computes no negative prompt."""
    schnell = make_tiny_flux(tmp_path / "schnell", guidance_embeds=False)
    engine = engine_of(schnell)
    assert engine.model.steps == 4
    sizes = {"height": 24, "width": 16, "seed": 3}
    latents, _ = run(engine, **sizes)
    wanted, _ = theirs(schnell, **sizes, num_inference_steps=4, max_sequence_length=256)
    torch.testing.assert_close(latents, wanted, atol=LATENTS, rtol=LATENTS)
    with pytest.raises(ValueError, match=r"guidance_scale must be 0, got 3.5: .* distilled"):
        engine.make_request("a", "a", ImageParams(guidance_scale=3.5))


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True, "solver_type": "heun"}),
        pytest.param("EulerDiscreteScheduler", {"use_karras_sigmas": True}, marks=pytest.mark.slow),
    ],
)
def test_other_schedulers_equal_diffusers(
    cls: str, fields: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """A folder of SDXL as diffusers saves it with another scheduler; images join at other steps."""
    import diffusers

    folder = linked(folders["sdxl"], tmp_path)
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.register_modules(scheduler=getattr(diffusers, cls).from_config(pipe.scheduler.config, **fields))
    pipe.scheduler.save_pretrained(folder / "scheduler")
    pipe.save_config(folder)
    engine = engine_of(folder)
    options: dict[str, Any] = {"height": 24, "width": 32, "num_inference_steps": 6, "seed": 7}
    latents, output = run(engine, **options)
    wanted, pixels = theirs(folder, **options, guidance_scale=engine.model.scale)
    for ours, other in zip(latents, wanted, strict=True):
        torch.testing.assert_close(ours, other, atol=LATENTS, rtol=LATENTS)
    assert np.abs(output.arrays[0].astype(int) - pixels).max() <= 1 and pixels.std() > 20
    found: dict[str, Any] = {}
    engine.add_request("a", PROMPT, ImageParams(**options))
    while engine.has_unfinished_requests():
        found |= {o.request_id: o for o in engine.step()}
        if "b" not in engine.requests and not found:
            engine.add_request("b", "a blue dog", ImageParams(**{**options, "num_inference_steps": 8}))
    assert np.abs(found["a"].arrays[0].astype(int) - pixels).max() <= 1
    assert set(found) == {"a", "b"}


def picture(width: int, height: int) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(3).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [("flux", None), ("sdxl", None), ("sdxl", "DPMSolverMultistepScheduler")],
)
def test_image_to_image_equals_diffusers(kind: str, scheduler: str | None, folders: dict[str, Path]) -> None:
    """From an image of another size and strength; the latents of the first step are those that its seed draws."""
    import diffusers

    cls = {"flux": diffusers.FluxImg2ImgPipeline, "sdxl": diffusers.StableDiffusionXLImg2ImgPipeline}[kind]
    pipe = cls.from_pretrained(folders[kind])
    engine = engine_of(folders[kind])
    if scheduler is not None:
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config)
        engine.model.config.classes["scheduler"] = scheduler
    pipe.set_progress_bar_config(disable=True)
    image, size = picture(48, 32), {"height": 32, "width": 48}
    wanted: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        wanted.append(values["latents"])
        return values

    options = {"num_inference_steps": 7, "guidance_scale": 2.5, "strength": 0.65}
    made = pipe(
        prompt=PROMPT, image=image, generator=torch.Generator().manual_seed(5), callback_on_step_end=keep,
        output_type="np", **options, **(size if kind == "flux" else {}),
    )  # fmt: skip
    pixels = (made.images[0] * 255).round().astype(np.uint8)
    latents, output = run(engine, prompt={"prompt": PROMPT, "image": image}, seed=5, **options)
    assert len(wanted) == len(latents) + 1 == {"flux": 5, "sdxl": 4}[kind]
    for ours, other in zip(latents, wanted, strict=False):
        torch.testing.assert_close(ours, other, atol=LATENTS, rtol=LATENTS)
    assert output.arrays[0].shape == (32, 48, 3) and output.prompt == PROMPT
    assert np.abs(output.arrays[0].astype(int) - pixels).max() <= 1 and pixels.std() > 20


def test_images_to_change_are_resized_or_refused(engines: dict[str, DenoiseEngine]) -> None:
    flux, sdxl = engines["flux"], engines["sdxl"]
    with pytest.raises(ValueError, match=r"strength must leave a step of 2, got 0\.1"):
        small = {"prompt": "a", "image": picture(8, 8)}
        sdxl.make_requests("a", small, ImageParams(num_inference_steps=2, strength=0.1))
    (request,) = flux.make_requests("a", {"prompt": "a", "image": picture(19, 35).convert("LA")})
    assert request.size == (32, 16) and request.image is not None and request.image.shape == (32, 16, 3)
    assert request.step == request.first == int(28 - 28 * 0.6)
    (request,) = flux.make_requests("a", {"prompt": "a", "image": picture(19, 35)}, ImageParams(height=8))
    assert request.size[0] == 8
    for prompt, params, says in (
        (
            {"prompt": "a", "image": picture(3, 40)},
            ImageParams(),
            "at least 4 x 4 pixels, got 3 x 40: give a",
        ),
        ({"prompt": "a", "image": "a.png"}, ImageParams(), "image must be a PIL image, got str"),
        ({"prompt": "a", "mask": 1}, ImageParams(), "may have 'prompt' and 'image', got 'mask'"),
        ({"image": picture(8, 8)}, ImageParams(), "the prompt must be text, got None"),
        ("a", ImageParams(strength=0.5), "strength needs an image"),
        ({"prompt": "a", "image": picture(4000, 900)}, ImageParams(), "must be at most 262144 pixels"),
    ):
        with pytest.raises(ValueError, match=says):
            flux.make_requests("a", prompt, params)
    with pytest.raises(ValueError, match="strength must be a number above 0, at most 1, got 0"):
        ImageParams(strength=0)


@pytest.mark.parametrize("kind", [pytest.param("flux", marks=pytest.mark.slow), "sdxl"])
def test_images_join_and_leave_a_batch(kind: str, engines: dict[str, DenoiseEngine]) -> None:
    """Requests of other sizes, steps and guidance join between steps; each image is that of the request alone."""
    engine = engines[kind]
    asked: dict[str, dict[str, Any]] = {
        "a": {"height": 16, "width": 16, "num_inference_steps": 5, "seed": 1},
        "b": {"height": 8, "width": 16, "num_inference_steps": 2, "seed": 2, "guidance_scale": 1.5},
        "c": {"height": 16, "width": 16, "num_inference_steps": 3, "seed": 3, "prompt": "a blue dog"},
        "d": {"height": 16, "width": 16, "num_inference_steps": 3, "seed": 4, "guidance_scale": 1.0},
    }
    alone = {i: run(engine, **params)[1].arrays[0] for i, params in asked.items()}
    batches, found = [], {}
    forward = engine.model.forward

    def counted(latents: Any, *args: Any, forward: Any = forward, batches: list[int] = batches) -> Any:
        batches.append(len(latents))
        return forward(latents, *args)

    engine.model.forward = counted  # type: ignore[method-assign]
    try:
        for names in ("a", "bc", "d", "", "", "", "", ""):
            for name in names:
                params = dict(asked[name])
                engine.add_request(name, params.pop("prompt", PROMPT), ImageParams(**params))
            found |= {o.request_id: (len(batches), o) for o in engine.step()}
    finally:
        del engine.model.forward  # type: ignore[method-assign]
    # b ends with step 3, c with 4, a and d with 5; d joins a and c but is not guided in SDXL.
    assert batches == {"flux": [1, 2, 1, 3, 1, 3, 2], "sdxl": [2, 4, 2, 4, 2, 1, 4, 1, 2, 1]}[kind]
    assert [i for i, _ in sorted(found.items(), key=lambda pair: pair[1][0])] == ["b", "c", "a", "d"]
    for name, (_, output) in found.items():
        assert np.abs(output.arrays[0].astype(int) - alone[name]).max() <= 1, (kind, name)


def test_images_of_one_prompt_have_seeds_in_a_row(folders: dict[str, Path]) -> None:
    with LLM(str(folders["flux"]), device="cpu", seed=5) as llm:
        encode, texts = llm.llm_engine.model.encode, []
        llm.llm_engine.model.encode = lambda prompts: texts.append(prompts) or encode(prompts)
        small = {"height": 16, "width": 16, "num_inference_steps": 2}
        two, one = llm.generate_images(
            [PROMPT, "a blue dog"],
            [ImageParams(2, seed=8, **small), ImageParams(seed=9, **small)],
            use_tqdm=False,
        )
        assert texts == [[PROMPT, "a blue dog"]]  # each is encoded once
        assert two.seeds == [8, 9] and one.seeds == [9] and two.prompt == PROMPT
        assert not np.array_equal(*two.arrays) and not np.array_equal(two.arrays[1], one.arrays[0])
        assert two.images[0].size == (16, 16) and len(two.images) == 2
        drawn = [llm.generate_images(PROMPT, ImageParams(**small), use_tqdm=False)[0].seeds for _ in range(2)]
    again = engine_of(folders["flux"], seed=5).make_request("a", PROMPT, ImageParams(**small))
    assert [again.seed] == drawn[0] != drawn[1]


def test_budget_bounds_the_images_in_progress(folders: dict[str, Path]) -> None:
    """An image of 512 + 16 tokens is within a budget of 1200 twice; one of 512 + 1024 runs alone."""
    engine = engine_of(folders["flux"], max_num_batched_tokens=1200, max_waiting=4)
    small = ImageParams(height=16, width=16, num_inference_steps=2, seed=0)
    large = ImageParams(height=128, width=128, num_inference_steps=1, seed=0)
    for name, params in zip("abcd", (small, small, small, large), strict=True):
        engine.add_request(name, PROMPT, params)
    assert engine.steps_left == 7
    with pytest.raises(QueueFull, match="4 requests are waiting; the limit is 4"):
        engine.add_request("e", PROMPT, small)
    steps = []
    while engine.has_unfinished_requests():
        found = [o.request_id for o in engine.step()]
        steps.append((sorted(r.request_id for r in engine.scheduler.running), found))
    assert steps == [(["a", "b"], []), ([], ["a", "b"]), (["c"], []), ([], ["c"]), ([], ["d"])]
    stats = engine.take_stats()
    assert stats.denoise_steps == 7 and len(stats.images) == 4 and engine.steps_left == 0


def test_aborted_images_leave_the_pool(flux: DenoiseEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = ImageParams(height=16, width=16, num_inference_steps=3, seed=0)
    for name in "abc":
        flux.add_request(name, PROMPT, params)
    flux.step()
    flux.abort_request(["a", "unknown"])
    assert len(flux.runner.pool) == 3
    flux.step()
    assert len(flux.runner.pool) == 2 and set(flux.requests) == {"b", "c"}
    with monkeypatch.context() as patched:
        patched.setattr(flux.executor, "launch", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            flux.step()
    assert not flux.has_unfinished_requests() and flux.requests == {}
    _, output = run(flux, height=16, width=16, num_inference_steps=2, seed=0)  # the pool is empty again
    assert output.arrays[0].std() > 0
    flux.add_request("a", PROMPT, params)
    flux.step()
    flux.abort_request("a")
    assert not flux.has_unfinished_requests() and len(flux.runner.pool) == 0  # at once, if no step follows
    flux.take_stats()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 11}, "n must be at most 10, got 11"),
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"height": 33}, "height must be a multiple of 4, got 33"),
        ({"width": 1028, "height": 1024}, "at most 262144 pixels, got 1052672 (1028 x 1024)"),
        ({"num_inference_steps": 101}, "num_inference_steps must be at most 100, got 101"),
        ({"guidance_scale": float("nan")}, "guidance_scale must be a number from 0 to 100, got nan"),
        ({"seed": -1}, "seed must be an integer from 0 to 2^63 - 1, got -1"),
        ({"negative_prompt": "b"}, "negative_prompt is not supported by"),
        ({"prompt": "a" * 600}, "the prompt has 600 tokens, and the text encoder takes 512"),
        ({"prompt": [5]}, "the prompt must be text, got [5]"),
        ({"prompt": "\ud800"}, "the prompt is not valid Unicode text"),
    ],
)
def test_unsupported_requests_name_the_limit(
    flux: DenoiseEngine, params: dict[str, Any], message: str
) -> None:
    prompt = params.pop("prompt", "a")
    with pytest.raises(ValueError) as error:
        flux.make_request("a", prompt, ImageParams(**params))
    assert message in str(error.value)


def changed(folder: Path, part: str, **fields: Any) -> None:
    (file,) = (folder / part).glob("*config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("transformer", {"patch_size": 2}, "transformer: patch_size=2 is not supported, only 1"),
        ("transformer", {"new_field": 3}, "transformer: new_field=3 is not supported"),
        ("transformer", {"axes_dims_rope": [4, 4, 4]}, "does not sum to attention_head_dim=16"),
        ("scheduler", {"use_karras_sigmas": True}, "use_karras_sigmas=True is not supported, only False"),
        ("transformer", {"axes_dims_rope": [3, 5, 8]}, "is not supported, only three even numbers"),
        ("transformer", {"num_layers": "2"}, "num_layers='2' is not supported, only values such as"),
        ("transformer", {"guidance_embeds": None}, "guidance_embeds=None is not supported"),
        ("vae", {"block_out_channels": []}, r"block_out_channels=\(\) is not supported"),
        ("vae", {"scaling_factor": 0}, "scaling_factor=0 is not supported, only values such as 0.18215"),
        ("scheduler", {"num_train_timesteps": 0}, "num_train_timesteps=0 is not supported"),
        ("vae", {"act_fn": "relu"}, "vae: act_fn='relu' is not supported, only 'silu'"),
        (
            "vae",
            {"up_block_types": ["UpDecoderBlock2D", "AttnUpDecoderBlock2D"]},
            "only UpDecoderBlock2D for each",
        ),
        ("vae", {"latent_channels": 8}, "in_channels=16 is not four times latent_channels=8"),
    ],
)
def test_unsupported_configs_name_the_field(
    folders: dict[str, Path], tmp_path: Path, part: str, fields: dict[str, Any], message: str
) -> None:
    folder = linked(folders["flux"], tmp_path)
    changed(folder, part, **fields)
    with pytest.raises(Unsupported, match=message):
        engine_of(folder)


def linked(folder: Path, tmp_path: Path) -> Path:
    """A folder with the same weights, and configs that can be changed."""
    made = tmp_path / "changed"
    for file in folder.rglob("*"):
        if file.is_file():
            target = made / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes()) if file.suffix == ".json" else target.symlink_to(file)
    return made


def test_damaged_pipelines_are_diagnosed(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = linked(folders["flux"], tmp_path)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "KolorsPipeline"}))
    with pytest.raises(UnknownName, match=r"'KolorsPipeline'\. Did you mean 'FluxPipeline'"):
        engine_of(folder)
    index["transformer"] = ["diffusers", "SD3Transformer2DModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(Unsupported, match=r"SD3Transformer2DModel.* only FluxTransformer2DModel"):
        engine_of(folder)
    index["transformer"] = ["diffusers", "FluxTransformer2DModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    changed(folder, "transformer", num_layers=3)
    with pytest.raises(CheckpointError, match=r"missing from it: transformer\.transformer_blocks\.2\."):
        engine_of(folder)
    changed(folder, "transformer", num_layers=2)
    shutil.move(folder / "tokenizer_2", tmp_path)
    with pytest.raises(CheckpointError, match="lacks the folder tokenizer_2"):
        engine_of(folder)
    (folder / "vae" / WEIGHTS).rename(folder / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"vae has weights in PyTorch's format only, .*: use safetensors"
    ):
        engine_of(folder)
    for part in ("vae", "scheduler"):
        shutil.rmtree(folder / part)
        with pytest.raises(CheckpointError, match=f"lacks the config of .*{part}, which FluxPipeline needs"):
            engine_of(folder)


def test_damaged_text_encoders_are_diagnosed(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers gives random values to weights that are missing."""
    folder = linked(folders["flux"], tmp_path)
    file = folder / "text_encoder_2" / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    missing = "encoder.block.1.layer.0.SelfAttention.q.weight"
    save_file({k: v for k, v in weights.items() if k != missing}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"keys missing from it: {missing}"):
        engine_of(folder)
    weights[missing][3, 5] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"text_encoder_2 is damaged: NaN or infinity in {missing}"):
        engine_of(folder)
    file.write_bytes(file.read_bytes()[:20000])
    with pytest.raises(CheckpointError, match="text_encoder_2 or its tokenizer cannot be used"):
        engine_of(folder)


def test_length_of_a_tokenizer_is_limited_by_its_encoder(
    folders: dict[str, Path], engines: dict[str, DenoiseEngine], tmp_path: Path
) -> None:
    folder = linked(folders["sdxl"], tmp_path)
    for tokenizer in ("tokenizer", "tokenizer_2"):
        file = folder / tokenizer / "tokenizer_config.json"
        fields = json.loads(file.read_text())
        del fields["model_max_length"]
        file.write_text(json.dumps(fields))
    params = {"height": 8, "width": 8, "num_inference_steps": 1, "seed": 0}
    engine = engine_of(folder)
    with pytest.raises(ValueError, match="negative_prompt has 30 tokens, and the text encoder takes 20"):
        engine.make_request("a", "a", ImageParams(negative_prompt="b" * 30))
    wanted = run(engines["sdxl"], **params)[1].arrays[0]
    np.testing.assert_array_equal(run(engine, **params)[1].arrays[0], wanted)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_blocks": 5}, "num_blocks applies to models of tokens"),
        ({"max_model_len": 5}, "max_model_len applies to models of tokens"),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size 2 does not suit .*: FluxPipeline makes images, on one rank only",
        ),
    ],
)
def test_options_of_other_models_are_refused(
    folders: dict[str, Path], option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(folders["flux"], **option)


NORM = """
import torch
def ada_layer_norm(x, scale, shift, weight=None, bias=None, eps=1e-6, front=None):
    return torch.zeros_like(x if front is None else torch.cat((front, x), dim=1))
"""


@pytest.mark.slow
def test_candidate_runs_in_a_pipeline_until_undo(folders: dict[str, Path], tmp_path: Path) -> None:
    small = ImageParams(height=16, width=16, num_inference_steps=2, seed=0)
    with LLM(str(folders["flux"]), device="cpu") as llm:
        (before,) = llm.generate_images(PROMPT, small, use_tqdm=False)
        (tmp_path / "ada_layer_norm.py").write_text(NORM)
        with fastkernels.patch(
            llm, candidates={"ada_layer_norm": str(tmp_path / "ada_layer_norm.py")}
        ) as report:
            (patched,) = llm.generate_images(PROMPT, small, use_tqdm=False)
            rows = [r for r in report.refresh().rows if r.op == "ada_layer_norm"]
            assert [(r.reason, r.modules) for r in rows] == [("candidate", n) for n in (4, 2, 1)]
            assert {r.calls for r in rows} == {2 * (4 + 2 + 1)}  # in each of the steps
        (after,) = llm.generate_images(PROMPT, small, use_tqdm=False)
    assert np.abs(patched.arrays[0].astype(int) - before.arrays[0]).max() > 5
    np.testing.assert_array_equal(after.arrays[0], before.arrays[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MAKE)
def test_graphs_give_the_images_of_eager_steps(kind: str, folders: dict[str, Path]) -> None:
    found = []
    for eager in (True, False):
        engine = make_engine(
            EngineConfig(str(folders[kind]), device="cuda", dtype="float32", enforce_eager=eager)
        )
        for name, seed in zip("abc", (1, 2, 3), strict=True):
            engine.add_request(
                name, PROMPT, ImageParams(height=32, width=32, num_inference_steps=6 - seed, seed=seed)
            )
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        found.append({o.request_id: o.arrays[0].astype(int) for o in outputs})
        assert (engine.runner.graphs is None) if eager else engine.runner.graphs.replays > 0
    assert all(np.abs(found[0][name] - found[1][name]).max() <= 1 for name in "abc")
