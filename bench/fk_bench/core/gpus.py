"""The GPUs of this machine, and a share of its CPU cores for the processes on each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from fk_bench.core.terminal.flags import ConfigError

Command = tuple[str, ...]


def visible(count: int) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES, or the numbers of all `count` GPUs."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if chosen is None else [g for g in chosen.split(",") if g.strip()]


def cores_of(gpus: Sequence[str]) -> dict[str, list[int]]:
    """Return {GPU: its contiguous share of the CPU cores that this process may use}."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // max(1, len(gpus))
    return {gpu: cores[i * each : (i + 1) * each] for i, gpu in enumerate(gpus)}


def placed(
    command: Command, gpus: Sequence[str], cores: Mapping[str, Sequence[int]]
) -> tuple[dict[str, str], Command]:
    """Return environment and command for these GPUs and their cores; without a GPU, all cores."""
    mine = [str(core) for gpu in gpus for core in cores[gpu]]
    pinned = ("taskset", "-c", ",".join(mine)) if mine and shutil.which("taskset") else ()
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus) or "-1"}, (*pinned, *command)


def check_ranks(flag: str, ranks: int, gpus: int, on_gpus: bool | None = None) -> None:
    """Raise ConfigError if there are fewer GPUs than ranks.

    on_gpus  whether the ranks run on GPUs; None: if there are any, since hosts without a GPU run on the CPU
    """
    if ranks > gpus and (gpus > 0 if on_gpus is None else on_gpus):
        instead = f"give {flag} {gpus}" if gpus > 1 else f"leave {flag} out" if gpus else "none was found"
        raise ConfigError(f"{flag} {ranks} needs a GPU for each rank, and {gpus} can be used: {instead}")
