"""Scores or probabilities of a classifier's logits, as the checkpoint's config declares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkernels.models.common.descriptions.description import Unsupported

Activation = Callable[[torch.Tensor], torch.Tensor]


def _same(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


PROBLEMS: dict[str, Activation] = {"regression": _same, "multi_label_classification": torch.sigmoid}
# Of cross-encoders made with sentence-transformers
NAMED: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": _same, "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
}  # fmt: skip


def read_activation(config: Any) -> Activation:
    """The function of logits [B, labels]: of problem_type, else sentence-transformers' own field, as in vLLM.

    By default softmax, of one label the sigmoid. Raises Unsupported for another function.
    """
    default = _softmax if getattr(config, "num_labels", 0) > 1 else torch.sigmoid
    problem = getattr(config, "problem_type", None)
    if problem is not None:
        return PROBLEMS.get(problem, default)
    own = getattr(config, "sentence_transformers", None)
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    if name is None:
        return default
    if name not in NAMED:
        raise Unsupported(
            f"the config's activation function {name!r} is not supported, only {', '.join(NAMED)}"
        )
    return NAMED[name]
