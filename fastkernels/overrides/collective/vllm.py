"""vLLM's communicators of tensor-parallel ranks."""

from __future__ import annotations

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.collective.in_hosts import summed


class VllmCudaCommunicator:
    """vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator: sums on GPUs."""

    live_methods = ("all_reduce",)
    host_sums_in_place = False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return summed(self, input_)


class VllmCpuCommunicator(VllmCudaCommunicator):
    """vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator: sums on CPUs; the host's are in place."""

    host_sums_in_place = True


_LIVE = "only all_reduce of a live group's communicator is replaced, where it was measured to be faster"
_FILES = "vllm.distributed.device_communicators"

TARGETS = {
    "all_reduce": (
        Target(
            "vllm", f"{_FILES}.cuda_communicator:CudaCommunicator", "VllmCudaCommunicator", "communicator", "", False,
            _LIVE,
        ),
        Target(
            "vllm", f"{_FILES}.cpu_communicator:CpuCommunicator", "VllmCpuCommunicator", "communicator", "", False,
            _LIVE,
        ),
    ),
}  # fmt: skip
