"""Pooling of hidden states into one vector per sequence, as a checkpoint's sentence-transformers files declare it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.models.common.checkpoints.checkpoint import CheckpointError

log = logging.getLogger("fastkernels")
MODES = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "lasttoken": "last"}
NEWER = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}  # since sentence-transformers 6
FLAG = "pooling_mode_"
UNLIMITED = 10**9  # transformers' word for a tokenizer without a limit is far above it
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
    modules = _read(folder / "modules.json", list)
    if modules is None:
        return Pooling()
    if not all(isinstance(m, dict) and {"type", "path"} <= m.keys() for m in modules):
        raise CheckpointError(f"{folder / 'modules.json'} must hold a list of objects with type and path")
    kinds = {str(m["type"]).rpartition(".")[2]: folder / str(m["path"]) for m in modules}
    unknown = [kind for kind in kinds if kind not in KNOWN]
    if unknown or "Pooling" not in kinds:
        raise CheckpointError(
            f"{folder / 'modules.json'} has {', '.join(kinds)}: supported are {', '.join(KNOWN)}, with a Pooling"
        )
    prompt = (_read(folder / "config_sentence_transformers.json", dict) or {}).get("default_prompt_name")
    if prompt is not None:
        log.warning(
            "%s: its default prompt %r is not put before texts: do so yourself, as clients of vLLM do",
            folder,
            prompt,
        )
    return Pooling(_mode(kinds["Pooling"] / "config.json"), "Normalize" in kinds, _longest(folder))


def _mode(file: Path) -> str:
    """The mode of a Pooling module: `pooling_mode`, or in older files the flag that is set; mean without a flag."""
    fields = _read(file, dict)
    if fields is None:
        raise CheckpointError(f"{file} is missing: modules.json has a Pooling")
    found = fields.get("pooling_mode")
    if found is None:
        found = [
            name.removeprefix(FLAG) for name, on in fields.items() if name.startswith(FLAG) and on
        ] or "mean"
    chosen = [str(mode) for mode in found] if isinstance(found, list) else [str(found)]
    known = MODES | NEWER
    if len(chosen) != 1 or chosen[0] not in known:
        named = " + ".join(chosen) or "none"
        raise CheckpointError(f"{file}: pooling {named} is not supported, only {', '.join(known)}")
    return known[chosen[0]]


def _longest(folder: Path) -> int | None:
    """The longest input: max_seq_length of sentence_bert_config.json, else the tokenizer's model_max_length."""
    own, name = folder / "sentence_bert_config.json", "max_seq_length"
    found = (_read(own, dict) or {}).get(name)
    if found is not None and not (type(found) is int and found > 0):
        raise CheckpointError(f"{own}: {name}={found!r} is not supported, only integers above 0")
    if found is None:
        found = (_read(folder / "tokenizer_config.json", dict) or {}).get("model_max_length")
    return found if type(found) is int and 0 < found < UNLIMITED else None


def _read(file: Path, kind: type[dict[Any, Any]] | type[list[Any]]) -> Any:
    """The JSON of a file, an object or a list; None if there is none. Raises CheckpointError for other content."""
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, kind):
        raise CheckpointError(
            f"{file} must hold {'an object' if kind is dict else 'a list'}, got {found!r:.80}"
        )
    return found
