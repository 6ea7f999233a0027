"""Questions of a diffusers pipeline for devices and dtypes: patched models give the host's answers, and ask less."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fk_integrations.diffusers import offload

import fastkernels

diffusers = pytest.importorskip("diffusers")
from diffusers.hooks import ModelHook, group_offloading  # noqa: E402
from diffusers.models import modeling_utils  # noqa: E402

CPU = torch.device("cpu")


def pipeline(layers: int = 1) -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=layers, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
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
@pytest.mark.parametrize("first", ["change", "patch", "questions"])
def test_answers_are_the_hosts(change: Callable[[Any], None], first: str) -> None:
    pipe = pipeline()
    if first == "change":
        change(pipe.transformer)
    with fastkernels.patch(pipe, ops="attention_dense"):
        if first == "questions":
            answers(pipe)
        if first != "change":
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
    dtype, reset = modeling_utils.get_parameter_dtype, diffusers.hooks.HookRegistry.reset_stateful_hooks
    device = diffusers.DiffusionPipeline._execution_device
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
    assert diffusers.DiffusionPipeline._execution_device is device
    assert diffusers.hooks.HookRegistry.reset_stateful_hooks is reset


def exchanged(blocks: Any, hooked: Any) -> None:
    blocks[0] = hooked


def added(blocks: Any, hooked: Any) -> None:
    blocks[0].attn.more = hooked


def added_to_a_leaf(blocks: Any, hooked: Any) -> None:
    blocks[0].proj_mlp._modules["more"] = hooked


def with_other_children(blocks: Any, hooked: Any) -> None:
    blocks[0]._modules = {**blocks[0]._modules, "proj_mlp": hooked}


def with_another_state(blocks: Any, hooked: Any) -> None:
    state = {**vars(blocks[0]), "_modules": {"proj_mlp": hooked}}
    blocks[0].__dict__ = state


@pytest.mark.parametrize(
    "change", [exchanged, added, added_to_a_leaf, with_other_children, with_another_state]
)
def test_modules_may_change_between_questions(change: Callable[[Any, Any], None]) -> None:
    pipe = pipeline()
    hooked: Any = torch.nn.Linear(2, 2)
    diffusers.hooks.apply_group_offloading(hooked, onload_device=CPU, offload_type="leaf_level")
    with fastkernels.patch(pipe, ops="attention_dense"):
        assert answers(pipe)[-2:] == [None, None]
        change(pipe.transformer.single_transformer_blocks, hooked)
        assert answers(pipe)[-2:] == [hooked._diffusers_hook.get_hook("group_offloading"), None]


def test_searches_keep_no_module_alive() -> None:
    pipe = pipeline()
    with fastkernels.patch(pipe, ops="attention_dense"):
        answers(pipe)
        removed = weakref.ref(pipe.transformer.transformer_blocks[0].ff)
        del pipe.transformer.transformer_blocks[0].ff
        gc.collect()
        assert removed() is None


def lines(run: Callable[[], Any]) -> int:
    """How many lines of Python a call executes."""
    count, before = 0, sys.gettrace()

    def step(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return step

    sys.settrace(step)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: group_offloading._get_top_level_group_offload_hook(model),
        lambda model: model.dtype,
        lambda model: model._reset_stateful_cache(),
    ],
    ids=["hook", "dtype", "reset"],
)
def test_searches_take_no_python_for_each_module(ask: Callable[[Any], Any]) -> None:
    counts = []
    for layers in (1, 4):
        pipe = pipeline(layers)
        with fastkernels.patch(pipe, ops="attention_dense"):
            ask(pipe.transformer)
            ask(pipe.transformer)  # resetting makes a registry
            counts.append(lines(lambda: ask(pipe.transformer)))  # noqa: B023
        assert lines(lambda: ask(pipe.transformer)) > counts[-1]  # noqa: B023
    assert counts[0] == counts[1]


def test_one_question_searches_each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []
    search = offload._Tree.registries

    def counted(tree: Any) -> Any:
        searched.append(tree)
        return search(tree)

    monkeypatch.setattr(offload._Tree, "registries", counted)
    pipe = pipeline()
    with fastkernels.patch(pipe, ops="attention_dense"):
        assert pipe._execution_device == CPU
        searched.clear()
        assert pipe._execution_device == CPU
        assert len(searched) == len(set(searched)) == 2
        monkeypatch.setattr(type(pipe), "device", property(lambda self: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            _ = pipe._execution_device
        offloaded_in_part(pipe.transformer)
        assert group_offloading._get_top_level_group_offload_hook(pipe.transformer) is not None


class Stateful(ModelHook):
    _is_stateful = True
    resets = 0

    def reset_state(self, module: Any) -> Any:
        self.resets += 1
        return module


def test_hooks_with_a_state_are_reset() -> None:
    pipe, hook, later = pipeline(), Stateful(), Stateful()
    registry = diffusers.hooks.HookRegistry.check_if_exists_or_initialize
    registry(pipe.transformer.transformer_blocks[0]).register_hook(hook, "state")
    with fastkernels.patch(pipe, ops="attention_dense"):
        pipe.maybe_free_model_hooks()
        assert hook.resets == 1
        registry(pipe.transformer.proj_out).register_hook(later, "state")
        pipe.transformer._reset_stateful_cache(recurse=False)
        assert (hook.resets, later.resets) == (1, 0)
        pipe.maybe_free_model_hooks()
        assert (hook.resets, later.resets) == (2, 1)


def test_compiled_code_may_ask_a_patched_model() -> None:
    pipe = pipeline()
    with fastkernels.patch(pipe, ops="attention_dense"):
        assert pipe.transformer.dtype == torch.float32
        ask = torch.compile(
            lambda x: x.to(pipe.transformer.dtype).to(pipe.transformer.device),
            backend="eager",
            fullgraph=True,
        )
        assert ask(torch.ones(2).bfloat16()).dtype == torch.float32


def test_modules_of_torchscript_are_searched() -> None:
    pipe = pipeline()
    pipe.vae.decoder.conv_out = torch.jit.trace(pipe.vae.decoder.conv_out, torch.zeros(1, 4, 8, 8).bfloat16())
    with fastkernels.patch(pipe, ops="attention_dense"):
        found = answers(pipe)
        assert found == answers(pipe)
    assert found == answers(pipe)


def image_transformer(linear: bool) -> Any:
    torch.manual_seed(0)
    return diffusers.Transformer2DModel(
        2, 8, in_channels=16, norm_num_groups=4, use_linear_projection=linear, cross_attention_dim=12
    ).eval()


@pytest.mark.parametrize("linear", [True, False])
def test_images_keep_their_channels_last(linear: bool) -> None:
    """In patched models only, for images that come so, until the last patch is undone; the numbers are the host's."""
    host = diffusers.models.transformers.transformer_2d.Transformer2DModel
    name, models = "_get_output_for_continuous_inputs", [image_transformer(linear) for _ in range(3)]
    theirs, text = vars(host)[name], torch.randn(2, 5, 12)
    x = torch.randn(2, 16, 6, 4)
    last = x.contiguous(memory_format=torch.channels_last)

    def formats(image: torch.Tensor) -> list[bool]:
        with torch.no_grad():
            found = [m(image, encoder_hidden_states=text).sample for m in models]
        assert all(torch.allclose(y, found[2], rtol=1e-4, atol=1e-5) for y in found)
        return [y.is_contiguous(memory_format=torch.channels_last) for y in found]

    assert formats(last) == [False] * 3
    reports = [fastkernels.patch(m, ops="gated_residual") for m in models[:2]]
    assert formats(last) == [True, True, False] and formats(x) == [False] * 3
    reports[0].undo()
    assert formats(last) == [False, True, False]
    reports[1].undo()
    assert formats(last) == [False] * 3 and vars(host)[name] is theirs
