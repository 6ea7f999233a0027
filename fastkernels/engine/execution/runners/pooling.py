"""Pooling of hidden states into one vector per sequence, as a checkpoint's sentence-transformers files declare it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.models.common.checkpoints.checkpoint import CheckpointError

MODES = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "lasttoken": "last"}
KNOWN = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class Pooling:
    """mode: 'mean', 'cls', 'max', 'last' or 'own'; normalize: scale each vector to length 1.

    max_tokens: the longest input that the checkpoint was made for, where it says so.
    own: the model's own pooling, a function of hidden and starts, for the mode 'own'.
    """

    mode: str = "mean"
    normalize: bool = True
    max_tokens: int | None = None
    own: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] of B sequences that start at starts [B + 1]. Returns [B, H] in float32."""
        if self.own is not None:
            pooled = self.own(hidden, starts).float()
            return F.normalize(pooled, dim=-1) if self.normalize else pooled
        hidden, lengths = hidden.float(), starts.diff()
        if self.mode == "cls":
            pooled = hidden.index_select(0, starts[:-1])
        elif self.mode == "last":
            pooled = hidden.index_select(0, starts[1:] - 1)
        else:
            numbers = torch.arange(len(lengths), device=hidden.device)
            rows = torch.repeat_interleave(
                numbers, lengths, output_size=len(hidden)
            )  # else it waits for the device
            shape = (len(lengths), hidden.shape[1])
            if self.mode == "max":
                index = rows[:, None].expand_as(hidden)
                pooled = hidden.new_full(shape, -torch.inf).scatter_reduce_(0, index, hidden, "amax")
            else:
                pooled = hidden.new_zeros(shape).index_add_(0, rows, hidden) / lengths[:, None]
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


def read_pooling(folder: Path) -> Pooling:
    """The pooling of a checkpoint; mean and normalized where it has no sentence-transformers files.

    Raises CheckpointError for a pooling that is not supported.
    """
    modules = _read(folder / "modules.json")
    if modules is None:
        return Pooling()
    kinds = {str(m["type"]).rpartition(".")[2]: folder / str(m["path"]) for m in modules}
    unknown = [kind for kind in kinds if kind not in KNOWN]
    if unknown or "Pooling" not in kinds:
        raise CheckpointError(
            f"{folder / 'modules.json'} has {', '.join(kinds)}: supported are {', '.join(KNOWN)}, with a Pooling"
        )
    file = kinds["Pooling"] / "config.json"
    flags = {k.removeprefix("pooling_mode_"): v for k, v in (_read(file) or {}).items()}
    chosen = [name for name, on in flags.items() if on is True and name not in ("include_prompt",)]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise CheckpointError(
            f"{file}: pooling {' + '.join(chosen) or 'none'} is not supported: {', '.join(MODES)}"
        )
    sizes = _read(folder / "sentence_bert_config.json") or {}
    return Pooling(MODES[chosen[0]], "Normalize" in kinds, sizes.get("max_seq_length"))


def _read(file: Path) -> Any:
    """The JSON of a file, None if there is none. Raises CheckpointError for a file that is not JSON."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
