"""Latent attention in vLLM: its decode alone on a real layer, and a live engine with a tiny DeepSeek-V3."""

from types import SimpleNamespace

import pytest
import torch
from support.hosts.vllm_engine import first_logprobs, generate, make_llm
from support.tiny import make_tiny

import fastkernels

# vLLM's kernel for a CPU has these sizes only.
SIZES = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 64,
    "head_dim": 64,
}  # fmt: skip
OPS = ["mla_decode", "rms_norm", "silu_and_mul"]


def test_decode_of_a_layer_is_replaced_and_undone(tmp_path):
    from fk_integrations.core.apply import apply
    from fk_integrations.vllm.host import VllmAdapter
    from vllm import distributed
    from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    from fastkernels.patch import PatchError, Request

    torch.manual_seed(0)
    config = VllmConfig()
    with set_current_vllm_config(config), torch.inference_mode():
        distributed.init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        up = ColumnParallelLinear(512, 4 * 256, bias=False)
        layer = MLAAttention(4, 0.07, 128, 64, 128, 64, 512, up, cache_config=CacheConfig(), prefix="mla")
        lengths, table = torch.tensor([1, 37, 16], dtype=torch.int32), torch.randperm(9).int().view(3, 3)
        cache = torch.randn(9, 16, 576).bfloat16()
        metadata = SimpleNamespace(
            decode=SimpleNamespace(seq_lens=lengths, block_table=table), max_seq_len=37
        )
        query = torch.randn(3, 4, 512).bfloat16(), torch.randn(3, 4, 64).bfloat16()

        def decode():
            return layer.impl.forward_mqa(query, cache, metadata, layer)[0]

        stock, cls = decode(), type(layer.impl)
        model, adapter = torch.nn.ModuleDict({"attn": layer}), VllmAdapter()
        adapter.worker = SimpleNamespace(vllm_config=config)
        patched = apply(adapter, model, Request("patch", ops=("mla_decode",)), 0)
        torch.testing.assert_close(decode(), stock, rtol=2e-2, atol=2e-2)
        (row,) = patched.report()
        assert (row["op"], row["state"], row["modules"], row["calls"]) == ("mla_decode", "active", 1, 1)
        patched.undo()
        assert type(layer.impl) is cls and torch.equal(decode(), stock)
        config.parallel_config.decode_context_parallel_size = 2
        with pytest.raises(PatchError, match="decode_context_parallel_size=2: its decodes must return"):
            apply(adapter, model, Request("patch", ops=("mla_decode",)), 0)
        assert type(layer.impl) is cls


def test_deepseek_v3_runs_ours_and_undo_is_exact(tmp_path):
    llm = make_llm(str(make_tiny(tmp_path / "deepseek", "deepseek_v3", **SIZES)))
    stock = generate(llm)
    report = fastkernels.patch(llm, ops=OPS)
    patched = generate(llm)
    rows = {r.op: r for r in report.refresh().active}
    assert report.verified and rows["mla_decode"].modules == 2 and rows["mla_decode"].calls >= 2 * 3 * 7
    assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
    report.undo()
    assert generate(llm) == stock
