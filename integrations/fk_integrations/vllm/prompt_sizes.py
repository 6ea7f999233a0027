"""Sizes of batches that a warm-up runs, so that later prompts compile nothing.

Triton compiles a kernel again where an integer becomes a multiple of 16, and kernels choose their tiles by size. A few
batches larger than the CUDA graphs therefore stand for all others. vLLM 0.26's routing of MXFP4 experts is not covered:
it compiles for each new number of tokens, rounded up to 32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

MOST = 8192  # of larger batches only the largest is run, by the warm-up itself


def run(worker: Any) -> None:
    """Run a batch of each size in a worker, without attention."""
    for tokens in of(worker.vllm_config):
        worker.model_runner._dummy_run(tokens, is_profile=True, skip_eplb=True)


def before_warm_up(worker: Any) -> None:
    """Have a worker that is being built run the sizes before its warm-up, after which vLLM's JIT monitor is active."""
    stock = worker.compile_or_warm_up_model

    @functools.wraps(stock)
    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        vars(worker).pop("compile_or_warm_up_model", None)  # a later warm-up is that of a live patch
        if compiles_kernels(worker):
            run(worker)
        return stock(*args, **kwargs)

    worker.compile_or_warm_up_model = compile_or_warm_up_model


def compiles_kernels(worker: Any) -> bool:
    """Whether a first call of ours compiles a kernel: on a CPU it runs PyTorch."""
    return getattr(worker.device, "type", str(worker.device).partition(":")[0]) != "cpu"


def of(config: Any) -> list[int]:
    """The sizes for a VllmConfig, the same in all ranks."""
    most, last = config.scheduler_config.max_num_batched_tokens, 0
    if config.compilation_config.cudagraph_mode and config.compilation_config.max_cudagraph_capture_size:
        last = config.compilation_config.max_cudagraph_capture_size
    return sizes(last, most, config.model_config.get_num_experts() > 0)


def sizes(last: int, most: int, experts: bool = False) -> list[int]:
    """Numbers of tokens above `last`: the smallest of each kind."""
    seen: set[tuple[Any, ...]] = set()
    found = []
    for tokens in range(last + 1, min(most, MOST) + 1):
        kinds = {*_kinds(tokens, experts)}
        if not kinds <= seen:
            seen |= kinds
            found.append(tokens)
    return found


def _kinds(tokens: int, experts: bool) -> Iterator[tuple[Any, ...]]:
    yield "size", tokens.bit_length() - (tokens.bit_count() == 1), tokens % 16 == 0
    if experts:  # vLLM's fused_moe has tiles of each power of two and 3/2 of it
        power = 1 << ((tokens - 1).bit_length() - 1) if tokens > 1 else 1
        yield "tiles", power, tokens > power * 3 // 2
