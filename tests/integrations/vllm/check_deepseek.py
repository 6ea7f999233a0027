"""DeepSeek-V3 in vLLM: the decode of one latent attention layer, experts of two ranks, and a live engine.

vLLM's kernels for a CPU pack the weights of experts, so the experts are those of a GPU without an engine.
"""

from types import SimpleNamespace

import pytest
import torch
from support.hosts.vllm_engine import first_logprobs, generate, make_llm
from support.tiny import make_tiny

import fastkernels
from fastkernels.patch import PatchError, Request

# vLLM's kernel for a CPU has these sizes only.
SIZES = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 64,
    "head_dim": 64, "topk_method": "noaux_tc",
}  # fmt: skip
OPS = ["mla_decode", "rms_norm", "silu_and_mul"]
BACKEND = "CPU_MLA"  # on a CPU with AMX, vLLM has another one by default, whose decode stays


def test_decode_of_a_layer_is_replaced_and_undone(tmp_path):
    from fk_integrations.patching.apply import apply
    from fk_integrations.vllm.host import VllmAdapter
    from vllm import distributed
    from vllm.config import AttentionConfig, CacheConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    torch.manual_seed(0)
    config = VllmConfig(attention_config=AttentionConfig(backend=BACKEND))
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


def experts_of(rank, w1, w2):
    """Return the parts of vLLM's layer of experts that the seam reads, on one of two ranks with expert parallelism."""
    from vllm.model_executor.layers.fused_moe import activation, modular_kernel
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep

    inside = object.__new__(TritonExperts)
    inside.quant_config = FUSED_MOE_UNQUANTIZED_CONFIG
    kernel = object.__new__(modular_kernel.FusedMoEKernelModularImpl)
    kernel.prepare_finalize, kernel.fused_experts = no_dp_ep.MoEPrepareAndFinalizeNoDPEPModular(), inside
    count, expert_map, _ = determine_expert_map(2, rank, len(w1))
    mine = (expert_map >= 0).nonzero().flatten()
    assert len(mine) == count < len(w1)
    layer = torch.nn.Module()
    layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(w[mine], requires_grad=False) for w in (w1, w2))
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(impl=kernel))
    layer.moe_config = SimpleNamespace(is_lora_enabled=False, in_dtype=torch.float32)
    layer.activation, layer.apply_router_weight_on_input = activation.MoEActivation.SILU, False
    layer.expert_map, layer.top_k = expert_map, 3
    return layer, kernel


def test_experts_of_two_ranks_add_up():
    """Without data parallelism each rank has all tokens, and vLLM's all-reduce adds the parts of its experts."""
    from fk_integrations.patching.apply import apply
    from fk_integrations.vllm.host import VllmAdapter

    from fastkernels.overrides.moe import fused_experts
    from fastkernels.overrides.routing import grouped_topk

    torch.manual_seed(0)
    x, w1, w2 = torch.randn(9, 64), torch.randn(7, 96, 64) / 8, torch.randn(7, 64, 48) / 7
    weights, ids = grouped_topk.reference(torch.randn(9, 7), 3, True, 1, 1, "sigmoid", torch.rand(7), 2.5)
    total = torch.zeros_like(x)
    for rank in range(2):
        layer, kernel = experts_of(rank, w1, w2)
        before, model = type(kernel), torch.nn.ModuleList([layer])
        patched = apply(VllmAdapter(), model, Request("patch", ops=("fused_experts",)), rank)
        arguments = x, layer.w13_weight, layer.w2_weight, ids, weights, layer.activation, 7, layer.expert_map
        total += kernel.apply(*arguments)
        assert patched.report()[0]["calls"] == 1
        patched.undo()
        assert type(kernel) is before
    torch.testing.assert_close(total, fused_experts.reference(x, w1, w2, weights, ids), rtol=1e-4, atol=1e-4)
    # With data parallelism tokens travel between the ranks: the layer stays vLLM's, with a reason.
    kernel.prepare_finalize = SimpleNamespace()
    with pytest.raises(PatchError, match="its tokens are exchanged by SimpleNamespace"):
        apply(VllmAdapter(), model, Request("patch", ops=("fused_experts",)), 0)


@pytest.fixture
def gpu_routers(monkeypatch):
    """Give layers the routers of a GPU: vLLM has another one for a CPU. Its grouped_topk runs uncompiled."""
    from vllm.model_executor.layers.fused_moe.router import router_factory as factory

    def make(
        use_grouped_topk, num_expert_group, topk_group, custom_routing_function, hash_indices_table, **rest
    ):
        groups = {"num_expert_group": num_expert_group, "topk_group": topk_group}
        if use_grouped_topk:
            return factory.GroupedTopKRouter(**groups, **rest)
        for name in ("routed_scaling_factor", "e_score_correction_bias"):
            rest.pop(name)
        return factory.FusedTopKRouter(**rest)

    monkeypatch.setattr(factory, "CPURouter", make)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def routers(llm):
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return [vars(m)["router"] for m in worker.get_model().modules() if "router" in vars(m)]


def test_groups_are_chosen_by_ours_and_undo_is_exact(tmp_path, gpu_routers):
    fields = {**SIZES, "scoring_func": "sigmoid"}
    llm = make_llm(str(make_tiny(tmp_path / "deepseek", "deepseek_v3", **fields)))
    found = routers(llm)
    classes, stock = [type(r) for r in found], generate(llm)
    assert {c.__name__ for c in classes} == {"GroupedTopKRouter"} and found[
        0
    ].e_score_correction_bias is not None
    report = fastkernels.patch(llm, ops=["grouped_topk"], strict=True)
    patched = generate(llm)
    (row,) = report.refresh().active
    assert (row.op, row.modules, row.reason) == ("grouped_topk", len(found), "") and not row.fallbacks
    assert row.calls >= len(found) * 3 * 8 and report.verified
    assert [tokens for tokens, _ in patched] == [tokens for tokens, _ in stock]
    assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.02)
    report.undo()
    assert [type(r) for r in found] == classes and generate(llm) == stock
    for router in found:
        router.scoring_func = "sqrtsoftplus"
    with pytest.raises(PatchError, match="scoring_func='sqrtsoftplus' of its router is not supported"):
        fastkernels.patch(llm, ops=["grouped_topk"])
    for router in found:
        router.scoring_func, router._compute_routing = "sigmoid", router._compute_routing
    with pytest.raises(PatchError, match=r"its router\._compute_routing was replaced by other code"):
        fastkernels.patch(llm, ops=["grouped_topk"])
    assert [type(r) for r in found] == classes


def test_softmax_router_runs_ours_and_refuses_sigmoid():
    """Without an engine: vLLM's own kernel for this router is for GPUs."""
    from fk_integrations.patching.apply import apply
    from fk_integrations.vllm.host import VllmAdapter
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    from fastkernels.overrides.routing import topk_softmax

    torch.manual_seed(0)
    layer, other = torch.nn.Module(), torch.nn.Module()
    layer.router, other.router = FusedTopKRouter(3, 16), FusedTopKRouter(3, 16, "sigmoid")
    patched = apply(
        VllmAdapter(), torch.nn.ModuleList([layer, other]), Request("patch", ops=("topk_softmax",))
    )
    logits = torch.randn(9, 16)
    weights, ids = layer.router.select_experts(torch.randn(9, 8), logits, torch.int64)
    expected = topk_softmax.reference(logits, 3, True)
    torch.testing.assert_close(weights, expected[0])
    assert torch.equal(ids, expected[1].long())
    (row,) = patched.report()
    assert (row["modules"], row["calls"]) == (1, 1)
    assert row["reason"] == "1 unsupported: scoring_func='sigmoid' of its router is not supported"
    assert type(other.router) is FusedTopKRouter is not type(layer.router)
    patched.undo()
    assert type(layer.router) is FusedTopKRouter


def test_deepseek_v3_runs_ours_and_undo_is_exact(tmp_path):
    model = make_tiny(tmp_path / "deepseek", "deepseek_v3", **SIZES)
    llm = make_llm(str(model), attention_backend=BACKEND)
    stock = generate(llm)
    report = fastkernels.patch(llm, ops=OPS)
    patched = generate(llm)
    rows = {r.op: r for r in report.refresh().active}
    assert report.verified and rows["mla_decode"].modules == 2 and rows["mla_decode"].calls >= 2 * 3 * 7
    assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
    report.undo()
    assert generate(llm) == stock
