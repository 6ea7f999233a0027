"""vLLM as users run it: compiled, the engine and its worker in processes of their own."""

import os

import pytest
from support.checks import RMS_NORM_BUG, interrupted
from support.hosts.vllm_engine import first_logprobs, generate, make_llm

import fastkernels
from fastkernels.patch import PatchError


@pytest.fixture(scope="module")
def llm():
    llm = make_llm(os.environ["TINY_LLAMA"], enforce_eager=False)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def stock(llm):
    return generate(llm)


def test_live_patch_is_compiled_in_and_undo_is_exact(llm, stock):
    report = fastkernels.patch(llm, ops=["rms_norm", "silu_and_mul"])
    assert report.pids[0] != os.getpid()
    assert report.reset().patched_calls == 0
    patched = generate(llm)
    assert report.refresh().verified
    assert report.patched_calls == 3 * 8 * (5 + 2)  # a call a module and step: the compiled code calls ours
    assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
    report.undo()
    assert generate(llm) == stock


def test_a_failure_while_compiling_leaves_everything_as_it_was(llm, stock, candidate):
    with pytest.raises(PatchError, match="a bug in the candidate"):
        fastkernels.patch(llm, ops=["rms_norm"], candidates={"rms_norm": candidate(RMS_NORM_BUG)})
    assert generate(llm) == stock


@pytest.mark.parametrize("seconds", [0.01, 0.3, 2.0, 6.0])
def test_interrupted_patch_is_undone(llm, stock, seconds):
    """The engine's process finishes the patch, and undoes it before the next request."""
    if not interrupted(lambda: fastkernels.patch(llm, ops=["rms_norm"]), seconds):
        fastkernels.unpatch(llm)
    assert generate(llm) == stock
    fastkernels.patch(llm, ops=["rms_norm"]).undo()


def test_interrupted_undo_is_ended_by_the_next(llm, stock):
    report = fastkernels.patch(llm, ops=["rms_norm"])
    interrupted(report.undo, 0.3)
    report.undo()
    assert generate(llm) == stock
    fastkernels.patch(llm, ops=["rms_norm"])  # without its report
    fastkernels.unpatch(llm)
    assert generate(llm) == stock
