"""Every norm of SGLang and torch against the host's own, without an engine."""

from unittest.mock import patch

import torch
from fk_integrations.core.apply import apply
from fk_integrations.sglang.scheduler import SglangAdapter
from torch import nn

from fastkernels.patch import Request

OPS = ("rms_norm", "gemma_rms_norm", "layer_norm", "rms_norm_gated")


def test_norms_equal_the_hosts():
    """Patched, as close as the dtype allows, and undone exactly."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.srt.layers import layernorm
    from sglang.srt.layers.attention.mamba.mixer2_rms_norm_gated import Mixer2RMSNormGated
    from sglang.srt.models import cohere2_moe, commandr

    torch.compiler.set_stance("force_eager")  # Cohere's functions are compiled
    made = {
        "gemma4": layernorm.Gemma4RMSNorm(64), "gemma4_bare": layernorm.Gemma4RMSNorm(64, with_scale=False),
        "bare": layernorm.RMSNormWithoutScale(64), "cohere": commandr.LayerNorm(64),
        "cohere_moe": cohere2_moe.Cohere2MoeLayerNorm(64), "torch": nn.LayerNorm(64), "torch_rms": nn.RMSNorm(64, 1e-5),
        "mixer": Mixer2RMSNormGated(64, 1), "mixer_groups": Mixer2RMSNormGated(64, 4),
        "gated": layernorm_gated.RMSNorm(64),
    }  # fmt: skip
    gated = ("mixer", "mixer_groups", "gated")
    model = nn.ModuleDict(made).bfloat16()
    x, gate = torch.randn(5, 64).bfloat16() + 1, torch.randn(5, 64).bfloat16()

    def run():
        return {n: norm(x, gate) if n in gated else norm(x) for n, norm in model.items()}

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
        classes, expected = [type(m) for m in model.modules()], run()
        patched = apply(SglangAdapter(None), model, Request("patch", ops=OPS), 0)
        assert [n for n, m in model.items() if type(m) in classes] == []
        found = run()
        for name, theirs in expected.items():
            torch.testing.assert_close(found[name], theirs, msg=lambda text, name=name: f"{name}: {text}")
        patched.undo()
        assert [type(m) for m in model.modules()] == classes
        torch.testing.assert_close(run(), expected, rtol=0, atol=0)
