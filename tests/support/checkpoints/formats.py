"""Quantized forms of a matrix as checkpoints have them, and what their activations lose; checkpoints made of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.models.common.plans import build
from fastkernels.overrides.attention.attention import PagedAttention

# Names of quantized layers in checkpoints. An indexer's weights_proj is not: its result weights the heads.
LAYER = re.compile(r"(?<!weights)_proj$|_proj_with_mqa$|\.w[123]$|indexer\.w(q_b|k)$")
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
        rows = F.pad(w, (0, 0, 0, -w.shape[0] % 128))
        parts = rows.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
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


def index_of(columns: int, size: int, ordered: bool = False) -> T:
    """The group of each column; ordered: with act order, here a random one that is the same for all matrices."""
    groups = torch.arange(columns, dtype=torch.int32) // (size if size > 0 else columns)
    return (
        groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        if ordered
        else groups
    )


def groups_of(w: T, size: int, symmetric: bool, bits: int = 4, ordered: bool = False) -> tuple[T, T, T, T]:
    """Integers of so many bits [N, K], scales [N, G], zero points [N, G], and the dequantized matrix."""
    index = index_of(w.shape[1], size, ordered).long()
    parts = w[:, index.argsort(stable=True)].unflatten(1, (int(index.max()) + 1, -1))
    middle, most = 1 << bits - 1, (1 << bits) - 1
    if symmetric:
        scale = (parts.abs().amax(-1) / (middle - 1)).half().float()
        zero = torch.full_like(scale, middle)
    else:
        low, high = parts.amin(-1), parts.amax(-1)
        scale = ((high - low) / most).half().float()
        zero = (-low / scale).round().clamp(0, most)
    q = (w / scale[:, index] + zero[:, index]).round().clamp(0, most)
    return q.int(), scale, zero.int(), (q - zero[:, index]) * scale[:, index]


def words(values: T, dim: int, order: tuple[int, ...] | None = None, bits: int = 4) -> T:
    """Integers in each int32, eight of 4 bits; order[i]: which of them is the i-th from the lowest bit."""
    parts = values.unflatten(dim, (-1, 32 // bits)).long()
    shifted = [
        parts.select(dim + 1, column) << bits * i for i, column in enumerate(order or range(32 // bits))
    ]
    return torch.stack(shifted).sum(0).to(torch.int32)


def gptq(
    size: int, symmetric: bool, less: int = 1, bits: int = 4, ordered: bool = False
) -> Callable[[T], tuple[Tensors, T]]:
    def quantize(w: T) -> tuple[Tensors, T]:
        q, scale, zero, plain = groups_of(w, size, symmetric, bits, ordered)
        index = index_of(w.shape[1], size, ordered)
        if less:
            zero = zero.clamp(min=1)  # the format has no zero point 0
            plain = (q - zero[:, index]) * scale[:, index]
        packed = {"qweight": words(q.t(), 0, None, bits), "qzeros": words(zero.t() - less, 1, None, bits)}
        return {**packed, "scales": scale.t().half(), "g_idx": index}, plain

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


def packed(
    size: int, symmetric: bool, ordered: bool = False, bits: int = 4
) -> Callable[[T], tuple[Tensors, T]]:
    def quantize(w: T) -> tuple[Tensors, T]:
        q, scale, zero, plain = groups_of(w, size, symmetric, bits, ordered)
        shape = torch.tensor(w.shape)
        parts = {"weight_packed": words(q, 1, None, bits), "weight_scale": scale, "weight_shape": shape}
        if ordered:
            parts["weight_g_idx"] = index_of(w.shape[1], size, True)
        return parts | ({} if symmetric else {"weight_zero_point": words(zero, 0, None, bits)}), plain

    return quantize


def int8(w: T) -> tuple[Tensors, T]:
    scale = w.abs().amax(1, keepdim=True) / 127
    q = (w / scale).round()
    return {"weight": q.to(torch.int8), "weight_scale": scale}, q * scale


def four_dimensions(w: T) -> tuple[Tensors, T]:
    parts, plain = blockwise("weight_scale")(w)
    return {**parts, "weight_scale": parts["weight_scale"][:, None, :, None]}, plain


def exponents(w: T) -> tuple[Tensors, T]:
    """Blocks with powers of two as scales."""
    scale = blockwise("weight_scale_inv")(w)[0]["weight_scale_inv"].log2().ceil().exp2()
    wide = blocks_of(scale, w.shape)
    q = to_fp8(w, wide)
    return {"weight": q, "weight_scale_inv": scale.to(torch.float8_e8m0fnu)}, q.float() * wide


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
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
INT8 = {**INT4, "num_bits": 8}
ATTENTION = {"targets": ["re:.*self_attn"], "weights": INT8, "format": "pack-quantized"}
Quantize: TypeAlias = Callable[[T], tuple[Tensors, T]]
# name: (quantization_config, one matrix to (tensors, dequantized matrix), x to dequantized x)
# Instead of the function {pattern of names: function}; other matrices are not quantized.
FORMATS: dict[str, tuple[dict[str, Any], Quantize | dict[str, Quantize], Callable[[T], T]]] = {
    "fp8_static": ({"quant_method": "fp8", "activation_scheme": "static"}, per_tensor, fake_static),
    "fp8_dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, per_tensor, fake_rows),
    "fp8_blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, blockwise("weight_scale_inv"), fake_groups,
    ),
    "compressed_channel": (CHANNEL, per_channel, fake_rows),
    "compressed_block": (BLOCK, blockwise("weight_scale"), fake_groups),
    "gptq_128": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, gptq(128, True), as_it_is),
    "gptq_64": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, gptq(64, False), as_it_is),
    "gptq_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
        gptq(32, False, ordered=True), as_it_is,
    ),
    "gptq_8_bits": ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, gptq(32, True, 1, 8), as_it_is),
    "gptq_8_bits_zeros": (
        {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(128, False, 0, 8), as_it_is,
    ),
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
    "packed_act": (
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True,
                    "actorder": "group"}, None, "pack-quantized"),
        packed(64, True, True), as_it_is,
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
    "packed_8_bits": (compressed(INT8, None, "pack-quantized"), packed(32, False, bits=8), as_it_is),
    "int_8_bits": (
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8, "dynamic": True},
                   "int-quantized"),
        int8, as_it_is,
    ),
    "compressed_weights": (
        compressed({**BLOCK["config_groups"]["group_0"]["weights"], "block_structure": "128x128"}, None,
                   "naive-quantized"),
        blockwise("weight_scale"), as_it_is,
    ),
    "compressed_groups": (
        {**compressed(INT4, None, "mixed-precision"), "ignore": ["lm_head", "re:.*layers.1.self_attn.o_proj"],
         "config_groups": {"a": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"}, "b": ATTENTION}},
        {r"0.self_attn|[qkv]_proj": packed(32, False, bits=8), r"mlp": packed(32, False)}, as_it_is,
    ),
    "gptq_dynamic": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True,
         "dynamic": {r"-:.*\.1\.mlp": {}, "+:.*down_proj": {"bits": 8, "group_size": 64, "sym": False}, "lm_head": {}}},
        {"0.mlp.down": gptq(64, False, 1, 8), "self_attn|0.mlp": gptq(32, True)}, as_it_is,
    ),
    "auto_round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "extra_config": {
            "model.layers.0.mlp.down_proj": {"bits": 8}, r".*\.1\.mlp.*": {"bits": 16, "data_type": "fp"}}},
        {"0.mlp.down": gptq(64, True, 1, 8), "self_attn|0.mlp": gptq(64, True)}, as_it_is,
    ),
    "fp8_exponents": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, exponents, fake_groups),
    "modelopt_blocks": ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, four_dimensions, fake_groups),
    "modelopt_fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, per_tensor, fake_static),
}  # fmt: skip


def write(folder: Path, name: str, base: Path) -> tuple[Path, Path]:
    """The checkpoint `base` quantized as FORMATS[name], and one with the dequantized weights."""
    config, quantize, _ = FORMATS[name]
    kept, plain = {}, {}
    for key, tensor in load_file(base / "model.safetensors").items():
        chosen = quantize
        if isinstance(chosen, dict):
            chosen = next((own for pattern, own in chosen.items() if re.search(pattern, key)), None)
        if chosen is None or not key.endswith(".weight") or not LAYER.search(key.removesuffix(".weight")):
            kept[key] = plain[key] = tensor
            continue
        parts, plain[key] = chosen(tensor)
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


def rounded_experts(module: Any, fake: Callable[[T], T], x: T, ids: T, weights: T) -> T:
    """transformers' experts, with the inputs of both products as the format rounds them."""
    out = torch.zeros_like(x)
    for token, (rounded, chosen, shares) in enumerate(zip(fake(x), ids.tolist(), weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (module.gate_up_proj[expert] @ rounded).chunk(2)
            out[token] += share * (module.down_proj[expert] @ fake((module.act_fn(gate) * up)[None])[0])
    return out


def theirs(dense: Path, ids: T, fake: Callable[[T], T]) -> T:
    """transformers' logits with dequantized weights, and with x as the format rounds it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    for name, module in model.named_modules():
        if LAYER.search(name) and not name.endswith("kv_b_proj"):  # ours dequantizes this weight at load
            module.register_forward_pre_hook(lambda _, args: (fake(args[0]),))
        if name.endswith(".experts"):
            module.forward = partial(rounded_experts, module, fake)
    with torch.no_grad():
        return model(ids[None]).logits[0]


def ours(folder: Path, ids: T, steps: tuple[tuple[int, int], ...]) -> T:
    """Our logits in float32; steps: (start, end) of the tokens that are computed together."""
    model: Any = build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    for layer in model.modules():
        if isinstance(layer, PagedAttention):
            layer.kv_cache = tuple(torch.zeros(shape) for shape in layer.cache_shapes(4, 16))
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
