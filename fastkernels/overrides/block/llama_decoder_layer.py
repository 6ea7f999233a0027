"""One layer of a Llama model: norm, attention, norm and gated MLP, with a separate residual."""

from __future__ import annotations

from fastkernels.core.spec import OpSpec
from fastkernels.overrides.block.cases import (
    MUTATES,
    TOLERANCE,
    build_dense,
    dense_bytes,
    dense_dims,
    dense_flops,
    dense_inputs,
    dense_reference,
    layer_cases,
    vary_dense,
)

SPEC = OpSpec(
    name="llama_decoder_layer",
    level=3,
    reference=dense_reference,
    cases=layer_cases(
        {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_size": 128, "intermediate": 14336},
        {"hidden": 72, "heads": 6, "kv_heads": 2, "head_size": 12, "intermediate": 100},
    ),
    inputs=dense_inputs,
    bytes_moved=dense_bytes,
    flops=dense_flops,
    tolerance=TOLERANCE,
    dims_of=dense_dims,
    vary=vary_dense,
    activations=(1, 2),
    build=build_dense,
    mutates=MUTATES,
    calls=("rms_norm",),
    parts=("attention", "gated_mlp", "parallel_linear", "rotary_emb", "rope_store_kvcache"),
)  # fmt: skip
