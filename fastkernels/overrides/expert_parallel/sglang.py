"""SGLang's group of ranks with data-parallel attention."""

from __future__ import annotations

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.collective.in_hosts import Ours, gathered, gathers, scattered, scatters


class SGLangExpertCoordinator:
    """sglang.srt.distributed.parallel_state.GroupCoordinator of ranks with data-parallel attention.

    SGLang collects the ranks' tokens with all_gather_into_tensor before the experts, and sums and divides their results
    with reduce_scatter_tensor.
    """

    live_methods = ("all_gather_into_tensor", "reduce_scatter_tensor")
    fastkernels_experts: Ours

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        ours = self.fastkernels_experts
        if input.is_contiguous() and output.is_contiguous() and gathers(ours, [input], None):
            gathered(ours, [input], [output])
        else:
            ours.class_of(self).all_gather_into_tensor(self, output, input)

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        ours = self.fastkernels_experts
        if scatters(ours, input, None) and output.is_contiguous():
            scattered(ours, input, output)
        else:
            ours.class_of(self).reduce_scatter_tensor(self, output, input)


TARGETS = {
    "ep_dispatch": (
        Target(
            "sglang", "sglang.srt.distributed.parallel_state:GroupCoordinator", "SGLangExpertCoordinator", "dispatcher",
            "", False,
            "only all_gather_into_tensor and reduce_scatter_tensor of the live group are replaced, where they were"
            " measured to be faster",
        ),
    ),
}  # fmt: skip
