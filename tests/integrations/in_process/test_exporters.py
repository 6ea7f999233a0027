"""Exporters record the host's code of a patched model: what leaves PyTorch must not need our ops."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import fastkernels

timm = pytest.importorskip("timm")
OPS = {
    "timm": ["attention_dense", "gated_residual", "gelu", "layer_norm", "patch_embedding"],
    "vision": ["attention_dense", "gelu", "layer_norm", "patch_embedding"],
    "text": ["gated_mlp", "rms_norm", "rotary_emb"],
}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}


def build(kind: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """(model, its input)."""
    torch.manual_seed(0)
    if kind == "timm":
        sizes = {
            "img_size": 32,
            "patch_size": 8,
            "embed_dim": 64,
            "depth": 1,
            "num_heads": 2,
            "num_classes": 7,
        }
        return timm.create_model("vit_base_patch16_224", **sizes).eval(), torch.randn(2, 3, 32, 32)
    if kind == "vision":
        config = transformers.SiglipVisionConfig(**_SIZES, image_size=32, patch_size=8)
        return transformers.SiglipVisionModel(config).eval(), torch.randn(2, 3, 32, 32)
    config = transformers.LlamaConfig(**_SIZES, num_key_value_heads=1, vocab_size=97, use_cache=False)
    return transformers.LlamaForCausalLM(config).eval(), torch.arange(1, 13).view(2, 6)


class First(torch.nn.Module):
    """A model that returns its first result, as exporters without classes of results need it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        return out if isinstance(out, torch.Tensor) else out[0]


def traced(model: Any, x: Any) -> tuple[str, Callable[..., Any]]:
    found = torch.jit.trace(model, x)
    return str(found.inlined_graph), found


def exported(model: Any, x: Any) -> tuple[str, Callable[..., Any]]:
    found = torch.export.export(model, (x,))
    return str(found.graph), found.module()


def exported_strictly(model: Any, x: Any) -> tuple[str, Callable[..., Any]]:
    found = torch.export.export(model, (x,), strict=True)
    return str(found.graph), found.module()


def traced_by_fx(model: Any, x: Any) -> tuple[str, Callable[..., Any]]:
    found = torch.fx.symbolic_trace(model.model)  # `First` checks the class of the result, here a proxy
    return str(found.graph), found


def onnx_of(dynamo: bool) -> Callable[[Any, Any], tuple[str, None]]:
    def run(model: Any, x: Any) -> tuple[str, None]:
        pytest.importorskip("onnxscript" if dynamo else "onnx")
        memory = io.BytesIO()
        torch.onnx.export(model, (x,), memory, dynamo=dynamo)
        return memory.getvalue().decode("latin-1"), None

    return run


EXPORTERS = {
    "trace": traced, "fx": traced_by_fx, "export": exported, "export-strict": exported_strictly,
    "onnx": onnx_of(dynamo=True), "onnx-torchscript": onnx_of(dynamo=False),
}  # fmt: skip


# The exporter without torch.export has no operators for the masks of transformers' language models, and torch.fx does
# not trace the control flow of transformers.
PAIRS = [
    pytest.param(kind, name, marks=[] if kind == "timm" or name == "export" else pytest.mark.slow)
    for kind in OPS
    for name in EXPORTERS
    if (kind, name) != ("text", "onnx-torchscript") and (kind == "timm" or name != "fx")
]


@pytest.mark.parametrize(("kind", "exporter"), PAIRS)
@pytest.mark.filterwarnings("ignore")
def test_exporters_record_the_hosts_code(kind: str, exporter: str) -> None:
    model, x = build(kind)
    whole = First(model).eval()
    with torch.no_grad():
        before = whole(x)
        with fastkernels.patch(model, ops=OPS[kind]) as report:
            assert {row.op for row in report.active} == set(OPS[kind])
            recorded, run = EXPORTERS[exporter](whole, x)
            assert "fastkernels" not in recorded
            if run is not None:
                torch.testing.assert_close(run(x), before, rtol=0, atol=1e-6)
            report.refresh()
            if exporter != "export-strict":  # a count would be a constant of code that Dynamo traces
                assert any("an exporter" in reason for row in report.rows for reason in row.left)
            whole(x)
            assert all(row.calls for row in report.refresh().active), "the patch ended with the export"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torch_script_of_patched_modules_is_refused() -> None:
    model, x = build("timm")
    kept = [type(part) for part in model.modules()]
    with fastkernels.patch(model, ops=OPS["timm"]) as report:
        assert {row.op for row in report.active} == set(OPS["timm"])
        for part in (model, model.blocks[0], model.blocks[0].norm1):
            with pytest.raises(RuntimeError, match=r"cannot compile the patched \w+: undo the patch first"):
                torch.jit.script(part)
        with torch.no_grad():
            model(x)
        assert all(row.calls for row in report.refresh().active), "the patch ended"
    assert [type(part) for part in model.modules()] == kept
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))
