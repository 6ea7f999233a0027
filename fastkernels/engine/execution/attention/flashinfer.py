"""Attention with FlashInfer's paged wrappers (Ye et al., arXiv 2501.01005), which plan each step on the host."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.engine.execution.attention.base import AttentionBackend, CannotCapture, metadata_of, store
from fastkernels.engine.steps.input_batch import Inputs

WORKSPACE = 384 << 20  # bytes for partial results of split keys, with 128 query heads of size 128
INT_WORKSPACE = 8 << 20  # bytes for a plan


class FlashInferBackend(AttentionBackend):
    """Uses the decode wrapper for rows with one query and the prefill wrapper for the rest; one plan for all layers.

    Raises ValueError if FlashInfer is not installed or does not support these layers.
    """

    name = "flashinfer"
    reads_lengths = True

    def __init__(self, layers: Sequence[Any], device: torch.device, dtype: torch.dtype):
        self._layer, self._device, self._dtype = layers[0], device, dtype
        cache = self._layer.kv_cache[0]
        self._cache_dtype, self._block_size = cache.dtype, cache.shape[1]
        if (reason := self._refusal(layers)) is not None:
            raise ValueError(
                f"attention_backend 'flashinfer' is not supported: {reason}; leave it out, or choose another"
            )
        self._module = importlib.import_module("flashinfer")
        self._float = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._int = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=device)
        # Only the older kernels support fp8 caches with half-precision queries.
        kind = "fa2" if self._cache_dtype.itemsize == 1 else "auto"
        self._decode = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._float, "NHD", use_tensor_cores=True, backend=kind
        )
        self._prefill = self._module.BatchPrefillWithPagedKVCacheWrapper(self._float, "NHD", backend=kind)
        self._kind = kind
        self._planned: torch.cuda.Event | None = None

    def plan(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        rows = torch.arange(len(inputs.slots), device=self._device)
        indptr, last_page, indices = self._pages(inputs, block_table, rows)
        n = inputs.num_decodes
        self._wait()
        decode = prefill = None
        if n:
            decode = self._decode
            self._plan_decode(decode, indptr[: n + 1], indices[: indptr[n]], last_page[:n])
        if n < len(inputs.slots):
            prefill, layer = self._prefill, self._layer
            starts = np.zeros(len(inputs.slots) - n + 1, dtype=np.int32)
            np.cumsum(inputs.host_query_lens[n:], out=starts[1:])
            prefill.plan(
                torch.from_numpy(starts), torch.from_numpy(indptr[n:] - indptr[n]), indices[indptr[n] :],
                torch.from_numpy(last_page[n:]), layer.num_heads, layer.num_kv_heads, layer.head_size,
                self._block_size, causal=True, sm_scale=layer.scale, window_left=layer.window_left,
                logits_soft_cap=layer.softcap, q_data_type=self._dtype, kv_data_type=self._cache_dtype,
                max_token_per_sequence=inputs.max_seqlen_q,
            )  # fmt: skip
        self._record()
        return metadata_of(self, inputs, block_table, (decode, prefill))

    def capture_buffers(self, max_rows: int, max_blocks: int) -> None:
        self._static_indptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=self._device)
        self._static_last = torch.ones(max_rows, dtype=torch.int32, device=self._device)
        self._static_indices = torch.zeros(max_rows * max_blocks, dtype=torch.int32, device=self._device)

    def plan_capture(self, inputs: Inputs, block_table: torch.Tensor) -> AttentionMetadata:
        if not inputs.decode_only:
            raise CannotCapture("flashinfer: the grid of its prefill kernel depends on each plan")
        rows = len(inputs.slots)
        wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._float, "NHD", use_cuda_graph=True, use_tensor_cores=True, backend=self._kind,
            paged_kv_indptr_buffer=self._static_indptr[: rows + 1], paged_kv_indices_buffer=self._static_indices,
            paged_kv_last_page_len_buffer=self._static_last[:rows],
        )  # fmt: skip
        # Shared by all graphs: each replay is planned anew
        wrapper.reset_workspace_buffer(self._float, self._int)
        return metadata_of(self, inputs, block_table, (wrapper, None))

    def plan_replay(self, metadata: AttentionMetadata, inputs: Inputs, block_tables: torch.Tensor) -> None:
        indptr, last_page, indices = self._pages(inputs, block_tables, inputs.slots)
        self._wait()
        self._plan_decode(metadata.plan[0], indptr, indices, last_page)
        self._record()

    def forward(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        store(layer, k, v, metadata)
        (decode, prefill), n = metadata.plan, metadata.num_decodes
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        if prefill is None:
            return decode.run(q, layer.kv_cache, **scales)
        if decode is None:
            return prefill.run(q, layer.kv_cache, **scales)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        decode.run(q[:n], layer.kv_cache, out=out[:n], **scales)
        prefill.run(q[n:], layer.kv_cache, out=out[n:], **scales)
        return out

    def _pages(
        self, inputs: Inputs, table: torch.Tensor, rows: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
        """(indptr [B + 1] and last_page_len [B] on the host, the concatenated blocks of table[rows] on the device)."""
        size = self._block_size
        indptr = np.zeros(len(inputs.host_seq_lens) + 1, dtype=np.int32)
        np.cumsum((inputs.host_seq_lens + (size - 1)) // size, out=indptr[1:])
        last_page = (inputs.host_seq_lens - 1) % size + 1
        blocks = (inputs.seq_lens + (size - 1)) // size
        ends = blocks.cumsum(0)
        at = torch.arange(int(indptr[-1]), device=self._device)
        row = torch.searchsorted(ends, at, right=True)
        column = at - (ends - blocks).index_select(0, row)
        places = rows.index_select(0, row) * table.shape[1] + column
        return indptr, last_page.astype(np.int32), table.reshape(-1).index_select(0, places)

    def _plan_decode(
        self, wrapper: Any, indptr: np.ndarray, indices: torch.Tensor, last_page: np.ndarray
    ) -> None:
        layer = self._layer
        wrapper.plan(
            torch.from_numpy(indptr), indices, torch.from_numpy(last_page), layer.num_heads, layer.num_kv_heads,
            layer.head_size, self._block_size, window_left=layer.window_left, logits_soft_cap=layer.softcap,
            q_data_type=self._dtype, kv_data_type=self._cache_dtype, sm_scale=layer.scale,
        )  # fmt: skip

    def _wait(self) -> None:
        """Wait until the last plan has been copied from its pinned buffer, which the next plan overwrites.

        The copy has normally ended: it follows a finished step unless more than two are in flight.
        """
        if self._planned is not None and not self._planned.query():
            self._planned.synchronize()

    def _record(self) -> None:
        self._planned = self._planned or torch.cuda.Event()
        self._planned.record()

    def _refusal(self, layers: Sequence[Any]) -> str | None:
        if self._device.type != "cuda":
            return f"it needs cuda, not {self._device.type}"
        try:
            importlib.import_module("flashinfer")
        except ImportError as error:
            return f"the module flashinfer cannot be imported ({error})"
        if self._dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16, the model is {self._dtype}"
        if self._layer.head_size not in (64, 128, 256):
            return f"its kernels support head sizes 64, 128 and 256, not {self._layer.head_size}"
        if any(m.sinks is not None for m in layers):
            return "it is used without attention sinks"
        kinds = {
            (m.num_heads, m.num_kv_heads, m.head_size, m.scale, m.window_left, m.softcap) for m in layers
        }
        if len(kinds) > 1:
            return f"all layers share one plan; these differ in heads, scale, window or softcap ({len(kinds)} kinds)"
        return None
