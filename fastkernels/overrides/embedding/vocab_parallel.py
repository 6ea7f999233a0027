"""Vocabularies that are padded and sharded over ranks: weights, loaders and lookups of the hosts' classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.overrides.embedding.embedding import embedding
from fastkernels.overrides.linear.linear import linear, register_weight, unsupported_weight

DEFAULT_VOCAB_PADDING_SIZE = 64


def pad_vocab_size(vocab_size: int, pad_to: int) -> int:
    """Round up to a multiple of pad_to."""
    return -(-vocab_size // pad_to) * pad_to


@dataclass(frozen=True)
class Shard:
    """The rows of one rank: org_start .. org_end - 1, num_org_padding unused rows, added_start .. added_end - 1.

    Original and added (LoRA) ids are padded and sharded separately; the weight holds one part after the other.
    """

    org_start: int
    org_end: int
    num_org_padding: int
    added_start: int
    added_end: int

    @classmethod
    def of(
        cls, padded: int, org_padded: int, num_embeddings: int, org_vocab_size: int, rank: int, size: int
    ) -> Shard:
        """padded: rows of all ranks; org_padded: of these, the rows of the original vocabulary."""
        org_rows = parallel.divide(org_padded, size, "the padded vocabulary of")
        added_rows = parallel.divide(padded - org_padded, size, "the padded added vocabulary of")
        org_start = min(rank * org_rows, org_vocab_size)
        org_end = min((rank + 1) * org_rows, org_vocab_size)
        added_start = min(org_vocab_size + rank * added_rows, num_embeddings)
        added_end = min(org_vocab_size + (rank + 1) * added_rows, num_embeddings)
        return cls(org_start, org_end, org_rows - (org_end - org_start), added_start, added_end)


class VocabParallel(nn.Module):
    """Base of the hosts' embeddings: this rank's rows of a padded vocabulary, with loader and lookup."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    shard_indices: Shard
    tp_size: int
    reduce_results: bool
    use_presharded_weights: bool

    def _build(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None,
        org_num_embeddings: int | None,
        padding_size: int,
        quant_config: Any,
        prefix: str,
        tp_rank: int,
        tp_size: int,
        quant_method: Any,
        bias: bool | None = None,
        use_presharded_weights: bool = False,
        reduce_results: bool = True,
    ) -> None:
        """Raise ValueError for vocabularies that tp_size does not divide, and for quantized weights."""
        nn.Module.__init__(self)
        if quant_config is not None:
            raise ValueError(
                f"{prefix or 'embedding'}: quantized weights ({quant_config!r}) are not supported"
            )
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.reduce_results, self.use_presharded_weights = reduce_results, use_presharded_weights
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_size, self.prefix = padding_size, prefix
        self.org_vocab_size = org_num_embeddings or num_embeddings
        self.num_added_embeddings = num_embeddings - self.org_vocab_size
        self.org_vocab_size_padded = pad_vocab_size(self.org_vocab_size, padding_size)
        padded = pad_vocab_size(self.org_vocab_size_padded + self.num_added_embeddings, padding_size)
        self.num_embeddings_padded = padded
        self.num_embeddings_per_partition = parallel.divide(padded, tp_size, "the padded vocabulary of")
        self.shard_indices = Shard.of(
            padded, self.org_vocab_size_padded, num_embeddings, self.org_vocab_size, tp_rank, tp_size
        )
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_method = quant_method
        self.quant_method.create_weights(
            self, embedding_dim, [self.num_embeddings_per_partition], embedding_dim, padded,
            params_dtype=self.params_dtype, weight_loader=self.weight_loader,
        )  # fmt: skip
        if bias is not None:
            data = torch.zeros(self.num_embeddings_per_partition, dtype=self.params_dtype)
            self.register_parameter("bias", nn.Parameter(data, requires_grad=False) if bias else None)
            if self.bias is not None:
                self.bias.output_dim, self.bias.weight_loader = 0, self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's rows of loaded_weight [org_vocab_size, ...] and clear the padding.

        With use_presharded_weights, loaded_weight is already this rank's part. Raises ValueError for other shapes.
        """
        shard = self.shard_indices
        expected = self.org_vocab_size // (self.tp_size if self.use_presharded_weights else 1)
        if loaded_weight.shape != (expected, *param.shape[1:]):
            raise ValueError(
                f"{self.prefix or type(self).__name__}: weight of shape {tuple(loaded_weight.shape)} does not fit,"
                f" expected {(expected, *param.shape[1:])}"
            )
        rows = (
            loaded_weight if self.use_presharded_weights else loaded_weight[shard.org_start : shard.org_end]
        )
        param.data[: rows.shape[0]].copy_(rows)
        param.data[rows.shape[0] :].zero_()

    def _lookup(self, input_: torch.Tensor) -> torch.Tensor:
        if self.tp_size == 1:
            return self.quant_method.embedding(self, input_)
        s = self.shard_indices
        out = embedding(
            input_, self.weight, s.org_start, s.org_end, s.num_org_padding, s.added_start, s.added_end
        )
        return parallel.all_reduce(out) if self.reduce_results else out


class Head(VocabParallel):
    """A language-model head; the LogitsProcessor reads its weight [rows, D] and bias [rows]."""

    def tie_weights(self, embed_tokens: nn.Module) -> nn.Module:
        """Use the embedding's weight; returns this head."""
        return self.quant_method.tie_weights(self, embed_tokens)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a language-model head has no forward: pass it to the LogitsProcessor")


class UnquantizedEmbedding:
    """Base of the hosts' UnquantizedEmbeddingMethod, for a weight [rows, D].

    In a live host only `embedding` is replaced: a language-model head keeps the host's `apply`.
    """

    live_methods = ("embedding",)
    replaces = ""  # the dotted path of the host's method
    head = "ParallelLMHead"

    @classmethod
    def applies(cls, module: nn.Module) -> bool:
        """Whether this module looks anything up: the same method object computes a language-model head's logits."""
        return cls.head not in (base.__name__ for base in type(module).__mro__)

    @classmethod
    def supports(cls, module: nn.Module) -> str | None:
        """Return why our lookup does not support this module (ours or the host's), or None."""
        if not cls.applies(module):
            return "a language-model head has no lookup"
        # For shards on CUDA both hosts run a fused kernel of their own and never call the method's lookup.
        fused = getattr(module, "use_fused_embedding", False) or hasattr(module, "_use_triton_embedding")
        if fused and getattr(module, "tp_size", 1) > 1 and module.weight.is_cuda:
            return "the host looks its shards up with its own fused kernel"
        return unsupported_weight(module, cls.replaces)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows = sum(output_partition_sizes)
        register_weight(layer, rows, input_size_per_partition, params_dtype, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: the weight is used as loaded."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, layer.weight, bias)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        return embedding(input_, layer.weight)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        layer.weight = embed_tokens.weight
        return layer
