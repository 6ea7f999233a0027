"""Volume rendering of samples along rays: Max 1995; Mildenhall et al., arXiv 2003.08934, equation 3."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Tensor, uniform
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel


def reference(
    colors: torch.Tensor, densities: torch.Tensor, steps: torch.Tensor, light: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """colors: [R, S, 3]; densities, steps: [R, S], front to back; light: [R], before the first sample.

    Returns sum_i T_i (1 - exp(-density_i step_i)) color_i, [R, 3], with T_i the light before sample i, and the light
    behind all samples, [R]. A step of 0 is no sample. Computed in at least float32. Raises ValueError.
    """
    _check(colors, densities, steps, light)
    acc = torch.promote_types(light.dtype, torch.float32)
    depth = torch.where(steps > 0, densities.to(acc) * steps.to(acc), 0)
    after = light.to(acc)[:, None] * (-depth.cumsum(1)).exp()
    before = torch.cat((light.to(acc)[:, None], after), 1)
    weights = torch.where(depth > 0, before[:, :-1] * -torch.expm1(-depth), 0)
    used = torch.where((weights > 0)[..., None], colors.to(acc), 0)
    return (weights[..., None] * used).sum(1).to(light.dtype), before[:, -1].to(light.dtype)


def _check(colors: torch.Tensor, densities: torch.Tensor, steps: torch.Tensor, light: torch.Tensor) -> None:
    lead = densities.shape
    if len(lead) != 2 or colors.shape != (*lead, 3) or steps.shape != lead or light.shape != lead[:1]:
        raise ValueError(
            "composite_rays: densities and steps must be [R, S], colors [R, S, 3] and light [R], got"
            f" {', '.join(str(list(t.shape)) for t in (densities, steps, colors, light))}"
        )


@triton.jit(do_not_specialize=["R"])
def _composite_kernel(
    colors_ptr,
    densities_ptr,
    steps_ptr,
    light_ptr,
    out_ptr,
    left_ptr,
    R,
    S,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # One ray a thread.
    follow(OVERLAP)
    ray = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = ray < R
    light = tl.load(light_ptr + ray, mask=here, other=0.0)
    start, depth = light, tl.zeros([BLOCK], tl.float32)
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    for s in range(S):
        at = ray * S + s
        step = tl.load(steps_ptr + at, mask=here, other=0.0).to(tl.float32)
        there = here & (step > 0.0)
        own = tl.load(densities_ptr + at, mask=there, other=0.0).to(tl.float32) * tl.where(there, step, 0.0)
        depth += own
        after = start * tl.exp(-depth)
        # 1 - exp(-x) by its series where the difference cancels
        opaque = tl.where(
            own < 1e-2, own * (1.0 - own * (0.5 - own * (0.16666667 - own * 0.041666667))), 1.0 - tl.exp(-own)
        )
        weight = tl.where(own > 0.0, light * opaque, 0.0)
        used = there & (weight > 0.0)
        red += weight * tl.load(colors_ptr + at * 3, mask=used, other=0.0).to(tl.float32)
        green += weight * tl.load(colors_ptr + at * 3 + 1, mask=used, other=0.0).to(tl.float32)
        blue += weight * tl.load(colors_ptr + at * 3 + 2, mask=used, other=0.0).to(tl.float32)
        light = after
    tl.store(out_ptr + ray * 3, red, mask=here)
    tl.store(out_ptr + ray * 3 + 1, green, mask=here)
    tl.store(out_ptr + ray * 3 + 2, blue, mask=here)
    tl.store(left_ptr + ray, light, mask=here)


def _supports_triton(
    colors: torch.Tensor, densities: torch.Tensor, steps: torch.Tensor, light: torch.Tensor
) -> str | None:
    if light.dtype != torch.float32 or torch.float64 in (colors.dtype, densities.dtype, steps.dtype):
        return f"the kernel has the light in float32, not {light.dtype}, and no float64"
    return None


def _triton(
    colors: torch.Tensor, densities: torch.Tensor, steps: torch.Tensor, light: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(colors, densities, steps, light)
    rays, samples = densities.shape
    out, left = light.new_empty(rays, 3), torch.empty_like(light, memory_format=torch.contiguous_format)
    if rays:
        launch_kernel(
            _composite_kernel, (cdiv(rays, 128),), colors.contiguous(), densities.contiguous(), steps.contiguous(),
            light.contiguous(), out, left, rays, samples, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out, left


composite_rays = define(
    "composite_rays(Tensor colors, Tensor densities, Tensor steps, Tensor light) -> (Tensor, Tensor)",
    fake=lambda colors, densities, steps, light: (
        light.new_empty((light.shape[0], 3)),
        light.new_empty(light.shape),
    ),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider(
            "reference",
            lambda *args: tuple(t.clone() for t in reference(*args)),
            devices=("cuda", "cpu"),
        ),
    ),
)


def _steps(call: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Steps of instant-ngp's size; a quarter of the places are no samples."""
    made = 0.0017 + 0.01 * call.rand(*shape)
    return made.where(call.rand(*shape) < 0.75, 0).to(dtype)


def _densities(call: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (2 + 2 * call.randn(*shape)).exp().clamp_max(1e4).to(dtype)


def _case(name: str, tag: str, rays: int, samples: int, dtype: str = "float32", weight: float = 1) -> Case:
    return Case(name, {"rays": rays, "samples": samples}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="composite_rays",
    level=1,
    reference=reference,
    op=composite_rays,
    arguments=(
        Tensor("colors", "rays samples 3", values=uniform(0.0, 1.0)),
        Tensor("densities", "rays samples", values=_densities),
        Tensor("steps", "rays samples", "float32", values=_steps),
        Tensor("light", "rays", "float32", values=uniform(0.0, 1.0)),
    ),
    outputs=(Tensor("out", "rays 3", "float32"), Tensor("left", "rays", "float32")),
    axes={"rays": Axis.per_call(), "samples": Axis.option()},
    flops="20 * rays * samples",
    cases=(
        _case("rays_1080p", "model", 1920 * 1080, 16, weight=8),
        _case("rays_256k", "model", 1 << 18, 16, "float16", weight=4),
        _case("one", "odd", 1, 1),
        _case("odd_63", "odd", 63, 16),
        _case("odd_1000", "odd", 1000, 3),
        _case("odd_1128", "odd", 1128, 8, "float16"),
        _case("long", "odd", 33, 129),
        _case("odd_bf16", "odd", 130, 5, "bfloat16"),
        _case("no_samples", "odd", 9, 0),
        _case("none", "odd", 0, 4),
    ),
    tolerance=dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(1e-5, 1e-4)),
    activations=("colors",),
    baseline="reference",
)  # fmt: skip
