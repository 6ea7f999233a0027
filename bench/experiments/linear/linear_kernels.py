"""Kernels of `linear` for few tokens, the shapes that skinny_linear.py tests, and compilation ahead of time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from experiments.common.graph_clock import Compiles

from fastkernels.overrides.kit.launch import multiprocessors
from fastkernels.overrides.linear.kernels import skinny_linear_cuda as cuda
from fastkernels.overrides.linear.kernels import skinny_linear_triton as skinny
from fastkernels.overrides.linear.kernels import wgmma_linear_cuda as wgmma

Shape = tuple[int, int]  # N, K
Sets = tuple[dict[str, Any], ...]
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# layer: (N, K, number in a step)
MODELS: dict[str, dict[str, tuple[int, int, int]]] = {
    "llama-8b": {
        "qkv": (6144, 4096, 32), "o": (4096, 4096, 32), "gate_up": (28672, 4096, 32), "down": (4096, 14336, 32),
        "lm_head": (128256, 4096, 1),
    },
    "llama-8b-tp2": {  # one of two GPUs
        "qkv": (3072, 4096, 32), "o": (4096, 2048, 32), "gate_up": (14336, 4096, 32), "down": (4096, 7168, 32),
        "lm_head": (64128, 4096, 1),
    },
    "qwen3-8b": {
        "qkv": (6144, 4096, 36), "o": (4096, 4096, 36), "gate_up": (24576, 4096, 36), "down": (4096, 12288, 36),
        "lm_head": (151936, 4096, 1),
    },
}  # fmt: skip
TINY = {"tiny": {"a": (48, 64, 2), "b": (33, 288, 1)}}
ODD: tuple[tuple[Shape, torch.dtype], ...] = (((130, 200), torch.bfloat16), ((33, 288), torch.float16))
CUDA_ODD: tuple[tuple[Shape, torch.dtype], ...] = (
    ((33, 288), torch.float16), ((1000, 736), torch.bfloat16), ((1000, 4128), torch.bfloat16),
    ((130, 200), torch.bfloat16), ((1001, 72), torch.float16), ((7, 64), torch.bfloat16),
)  # fmt: skip
CHECKED = (1, 2, 3, 4, 7, 8, 16, 17, 32, 64)


def label(params: dict[str, Any]) -> str:
    return "/".join(str(v) for v in params.values())


class Kernel(NamedTuple):
    """A provider: its function, its parameter sets, and which of them are meant for (set, m, k).

    supports  of CUDA C++ kernels, which are tried in a child process first; k_of: K must be a multiple of it
    """

    fn: Callable[..., torch.Tensor]
    sets: Sets
    fits: Callable[[dict[str, Any], int, int], bool]
    supports: Callable[..., str | None] | None = None
    k_of: int = 8
    chained: tuple[int, ...] = ()  # numbers of tokens in graphs


KERNELS = {
    "triton-skinny": Kernel(skinny.linear_skinny, skinny.PARAMS, skinny.fits),
    "cuda-skinny": Kernel(cuda.linear_cuda, cuda.PARAMS, cuda.fits, cuda.supports_cuda, 32, (8, 16)),
    "cuda-wgmma": Kernel(
        wgmma.linear_wgmma, wgmma.PARAMS, wgmma.fits, wgmma.supports_wgmma, 8, (8, 16, 32, 64)
    ),
}


def only(providers: str, model: str) -> None:
    """Keep only the selected providers and models."""
    for requested, known in ((providers, KERNELS), (model, MODELS)):
        names = requested.split(",") if requested else list(known)
        if unknown := set(names) - set(known):
            raise SystemExit(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        for name in set(known) - set(names):
            del known[name]


def compile_share(part: int, parts: int, sizes: list[int]) -> None:
    """Compile every `parts`-th launch: the odd shapes, and these K."""
    for work in (*cuda_work(sizes), *triton_work(sizes))[part::parts]:
        with contextlib.suppress(Exception):  # reported where it runs
            work()


def cuda_work(sizes: list[int]) -> list[Callable[[], Any]]:
    """Compile the CUDA C++ kernels, the slowest first."""
    device = torch.device("cuda", 0)
    shapes = [(n, k) for model in MODELS.values() for n, k, _ in model.values() if k in sizes]
    cases = [(m, shape, torch.bfloat16, False) for shape in shapes for m in CHECKED]
    if sizes[0] == 4096:
        cases += [(m, shape, dtype, True) for shape, dtype in CUDA_ODD for m in CHECKED]
    plans = {
        (wgmma.plan(m, n, k, **p, sms=multiprocessors(device))._replace(items=0, grid=0), dtype == torch.bfloat16)
        for m, (n, k), dtype, _ in cases for p in wgmma.PARAMS
        if "cuda-wgmma" in KERNELS and wgmma.fits(p, m, k)
    }  # fmt: skip
    skinny_sets = {
        cuda.options(p, m, k, dtype == torch.bfloat16, bias): (p, m, k, dtype == torch.bfloat16, bias)
        for m, (_, k), dtype, bias in cases for p in cuda.PARAMS
        if "cuda-skinny" in KERNELS and cuda.fits(p, m, k)
    }  # fmt: skip
    order = sorted(plans, key=lambda plan: (-plan[0].rows, plan))
    work: list[Callable[[], Any]] = [partial(wgmma.kernel_for, device, *plan) for plan in order]
    return work + [partial(cuda.kernel_for, device, *what) for _, what in sorted(skinny_sets.items())]


def triton_work(sizes: list[int]) -> list[Callable[[], Any]]:
    if "triton-skinny" not in KERNELS:
        return []
    skinny._skinny_kernel = Compiles(skinny._skinny_kernel)

    def launch(shape: Shape, dtype: torch.dtype, p: dict[str, Any]) -> None:
        n, k = shape
        x = torch.empty(p["block_m"], k, dtype=dtype, device="cuda")
        weight = torch.empty(n, k, dtype=dtype, device="cuda")
        bias = None if k in sizes else torch.empty(n, dtype=dtype, device="cuda")
        skinny.linear_skinny(x, weight, bias, **p)

    jobs: list[tuple[Shape, torch.dtype, dict[str, Any]]] = []
    for p in skinny.PARAMS:
        jobs += [((256, k), torch.bfloat16, p) for k in sizes]
        jobs += [(shape, dtype, p) for shape, dtype in ODD if sizes[0] == 4096]
    return [partial(launch, *job) for job in jobs]
