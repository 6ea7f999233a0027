"""Configs that cannot be used: from the command line and in the engine, the field, its value, and what is supported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from fk_bench.cli import app
from support.tiny import KINDS, SIZES, make_tiny
from typer.testing import CliRunner

from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs import checks
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Attention, Experts, Unsupported
from fastkernels.models.common.plans import build

REMOTE = {
    "AutoConfig": "configuration_novel.NovelConfig",
    "AutoModelForCausalLM": "modeling_novel.NovelForCausalLM",
}

KIMI_K2: dict[str, Any] = {  # moonshotai/Kimi-K2-Instruct without its quantization
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checks")
    for kind in ("llama", "olmoe", "cohere2", "gpt_oss", "gemma3_text", "gemma4_text"):
        make_tiny(
            root / kind,
            kind,
            "float32",
            **({} if kind in ("olmoe", "gpt_oss") else {"num_attention_heads": 8}),
        )
    return root


def edited(folder: Path, target: Path, **fields: Any) -> Path:
    """A copy with other fields in its config.json; None removes a field."""
    shutil.copytree(folder, target)
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("llama", {"hidden_size": None}, "config.json has no hidden_size"),
        ("cohere2", {"vocab_size": None, "num_hidden_layers": None}, "has no vocab_size, num_hidden_layers"),
        ("llama", {"dtype": "torch.float32"}, "dtype='torch.float32' is not supported, only float32, float16"),
        ("cohere2", {"dtype": None, "torch_dtype": 16}, "torch_dtype=16 is not supported, only float32"),
        ("llama", {"hidden_size": 0}, "config.hidden_size=0 is not supported, only integers above 0"),
        ("cohere2", {"sliding_window": -4}, "config.sliding_window=-4 is not supported"),
        ("llama", {"hidden_size": "big"}, "Field 'hidden_size' expected int, got str (value: 'big')"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "config.query_pre_attn_scalar=0 is not supported"),
        ("gemma4_text", {"vocab_size_per_layer_input": 300}, "is not supported, only vocab_size=512 or more"),
        ("olmoe", {"num_experts_per_tok": 9}, "config.num_experts_per_tok=9 is more than the 6 experts"),
        ("cohere2", {"layer_types": ["linear_attention"] * 4},
         "config.layer_types has linear_attention, which Cohere2ForCausalLM does not have"),
        ("cohere2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
         "rope_type='dynamic' is not supported, only 'default', 'linear', 'llama3', 'yarn'"),
        ("llama", {"architectures": ["Qwen2ForCausalLM"]},
         "model_type='llama' contradicts architectures=['Qwen2ForCausalLM'], whose model_type is 'qwen2'"),
        ("llama", {"architectures": ["NovelForCausalLM"], "model_type": "novel", "auto_map": REMOTE},
         "architectures=['NovelForCausalLM'] needs Python code of the checkpoint (auto_map), which FastKernels does"),
    ],
)  # fmt: skip
def test_config_is_refused_with_field_and_value(
    folders: Path, tmp_path: Path, kind: str, fields: dict[str, Any], said: str
) -> None:
    folder = edited(folders / kind, tmp_path / "copy", **fields)
    for command, status in ((["describe"], 2), (["serve", "--device", "cpu", "--port", "0"], 1)):
        done = CliRunner().invoke(app, [*command, str(folder)], input="y\n")
        assert done.exit_code == status and isinstance(done.exception, SystemExit), done.exception
        assert said in done.stderr and "Traceback" not in done.output


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("deepseek_v3", {"n_group": None}, "config.n_group=None: not supported by DeepseekV3ForCausalLM"),
        ("deepseek_v3", {"first_k_dense_replace": None}, "config.first_k_dense_replace=None: not supported"),
        ("deepseek_v3", {"v_head_dim": None}, "config.v_head_dim=None is not supported, only integers"),
        ("dots1", {"num_experts_per_tok": None}, "config.num_experts_per_tok=None is not supported with 8 experts"),
        ("granitemoe", {"logits_scaling": 0.0}, "config.logits_scaling=0.0: not supported by GraniteMoe"),
        ("qwen2", {"rope_parameters": {**ROPE, "rope_type": ["yarn"]}}, "rope_type=['yarn'] is not supported, only"),
        ("qwen2", {"rope_parameters": {**ROPE, "factor": "4"}}, "factor='4' is not supported, only numbers above 0"),
        ("stablelm", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}}, "at most 1"),
    ],
)  # fmt: skip
def test_null_and_damaged_fields_are_refused_by_name(kind: str, fields: dict[str, Any], said: str) -> None:
    prefix, differs = KINDS[kind]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **differs, **fields})
    config.architectures = [f"{prefix}ForCausalLM"]
    with pytest.raises(Unsupported, match=re.escape(said)):
        checks.check(config)
        registry.describe(config)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("gemma3_text", {"num_attention_heads": 0}, "config.num_attention_heads=0 is not supported, only integers"),
        ("olmoe", {"rope_parameters": -1}, "config.rope_parameters=-1 is not supported, only a table of fields"),
        ("cohere2", {"rope_parameters": {**ROPE, "beta_fast": "fast"}}, "beta_fast='fast' is not supported, only"),
        ("llama", {"rope_parameters": None, "rope_scaling": {**ROPE, "factor": -2}}, "config.rope_scaling: factor=-2"),
    ],
)  # fmt: skip
def test_values_on_which_transformers_fails_are_named(
    folders: Path, tmp_path: Path, kind: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        build.load_config(edited(folders / kind, tmp_path / "copy", **fields))


def test_unused_window_may_be_zero() -> None:
    """transformers sets it to 0 in Qwen2-MoE's config."""
    sizes = {"num_attention_heads": 4, "hidden_size": 64, "vocab_size": 96, "sliding_window": 0}
    checks.check(SimpleNamespace(**sizes, use_sliding_window=False))
    with pytest.raises(Unsupported, match="sliding_window=0 is not supported"):
        checks.check(SimpleNamespace(**sizes))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"groups": 3}, "config.n_group=3 is not supported with 8 experts, only 1, 2, 4, 8"),
        ({"groups": 8, "correction": True}, "config.n_group=8 is not supported with 8 experts, only 1, 2, 4"),
        ({"groups": 4, "top_groups": 5}, "config.topk_group=5 is not supported, only 1 to n_group=4"),
        ({"groups": 4}, "num_experts_per_tok=3 is not supported, only 1 to 2, the experts in 1 of 4 groups"),
    ],
)
def test_impossible_groups_of_experts_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        Experts(8, 3, 16, **fields)


@pytest.mark.parametrize(
    ("kind", "name", "fields", "said"),
    [
        ("mamba2", "Mamba2", {"n_groups": 3}, "config.num_heads=128 is not a multiple of n_groups=3"),
        ("mamba2", "Mamba2", {"num_heads": 100}, "hidden_size * expand (8192) must equal num_heads * head_dim (6400)"),
        ("mamba2", "Mamba2", {"time_step_limit": [0.5]},
         "config.time_step_limit=[0.5] is not supported, only two numbers from 0, the lesser one first"),
        ("qwen3_next", "Qwen3Next", {"linear_num_value_heads": 24},
         "config.linear_num_value_heads=24 is not a multiple of linear_num_key_heads=16"),
        ("jamba", "Jamba", {"attn_layer_period": 0}, "attn_layer_period=0 is not supported, only integers above 0"),
        ("gla", "GLA", {"clamp_min": float("nan")}, "config.clamp_min=nan is not supported, only numbers and None"),
        ("rwkv7", "RWKV7", {"norm_eps": 0}, "config.norm_eps=0 is not supported, only numbers above 0"),
    ],
)  # fmt: skip
def test_sizes_of_recurrent_layers_are_refused(
    tmp_path: Path, kind: str, name: str, fields: dict[str, Any], said: str
) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 4096, "intermediate_size": 4096, "num_hidden_layers": 2,
             "num_attention_heads": 32}  # fmt: skip
    raw = {"model_type": kind, "architectures": [f"{name}ForCausalLM"], **sizes, **fields}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises((CheckpointError, Unsupported), match=re.escape(said)):
        registry.describe(build.load_config(tmp_path))


def test_code_of_a_checkpoint_is_not_run(folders: Path, tmp_path: Path) -> None:
    """A known architecture with auto_map is built from the model here."""
    folder = edited(folders / "llama", tmp_path / "copy", auto_map=REMOTE)
    for name in ("configuration_novel", "modeling_novel"):
        (folder / f"{name}.py").write_text("raise SystemExit('this was run')")
    config = build.load_config(folder)
    assert (config.model_type, config.num_attention_heads) == ("llama", 8)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[1]", r"config\.json must hold a JSON object, got \[1\]"),
        (
            json.dumps({"architectures": ["InstantNGP"], "model_type": "instant_ngp", "levels": 10**400}),
            r"levels=10+\.\.\.0+ is too large, it must fit into 64 bits$",
        ),
        (
            json.dumps({"architectures": ["Oasis"], "model_type": "oasis", "vae": {"enc_dim": -(10**400)}}),
            r"vae\.enc_dim=-10+\.\.\.0+ is too large",
        ),
        (
            json.dumps(
                {
                    "architectures": ["OpenFold3"],
                    "model_type": "openfold3",
                    "architecture": {"pairformer": {"no_blocks": 10**9}},
                }
            ),
            r"architecture\.pairformer\.no_blocks=1000000000 is too large, at most 10000 layers",
        ),
        (
            json.dumps(
                {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 10**12}
            ),
            r"num_experts=1000000000000 is too large, at most 10000 experts",
        ),
    ],
)
def test_files_that_are_no_configs_are_refused(tmp_path: Path, written: str, message: str) -> None:
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(CheckpointError, match=message):
        build.load_config(tmp_path)


def test_sizes_beyond_any_memory_are_refused(folders: Path, tmp_path: Path) -> None:
    raw = json.loads((folders / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "hidden_size": 2**40, "head_dim": 2**38}))
    with pytest.raises(CheckpointError, match="sizes that are not possible"):
        build.skeleton(tmp_path, build.load_config(tmp_path), torch.float32)


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """Its config.json has another model type and names Python code; all fields mean the same."""
    types = {"kimi": {"model_type": "kimi_k2", "auto_map": REMOTE}, "deepseek": {"model_type": "deepseek_v3"}}
    for name, fields in types.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**KIMI_K2, **fields}))
    kimi, deepseek = (build.load_config(tmp_path / name).to_dict() for name in types)
    assert kimi | {"_name_or_path": ""} == deepseek | {"_name_or_path": ""}
    done = CliRunner().invoke(app, ["describe", str(tmp_path / "kimi")])
    assert done.exit_code == 0 and json.loads(done.stdout.splitlines()[-1])["parameters"] == 1_026_408_232_448


@pytest.mark.parametrize(
    ("kind", "fields", "ranks", "said"),
    [
        ("llama", {}, 3,
         "intermediate_size=256, num_attention_heads=8, num_key_value_heads=2, vocab_size=512 cannot be shared by 3"
         " ranks; supported: 1, 2, 4, 8"),
        ("cohere2", {"vocab_size": 500}, 16,
         "num_attention_heads=8 cannot be shared by 16 ranks; supported: 1, 2, 4, 8"),
        ("olmoe", {"intermediate_size": 66}, 4,
         "an expert's intermediate size of 66, num_key_value_heads=2 cannot be shared by 4 ranks; supported: 1, 2"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_share_are_refused(
    folders: Path, tmp_path: Path, kind: str, fields: dict[str, Any], ranks: int, said: str
) -> None:
    config = build.load_config(edited(folders / kind, tmp_path / "copy", **fields))
    with pytest.raises(Unsupported) as caught:
        checks.check_ranks(config, ranks)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("kind", "ranks", "groups", "said"),
    [
        ("llama", 2, 2, "LlamaForCausalLM has no experts"),
        ("gpt_oss", 8, 8, "4 experts cannot be divided by 8; supported: 1, 2, 4"),
        ("olmoe", 4, 4, "6 experts cannot be divided by 4; supported: 1, 2"),
        ("olmoe", 6, 3,
         "num_attention_heads=4, num_key_value_heads=2, vocab_size=512 cannot be shared by 6 ranks; supported: none"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_divided_are_refused(
    folders: Path, kind: str, ranks: int, groups: int, said: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        checks.check_ranks(build.load_config(folders / kind), ranks, groups)
    assert str(caught.value) == said


def test_serve_names_sizes_that_ranks_cannot_share(folders: Path) -> None:
    command = ["serve", str(folders / "llama"), "--device", "cpu", "--tensor-parallel-size", "3"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "tensor-parallel-size 3 does not suit" in done.stderr
    assert "num_attention_heads=8, " in done.stderr and "supported: 1, 2, 4, 8" in done.stderr


MPT = {  # a field and another value, and what transformers and vLLM say of it
    "alibi_bias_max": (
        {"alibi_bias_max": 16},
        r"attn_config\.alibi_bias_max=16 is not supported: .* slopes with 8",
    ),
    "alibi": ({"alibi": False}, r"config\.alibi=False is not supported, only True"),
    "attn_type": ({"attn_type": "multiquery_attention"}, r"config\.attn_type='multiquery_attention' is not"),
    "clip_qkv": ({"clip_qkv": 6.0}, r"config\.clip_qkv=6\.0 is not supported"),
    "qk_ln": ({"qk_ln": True}, r"config\.qk_ln=True is not supported"),
    "prefix_lm": ({"prefix_lm": True}, r"config\.prefix_lm=True is not supported"),
}


@pytest.mark.parametrize("name", MPT)
def test_other_attention_of_mpt_is_refused(name: str) -> None:
    """transformers ignores some of these fields, and vLLM applies them."""
    from transformers import MptConfig

    fields, said = MPT[name]
    config = MptConfig(architectures=["MptForCausalLM"], attn_config=fields)
    with pytest.raises(Unsupported, match=said):
        registry.describe(config)


def test_other_fields_of_mpt_are_refused() -> None:
    from transformers import MptConfig

    for name, value in (
        ("no_bias", False), ("norm_type", "rmsnorm"), ("expansion_ratio", 2), ("logit_scale", "inv_sqrt_d_model"),
        ("n_heads", 24),
    ):  # fmt: skip
        config = MptConfig(architectures=["MptForCausalLM"], **{name: value})
        said = (
            "is not a multiple of num_attention_heads=24" if name == "n_heads" else f"config.{name}={value!r}"
        )
        with pytest.raises(Unsupported, match=re.escape(said)):
            registry.describe(config)


@pytest.mark.parametrize("heads", [6, 10, 16])
def test_alibi_slopes_of_mpt_are_those_of_transformers(heads: int) -> None:
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    config = MptConfig(
        architectures=["MptForCausalLM"], d_model=240, n_heads=heads, learned_pos_emb=False,
        attn_config={"softmax_scale": 0.3},
    )  # fmt: skip
    attention = registry.describe(config).layers[0].attention
    bias = build_mpt_alibi_tensor(heads, 2)  # of the last two keys
    assert isinstance(attention, Attention) and attention.scale == 0.3
    assert attention.slopes == pytest.approx((-bias[:, 0, 0]).tolist())
