"""Blocks of a model as tasks: references against transformers, structure, and what is declined."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from fk_bench.info import model_blocks

from fastkernels.core import registry
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import models
from fastkernels.models.common.plans import block_tasks, blocks
from fastkernels.overrides.attention.vllm import VllmAttention

FEW = (
    "llama",
    "mamba",
    "mamba2",
    "rwkv7",
    "ttt_e2e",
    "gpt_neox",
    "gemma4",
    "deepseek_v32",
    "gpt_oss",
    "mixtral",
    "bert",
    "dinov3",
    "mpt",
    "llada",
)
# Blocks that are declined: {model: part of the reason}
DECLINED = {
    "vjepa2": "takes table", "siglip": "takes patches", "dinov3": "takes patches",
    "gemma4": "KV cache of another layer", "rwkv7": "values of the first layer",
}  # fmt: skip


def arguments(name: str, case: str = "", seed: int = 0) -> list[Any]:
    """Of a small case, the last one by default."""
    spec = registry.get(name)
    small = [c for c in spec.cases if c.dims["small"] or "odd" in c.tags]
    chosen = next(c for c in small if c.name == case) if case else small[-1]
    return spec.inputs(chosen, "cpu", torch.Generator().manual_seed(seed))


def wide(args: list[Any]) -> list[Any]:
    return [
        (a.double() if a.is_floating_point() else a.clone()) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def check(model: str) -> tuple[str, ...]:
    _, names = model_blocks.register(model)
    for name in names:
        spec = registry.get(name)
        args = arguments(name)
        got = spec.build(registry.target_class(spec.targets[0]), copy.deepcopy(args))()  # type: ignore[misc]
        want = spec.reference(*wide(args))
        assert want[0].dtype == torch.float64, name
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(
                a.double(), b.double(), atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
        small = next(c for c in spec.cases if "odd" in c.tags)
        drawn = spec.vary(small, random.Random(1))
        assert drawn.dims.get("small") == small.dims.get("small") and drawn.dims != small.dims
        assert spec.bytes_moved(drawn) > 0 and spec.flops(drawn) > 0
    return names


# Models with blocks that read no step of tokens: {model: a kind of block}
SHAPED = {
    "flux": "diffusion_block", "sdxl": "diffusion_block", "hunyuan_video": "diffusion_block", "oasis": "mlp",
    "dp3": "policy_block", "pi0": "mlp", "ptv3": "mlp", "yolov10": "conv_block", "rtdetrv2": "encoder_layer",
    "qwen3_vl": "vision_merger_1", "swinv2": "encoder_layer", "sam3": "decoder_layer", "cosyvoice3": "diffusion_block",
    "openfold3": "pair_update", "dlrm_v2": "cross_net",
}  # fmt: skip


HEAVY = ("flux", "sdxl", "hunyuan_video", "swinv2", "pi0", "sam3", "cosyvoice3", "openfold3")
PARAMETERS = [pytest.param(m, marks=pytest.mark.slow) if m in HEAVY else m for m in SHAPED]


@pytest.mark.parametrize("model", PARAMETERS)
def test_blocks_of_other_runners_equal_their_references(model: str) -> None:
    assert any(name.startswith(f"{model}.{SHAPED[model]}") for name in check(model))


@pytest.mark.parametrize("model", FEW)
def test_our_blocks_equal_their_references(model: str) -> None:
    names = check(model)
    assert len(names) >= 3


@pytest.mark.slow
def test_cross_attention_is_a_block_of_its_own() -> None:
    names = check("whisper")
    assert {"whisper.cross_attention", "whisper.decoder_layer"} <= {*names}
    spec = registry.get("whisper.cross_attention")
    unread = {a.name for a in spec.arguments if a.name.startswith(("k_proj.", "v_proj."))}
    assert spec.level == 2 and len(unread) == 3
    assert all(a.bytes == "0" for a in spec.arguments if a.name in unread)


def test_masks_of_blocks_are_ones_and_no_activations() -> None:
    model_blocks.register("openfold3")
    spec = registry.get("openfold3.encoder_layer_0")
    assert [spec.arguments[i].name for i in spec.activations] == ["s", "z"] and spec.level == 3
    given = dict(zip((a.name for a in spec.arguments), arguments(spec.name), strict=True))
    assert given["tokens"].dtype == torch.bool and given["pairs"].dtype == torch.float32
    assert all(given[name].eq(1).all() for name in ("tokens", "pairs"))


@pytest.mark.slow
def test_blocks_of_speech_are_of_language_model_and_flow() -> None:
    text, names = model_blocks.register("cosyvoice3")
    assert {name.partition(".")[2] for name in names} == {
        "attention_0", "mlp", "decoder_layer", "attention_1", "diffusion_block",
    }  # fmt: skip
    assert all(path.startswith("vocoder.") or path == "model" for path in blocks.of(text).declined)


def test_blocks_of_a_tower_have_names_of_their_own() -> None:
    text, names = model_blocks.register("qwen2_vl")
    assert set(names) == {
        f"qwen2_vl.{kind}"
        for kind in (
            "attention",
            "mlp",
            "decoder_layer",
            "vision_attention",
            "vision_mlp",
            "vision_encoder_layer",
            "vision_merger",
        )
    }
    assert blocks.of(text).declined == {"model": "it reads images or audio, which no step of tokens gives"}


# Models without a block: {model: part of the reason}
WITHOUT = {
    "convnextv2": "one of timm's", "efficientnetv2": "one of timm's", "mobilenetv4": "one of timm's",
    "lightgcn": "other inputs than a step of tokens",
    "gaussian_splatting": "other inputs than a step of tokens", "instant_ngp": "other inputs than a step of tokens",
    "deepseek_mtp": "other inputs than a step of tokens", "llama_eagle3": "other inputs than a step of tokens",
    "qwen3_next_mtp": "other inputs than a step of tokens",
}  # fmt: skip


@pytest.mark.parametrize("model", WITHOUT)
def test_model_without_blocks_says_why(model: str) -> None:
    with pytest.raises(Unsupported, match=WITHOUT[model]) as error:
        model_blocks.register(model)
    assert not {*"{}'"} & {*str(error.value).replace("timm's", "")}, "a reason for people, not a dict"


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in models() if name not in (*WITHOUT, *SHAPED, *FEW)])
def test_every_model_has_judgeable_blocks(model: str) -> None:
    assert check(model)


@pytest.mark.parametrize("model", DECLINED)
def test_undescribable_block_is_declined_with_reason(model: str) -> None:
    try:
        text, _ = model_blocks.register(model)
    except Unsupported as error:
        assert DECLINED[model] in str(error)
    else:
        assert any(DECLINED[model] in why for why in blocks.of(text).declined.values())


RECURRENT = ("mamba", "mamba2", "jamba", "qwen3_next", "kimi_linear")


@pytest.mark.slow
@pytest.mark.parametrize("model", RECURRENT)
def test_all_kinds_of_recurrent_models_are_tasks(model: str) -> None:
    """The tests above check their values."""
    _, names = model_blocks.register(model)
    assert {f"{model}.recurrence", f"{model}.model"} <= set(names)


def test_state_of_a_new_sequence_is_ignored_and_the_others_read() -> None:
    """small_mixed: two sequences go on, one begins."""
    model_blocks.register("mamba2")
    spec = registry.get("mamba2.recurrence")
    places = {a.name: i for i, a in enumerate(spec.arguments)}
    args = wide(arguments("mamba2.recurrence", "small_mixed"))
    out, conv, recurrent = spec.reference(*copy.deepcopy(args))
    assert args[places["fresh"]].tolist() == [False, False, True]
    slots = args[places["state_slots"]].tolist()
    assert 0 not in slots and len(set(slots)) == 3
    for changed, same in ((slots[2], True), (slots[0], False)):
        other = copy.deepcopy(args)
        other[places["state_0_recurrent"]][changed] += 1
        found = spec.reference(*other)
        assert torch.equal(found[0], out) is same
    untouched = ({*range(len(recurrent))} - {*slots}).pop()
    assert torch.equal(recurrent[untouched], args[places["state_0_recurrent"]][untouched])
    assert not torch.equal(recurrent[slots[0]], args[places["state_0_recurrent"]][slots[0]])
    assert not torch.equal(conv[slots[2]], args[places["state_0_conv"]][slots[2]])


def test_recurrent_cost_grows_with_sequences_not_with_keys() -> None:
    model_blocks.register("mamba")
    spec = registry.get("mamba.recurrence")
    one, many = (next(c for c in spec.cases if c.name == n) for n in ("decode_1", "decode_32"))
    longer = replace(one, dims={**one.dims, "seq_lens": [4000]})
    new = replace(one, dims={**one.dims, "seq_lens": [1]})
    assert spec.bytes_moved(longer) == spec.bytes_moved(one)
    state = spec.bytes_moved(one) - spec.bytes_moved(new)  # a sequence that begins reads none
    assert state == 5120 * (16 * 4 + 3 * 2)
    assert spec.bytes_moved(many) - spec.bytes_moved(one) >= 31 * 2 * state


def test_layer_reference_equals_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    model_blocks.register("llama")
    spec = registry.get("llama.decoder_layer")
    args = wide(arguments("llama.decoder_layer", "small_prefill"))
    given = dict(zip((a.name for a in spec.arguments), args, strict=True))
    small = block_tasks.block("llama.decoder_layer").small.config
    config = LlamaConfig(**{k: v for k, v in small.to_dict().items() if k not in ("architectures", "dtype")})
    config._attn_implementation = "eager"
    layer, rope = LlamaDecoderLayer(config, 0).double(), LlamaRotaryEmbedding(config)
    weights = {n: t for n, t in given.items() if n.endswith("weight")}
    qkv = weights.pop("self_attn.qkv_proj.weight").split([64, 32, 32])
    gate_up = weights.pop("mlp.gate_up_proj.weight").chunk(2)
    names = [f"self_attn.{n}_proj.weight" for n in "qkv"] + [f"mlp.{n}_proj.weight" for n in ("gate", "up")]
    layer.load_state_dict({**weights, **dict(zip(names, (*qkv, *gate_up), strict=True))})
    x, starts = given["hidden_states"] + given["residual"], given["cu_seqlens_q"].tolist()
    out, residual, *_ = spec.reference(*args)
    for first, end in pairwise(starts):
        n = end - first
        mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        table = rope(x[None, first:end], torch.arange(n)[None])
        want = layer(x[None, first:end], attention_mask=mask, position_embeddings=table)
        want = want[0] if isinstance(want, tuple) else want
        got = (out + residual)[first:end]
        torch.testing.assert_close(got, want.reshape(got.shape), atol=1e-6, rtol=1e-6)


def test_reference_ignores_candidates_and_placed_blocks() -> None:
    _, names = model_blocks.register("llama")
    args = arguments("llama.decoder_layer")
    want = registry.get("llama.decoder_layer").reference(*wide(args))
    ours = registry.target_class(registry.get("llama.mlp").targets[0])

    class VllmLlamaMLP(ours):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x)

    op = registry.get("rms_norm").op
    try:
        block_tasks.place_only({"llama.mlp": {"VllmLlamaMLP": VllmLlamaMLP}})
        op.set_candidate(lambda x, *rest: torch.zeros_like(x))
        got = registry.get("llama.decoder_layer").reference(*wide(args))
    finally:
        op.set_candidate(None)
        block_tasks.place_only({})
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "llama.model" in names


def test_window_and_small_sizes_lower_the_cost() -> None:
    model_blocks.register("gemma4")
    windowed = registry.get("gemma4.attention_0")
    case = next(c for c in windowed.cases if c.name == "decode_1")
    layer = next(
        m for m in block_tasks.block("gemma4.attention_0").module(False).modules() if type(m) is VllmAttention
    )
    args = dict(case.dims, seq_lens=[layer.window_left + 1])
    short = replace(case, dims=args)
    long = replace(case, dims={**case.dims, "seq_lens": [layer.window_left + 4001]})
    assert windowed.bytes_moved(long) <= windowed.bytes_moved(short) + 2 * 16 * layer.head_size * 8
