"""Copies of patched models are the host's, and `unpatch` restores what has our classes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.kernels import warm
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastkernels

timm = pytest.importorskip("timm")
diffusers = pytest.importorskip("diffusers")
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 8}
TOKENS = torch.arange(6)[None]


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2, num_attention_heads=2)
    return transformers.LlamaModel(config).eval()


def vit() -> Any:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_small_patch16_rope_224", img_size=32, embed_dim=24, depth=1, num_heads=2, num_classes=3
    ).eval()


def unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=2,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip


MODELS: dict[str, tuple[Callable[[], Any], list[str] | None]] = {
    "llama": (llama, None),
    "vit": (vit, ["layer_norm", "gelu", "attention_dense"]),
    "unet": (unet, ["group_norm", "attention_dense", "geglu", "upsample_conv"]),
}


def classes(model: Any) -> list[type]:
    found = [type(m) for m in model.modules()]
    return found + [type(p) for m in model.modules() if (p := vars(m).get("processor")) is not None]


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "EMA": lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)).module,
    "quantize_dynamic": lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Bilinear}),
    "torch.save": saved,
    "copies of parts": lambda m: nn.ModuleList(
        copy.copy(part) for part in m.modules() if not list(part.children())
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", MODELS)
def test_copy_of_a_patched_model_is_the_hosts(name: str, way: str) -> None:
    build, ops = MODELS[name]
    model = build()
    plain, before = COPIES[way](model), classes(model)
    report = fastkernels.patch(model, ops=ops)
    ours = classes(model)
    made = COPIES[way](model)
    assert ours != before and classes(made) == classes(plain) and classes(model) == ours
    for module in made.modules():
        state = {k for k, v in vars(module).items() if k.startswith("_fastkernels") and v is not None}
        assert not state
    report.undo()
    assert classes(model) == before and classes(made) == classes(plain)
    if way in ("deepcopy", "EMA", "torch.save"):
        fastkernels.patch(made, ops=ops).undo()
        assert classes(made) == before


@torch.no_grad()
def test_ema_of_a_patched_model_gives_the_hosts_outputs() -> None:
    model = llama()
    want = model(TOKENS).last_hidden_state
    with fastkernels.patch(model):
        average = AveragedModel(model)
        average.update_parameters(model)
        assert torch.equal(average(TOKENS).last_hidden_state, want)
    assert torch.equal(average(TOKENS).last_hidden_state, want)


class ModulesToSave(nn.Module):
    """A module and a trainable copy of it, in its place: as peft's `modules_to_save`."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save["default"](*args, **kwargs)


@torch.no_grad()
def test_modules_to_save_after_the_patch_are_undone() -> None:
    model = llama()
    want = model(TOKENS).last_hidden_state
    report = fastkernels.patch(model)
    model.norm, model.layers[0].mlp = ModulesToSave(model.norm), ModulesToSave(model.layers[0].mlp)
    torch.testing.assert_close(model(TOKENS).last_hidden_state, want)
    report.undo()
    assert not any(hasattr(kind, "fastkernels") for kind in classes(model))
    assert torch.equal(model(TOKENS).last_hidden_state, want)


def test_saved_model_loads_without_fastkernels(tmp_path: Path) -> None:
    model, file = llama(), tmp_path / "model.pt"
    with fastkernels.patch(model):
        torch.save(model, file)
    code = f"""
import sys
sys.modules["fastkernels"] = sys.modules["fk_integrations"] = None
import torch
model = torch.load({str(file)!r}, weights_only=False)
print(sorted({{type(m).__module__.partition(".")[0] for m in model.modules()}}), type(model.norm).__mro__[1].__name__)
"""
    done = warm.run(["-c", code])
    assert done.stdout == "['torch', 'transformers'] Module\n", done.stderr


class Own(nn.GELU):
    """A class that copies itself."""

    def __deepcopy__(self, memo: Any) -> Any:
        made = type(self)(self.approximate)
        made.copied_by = "its own method"
        return made

    def __copy__(self) -> Any:
        return self.__deepcopy__({})


def test_classes_with_copy_methods_keep_them() -> None:
    from fk_integrations.live.live_class import live_class

    class Ours:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    module = Own()
    module.__class__ = live_class(Own, Ours, differentiable="gelu")
    vars(module)["_fastkernels_x"] = 1
    for made in (copy.deepcopy(module), copy.copy(module)):
        assert type(made) is Own and made.copied_by == "its own method"


def test_unpatch_restores_an_object_with_modules_of_ours() -> None:
    model = llama()
    before = classes(model)
    fastkernels.patch(model)
    part = nn.ModuleList([model.layers[0]])  # shares modules with the patched model
    fastkernels.unpatch(part)
    fastkernels.unpatch(model)
    assert classes(model) == before
    fastkernels.patch(model).undo()
