"""vLLM with enable_expert_parallel on two ranks: each runs its half of the experts with ours, and undo is exact.

With data parallelism, ranks exchange tokens, and the layer stays vLLM's: check_deepseek has the reason.
"""

import pytest
from support.hosts.vllm_engine import first_logprobs, generate, make_llm
from support.tiny import make_tiny

import fastkernels


def test_ranks_run_their_own_experts(tmp_path):
    llm = make_llm(
        str(make_tiny(tmp_path / "mixtral", "mixtral")), tensor_parallel_size=2, enable_expert_parallel=True,
        worker_extension_cls="support.hosts.plain_experts.InWorkers",
    )  # fmt: skip
    try:
        assert llm.collective_rpc("experts_here") == [[2, 2], [2, 2]]  # of four
        stock = generate(llm)
        report = fastkernels.patch(llm, ops=["rms_norm", "fused_experts"], strict=True)
        patched = generate(llm)
        rows = {(r.rank, r.op): r for r in report.refresh().active}
        assert set(rows) == {(rank, op) for rank in (0, 1) for op in ("rms_norm", "fused_experts")}
        for rank in (0, 1):
            row = rows[rank, "fused_experts"]
            assert row.modules == 2 and row.calls >= 2 * 3 * 8 and not row.fallbacks and not row.left
        assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.05)
        report.undo()
        assert generate(llm) == stock
    finally:
        llm.llm_engine.engine_core.shutdown()
