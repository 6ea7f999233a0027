"""Step caching: steps that reuse the denoiser's output, alone and in a batch with images that compute all steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_pipelines import make_tiny_flux, make_tiny_sdxl

from fastkernels import LLM
from fastkernels.engine.cache.step_cache import StepCache, reusable
from fastkernels.engine.scheduling.denoising import ImageParams

MAKE = {"flux": make_tiny_flux, "sdxl": make_tiny_sdxl}


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """In dB."""
    error = np.square(a.astype(np.float64) - b).mean()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


@pytest.fixture(scope="module", params=MAKE)
def llm(request, tmp_path_factory):
    with LLM(
        str(MAKE[request.param](tmp_path_factory.mktemp(request.param))), device="cpu", max_steps=40
    ) as made:
        yield made


def image(llm: LLM, steps: int = 16, prompt: str = "a cat", **more: Any) -> Any:
    params = ImageParams(num_inference_steps=steps, seed=3, height=16, width=16, **more)
    (output,) = llm.generate_images(prompt, params, use_tqdm=False)
    return output


def test_no_step_is_reused_by_default_or_below_the_threshold(llm):
    plain, strict = image(llm), image(llm, step_cache=1e-9)
    assert plain.steps_reused == strict.steps_reused == [0]
    assert (plain.arrays[0] == strict.arrays[0]).all()


def test_larger_thresholds_reuse_more_steps(llm):
    plain, found = image(llm).arrays[0], []
    for threshold in (0.2, 1.0):
        made = image(llm, step_cache=threshold)
        found.append((made.steps_reused[0], psnr(made.arrays[0], plain)))
    reused = [count for count, _ in found]
    assert reused == sorted(reused) and 0 < reused[-1] <= 11, (
        found
    )  # the first four of 16 and the last are computed
    assert all(quality > 10 for _, quality in found) and found[0][1] >= found[-1][1], found


def test_images_of_a_batch_decide_alone(llm):
    """An image with a cache next to one without: each is the one that it is alone."""
    params = [
        ImageParams(num_inference_steps=10, seed=i, height=16, width=16, step_cache=cache)
        for i, cache in ((1, 1.0), (2, None), (3, 0.01))
    ]
    together = llm.generate_images(["a", "b", "c"], params, use_tqdm=False)
    for prompt, one, output in zip("abc", params, together, strict=True):
        (alone,) = llm.generate_images(prompt, one, use_tqdm=False)
        assert alone.steps_reused == output.steps_reused
        assert np.abs(alone.arrays[0].astype(int) - output.arrays[0]).max() <= 1
    assert together[0].steps_reused[0] and together[1].steps_reused == [0]


def test_rule_is_that_of_the_paper():
    """Against the equations, in float64, on inputs and outputs that drift."""
    rng, steps = np.random.default_rng(0), 30
    inputs = np.cumsum(rng.normal(0, 0.05, (steps, 1, 40)), 0) + rng.normal(0, 1, (1, 1, 40))
    outputs = 0.5 * inputs + np.cumsum(rng.normal(0, 0.02, (steps, 1, 40)), 0)
    cache, error, rate, reused = StepCache(0.2, steps), 0.0, 0.0, []
    last_x = computed_x = computed_v = np.zeros(0)
    for i in range(steps):
        x, tensor = inputs[i], torch.from_numpy(inputs[i])
        wanted = False
        if 6 <= i < steps - 1:
            error += rate * np.abs(x - last_x).mean() / np.abs(computed_v).mean()
            wanted = bool(error < 0.2)
        assert (reusable([None, cache], [i, i], torch.cat((tensor, tensor))) == [1]) is wanted, i
        if wanted:
            v = x + computed_v - computed_x
            np.testing.assert_allclose(cache.reuse(tensor).numpy(), v, atol=1e-12)
            reused.append(i)
        else:
            v = outputs[i]
            if i:
                rate = np.abs(v - computed_v).mean() / np.abs(x - computed_x).mean()
            cache.add(tensor, torch.from_numpy(v))
            error, computed_x, computed_v = 0.0, x, v
        last_x = x
    assert cache.reused == len(reused) and 5 < len(reused) < 23


@pytest.mark.parametrize("value", [0, 1.5, -1, "fast", True, float("nan")])
def test_wrong_thresholds_are_refused(value):
    with pytest.raises(ValueError, match="step_cache must be a number above 0, at most 1, got"):
        ImageParams(step_cache=value)
