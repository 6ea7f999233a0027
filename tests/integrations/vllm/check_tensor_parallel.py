"""Two workers: both are patched, or neither."""

import os

import pytest
from support.checks import ONLY_RANK_1_FAILS
from support.hosts.vllm_engine import first_logprobs, generate, make_llm

import fastkernels
from fastkernels.patch import PatchError


@pytest.fixture(scope="module")
def llm():
    llm = make_llm(os.environ["TINY_LLAMA"], tensor_parallel_size=2)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def test_both_workers_are_patched(llm):
    stock = generate(llm)
    report = fastkernels.patch(llm, ops=["rms_norm", "silu_and_mul", "embedding"])
    patched = generate(llm)
    report.refresh()
    assert sorted(report.pids) == [0, 1] and len({*report.pids.values(), os.getpid()}) == 3
    assert {(r.rank, r.op) for r in report.active if r.calls} == {
        (rank, op) for rank in (0, 1) for op in ("rms_norm", "silu_and_mul", "embedding")
    }
    assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
    report.undo()
    assert generate(llm) == stock


def test_a_failure_on_one_rank_undoes_the_other(llm, candidate):
    stock = generate(llm)
    with pytest.raises(PatchError, match=r"rank 0.*another rank failed.*rank 1.*not on this rank"):
        fastkernels.patch(llm, ops=["rms_norm"], candidates={"rms_norm": candidate(ONLY_RANK_1_FAILS)})
    assert generate(llm) == stock
    fastkernels.patch(llm, ops=["rms_norm"]).undo()


def test_sums_are_ours_in_both_workers(llm):
    stock = generate(llm)
    report = fastkernels.patch(llm, ops=["all_reduce", "rms_norm"])
    patched = generate(llm)
    report.refresh()
    rows = {r.rank: r for r in report.active if r.op == "all_reduce"}
    assert sorted(rows) == [0, 1] and len({r.calls for r in rows.values()}) == 1
    assert all(r.host_class == "CpuCommunicator" and r.modules == 1 and r.calls for r in rows.values())
    assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
    report.undo()
    assert generate(llm) == stock
    again = fastkernels.patch(llm, ops=["all_reduce"])
    assert first_logprobs(generate(llm)) == pytest.approx(first_logprobs(stock), abs=0.1)
    again.undo()
    assert generate(llm) == stock
