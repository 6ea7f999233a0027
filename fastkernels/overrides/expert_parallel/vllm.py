"""vLLM's communicators of ranks that share experts."""

from __future__ import annotations

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.collective.in_hosts import Ours, gathered, gathers, scattered, scatters


class VllmExpertCommunicator_0_26:
    """vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator of ranks that share experts.

    vLLM's dispatch collects the ranks' tokens, expert numbers and weights with all_gatherv, and its combine sums and
    divides the experts' results with reduce_scatterv. Ours collects all tensors with one kernel. Ranks with different
    numbers of tokens, and longer messages, stay vLLM's.
    """

    live_methods: tuple[str, ...] = ("all_gatherv", "reduce_scatterv")
    fastkernels_experts: Ours

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        ours = self.fastkernels_experts
        tensors = [input_] if isinstance(input_, torch.Tensor) else input_
        if dim == 0 and gathers(ours, tensors, sizes):
            found = gathered(ours, tensors)
            return found[0] if isinstance(input_, torch.Tensor) else found
        theirs: torch.Tensor | list[torch.Tensor] = ours.class_of(self).all_gatherv(self, input_, dim, sizes)
        return theirs

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        ours = self.fastkernels_experts
        if dim == 0 and scatters(ours, input_, sizes):
            return scattered(ours, input_)
        theirs: torch.Tensor = ours.class_of(self).reduce_scatterv(self, input_, dim, sizes)
        return theirs


class VllmExpertCommunicator(VllmExpertCommunicator_0_26):
    """The same where combine writes into a given tensor."""

    live_methods = ("all_gatherv", "reduce_scatterv", "reduce_scatterv_into_output")

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        ours = self.fastkernels_experts
        if dim == 0 and scatters(ours, input_, sizes) and output.is_contiguous():
            return scattered(ours, input_, output)
        theirs: torch.Tensor = ours.class_of(self).reduce_scatterv_into_output(
            self, input_, output, dim, sizes
        )
        return theirs


class VllmCpuExpertCommunicator(VllmExpertCommunicator):
    """vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator, which has no all_gatherv of its own."""


_EXPERTS = "only all_gatherv and reduce_scatterv of the live group are replaced, where they were measured to be faster"
_FILES = "vllm.distributed.device_communicators"

TARGETS = {
    "ep_dispatch": (
        Target(
            "vllm", f"{_FILES}.cuda_communicator:CudaCommunicator", "VllmExpertCommunicator", "dispatcher", ">=0.32",
            False, _EXPERTS,
        ),
        Target(
            "vllm", f"{_FILES}.cuda_communicator:CudaCommunicator", "VllmExpertCommunicator_0_26", "dispatcher",
            "<0.32", False, _EXPERTS,
        ),
        Target(
            "vllm", f"{_FILES}.cpu_communicator:CpuCommunicator", "VllmCpuExpertCommunicator", "dispatcher", ">=0.32",
            False, _EXPERTS,
        ),
    ),
}  # fmt: skip
