"""vLLM's vocabulary-parallel embeddings, language-model heads and logits processors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.spec import Target
from fastkernels.overrides.embedding.logits_processor import cap_and_scale, logits_processor
from fastkernels.overrides.embedding.vocab_parallel import (
    DEFAULT_VOCAB_PADDING_SIZE,
    Head,
    UnquantizedEmbedding,
    VocabParallel,
)


class VllmUnquantizedEmbeddingMethod(UnquantizedEmbedding):
    """vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod; see UnquantizedEmbedding."""

    replaces = "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod"


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

    parallel_group: an object with rank_in_group, world_size and all_reduce(t) that replaces the bound group.
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


class _VllmLogitsProcessor(nn.Module):
    """The common part of all versions: maps hidden_states [T, D] to logits [T, org_vocab_size]."""

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.vocab_size = vocab_size
        self.logits_as_input = logits_as_input
        self.org_vocab_size = org_vocab_size or vocab_size
        self.soft_cap = soft_cap

    def _logits(
        self, lm_head: Any, hidden: torch.Tensor, bias: torch.Tensor | None, skip_gather: bool
    ) -> torch.Tensor:
        if self.logits_as_input:
            return cap_and_scale(hidden, self.scale, self.soft_cap, False)
        logits = logits_processor(hidden, lm_head.weight, bias, self.scale, self.soft_cap)
        if skip_gather:
            return logits
        if lm_head.tp_size > 1:
            logits = parallel.all_gather(logits, -1)
        return logits[..., : self.org_vocab_size]


class VllmLogitsProcessor_0_26(_VllmLogitsProcessor):
    """vllm.model_executor.layers.logits_processor.LogitsProcessor of 0.26; see _VllmLogitsProcessor."""

    def forward(
        self, lm_head: nn.Module, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        return self._logits(lm_head, hidden_states, embedding_bias, False)


class VllmLogitsProcessor(_VllmLogitsProcessor):
    """vllm.model_executor.layers.logits_processor.LogitsProcessor; see _VllmLogitsProcessor.

    skip_gather: return this rank's shard of the logits, padding included.
    """

    def forward(
        self,
        lm_head: nn.Module,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        return self._logits(lm_head, hidden_states, embedding_bias, skip_gather)


_VOCAB = "vllm.model_executor.layers.vocab_parallel_embedding"
_LOGITS = "vllm.model_executor.layers.logits_processor:LogitsProcessor"
_EMBEDDING_NOTE = "in a live host the module stays and the lookup of its quant_method is replaced"
_LOGITS_NOTE = (
    "in a live host the module stays: it gathers over the host's groups, and the product is computed by the head's"
    " quant_method"
)


def _vocab(name: str, cls: str, versions: str) -> Target:
    return Target("vllm", f"{_VOCAB}:{name}", cls, "standalone", versions, note=_EMBEDDING_NOTE)


TARGETS = {
    "embedding": (
        Target(
            "vllm", f"{_VOCAB}:UnquantizedEmbeddingMethod", "VllmUnquantizedEmbeddingMethod", "quant_method"
        ),
        _vocab("VocabParallelEmbedding", "VllmVocabParallelEmbedding_0_26", "<0.32"),
        _vocab("VocabParallelEmbedding", "VllmVocabParallelEmbedding", ">=0.32"),
        _vocab("ParallelLMHead", "VllmParallelLMHead_0_26", "<0.32"),
        _vocab("ParallelLMHead", "VllmParallelLMHead_0_32", ">=0.32,<0.33"),
        _vocab("ParallelLMHead", "VllmParallelLMHead", ">=0.33"),
    ),
    "logits_processor": (
        Target("vllm", _LOGITS, "VllmLogitsProcessor_0_26", "standalone", "<0.32", note=_LOGITS_NOTE),
        Target("vllm", _LOGITS, "VllmLogitsProcessor", "standalone", ">=0.32", note=_LOGITS_NOTE),
    ),
}
