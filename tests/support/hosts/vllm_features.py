"""Shared by check_works.py and check_works_more.py: engines, each compared with itself patched."""

import gc
import os
from pathlib import Path

import pytest
import torch
from support.hosts.vllm_engine import PROMPTS, make_llm

import fastkernels

LEAVES = ("rms_norm", "silu_and_mul", "rotary_emb", "embedding")
NAMED = [*LEAVES, "linear", "attention", "gated_mlp", "llama_decoder_layer"]
BASE = Path(os.environ["TINY_LLAMA"])


@pytest.fixture
def build():
    """build(model, **options) -> an engine. The previous one is shut down, the last one at the end of the test."""
    built = []

    def end():
        while built:
            built.pop().llm_engine.engine_core.shutdown()
        gc.collect()

    def one(model=BASE, **options):
        end()
        built.append(make_llm(str(model), **options))
        return built[-1]

    yield one
    end()


def outputs(llm, lora=None):
    """[(token ids, log probability of each)] of greedy decoding, one prompt at a time."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = [llm.generate([p], params, use_tqdm=False, lora_request=lora)[0] for p in PROMPTS]
    chosen = [output.outputs[0] for output in found]
    return [
        (list(c.token_ids), [step[t].logprob for t, step in zip(c.token_ids, c.logprobs, strict=True)])
        for c in chosen
    ]


def check_same(patched, stock):
    assert [tokens for tokens, _ in patched] == [tokens for tokens, _ in stock]
    for (_, ours), (_, theirs) in zip(patched, stock, strict=True):
        assert ours == pytest.approx(theirs, abs=0.05)


def check_leaves(report):
    """The norms, activations, ropes and embedding of the two layers are ours and have run, without a fallback."""
    rows = {r.op: r for r in report.refresh().active}
    assert set(LEAVES) <= set(rows) and report.verified and not any(r.fallbacks for r in report.rows)
    assert (rows["rms_norm"].modules, rows["silu_and_mul"].modules) == (5, 2)


def reason(report, op):
    (row,) = [r for r in report.rows if r.op == op]
    return row.reason


def both_ways(build, say, model=BASE, ops=NAMED, **options):
    """The results of `say(engine)` without the patch, with it put in live, after undo, and with it before construction.

    Returns the reports of the two patches, read at the end of each.
    """
    llm = build(model, **options)
    stock = say(llm)
    live = fastkernels.patch(llm, ops=ops)
    check_same(say(llm), stock)
    check_leaves(live)
    live.undo()
    assert say(llm) == stock
    before = fastkernels.patch("vllm", ops=ops)
    try:
        llm = build(model, **options)
        check_same(say(llm), stock)
        check_leaves(before)
    finally:
        before.undo()
    return live, before


def check_lora_rows(report) -> None:
    """The layers inside LoRA's wrappers are patched once. On a CPU with AMX vLLM has packed the linear ones."""
    rows = {r.op: r for r in report.active}
    assert rows["embedding"].modules == 1 and rows["gated_mlp"].modules == 2
    if torch.cpu._is_amx_tile_supported():
        (linear,) = (r for r in report.rows if r.op == "linear")
        assert linear.reason.startswith("8 unsupported: weight has shape (0,): the host packed or freed it")
    else:
        assert rows["linear"].modules == 8 and rows["linear"].calls == 8 * rows["embedding"].calls
