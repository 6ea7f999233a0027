"""The platform class: memory, device and pools, as SGLang 0.5.16 to 0.5.23 require."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class TorchCpuPlatform(SRTPlatform):
    """Every operator runs its `forward_native`; tensor parallelism goes over gloo."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    supported_quantization: list[str] = []

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: Any = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: Any) -> None:
        """There is one device."""

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu0"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def empty_cache(self) -> None:
        """PyTorch caches no memory of a CPU. A collection of garbage takes 0.4 s, at each flush of SGLang's cache."""

    def synchronize(self) -> None:
        """The CPU runs in order."""

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity(self) -> Any:
        return torch.profiler.ProfilerActivity.CPU

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def support_cuda_graph(self) -> bool:
        return False

    def support_piecewise_cuda_graph(self) -> bool:
        return False


def _mha_pool(self: Any) -> type:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool


def _mla_pool(self: Any) -> type:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool


def _allocator(self: Any) -> type:
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    class TokenAllocator(TokenToKVPoolAllocator):
        """A page is one token: the allocators of larger pages are Triton kernels."""

        def __init__(self, size: int, *, page_size: int, **rest: Any) -> None:
            if page_size != 1:
                raise ValueError(f"page_size={page_size}: on the CPU it must be 1")
            super().__init__(size, **rest)

    return TokenAllocator


# Up to 0.5.21 the interface has no in-tree defaults for these.
for _name, _method in (
    ("get_mha_kv_pool_cls", _mha_pool),
    ("get_mla_kv_pool_cls", _mla_pool),
    ("get_paged_allocator_cls", _allocator),
):
    if hasattr(SRTPlatform, "get_mha_kv_pool_cls"):
        setattr(TorchCpuPlatform, _name, _method)
