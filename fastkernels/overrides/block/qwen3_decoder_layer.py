"""One layer of a Qwen3 model: a Llama layer that normalizes each query and key head before the rotary embedding."""

from __future__ import annotations

from functools import partial

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
    name="qwen3_decoder_layer",
    level=3,
    reference=dense_reference,
    cases=layer_cases(
        {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_size": 128, "intermediate": 12288},
        {"hidden": 72, "heads": 6, "kv_heads": 2, "head_size": 12, "intermediate": 100},
    ),
    inputs=partial(dense_inputs, head_norms=True),
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
)
