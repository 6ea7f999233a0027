"""Settings of a process that starts vLLM: before vLLM is imported."""

from __future__ import annotations

import os

import torch


def prepare() -> bool:
    """Set what vLLM needs for greedy sampling on a GPU, or for a CPU; variables that are set stay as they are.

    Returns whether there is a GPU.
    """
    # Looking for a GPU must not initialize CUDA here, or a forked engine process could not use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # compiled with nvcc at its first use
    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # vLLM's attention never requests AMX, and crashes on a short first prompt
    return gpu
