"""Rows of a vocabulary-parallel embedding: the ids of this rank's shard, zeros for all others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec, Target
from fastkernels.overrides.embedding import embedding_calls as _embedding_calls
from fastkernels.overrides.embedding.vocab import (
    Head,
    SGLangUnquantizedEmbeddingMethod,
    VllmUnquantizedEmbeddingMethod,
    VocabParallel,
    sglang_partition,
)
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

DEFAULT_VOCAB_PADDING_SIZE = 64


def reference(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    org_start: int = 0,
    org_end: int = -1,
    num_org_padding: int = 0,
    added_start: int = 0,
    added_end: int = 0,
) -> torch.Tensor:
    """input_ids: [...] int; weight: [rows, D]. Returns [..., D].

    Without a range (org_end < 0) the id is the row. With it, the weight holds the rows of the ids org_start ..
    org_end - 1, then num_org_padding rows, then those of added_start .. added_end - 1; other ids give zeros.
    """
    if org_end < 0:
        return F.embedding(input_ids, weight)
    org = (input_ids >= org_start) & (input_ids < org_end)
    added = (input_ids >= added_start) & (input_ids < added_end)
    first_added = org_end - org_start + num_org_padding
    row = torch.where(
        org, input_ids - org_start, torch.where(added, input_ids - added_start + first_added, 0)
    )
    return F.embedding(row, weight).masked_fill(~(org | added).unsqueeze(-1), 0)


@triton.jit
def _embedding_kernel(
    ids_ptr, w_ptr, out_ptr, w_stride, rows, D, org_start, org_end, first_added, added_start, added_end,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    if MASKED:
        org = (row >= org_start) & (row < org_end)
        added = (row >= added_start) & (row < added_end)
        row = tl.where(org, row - org_start, tl.where(added, row - added_start + first_added, -1))
    # An id that has no row gives zeros instead of a read outside of the weight.
    here = (row >= 0) & (row < rows) & (cols < D)
    tl.store(
        out_ptr + token * D + cols,
        tl.load(w_ptr + row * w_stride + cols, mask=here, other=0.0),
        mask=cols < D,
    )


def _supports_triton(input_ids: torch.Tensor, weight: torch.Tensor, *shard: int) -> str | None:
    if input_ids.dtype not in (torch.int32, torch.int64):
        return f"input_ids are {input_ids.dtype}, not int32 or int64"
    if weight.stride(-1) != 1:
        return f"weight has strides {tuple(weight.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    org_start: int = 0,
    org_end: int = -1,
    num_org_padding: int = 0,
    added_start: int = 0,
    added_end: int = 0,
) -> torch.Tensor:
    rows, dim = weight.shape
    ids = input_ids.contiguous()
    out = torch.empty((*ids.shape, dim), dtype=weight.dtype, device=weight.device)
    if ids.numel() == 0:
        return out
    block = min(next_power_of_2(dim), 2048)
    grid = (ids.numel(), cdiv(dim, block))
    launch_kernel(
        _embedding_kernel, grid,
        ids, weight, out, weight.stride(0), rows, dim, org_start, org_end,
        org_end - org_start + num_org_padding, added_start, added_end, MASKED=org_end >= 0, BLOCK=block,
    )  # fmt: skip
    return out


def _fake(input_ids: torch.Tensor, weight: torch.Tensor, *shard: int) -> torch.Tensor:
    return torch.empty((*input_ids.shape, weight.shape[-1]), dtype=weight.dtype, device=weight.device)


embedding = define(
    "embedding(Tensor input_ids, Tensor weight, int org_start=0, int org_end=-1, int num_org_padding=0,"
    " int added_start=0, int added_end=0) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        # For a plain lookup this is F.embedding, which is what the hosts call.
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


class VllmVocabParallelEmbedding_0_26(VocabParallel):
    """vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding of 0.26: ids [...] to [..., D]."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        self._build(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix,
            parallel.get_tp_rank(), parallel.get_tp_size(), VllmUnquantizedEmbeddingMethod(),
        )  # fmt: skip

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return self._lookup(input_)


class VllmVocabParallelEmbedding(VocabParallel):
    """vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding: ids [...] to [..., D].

    parallel_group: an object with rank_in_group, world_size and all_reduce(t) instead of the bound group.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
        reduce_results: bool = True,
        quant_method: Any = None,
        parallel_group: Any = None,
    ) -> None:
        rank, size = (0, 1) if disable_tp else (parallel.get_tp_rank(), parallel.get_tp_size())
        if parallel_group is not None and not disable_tp:
            rank, size = parallel_group.rank_in_group, parallel_group.world_size
        self._build(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix,
            rank, size, quant_method or VllmUnquantizedEmbeddingMethod(), reduce_results=reduce_results,
        )  # fmt: skip
        self.disable_tp, self.parallel_group = disable_tp, parallel_group

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return self._lookup(input_)


class VllmParallelLMHead_0_26(Head):
    """vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead of 0.26; see Head."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        rank, size = parallel.get_tp_rank(), parallel.get_tp_size()
        self._build(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix,
            rank, size, VllmUnquantizedEmbeddingMethod(), bias,
        )  # fmt: skip


class VllmParallelLMHead_0_32(Head):
    """vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead of 0.32; see Head."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
    ) -> None:
        rank, size = (0, 1) if disable_tp else (parallel.get_tp_rank(), parallel.get_tp_size())
        self._build(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix,
            rank, size, VllmUnquantizedEmbeddingMethod(), bias,
        )  # fmt: skip


class VllmParallelLMHead(Head):
    """vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead; see Head."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
        quant_method: Any = None,
    ) -> None:
        rank, size = (0, 1) if disable_tp else (parallel.get_tp_rank(), parallel.get_tp_size())
        self._build(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix,
            rank, size, quant_method or VllmUnquantizedEmbeddingMethod(), bias,
        )  # fmt: skip


class SGLangVocabParallelEmbedding_0_5_16(VocabParallel):
    """sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding before 0.5.23: ids [...] to [..., D]."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
        enable_tp: bool = True,
        use_attn_tp_group: bool = False,
        use_presharded_weights: bool = False,
    ) -> None:
        rank, size, padding_size = sglang_partition(
            org_num_embeddings or num_embeddings, padding_size, enable_tp, use_attn_tp_group
        )
        self._build(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix,
            rank, size, SGLangUnquantizedEmbeddingMethod(), None, use_presharded_weights,
        )  # fmt: skip

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return self._lookup(input_)


class SGLangVocabParallelEmbedding(VocabParallel):
    """sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding: ids [...] to [..., D]."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        params_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
        enable_tp: bool = True,
        use_attn_tp_group: bool = False,
        use_presharded_weights: bool = False,
    ) -> None:
        rank, size, padding_size = sglang_partition(
            org_num_embeddings or num_embeddings, padding_size, enable_tp, use_attn_tp_group
        )
        self._build(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix,
            rank, size, SGLangUnquantizedEmbeddingMethod(), None, use_presharded_weights,
        )  # fmt: skip
        self.output_dtype = output_dtype

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        out = self._lookup(input_)
        return out if self.output_dtype is None else out.to(self.output_dtype)


class SGLangParallelLMHead(Head):
    """sglang.srt.layers.vocab_parallel_embedding.ParallelLMHead; see Head."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
        enable_tp: bool = True,
        use_attn_tp_group: bool = False,
        use_presharded_weights: bool = False,
    ) -> None:
        rank, size, padding_size = sglang_partition(
            org_num_embeddings or num_embeddings, padding_size, enable_tp, use_attn_tp_group
        )
        self._build(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix,
            rank, size, SGLangUnquantizedEmbeddingMethod(), bias, use_presharded_weights,
        )  # fmt: skip


_VLLM = "vllm.model_executor.layers.vocab_parallel_embedding"
_SGLANG = "sglang.srt.layers.vocab_parallel_embedding"
_NOTE = "live, the host's module stays and its quant_method's lookup is replaced"


def _standalone(host: str, name: str, cls: str, versions: str) -> Target:
    module = _VLLM if host == "vllm" else _SGLANG
    return Target(host, f"{module}:{name}", cls, "standalone", versions, note=_NOTE)


_VLLM_METHOD = f"{_VLLM}:UnquantizedEmbeddingMethod"
_SGLANG_METHOD = "sglang.srt.layers.quantization.unquant:UnquantizedEmbeddingMethod"

SPEC = OpSpec(
    name="embedding",
    level=1,
    reference=reference,
    op=embedding,
    cases=(
        Case("decode_32", {"tokens": (32,), "rows": 128256, "dim": 4096}, weight=1, tags=("model",)),
        Case("prefill_8k", {"tokens": (8192,), "rows": 128256, "dim": 4096}, weight=1, tags=("model",)),
        Case(
            "tp8_32", {"tokens": (32,), "vocab": 128256, "rows": 16032, "dim": 4096, "shard": (16032, 32064, 0, 0, 0)},
            weight=1, tags=("model",),
        ),
        Case("one", {"tokens": (1,), "rows": 1, "dim": 1}, dtype="float32", tags=("odd",)),
        Case("odd_63", {"tokens": (63,), "rows": 1000, "dim": 1128}, tags=("odd",)),
        Case("odd_2d", {"tokens": (3, 7), "rows": 65, "dim": 63, "ids": "int32"}, dtype="float16", tags=("odd",)),
        Case(
            "shard", {"tokens": (100,), "vocab": 1026, "rows": 544, "dim": 72, "shard": (512, 1010, 14, 1010, 1026)},
            tags=("odd",),
        ),
        Case("wide", {"tokens": (5,), "rows": 9, "dim": 3000}, dtype="float32", tags=("odd",)),
        Case("empty", {"tokens": (0,), "rows": 9, "dim": 64}, tags=("odd",)),
    ),
    inputs=_embedding_calls.inputs,
    bytes_moved=_embedding_calls.bytes_moved,
    flops=lambda case: 0,
    dims_of=_embedding_calls.dims_of,
    vary=_embedding_calls.vary,
    extremes=_embedding_calls.EXTREMES,
    activations=(1,),
    build=_embedding_calls.build,
    targets=(
        Target("vllm", _VLLM_METHOD, "VllmUnquantizedEmbeddingMethod", "quant_method"),
        Target("sglang", _SGLANG_METHOD, "SGLangUnquantizedEmbeddingMethod", "quant_method"),
        _standalone("vllm", "VocabParallelEmbedding", "VllmVocabParallelEmbedding_0_26", "<0.32"),
        _standalone("vllm", "VocabParallelEmbedding", "VllmVocabParallelEmbedding", ">=0.32"),
        _standalone("vllm", "ParallelLMHead", "VllmParallelLMHead_0_26", "<0.32"),
        _standalone("vllm", "ParallelLMHead", "VllmParallelLMHead_0_32", ">=0.32,<0.33"),
        _standalone("vllm", "ParallelLMHead", "VllmParallelLMHead", ">=0.33"),
        _standalone("sglang", "VocabParallelEmbedding", "SGLangVocabParallelEmbedding_0_5_16", "<0.5.23"),
        _standalone("sglang", "VocabParallelEmbedding", "SGLangVocabParallelEmbedding", ">=0.5.23"),
        _standalone("sglang", "ParallelLMHead", "SGLangParallelLMHead", ""),
    ),
    batch_invariant=True,  # a copy
)  # fmt: skip
