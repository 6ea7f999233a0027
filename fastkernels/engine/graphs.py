"""CUDA graphs of the decode step: one for each of a few batch sizes, largest first, in one memory pool.

A batch runs in the smallest graph that holds it. The rows beyond it are padding: they write to block 0, which
the block manager never gives out, and attend to the one key there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.forward_context import AttentionMetadata, forward_context

from .request import Request


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256 and every 32 from there, up to max_num_seqs, which is always one."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs + 1, 32)]
    return sorted({s for s in sizes if s < max_num_seqs} | {max_num_seqs})


class DecodeGraphs:
    """Captured when it is made: a model in its final state, with its KV cache bound."""

    def __init__(
        self, model: Any, device: torch.device, max_num_seqs: int, max_model_len: int, block_size: int
    ):
        self.model, self.device, self.max_model_len = model, device, max_model_len
        self.sizes = capture_sizes(max_num_seqs)
        width = -(-max_model_len // block_size)
        rows = max_num_seqs
        self.input_ids, self.positions, self.slots = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.seq_lens = torch.ones(rows, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._capture()

    def fits(self, batch: int) -> bool:
        return batch <= self.sizes[-1]

    def run(self, requests: Sequence[Request], block_size: int) -> torch.Tensor:
        """Logits [B, V] of a decode batch. They are overwritten by the next run."""
        batch = len(requests)
        size = next(s for s in self.sizes if s >= batch)
        pad = size - batch
        at = [r.num_tokens - 1 for r in requests]
        slots = [
            r.block_table[p // block_size] * block_size + p % block_size
            for r, p in zip(requests, at, strict=True)
        ]
        last = [r.output_token_ids[-1] if r.output_token_ids else r.prompt_token_ids[-1] for r in requests]
        self._fill(self.input_ids, last + [0] * pad)
        self._fill(self.positions, at + [0] * pad)
        self._fill(self.slots, slots + [0] * pad)
        self._fill(self.seq_lens, [p + 1 for p in at] + [1] * pad)
        width = max(len(r.block_table) for r in requests)
        table = [r.block_table + [0] * (width - len(r.block_table)) for r in requests] + [[0] * width] * pad
        pinned = torch.tensor(table, dtype=torch.int32, pin_memory=True)
        self.block_table[:size, :width].copy_(pinned, non_blocking=True)
        graph, logits = self.graphs[size]
        graph.replay()
        return logits[:batch]

    def _fill(self, static: torch.Tensor, data: list[int]) -> None:
        static[: len(data)].copy_(torch.tensor(data, dtype=static.dtype, pin_memory=True), non_blocking=True)

    def _forward(self, size: int) -> torch.Tensor:
        metadata = AttentionMetadata(
            self.slots[:size],
            self.cu_seqlens_q[: size + 1],
            self.seq_lens[:size],
            self.block_table[:size],
            1,
            self.max_model_len,  # a graph serves every length: the kernel's grid is for the longest
        )
        with forward_context(metadata):
            return self.model.compute_logits(self.model(self.input_ids[:size], self.positions[:size]))

    @torch.inference_mode()
    def _capture(self) -> None:
        pool = None
        for size in reversed(self.sizes):  # the largest first: smaller ones reuse its memory
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles kernels and makes workspaces, which capture cannot
                    self._forward(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._forward(size)
            pool = pool or graph.pool()
            self.graphs[size] = (graph, logits)
        torch.cuda.synchronize()
