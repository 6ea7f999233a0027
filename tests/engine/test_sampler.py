"""The sampler draws from the distribution that was asked for."""

from __future__ import annotations

import pytest
import torch

from fastkernels.engine.detokenizer import Detokenizer
from fastkernels.engine.request import Request
from fastkernels.engine.sampler import Sampler, filter_top
from fastkernels.engine.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -3.0, 0.5])


def draw(n: int, **params) -> torch.Tensor:
    """Frequencies of n draws."""
    sampler = Sampler(torch.device("cpu"), 0)
    requests = [Request(str(i), [1], SamplingParams(**params), 9) for i in range(n)]
    ids = sampler(LOGITS.expand(n, -1), requests)
    return torch.bincount(torch.tensor(ids), minlength=len(LOGITS)) / n


def chi_square(found: torch.Tensor, expected: torch.Tensor, n: int) -> float:
    seen = expected > 0
    assert found[~seen].sum() == 0
    return float((n * (found - expected)[seen] ** 2 / expected[seen]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature):
    expected = torch.softmax(LOGITS / temperature, dim=-1)
    assert (
        chi_square(draw(20000, temperature=temperature), expected, 20000) < 25
    )  # 6 degrees: p is about 0.0003
    assert chi_square(draw(20000, temperature=temperature), torch.softmax(LOGITS / 1.4, dim=-1), 20000) > 25


def test_top_p_keeps_the_smallest_set():
    probs = torch.softmax(LOGITS, dim=-1)  # 0.43, 0.26, 0.16, ...
    expected = torch.where(torch.arange(7) < 3, probs, 0.0)
    expected /= expected.sum()
    assert float(probs[:2].sum()) < 0.75 < float(probs[:3].sum())
    assert chi_square(draw(20000, top_p=0.75), expected, 20000) < 20


def test_top_k_and_a_tiny_top_p():
    assert draw(2000, top_k=2)[2:].sum() == 0
    assert draw(2000, top_k=2)[:2].min() > 0.1
    assert draw(500, top_p=1e-6)[0] == 1.0
    assert draw(500, temperature=0)[0] == 1.0


def test_filter_top_rows_are_their_own():
    logits = LOGITS.expand(3, -1).contiguous()
    kept = filter_top(logits, torch.tensor([[7], [1], [4]]), torch.tensor([[1.0], [1.0], [0.5]]))
    assert torch.equal(kept[0], logits[0])
    assert kept.isfinite().sum(-1).tolist() == [7, 1, 2]


def test_seeded_rows_repeat_and_differ_by_seed():
    def run(seed, filler):
        sampler = Sampler(torch.device("cpu"), filler)
        request = Request("a", [1], SamplingParams(seed=seed), 9)
        others = [Request("b", [1], SamplingParams(), 9) for _ in range(filler)]
        return [sampler(LOGITS.expand(1 + filler, -1), [*others, request])[-1] for _ in range(40)]

    assert run(1, 0) == run(1, 3)
    assert run(1, 0) != run(2, 0)


class Bytes:
    """A tokenizer of single bytes, and of whole strings above 255."""

    words = {256: "stop", 257: "STO", 258: "P it", 259: "x"}

    def decode(self, ids, **_):
        raw = b"".join(self.words[i].encode() if i > 255 else bytes([i]) for i in ids)
        return raw.decode("utf-8", errors="replace")


def feed(ids, **options):
    detokenizer = Detokenizer(Bytes(), [], **options)
    pieces, stop = [], None
    for i in ids:
        stop = detokenizer.append(i)
        pieces.append(detokenizer.take(final=stop is not None))
        if stop:
            break
    if stop is None:
        detokenizer.finish()
        pieces.append(detokenizer.take(final=True))
    return pieces, stop, detokenizer.text


def test_characters_come_whole():
    pieces, _, text = feed("héé€😀!".encode())
    assert text == "héé€😀!" == "".join(pieces)
    assert not any("\ufffd" in p for p in pieces)


def test_an_unfinished_character_ends_as_replacement():
    assert feed([104, 0xF0, 0x9F])[2] == "h\ufffd"


def test_bad_bytes_do_not_hold_the_text_up():
    pieces, _, text = feed([0xFF] * 40 + [104])
    assert text.endswith("h") and any(pieces[:20])


def test_stop_over_several_tokens_is_never_sent():
    pieces, stop, text = feed([259, 257, 258, 259], stop=["STOP"])
    assert (stop, text, "".join(pieces)) == ("STOP", "x", "x")


def test_a_tail_that_was_no_stop_comes_later():
    pieces, stop, text = feed([259, 257, 259], stop=["STOP"])
    assert (stop, text) == (None, "xSTOx") and pieces[1] == "" and pieces[2] == "STOx"


def test_the_stop_that_ends_first_wins():
    assert feed([256, 259], stop=["stopx", "to", "stop"])[1:] == ("to", "s")
    assert feed([256], stop=["stop"], include_stop=True)[1:] == ("stop", "stop")
