"""A live vLLM engine with Gemma 2's norms and GeGLU; and vLLM's LayerNorm, which Gemma does not have."""

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


def test_layer_norm_is_the_hosts():
    from fk_integrations.core.apply import apply
    from fk_integrations.vllm.host import VllmAdapter
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import LayerNorm

    from fastkernels.core.dispatch import OPS
    from fastkernels.patch import Request

    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        made = {"bias": LayerNorm(63), "float32": LayerNorm(63, bias=False, dtype=torch.float32)}
        model = torch.nn.ModuleDict({**made, "plain": LayerNorm(63, elementwise_affine=False)})
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
        x = torch.randn(5, 63).bfloat16() + 1
        expected = [norm(x) for norm in model.values()]
        patched = apply(VllmAdapter(), model, Request("patch", ops=["layer_norm"]), 0)
        found = [norm(x) for norm in model.values()]
        assert OPS["layer_norm"].calls == 3
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype == torch.bfloat16
            torch.testing.assert_close(ours, theirs)
        patched.undo()
        assert all(type(norm) is LayerNorm for norm in model.values())
        assert all(torch.equal(norm(x), e) for norm, e in zip(model.values(), expected, strict=True))
