"""Engines that share the memory of a GPU, or of each GPU of a tensor-parallel group: what each needs, and which start
together.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

GIB = 1 << 30
BATCHED_TOKENS = 16384  # vLLM's step on an H200: the largest of the hosts'
SAMPLED = 256  # sequences of which a step keeps logits
FIXED = 6 * GIB  # context, graphs of both states, workspaces, and the buffers of a patch's measurement
FIXED_CPU = 2 * GIB
STATES, SNAPSHOTS = (
    1.25,
    8 / 7,
)  # room for recurrent states over those of a load's sequences, and for snapshots
LARGE_BLOCK = 1024  # tokens, about, of a host's block that is as large as a recurrent state
NO_CACHE = GIB  # of an encoder: hosts want some
WAIT_SECONDS = 120.0  # for a GPU's memory after the process that held it has ended


@dataclass(frozen=True)
class Need:
    """The memory of one engine in bytes, on each of its GPUs.

    tokens  those that its KV cache holds; states: recurrent ones, part of kv
    """

    model: str
    weights: int
    tokens: int
    kv: int
    rest: int
    states: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.rest

    def __add__(self, other: Need) -> Need:
        sums = (
            getattr(self, name) + getattr(other, name)
            for name in ("weights", "tokens", "kv", "rest", "states")
        )
        return Need(f"{self.model}, {other.model}", *sums)

    def __str__(self) -> str:
        parts = ("weights", self.weights), ("KV cache", self.kv), ("the rest", self.rest)
        return f"{self.total / GIB:.1f} GiB ({', '.join(f'{n} {b / GIB:.1f}' for n, b in parts)})"


def need(
    model: str, path: str, dtype: str, tokens: int, gpu: bool, kv_bytes: int | None = None, sequences: int = 1,
    ranks: int = 1,
) -> Need:  # fmt: skip
    """The memory that each rank of an engine of the model needs with a KV cache of so many tokens.

    model      its name; path: a folder with its config.json
    kv_bytes   of a number in the KV cache (default: those of `dtype`)
    sequences  that run at once: each has a recurrent state, if the model has any
    ranks      that share the model: weights with a layout, heads of keys and values, and states

    Raises ValueError for an unknown architecture.
    """
    import torch

    import fastkernels
    from fastkernels.models.common.plans import build
    from fastkernels.models.common.plans.plan import SIZES

    config: Any = build.load_config(Path(path))
    wide = 6 * config.hidden_size + 3 * getattr(config, "intermediate_size", 4 * config.hidden_size)
    activations = BATCHED_TOKENS * wide * 2 + SAMPLED * config.vocab_size * 10
    rest = FIXED + activations if gpu else FIXED_CPU
    if _runner(config) == "Encode":  # which keeps nothing between steps
        blank = build.skeleton(Path(path), config, getattr(torch, dtype))
        return Need(model, build.weight_bytes(blank), tokens, NO_CACHE, rest)
    plan = fastkernels.plan(path, dtype)
    states = int(STATES * (sequences + 2) * plan.state_bytes / ranks)
    if states:  # hosts round a sequence up to blocks as large as a state, and keep snapshots of states
        tokens = int(SNAPSHOTS * (tokens + sequences * LARGE_BLOCK))
    number = SIZES[plan.dtype] if kv_bytes is None else kv_bytes
    kv = tokens * sum(_kv_channels(mixer, ranks) for mixer in plan.attentions) * number
    weights = sum(item.weight_bytes(plan.dtype) // (ranks if item.layout else 1) for item in plan)
    return Need(model, weights, tokens, kv + states, rest, states)


def _kv_channels(mixer: Any, ranks: int) -> int:
    """Numbers that a rank caches for a token. Ranks share heads; more ranks than heads have copies of them."""
    heads = getattr(mixer, "kv_heads", 1)  # latents are the same on all ranks
    return int(mixer.kv_channels) // heads * -(-heads // ranks)


def is_recurrent(path: str, dtype: str) -> bool:
    """Whether sequences of the model keep a recurrent state. path: a folder with its config.json"""
    import fastkernels
    from fastkernels.models.common.plans import build

    if _runner(build.load_config(Path(path))) != "Generate":
        return False
    try:
        return fastkernels.plan(path, dtype).state_bytes > 0
    except ValueError:  # sizes of which there is no plan
        return False


def _runner(config: Any) -> str:
    """The runner of the model's architecture; '' for one that only hosts have."""
    from fastkernels.models.common.descriptions.registry import by_architecture

    found = by_architecture().get((getattr(config, "architectures", None) or [""])[0])
    return "" if found is None else found.arch.runner


def kv_tokens(sizes: Iterable[tuple[int, int]], longest: int, block: int = 16) -> int:
    """The tokens of a KV cache that holds any load without preemption. sizes: (requests, tokens of each)."""
    most = max((requests * -(-(tokens + 1) // block) * block for requests, tokens in sizes), default=0)
    return -(-max(most * 17 // 16, longest + 2 * block) // block) * block


def waves(needs: Sequence[Need], capacity: int, at_once: int, copies: int = 1) -> list[list[Need]]:
    """The engines in groups that fit into the memory together, at most `at_once` models in each: the largest first.

    copies: engines of each model. A model that fits into no group is alone in its own.
    """
    found: list[list[Need]] = []
    for one in sorted(needs, key=lambda n: -n.total):
        for group in found:
            used = copies * sum(n.total for n in group)
            if len(group) < at_once and used + copies * one.total <= capacity:
                group.append(one)
                break
        else:
            found.append([one])
    return found


def too_large(one: Need, room: int, copies: int, ranks: int = 1) -> str:
    """Why so many engines of a model do not fit into `room` bytes, and what to do. ranks: of each engine."""
    engines = "two engines" if copies > 1 else "an engine"
    each = f"{one.weights / GIB:.1f} GiB of weights and {one.kv / GIB:.1f} GiB of keys and values each"
    each += f" on each of {ranks} ranks" if ranks > 1 else ""
    fewer = "without --with-engine, or " if copies > 1 else ""
    return (
        f"{engines} with {each} need more than the {room / GIB:.1f} GiB that are free: run it {fewer}with smaller "
        "--loads"
    )


def capacity(gpu: bool) -> int:
    """Bytes that engines may share now: on a GPU all that is free, on a CPU half of it."""
    if not gpu:
        return psutil.virtual_memory().available // 2
    return _of_gpu("free")


def limit(gpu: bool) -> int:
    """Bytes that engines may share when nothing else runs."""
    return _of_gpu("total") if gpu else psutil.virtual_memory().total


def _of_gpu(kind: str) -> int:
    command = ["nvidia-smi", f"--query-gpu=memory.{kind}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", ""):  # nvidia-smi lists the others, too
        command += ["-i", visible]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return min(int(line) for line in out.stdout.splitlines() if line.strip()) << 20


def room(needs: Sequence[Need], copies: int, gpu: bool, seconds: float = WAIT_SECONDS) -> int:
    """The bytes that engines may share, after a wait of at most `seconds` for those that the largest of these need.

    A process that has ended returns a GPU's memory only when the driver has taken its context down. Engines that never
    fit are not waited for.
    """
    sizes = [copies * size for n in needs for size in (n.total, n.weights + n.kv)] if gpu else []
    least = max((size for size in sizes if size <= 0.95 * _of_gpu("total")), default=0)
    began, before = time.monotonic(), capacity(gpu)
    free = before
    while free < least and time.monotonic() - began < seconds:
        time.sleep(1.0)
        free = capacity(gpu)
    if before < least:
        waited, rest = time.monotonic() - began, "" if free >= least else ": another process may hold it"
        print(
            f"waited {waited:.0f} s for the GPU's memory: {before / GIB:.1f} GiB were free, {free / GIB:.1f} GiB are"
            f" now, and {least / GIB:.1f} GiB are needed{rest}",
            file=sys.stderr,
        )
    return free
