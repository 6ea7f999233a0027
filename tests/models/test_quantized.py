"""Quantized checkpoints against transformers with dequantized weights, layouts as published, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import formats
from support.checkpoints.formats import (
    CHANNEL,
    FORMATS,
    FP8,
    SIZES,
    T,
    Tensors,
    as_it_is,
    blocks_of,
    ours,
    set_config,
    theirs,
    write,
)
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.core import parallel
from fastkernels.models.common.checkpoints import quantized
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.checkpoints.quantization import Scheme, read
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import find
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan
from fastkernels.overrides.linear.linear_int4 import dequantize_int4, pack_int4, untile_int4
from fastkernels.overrides.linear.parallel_linear import weights_as
from fastkernels.overrides.linear.quantized import DequantizedMethod, Int4LinearMethod
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear

DENSE = ("gptq_8_bits", "gptq_8_bits_zeros", "packed_8_bits", "int_8_bits", "compressed_weights")  # at load


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("base"), "llama", "float32", **SIZES)


@pytest.fixture(scope="module", params=FORMATS)
def made(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param, *write(tmp_path_factory.mktemp("quantized"), request.param, base)


@torch.inference_mode()
def test_logits_equal_dequantized_weights(made: Any) -> None:
    name, folder, dense = made
    ids = torch.tensor([(i * 37) % 500 for i in range(20)])
    expected = theirs(dense, ids, FORMATS[name][2])
    found = ours(folder, ids, ((0, 18), (18, 19), (19, 20)))
    assert expected.std() > 0.1
    # A value of x at a boundary of float8 may be rounded to the other side; how many are depends on the CPU's sums.
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error < (4e-2 if FORMATS[name][2] is not as_it_is else 1e-4)


def test_plan_counts_the_bytes(made: Any) -> None:
    name, folder, dense = made
    model = build.skeleton(folder, build.load_config(folder), torch.float32)
    quantized.finish(model)
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan(str(folder)).weight_bytes == kept
    assert kept < plan(str(dense)).weight_bytes or name in DENSE


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
            layer = model.get_submodule("model.layers.0.self_attn.o_proj")
            found.append(layer.quant_method.dequantize(layer))
        whole, first, second = found
        assert torch.equal(torch.cat((first, second), 1), whole) and len(whole.unique()) > 8


INT4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}


def group(**weights: Any) -> dict[str, Any]:
    first = CHANNEL["config_groups"]["group_0"]
    return {**CHANNEL, "config_groups": {"group_0": {**first, "weights": {**first["weights"], **weights}}}}


def inputs(**activations: Any) -> dict[str, Any]:
    first = CHANNEL["config_groups"]["group_0"]
    given = {**first, "input_activations": {**first["input_activations"], **activations}}
    return {**CHANNEL, "config_groups": {"group_0": given}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported, only 'fp8'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size=[64, 64] is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
         "activation_scheme='static' is not supported, only 'dynamic'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits=3 is not supported, only 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48},
         "group_size=48 is not supported, only 32, 64, 128, -1"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size=128 is not supported"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [[1]]}, "is not a list of module names"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv' is not supported, only 'gemm'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo='W4A8' is not supported, only 'FP8'"),
        (group(num_bits=6), "config_groups.group_0.weights.num_bits=6 is not supported, only 8, 4"),
        (group(strategy="attn_head"), "weights.strategy='attn_head' is not supported, only 'tensor', 'channel'"),
        ({**CHANNEL, "ignore": ["re:.*k_proj"]},
         "leaves model.layers.0.self_attn.k_proj unquantized: one weight here has model.layers.0.self_attn.q_proj"),
        ({**CHANNEL, "config_groups": {"a": {"targets": ["LlamaMLP"], "weights": {"num_bits": 4}}}},
         "a.targets='LlamaMLP' is not supported, only 'Linear'"),
        ({**CHANNEL, "config_groups": {"a": {**INT4, "format": "marlin-24"}}},
         "config_groups.a.format='marlin-24' is not supported, only 'pack-quantized'"),
        ({**CHANNEL, "ignore": "lm_head"}, "ignore='lm_head' is not a list of module names"),
        ({**CHANNEL, "ignore": ["re:("]}, "'re:(' is no regular expression: missing )"),
        ({**CHANNEL, "config_groups": {}}, "config_groups has no group of linear layers"),
        ({**CHANNEL, "format": "mxfp8-quantized"}, "format='mxfp8-quantized' is not supported, only 'float"),
        (inputs(symmetric=False), "input_activations.symmetric=False is not supported, only True"),
        (inputs(strategy="group"), "input_activations.strategy='group' is not supported, only 'token', 'tensor'"),
        ({**CHANNEL, "config_groups": {"a": {**INT4, "format": "pack-quantized"},
                                       "b": {**formats.ATTENTION, "targets": ["re:.*k_proj"]}}},
         "has another format for model.layers.0.self_attn.k_proj: one weight here has model.layers.0.self_attn.q_proj"),
        ({"quant_method": "fp8", "store_dtype": "mxfp4"}, "store_dtype='mxfp4' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format=True is not supported"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*o_proj": {"bits": 3}}},
         "dynamic.+:.*o_proj.bits=3 is not supported, only 4, 8"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend='llm-awq' is not supported"),
        ({"quant_method": "auto-round", "bits": 4, "sym": False}, "sym=False is not supported, only True"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {}}},
         "quantized_layers.a.b.quant_algo=None is not supported, only 'FP8', 'FP8_PER_CHANNEL_PER_TOKEN'"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": ["FP8"]}},
         "quantization.quant_algo=['FP8'] is not supported"),
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
        ("compressed_channel", lambda t: t.update({KEY + "weight_scale": torch.tensor(0.1)}),
         f"{KEY}weight_scale of shape () does not fit: expected a scale for each row (strategy 'channel')"),
        ("fp8_blocks", lambda t: t.update({KEY + "weight_scale_inv": t[KEY + "weight_scale_inv"].to(FP8)}),
         f"{KEY}weight_scale_inv of shape (2, 2) does not fit: its dtype is torch.float8_e4m3fn, not torch.float32"),
        ("compressed_nvfp4", lambda t: t[KEY + "weight_global_scale"].fill_(0),
         f"{KEY}weight_global_scale of shape () does not fit: weights are divided by it, and it is 0"),
        ("compressed_nvfp4", lambda t: t[KEY + "weight_global_scale"].fill_(torch.inf),
         f"{KEY}weight_global_scale of shape () does not fit: weights are divided by it, and it is inf"),
        ("int_8_bits", lambda t: t.update({KEY + "weight": t[KEY + "weight"].int()}),
         f"{KEY}weight of shape (256, 256) does not fit: its dtype is torch.int32, not torch.int8"),
        ("awq", lambda t: t.update({KEY + "weight": t.pop(KEY + "qweight")}),
         f"{KEY}weight of shape (256, 32) does not fit: it is not quantized, and config.quantization_config"),
        ("modelopt_nvfp4", lambda t: t[KEY + "weight_scale"].view(torch.uint8)[3, 3].fill_(0x81),
         f"{KEY}weight_scale of shape (256, 16) does not fit: it has a scale that is negative or NaN"),
        ("modelopt_nvfp4", lambda t: t.update({KEY + "weight": t[KEY + "weight"].view(torch.int8)}),
         f"{KEY}weight of shape (256, 128) does not fit: its dtype is torch.int8, not torch.uint8"),
        ("gptq_128", lambda t: t.update({KEY + "qweight": t[KEY + "qweight"].flatten()}),
         f"{KEY}qweight of shape (8192,) does not fit: expected two dimensions"),
        ("gptq_128", lambda t: t.pop(KEY + "scales"), f"keys missing from it: {KEY}scales"),
        ("gptq_128", lambda t: t.update({KEY + "scales": torch.ones(3, 256)}),
         f"{KEY}scales of shape (3, 256) does not fit"),
        ("gptq_128", lambda t: t[KEY + "qzeros"].view(-1)[3].fill_(0x77777776),
         f"{KEY}qzeros of shape (2, 32) does not fit: a symmetric weight has zero points other than 8"),
        ("gptq_128", lambda t: t.update({KEY + "g_idx": t[KEY + "g_idx"].flip(0)}),
         f"{KEY}g_idx of shape (256,) does not fit: its columns are not grouped in their order: act order"),
        ("gptq_128", lambda t: t.update({KEY + "g_idx": t[KEY + "g_idx"][:-1]}),
         f"{KEY}g_idx of shape (255,) does not fit: expected 256 values, one for each column"),
        ("gptq_act", lambda t: t.update({KEY + "g_idx": t[KEY + "g_idx"][:-1]}),
         f"{KEY}g_idx of shape (255,) does not fit: expected shape (256,)"),
        ("gptq_act", lambda t: t.pop(KEY + "g_idx"), f"keys missing from it: {KEY}g_idx"),
        ("gptq_act", lambda t: t[KEY + "g_idx"].fill_(0),
         f"{KEY}g_idx of shape (256,) does not fit: expected 32 columns of each group"),
        ("gptq_act", lambda t: t.update({KEY + "g_idx": t[KEY + "g_idx"].roll(1)}),
         f"{KEY}g_idx of shape (256,) does not fit: matrices that are one weight here must have the same order"),
        ("packed_act", lambda t: t.pop(KEY + "weight_g_idx"), f"keys missing from it: {KEY}weight_g_idx"),
        ("fp8_static", lambda t: t.update({KEY + "input_scale": torch.tensor(0.0)}),
         f"{KEY}input_scale of shape () does not fit: an input's scale must be above 0, got 0"),
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


@pytest.mark.parametrize(
    ("file", "own", "dtype"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, FP8),
        ("hf_quant_config.json", {"quantization": {"quant_algo": None}}, torch.float32),
        ("hf_quant_config.json", {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, torch.uint8),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True, "sym": True}, torch.uint8),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}, torch.uint8),
    ],
)  # fmt: skip
def test_quantization_in_a_file_of_its_own_is_read(
    base: Path, tmp_path: Path, file: str, own: dict[str, Any], dtype: torch.dtype
) -> None:
    folder = shutil.copytree(base, tmp_path / "copy")
    (folder / file).write_text(json.dumps(own))
    made = build.skeleton(folder, build.load_config(folder), torch.float32)
    assert made.get_parameter("model.layers.0.mlp.down_proj.weight").dtype == dtype


def test_older_name_of_the_field_is_read(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "copy")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "compression_config": CHANNEL}))
    made = build.skeleton(folder, build.load_config(folder), torch.float32)
    assert made.get_parameter("model.layers.0.mlp.down_proj.weight").dtype == FP8


ROWS = Scheme("modelopt", "fp8", "modelopt", by_row=True)
TWO = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
    "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"},
    "model.layers.0.mlp.experts.7.up_proj": {"quant_algo": "FP8"},
    "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
}}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layer", "expected"),
    [
        ({"quant_method": "fbgemm_fp8"}, "o_proj", Scheme("fbgemm_fp8", "fp8", "compressed-tensors", by_row=True)),
        ({"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}, "o_proj", ROWS),
        ({"quant_method": "modelopt", **TWO}, "o_proj", ROWS),
        ({"quant_method": "modelopt", **TWO}, "qkv_proj", None),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["layers.0."]}, "o_proj", None),
        ({"quant_method": "auto-round", "bits": 4, "sym": False, "packing_format": "auto_round:auto_awq"}, "o_proj",
         Scheme("awq", "int4", "awq", group=128, zeros=True)),
        ({**CHANNEL, "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}, "o_proj", None),
    ],
)  # fmt: skip
def test_config_gives_the_format_of_a_layer(
    config: dict[str, Any], layer: str, expected: Scheme | None
) -> None:
    name = "LlamaForCausalLM"
    found = read(SimpleNamespace(architectures=[name], quantization_config=config))
    assert found is not None and found.of(f"model.layers.0.self_attn.{layer}", find(name).arch) == expected


def test_quantization_that_is_no_table_is_refused(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "copy")
    set_config(folder, "gptq")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="quantization_config='gptq' is not a table of fields"):
        build.load_config(folder)


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        ("GptOssForCausalLM", None),
        ("LlamaForCausalLM", {"modules_in_block_to_quantize": [["mlp.up_proj", "mlp.gate_proj"]]}),
        ("Gemma3ForCausalLM", {"modules_to_not_convert": [DOWN.replace("model.", "language_model.model.", 1)]}),
        ("Gemma3ForCausalLM", {"modules_to_not_convert": [DOWN.replace("model.", "model.language_model.", 1)]}),
    ],
)  # fmt: skip
def test_layers_that_a_config_leaves_out(names: str, fields: dict[str, Any] | None) -> None:
    config = SimpleNamespace(
        architectures=[names], quantization_config={"quant_method": "gptq", "bits": 4, **(fields or {})}
    )
    if fields is None:  # its experts have one format
        with pytest.raises(Unsupported, match="quant_method='gptq' is not supported, only 'mxfp4'"):
            read(config)
        return
    found, arch = read(config), find(names).arch
    assert found is not None and found.of(DOWN, arch) is None
    assert found.of("model.layers.0.mlp.gate_up_proj", arch) is not None


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt_neox", "fp8_static"), ("granitemoe", "gptq_64"), ("gemma4_text", "gptq_64")]
)
@torch.inference_mode()
def test_packed_queries_and_experts_in_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """A scale of the projection of all heads is one value; experts in one tensor are not quantized.

    Gemma 4 has queries without keys and values.
    """
    others = "query_key_value$|attention.dense$|dense_.*h$|per_layer.*(gate|projection)$"
    layers = re.compile(f"{formats.LAYER.pattern}|{others}")
    monkeypatch.setattr(formats, "LAYER", layers)
    more = {"global_head_dim": 64, "hidden_size_per_layer_input": 64} if kind == "gemma4_text" else {}
    fields = {**SIZES, "attention_bias": kind == "gpt_neox", **more}
    made = make_tiny(tmp_path / "base", kind, "float32", **fields)
    folder, dense = write(tmp_path, name, made)
    ids = torch.tensor([(i * 37) % 500 for i in range(12)])
    expected, found = theirs(dense, ids, FORMATS[name][2]), ours(folder, ids, ((0, 11), (11, 12)))
    assert (found - expected).square().mean().sqrt() < 1e-2 * expected.std()


@pytest.mark.parametrize(
    ("inner", "ranks", "said"),
    [
        (192, 1, "192, 192 rows on a rank share blocks of 128 rows, which is not"),
        (256, 2, "64, 64 .*: use fewer ranks"),
    ],
)
def test_matrices_that_share_a_block_are_refused(
    base: Path, tmp_path: Path, inner: int, ranks: int, said: str
) -> None:
    folder = shutil.copytree(base, tmp_path / "copy")
    set_config(folder, FORMATS["fp8_blocks"][0])
    config = build.load_config(folder)
    config.intermediate_size = inner
    with parallel.build_as(0, ranks), pytest.raises(ValueError, match=rf"layers.0.*: matrices of .*{said}"):
        build.skeleton(folder, config, torch.float32)


def test_act_order_is_refused_where_ranks_share_columns(base: Path, tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "gptq_act", base)
    with (
        parallel.build_as(0, 2),
        pytest.raises(ValueError, match=r"o_proj: act order .* not supported with columns on several ranks"),
    ):
        build.skeleton(folder, build.load_config(folder), torch.float32)


def test_act_order_is_undone_where_a_weight_is_dequantized() -> None:
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    q, scale, _, plain = formats.groups_of(w, 64, True, ordered=True)
    with weights_as(lambda _: DequantizedMethod(Int4LinearMethod(64, False, None, True))):
        layer: Any = VllmReplicatedLinear(128, 64, bias=False)
    layer.weight.data, layer.weight_scale.data = pack_int4(q.to(torch.uint8)), scale
    layer.g_idx.weight_loader(layer.g_idx, formats.index_of(128, 64, True))
    layer.quant_method.process_weights_after_loading(layer)
    torch.testing.assert_close(layer.weight.data, plain)


@pytest.mark.parametrize("name", [
    "fp8_blocks", "compressed_channel", "fp8_static", "gptq_64", "packed_channel", "awq", "packed_8_bits",
    "int_8_bits", "compressed_weights",
])  # fmt: skip
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
            if name in DENSE:
                found[part] = layer.weight.data
                continue
            scale = layer.weight_scale
            if layer.weight.dtype == torch.uint8:
                rows = untile_int4(layer.weight, scale, layer.weight_zero)
                found[part] = dequantize_int4(*rows, torch.float32)
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
