"""Tests of the op sampling: noise, filters against a naive implementation, interpreted Triton kernels.

As a script, under TRITON_INTERPRET=1: print the result of `problems` as JSON.
"""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fastkernels.overrides.kit import philox
from fastkernels.overrides.sampling import sampling

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_equals_published_answers(counter, key, words):
    """Known answers of the Random123 distribution."""
    found = [torch.tensor([c]) for c in counter]
    philox.philox(found, *(torch.tensor([k]) for k in key))
    assert tuple(int(w) for w in found) == words


def test_noise_is_exponential_and_independent_per_row():
    seeds, offsets = torch.tensor([3, 3, -5]), torch.tensor([0, 1, 1 << 40])
    noise = philox.exponential(seeds, offsets, 40001)
    assert noise.shape == (3, 40001) and noise.min() > 0
    for row in noise.double():
        cells = torch.histc(1 - torch.exp(-row), 20, 0, 1)
        assert ((cells - 2000.05) ** 2 / 2000.05).sum() < 50  # 19 degrees of freedom: p is 0.0001
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.02
    for i, width in enumerate((1, 7, 1000)):
        alone = philox.exponential(seeds[i : i + 1], offsets[i : i + 1], width)
        assert torch.equal(alone[0], noise[i, :width])


def test_smallest_draws_are_fine_grained():
    """The winner in a large vocabulary has a draw of about 1 / V, where u must have a high resolution."""
    noise = philox.exponential(torch.arange(40), torch.zeros(40, dtype=torch.int64), 100000)
    small = torch.sort(noise.view(-1)).values[:400]
    assert len(small.unique()) >= 399
    assert 0.8 < float(small[-1]) * 4e6 / 400 < 1.2


def naive_kept(x, temperature, top_k, top_p, min_p):
    """Return the kept token ids by the definition; skip examples that rounding decides."""
    weight = [math.exp((v - max(x)) / temperature) for v in x]
    stay = [i for i in range(len(x)) if weight[i] >= min_p]
    assume(all(abs(w - min_p) > 1e-9 or v == max(x) for w, v in zip(weight, x, strict=True)))
    if 0 < top_k < len(x):
        stay = [i for i in stay if sum(v > x[i] for v in x) < top_k]
    if top_p < 1:
        total = math.fsum(weight[i] for i in stay)
        above = {i: math.fsum(weight[j] for j in stay if x[j] > x[i]) for i in stay}
        assume(all(abs(a - top_p * total) > 1e-9 for a in above.values()))
        stay = [i for i in stay if above[i] < top_p * total]
    return stay


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(-12, 12).map(lambda n: n / 4) | st.floats(-3, 3), min_size=1, max_size=40),
    st.floats(0.1, 2.0), st.integers(-1, 45), st.floats(0.001, 1.0), st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)  # fmt: skip
def test_filters_equal_naive_ones(x, temperature, top_k, top_p, min_p):
    want = naive_kept(x, temperature, top_k, top_p, min_p)
    args = [torch.tensor([v]) for v in (temperature, top_k, top_p, min_p)]
    args = [t.double() if t.is_floating_point() else t for t in args]
    args[2:] = [torch.tensor([v], dtype=torch.float64) for v in (top_p, min_p)]
    logits = torch.tensor([x], dtype=torch.float64)
    low = sampling.threshold(logits, torch.tensor([temperature], dtype=torch.float64), *args[1:])
    assert (logits >= low)[0].nonzero()[:, 0].tolist() == want


def test_partial_sort_equals_full_sort(monkeypatch):
    """Sorting only the most likely tokens first does not change the threshold."""
    x = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0))
    rest = (
        torch.tensor([1.0, 1.0, 3.0, 0.2, 1.0, 1.0]), torch.tensor([0, 2000, 0, 0, 3, 0]),
        torch.tensor([0.9, 0.999, 0.99, 0.5, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.2]),
    )  # fmt: skip
    found = sampling.threshold(x, *rest)
    monkeypatch.setattr(sampling, "_NARROW", 5000)
    assert torch.equal(found, sampling.threshold(x, *rest))
    assert (x >= found).sum(dim=-1).tolist()[4] == 3


def each(rows, *values, dtype=torch.float32):
    """Return a column in which the rows take these values in turn."""
    return torch.tensor(values, dtype=dtype)[torch.arange(rows) % len(values)]


def call(fn, logits, temperature=(1.0,), top_k=(0,), top_p=(1.0,), min_p=(0.0,), seed=0):
    rows = len(logits)
    columns = (
        each(rows, *temperature),
        each(rows, *top_k, dtype=torch.int32),
        each(rows, *top_p),
        each(rows, *min_p),
    )
    return fn(logits, *columns, torch.arange(rows) + seed, torch.arange(rows) * 7)


UNUSUAL = torch.tensor(
    [
        [-INF, -INF, -INF, -INF, -INF], [NAN, NAN, NAN, NAN, NAN], [NAN, 1.0, 2.0, -INF, NAN],
        [INF, 1.0, INF, NAN, -INF], [-INF, -INF, -INF, 3.0, -INF], [3e38, -3e38, 0.0, -0.0, 1e-45],
        [-0.0, 0.0, -0.0, -1.0, -2.0],
    ]
)  # fmt: skip
CHOICES = [
    {}, {"temperature": [0.0]}, {"top_k": [2]}, {"top_p": [0.5]}, {"min_p": [0.3]},
    {"temperature": [0.01, 2.0], "top_k": [1, 3, 0], "top_p": [0.9, 1e-6], "min_p": [0.0, 1.0]},
]  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_unusual_rows_give_valid_tokens(choice):
    found = call(sampling.sampling, UNUSUAL, **choice).tolist()
    assert found[:2] == [0, 0] and found[2] in (1, 2) and found[3] in (0, 2) and found[4:6] == [3, 0]
    assert found[6] < 3 or "top_k" not in choice


def test_mismatched_shapes_are_rejected():
    with pytest.raises(ValueError, match=r"logits must be \[B, V\]"):
        call(sampling.sampling, torch.zeros(2, 0))
    ints, floats = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    with pytest.raises(ValueError, match=r"top_p must be \[3\], got shape \(2,\)"):
        sampling.sampling(
            torch.zeros(3, 4), *(torch.zeros(3), torch.zeros(3).int(), floats, floats, ints, ints)
        )


def test_interpreted_kernels_equal_reference():
    """Tokens equal those of the reference on every path of the search, and draws have the right distribution."""
    from support.kernels import warm  # which this file, as a script, cannot import

    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run([__file__], env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def problems():
    """Return what is wrong with the interpreted Triton provider."""
    found = []

    def compare(what, logits, **fields):
        got, want = (call(fn, logits, **fields) for fn in (sampling._triton, sampling.reference))
        if not torch.equal(got, want):
            found.append(f"{what}: rows {(got != want).nonzero()[:, 0].tolist()} of {len(got)}: {got} {want}")
        return got

    for i in (0, 5):
        compare(f"strange {i}", UNUSUAL, **CHOICES[i])
    generator = torch.Generator().manual_seed(0)
    lanes, sampling.LANES = sampling.LANES, 256  # short rows then take every way through the search
    logits = torch.randn(4, 700, generator=generator) * torch.tensor([[3.0], [0.3], [3.0], [0.3]])
    compare("k within the lanes and over them", logits, top_k=[5, 60, 257, 699], top_p=[1.0, 0.3, 1.0, 0.9])
    compare(
        "p alone", logits, top_p=[0.1, 0.6, 0.97, 0.9], temperature=[1.0, 1.0, 0.2, 2.0], min_p=[0.0, 0.02]
    )
    tied = torch.zeros(2, 700, dtype=torch.float16)
    tied[:, 5] = 1.0
    compare("more ties than the scratch row holds", tied, top_k=[3], top_p=[1.0, 0.001])
    sampling.LANES = lanes
    sampling._PROGRAMS = 1
    one = call(sampling._triton, torch.ones(1, 9001))
    sampling._PROGRAMS = 1024
    if not torch.equal(one, call(sampling._triton, torch.ones(1, 9001))):
        found.append("the token depends on how many programs share a row")

    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -3.0, 0.5])
    draws = 100
    drawn = compare("many draws", logits.expand(draws, -1), temperature=[2.0], seed=1 << 20)
    expected = draws * torch.softmax(logits / 2, dim=-1)
    counts = torch.bincount(drawn, minlength=7)
    chi = float(((counts - expected) ** 2 / expected).sum())
    if chi > 28:  # 6 degrees of freedom: p is 0.0001
        found.append(f"draws {counts.tolist()}, expected {expected.tolist()}: chi-square {chi:.1f}")
    return found


if __name__ == "__main__":
    print(json.dumps(problems()))
