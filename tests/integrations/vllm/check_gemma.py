"""A live vLLM engine with Gemma 2's norms and GeGLU; and vLLM's other norms, which Gemma does not have."""

import pytest
import torch
from support.hosts.vllm_engine import first_logprobs, generate, make_llm
from support.tiny import make_tiny

import fastkernels


def test_gemma_runs_ours_and_undo_is_exact(tmp_path):
    llm = make_llm(str(make_tiny(tmp_path / "gemma2", "gemma2")))
    stock = generate(llm)
    report = fastkernels.patch(llm, ops=["gemma_rms_norm", "gelu_and_mul"])
    patched = generate(llm)
    rows = {r.op: r for r in report.refresh().active}
    assert report.verified and not any(r.fallbacks for r in report.rows)
    assert (rows["gemma_rms_norm"].modules, rows["gelu_and_mul"].modules) == (
        9,
        2,
    )  # four per layer and the last
    steps = 3 * 8
    assert rows["gemma_rms_norm"].calls >= 9 * steps and rows["gelu_and_mul"].calls >= 2 * steps
    assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
    report.undo()
    assert generate(llm) == stock


def test_norms_equal_the_hosts(tmp_path):
    """Every norm of vLLM and torch, without an engine: patched, as close as the dtype allows, and undone exactly.

    A router's GateLinear has no class of ours: `linear` replaces its quant_method.
    """
    from fk_integrations.patching.apply import apply
    from fk_integrations.vllm.host import VllmAdapter
    from torch import nn
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.layernorm import LayerNorm, RMSNormGated
    from vllm.model_executor.layers.mamba.mamba_mixer2 import Mixer2RMSNormGated
    from vllm.model_executor.models import cohere2_moe, commandr
    from vllm.model_executor.models.nemotron import NemotronLayerNorm1P
    from vllm.model_executor.models.transformers.fusers.rms_norm import TPAwareGemmaRMSNorm, TPAwareRMSNorm
    from vllm.third_party.flash_linear_attention.ops.kda import FusedRMSNormGated

    from fastkernels.patch import Request

    ops = ("rms_norm", "gemma_rms_norm", "layer_norm", "rms_norm_gated")
    torch.compiler.set_stance("force_eager")  # Cohere's functions are compiled
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        distributed.init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        gated = {
            "gated": RMSNormGated(63),
            "gated_first": RMSNormGated(63, norm_before_gate=True, activation="sigmoid", group_size=21),
            "mixer": Mixer2RMSNormGated(63, 1),
            "mixer_groups": Mixer2RMSNormGated(63, 3),
            "fused": FusedRMSNormGated(63),
        }
        made = {
            "bias": LayerNorm(63), "float32": LayerNorm(63, bias=False, dtype=torch.float32),
            "plain": LayerNorm(63, elementwise_affine=False),
            "cohere": commandr.LayerNorm(63), "cohere_rms": commandr.RMSNorm(63), "cohere_moe": cohere2_moe.RMSNorm(63),
            "nemotron": NemotronLayerNorm1P(63), "tp": TPAwareRMSNorm(63), "tp_gemma": TPAwareGemmaRMSNorm(63),
            "torch": nn.LayerNorm(63), "torch_rms": nn.RMSNorm(63, 1e-5), **gated,
        }  # fmt: skip
        model = nn.ModuleDict(made)
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
        for name, module in model.items():
            if name != "float32":
                module.bfloat16()
        x, gate = torch.randn(5, 63).bfloat16() + 1, torch.randn(5, 63).bfloat16()

        def run():
            return {n: norm(x, gate) if n in gated else norm(x) for n, norm in model.items()}

        classes, expected = [type(m) for m in model.modules()], run()
        patched = apply(VllmAdapter(), model, Request("patch", ops=ops), 0)
        assert [n for n, m in model.items() if type(m) in classes] == []
        found = run()
        calls = {op: sum(r["calls"] for r in patched.report() if r["op"] == op) for op in ops}
        assert all(calls.values()), calls
        for name, theirs in expected.items():
            torch.testing.assert_close(found[name], theirs, msg=lambda text, name=name: f"{name}: {text}")
        nemotron, residual = model["nemotron"], torch.randn(5, 63).bfloat16()
        ours = nemotron(x, residual)
        patched.undo()
        assert [type(m) for m in model.modules()] == classes
        torch.testing.assert_close(ours, nemotron(x, residual))
        torch.testing.assert_close(run(), expected, rtol=0, atol=0)

        routed = nn.ModuleDict(
            {"gate": GateLinear(64, 8, out_dtype=torch.float32, params_dtype=torch.bfloat16)}
        )
        routed["gate"].weight.normal_()
        routed["gate"].cpu_linear = nn.functional.linear  # as vLLM sets it for weights that it does not pack
        x = torch.randn(5, 64).bfloat16()
        stock, _ = routed["gate"](x)
        patched = apply(VllmAdapter(), routed, Request("patch", ops=("linear",)), 0)
        torch.testing.assert_close(routed["gate"](x)[0], stock, rtol=1.6e-2, atol=1e-2)
        assert [(r["modules"], r["calls"]) for r in patched.report() if r["state"] == "active"] == [(1, 1)]
        patched.undo()
