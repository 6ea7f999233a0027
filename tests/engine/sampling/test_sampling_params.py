"""SamplingParams: ranges and error messages."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastkernels import SamplingParams
from fastkernels.engine.sampling.sampling_params import RequestOutputKind

NAN, INF = math.nan, math.inf

WRONG = [
    ({"n": 0}, r"n must be in \[1, 16384\], got 0"),
    ({"n": 16385}, r"\[1, 16384\], got 16385"),
    ({"n": True}, "n must be an integer, got True"),
    ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], got 2.1"),
    ({"presence_penalty": True}, "presence_penalty must be a number, got True"),
    ({"frequency_penalty": -2.5}, r"frequency_penalty must be in \[-2, 2\], got -2.5"),
    ({"frequency_penalty": NAN}, "frequency_penalty.*got nan"),
    ({"repetition_penalty": 0}, "repetition_penalty must be in .*got 0"),
    ({"repetition_penalty": INF}, "repetition_penalty.*got inf"),
    ({"temperature": -0.1}, r"temperature must be in \[0, 1e\+06\], got -0.1"),
    ({"temperature": 1e7}, r"temperature must be in \[0, 1e\+06\], got 10000000"),
    ({"temperature": NAN}, "temperature.*got nan"),
    ({"temperature": "1"}, "temperature must be a number, got '1'"),
    ({"temperature": None}, "temperature must be a number, got None"),
    ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
    ({"top_p": NAN}, "top_p.*got nan"),
    ({"top_k": -2}, "top_k must be at least -1.*got -2"),
    ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
    ({"top_k": False}, "top_k must be an integer, got False"),
    ({"min_p": -0.01}, r"min_p must be in \[0, 1\], got -0.01"),
    ({"seed": 2**63}, "seed must be in .*got 9223372036854775808"),
    ({"seed": -(2**63) - 1}, "seed must be in .*64-bit"),
    ({"seed": 1.0}, "seed must be an integer"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"min_tokens": -1}, r"min_tokens must be in \[0, 2147483647\], got -1"),
    ({"min_tokens": 2**70, "max_tokens": None}, "min_tokens must be in"),
    ({"min_tokens": 17}, "min_tokens 17 is more than max_tokens 16"),
    ({"logprobs": -2}, "logprobs must be at least -1.*got -2"),
    ({"logprobs": True}, "logprobs must be an integer, got True"),
    ({"prompt_logprobs": -2}, "prompt_logprobs must be at least -1.*got -2"),
    ({"stop": [""]}, "stop must hold strings that are not empty, got ''"),
    ({"stop": ""}, "stop must hold strings that are not empty"),
    ({"stop": [1]}, "stop must hold strings"),
    ({"stop": 5}, "stop must be a list, got 5"),
    ({"stop": ["x"] * 1000}, "stop has 1000 entries, at most 128"),
    ({"stop": "x" * 1025}, "stop: a string of 1025 characters, at most 1024"),
    ({"stop": "x", "detokenize": False}, "stop strings need detokenize=True"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids must be in .*got -1"),
    ({"stop_token_ids": [[1]]}, "stop_token_ids must be an integer"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids must be an integer, got 'a'"),
    ({"stop_token_ids": range(1025)}, "stop_token_ids has 1025 entries, at most 1024"),
    ({"logit_bias": {1: 100.5}}, r"logit_bias of token 1 must be in \[-100, 100\], got 100.5"),
    ({"logit_bias": {1: NAN}}, "logit_bias of token 1.*got nan"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias token id must be an integer, got 'x'"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias token id must be in .*got -1"),
    ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, got list"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 tokens, at most 1024"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ({"detokenize": None}, "detokenize must be true or false, got None"),
    ({"output_kind": 1}, "output_kind must be a RequestOutputKind, got 1"),
]


@pytest.mark.parametrize(
    ("fields", "message"), WRONG, ids=[f"{i}-{next(iter(f))}" for i, (f, _) in enumerate(WRONG)]
)
def test_error_names_field_value_and_limit(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_error_does_not_repeat_a_long_value():
    for fields in ({"temperature": "9" * 10**6}, {"logit_bias": {"9" * 10**6: 1}}, {"seed": 10**4000}):
        with pytest.raises(ValueError) as caught:
            SamplingParams(**fields)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 16384}, {"presence_penalty": -2}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.5},
        {"temperature": 2}, {"top_p": 1}, {"top_k": -1}, {"min_p": 1.0}, {"seed": -(2**63)}, {"seed": 2**63 - 1},
        {"max_tokens": None, "min_tokens": 99}, {"logprobs": 0}, {"prompt_logprobs": -1}, {"stop": ["x" * 1024] * 128},
        {"stop_token_ids": range(1024)}, {"logit_bias": {0: -100, 7: 100}}, {"output_kind": RequestOutputKind.DELTA},
    ],
    ids=str,
)  # fmt: skip
def test_limits_are_inclusive(fields):
    params = SamplingParams(**fields)
    for name in set(fields) - {"stop", "stop_token_ids"}:
        assert getattr(params, name) == fields[name]
    assert pickle.loads(pickle.dumps(params)) == params


def test_values_are_normalized():
    assert SamplingParams(stop="a").stop == ["a"] and SamplingParams().stop == []
    assert SamplingParams(stop_token_ids=[3, 1, 3]).stop_token_ids == [3, 1]
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(temperature=1e-4).temperature == 0.01
    assert (
        SamplingParams(logit_bias={"12": 3}).logit_bias == {12: 3.0}
        and SamplingParams(logit_bias={}).logit_bias is None
    )
    greedy = SamplingParams(temperature=0, top_k=4, top_p=0.5, min_p=0.1)
    assert (greedy.greedy, greedy.top_k, greedy.top_p, greedy.min_p) == (True, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "greedy", "penalties"),
    [
        ({}, False, False),
        ({"temperature": 0.0, "top_p": 0.5}, True, False),
        ({"top_k": 1}, False, False),
        ({"presence_penalty": -1}, False, True),
        ({"frequency_penalty": 0.1, "temperature": 0}, True, True),
        ({"repetition_penalty": 0.9}, False, True),
    ],
)
def test_greedy_and_needs_penalties(fields, greedy, penalties):
    params = SamplingParams(**fields)
    assert (params.greedy, params.needs_penalties) == (greedy, penalties)


def test_verify_checks_engine_limits():
    SamplingParams(logprobs=20, prompt_logprobs=20, stop_token_ids=[99], logit_bias={99: 1}).verify(100)
    SamplingParams(logprobs=-1).verify(20)
    SamplingParams(logprobs=-1).verify(100, max_logprobs=-1)
    for fields, message in [
        ({"logprobs": 21}, "logprobs must be at most 20 .*got 21"),
        ({"logprobs": -1}, "logprobs must be at most 20 .*got 100"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most 20"),
        ({"stop_token_ids": [100]}, "stop_token_ids: token id 100 is not in the vocabulary of 100"),
        ({"logit_bias": {3: 1, 100: 1}}, "logit_bias: token id 100 is not in the vocabulary of 100"),
    ]:
        with pytest.raises(ValueError, match=message):
            SamplingParams(**fields).verify(100)


NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
           "seed", "n", "max_tokens", "min_tokens", "logprobs", "stop", "stop_token_ids", "logit_bias")  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NUMBERS), JSON, max_size=4))
def test_any_value_is_accepted_or_a_value_error(fields):
    try:
        params = SamplingParams(**fields)
    except ValueError:
        return
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        assert math.isfinite(getattr(params, name))
