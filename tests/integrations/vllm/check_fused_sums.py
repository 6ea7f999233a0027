"""Compiled vLLM on two ranks: sums of ours are fused with our norms behind them, in both ranks, and undo is exact."""

import os

import pytest
from support.hosts.vllm_engine import first_logprobs, generate, make_llm

import fastkernels


def test_sums_are_fused_with_norms():
    llm = make_llm(
        os.environ["TINY_LLAMA"], tensor_parallel_size=2, enforce_eager=False,
        worker_extension_cls="support.hosts.fused_sums.InWorkers",
    )  # fmt: skip
    try:
        stock = generate(llm)
        report = fastkernels.patch(llm, ops=["all_reduce", "rms_norm"])
        patched = generate(llm)
        # Two layers: behind attention and MLP. The sum of the embedding has two users.
        fused = llm.collective_rpc("fused_sums")
        assert fused[0] == fused[1] >= 4 and fused[0] % 4 == 0, fused
        rows = {(r.rank, r.op): r for r in report.refresh().active}
        assert set(rows) == {(rank, op) for rank in (0, 1) for op in ("all_reduce", "rms_norm")}
        assert all(row.calls for row in rows.values()), rows
        assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
        report.undo()
        assert generate(llm) == stock
    finally:
        llm.llm_engine.engine_core.shutdown()
