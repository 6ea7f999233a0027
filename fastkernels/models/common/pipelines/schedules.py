"""Schedules of diffusion: times, and Euler steps as x = keep * x + add * output, by diffusers' scheduler configs.

A schedule is computed once for a request. All of its numbers are float32, as in diffusers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastkernels.models.common import pipeline_folder

FLOW = {
    "num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": False, "base_shift": 0.5, "max_shift": 1.15,
    "base_image_seq_len": 256, "max_image_seq_len": 4096,
}  # fmt: skip
FLOW_FIXED: dict[str, tuple[Any, ...]] = {
    "time_shift_type": ("exponential", "linear"), "invert_sigmas": (False,), "shift_terminal": (None, 0),
    "use_karras_sigmas": (False,), "use_exponential_sigmas": (False,), "use_beta_sigmas": (False,),
    "stochastic_sampling": (False,),
}  # fmt: skip
EULER = {"num_train_timesteps": 1000, "beta_start": 0.0001, "beta_end": 0.02, "steps_offset": 0}
EULER_FIXED: dict[str, tuple[Any, ...]] = {
    "beta_schedule": ("linear", "scaled_linear"), "prediction_type": ("epsilon", "v_prediction"),
    "timestep_spacing": ("linspace", "leading", "trailing"), "interpolation_type": ("linear",),
    "timestep_type": ("discrete",), "final_sigmas_type": ("zero", "sigma_min"), "use_karras_sigmas": (False, None),
    "use_exponential_sigmas": (False, None), "use_beta_sigmas": (False, None), "rescale_betas_zero_snr": (False,),
    "trained_betas": (None,), "sigma_min": (None,), "sigma_max": (None,),
    # of other schedulers, in SDXL's published config
    "clip_sample": (False,), "set_alpha_to_one": (False,), "skip_prk_steps": (True,), "sample_max_value": (1.0,),
}  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """The N steps of a request, arrays [N] of float32.

    times   what the model takes as its time
    scales  factors of the latents that the model takes
    keep, add  latents = keep * latents + add * output of the model
    noise   the factor of the first latents, which are normal noise
    """

    times: np.ndarray
    scales: np.ndarray
    keep: np.ndarray
    add: np.ndarray
    noise: float = 1.0

    def __len__(self) -> int:
        return len(self.times)


def flow_matching(config: Any, steps: int, tokens: int) -> Schedule:
    """Euler steps of flow matching, x' = x + (s' - s) v, with sigmas shifted towards 1.

    tokens: of the image, on which a dynamic shift depends. Raises Unsupported.
    """
    c = pipeline_folder.fields(config, "scheduler", ("FlowMatchEulerDiscreteScheduler",), FLOW, FLOW_FIXED)
    sigmas: np.ndarray = np.linspace(1.0, 1 / steps, steps).astype(np.float32)
    if c.use_dynamic_shifting:
        slope = (c.max_shift - c.base_shift) / (c.max_image_seq_len - c.base_image_seq_len)
        mu = tokens * slope + c.base_shift - slope * c.base_image_seq_len
        bend = math.exp(mu) if c.time_shift_type == "exponential" else mu
        sigmas = bend / (bend + (1 / sigmas - 1))
    else:
        sigmas = c.shift * sigmas / (1 + (c.shift - 1) * sigmas)
    sigmas = np.append(sigmas.astype(np.float32), np.float32(0))
    ones = np.ones(steps, np.float32)
    return Schedule(sigmas[:-1] * np.float32(c.num_train_timesteps), ones, ones, np.diff(sigmas))


def euler(config: Any, steps: int) -> Schedule:
    """Euler steps of a variance-exploding process (Karras et al., arXiv 2206.00364, algorithm 2 without churn).

    Raises Unsupported.
    """
    c = pipeline_folder.fields(config, "scheduler", ("EulerDiscreteScheduler",), EULER, EULER_FIXED)
    n = c.num_train_timesteps
    # In float32 and in this order, as in diffusers, since published models are run with those numbers.
    root = 1 if c.beta_schedule == "linear" else 2
    ends = c.beta_start ** (1 / root), c.beta_end ** (1 / root)
    betas = torch.linspace(*ends, n, dtype=torch.float32, device="cpu") ** root
    kept = torch.cumprod(1 - betas, dim=0)
    of_all = torch.sqrt((1 - kept) / kept).numpy()
    if c.timestep_spacing == "linspace":
        times = np.linspace(0, n - 1, steps, dtype=np.float32)[::-1]
    elif c.timestep_spacing == "leading":
        times = (np.arange(steps) * (n // steps))[::-1].astype(np.float32) + c.steps_offset
    else:
        times = np.arange(n, 0, -n / steps)[:steps].round().astype(np.float32) - 1
    found = np.interp(times, np.arange(n), of_all)
    last = of_all[0] if c.final_sigmas_type == "sigma_min" else 0.0
    sigmas = np.append(found, last)
    now, change = sigmas[:-1], np.diff(sigmas)
    wide = np.sqrt(now**2 + 1)
    if c.prediction_type == "epsilon":
        keep, add = np.ones(steps), change
    else:
        keep, add = 1 + change * now / wide**2, change / wide
    largest = sigmas.max()
    noise = largest if c.timestep_spacing in ("linspace", "trailing") else math.sqrt(largest**2 + 1)
    made = [a.astype(np.float32) for a in (times, 1 / wide, keep, add)]
    return Schedule(made[0], made[1], made[2], made[3], float(np.float32(noise)))
