"""Every class of a rotary embedding: its table against transformers', its call against the op's reference."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.hosts.ropes import rope_inputs, rope_options

from fastkernels.core import registry
from fastkernels.core.spec import Target
from fastkernels.overrides.rope.rope_scaling import choose_axes, yarn_frequencies
from fastkernels.overrides.rope.rope_tables import cos_sin_table, inverse_frequencies
from fastkernels.overrides.rope.rotary_emb import reference
from fastkernels.overrides.rope.vllm import (
    VllmDynamicNTKScalingRotaryEmbedding,
    VllmYaRNScalingRotaryEmbedding,
)

# The others have tests of their own.
TARGETS = [t for t in registry.get("rotary_emb").targets if not re.search("[Aa]pply|LongRoPE", t.cls)]
LONG_ROPE = [t for t in registry.get("rotary_emb").targets if "LongRoPE" in t.cls]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cls)
def test_call_equals_reference_with_own_table(target: Target) -> None:
    cls = registry.target_class(target)
    module: Any = cls(**rope_options(cls))
    native = "SGLang" in target.cls or "MRotary" in target.cls or "Deepseek" in target.cls
    positions, query, key = rope_inputs(cls)
    want = reference(positions, query, key, 32, module.cos_sin_cache, True, True, native)
    assert not torch.equal(want[0], query)
    found = module(positions, query, key)
    assert found[0] is query and found[1] is key
    assert torch.equal(query, want[0]) and torch.equal(key, want[1])


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cls)
def test_scaled_table_is_not_the_plain_one(target: Target) -> None:
    cls = registry.target_class(target)
    options = rope_options(cls, torch.float32, rotary_dim=32, mrope_section=[8, 6, 2])
    table: Any = cls(**options).cos_sin_cache
    plain = cos_sin_table(inverse_frequencies(10000.0, 32), len(table))
    same = {
        "RotaryEmbedding",
        "MRotaryEmbedding",
        "Gemma4RotaryEmbedding",
    }  # Gemma 4's only for a part of the head
    unscaled = target.path.partition(":")[2] in same and "scaling_factor" not in options
    assert torch.equal(table, plain) == unscaled


def test_applied_cosines_are_those_given() -> None:
    cls = registry.op_class("rotary_emb", "VllmApplyRotaryEmb")
    x, cos, sin = rope_inputs(cls)
    before = x.clone()
    table = torch.cat((cos, sin), -1)
    want, _ = reference(torch.arange(7), x, None, 32, table, True, True, True)
    assert torch.equal(cls()(x, cos, sin), want) and torch.equal(x, before)
    batch = cls(is_neox_style=False, enable_fp32_compute=True)(torch.stack((x, x + 1)), cos, sin)
    for part, one in zip(batch, (x, x + 1), strict=True):
        assert torch.equal(part, reference(torch.arange(7), one, None, 32, table, False, False)[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "name", ["VllmMRotaryEmbedding", "VllmMRotaryEmbedding_0_26", "SGLangMRotaryEmbedding"]
)
def test_sections_rotate_by_their_axis(name: str, interleaved: bool) -> None:
    cls = registry.op_class("rotary_emb", name)
    options = rope_options(cls, torch.float32, mrope_section=[6, 4, 2])
    module: Any = cls(
        **{k: v for k, v in options.items() if k != "scaling_factor"}, mrope_interleaved=interleaved
    )
    axes = torch.randint(64, (3, 7), generator=torch.Generator().manual_seed(1))
    order = [0, 1, 2, 0, 1, 2, 0, 1, 0, 0, 1, 0] if interleaved else [0] * 6 + [1] * 4 + [2] * 2
    table = torch.empty(7, 24)
    for pair, axis in enumerate(order):
        for column in (pair, pair + 12):
            table[:, column] = module.cos_sin_cache[axes[axis], column]
    _, query, key = rope_inputs(cls, torch.float32)
    want = reference(torch.arange(7), query, key, 32, table, True)
    found = module(axes, query, key)
    torch.testing.assert_close(found, want)
    assert torch.equal(choose_axes(module.cos_sin_cache[axes], [6, 4, 2], interleaved), table)


def test_glm_order_of_sections_is_refused() -> None:
    cls = registry.op_class("rotary_emb", "SGLangMRotaryEmbedding")
    module: Any = cls(**rope_options(cls))
    assert cls.supports(module) is None  # type: ignore[attr-defined]
    module.mrope_interleaved_glm = True
    assert cls.supports(module) == "mrope_interleaved_glm is not supported"  # type: ignore[attr-defined]


@pytest.mark.parametrize("truncate", [False, True])
def test_yarn_is_transformers(truncate: bool) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": truncate}  # fmt: skip
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=rope
    )
    want, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(yarn_frequencies(10000.0, 128, 4.0, 32, 1, 4096, truncate), want)
    how = {"beta_fast": 32, "beta_slow": 1, "truncate": truncate}
    module = VllmYaRNScalingRotaryEmbedding(128, 128, 4096, 10000.0, True, 4.0, torch.float32, **how)  # type: ignore[arg-type]
    assert module.cos_sin_cache.shape == (16384, 128)
    torch.testing.assert_close(module.cos_sin_cache[63, :64], (63 * want).cos() * magnitude)
    torch.testing.assert_close(module.cos_sin_cache[63, 64:], (63 * want).sin() * magnitude)


def test_dynamic_ntk_is_transformers_at_full_length() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=32, rope_parameters=rope
    )
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=64)
    module = VllmDynamicNTKScalingRotaryEmbedding(64, 64, 64, 32, 10000.0, True, 2.0, torch.float32)
    torch.testing.assert_close(module.cos_sin_cache[9, :32], (9 * want).cos())


@pytest.mark.parametrize("target", LONG_ROPE, ids=lambda t: t.cls)
def test_long_rope_is_transformers(target: Target) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    cls = registry.target_class(target)
    options = rope_options(cls, torch.float32, rotary_dim=32, short_factor=[1.5] * 16, long_factor=[2.5] * 16)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    rope |= {name: options[name] for name in ("short_factor", "long_factor")}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=64, rope_parameters=rope
    )
    table: Any = cls(**options).long_short_cos_sin_cache
    for first, length in ((0, 16), (16, 64)):
        want, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=length)
        torch.testing.assert_close(
            table[first + 9], torch.cat(((9 * want).cos(), (9 * want).sin())) * magnitude
        )
    assert table.shape == (16 + 64, 32)


@pytest.mark.parametrize("target", LONG_ROPE, ids=lambda t: t.cls)
def test_long_rope_turns_by_the_table_of_the_context(target: Target) -> None:
    cls = registry.target_class(target)
    short = {"max_position_embeddings": 16} if target.host == "vllm" else {}
    for last, options, offset in ((9, short, 0), (40, {}, 16)):
        module: Any = cls(**rope_options(cls, **options))
        _, query, key = rope_inputs(cls)
        positions = torch.arange(last - 6, last + 1)
        table = module.long_short_cos_sin_cache
        want = reference(positions + 3 + offset, query, key, 32, table, True, True, True)
        found = module(positions, query, key, offsets=torch.tensor(3))
        assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    with pytest.raises(ValueError, match="is_neox_style=False"):
        cls(**rope_options(cls, is_neox_style=False))
