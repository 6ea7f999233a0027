"""Blocks of encoders that torch.compile traces: a default patch keeps ours where the compiled host was slower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from fk_integrations.live import traced, trials
from torch._dynamo.backends.registry import lookup_backend

import fastkernels
from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit import hopper

timm = pytest.importorskip("timm")
SWIN = {"img_size": 64, "embed_dim": 24, "depths": (2,), "num_heads": (2,), "window_size": 8}
VJEPA2 = {
    "hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1, "patch_size": 8, "crop_size": 64,
    "frames_per_clip": 4, "pred_hidden_size": 64, "pred_num_attention_heads": 1, "pred_num_hidden_layers": 1,
    "pred_num_mask_tokens": 1,
}  # fmt: skip


TIMM = {
    "vit": "deit3_small_patch16_224",
    "dinov3": "vit_small_patch16_dinov3",
    "eva02": "eva02_base_patch14_224",
    "siglip": "vit_base_patch16_siglip_224",
}


def build(name: str) -> tuple[Any, list[Any], torch.Tensor]:
    """(model, blocks that are compiled, its input)."""
    torch.manual_seed(0)
    if name in TIMM:  # 144 or 169 patches
        sizes = {"img_size": 192, "embed_dim": 64, "depth": 1, "num_heads": 1}
        more = {"dinov3": {"dynamic_img_size": False}, "eva02": {"mlp_ratio": 3}}.get(name, {})
        model = timm.create_model(TIMM[name], **sizes, **more).eval()
        blocks, x = list(model.blocks), torch.randn(1, 3, 192, 192)
    elif name == "swinv2":
        model = timm.create_model("swinv2_tiny_window8_256", **SWIN).eval()
        blocks, x = list(model.layers[0].blocks), torch.randn(2, 3, 64, 64)
    else:
        model = transformers.VJEPA2Model(transformers.VJEPA2Config(**VJEPA2)).eval()
        blocks, x = list(model.encoder.layer), torch.randn(1, 4, 3, 64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.2)
    return (model, blocks, x) if name == "swinv2" else (model.bfloat16(), blocks, x.bfloat16())


OURS = [
    ("swinv2", {"window_attention"}),
    ("vjepa2", {"attention_dense", "linear_gelu", "linear_rope"}),
    ("vit", {"attention_dense", "layer_norm", "linear_gelu", "linear_products", "linear_residual"}),
    ("dinov3", {"attention_dense", "layer_norm", "linear_gelu", "linear_rope", "linear_residual"}),
    ("eva02", {"attention_dense", "layer_norm", "linear_rope", "linear_residual", "linear_swiglu"}),
    ("siglip", {"attention_dense", "layer_norm", "linear_gelu", "linear_products", "linear_residual"}),
]
# Where nothing is ours, all compile in the same way.
DECIDED = [
    *((*case, True) for case in OURS),
    *(pytest.param(*case, False, marks=[] if case[0] == "siglip" else pytest.mark.slow) for case in OURS),
]


@pytest.mark.parametrize(("name", "ops", "kept"), DECIDED)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_are_ours_if_they_win(
    name: str, ops: set[str], kept: bool, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setattr(traced, "why_not", lambda device: None)
    monkeypatch.setattr(traced, "_how", lambda: ({}, "eager"))
    monkeypatch.setattr(traced, "decide", lambda *_: (kept, "slower"))
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0) if kept else (8, 0))
    monkeypatch.setattr(trials, "_measured", lambda *_: trials.Choice(False, False, "the host's"))
    # As Dynamo of torch 2.11 takes it in code that it traces.
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: torch.compiler.is_dynamo_compiling())
    model, blocks, x = build(name)
    classes, seen = [type(m) for m in model.modules()], set()

    def backend(graph: Any, inputs: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return lookup_backend(compiler)(graph, inputs)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(x, skip_predictor=True)[0] if name == "vjepa2" else model.forward_features(x)

    before = run()
    with fastkernels.patch(model):
        run()  # in which ours has lost
        for block in blocks:
            block.compile(fullgraph=True, dynamic=False, backend=backend)
        after = run()
    torch.compiler.reset()
    for block in blocks:
        block._compiled_call_impl = None
    assert before.std() > 0.1, "the outputs are all alike"
    rounding = 1e-4 if before.dtype == torch.float32 else 0.03
    torch.testing.assert_close(after, before, rtol=rounding, atol=rounding * float(before.abs().max()))
    found = {n.removeprefix("fastkernels.").partition(".")[0] for n in seen if n.startswith("fastkernels.")}
    assert found == (ops if kept else set())
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(), before)
