"""Recurrent layers in vLLM: Mamba-2 against the unpatched engine, Jamba against transformers, others by function.

vLLM's CPU build has no selective scan: an unpatched Jamba fails there, a patched one runs.
"""

import gc

import pytest
import torch
from support.checks import PROMPTS
from support.hosts.held_out import check_same, transformers_logprobs
from support.hosts.vllm_engine import generate, make_llm
from support.tiny import make_tiny

import fastkernels
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recurrence import vllm as ours
from fastkernels.overrides.recurrence.delta_gates import delta_gates


def engine(model, **options):
    return make_llm(str(model), max_model_len=128, num_gpu_blocks_override=64, **options)


def end(llm):
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def proved(report) -> dict[tuple[str, str], tuple[int, int]]:
    """{(op, host's function): (modules, fallbacks)} of the rows that calls have proved."""
    rows = report.refresh().rows
    assert all(row.proof == "calls" and row.calls for row in rows if row.modules)
    return {(r.op, r.host_class): (r.modules, sum(r.fallbacks.values())) for r in rows if r.modules}


def test_mamba2_is_patched_and_undone(tmp_path):
    """In float32: random weights have near-ties in bfloat16."""
    model = make_tiny(tmp_path / "mamba2", "mamba2", dtype="float32", intermediate_size=128)
    llm = engine(model, dtype="float32")
    stock = generate(llm)
    report = fastkernels.patch(llm, ops=["causal_conv1d", "ssd", "mamba_scan"])
    check_same(generate(llm), stock)
    assert proved(report) == {
        ("causal_conv1d", "causal_conv1d_fn_cpu"): (2, 0),
        ("causal_conv1d", "causal_conv1d_update_cpu"): (2, 0),
        ("ssd", "mamba_chunk_scan_combined_varlen"): (2, 0),
        ("ssd", "selective_state_update"): (2, 0),
    }
    report.undo()
    assert generate(llm) == stock
    report = fastkernels.patch(llm)  # without names, recurrences are the host's
    assert not any(row.modules for row in report.rows if row.op in ("causal_conv1d", "ssd"))
    report.undo()
    end(llm)


def test_patched_jamba_equals_transformers(tmp_path):
    model = make_tiny(tmp_path / "jamba", "jamba", dtype="float32")
    llm = engine(model, dtype="float32")
    report = fastkernels.patch(llm, ops=["causal_conv1d", "mamba_scan", "ssd"])
    for prompt, (tokens, logprobs) in zip(PROMPTS, generate(llm), strict=True):
        assert logprobs == pytest.approx(transformers_logprobs(model, prompt, tokens), abs=1e-3)
    assert proved(report) == {
        ("causal_conv1d", "causal_conv1d_fn_cpu"): (3, 0),
        ("causal_conv1d", "causal_conv1d_update_cpu"): (3, 0),
        ("mamba_scan", "selective_scan_fn"): (3, 0),
        ("mamba_scan", "selective_state_update"): (3, 0),
    }
    report.undo()
    end(llm)


def gdn(heads=4, key_heads=2, size=128, tokens=7):
    torch.manual_seed(0)
    q, k = (torch.randn(1, tokens, key_heads, size, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, tokens, heads, size, dtype=torch.bfloat16)
    a, b = (torch.randn(tokens, heads, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, a, b, torch.rand(heads), torch.randn(heads)


def test_gated_delta_rule_equals_vllms_cpu_kernels():
    """The layers of a CPU call kernels without a seam; those of a GPU call these functions, on transposed states."""
    from vllm import _custom_ops as ops

    q, k, v, a, b, a_log, bias = gdn()
    slots, borders = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    pool = torch.randn(4, 4, 128, 128)
    g, beta = delta_gates(a, b, a_log, bias, True)
    theirs = pool.clone()
    out, _ = ops.chunk_gated_delta_rule_cpu(
        query=q, key=k, value=v, g=g[None], beta=beta[None].to(q.dtype), initial_state=theirs, output_final_state=True,
        cu_seqlens=borders, head_first=False, use_qk_l2norm_in_kernel=True, initial_state_indices=slots,
    )  # fmt: skip
    chunks = ours.VllmChunkGatedDeltaRule()
    given = {
        "initial_state": pool[slots.long()].transpose(2, 3),
        "output_final_state": True,
        "cu_seqlens": borders,
    }
    found, last = chunks(q, k, v, g[None], beta[None], **given)
    torch.testing.assert_close(found, out, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(last.transpose(2, 3), theirs[slots.long()], atol=2e-2, rtol=2e-2)
    states = pool.transpose(2, 3).contiguous()
    found, kept = ours.vllm_fused_sigmoid_gating_delta_rule_update(
        a_log, a, b, bias, q, k, v, initial_state=states, cu_seqlens=borders, ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(found, out, atol=3e-2, rtol=3e-2)
    assert kept is states
    torch.testing.assert_close(
        states.transpose(2, 3)[slots.long()], theirs[slots.long()], atol=2e-2, rtol=2e-2
    )


def test_decodes_of_a_gpu_agree_with_each_other():
    """Of one token each: packed queries, separate ones with gates, and those with decays, from the same states."""
    q, k, v, a, b, a_log, bias = gdn(size=24, tokens=3)
    slots, borders = torch.tensor([3, 0, 1], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    pool, (g, beta) = torch.randn(4, 4, 24, 24), delta_gates(a, b, a_log, bias, True)
    packed = torch.cat([x[0].flatten(1) for x in (q, k, v)], 1)
    states, out = [pool.clone() for _ in range(3)], torch.empty(3, 1, 4, 24, dtype=q.dtype)
    ours.vllm_fused_recurrent_gated_delta_rule_packed_decode(
        packed, a, b, a_log, bias, 24**-0.5, states[0], out, slots, True
    )
    tail = {"cu_seqlens": borders, "ssm_state_indices": slots, "use_qk_l2norm_in_kernel": True}
    one, _ = ours.vllm_fused_sigmoid_gating_delta_rule_update(
        a_log, a, b, bias, q, k, v, initial_state=states[1], **tail
    )
    two, _ = ours.vllm_fused_recurrent_gated_delta_rule(
        q, k, v, g[None], beta[None], initial_state=states[2], **tail
    )
    assert torch.equal(one[0], out[:, 0]) and torch.equal(two, one)
    assert torch.equal(states[0], states[1]) and torch.equal(states[1], states[2])
    assert torch.equal(states[0][[0, 2]], pool[[0, 2]]) and not torch.equal(states[0][1], pool[1])


def test_speculative_decoding_is_the_hosts():
    slots = torch.tensor([[1, 2]], dtype=torch.int32)
    with pytest.raises(UnsupportedArgument, match=r"slots \(1, 2\) for 1 sequences"):
        ours.vllm_causal_conv1d_update(
            torch.ones(1, 4), torch.ones(3, 4, 3), torch.ones(4, 4), conv_state_indices=slots
        )
    with pytest.raises(UnsupportedArgument, match="states of 5 inputs for a kernel of 4"):
        ours.vllm_causal_conv1d_update(torch.ones(1, 4), torch.ones(3, 4, 5), torch.ones(4, 4))
