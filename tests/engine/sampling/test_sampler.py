"""The sampler draws each row from its requested distribution and reports log-probabilities."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from fastkernels.engine.sampling.repetition import RepetitionAware
from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.sampling.sampler_state import SamplePlan
from fastkernels.engine.sampling.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -3.0, 0.5])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def new_row(slot, params=None, seed=0, ends=(), prompt=(1,), output=(), **fields):
    return NewRow(slot, params or SamplingParams(**fields), seed, frozenset(ends), list(prompt), list(output))


def step(sampler, logits, slots, offsets):
    """One call of the sampler: (token ids, log-probabilities as lists or None)."""
    plan = sampler.plan(np.array(slots, dtype=np.int64), np.array(offsets, dtype=np.int64))
    tensors = [torch.tensor(t, dtype=torch.int64, device=sampler.device) for t in (slots, offsets)]
    ids, logprobs = sampler(logits.to(sampler.device), *tensors, plan)
    return ids.tolist(), logprobs


def draw(n, device="cpu", logits=LOGITS, **params):
    """Frequencies of n draws of one request, one per step, in batches of 1000."""
    sampler = Sampler(device, len(logits), 1)
    sampler.set_rows([new_row(0, seed=11, **params)])
    ids = []
    for start in range(0, n, 1000):
        ids += step(sampler, logits.expand(1000, -1), [0] * 1000, list(range(start, start + 1000)))[0]
    return torch.bincount(torch.tensor(ids), minlength=len(logits)) / n


def chi_square(found, expected, n):
    seen = expected > 0
    assert found[~seen].sum() == 0
    return float((n * (found - expected)[seen] ** 2 / expected[seen]).sum())


def kept(logits, among):
    """The expected distribution over the tokens `among`."""
    probs = torch.zeros_like(logits)
    probs[list(among)] = torch.softmax(logits[list(among)], dim=-1)
    return probs


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 50.0, 1e6])
def test_temperature(device, temperature):
    """With 6 degrees of freedom, a chi-square over 25 has probability 0.0003."""
    found = draw(20000, device, temperature=temperature)
    assert chi_square(found, torch.softmax(LOGITS / temperature, dim=-1), 20000) < 25
    assert chi_square(found, torch.softmax(LOGITS / 1.4, dim=-1), 20000) > 25


@pytest.mark.parametrize(
    ("params", "among"),
    [
        ({"top_k": 2}, (0, 1)),
        ({"top_k": -1}, range(7)),
        ({"top_k": 100}, range(7)),
        ({"top_p": 0.65}, (0, 1)),  # probabilities 0.41, 0.25, 0.15, 0.09, ...
        ({"top_p": 0.75}, (0, 1, 2)),
        ({"top_p": 1e-6}, (0,)),
        ({"min_p": 0.3}, (0, 1, 2)),  # exp(-1) = 0.37, exp(-1.5) = 0.22
        ({"min_p": 1.0}, (0,)),
        ({"top_k": 3, "top_p": 0.75}, (0, 1)),  # of the three: 0.51, 0.31, 0.18
        ({"min_p": 0.3, "top_k": 2, "top_p": 0.99}, (0, 1)),
        ({"min_p": 0.5, "top_p": 0.6}, (0,)),  # of the two: 0.62, 0.38
        ({"temperature": 0.0, "top_k": 3}, (0,)),
    ],
)
def test_filters(device, params, among):
    assert chi_square(draw(8000, device, **params), kept(LOGITS, among), 8000) < 25


def test_top_k_keeps_equal_logits():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert chi_square(draw(5000, logits=logits, top_k=2), kept(logits, (1, 2, 3, 4)), 5000) < 25
    assert chi_square(draw(5000, logits=logits, top_p=0.5), kept(logits, (1, 2, 3, 4)), 5000) < 25
    assert draw(1000, logits=torch.tensor([1.0, 3.0, 3.0]), temperature=0.0)[1] == 1.0


def test_mixed_batch_equals_single_rows(device):
    """Each row of a mixed batch draws the same token as alone, in another slot and at another index."""
    vocab = 1000
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(12, vocab, generator=generator)
    fields = [
        {}, {"temperature": 0.0}, {"temperature": 0.3}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2},
        {"presence_penalty": 1.5}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.7},
        {"logit_bias": {3: 100.0, 5: 100.0}}, {"min_tokens": 15, "temperature": 0.0}, {"logprobs": 3},
    ]  # fmt: skip
    best = int(logits[10].argmax())
    rows = [
        new_row(i, seed=100 + i, ends=(best,), prompt=range(40 * i, 40 * i + 30), output=[7, 7, i], **f)
        for i, f in enumerate(fields)
    ]
    together = Sampler(device, vocab, 12)
    together.set_rows(rows)
    order = torch.randperm(12, generator=generator).tolist()
    offsets = [3 + i for i in order]
    found, logprobs = step(together, logits[order], order, offsets)
    assert logprobs.token_ids.shape == (12, 4)
    for place, i in enumerate(order):
        alone = Sampler(device, vocab, 2)
        alone.set_rows([pickle.loads(pickle.dumps(NewRow(**{**vars(rows[i]), "slot": 1})))])
        ids, _ = step(alone, logits[i : i + 1], [1], [offsets[place]])
        assert ids == [found[place]], fields[i]
    assert found[order.index(9)] in (3, 5)
    assert found[order.index(10)] != best


def test_seeded_row_does_not_depend_on_the_batch():
    def run(seed, others):
        sampler = Sampler("cpu", 7, 8)
        rows = [new_row(i, seed=1000 + i, temperature=0.5 + i / 4) for i in range(others)]
        sampler.set_rows([*rows, new_row(7, seed=seed)])
        slots = [*range(others), 7]
        logits = LOGITS.expand(len(slots), -1)
        return [step(sampler, logits, slots, [5 * i for i in range(others)] + [n])[0][-1] for n in range(40)]

    assert run(1, 0) == run(1, 3) == run(1, 7)
    assert run(1, 0) != run(2, 0)
    assert run(-(2**63), 0) != run(2**63 - 1, 0)


def naive_penalties(logits, prompt, output, presence, frequency, repetition):
    """Penalties by the formulas, token by token."""
    out = logits.clone()
    for token in range(len(logits)):
        if token in prompt or token in output:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= frequency * output.count(token) + presence * (token in output)
    return out


@pytest.mark.parametrize(
    "penalties", [(1.5, 0.0, 1.0), (0.0, 0.7, 1.0), (0.0, 0.0, 1.8), (-0.5, 0.3, 0.6), (2.0, 2.0, 2.0)]
)
def test_penalties(device, penalties):
    """Greedy tokens equal those of the plain formula, also after a preemption."""
    fields = dict(
        zip(("presence_penalty", "frequency_penalty", "repetition_penalty"), penalties, strict=True)
    )
    prompt, output, slot = [2, 1, 1], [0, 3], 1
    sampler = Sampler(device, 7, 3)
    sampler.set_rows([new_row(slot, prompt=prompt, output=output, temperature=0.0, **fields)])
    sampler.set_rows([new_row(2, temperature=0.0)])
    for n in range(12):
        if n == 6:  # preempted, then readmitted to a slot of another request
            slot = 0
            sampler.set_rows(
                [new_row(slot, prompt=[5, 6], output=[6], temperature=0.0, presence_penalty=2.0)]
            )
            step(sampler, LOGITS[None], [slot], [0])
            sampler.set_rows([new_row(slot, prompt=prompt, output=output, temperature=0.0, **fields)])
        want = int(naive_penalties(LOGITS, prompt, output, *penalties).argmax())
        assert step(sampler, LOGITS.expand(2, -1), [slot, 2], [n, n])[0] == [want, 0]
        output.append(want)
    assert (len(set(output[2:])) > 1) == (penalties[:2] != (0.0, 0.0))


def test_logit_bias_ends_with_its_request(device):
    sampler = Sampler(device, 7, 2)
    sampler.set_rows([new_row(0, temperature=0.0, logit_bias={4: 50, 6: 2.0}), new_row(1, temperature=0.0)])
    assert step(sampler, LOGITS.expand(2, -1), [0, 1], [0, 0])[0] == [4, 0]
    sampler.set_rows([new_row(1, temperature=0.0, logit_bias={0: -100, 1: -3, 2: -1, 6: 1.5})])
    assert step(sampler, LOGITS.expand(2, -1), [0, 1], [0, 0])[0] == [4, 6]
    sampler.set_rows([new_row(0, temperature=0.0)])
    assert step(sampler, LOGITS.expand(2, -1), [0, 1], [0, 0])[0] == [0, 6]


def test_min_tokens_bans_end_tokens(device):
    sampler = Sampler(device, 7, 2)
    sampler.set_rows(
        [new_row(0, temperature=0.0, min_tokens=3, ends=(0, 1)), new_row(1, temperature=0.0, ends=(0,))]
    )
    assert [step(sampler, LOGITS.expand(2, -1), [0, 1], [n, n])[0] for n in range(5)] == [[2, 0]] * 3 + [
        [0, 0]
    ] * 2
    sampler.set_rows([new_row(0, min_tokens=2, ends=(0, 2, 3, 99), logit_bias={99: 1.0})])
    found = {step(sampler, LOGITS[None], [0], [n])[0][0] for n in (0, 1) for _ in range(200)}
    assert not found & {0, 2, 3}


@pytest.mark.parametrize("k", [0, 1, 5, 7])
def test_logprobs_are_of_raw_logits(device, k):
    """Log-probabilities ignore temperature, bias and penalties, start with the sampled token, and are float32."""
    logits = (5 * torch.randn(3, 7, generator=torch.Generator().manual_seed(k))).bfloat16()
    sampler = Sampler(device, 7, 3)
    sampler.set_rows(
        [
            new_row(0, seed=1, temperature=2.0, logprobs=k, presence_penalty=1.0, output=[1, 2]),
            new_row(1, seed=2, logit_bias={2: 90.0}),
            new_row(2, temperature=0.0, logprobs=0),
        ]
    )
    before = logits.clone()
    ids, found = step(sampler, logits, [0, 1, 2], [0, 0, 0])
    assert torch.equal(logits, before)
    want = torch.log_softmax(logits.float(), dim=-1)
    assert found.token_ids.shape == found.logprobs.shape == (3, k + 1)
    assert found.token_ids[:, 0].tolist() == ids and ids[1] == 2
    torch.testing.assert_close(found.logprobs.cpu(), want.gather(1, found.token_ids.cpu()))
    torch.testing.assert_close(found.logprobs[:, 1:].cpu(), want.sort(descending=True).values[:, :k])
    ranks = [int((want[i] >= want[i, token]).sum()) for i, token in enumerate(ids)]
    assert found.ranks.tolist() == ranks and ranks[2] == 1


def test_all_and_no_logprobs():
    sampler = Sampler("cpu", 7, 2)
    sampler.set_rows([new_row(0), new_row(1, logprobs=-1)])
    assert step(sampler, LOGITS[None], [0], [0])[1] is None
    assert step(sampler, LOGITS.expand(2, -1), [0, 1], [0, 0])[1].token_ids.shape == (2, 8)


def test_prompt_logprobs_of_many_positions():
    logits = torch.randn(600, 11, generator=torch.Generator().manual_seed(1)).half()
    targets = torch.arange(600) % 11
    found = Sampler.prompt_logprobs(logits, targets, 2)
    want = torch.log_softmax(logits.float(), dim=-1)
    torch.testing.assert_close(found.logprobs[:, 0], want.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(found.logprobs[:, 1:], want.topk(2).values)
    assert torch.equal(found.token_ids[:, 0], targets)
    assert found.ranks.min() == 1 and found.ranks.max() == 11


def test_plan_contains_the_features_of_the_rows():
    sampler = Sampler("cpu", 50, 8)
    sampler.set_rows(
        [
            new_row(0, temperature=0.0), new_row(1, temperature=0.7), new_row(2, top_p=0.9),
            new_row(3, min_tokens=4, ends=(1,)), new_row(4, frequency_penalty=0.1), new_row(5, logit_bias={1: 1.0}),
            new_row(6, logprobs=0), new_row(7, logprobs=5, min_tokens=4),
        ]
    )  # fmt: skip

    def plan(*slots, offset=0):
        return sampler.plan(np.array(slots), np.full(len(slots), offset))

    assert plan(0, 8, 8) == SamplePlan(all_greedy=True)
    assert plan(0, 1) == SamplePlan(all_greedy=False)
    assert plan(2) == SamplePlan(False)
    assert plan(3) == SamplePlan(False, any_min_tokens=True) and plan(3, offset=4) == SamplePlan(False)
    assert plan(4, 0) == SamplePlan(False, any_penalties=True)
    assert plan(5) == SamplePlan(False, any_bias=True)
    assert plan(6) == SamplePlan(False, num_logprobs=0) and plan(6, 7) == SamplePlan(False, num_logprobs=5)
    sampler.set_rows([new_row(4, temperature=0.0)])
    assert plan(4) == SamplePlan(all_greedy=True)


def test_rows_of_nan_and_padding(device):
    """Rows of NaN or with all tokens banned give some token and do not affect other rows."""
    sampler = Sampler(device, 7, 3)
    sampler.set_rows([new_row(i, seed=i, top_k=3, top_p=0.9, min_p=0.1) for i in range(3)])
    logits = torch.stack((torch.full((7,), -torch.inf), torch.full((7,), torch.nan), LOGITS, LOGITS))
    ids, _ = step(sampler, logits, [0, 1, 2, 3], [0, 0, 4, 0])
    assert ids[:2] == [0, 0] and ids[3] == 0
    assert ids[2] == step(sampler, LOGITS[None], [2], [4])[0][0]
    assert step(sampler, torch.zeros(0, 7), [], []) == ([], None)


def test_slot_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"slot 2 is not in 0 \.\. 1"):
        Sampler("cpu", 7, 2).set_rows([new_row(2)])


@pytest.mark.gpu
def test_sampling_does_not_synchronize():
    """Sampling and set_rows with all parameters do not synchronize and give the CPU's tokens."""
    results = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(device, 1000, 4)
        row = new_row(1, seed=3, top_p=0.9, top_k=30, min_p=0.01, presence_penalty=1.0, min_tokens=9, ends=(4,),
                      logit_bias={3: 2.0}, logprobs=2)  # fmt: skip
        logits = 3 * torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
        sampler.set_rows([row, new_row(0)])
        slots, offsets = torch.tensor([1, 4], device=device), torch.tensor([2, 0], device=device)
        logits = logits.to(device)
        plan = sampler.plan(np.array([1, 4]), np.array([2, 0]))
        sampler(logits, slots, offsets, plan)  # compiles
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            sampler.set_rows([row])
            ids, logprobs = sampler(logits, slots, offsets, plan)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        results.append((ids.tolist(), logprobs.token_ids.tolist()))
    assert results[0] == results[1]


def after(history, n=6000, device="cpu", **rules):
    """Frequencies of n draws behind these tokens, with repetition-aware sampling."""
    rules, at = RepetitionAware(**rules), len(history)
    sampler = Sampler(device, len(LOGITS), 100)
    ids = []
    for first in range(0, n, 100):
        params = SamplingParams(repetition_aware=rules)
        sampler.set_rows([new_row(i, params, seed=first + i, output=history) for i in range(100)])
        ids += step(sampler, LOGITS.expand(100, -1), list(range(100)), [at] * 100)[0]
    return torch.bincount(torch.tensor(ids), minlength=len(LOGITS)) / n


def test_repetition_aware_draws_again_from_all_others(device):
    """In the nucleus, 0 is a repetition: its draws go to all other tokens, those outside the nucleus too."""
    probs = torch.softmax(LOGITS, -1)
    for history, window, repeated in (((), 10, False), ((5, 0, 5), 10, True), ((0, 5, 5), 2, False)):
        nucleus = kept(LOGITS, (0, 1, 2))  # 0.42, 0.25 and 0.15 of the mass
        found = after(history, device=device, top_p=0.75, top_k=5, window=window)
        others = probs.clone()
        others[0] = 0
        want = nucleus.clone()
        if repeated:
            want[0] = 0
            want += nucleus[0] * others / others.sum()
        assert chi_square(found, want, 6000) < 25  # 6 degrees of freedom: 22.5 has a probability of 0.001


def test_nucleus_counts_the_mass_of_the_whole_vocabulary():
    """Of masses 0.42, 0.25, 0.15, ..: top_p = 0.75 keeps three, where top_k = 2 comes first with renormalization."""
    rules = RepetitionAware(top_p=0.75, top_k=2)
    assert rules.nucleus(LOGITS[None])[0].isfinite().nonzero()[:, 0].tolist() == [0, 1]
    assert RepetitionAware(0.75, 5).nucleus(LOGITS[None])[0].isfinite().sum() == 3
    assert RepetitionAware(0.4, 5).nucleus(LOGITS[None])[0].isfinite().sum() == 1


def test_repetition_aware_rows_remember_their_own_tokens(device):
    """Greedy rows: with the rules a token comes again only after the window; other rows repeat it."""
    sampler = Sampler(device, len(LOGITS), 4)
    rules = RepetitionAware(window=2)
    for slot, own in ((0, rules), (1, None), (2, RepetitionAware(window=1))):
        sampler.set_rows([new_row(slot, temperature=0, repetition_aware=own)])
    made = [step(sampler, LOGITS.expand(3, -1), [0, 1, 2], [i] * 3)[0] for i in range(6)]
    assert [row[0] for row in made] == [0, 1, 1, 0, 1, 1]  # a second draw does not look back
    assert [row[1] for row in made] == [0] * 6 and [row[2] for row in made] == [0, 1, 0, 1, 0, 1]
    sampler.set_rows([new_row(0, temperature=0, repetition_aware=rules, output=[0] * 70)])
    assert step(sampler, LOGITS[None], [0], [70])[0] == [1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"window": 65}, "from 1 to 64"), ({"top_k": 0}, "at least 1"), ({"share": 0.0}, "in \\(0, 1\\]")],
)
def test_repetition_aware_values_are_checked(fields, words):
    with pytest.raises(ValueError, match=words):
        RepetitionAware(**fields)
    with pytest.raises(ValueError, match="repetition_aware must be a RepetitionAware"):
        SamplingParams(repetition_aware={"window": 3})
