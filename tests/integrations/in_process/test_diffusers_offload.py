"""Questions of a diffusers pipeline for devices and dtypes: patched models give the host's answers, and ask less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastkernels

diffusers = pytest.importorskip("diffusers")
from diffusers.hooks import group_offloading  # noqa: E402
from diffusers.models import modeling_utils  # noqa: E402

CPU = torch.device("cpu")


def pipeline() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=1).bfloat16()
    names = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.FluxPipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, **dict.fromkeys(names)
    )


def plain(model: Any) -> None:
    pass


def offloaded(model: Any) -> None:
    model.enable_group_offload(onload_device=CPU, offload_type="leaf_level")


def offloaded_in_part(model: Any) -> None:
    diffusers.hooks.apply_group_offloading(
        model.single_transformer_blocks[0], onload_device=CPU, offload_type="leaf_level"
    )


def cast(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


def with_norms_in_float32(model: Any) -> None:
    model.bfloat16()
    model.time_text_embed.float()
    model._keep_in_fp32_modules = ["time_text_embed"]


def with_integers_first(model: Any) -> None:
    model.pos_embed.table = torch.nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False)


def answers(pipe: Any) -> list[Any]:
    models = pipe.transformer, pipe.vae
    hooks = [group_offloading._get_top_level_group_offload_hook(m) for m in models]
    return [pipe._execution_device, pipe.device, *((m.device, m.dtype) for m in models), *hooks]


@pytest.mark.parametrize(
    "change", [plain, offloaded, offloaded_in_part, cast, with_norms_in_float32, with_integers_first]
)
@pytest.mark.parametrize("first", ["change", "patch"])
def test_answers_are_the_hosts(change: Callable[[Any], None], first: str) -> None:
    pipe = pipeline()
    if first == "change":
        change(pipe.transformer)
    with fastkernels.patch(pipe, ops="attention_dense"):
        if first == "patch":
            change(pipe.transformer)
        found = answers(pipe)
    assert found == answers(pipe)
    assert (found[-2] is not None) == (change in (offloaded, offloaded_in_part))


def test_patched_models_alone_are_searched_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []
    theirs = group_offloading._get_top_level_group_offload_hook

    def counted(module: Any) -> Any:
        searched.append(module)
        return theirs(module)

    monkeypatch.setattr(group_offloading, "_get_top_level_group_offload_hook", counted)
    dtype = modeling_utils.get_parameter_dtype
    one, two, other = pipeline(), pipeline(), pipeline()
    reports = [fastkernels.patch(pipe, ops="attention_dense") for pipe in (one, two)]
    answers(one), answers(two)
    assert not searched
    answers(other)
    assert set(searched) == {other.transformer, other.vae}
    reports[0].undo()
    searched.clear()
    answers(one), answers(two)
    assert set(searched) == {one.transformer, one.vae}
    reports[1].undo()
    assert group_offloading._get_top_level_group_offload_hook is counted
    assert modeling_utils.get_parameter_dtype is dtype
