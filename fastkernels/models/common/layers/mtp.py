"""Heads for multi-token prediction (MTP, arXiv 2404.19737): one more layer that drafts the next token of its target.

Its input is the embedding of a token and the target's last hidden state of the one before, behind the final norm, or
behind a draft, its own. The engine runs it for the speculative_config {"method": "mtp"}. Its weights are in the
target's checkpoint, under names that the target leaves out; the target's ARCH names its architecture (`head`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.checkpoints.weights import count_of_heads
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.layers.decoder import Decoder


class MtpHead(nn.Module):
    """config: the target's, with the head's architecture.

    model(ids [T], positions [T], hidden [T, H]) returns (normed [T, H], hidden [T, H]): the input of compute_logits,
    and the hidden states for a draft of the next token.
    """

    target: Decoder

    @classmethod
    def fit(
        cls, config: Any, hidden: int, layers: int, max_model_len: int, keys: Iterable[str] | None
    ) -> tuple[int, ...]:
        """Complete the config; the result says that the states behind the target's last layer are read.

        keys: of the checkpoint; None: it has those of public ones. Raises Unsupported for a target of other sizes, and
        for a checkpoint without a head.
        """
        sizes = config.hidden_size, config.num_hidden_layers
        if sizes != (hidden, layers):
            raise d.Unsupported(
                f"its head is for {sizes[1]} layers of {sizes[0]} channels, and the target has {layers} layers of"
                f" {hidden}"
            )
        count = count_of_heads(config)
        if count is not None and count > 1:
            raise d.Unsupported(f"config.num_nextn_predict_layers={count} is not supported, only 1")
        prefix = cls.prefix(config)
        config.has = None if keys is None else frozenset(k for k in keys if k.startswith(prefix))
        if count == 0 or config.has == frozenset():
            raise d.Unsupported(f"its checkpoint has no head for multi-token prediction, {prefix}*")
        config.num_nextn_predict_layers = 0  # the layer is not left out
        return (layers,)

    @staticmethod
    def prefix(config: Any) -> str:
        """Of the head's keys."""
        raise NotImplementedError

    def share(self, target: Decoder) -> None:
        """Use the target's final norm, and its embedding and head where the checkpoint has no others."""
        self.__dict__["target"] = target  # not one more module of this model

    def check_map(self) -> None:
        """Do nothing: the vocabulary is the target's."""

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """[T, H] hidden states behind the target's last layer to those behind its final norm."""
        normed: torch.Tensor = self.target.model.norm(states)
        return normed
