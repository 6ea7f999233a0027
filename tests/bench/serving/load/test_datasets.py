"""Data sets: exact lengths, no repeated prompts, the same prompts for every lane, and errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fk_bench.serving.load.datasets import DatasetError, load, load_vocabulary


def test_random_prompts_have_exact_lengths_and_ordinary_tokens(words_model: Path) -> None:
    data = load("random", str(words_model), seed=0, input_len=63, output_len=7)
    for prompt in data.draw("c=8", 0, 50):
        assert len(prompt.tokens) == 63
        assert prompt.output_len == 7 and prompt.ignore_eos
        # Neither special nor beyond the tokenizer
        assert all(isinstance(t, int) and 4 <= t < 300 for t in prompt.tokens)


def test_random_prompts_differ_by_round_and_part(words_model: Path) -> None:
    first = load("random", str(words_model), 0, 8, 4)
    again = load("random", str(words_model), 0, 8, 4)
    parts = [("c=1", 0), ("c=8", 0), ("c=1", 1), ("warm-up c=1", -1)]
    hands = [first.draw(part, r, 20) for part, r in parts]
    assert hands == [again.draw(part, r, 20) for part, r in parts]
    flat = [tuple(p.tokens) for hand in hands for p in hand]
    assert len(set(flat)) == 80
    assert first.draw("c=1", 0, 20) == hands[0]
    shifted = load("random", str(words_model), 1, 8, 4)
    assert shifted.draw("c=1", 0, 20) == hands[2]  # round r draws from seed + r
    assert not first.repeated


def test_random_prompts_of_other_lengths(words_model: Path) -> None:
    data = load("random", str(words_model), 0, 8, 4)
    own, other = data.draw("c=1", 0, 3), data.draw("c=1", 0, 3, (20, 2))
    assert [(len(p.tokens), p.output_len) for p in (own[0], other[0])] == [(8, 4), (20, 2)]
    assert data.draw("c=1", 0, 3, (8, 4)) == own  # what is there already


def test_random_reports_repeated_prompts(words_model: Path) -> None:
    data = load("random", str(words_model), 0, 1, 4)
    data.draw("c=1", 0, 400)  # 296 tokens, one each
    assert data.repeated


def test_prompts_file(words_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("hello\n\nworld wide\nthree\n")
    data = load("prompts", str(words_model), 0, 0, 9, str(file))
    hands = data.draw("a", 0, 2) + data.draw("b", 0, 1)
    assert sorted(len(p.tokens) for p in hands) == [5, 5, 10]  # bytes, each prompt once
    assert {p.output_len for p in hands} == {9}
    assert not data.repeated
    data.draw("c", 0, 1)
    assert data.repeated


def test_jsonl_prompts_have_own_lengths(words_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "ab", "output_len": 3}\n{"prompt": "abc"}\n')
    found = load("prompts", str(words_model), 0, 0, 9, str(file)).draw("a", 0, 2)
    assert sorted((len(p.tokens), p.output_len) for p in found) == [(2, 3), (3, 9)]


def test_sharegpt(words_model: Path, tmp_path: Path) -> None:
    talks = [
        {"conversations": [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "hello you"}]},
        {
            "conversations": [{"from": "human", "value": "short answer"}, {"from": "gpt", "value": "no"}]
        },  # < 4 tokens
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"conversations": [{"value": "long"}, {"value": "x" * 1025}]},
    ]
    file = tmp_path / "s.json"
    file.write_text(json.dumps(talks))
    data = load("sharegpt", str(words_model), 0, 0, 9, str(file))
    assert [(len(p.tokens), p.output_len) for p in data.draw("a", 0, 1)] == [(8, 9)]
    assert len(data.texts) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sharegpt", "{", "s.json is not JSON"),
        ("sharegpt", "[]", "no conversation of two turns"),
        ("prompts", "\n\n", "has no prompt"),
        ("nonesuch", "x", "unknown data set 'nonesuch'. Known: random, sharegpt, prompts"),
    ],
)
def test_bad_files(words_model: Path, tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / "s.json"
    file.write_text(text)
    with pytest.raises(DatasetError, match=message):
        load(name, str(words_model), 0, 8, 8, str(file))


def test_bad_jsonl_names_the_line(words_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "ab"}\n{"text": "ab"}\n')
    with pytest.raises(DatasetError, match=r"p.jsonl:2: expected"):
        load("prompts", str(words_model), 0, 8, 8, str(file))


def test_missing_things(words_model: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no such file: /nowhere\.txt"):
        load("prompts", str(words_model), 0, 8, 8, "/nowhere.txt")
    with pytest.raises(DatasetError, match="--dataset-path FILE"):
        load("prompts", str(words_model), 0, 8, 8)
    with pytest.raises(DatasetError, match=r"has no config\.json"):
        load("random", str(tmp_path), 0, 8, 8)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DatasetError, match="has no vocab_size"):
        load("random", str(tmp_path), 0, 8, 8)


def test_texts_are_sent_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 50}}')
    vocabulary = load_vocabulary(str(tmp_path))
    assert vocabulary.size == 50
    assert vocabulary.encode("hello") == "hello"


def test_agreement_prompts_are_fixed_and_end_at_eos(words_model: Path) -> None:
    one = load("random", str(words_model), 0, 8, 8).agreement(20, 5)
    two = load("random", str(words_model), 99, 16, 2).agreement(20, 5)
    assert one == two
    assert len({tuple(p.tokens) for p in one}) == 20
    assert all(p.output_len == 5 and not p.ignore_eos for p in one)
