"""Head size and rotary parameters of Hugging Face configs, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# rope_types that scale from the length of the training
FROM_LENGTH = ("llama3", "yarn", "longrope")


def head_size(config: Any) -> int:
    """Return head_dim of the config, by default hidden_size / num_attention_heads.

    Raises ValueError if there is no head_dim and the hidden size is not a multiple of the heads.
    """
    given = getattr(config, "head_dim", None)
    if not given and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"config.hidden_size={config.hidden_size} is not a multiple of"
            f" num_attention_heads={config.num_attention_heads}, and there is no head_dim"
        )
    return given or config.hidden_size // config.num_attention_heads


def rope_parameters(config: Any, kind: str = "") -> dict[str, Any]:
    """Return rope_parameters (transformers 5), or theta, scaling and partial factor of an older config.

    kind  a layer type, where layer types have parameters of their own

    Of the two places of original_max_position_embeddings, the config itself goes before its parameters, as in
    transformers and vLLM. Without either it is max_position_embeddings.
    """
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, Mapping):
        p = dict(found.get(kind, found))
    else:
        p = dict(getattr(config, "rope_scaling", None) or {})
    p.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    partial = getattr(config, "partial_rotary_factor", None)
    if partial is not None:
        p.setdefault("partial_rotary_factor", partial)
    if (p.get("rope_type") or p.get("type")) in FROM_LENGTH:
        name = "original_max_position_embeddings"
        outer = getattr(config, name, None)
        if outer is not None and not (isinstance(found, Mapping) and kind in found):
            p[name] = outer
        elif p.get(name) is None:
            p[name] = getattr(config, "max_position_embeddings", None)
    return p
