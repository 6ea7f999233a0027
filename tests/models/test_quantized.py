"""Quantized checkpoints against transformers with dequantized weights, layouts as published, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.core import parallel
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.models.common import build, quantized
from fastkernels.models.common.checkpoint import CheckpointError
from fastkernels.models.common.description import Unsupported
from fastkernels.models.common.plan import plan
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.linear.linear_int4 import dequantize_int4

T = torch.Tensor
Tensors = dict[str, T]
FP8 = torch.float8_e4m3fn
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "attention_bias": True}


def to_fp8(x: T, scale: T) -> T:
    return (x / scale).clamp(-448, 448).to(FP8)


def blocks_of(scale: T, shape: torch.Size) -> T:
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def per_tensor(w: T) -> tuple[Tensors, T]:
    scale = w.abs().max() / 448
    q = to_fp8(w, scale)
    return {"weight": q, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, q.float() * scale


def per_channel(w: T) -> tuple[Tensors, T]:
    scale = w.abs().amax(1, keepdim=True) / 448
    q = to_fp8(w, scale)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def blockwise(name: str) -> Callable[[T], tuple[Tensors, T]]:
    def quantize(w: T) -> tuple[Tensors, T]:
        parts = w.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = parts.abs().amax((1, 3)) / 448
        wide = blocks_of(scale, w.shape)
        q = to_fp8(w, wide)
        return {"weight": q, name: scale}, q.float() * wide

    return quantize


def as_it_is(x: T) -> T:
    return x


def fake_rows(x: T) -> T:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1 / 512) / 448
    return to_fp8(x, scale).float() * scale


def fake_static(x: T) -> T:
    return to_fp8(x, torch.tensor(0.02)).float() * 0.02


def fake_groups(x: T) -> T:
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (to_fp8(groups, scale).float() * scale).flatten(-2)


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups = {"group_0": group}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": groups,
    }


def groups_of(w: T, size: int, symmetric: bool) -> tuple[T, T, T, T]:
    """Integers 0 to 15 [N, K], scales [N, G], zero points [N, G], and the dequantized matrix."""
    parts = w.unflatten(1, (-1, size if size > 0 else w.shape[1]))
    if symmetric:
        scale = (parts.abs().amax(-1) / 7).half().float()
        zero = torch.full_like(scale, 8)
    else:
        low, high = parts.amin(-1), parts.amax(-1)
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(0, 15)
    q = (parts / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    plain = ((q - zero[..., None]) * scale[..., None]).flatten(1)
    return q.flatten(1).int(), scale, zero.int(), plain


def words(values: T, dim: int, order: tuple[int, ...] = tuple(range(8))) -> T:
    """Eight integers of 4 bits in each int32; order[i]: which of eight is the i-th from the lowest bit."""
    parts = values.unflatten(dim, (-1, 8)).long()
    shifted = [parts.select(dim + 1, column) << 4 * i for i, column in enumerate(order)]
    return torch.stack(shifted).sum(0).to(torch.int32)


def gptq(size: int, symmetric: bool, less: int = 1) -> Callable[[T], tuple[Tensors, T]]:
    def quantize(w: T) -> tuple[Tensors, T]:
        q, scale, zero, plain = groups_of(w, size, symmetric)
        if less:
            zero = zero.clamp(min=1)  # the format has no zero point 0
            step = size if size > 0 else w.shape[1]
            wide = (t.repeat_interleave(step, 1) for t in (zero, scale))
            plain = (q - next(wide)) * next(wide)
        index = torch.arange(w.shape[1], dtype=torch.int32) // (size if size > 0 else w.shape[1])
        parts = {"qweight": words(q.t(), 0), "qzeros": words(zero.t() - less, 1), "scales": scale.t().half()}
        return {**parts, "g_idx": index}, plain

    return quantize


def awq(w: T) -> tuple[Tensors, T]:
    q, scale, zero, plain = groups_of(w, 32, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words(q.t(), 1, order),
        "qzeros": words(zero.t(), 1, order),
        "scales": scale.t().half(),
    }
    return parts, plain


def packed(size: int, symmetric: bool) -> Callable[[T], tuple[Tensors, T]]:
    def quantize(w: T) -> tuple[Tensors, T]:
        q, scale, zero, plain = groups_of(w, size, symmetric)
        parts = {"weight_packed": words(q, 1), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}
        return parts | ({} if symmetric else {"weight_zero_point": words(zero, 0)}), plain

    return quantize


def nvfp4(names: tuple[str, str, str], divides: bool) -> Callable[[T], tuple[Tensors, T]]:
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def quantize(w: T) -> tuple[Tensors, T]:
        parts = w.unflatten(1, (-1, 16))
        factor = w.abs().max() / (6 * 448)
        scale = (parts.abs().amax(-1) / 6 / factor).to(FP8)
        wide = (scale.float() * factor)[..., None]
        nearest = ((parts / wide).abs()[..., None] - levels).abs().argmin(-1)
        code = (nearest + 8 * (parts < 0)).flatten(1).to(torch.uint8)
        plain = (levels[nearest] * parts.sign() * wide).flatten(1)
        made = (code[:, ::2] | code[:, 1::2] << 4, scale, 1 / factor if divides else factor)
        return dict(zip(names, made, strict=True)), plain

    return quantize


CHANNEL = compressed(
    {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, "float-quantized",
)  # fmt: skip
BLOCK = compressed(
    {"num_bits": 8, "type": "float", "strategy": "block", "symmetric": True, "block_structure": [128, 128]},
    {"num_bits": 8, "type": "float", "strategy": "group", "dynamic": True, "group_size": 128}, "float-quantized",
)  # fmt: skip
# name: (quantization_config, one matrix to (tensors, dequantized matrix), x to dequantized x)
FORMATS: dict[str, tuple[dict[str, Any], Callable[[T], tuple[Tensors, T]], Callable[[T], T]]] = {
    "fp8_static": ({"quant_method": "fp8", "activation_scheme": "static"}, per_tensor, fake_static),
    "fp8_dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, per_tensor, fake_rows),
    "fp8_blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, blockwise("weight_scale_inv"), fake_groups,
    ),
    "compressed_channel": (CHANNEL, per_channel, fake_rows),
    "compressed_block": (BLOCK, blockwise("weight_scale"), fake_groups),
    "gptq_128": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, gptq(128, True), as_it_is),
    "gptq_64": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, gptq(64, False), as_it_is),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(-1, False, 0), as_it_is,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, awq, as_it_is),
    "packed_128": (
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}, None,
                   "pack-quantized"),
        packed(128, True), as_it_is,
    ),
    "packed_channel": (
        compressed({"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}, None, "pack-quantized"),
        packed(-1, False), as_it_is,
    ),
    "modelopt_nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        nvfp4(("weight", "weight_scale", "weight_scale_2"), False), as_it_is,
    ),
    "compressed_nvfp4": (
        compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
                   {"num_bits": 4, "type": "float"}, "nvfp4-pack-quantized"),
        nvfp4(("weight_packed", "weight_scale", "weight_global_scale"), True), as_it_is,
    ),
    "modelopt_fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, per_tensor, fake_static),
}  # fmt: skip


def write(folder: Path, name: str, base: Path) -> tuple[Path, Path]:
    """The checkpoint `base` quantized as FORMATS[name], and one with the dequantized weights."""
    config, quantize, _ = FORMATS[name]
    kept, plain = {}, {}
    for key, tensor in load_file(base / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            kept[key] = plain[key] = tensor
            continue
        parts, plain[key] = quantize(tensor)
        kept |= {key.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    kept["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    made, dense = (shutil.copytree(base, folder / part) for part in (name, "dense"))
    save_file(kept, made / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    set_config(made, config)
    return made, dense


def set_config(folder: Path, quantization: dict[str, Any]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": quantization}))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("base"), "llama", "float32", **SIZES)


@pytest.fixture(scope="module", params=FORMATS)
def made(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param, *write(tmp_path_factory.mktemp("quantized"), request.param, base)


def theirs(dense: Path, ids: T, fake: Callable[[T], T]) -> T:
    """transformers' logits with dequantized weights, and with x as the format rounds it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, args: (fake(args[0]),))
    with torch.no_grad():
        return model(ids[None]).logits[0]


def ours(folder: Path, ids: T, steps: tuple[tuple[int, int], ...]) -> T:
    """Our logits in float32; steps: (start, end) of the tokens that are computed together."""
    model: Any = build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    for layer in model.modules():
        if isinstance(layer, PagedAttention):
            layer.kv_cache = tuple(torch.zeros(2, 4, 16, layer.num_kv_heads, layer.head_size))
    found = []
    for start, end in steps:
        with forward_context(one_sequence(start, end)):
            found.append(model.compute_logits(model(ids[start:end], torch.arange(start, end))))
    return torch.cat(found)


def one_sequence(start: int, end: int) -> AttentionMetadata:
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    at = torch.arange(start, end)
    slots = table[0, at // 16].long() * 16 + at % 16
    starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, end - start], [end]))
    return AttentionMetadata(slots, starts, lengths, table, end - start, end)


@torch.inference_mode()
def test_logits_equal_dequantized_weights(made: Any) -> None:
    name, folder, dense = made
    ids = torch.tensor([(i * 37) % 500 for i in range(20)])
    expected = theirs(dense, ids, FORMATS[name][2])
    found = ours(folder, ids, ((0, 18), (18, 19), (19, 20)))
    assert expected.std() > 0.1
    # A value of x at a boundary of float8 may be rounded to the other side.
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error < (2e-2 if FORMATS[name][2] is not as_it_is else 1e-4)


def test_plan_counts_the_bytes(made: Any) -> None:
    name, folder, dense = made
    model = build.skeleton(folder, build.load_config(folder), torch.float32)
    quantized.finish(model)
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan(str(folder)).weight_bytes == kept
    assert kept < plan(str(dense)).weight_bytes or "nvfp4" in name


def test_engine_serves_quantized_checkpoints(made: Any) -> None:
    """Greedy tokens of the engine, with prompts in chunks, are those of whole sequences."""
    _, folder, _ = made
    llm = LLM(
        str(folder), device="cpu", dtype="float32", max_model_len=48, max_num_batched_tokens=16, max_num_seqs=4,
        block_size=8, num_blocks=40,
    )  # fmt: skip
    prompts = [[7], list(range(10, 30))]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
        ids = torch.tensor([*prompt, *output.outputs[0].token_ids])
        best = ours(folder, ids, ((0, len(ids)),)).argmax(-1)
        assert output.outputs[0].token_ids == best[len(prompt) - 1 : -1].tolist()


def test_random_quantized_weights_are_the_same_for_all_ranks(base: Path, tmp_path: Path) -> None:
    """load_format="dummy" draws each parameter whole, and every rank keeps its part."""
    for name in ("fp8_blocks", "gptq_64", "modelopt_nvfp4"):
        wide = make_tiny(tmp_path / "wide", "llama", "float32", **{**SIZES, "num_attention_heads": 8,
                         "num_key_value_heads": 4})  # fmt: skip
        folder, _ = write(tmp_path / name, name, wide)
        config = build.load_config(folder)
        found = []
        for rank, size in ((0, 1), (0, 2), (1, 2)):
            with parallel.build_as(rank, size):
                model = build.build(folder, config, torch.device("cpu"), torch.float32, "dummy")
            found.append(model.get_parameter("model.layers.0.self_attn.o_proj.weight").data)
        whole, first, second = (t.view(torch.uint8) for t in found)
        assert torch.equal(torch.cat((first, second), 1), whole) and len(whole.unique()) > 8


def group(**weights: Any) -> dict[str, Any]:
    first = CHANNEL["config_groups"]["group_0"]
    return {**CHANNEL, "config_groups": {"group_0": {**first, "weights": {**first["weights"], **weights}}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported, only 'fp8'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size=[64, 64] is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
         "activation_scheme='static' is not supported, only 'dynamic'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits=3 is not supported, only 4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48},
         "group_size=48 is not supported, only 32, 64, 128, -1"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act=True is not supported, only False"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv' is not supported, only 'gemm'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo='W4A8' is not supported, only 'FP8'"),
        (group(num_bits=6), "config_groups.group_0.weights.num_bits=6 is not supported, only 8, 4"),
        (group(strategy="attn_head"), "weights.strategy='attn_head' is not supported, only 'tensor', 'channel'"),
        ({**CHANNEL, "ignore": ["re:.*k_proj"]},
         "leaves model.layers.0.self_attn.k_proj unquantized: one weight here has model.layers.0.self_attn.q_proj"),
        ({**CHANNEL, "ignore": "lm_head"}, "ignore='lm_head' is not a list of module names"),
    ],
)  # fmt: skip
def test_config_is_refused_with_field_and_value(
    base: Path, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    folder = shutil.copytree(base, tmp_path / "copy")
    set_config(folder, config)
    with pytest.raises(Unsupported) as caught:
        build.skeleton(folder, build.load_config(folder), torch.float32)
    assert said in str(caught.value)


KEY = "model.layers.1.mlp.up_proj."


def edited(base: Path, folder: Path, name: str, change: Callable[[Tensors], Any]) -> Path:
    made, _ = write(folder, name, base)
    tensors = load_file(made / "model.safetensors")
    change(tensors)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("fp8_static", lambda t: t.pop(KEY + "weight_scale"), f"keys missing from it: {KEY}weight_scale"),
        ("fp8_static", lambda t: t.pop(KEY + "input_scale"), f"keys missing from it: {KEY}input_scale"),
        ("fp8_blocks", lambda t: t.pop(KEY + "weight_scale_inv"), f"keys missing from it: {KEY}weight_scale_inv"),
        ("fp8_blocks", lambda t: t.update({KEY + "weight_scale_inv": torch.ones(2, 3)}),
         f"{KEY}weight_scale_inv of shape (2, 3) does not fit"),
        ("compressed_channel", lambda t: t.update({KEY + "weight_scale": torch.ones(255, 1)}),
         f"{KEY}weight_scale of shape (255, 1) does not fit"),
        ("compressed_channel", lambda t: t.update({KEY + "weight": t[KEY + "weight"].float()}),
         f"{KEY}weight of shape (256, 256) does not fit: its dtype is torch.float32, not torch.float8_e4m3fn"),
        ("gptq_128", lambda t: t.pop(KEY + "scales"), f"keys missing from it: {KEY}scales"),
        ("gptq_128", lambda t: t.update({KEY + "scales": torch.ones(3, 256)}),
         f"{KEY}scales of shape (3, 256) does not fit"),
        ("gptq_128", lambda t: t[KEY + "qzeros"].view(-1)[3].fill_(0x77777776),
         f"{KEY}qzeros of shape (2, 32) does not fit: a symmetric weight has zero points other than 8"),
        ("gptq_128", lambda t: t.update({KEY + "g_idx": t[KEY + "g_idx"].flip(0)}),
         f"{KEY}g_idx of shape (256,) does not fit: its columns are not grouped in their order: act order"),
        ("awq", lambda t: t.update({KEY + "qweight": t[KEY + "qweight"].float()}),
         f"{KEY}qweight of shape (256, 32) does not fit: its dtype is torch.float32, not torch.int32"),
        ("fp8_dynamic", lambda t: t[KEY + "weight"].view(torch.uint8)[3, 3].fill_(0x7F),
         f"NaN or infinity in {KEY}weight (model.safetensors)"),
    ],
)  # fmt: skip
def test_damaged_tensor_is_named(
    base: Path, tmp_path: Path, name: str, change: Callable[[Tensors], Any], said: str
) -> None:
    folder = edited(base, tmp_path, name, change)
    with pytest.raises(CheckpointError) as caught:
        build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    assert said in str(caught.value)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_bias_of_a_layer_without_one_must_be_zero(base: Path, tmp_path: Path, value: float) -> None:
    """AutoGPTQ writes a bias for every layer."""
    folder = edited(base, tmp_path, "gptq_128", lambda t: t.update({KEY + "bias": torch.full((256,), value)}))
    config = build.load_config(folder)
    if not value:
        build.build(folder, config, torch.device("cpu"), torch.float32)
        return
    with pytest.raises(CheckpointError, match=f"{KEY}bias of shape .* the model has no bias there"):
        build.build(folder, config, torch.device("cpu"), torch.float32)


# As they are in config.json of published checkpoints, with fields that decide nothing here.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gptq": {
        "batch_size": 1, "bits": 4, "damp_percent": 0.01, "dataset": None, "desc_act": False, "group_size": 128,
        "modules_in_block_to_quantize": None, "quant_method": "gptq", "sym": True, "true_sequential": True,
    },
    "awq": {
        "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    },
    "compressed-tensors": {
        "config_groups": {"group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }},
        "format": "pack-quantized", "global_compression_ratio": None, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
    },
    "fp8": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    },
    "modelopt": {
        "config_groups": {"group_0": {"targets": ["Linear"]}}, "ignore": ["lm_head"], "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.29.0"}, "quant_method": "modelopt",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read(base: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(base, tmp_path / "copy")
    set_config(folder, PUBLISHED[name])
    layers = [item for item in plan(str(folder)) if item.arguments.get("format") == name]
    assert len(layers) == 8  # four in each of two layers; neither embedding nor head


def test_quantization_file_of_modelopt_is_read(base: Path, tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "modelopt_fp8", base)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    own = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    made = build.skeleton(folder, build.load_config(folder), torch.float32)
    assert made.get_parameter("model.layers.0.mlp.down_proj.weight").dtype == FP8


@pytest.mark.parametrize(
    "name", ["fp8_blocks", "compressed_channel", "fp8_static", "gptq_64", "packed_channel", "awq"]
)
def test_ranks_hold_their_part_of_weight_and_scales(base: Path, tmp_path: Path, name: str) -> None:
    """The products of two ranks' columns, put together, are those of one; rows' parts are summed."""
    wide = make_tiny(tmp_path / "wide", "llama", "float32", **{**SIZES, "num_attention_heads": 8,
                     "num_key_value_heads": 4})  # fmt: skip
    folder, _ = write(tmp_path, name, wide)
    config = build.load_config(folder)

    def dequantized(rank: int, size: int) -> dict[str, T]:
        with parallel.build_as(rank, size):
            model = build.build(folder, config, torch.device("cpu"), torch.float32)
        found = {}
        for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            layer: Any = model.get_submodule(f"model.layers.0.{part}")
            scale = layer.weight_scale
            if layer.weight.dtype == torch.uint8:
                found[part] = dequantize_int4(layer.weight, scale, layer.weight_zero, torch.float32)
                continue
            scale = blocks_of(scale, layer.weight.shape) if scale.dim() == 2 else scale[:, None]
            found[part] = layer.weight.float() * scale
        return found

    whole, first, second = dequantized(0, 1), dequantized(0, 2), dequantized(1, 2)
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        assert torch.equal(torch.cat((first[part], second[part]), 1), whole[part])
    sizes = {"self_attn.qkv_proj": [256, 128, 128], "mlp.gate_up_proj": [128, 128]}
    for part, rows in sizes.items():
        pairs = zip(first[part].split(rows), second[part].split(rows), strict=True)
        assert torch.equal(torch.cat([half for pair in pairs for half in pair]), whole[part])
