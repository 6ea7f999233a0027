"""Calls of one module without its model: a copy on the CPU, and arguments that its signature suggests."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

LARGEST = 120_000_000  # parameters of a module that is copied
SIDE, WIDE = 4, 16  # of a square of tokens; of one that can be reduced by 8
_NONE = {"cache", "past_key_value", "past_key_values", "layer_past", "head_mask", "layer_head_mask"}
MASKS = {"attention_mask", "mask", "key_padding_mask", "attn_mask"}
_LENGTHS = {"cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k"}
_ROTATED = {"position_embeddings", "rotary_pos_emb", "rotary_emb", "freqs", "positional_encoding", "pos_emb",
    "relative_position_embeddings",
}  # fmt: skip
_RELATIVE = -1  # instead of channels: an embedding of each distance, of the width of the hidden states


def copy_on_cpu(module: nn.Module) -> Any:
    """A copy with random float32 weights whose products keep the size of their inputs; None if it is too large.

    A square table that is no parameter is lower triangular, as a causal mask; a table of integers is 0.
    """
    if sum(p.numel() for p in module.parameters()) > LARGEST:
        return None
    made = copy.deepcopy(module).to("meta")
    made.eval()  # a class may override it without returning the module
    for part in made.modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            data = _values(tensor, part, name)
            if name in part._parameters:
                part._parameters[name] = nn.Parameter(data, requires_grad=False)
            else:
                part._buffers[name] = data
    return made


def _values(tensor: torch.Tensor, part: nn.Module, name: str) -> torch.Tensor:
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.bool:
        return (
            torch.ones(shape, dtype=torch.bool).tril()
            if len(shape) > 1
            else torch.ones(shape, dtype=torch.bool)
        )
    if not tensor.is_floating_point():
        return torch.zeros(shape, dtype=tensor.dtype)
    if tensor is not part._parameters.get(name) and len(shape) > 1 and shape[-1] == shape[-2]:
        return torch.ones(shape).tril()
    if len(shape) < 2:
        return 1 + 0.1 * torch.randn(shape)
    inputs = shape[0] if type(part).__name__ == "Conv1D" else math.prod(shape[1:])
    return torch.randn(shape) * (1.0 if isinstance(part, nn.Embedding) else inputs**-0.5)


def arguments(module: Any) -> Iterator[dict[str, Any]]:
    """Keyword arguments, as the names of its forward's parameters suggest them, in several sizes and layouts.

    The first is of hidden states: [B, T, H], [T, H] or an image [B, rows, columns, H].
    """
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    names = [n for n, p in list(parameters.items())[1:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if not names:
        return
    sides = dict.fromkeys((SIDE, *_windows(module), WIDE))
    masks = ("added", "padding", "") if MASKS & set(names) else ("",)
    sizes = product(sides, ("batch", "rows", "image", "channels"), _widths(module), _rotations(module), masks)
    for side, layout, width, rotation, mask in sizes:
        tokens = side * side
        shapes = {
            "batch": (1, tokens, width), "rows": (tokens, width), "image": (1, side, side, width),
            "channels": (1, width, side, side),
        }  # fmt: skip
        hidden = torch.randn(shapes[layout])
        for full in (False, True):  # without and with the arguments that have a default
            given = {}
            for name in names:
                parameter = parameters[name]
                optional = parameter.default is not parameter.empty
                if optional and not full and name not in _ROTATED | _LENGTHS | _STATES | MASKS:
                    continue
                value = _value(name, module, hidden, side, rotation, mask, name == names[0], not optional)
                if value is not None or not optional:
                    given[name] = value
            yield given


_STATES = {
    "keys", "values", "key", "value", "k", "v", "encoder_hidden_states", "cross_attention_states", "key_value_states",
    "context", "encoder_attention_states", "current_states", "kv", "cross_hidden_states",
}  # fmt: skip


def _value(
    name: str,
    module: Any,
    hidden: torch.Tensor,
    side: int,
    rotation: int,
    mask: str,
    first: bool,
    required: bool,
) -> Any:
    tokens = side * side
    if first:
        return hidden
    if name in _NONE:
        return None
    if name in MASKS:
        later = torch.ones(tokens, tokens).triu(1)[None, None]
        least = torch.finfo(torch.float32).min
        return {
            "added": later * least,
            "padding": torch.arange(tokens)[None].lt(tokens - 2).float(),
            "": None,
        }[mask]
    if name in ("query", "query_states"):
        return torch.randn_like(hidden)
    if name in _STATES:
        width = _key_width(module) or hidden.shape[-1]
        return torch.randn(*hidden.shape[:-1], width)
    if name in _ROTATED and rotation == _RELATIVE:
        return torch.randn(1, 2 * tokens - 1, hidden.shape[-1])
    if name in _ROTATED and not rotation:
        return None
    if name == "alibi":
        return torch.randn(getattr(module, "num_heads", 1), 1, tokens)
    if name in _ROTATED:
        turn = (
            torch.rand(*hidden.shape[:-2], tokens, rotation)
            if hidden.dim() <= 3
            else torch.rand(tokens, rotation)
        )
        return turn if name in ("rotary_pos_emb", "freqs") else (turn.cos(), turn.sin())
    if name in _LENGTHS:
        return torch.tensor([0, tokens], dtype=torch.int32)
    if name in ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "seq_len", "seq_length"):
        return tokens
    if name in ("position_ids", "cache_position", "positions"):
        return torch.arange(tokens)[None]
    if name in ("height", "width", "h", "w"):
        return side
    if name in ("input_dimensions", "spatial_shapes", "hw_shape"):
        return (side, side)
    return torch.randn_like(hidden) if required else None


def _key_width(module: Any) -> int | None:
    """The inputs of the linear layer of keys."""
    for name in ("k_proj", "key", "k", "to_k", "key_proj", "kv_proj", "to_kv", "kv"):
        child = getattr(module, name, None)
        if isinstance(child, nn.Linear):
            return child.in_features
    return None


def _windows(module: Any) -> list[int]:
    found = getattr(module, "window_size", None)
    if isinstance(found, int) and 1 < found < 32:
        return [found]
    return (
        [found[0]]
        if isinstance(found, (tuple, list)) and found and isinstance(found[0], int) and found[0] < 32
        else []
    )


def _widths(module: Any) -> list[int]:
    config = getattr(module, "config", None) or SimpleNamespace()
    found: list[Any] = []
    for part in module.modules():
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D":
            found.append(part.weight.shape[0 if type(part).__name__ == "Conv1D" else 1])
    found += [getattr(module, n, None) for n in ("embed_dim", "dim", "hidden_size")]
    found += [getattr(config, "hidden_size", None)]
    return list(dict.fromkeys(n for n in found if isinstance(n, int)))


def _rotations(module: Any) -> list[int]:
    """The channels of a head that position embeddings may have."""
    names = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)
    if not _ROTATED & set(names):
        return [0]
    config = getattr(module, "config", None) or SimpleNamespace()
    size = next(
        (
            n
            for n in (getattr(module, a, None) for a in ("head_dim", "head_size", "attention_head_size"))
            if n
        ),
        64,
    )
    found = [size, size // 2, int(size * (getattr(config, "partial_rotary_factor", None) or 0.5)), size // 4]
    found += [getattr(config, n, None) for n in ("qk_rope_head_dim", "rotary_dim")]
    return [*dict.fromkeys(n for n in found if isinstance(n, int) and n), 0, _RELATIVE]
