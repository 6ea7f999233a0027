"""Schedules and names of diffusion pipelines, against diffusers' schedulers and models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastkernels.models.common.checkpoints.checkpoint import weight_files
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import load
from fastkernels.models.common.pipelines import schedules
from fastkernels.models.common.plans import build

FLOW, EULER = "FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler"
SOLVER = "DPMSolverMultistepScheduler"
SDXL = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def config_of(scheduler: Any) -> Any:
    """The config of a pipeline with this scheduler."""
    return SimpleNamespace(
        classes={"scheduler": type(scheduler).__name__}, parts={"scheduler": dict(scheduler.config)}
    )


def walk(scheduler: Any, made: schedules.Schedule, steps: int, tolerance: float = 1e-5) -> None:
    """Both take the same steps on the same outputs of a model."""
    assert len(made) == steps
    np.testing.assert_allclose(made.times, scheduler.timesteps.numpy(), rtol=1e-6)
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(2, 3, 5, generator=generator) * getattr(scheduler, "init_noise_sigma", 1.0)
    ours, before = theirs.clone(), torch.zeros_like(theirs)
    noise = float(getattr(scheduler, "init_noise_sigma", 1.0))
    assert made.noise == pytest.approx(noise, rel=1e-6)
    for i, time in enumerate(scheduler.timesteps):
        if hasattr(scheduler, "scale_model_input"):
            wanted = scheduler.scale_model_input(theirs, time)
            torch.testing.assert_close(ours * made.scales[i], wanted, rtol=tolerance, atol=tolerance)
        output = torch.randn(2, 3, 5, generator=generator)
        theirs = scheduler.step(output, time, theirs, return_dict=False)[0]
        now, ours = ours, made.keep[i] * ours + made.add[i] * output
        if made.clean is not None and made.past is not None:
            ours = ours + made.past[i] * before
            before = made.clean[0, i] * now + made.clean[1, i] * output
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("steps", [1, 3, 28])
@pytest.mark.parametrize(
    "fields",
    [
        {"use_dynamic_shifting": True, "shift": 3.0},
        {
            "use_dynamic_shifting": True,
            "time_shift_type": "linear",
            "base_shift": 0.7,
            "max_image_seq_len": 9000,
        },
        {"shift": 3.0},
        {},
    ],
)
def test_flow_matching_takes_diffusers_steps(fields: dict[str, Any], steps: int) -> None:
    import diffusers
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**fields)
    c, tokens = scheduler.config, 1023
    mu = calculate_shift(tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    walk(scheduler, schedules.flow_matching(config_of(scheduler), steps, tokens), steps)


@pytest.mark.parametrize("steps", [1, 7, 50])
@pytest.mark.parametrize(
    "fields",
    [
        {**SDXL, "timestep_spacing": "leading", "steps_offset": 1},
        {**SDXL, "timestep_spacing": "trailing", "final_sigmas_type": "sigma_min"},
        {"timestep_spacing": "linspace"},
        {**SDXL, "prediction_type": "v_prediction", "timestep_spacing": "leading"},
        {**SDXL, "use_karras_sigmas": True, "timestep_spacing": "leading", "steps_offset": 1},
        {"use_exponential_sigmas": True, "timestep_spacing": "trailing"},
    ],
)
def test_euler_takes_diffusers_steps(fields: dict[str, Any], steps: int) -> None:
    import diffusers

    scheduler = diffusers.EulerDiscreteScheduler(**fields)
    scheduler.set_timesteps(steps)
    walk(scheduler, schedules.euler(config_of(scheduler), steps), steps)


@pytest.mark.parametrize("steps", [1, 2, 9, 30])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**SDXL, "use_karras_sigmas": True},
        {**SDXL, "timestep_spacing": "leading", "steps_offset": 1, "solver_type": "heun"},
        {**SDXL, "timestep_spacing": "trailing", "euler_at_final": True, "final_sigmas_type": "sigma_min"},
        {"use_exponential_sigmas": True, "lower_order_final": False, "final_sigmas_type": "sigma_min"},
        {**SDXL, "prediction_type": "v_prediction", "use_karras_sigmas": True, "solver_type": "heun"},
        {"prediction_type": "v_prediction", "solver_order": 1},
    ],
)
def test_dpm_solver_takes_diffusers_steps(fields: dict[str, Any], steps: int) -> None:
    import diffusers

    scheduler = diffusers.DPMSolverMultistepScheduler(**fields)
    scheduler.set_timesteps(steps)
    # clean latents of random outputs are 150 times as large as latents
    walk(scheduler, schedules.of_noise(config_of(scheduler), steps), steps, tolerance=5e-5)


def test_steps_of_equal_noise_change_nothing() -> None:
    """More steps than times of the training: diffusers' update divides by zero."""
    fields = {"num_train_timesteps": 20, "timestep_spacing": "leading"}
    config = SimpleNamespace(classes={"scheduler": SOLVER}, parts={"scheduler": fields})
    made = schedules.of_noise(config, 30)
    assert made.past is not None
    assert np.isfinite([made.keep, made.add, made.past]).all()
    np.testing.assert_array_equal([made.keep[:-1], made.add[:-1]], [np.ones(29), np.zeros(29)])


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (FLOW, {"stochastic_sampling": True}, "stochastic_sampling=True is not supported, only False"),
        (FLOW, {"shift_terminal": 0.1}, "shift_terminal=0.1 is not supported"),
        (EULER, {"prediction_type": "sample"}, "'sample' is not supported, only 'epsilon' or 'v_prediction'"),
        (EULER, {"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr=True is not supported"),
        (EULER, {"use_beta_sigmas": True}, "use_beta_sigmas=True is not supported, only False or None"),
        (EULER, {"use_karras_sigmas": True, "use_exponential_sigmas": True}, "exclude each other"),
        (SOLVER, {"algorithm_type": "sde-dpmsolver++"}, "is not supported, only 'dpmsolver[+][+]'"),
        (SOLVER, {"solver_order": 3}, "solver_order=3 is not supported, only 2 or 1"),
        ("DDIMScheduler", {}, f"the class 'DDIMScheduler' is not supported, only {EULER}, {SOLVER}"),
    ],
)
def test_other_schedulers_are_refused(cls: str, fields: dict[str, Any], message: str) -> None:
    config = SimpleNamespace(classes={"scheduler": cls}, parts={"scheduler": fields})
    with pytest.raises(Unsupported, match=message):
        schedules.flow_matching(config, 2, 5) if cls == FLOW else schedules.of_noise(config, 2)


@pytest.mark.parametrize(
    ("name", "part", "cls"),
    [("flux", "transformer", "FluxTransformer2DModel"), ("sdxl", "unet", "UNet2DConditionModel")],
)
def test_published_sizes_have_diffusers_parameters(name: str, part: str, cls: str) -> None:
    """Names and shapes at the real widths, with few layers; of the VAE, its decoder."""
    import diffusers

    module = f"fastkernels.models.diffusion.{name}"
    config = load(f"{module}:published")()
    ours = build.skeleton(Path(), config, torch.float32)
    known = load(f"{module}:FIELDS"), config.parts[part]
    fields = {k: v for given in known for k, v in given.items() if v is not None}
    if name == "sdxl":
        fields |= {"use_linear_projection": True, "addition_embed_type": "text_time"}
    with torch.device("meta"):
        vae = diffusers.AutoencoderKL(**config.parts["vae"], down_block_types=["DownEncoderBlock2D"] * 4)
        both = {part: getattr(diffusers, cls)(**fields), "vae": vae}
    theirs = {f"{p}.{k}": v.shape for p, m in both.items() for k, v in m.state_dict().items()}
    assert {k: v.shape for k, v in ours.named_parameters()} == theirs


def test_one_layout_of_weights_is_read(tmp_path: Path) -> None:
    """A folder may hold the same weights in float16 too, and files that an index names."""
    single, half = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"
    for name in (single, half):
        (tmp_path / name).touch()
    assert [f.name for f in weight_files(tmp_path)] == [single]
    (tmp_path / single).unlink()
    assert [f.name for f in weight_files(tmp_path)] == [half]
    parts = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": dict(zip("ab", parts, strict=True))}
    (tmp_path / f"{single}.index.json").write_text(json.dumps(index))
    for name in parts:
        (tmp_path / name).touch()
    assert [f.name for f in weight_files(tmp_path)] == parts
