"""bad_words, allowed_token_ids and truncate_prompt_tokens."""

from __future__ import annotations

import pytest

from fastkernels import LLM, SamplingParams, StructuredOutputsParams

LETTERS = dict.fromkeys((68, 69, 70), 20.0)  # a, b, c


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(str(tiny), device="cpu", num_blocks=60, max_model_len=128, async_scheduling=True) as llm:
        yield llm


def text_of(llm, prompt=(5,), **params):
    (output,) = llm.generate([list(prompt)], SamplingParams(**{"max_tokens": 40, "seed": 3, **params}))
    return output.outputs[0]


def test_allowed_tokens_are_the_only_ones(llm):
    out = text_of(llm, allowed_token_ids=[68, 511, 69], temperature=2.0)
    assert set(out.token_ids) == {68, 69, 511}
    assert text_of(llm, allowed_token_ids=[70], temperature=0).text == "c" * 40
    assert text_of(llm, allowed_token_ids=[1], logprobs=1).finish_reason == "stop"


def test_bad_words_do_not_appear(llm):
    free = text_of(llm, logit_bias=LETTERS, max_tokens=100)
    assert all(word in free.text for word in ("ab", "bca"))
    out = text_of(llm, logit_bias=LETTERS, max_tokens=100, bad_words=["ab", "bca"])
    assert not any(word in out.text for word in ("ab", "bca")) and set("abc") == set(out.text)
    assert set(text_of(llm, logit_bias=LETTERS, bad_words=["a", "c"]).text) == {"b"}


def test_constraints_apply_together(llm):
    digits = StructuredOutputsParams(regex="[a-d]{8}")
    out = text_of(llm, structured_outputs=digits, allowed_token_ids=[68, 69, 71, 90], bad_words=["b", "ad"])
    assert out.finish_reason == "stop" and len(out.text) == 8
    assert set(out.text) <= {"a", "d"} and "ad" not in out.text
    nothing = text_of(llm, structured_outputs=StructuredOutputsParams(regex="ab"), allowed_token_ids=[68])
    assert (nothing.text, nothing.finish_reason) == ("a", "abort")


def test_contradiction_at_the_start_is_refused(llm):
    with pytest.raises(
        ValueError, match="no token is allowed by structured_outputs, allowed_token_ids and bad_words"
    ):
        text_of(llm, structured_outputs=StructuredOutputsParams(regex="ab"), allowed_token_ids=[69])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bad_words": "a"}, "bad_words must be a list"),
        ({"bad_words": [""]}, "bad_words must hold words that are not empty"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids: token id 512 is not in the vocabulary of 512"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1"),
        ({"truncate_prompt_tokens": 129}, "truncate_prompt_tokens must be at most 128"),
        ({"truncation_side": "up"}, "truncation_side must be 'left' or 'right'"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs must be StructuredOutputsParams"),
    ],
)
def test_wrong_values_are_named(llm, wrong, message):
    with pytest.raises(ValueError, match=message):
        text_of(llm, **wrong)


def test_prompt_is_cut(llm):
    prompt = [10, 11, 12, 13, 14]
    for side, want in ((None, [10, 11, 12]), ("right", [10, 11, 12]), ("left", [12, 13, 14])):
        (output,) = llm.generate(
            [prompt], SamplingParams(max_tokens=1, truncate_prompt_tokens=3, truncation_side=side)
        )
        assert output.prompt_token_ids == want
    (output,) = llm.generate(["ab" * 200], SamplingParams(max_tokens=5, truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == 127 and len(output.outputs[0].token_ids) == 1
