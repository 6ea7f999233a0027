"""Features that need an engine of their own: quantized models, windows, fp8 caches, speculative decoding."""

import pytest
import torch
from support.eagle import make_tiny_eagle3
from support.hosts.vllm_features import (
    BASE,
    LEAVES,
    PROMPTS,
    both_ways,
    build,
    check_lora_rows,
    outputs,
    reason,
)
from support.tiny import make_tiny
from support.variants import make_lora, make_quantized, unpacked

import fastkernels

__all__ = ["build"]  # a fixture
QUANTIZED = {
    "fp8": "CompressedTensorsLinearMethod", "gptq": "AutoGPTQLinearMethod", "awq": "AutoAWQMarlinLinearMethod",
}  # fmt: skip


@pytest.fixture
def four_bits():
    """vLLM's CPU kernel for four bits, in PyTorch if the wheel has none for this CPU (no AVX-512)."""
    from vllm import _custom_ops  # noqa: F401 - loads the build: an op defined here before it would end the process

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        yield
        return

    def gemm(x, q_weight, out, scales, zeros, bias, pack_factor, isa_hint):
        (groups, n), k = scales.shape, x.shape[1]  # q_weight: 16 columns after 16, each [K, 16] in nibbles
        values = unpacked(q_weight.view(n // 16, k, 2)).transpose(0, 1).reshape(k, n)
        zero = 8 if zeros is None else unpacked(zeros).repeat_interleave(k // groups, 0)
        weight = (values - zero) * scales.float().repeat_interleave(k // groups, 0)
        out.copy_(x.float() @ weight + (0 if bias is None else bias))

    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "cpu_gemm_wna16(Tensor x, Tensor q_weight, Tensor(a!) out, Tensor scales, Tensor? zeros, Tensor? bias,"
        " int pack_factor, str isa_hint) -> ()"
    )
    library.impl("cpu_gemm_wna16", gemm, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_linear_layers_are_left_with_the_reason(build, tmp_path, four_bits, kind):
    model = make_quantized(tmp_path / kind, BASE, kind)
    for report in both_ways(build, outputs, model):
        assert not any(r.op == "linear" for r in report.active)
        assert reason(report, "linear").startswith("8 unsupported: quant_method is vllm.")
        assert QUANTIZED[kind] in reason(report, "linear")
        assert reason(report, "gated_mlp") == f"2 unsupported: gate_up_proj is quantized by {QUANTIZED[kind]}"


def test_sliding_window(build, tmp_path):
    model = make_tiny(tmp_path / "mistral", "mistral")
    ops = [*LEAVES, "linear", "attention"]
    for report in both_ways(build, outputs, model, ops):
        assert "cpu_attn:CPUAttentionBackendImpl" in reason(report, "attention")
    wide = make_tiny(tmp_path / "wide", "mistral", sliding_window=None)
    assert outputs(build(wide)) != outputs(build(model))  # the window matters at these lengths


def test_fp8_kv_cache(build):
    if not torch.cpu._is_avx512_supported():
        with pytest.raises(NotImplementedError, match="FP8 KV cache on CPU requires"):
            build(kv_cache_dtype="fp8")
        return
    for report in both_ways(build, outputs, kv_cache_dtype="fp8"):
        assert "cpu_attn:CPUAttentionBackendImpl" in reason(report, "attention")


def test_speculative_decoding_with_several_tokens_a_step(build):
    """The draft model is the model itself: nearly all of its three tokens are accepted, four tokens a step."""
    draft = {"method": "draft_model", "model": str(BASE), "num_speculative_tokens": 3}
    for report in both_ways(build, outputs, speculative_config=draft):
        rows = {r.op: r for r in report.active}
        steps, tokens = rows["embedding"].calls, 8 * len(PROMPTS)
        assert (
            rows["rms_norm"].calls == 5 * steps and steps < tokens / 2
        )  # the draft's own norms are the host's


def test_eagle3_draft_is_patched_before_construction(build, tmp_path):
    """Drafts are the host's algorithm: tokens are those of the target with and without the patch."""
    target = make_tiny(tmp_path / "target", "llama", num_hidden_layers=4)
    draft = make_tiny_eagle3(tmp_path / "eagle", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    settings = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 2}
    plain = outputs(build(target, gpu_memory_utilization=0.1))
    report = fastkernels.patch("vllm", ops=[*LEAVES, "linear"])
    try:
        llm = build(target, speculative_config=settings, gpu_memory_utilization=0.1)
        assert [tokens for tokens, _ in outputs(llm)] == [tokens for tokens, _ in plain]
        rows = {r.op: r for r in report.refresh().active}
        assert rows["rms_norm"].calls > 0
    finally:
        report.undo()


def test_lora(build, tmp_path):
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("a", 1, str(make_lora(tmp_path / "lora", BASE)))

    def say(llm):
        plain, adapted = outputs(llm), outputs(llm, lora=adapter)
        assert plain != adapted
        return plain + adapted

    for report in both_ways(build, say, enable_lora=True, max_lora_rank=8, max_loras=1):
        check_lora_rows(report)
