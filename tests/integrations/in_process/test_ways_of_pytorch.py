"""A patched model does in PyTorch as a stock one: copies, gradients, dtypes, hooks and transforms; undo restores it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastkernels

timm = pytest.importorskip("timm")
diffusers = pytest.importorskip("diffusers")
OPS = {
    "transformers": ["gated_mlp", "rms_norm", "rotary_emb"],
    "timm": ["attention_dense", "gated_residual", "gelu", "layer_norm", "patch_embedding"],
    "diffusers": ["attention_dense", "geglu", "layer_norm"],
}
Model = Callable[..., torch.Tensor]


class Whole(nn.Module):
    """A model of one input and one output."""

    def __init__(self, model: nn.Module, *more: torch.Tensor) -> None:
        super().__init__()
        self.model, self.more = model, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = [m.to(x) if m.is_floating_point() else m for m in self.more]
        found: Any = self.model(x, *more)
        return found if isinstance(found, torch.Tensor) else found[0]


def build(host: str) -> tuple[Whole, torch.Tensor]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2}
    if host == "transformers":
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 11, "use_cache": False}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        return Whole(model).eval(), torch.arange(1, 9).view(2, 4)
    if host == "timm":
        shape: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
        model = timm.create_model("vit_base_patch16_224", **shape, num_classes=7)
        return Whole(model).eval(), torch.randn(2, 3, 16, 16)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8,), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=8,
        attention_head_dim=4,
    )  # fmt: skip
    return Whole(model, torch.tensor(3), torch.ones(1, 2, 8)).eval(), torch.randn(1, 4, 8, 8)


def gradients(model: Whole) -> torch.Tensor:
    found = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    assert found
    return torch.stack(found)


def trained(model: Whole, x: torch.Tensor) -> torch.Tensor:
    model.train()
    with torch.enable_grad():
        model(x).square().sum().backward()
    model.eval()
    return gradients(model)


def checkpointed(model: Whole, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        found: Any = checkpoint(model, x, use_reentrant=False)
        found.square().sum().backward()
    return gradients(model)


def derived(model: Whole, x: torch.Tensor) -> torch.Tensor:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    with torch.enable_grad():
        found = torch.func.grad(loss)(dict(model.named_parameters()))
    return torch.stack([value.norm() for value in found.values()])


def called(model: Whole, x: torch.Tensor) -> torch.Tensor:
    scaled = {name: 1.5 * value for name, value in model.state_dict().items()}
    found: torch.Tensor = torch.func.functional_call(model, scaled, (x,))
    return found


def vectorized(model: Whole, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.vmap(lambda row: model(row[None]))(x)
    return found


def pickled(model: Whole, x: torch.Tensor) -> torch.Tensor:
    data = pickle.dumps(model)
    assert b"fk_integrations" not in data and b"fastkernels\n" not in data
    found: torch.Tensor = pickle.loads(data)(x)
    return found


def saved(model: Whole, x: torch.Tensor) -> torch.Tensor:
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    found: torch.Tensor = torch.load(memory, weights_only=False)(x)
    return found


def copied(model: Whole, x: torch.Tensor) -> torch.Tensor:
    made = copy.copy(model)
    made.model = copy.copy(model.model)
    found: torch.Tensor = made(x)
    return found


def in_dtype(dtype: torch.dtype) -> Callable[[Whole, torch.Tensor], torch.Tensor]:
    def run(model: Whole, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model.to(dtype)(x.to(dtype) if x.is_floating_point() else x)
        model.float()
        return found

    return run


def loaded(model: Whole, x: torch.Tensor) -> torch.Tensor:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: 1.25 * value for name, value in before.items()}, assign=True)
    found: torch.Tensor = model(x)
    model.load_state_dict(before)
    return found


def offloaded(model: Whole, x: torch.Tensor) -> torch.Tensor:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    found: torch.Tensor = model(x)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    return found


def autocast(model: Whole, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: torch.Tensor = model(x)
    return found


def inference(model: Whole, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(x).clone()
    return found


def quantized(model: Whole, x: torch.Tensor) -> torch.Tensor:
    made = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    found: torch.Tensor = made(x)
    return found


def hooked(model: Whole, x: torch.Tensor) -> torch.Tensor:
    seen: list[str] = []
    hooks = [
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
        for name, part in model.named_modules()
        if type(part).__name__ in ("LlamaMLP", "LlamaRMSNorm", "Block", "BasicTransformerBlock")
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return torch.tensor([float(len(seen))])


WAYS: dict[str, Callable[[Whole, torch.Tensor], torch.Tensor]] = {
    "autocast": autocast, "bfloat16": in_dtype(torch.bfloat16), "checkpoint": checkpointed, "copy": copied,
    "deepcopy": lambda model, x: copy.deepcopy(model)(x), "double": in_dtype(torch.float64), "functional": called,
    "grad": derived, "half": in_dtype(torch.float16), "hooks": hooked, "inference": inference, "load": loaded,
    "offload": offloaded, "pickle": pickled, "quantize": quantized, "save": saved, "train": trained,
    "vmap": vectorized,
}  # fmt: skip
# Stock ways that a host itself does not have: UNets compare shapes with numbers, which vmap has no values for.
WITHOUT = {("diffusers", "vmap")}
PAIRS = [(host, way) for host in OPS for way in WAYS if (host, way) not in WITHOUT]


@pytest.mark.parametrize(("host", "way"), PAIRS)
@pytest.mark.filterwarnings("ignore")
def test_patched_models_do_as_the_stock_ones_do(host: str, way: str) -> None:
    whole, x = build(host)
    kept = [type(part) for part in whole.modules()]
    with torch.no_grad():
        wanted = WAYS[way](build(host)[0], x)
        with fastkernels.patch(whole.model, ops=OPS[host]) as report:
            assert {row.op for row in report.active} == set(OPS[host])
            found = WAYS[way](whole, x)
            assert found.dtype == wanted.dtype
            tolerance = 2e-2 if way in ("autocast", "bfloat16", "half", "quantize") else 1e-4
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
            whole(x)
            assert all(row.calls for row in report.refresh().active), "the patch ended"
    assert [type(part) for part in whole.modules()] == kept


class _Inside(torch.fx.Tracer):
    """A tracer that also records what modules of torch.nn compute."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def symbolic(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = torch.fx.symbolic_trace(model)
    assert "fastkernels" not in str(found.graph)
    result: torch.Tensor = found(x)
    return result


def inside(model: Any, x: torch.Tensor) -> torch.Tensor:
    graph = _Inside().trace(model)
    assert "fastkernels" not in str(graph)
    result: torch.Tensor = torch.fx.GraphModule(model, graph)(x)
    return result


def prepared(model: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    made = quantize_fx.prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping(), (x,))
    made(x)
    result: torch.Tensor = quantize_fx.convert_fx(made)(x)
    return result


def features(model: Any, x: torch.Tensor) -> torch.Tensor:
    feature_extraction = pytest.importorskip("torchvision.models.feature_extraction")
    made = feature_extraction.create_feature_extractor(model, ["blocks.0"])
    result: torch.Tensor = made(x)["blocks.0"]
    return result


@pytest.mark.parametrize("way", [symbolic, inside, prepared, features])
@pytest.mark.filterwarnings("ignore")
def test_torch_fx_records_the_hosts_code(way: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    whole, x = build("timm")
    with torch.no_grad():
        wanted = way(whole.model, x)
        with fastkernels.patch(whole.model, ops=OPS["timm"]) as report:
            torch.testing.assert_close(way(whole.model, x), wanted, rtol=2e-2, atol=2e-2)
            whole(x)
            assert all(row.calls for row in report.refresh().active), "the patch ended"
