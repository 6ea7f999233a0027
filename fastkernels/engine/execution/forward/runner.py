"""The interface between the engine and a model on one rank; loads the model's weights on its device."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import compile_cache
from fastkernels.core.candidate_scopes import Scope
from fastkernels.engine.cache.kv_cache import GIB, Limits
from fastkernels.engine.execution.forward.startup import Phases
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.layers import shared_experts
from fastkernels.models.common.plans import build
from fastkernels.overrides.kit import cpu

log = logging.getLogger("fastkernels")


class Runner(ABC):
    """A model on one rank, and how it runs a step. A model file names its runner (see engine.options.runners).

    With bind_cache=False the caller binds the cache: ranks call choose_kernels(), then, to agree on a size,
    num_fitting_blocks(), then bind() with the smallest result. `phases` records the time of each part of the start.

    Raises CheckpointError, UnknownName, and ValueError for a model that does not fit or for an unsupported option.
    """

    limits: Limits
    max_model_len: int
    graphs: Any = None  # CUDA graphs, where the runner captures any
    draft_graphs: Any = None  # more of these, of a draft model
    shares_experts: bool = False  # with other data-parallel ranks

    def __init__(
        self, config: EngineConfig, folder: Path, hf_config: Any, rank: int = 0, bind_cache: bool = True,
        phases: Phases | None = None,
    ):  # fmt: skip
        self.config, self.hf_config, self.rank = config, hf_config, rank
        self.scope = Scope(f"the engine of {config.model}")  # entered by the executor
        self._phases = phases or Phases()
        self.device = _device(config.device, rank % config.ranks_per_node)
        if self.device.type == "cuda":
            compile_cache.prepare_triton()
        self._mark("device")
        self.dtype = pick_dtype(config.dtype, hf_config, self.device)
        self._prepare(folder)
        self.model: Any = self._build(folder)
        if config.data_parallel_size > 1:
            self.shares_experts = shared_experts.connect(self.model)
        self._mark("weights")
        self._loaded()
        if bind_cache:
            self.choose_kernels()
            self.bind(self.num_fitting_blocks())

    def _prepare(self, folder: Path) -> None:  # noqa: B027
        """Check the configuration before the weights are loaded."""

    def _loaded(self) -> None:  # noqa: B027
        """Make what depends on the loaded model."""

    def choose_kernels(self) -> None:  # noqa: B027
        """Measure which kernels are the fastest for the model. In all ranks, before num_fitting_blocks()."""

    @abstractmethod
    def num_fitting_blocks(self) -> int:
        """The number of KV blocks that this rank has memory for; 0 for a runner without a cache."""

    @abstractmethod
    def bind(self, num_blocks: int) -> None:
        """Allocate everything that depends on the cache size, and set `limits`."""

    @abstractmethod
    def launch(self, step: Any) -> Any:
        """Start one step. Returns a Pending (step.py) whose result() waits for it."""

    def capture(self) -> None:  # noqa: B027
        """Capture CUDA graphs again after the model's code has changed."""

    def run_border(self) -> None:  # noqa: B027
        """Run what the model does between the chunks of a sequence, without one: to measure memory and to warm up."""

    def _mark(self, phase: str) -> None:
        """End a phase of the start; on CUDA, wait for the device first."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the first call creates the CUDA context
        self._phases.mark(phase)

    def _build(self, folder: Path) -> Any:
        config = self.config
        try:
            return build.build(
                folder, self.hf_config, self.device, self.dtype, config.load_format, config.seed
            )
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise ValueError(
                f"the model's weights do not fit: {free / GIB:.2f} of the GPU's {total / GIB:.2f} GiB are free;"
                " use a larger tensor_parallel_size or a smaller model, or free memory used by other processes"
                f" ({error})"
            ) from error


def _device(name: str | None, rank: int) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device 'cuda' is not available; use device='cpu'")
    if rank >= torch.cuda.device_count():
        raise ValueError(f"rank {rank} needs a GPU of its own, and there are {torch.cuda.device_count()}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def pick_dtype(name: str, hf_config: Any, device: torch.device) -> torch.dtype:
    """The torch dtype for EngineConfig.dtype.

    'auto' selects the checkpoint's dtype, with two exceptions: bfloat16 replaces float32 on CUDA, and float32 replaces
    bfloat16 on a CPU without bfloat16 arithmetic, where PyTorch's emulation is slower and less exact.
    """
    if name != "auto":
        return getattr(torch, name)
    found = getattr(hf_config, "dtype", None) or torch.float32
    found = getattr(torch, found) if isinstance(found, str) else found
    if found == torch.float32 and device.type == "cuda":
        return torch.bfloat16
    if found == torch.bfloat16 and device.type == "cpu" and not cpu.onednn_has_bfloat16():
        log.info("this CPU does not compute in bfloat16: using float32")
        return torch.float32
    return found
