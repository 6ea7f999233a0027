"""Tests of logits_processor: its product is the op linear, with linear's tuned table and candidates."""

from __future__ import annotations

import torch

from fastkernels.overrides.embedding import logits_processor as module
from fastkernels.overrides.linear.linear import linear

PROVIDERS = {p.name: p for p in module.logits_processor.providers}


def test_product_is_the_op_linear() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=generator) for size in ((3, 40), (65, 40)))
    run, before = PROVIDERS["linear"].fn, linear.calls
    torch.testing.assert_close(run(hidden, weight), module.reference(hidden, weight))
    assert linear.calls == before + 1
    assert run(hidden.double(), weight).dtype == torch.float32  # the weight's, as the hosts have it
    try:
        linear.set_candidate(lambda x, w, b=None: torch.full((x.shape[0], w.shape[0]), 7.0))
        assert (run(hidden, weight) == 7.0).all()
    finally:
        linear.set_candidate(None)


def test_linear_is_first_provider_on_gpu() -> None:
    assert module.logits_processor.providers[0].name == "linear"
    assert PROVIDERS["linear"].devices == ("cuda",) and PROVIDERS["onednn"].devices == ("cpu",)
