"""One layer of a Qwen3 model: a Llama layer that normalizes each query and key head before the rotary embedding."""

from __future__ import annotations

from fastkernels.core.spec import Axis, OpSpec
from fastkernels.overrides.block import cases
from fastkernels.overrides.block import llama_decoder_layer as llama

SPEC: OpSpec = OpSpec(
    name="qwen3_decoder_layer",
    level=3,
    by_default=True,
    reference=llama.reference,
    cases=cases.layer_cases(
        {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_size": 128, "intermediate": 12288},
        {"hidden": 72, "heads": 6, "kv_heads": 2, "head_size": 12, "intermediate": 100},
    ),
    arguments=llama.ARGUMENTS,
    outputs=cases.OUTPUTS,
    axes={**cases.AXES, "head_norms": Axis(True)},
    values=cases.values,
    flops=llama.FLOPS,
    vary=lambda case, rng: cases.vary_layer(SPEC, case, rng),
    tolerance=cases.TOLERANCE,
    activations=("hidden_states", "residual"),
    build=llama.build,
    calls=("rms_norm",),
    parts=("attention", "gated_mlp", "parallel_linear", "rotary_emb", "rope_store_kvcache"),
)
