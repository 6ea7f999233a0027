"""A fake CUDA driver of an H200: Triton compiles kernels for it, and none runs."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget


class FakeDriver:
    """Record launches instead of running them."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils, self.device = self, 0

    def load_binary(self, name: str, kernel: Any, shared: int, device: int) -> tuple[int, ...]:
        self.loaded = getattr(self, "loaded", 0) + 1
        return 1, self.loaded, 32, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "warpSize": 32}

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: self.launched.append(args)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
