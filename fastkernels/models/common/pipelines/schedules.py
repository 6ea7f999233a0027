"""Schedules of diffusion: times, and steps as x = keep * x + add * output, by diffusers' scheduler configs.

A schedule is computed once for a request. All of its numbers are float32, as in diffusers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastkernels.models.common.configs import pipeline_folder
from fastkernels.models.common.descriptions.description import Unsupported

FLOW = {
    "num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": False, "base_shift": 0.5, "max_shift": 1.15,
    "base_image_seq_len": 256, "max_image_seq_len": 4096,
}  # fmt: skip
FLOW_FIXED: dict[str, tuple[Any, ...]] = {
    "time_shift_type": ("exponential", "linear"), "invert_sigmas": (False,), "shift_terminal": (None, 0),
    "use_karras_sigmas": (False,), "use_exponential_sigmas": (False,), "use_beta_sigmas": (False,),
    "stochastic_sampling": (False,),
}  # fmt: skip
NOISE = {"num_train_timesteps": 1000, "beta_start": 0.0001, "beta_end": 0.02, "steps_offset": 0}
NOISE_FIXED: dict[str, tuple[Any, ...]] = {
    "beta_schedule": ("linear", "scaled_linear"), "prediction_type": ("epsilon", "v_prediction"),
    "timestep_spacing": ("linspace", "leading", "trailing"), "interpolation_type": ("linear",),
    "timestep_type": ("discrete",), "final_sigmas_type": ("zero", "sigma_min"),
    "use_karras_sigmas": (False, True, None), "use_exponential_sigmas": (False, True, None),
    "use_beta_sigmas": (False, None), "rescale_betas_zero_snr": (False,), "trained_betas": (None,),
    "sigma_min": (None,), "sigma_max": (None,),
    # of other schedulers, in SDXL's published config
    "clip_sample": (False,), "set_alpha_to_one": (False,), "skip_prk_steps": (True,), "sample_max_value": (1.0,),
}  # fmt: skip
SOLVER_FIXED: dict[str, tuple[Any, ...]] = {
    **NOISE_FIXED, "algorithm_type": ("dpmsolver++",), "solver_order": (2, 1), "solver_type": ("midpoint", "heun"),
    "lower_order_final": (True, False), "euler_at_final": (False, True), "thresholding": (False,),
    "dynamic_thresholding_ratio": (0.995,), "use_lu_lambdas": (False, None), "use_flow_sigmas": (False, None),
    "flow_shift": (1.0, 1, None), "lambda_min_clipped": (-math.inf,), "variance_type": (None,),
    "use_dynamic_shifting": (False,), "time_shift_type": ("exponential",),
}  # fmt: skip
EULER, SOLVER = "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"
RHO = 7  # of Karras et al.
FEW = 15  # steps, below which a solver may end with a step of first order


@dataclass(frozen=True)
class Schedule:
    """The N steps of a request, arrays [N] of float32.

    times   what the model takes as its time
    scales  factors of the latents that the model takes
    keep, add  latents = keep * latents + add * output of the model
    noise   the factor of the first latents, which are normal noise
    signal, level  [N], latents before a step = signal * clean latents + level * noise: to begin there from an image
    clean   [2, N], of a solver of second order: clean latents = clean[0] * latents + clean[1] * output
    past    [N], of the same: the next latents have past * the clean latents of the step before, too
    """

    times: np.ndarray
    scales: np.ndarray
    keep: np.ndarray
    add: np.ndarray
    noise: float = 1.0
    signal: np.ndarray | None = None
    level: np.ndarray | None = None
    clean: np.ndarray | None = None
    past: np.ndarray | None = None

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
    times, level = sigmas[:-1] * np.float32(c.num_train_timesteps), sigmas[:-1]
    return Schedule(times, ones, ones, np.diff(sigmas), signal=1 - level, level=level)


def of_noise(config: Any, steps: int, first: int = 0) -> Schedule:
    """The schedule of a model of noise or of velocities, by the scheduler's class. Raises Unsupported.

    first: the step that a request begins with
    """
    if config.classes.get("scheduler") == SOLVER:
        return dpm_solver(config, steps, first)
    return euler(config, steps)


def euler(config: Any, steps: int) -> Schedule:
    """Euler steps of a variance-exploding process (Karras et al., arXiv 2206.00364, algorithm 2 without churn).

    Raises Unsupported.
    """
    others = f"{EULER}, {SOLVER}"
    if (cls := config.classes.get("scheduler")) != EULER:
        raise Unsupported(f"scheduler: the class {cls!r} is not supported, only {others}")
    c = pipeline_folder.fields(config, "scheduler", (EULER,), NOISE, NOISE_FIXED)
    n, of_all = c.num_train_timesteps, _noise_levels(c)
    if c.timestep_spacing == "linspace":
        times = np.linspace(0, n - 1, steps, dtype=np.float32)[::-1]
    elif c.timestep_spacing == "leading":
        times = (np.arange(steps) * (n // steps))[::-1].astype(np.float32) + c.steps_offset
    else:
        times = np.arange(n, 0, -n / steps)[:steps].round().astype(np.float32) - 1
    found = np.interp(times, np.arange(n), of_all)
    if (spaced := _spaced(c, found[0], found[-1], steps)) is not None:
        found, times = spaced, _times_of(spaced, of_all)
    sigmas = np.append(found, _last(c, of_all))
    now, change = sigmas[:-1], np.diff(sigmas)
    wide = np.sqrt(now**2 + 1)
    if c.prediction_type == "epsilon":
        keep, add = np.ones(steps), change
    else:
        keep, add = 1 + change * now / wide**2, change / wide
    largest = sigmas.max()
    noise = largest if c.timestep_spacing in ("linspace", "trailing") else math.sqrt(largest**2 + 1)
    made = [a.astype(np.float32) for a in (times, 1 / wide, keep, add, np.ones(steps), now)]
    return Schedule(made[0], made[1], made[2], made[3], float(np.float32(noise)), made[4], made[5])


def dpm_solver(config: Any, steps: int, first: int = 0) -> Schedule:
    """DPM-Solver++ of first or second order, multistep (Lu et al., arXiv 2211.01095, algorithm 2). See of_noise.

    Raises Unsupported.
    """
    c = pipeline_folder.fields(config, "scheduler", (SOLVER,), NOISE, SOLVER_FIXED)
    n, of_all = c.num_train_timesteps, _noise_levels(c)
    if c.timestep_spacing == "linspace":
        times = np.linspace(0, n - 1, steps + 1).round()[:0:-1]
    elif c.timestep_spacing == "leading":
        times = (np.arange(steps + 1) * (n // (steps + 1)))[:0:-1] + float(c.steps_offset)
    else:
        times = np.arange(n, 0, -n / steps)[:steps].round() - 1
    if (spaced := _spaced(c, of_all[-1], of_all[0], steps)) is None:
        found = np.interp(times, np.arange(n), of_all)
    else:
        found, times = spaced, _times_of(spaced, of_all)
        times = times.round() if c.use_karras_sigmas else np.trunc(times)
    sigmas = np.append(found, _last(c, of_all)).astype(np.float32).astype(np.float64)
    signal = 1 / np.sqrt(sigmas**2 + 1)  # with noise * signal, of which sigma is the ratio, of variance 1
    if c.prediction_type == "epsilon":
        clean = np.stack((1 / signal[:-1], -sigmas[:-1]))
    else:
        clean = np.stack((signal[:-1], -sigmas[:-1] * signal[:-1]))
    with np.errstate(divide="ignore"):
        lengths = -np.diff(np.log(sigmas))  # in log(signal / noise); inf for the last step to no noise
    decay = np.expm1(-lengths)
    now, before = -signal[1:] * decay, np.zeros(steps)  # factors of the clean latents, and of their change
    final = c.final_sigmas_type == "zero" or c.euler_at_final or (c.lower_order_final and steps < FEW)
    for i in range(first + 1, steps - final if c.solver_order == 2 else 0):
        h, last = lengths[i], lengths[i - 1]
        if h > 0 and last > 0:
            bend = decay[i] / h + 1 if c.solver_type == "heun" else -decay[i] / 2
            before[i] = signal[i + 1] * bend * h / last
    both = now + before
    keep = sigmas[1:] * signal[1:] / (sigmas[:-1] * signal[:-1]) + both * clean[0]
    now_level = sigmas[:-1] * signal[:-1]
    made = [
        a.astype(np.float32) for a in (times, np.ones(steps), keep, both * clean[1], signal[:-1], now_level)
    ]
    more = [a.astype(np.float32) for a in (clean, -before)]
    return Schedule(made[0], made[1], made[2], made[3], 1.0, made[4], made[5], more[0], more[1])


def _noise_levels(c: Any) -> np.ndarray:
    """Noise over signal at each time of the training, rising.

    In float32 and in this order, as in diffusers, since published models are run with those numbers.
    """
    root = 1 if c.beta_schedule == "linear" else 2
    ends = c.beta_start ** (1 / root), c.beta_end ** (1 / root)
    betas = torch.linspace(*ends, c.num_train_timesteps, dtype=torch.float32, device="cpu") ** root
    kept = torch.cumprod(1 - betas, dim=0)
    found: np.ndarray = torch.sqrt((1 - kept) / kept).numpy()
    return found


def _last(c: Any, of_all: np.ndarray) -> float:
    return float(of_all[0]) if c.final_sigmas_type == "sigma_min" else 0.0


def _spaced(c: Any, largest: float, least: float, steps: int) -> np.ndarray | None:
    """Noise levels that no times are given for; None if the config spaces times."""
    if c.use_karras_sigmas and c.use_exponential_sigmas:
        raise Unsupported("scheduler: use_karras_sigmas and use_exponential_sigmas exclude each other")
    if c.use_karras_sigmas:
        return np.asarray(np.linspace(float(largest) ** (1 / RHO), float(least) ** (1 / RHO), steps) ** RHO)
    if c.use_exponential_sigmas:
        return np.exp(np.linspace(math.log(largest), math.log(least), steps))
    return None


def _times_of(levels: np.ndarray, of_all: np.ndarray) -> np.ndarray:
    """Their times, between those of the training."""
    return np.interp(np.log(levels), np.log(of_all), np.arange(len(of_all)))
