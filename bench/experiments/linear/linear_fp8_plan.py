"""Layers, tokens and parameter sets of linear_fp8.py, their selection, and compilation ahead of time."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
from experiments.linear.linear_kernels import label

from fastkernels.overrides.kit.launch import multiprocessors
from fastkernels.overrides.linear.kernels import wgmma_linear_fp8_cuda as wgmma

# N, K
STEP = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = {**STEP, "half_down": (4096, 7168), "qwen_half_down": (4096, 6144)}
ODD = ((33, 288), (1000, 736), (1001, 4112), (130, 208), (7, 128), (264, 1152))
CHAIN, GRAPHS = (4096, 4096), (8, 64)  # shape and tokens of a chain of layers
CHECKED = (1, 3, 8, 9, 17, 32, 33, 64)
PADDED = (8, 16, 32, 64)  # numbers of tokens that kernels are compiled for


def selected(names: str, known: list[str]) -> list[str]:
    """Parse a comma-separated selection; empty means all. Exits with an unknown name."""
    found = names.split(",") if names else known
    if unknown := set(found) - set(known):
        raise SystemExit(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    return found


def layers_of(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    return {name: LAYERS[name] for name in selected(options.layers, list(LAYERS))}


def sets_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    names = selected(options.sets, [label(p) for p in wgmma.PARAMS])
    return [p for p in wgmma.PARAMS if label(p) in names]


def checked(options: argparse.Namespace) -> list[int]:
    """Return the tokens to check: those whose kernels are timed."""

    def padded(m: int) -> int:
        return next(t for t in PADDED if t >= m)

    timed = {padded(m) for m in map(int, options.tokens.split(",")) if m <= PADDED[-1]}
    return [m for m in CHECKED if padded(m) in timed]


def compile_share(options: argparse.Namespace, part: int, parts: int) -> None:
    """Compile every `parts`-th kernel that will be launched."""
    device = torch.device("cuda", 0)
    sms = multiprocessors(device)
    plans = {
        (wgmma.plan(m, n, k, **p, blocks=of_blocks, sms=sms)._replace(items=0, grid=0), bf16, of_blocks)
        for shapes, bf16, tokens in (
            (layers_of(options).values(), True, checked(options)), (ODD, False, checked(options)),
            ((CHAIN,), True, GRAPHS),
        )
        for n, k in shapes for m in tokens for of_blocks in (False, True)
        for p in sets_of(options) if wgmma.fits(p, m, k)
    }  # fmt: skip
    for plan in sorted(plans, key=lambda plan: (-plan[0].rows, plan))[part::parts]:
        with contextlib.suppress(Exception):  # reported where it runs
            wgmma.kernel_for(device, *plan)
