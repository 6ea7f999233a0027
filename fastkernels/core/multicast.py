"""NVLink multicast, which is off by default in every process with ranks.

A program that ends at the wrong moment while it uses multicast can disable the GPUs of its machine. The variables are
defaults: a value in the user's own environment wins.
"""

from __future__ import annotations

import os

OFF = {  # of PyTorch's symmetric memory, NCCL (NVLink SHARP) and NVSHMEM
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def variables() -> dict[str, str]:
    """The variables for a process with ranks: this process's own values, or those that turn multicast off."""
    return {name: os.environ.get(name, value) for name, value in OFF.items()}


def turn_off() -> None:
    """Turn multicast off in this process and those that it starts. It must precede the first communicator of NCCL."""
    os.environ.update(variables())
