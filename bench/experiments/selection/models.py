"""Models whose layers the selection models are fitted to: shapes from their configs, with any weights."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    window: int = 0  # of some layers; 0: none has one


MODELS = {
    "qwen2.5-0.5b": Sizes(896, 4864, 14, 2, 64, 151936),
    "qwen2.5-7b": Sizes(3584, 18944, 28, 4, 128, 152064),
    "qwen2.5-14b": Sizes(5120, 13824, 40, 8, 128, 152064),
    "qwen2.5-32b": Sizes(5120, 27648, 40, 8, 128, 152064),
    "llama-3.2-1b": Sizes(2048, 8192, 32, 8, 64, 128256),
    "llama-3.2-3b": Sizes(3072, 8192, 24, 8, 128, 128256),
    "llama-3.1-8b": Sizes(4096, 14336, 32, 8, 128, 128256),
    "phi-4": Sizes(5120, 17920, 40, 10, 128, 100352),
    "olmo-2-7b": Sizes(4096, 11008, 32, 32, 128, 100352),
    "mistral-small-24b": Sizes(5120, 32768, 32, 8, 128, 131072),
    "gemma-2-9b": Sizes(3584, 14336, 16, 8, 256, 256000, 4096),
    "gemma-3-12b": Sizes(3840, 15360, 16, 8, 256, 262208, 1024),
    "qwen3-4b": Sizes(2560, 9728, 32, 8, 128, 151936),
    "qwen3-14b": Sizes(5120, 17408, 40, 8, 128, 151936),
    "granite-3-8b": Sizes(4096, 12800, 32, 8, 128, 49155),
    "falcon-3-7b": Sizes(3072, 23040, 12, 4, 256, 131072),
    "smollm3-3b": Sizes(2048, 11008, 16, 4, 128, 128256),
}


def linear_shapes(head: bool = True) -> dict[tuple[int, int], list[str]]:
    """Return {(N, K): the layers 'model:layer' that have this weight}. head: with lm_head."""
    found: dict[tuple[int, int], list[str]] = {}
    for model, s in MODELS.items():
        width = s.heads * s.head_size
        layers = {
            "qkv": (width + 2 * s.kv_heads * s.head_size, s.hidden), "o": (s.hidden, width),
            "gate_up": (2 * s.intermediate, s.hidden), "down": (s.hidden, s.intermediate),
            **({"lm_head": (s.vocabulary, s.hidden)} if head else {}),
        }  # fmt: skip
        for layer, shape in layers.items():
            found.setdefault(shape, []).append(f"{model}:{layer}")
    return found


def attention_shapes() -> dict[tuple[int, int, int], list[str]]:
    """Return {(heads, key heads, head size): the models that have this attention}."""
    found: dict[tuple[int, int, int], list[str]] = {}
    for model, s in MODELS.items():
        found.setdefault((s.heads, s.kv_heads, s.head_size), []).append(f"{model}:attention")
    return found


class Mixture(NamedTuple):
    experts: int
    topk: int
    hidden: int
    intermediate: int


# No table or test has the shapes of the last three.
MIXTURES = {
    "olmoe-1b-7b": Mixture(64, 8, 2048, 1024),
    "qwen1.5-moe": Mixture(60, 4, 2048, 1408),
    "qwen3-30b": Mixture(128, 8, 2048, 768),
    "granite-3-3b": Mixture(40, 8, 1536, 512),
    "phi-3.5-moe": Mixture(16, 2, 4096, 6400),
    "ernie-4.5-21b": Mixture(64, 6, 2560, 1536),
}
