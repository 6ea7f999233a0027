"""SGLang's vocabulary-parallel embeddings, language-model head and logits processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.spec import Target
from fastkernels.overrides.embedding.logits_processor import logits_processor
from fastkernels.overrides.embedding.vocab_parallel import (
    DEFAULT_VOCAB_PADDING_SIZE,
    Head,
    UnquantizedEmbedding,
    VocabParallel,
    pad_vocab_size,
)


class SGLangUnquantizedEmbeddingMethod(UnquantizedEmbedding):
    """sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod; see UnquantizedEmbedding."""

    replaces = "sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod"


def _partition(
    org_vocab_size: int, padding_size: int, enable_tp: bool, use_attn_tp_group: bool
) -> tuple[int, int, int]:
    """Return (rank, size, padding). SGLang pads more if the ranks do not divide the padded vocabulary.

    The attention group is the whole group: standalone classes have no data parallelism.
    """
    if not enable_tp and use_attn_tp_group:
        raise ValueError("use_attn_tp_group=True needs enable_tp=True")
    rank, size = (parallel.get_tp_rank(), parallel.get_tp_size()) if enable_tp else (0, 1)
    divides = pad_vocab_size(org_vocab_size, padding_size) % size == 0
    return rank, size, padding_size if divides else padding_size * size


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
        rank, size, padding_size = _partition(
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
        rank, size, padding_size = _partition(
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
        rank, size, padding_size = _partition(
            org_num_embeddings or num_embeddings, padding_size, enable_tp, use_attn_tp_group
        )
        self._build(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, quant_config, prefix,
            rank, size, SGLangUnquantizedEmbeddingMethod(), bias, use_presharded_weights,
        )  # fmt: skip


@dataclass
class LogitsProcessorOutput:
    """The fields of SGLang's output that are filled here. torch.compile traces a dataclass but no SimpleNamespace."""

    next_token_logits: torch.Tensor
    hidden_states: torch.Tensor | None = None


class SGLangLogitsProcessor(nn.Module):
    """sglang.srt.layers.logits_processor.LogitsProcessor for sampling: float32 logits of the last tokens.

    logits_metadata: SGLang's, or any object with `extend_seq_lens` [B] (None at decode: every row is a last token).
    Returns an object with `next_token_logits` [B, vocab_size] and `hidden_states` None. Raises ValueError for input
    log-probabilities, captured hidden states and multi-item scoring, which need SGLang's own class.
    """

    def __init__(
        self,
        config: Any,
        skip_all_gather: bool = False,
        logit_scale: float | None = None,
        return_full_logits: bool = False,
    ) -> None:
        super().__init__()
        if return_full_logits:
            raise ValueError(
                "return_full_logits=True, for SGLang's diffusion language models, is not supported"
            )
        self.config = config
        self.vocab_size = config.vocab_size
        self.logit_scale = logit_scale
        self.do_tensor_parallel_all_gather = not skip_all_gather and parallel.get_tp_size() > 1
        cap = getattr(config, "final_logit_softcapping", None)
        self.final_logit_softcapping = cap if cap is not None and cap > 0 else None

    def forward(
        self,
        input_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        lm_head: nn.Module,
        logits_metadata: Any,
        aux_hidden_states: torch.Tensor | None = None,
        hidden_states_before_norm: torch.Tensor | None = None,
    ) -> LogitsProcessorOutput:
        if getattr(logits_metadata, "extend_return_logprob", False):
            raise ValueError(
                "input log-probabilities (extend_return_logprob) need SGLang's own LogitsProcessor"
            )
        if aux_hidden_states is not None:
            raise ValueError("aux_hidden_states need SGLang's own LogitsProcessor")
        lengths = getattr(logits_metadata, "extend_seq_lens", None)
        if lengths is not None:
            hidden_states = hidden_states[torch.cumsum(lengths, dim=0) - 1]
        scale = 1.0 if self.logit_scale is None else self.logit_scale
        logits = logits_processor(
            hidden_states, lm_head.weight, None, scale, self.final_logit_softcapping, True, True
        )
        if self.do_tensor_parallel_all_gather:
            logits = parallel.all_gather(logits, -1)
        return LogitsProcessorOutput(logits[..., : self.vocab_size])


_VOCAB = "sglang.srt.layers.vocab_parallel_embedding"
_METHOD = "sglang.srt.layers.quantization.unquant:UnquantizedEmbeddingMethod"
_EMBEDDING_NOTE = "in a live host the module stays and the lookup of its quant_method is replaced"
_LOGITS_NOTE = (
    "live, the host's module stays and its product with the head's weight is replaced, by default only where a tuned"
    " table says that linear is faster; standalone it serves sampling (no input log-probabilities, no captured hidden"
    " states)"
)


def _vocab(name: str, cls: str, versions: str) -> Target:
    return Target("sglang", f"{_VOCAB}:{name}", cls, "standalone", versions, note=_EMBEDDING_NOTE)


TARGETS = {
    "embedding": (
        Target("sglang", _METHOD, "SGLangUnquantizedEmbeddingMethod", "quant_method"),
        _vocab("VocabParallelEmbedding", "SGLangVocabParallelEmbedding_0_5_16", "<0.5.23"),
        _vocab("VocabParallelEmbedding", "SGLangVocabParallelEmbedding", ">=0.5.23"),
        _vocab("ParallelLMHead", "SGLangParallelLMHead", ""),
    ),
    "logits_processor": (
        Target(
            "sglang", "sglang.srt.layers.logits_processor:LogitsProcessor", "SGLangLogitsProcessor", "head",
            default=False, note=_LOGITS_NOTE,
        ),
    ),
}  # fmt: skip
