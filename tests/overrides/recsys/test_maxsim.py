"""MaxSim beyond its cases: sequences without tokens, ColBERT's own formula, and arguments that contradict."""

from __future__ import annotations

import math

import pytest
import torch

from fastkernels.overrides.recsys import maxsim as op
from fastkernels.overrides.recsys.maxsim import maxsim

PROVIDERS = ("torch", "reference")


def starts(*lens: int) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def provider(name: str):  # type: ignore[no-untyped-def]
    return next(p.fn for p in maxsim.providers if p.name == name)


@pytest.mark.parametrize("name", PROVIDERS)
def test_sequences_without_tokens_have_limits(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, document = torch.randn(3, 8, generator=generator), torch.randn(6, 8, generator=generator)
    hidden = torch.tensor([True, True, False, False, True, False])
    found = provider(name)(query, document, starts(2, 0, 1), starts(2, 0, 2, 2), 2, 2, hidden)
    whole = (query[:2] @ document[:2].T).amax(1).sum()
    torch.testing.assert_close(found[0, 0], whole)
    assert found[0, 1:3].tolist() == [-math.inf, -math.inf]  # no token, and no token that is seen
    assert found[1].tolist() == [0.0] * 4
    torch.testing.assert_close(found[2, 3], query[2] @ document[4])


@pytest.mark.parametrize("name", PROVIDERS)
def test_scores_equal_padded_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ColBERT's code pads, hides with -9999 and reduces. A small limit splits the queries' tokens."""
    monkeypatch.setattr(op, "AT_ONCE", 70)
    generator = torch.Generator().manual_seed(1)
    lens, q_lens = [5, 9, 1, 7], [4, 3]
    query, document = torch.randn(7, 16, generator=generator), torch.randn(22, 16, generator=generator)
    padded = torch.nn.utils.rnn.pad_sequence(list(document.split(lens)), batch_first=True)
    products = torch.einsum("qd,btd->qbt", query, padded)
    products[:, torch.arange(9) >= torch.tensor(lens)[:, None]] = -9999.0
    best = products.amax(-1)
    want = torch.stack([part.sum(0) for part in best.split(q_lens)])
    found = provider(name)(query, document, starts(*q_lens), starts(*lens), 4, 9)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3)}, r"query must be \[Tq, D\].* got query \(2, 3\), document \(5, 4\)"),
        ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens_q must be \[sequences \+ 1\]"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, r"mask must be \[5\] of bool, got \(4,\)"),
        ({"mask": torch.ones(5)}, r"mask must be \[5\] of bool, got \(5,\) of torch.float32"),
    ],
)
def test_contradicting_arguments_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "query": torch.zeros(2, 4), "document": torch.zeros(5, 4), "cu_seqlens_q": starts(2), "cu_seqlens_d": starts(5),
        "max_seqlen_q": 2, "max_seqlen_d": 5, "mask": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        maxsim(*{**given, **change}.values())
