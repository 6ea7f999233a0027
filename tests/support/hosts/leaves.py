"""The modules of a patched model that a report leaves without an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

# End of the name of a host's class: the op whose row in the report speaks of it.
SPOKEN_OF = {
    "Linear": "linear",
    "Embedding": "embedding",
    "WordEmbedding": "embedding",
    "RotaryEmbedding": "rotary_emb",
    "TopKRouter": "topk_softmax",
    "TopkRouter": "grouped_topk",
    "ParallelLMHead": "embedding",
    "LogitsProcessor": "logits_processor",
    "Conv1d": "causal_conv1d",
    "Mixer": "mamba_scan",
    "FusedMoE": "fused_experts",
    "Experts": "fused_experts",
}
IDENTITIES = ("Dropout", "Identity")  # in eval mode


def state(model: Any) -> dict[str, tuple[Any, ...]]:
    """Attributes of each module that a patch changes, by name."""
    own = ("quant_method", "forward", "impl", "_forward_method")
    return {
        name: (type(m), *(id(vars(m).get(attribute)) for attribute in own))
        for name, m in model.named_modules()
    }


def unexplained(model: Any, before: dict[str, tuple[Any, ...]], rows: Iterable[Any]) -> list[str]:
    """Classes of leaf modules that are neither changed, nor inside a changed module, nor spoken of by a row.

    before: the state of the model before the patch; rows: those of its report.
    """
    answered = {row.op for row in rows if row.state == "active" or row.reason}
    changed = {name for name, now in state(model).items() if now != before[name]}
    found = set()
    for name, module in model.named_modules():
        kind = before[name][0].__name__
        if next(module.children(), None) is not None or kind in IDENTITIES or changed & set(_above(name)):
            continue
        kinds = [before[above][0].__name__ for above in _above(name)]  # of the module and those around it
        ops = {op for end, op in SPOKEN_OF.items() if any(k.endswith(end) for k in kinds)}
        if not ops & answered:
            found.add(f"{kind} ({name})")
    return sorted(found)


def _above(name: str) -> Iterator[str]:
    """A module's name and those of the modules that it is in, without the model itself."""
    while name:
        yield name
        name = name.rpartition(".")[0]
