"""The rope_types of Hugging Face configs that get_rope builds, without torch."""

from __future__ import annotations

# {rope_type next to 'default': rope_parameters that it cannot do without}
ROPE_TYPES = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "proportional": (),
}
