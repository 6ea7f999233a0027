"""All kinds of requests through the engine: tokens, log-probabilities and ends equal the oracle's."""

from __future__ import annotations

import pytest
import torch
from support.oracle import REQUESTS, STEM, filtered
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams

KINDS = ["llama", "qwen3", "mixtral"]
MODES = {
    "at once": {},
    "chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "no room": {"num_blocks": 18, "block_size": 4, "max_num_batched_tokens": 48},
}


def make(folder, **settings):
    return LLM(
        str(folder), device="cpu", **{"num_blocks": 200, "block_size": 8, "max_num_seqs": 16, **settings}
    )


@pytest.mark.parametrize(
    ("kind", "overlap"),
    [
        pytest.param("llama", False, id="llama-one step"),
        *(pytest.param(k, False, id=f"{k}-one step", marks=pytest.mark.slow) for k in KINDS[1:]),
        *(
            pytest.param(k, True, id=f"{k}-two steps", marks=[] if k == "mixtral" else pytest.mark.slow)
            for k in KINDS
        ),
    ],
)
def test_all_parameters_in_all_modes(tiny_of, oracle, kind, overlap):
    folder = tiny_of(kind)
    for name, mode in MODES.items():
        llm = make(folder, async_scheduling=overlap, **mode)
        for _ in range(2):  # the second round has prefix hits
            oracle.check_requests(folder, llm)
        scheduler = llm.llm_engine.scheduler
        assert (scheduler.num_preemptions > 0) is (name == "no room")
        assert (
            scheduler.prefix_hits > 0 and llm.llm_engine.blocks.num_free == llm.llm_engine.blocks.num_usable
        )


def test_test_requests_end_in_every_way(tiny_of):
    """Guards the test above: its requests must end in different ways."""
    outputs = [
        o
        for request in make(tiny_of("llama")).generate(*map(list, zip(*REQUESTS, strict=True)))
        for o in request.outputs
    ]
    assert {o.finish_reason for o in outputs} == {"stop", "length"}
    assert {type(o.stop_reason) for o in outputs} >= {int, str, type(None)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_chunking_of_a_prompt(tiny_of, oracle, kind):
    folder, prompt = tiny_of(kind), STEM[:13]
    llm = make(folder, max_num_seqs=1, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    for budget in range(1, len(prompt) + 1):
        llm.llm_engine.scheduler.max_num_batched_tokens = budget
        oracle.check(folder, llm.generate([prompt], params)[0], params)


def test_prompt_logprobs_bypass_the_prefix_cache(tiny_of, oracle):
    folder = tiny_of("qwen3")
    llm = make(folder)
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    with_prompt = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    for params, cached in ((plain, 0), (plain, 32), (with_prompt, 0), (plain, 32)):
        output = llm.generate([STEM], params)[0]
        oracle.check(folder, output, params)
        assert output.num_cached_tokens == cached


@pytest.mark.parametrize("seed", [None, pytest.param(7, marks=pytest.mark.slow)])
def test_many_outputs_have_the_right_distribution(tmp_path, oracle, seed):
    """Chi-square test over pairs of the first two tokens of 3000 outputs."""
    folder, n = make_tiny(tmp_path / "small", "llama", "float32", vocab_size=12), 3000
    llm = LLM(str(folder), device="cpu", skip_tokenizer_init=True, max_model_len=64)
    params = SamplingParams(n=n, max_tokens=2, temperature=1.7, top_p=0.9, ignore_eos=True, seed=seed)
    prompt = [5, 9, 4]
    pairs = torch.zeros(12, 12, dtype=torch.float64)
    for out in llm.generate([prompt], params)[0].outputs:
        pairs[tuple(out.token_ids)] += 1
    first = filtered(oracle.logits(folder, prompt)[-1] / 1.7, params)
    rows = [filtered(oracle.logits(folder, [*prompt, t])[-1] / 1.7, params) for t in range(12)]
    expected = n * first[:, None] * torch.stack(rows)
    assert pairs[expected == 0].sum() == 0 and (expected[expected > 0] > 5).sum() > 20
    often = expected > 5
    cells = [(pairs[often], expected[often]), (pairs[~often].sum()[None], expected[~often].sum()[None])]
    chi = sum(float(((found - want) ** 2 / want).sum()) for found, want in cells if want.sum() > 5)
    free = int(often.sum())
    assert chi < free + 4 * (2 * free) ** 0.5  # 4 standard deviations
