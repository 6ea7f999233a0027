"""Two stages of a pipeline: each patches its own layers, and the report covers both."""

import os

import pytest
from support.checks import LEAVES
from support.hosts.vllm_engine import generate, make_llm

import fastkernels
from fastkernels.patch import PatchError


def ids(result):
    return [tokens for tokens, _ in result]


def test_two_stages():
    llm = make_llm(os.environ["TINY_LLAMA"], pipeline_parallel_size=2)
    try:
        # The first dummy batch makes the second stage's buffers, and an eager engine on a CPU runs none.
        llm.collective_rpc("execute_dummy_batch")
        stock = generate(llm)
        with fastkernels.patch(llm, ops=[*LEAVES, "embedding"]) as report:
            assert ids(generate(llm)) == ids(stock)
            assert report.refresh().verified and sorted(report.pids) == [0, 1]
            modules = {(r.rank, r.op): r.modules for r in report.active}
            assert modules[0, "embedding"] == 1 and (1, "embedding") not in modules
            assert (modules[0, "rms_norm"], modules[1, "rms_norm"]) == (
                2,
                3,
            )  # the last stage has the final norm
        assert generate(llm) == stock
        with fastkernels.patch(llm, ops=["embedding"]) as report:  # nothing to do in the second stage
            assert ids(generate(llm)) == ids(stock)
            assert [(r.rank, r.modules) for r in report.refresh().active] == [(0, 1)] and report.verified
        with pytest.raises(PatchError, match="nothing to patch: gemma_rms_norm"):
            fastkernels.patch(llm, ops=["gemma_rms_norm"])
        assert generate(llm) == stock
    finally:
        llm.llm_engine.engine_core.shutdown()
