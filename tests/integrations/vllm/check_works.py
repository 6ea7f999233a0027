"""vLLM's features with the patch (docs/what-works.md): the same tokens, and a report that matches the page."""

import pytest
from support.hosts.vllm_engine import make_llm
from support.hosts.vllm_features import (
    BASE,
    LEAVES,
    NAMED,
    check_leaves,
    check_lora_rows,
    check_same,
    outputs,
)
from support.tiny import make_tiny
from support.variants import make_lora

import fastkernels
from fastkernels.patch import PatchError


@pytest.fixture(scope="module")
def llm():
    llm = make_llm(str(BASE), enable_lora=True, max_lora_rank=8, max_loras=1)
    yield llm
    report = fastkernels.patch(llm, ops=LEAVES)
    llm.llm_engine.engine_core.shutdown()
    for call in (report.refresh, report.undo, lambda: fastkernels.patch(llm)):
        with pytest.raises(PatchError, match="the engine has ended"):
            call()


def test_lora(llm, tmp_path):
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("a", 1, str(make_lora(tmp_path / "lora", BASE)))
    stock, adapted = outputs(llm), outputs(llm, adapter)
    assert stock != adapted
    with fastkernels.patch(llm, ops=NAMED) as report:
        check_same(outputs(llm), stock)
        check_same(outputs(llm, adapter), adapted)
        check_leaves(report)
        check_lora_rows(report)
    assert outputs(llm) == stock and outputs(llm, adapter) == adapted


def test_prefix_cache(llm):
    from vllm import SamplingParams

    text, params = "The quick brown fox " * 10, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def cached(llm, end):
        (output,) = llm.generate([text + end], params, use_tqdm=False)
        return output.num_cached_tokens, list(output.outputs[0].token_ids)

    (first, _), (second, tokens) = cached(llm, "jumps"), cached(llm, "sleeps")
    assert first == 0 and second >= 128
    with fastkernels.patch(llm, ops=LEAVES) as report:
        (first, _), (second, patched) = cached(llm, "jumps"), cached(llm, "sleeps")
        assert (first, second >= 128, patched) == (0, True, tokens)  # nothing cached by other kernels
        check_leaves(report)
    assert cached(llm, "sleeps") == (0, tokens)


def test_ours_reads_reloaded_weights(llm, tmp_path):
    other = make_tiny(tmp_path / "other", seed=1)

    def load(path):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        llm.reset_prefix_cache()

    stock = outputs(llm)
    load(other)
    changed = outputs(llm)
    load(BASE)
    assert outputs(llm) == stock and changed != stock
    with fastkernels.patch(llm, ops=NAMED) as report:
        check_same(outputs(llm), stock)
        load(other)
        report.reset()
        check_same(outputs(llm), changed)
        check_leaves(report)
    assert outputs(llm) == changed


def test_an_engine_that_sleeps_is_not_changed(llm):
    stock = outputs(llm)
    report = fastkernels.patch(llm, ops=LEAVES)
    llm.sleep(level=1)
    with pytest.raises(PatchError, match="the engine is asleep or paused"):
        report.undo()
    llm.wake_up()
    check_same(outputs(llm), stock)
    check_leaves(report)
    report.undo()
    llm.sleep(level=1)
    with pytest.raises(PatchError, match="the engine is asleep or paused"):
        fastkernels.patch(llm)
    llm.wake_up()
    assert outputs(llm) == stock
