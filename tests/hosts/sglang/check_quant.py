"""SGLang's grouped_topk_gpu and the PyTorch form of its biased one, beside ours of the same arguments."""

import pytest
import torch

from fastkernels.overrides.l1 import grouped_topk


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("apply", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_topk_is_the_hosts(biased, renormalize, apply):
    from sglang.srt.layers.moe import topk

    bias = [randn(64, seed=2) / 20] if biased else []
    theirs = topk.biased_grouped_topk_impl if biased else topk.grouped_topk_gpu
    theirs = getattr(theirs, "_torchdynamo_orig_callable", theirs)
    ours = grouped_topk.sglang_biased_grouped_topk_gpu if biased else grouped_topk.sglang_grouped_topk_gpu
    arguments = (randn(50, 8), 2 * randn(50, 64, seed=1), *bias, 6, renormalize, 8, 3, 0, 2.5, apply)
    weights, ids = theirs(*arguments)
    found, found_ids = ours(*arguments)
    ids, order = ids.sort(-1)  # the host does not order them
    found_ids, found_order = found_ids.sort(-1)
    assert torch.equal(found_ids, ids)
    torch.testing.assert_close(found.gather(1, found_order), weights.gather(1, order))
