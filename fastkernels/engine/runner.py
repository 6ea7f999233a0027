"""Runs a batch on the model: its inputs and attention metadata, the KV cache and its size, graphs, sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastkernels.forward_context import AttentionMetadata, forward_context
from fastkernels.models import build
from fastkernels.overrides.l2.attention import PagedAttention

from .config import EngineConfig
from .graphs import DecodeGraphs
from .request import Request
from .sampler import Sampler
from .scheduler import Batch

log = logging.getLogger("fastkernels")
CPU_CACHE = 1 << 30  # bytes of KV cache on the CPU where nothing else is asked for
ACTIVATIONS = 1 << 30  # bytes of a GPU left free beside the measured peak: allocator slack and graphs


@dataclass(frozen=True)
class Limits:
    """What the machine and the model allow, derived when the engine is built."""

    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int


class ModelRunner:
    """The model of one rank, on its device."""

    def __init__(self, config: EngineConfig, folder: Path, hf_config: Any):
        self.config, self.hf_config = config, hf_config
        self.device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device 'cuda' was asked for, and there is none; use device='cpu'")
        self.dtype = pick_dtype(config.dtype, hf_config, self.device)
        self.model: Any = build.build(
            folder, hf_config, self.device, self.dtype, config.load_format, config.seed
        )
        self.layers = [m for m in self.model.modules() if isinstance(m, PagedAttention)]
        self.limits = self._limits()
        self._bind_cache(self.limits.num_blocks)
        self.sampler = Sampler(self.device, config.seed)
        self.graphs: DecodeGraphs | None = None
        self.capture()

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[int]:
        """One step: the next token of every request of the batch."""
        requests = batch.requests
        if self.graphs is not None and batch.decode and self.graphs.fits(len(requests)):
            logits = self.graphs.run(requests, self.config.block_size)
        else:
            logits = self._forward(requests)
        return self.sampler(logits, requests)

    def capture(self) -> None:
        """Capture the decode graphs (again): needed after every change of the model's code. CUDA only."""
        self.graphs = None
        if self.device.type == "cuda" and not self.config.enforce_eager:
            max_len, size = self.limits.max_model_len, self.config.max_num_seqs
            self.graphs = DecodeGraphs(self.model, self.device, size, max_len, self.config.block_size)

    def _forward(self, requests: Sequence[Request]) -> torch.Tensor:
        input_ids, positions, metadata = self._inputs(requests)
        with forward_context(metadata):
            hidden = self.model(input_ids, positions)
        if not metadata.decode_only:
            hidden = hidden[(metadata.cu_seqlens_q[1:] - 1).long()]
        return self.model.compute_logits(hidden)

    def _inputs(self, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        block_size = self.config.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for r in requests:
            new = range(r.num_computed_tokens, r.num_tokens)
            ids += r.new_tokens()
            positions += new
            slots += [r.block_table[p // block_size] * block_size + p % block_size for p in new]
            starts.append(len(ids))
        width = max(len(r.block_table) for r in requests)
        tables = [r.block_table + [0] * (width - len(r.block_table)) for r in requests]
        lengths = [r.num_tokens for r in requests]
        metadata = AttentionMetadata(
            self._tensor(slots, torch.int64),
            self._tensor(starts, torch.int32),
            self._tensor(lengths, torch.int32),
            self._tensor(tables, torch.int32),
            max(r.num_new_tokens for r in requests),
            max(lengths),
        )
        return self._tensor(ids, torch.int64), self._tensor(positions, torch.int64), metadata

    def _tensor(self, data: list[Any], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.tensor(data, dtype=dtype)
        return torch.tensor(data, dtype=dtype, pin_memory=True).to(self.device, non_blocking=True)

    def block_bytes(self) -> int:
        """Bytes of one block in all layers, keys and values."""
        item = torch.empty(0, dtype=self.dtype).element_size()
        return sum(2 * self.config.block_size * m.num_kv_heads * m.head_size * item for m in self.layers)

    def _limits(self) -> Limits:
        config = self.config
        model_len = getattr(self.hf_config, "max_position_embeddings", None) or config.max_model_len or 2048
        if config.max_model_len is not None and config.max_model_len > model_len:
            raise ValueError(f"max_model_len {config.max_model_len} is more than the model's {model_len}")
        wanted = config.max_model_len or model_len
        step = config.max_num_batched_tokens or max(wanted, 8192)
        num_blocks = config.num_blocks or self._fitting_blocks(min(step, wanted))
        if num_blocks < 2:
            raise ValueError(f"the KV cache has room for {num_blocks} blocks, at least 2 are needed")
        room = min((num_blocks - 1) * config.block_size, step)
        if config.max_model_len is not None and room < config.max_model_len:
            raise ValueError(
                f"max_model_len {config.max_model_len} does not fit: the KV cache holds"
                f" {(num_blocks - 1) * config.block_size} tokens and a step {step}; make it smaller, or num_blocks,"
                " kv_cache_memory or max_num_batched_tokens larger"
            )
        if room < wanted:
            log.warning("max_model_len is %d, not the model's %d: no more fits", room, wanted)
        log.info("KV cache: %d blocks of %d tokens", num_blocks, config.block_size)
        return Limits(num_blocks, min(wanted, room), step)

    def _fitting_blocks(self, step: int) -> int:
        if self.config.kv_cache_memory is not None:
            return self.config.kv_cache_memory // self.block_bytes()
        if self.device.type == "cpu":
            return CPU_CACHE // self.block_bytes()
        free, total = torch.cuda.mem_get_info()
        used_by_others = total - free - torch.cuda.memory_reserved()
        budget = int(total * self.config.gpu_memory_utilization) - used_by_others
        return (budget - self._peak(step) - ACTIVATIONS) // self.block_bytes()

    @torch.inference_mode()
    def _peak(self, step: int) -> int:
        """Peak bytes of a prefill of so many tokens, weights included, on a cache that is just large enough."""
        blocks = -(-step // self.config.block_size) + 1
        self._bind_cache(blocks)
        torch.cuda.reset_peak_memory_stats()
        fake = Request("profile", [0] * step, None, 1)  # type: ignore[arg-type]
        fake.block_table = list(range(1, blocks))
        logits = self._forward([fake])
        rows = logits.float().expand(self.config.max_num_seqs, -1)
        peak = (
            torch.cuda.max_memory_allocated() + 4 * rows.numel() * 4
        )  # sampling: logits, sort, softmax, noise
        for layer in self.layers:
            layer.kv_cache = None
        del logits, rows
        torch.cuda.empty_cache()
        return peak - blocks * self.block_bytes()

    def _bind_cache(self, num_blocks: int) -> None:
        for layer in self.layers:
            shape = (2, num_blocks, self.config.block_size, layer.num_kv_heads, layer.head_size)
            cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
            layer.kv_cache = (cache[0], cache[1])


def pick_dtype(name: str, hf_config: Any, device: torch.device) -> torch.dtype:
    """The dtype for EngineConfig.dtype. 'auto' is the checkpoint's, but bfloat16 for float32 on CUDA, and float32 for
    bfloat16 on a CPU that does not compute in bfloat16: there PyTorch emulates it, slower and less exactly.
    """
    if name != "auto":
        return getattr(torch, name)
    found = getattr(hf_config, "dtype", None) or torch.float32
    found = getattr(torch, found) if isinstance(found, str) else found
    if found == torch.float32 and device.type == "cuda":
        return torch.bfloat16
    if found == torch.bfloat16 and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        log.info("this CPU does not compute in bfloat16: the dtype is float32")
        return torch.float32
    return found
