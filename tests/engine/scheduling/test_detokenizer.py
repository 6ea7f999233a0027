"""Incremental text equals the decoded text, cut at the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import make_tiny_llama
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastkernels.engine.scheduling.detokenizer import MAX_PENDING, Detokenizer, Pieces

TEXTS = st.text(alphabet=st.sampled_from("ab é😀中\n"), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path_factory.mktemp("detok") / "llama"))


@pytest.fixture(scope="module")
def pieces_with_bytes():
    """A tokenizer like Llama 2's: words with leading spaces, byte fallback, and the first space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ("▁", "a", "▁b", "é", "▁▁", "😀"):
        vocab[piece] = len(vocab)
    rust = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


class Slow:
    """The same tokenizer without a Rust stream."""

    is_fast = False

    def __init__(self, tokenizer):
        self.decode, self.all_special_ids = tokenizer.decode, tokenizer.all_special_ids


def run(tokenizer, prompt, ids, **options):
    """(pieces, stop string, number of tokens used) of one sequence."""
    look_from = options.pop("look_from", 0)
    text = Detokenizer(tokenizer, prompt, **options)
    pieces = []
    for used, token in enumerate(ids, 1):
        stop = text.append(token, look=used > look_from)
        pieces.append(text.take(final=stop is not None))
        if stop is not None:
            return pieces, stop, used
    stop = text.finish(look=len(ids) > look_from)
    pieces.append(text.take(final=True))
    assert "".join(pieces) == text.text
    return pieces, stop, len(ids)


@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(st.integers(0, 300), max_size=60), prompt=st.lists(st.integers(0, 300), max_size=8),
    skip=st.booleans(),
)  # fmt: skip
def test_incremental_text_equals_decoded_text(tokenizer, ids, prompt, skip):
    fast = run(tokenizer, prompt, ids, skip_special_tokens=skip)
    assert fast == run(Slow(tokenizer), prompt, ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(st.integers(0, 264) | st.integers(259, 264) | st.integers(125, 258), max_size=40),
    prompt=st.lists(st.integers(0, 264), max_size=8), skip=st.booleans(),
)  # fmt: skip
def test_pieces_with_byte_fallback(pieces_with_bytes, ids, prompt, skip):
    fast = run(pieces_with_bytes, prompt, ids, skip_special_tokens=skip)
    assert fast == run(Slow(pieces_with_bytes), prompt, ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=200)
@given(text=TEXTS, prompt=TEXTS)
def test_whole_characters_arrive_unchanged(tokenizer, text, prompt):
    ids = tokenizer(text).input_ids
    pieces, _, _ = run(tokenizer, tokenizer(prompt).input_ids, ids)
    assert "".join(pieces) == text and not any("\ufffd" in p for p in pieces)


@settings(deadline=None, max_examples=400)
@given(
    text=st.text(alphabet="ab😀", max_size=14),
    stops=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=4), max_size=3),
    include=st.booleans(), look_from=st.integers(0, 6),
)  # fmt: skip
def test_stop_strings_end_the_text_before_sending(tokenizer, text, stops, include, look_from):
    ids = tokenizer(text).input_ids
    pieces, stop, used = run(
        tokenizer, tokenizer("x").input_ids, ids, stop=stops, include_stop=include, look_from=look_from
    )
    ends = [(len(tokenizer(text[:n]).input_ids), n) for n in range(1, len(text) + 1)]
    # Reference: the first character that ends a stop string, at a token where stop strings count.
    want = next(((t, n) for t, n in ends if t > look_from and any(text[:n].endswith(s) for s in stops)), None)
    if want is None:
        assert stop is None and "".join(pieces) == text
        return
    tokens, end = want
    assert stop in stops and used == tokens and text[:end].endswith(stop)
    assert "".join(pieces) == (text[:end] if include else text[: end - len(stop)])


def test_stop_string_within_and_across_tokens():
    class Words:
        is_fast, all_special_ids = False, ()

        def decode(self, ids, **_):
            return "".join(("Hello", " wor", "ld. And", " more")[i] for i in ids)

    assert run(Words(), [], [0, 1, 2, 3], stop=["world"]) == (["Hello", " ", ""], "world", 3)
    assert run(Words(), [], [0, 1, 2, 3], stop=["d. A", "ld"]) == (["Hello", " wor", ""], "ld", 3)
    assert run(Words(), [], [0, 1, 2, 3], stop=["Hell"])[1:] == ("Hell", 1)


def test_bad_bytes_and_special_tokens_do_not_block(tokenizer):
    first_of_emoji = tokenizer("😀").input_ids[0]
    pieces = Pieces(tokenizer, [10], True)
    texts = [pieces.append(first_of_emoji) for _ in range(5 * MAX_PENDING)]
    assert sum(map(bool, texts)) == 5 and "".join(texts) == "\ufffd" * 5 * MAX_PENDING
    for _ in range(100):
        assert pieces.append(tokenizer.eos_token_id) == ""
    assert pieces.pending == [] and pieces.append(tokenizer("a").input_ids[0]) == "a"
