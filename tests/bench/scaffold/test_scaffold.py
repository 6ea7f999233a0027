"""`fk-bench scaffold`: what it writes computes the same as transformers, without an edit."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.scaffold import command, model_file, samples, verification
from fk_bench.scaffold.command import scaffold_command
from fk_integrations.transformers import tiny_models
from support.tiny import KINDS, SIZES, make_tiny
from transformers import AutoConfig

from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Unsupported

# Architectures of the repository, and others that were not looked at when the scaffold was written.
FIRST = ("qwen2", "olmo2", "granite", "phi3", "starcoder2", "smollm3")
KNOWN = ("qwen3_moe", "olmoe", "cohere2", "gpt_neox", "nemotron", "stablelm", "gemma2", "glm4", "qwen3")
HELD_OUT = (
    "flex_olmo",
    "arcee",
    "biogpt",
    "cohere",
    "cohere2_moe",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "gemma3_text",
    "glm",
    "helium",
    "hy_v3",
    "jais2",
    "minimax_m2",
    "olmo3",
    "opt",
    "phi",
    "persimmon",
    "seed_oss",
    "solar_open",
)


def scaffold(config: Any, out: Path, capsys: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    status = scaffold_command(str(config), out, **{"no_tasks": True, "force": False, **options})
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def check(kind: str, tmp_path: Path, capsys: Any) -> None:
    """The written file builds a checkpoint that it has not seen, and its logits are those of transformers."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny(tmp_path / "checkpoint", kind, "float32")
    status, found = scaffold(folder, tmp_path / "out", capsys)
    assert status == 0 and found["ok"] and not found["unmatched"]
    ids = torch.tensor([(i * 37) % 500 for i in range(45)])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with registry.using(Path(found["model_file"])), torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        got = verification.logits(folder, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_granite_needs_no_edit(tmp_path: Path, capsys: Any) -> None:
    check("granite", tmp_path, capsys)
    text = (tmp_path / "out/llm/granite.py").read_text()
    assert len(text.splitlines()) < 60
    for field in ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"):
        assert f"config.{field}" in text


FALCON = {
    "falcon": ({}, False),
    "falcon_40b": ({"new_decoder_architecture": True, "bias": True}, True),
    "falcon_11b": ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, True),
    "falcon_rw": ({"parallel_attn": False, "multi_query": False, "num_kv_heads": 4}, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FALCON)
def test_falcon_needs_no_edit(name: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Key heads are one, few or all; packed rows are sorted by key head; one or two norms."""
    fields, grouped = FALCON[name]
    prefix, usual = KINDS["falcon"]
    monkeypatch.setitem(KINDS, name, (prefix, {**usual, **fields}))
    check(name, tmp_path, capsys)
    with registry.using(tmp_path / "out/llm/falcon.py"):
        config = AutoConfig.from_pretrained(tmp_path / "checkpoint")
        layer = registry.describe(config).layers[0]
    assert (layer.attention.kv_heads > 1) == grouped


def test_learned_positions_need_no_edit(tmp_path: Path, capsys: Any) -> None:
    check("biogpt", tmp_path, capsys)
    text = (tmp_path / "out/llm/biogpt.py").read_text()
    assert "positions=d.Positions(config.max_position_embeddings, 2)" in text
    assert "embedding_scale=config.hidden_size**0.5 if config.scale_embedding else 1.0" in text


EXPERTS = {  # shared experts next to the block with the router, none, inside the block behind a gate; numbered names
    "granitemoeshared": (
        "GraniteMoeShared",
        {"num_local_experts": 4, "shared_intermediate_size": 48, "attention_multiplier": 0.3},
        "shared=config.shared_intermediate_size",
    ),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4}, "d.Experts(config.num_local_experts,"),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        "shared_gate=True",
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, 'names=("w1", "w3", "w2")'),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_shared_experts_need_no_edit(name: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """The checkpoint has one tensor for all experts, or a matrix for each."""
    prefix, fields, written = EXPERTS[name]
    monkeypatch.setitem(KINDS, name, (prefix, {"num_experts_per_tok": 2, "num_hidden_layers": 2, **fields}))
    check(name, tmp_path, capsys)
    text = " ".join((tmp_path / f"out/llm/{name}.py").read_text().split())
    assert written in text


RECURRENT = {  # kind: (fields that differ from KINDS, a line of the file)
    "mamba": ({"num_hidden_layers": 1}, "rank=config.time_step_rank,"),
    "mamba_bias": ({"use_bias": True, "use_conv_bias": False}, "conv_bias=config.use_conv_bias,"),
    "mamba2": ({}, "dt_limits=d.limits(config.time_step_limit),"),
    "mamba2_limits": (
        {"n_groups": 1, "use_bias": True, "use_conv_bias": False, "time_step_limit": [0.5, 0.9]},
        "groups=config.n_groups,",
    ),
    "jamba": ({}, "experts if i % config.expert_layer_period == config.expert_layer_offset else dense,"),
    "qwen3_next": ({}, 'recurrent if config.layer_types[i] == "linear_attention" else attention,'),
    "qwen3_next_bias": (
        {"attention_bias": True, "mlp_only_layers": [0], "norm_topk_prob": False}, "gated=True,",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_need_no_edit(name: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    fields, line = RECURRENT[name]
    kind = name if name in KINDS else name.rpartition("_")[0]
    prefix, usual = KINDS[kind]
    monkeypatch.setitem(KINDS, name, (prefix, {**usual, **fields}))
    check(name, tmp_path, capsys)
    text = (tmp_path / f"out/llm/{kind}.py").read_text()
    assert line in text and 20 <= len(text.splitlines()) <= 80
    assert all(len(each) <= 110 for each in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "jamba", "qwen3_next"])
def test_recurrent_model_types_agree(model_type: str, tmp_path: Path, capsys: Any) -> None:
    """Default configs, whose sizes are not those of a small copy; the served description of each is the same."""
    status, found = scaffold(model_type, tmp_path, capsys)
    assert status == 0 and found["error"] < 1e-4 and found["lines"] <= 80
    assert set(found["refused"]) == {"hidden_act"}
    config = tiny_models.read(model_type)
    by_hand = registry.describe(config)
    with registry.using(Path(found["model_file"])):
        written = registry.describe(config)
    assert samples.equal(samples.normal(written), samples.normal(by_hand))


def test_other_names_of_sizes_are_required(tmp_path: Path, capsys: Any) -> None:
    """Falcon's config.json has no intermediate_size."""
    status, found = scaffold("falcon", tmp_path / "out", capsys)
    assert status == 0
    assert 'sizes={"intermediate_size": "ffn_hidden_size"}' in Path(found["model_file"]).read_text()


def test_alibi_is_named_as_unmatched(tmp_path: Path, capsys: Any) -> None:
    tiny("Falcon", alibi=True, num_hidden_layers=1, ffn_hidden_size=80).save_pretrained(tmp_path / "config")
    status, found = scaffold(tmp_path / "config", tmp_path / "out", capsys)
    reason = found["unmatched"][0]["reason"]
    # Slopes of 4 heads over the root of their 16 channels, twice: transformers' mask has them, too.
    assert status == 1 and "(ALiBi), with slopes from 0.00195 to 0.125" in reason


def test_small_slopes_of_alibi_are_seen(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Slopes that change 12 tokens by less than the tolerance change a long context."""
    from transformers.models.mpt import modeling_mpt

    config = tiny("Mpt", d_model=64, n_heads=4, n_layers=1)
    config.save_pretrained(tmp_path / "config")
    usual = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda *a, **k: usual(*a, **k) * 1e-4)
    status, found = scaffold(tmp_path / "config", tmp_path / "out", capsys)
    assert status == 1 and "to 2.5e-05" in found["unmatched"][0]["reason"]


@pytest.mark.parametrize(
    ("model_type", "module", "reason"),
    [
        ("bloom", "BloomAttention", "a bias by the distance of query and key (ALiBi)"),
        ("doge", "DogeAttention", "functions of the model's own, whose mask depends on the values"),
        ("whisper", "WhisperForCausalLM", "its decoder attends to an encoder"),
        ("zamba2", "Zamba2MambaMixer", "a recurrence inside its module"),
    ],
)
def test_reason_names_the_true_obstacle(
    model_type: str, module: str, reason: str, tmp_path: Path, capsys: Any
) -> None:
    status, found = scaffold(model_type, tmp_path, capsys)
    reasons = {u["class"].rpartition(".")[2]: u["reason"] for u in found["unmatched"]}
    assert status == 1 and reason in reasons[module]
    assert not any("does not run" in text or "cannot build" in text for text in reasons.values())


def test_field_without_visible_effect_is_refused(tmp_path: Path, capsys: Any) -> None:
    """The least sum of an expert's scores has an effect only where it is larger than that sum."""
    fields = {"moe_num_experts": 4, "moe_k": 2, "num_hidden_layers": 2, "moe_intermediate_size": 48}
    tiny("Ernie4_5_Moe", **fields).save_pretrained(tmp_path / "config")
    status, found = scaffold(tmp_path / "config", tmp_path / "out", capsys)
    assert status == 0 and found["refused"]["moe_norm_min"] == 1e-12
    assert "rms_norm_eps" not in found["refused"] and "router_aux_loss_coef" not in found["refused"]
    changed = tiny("Ernie4_5_Moe", **fields, moe_norm_min=5.0)
    with (
        registry.using(Path(found["model_file"])),
        pytest.raises(Unsupported, match=r"moe_norm_min=5\.0 is not supported"),
    ):
        registry.describe(changed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FIRST, *KNOWN])
def test_known_architectures_need_no_edit(kind: str, tmp_path: Path, capsys: Any) -> None:
    check(kind, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", HELD_OUT)
def test_other_architectures_agree(model_type: str, tmp_path: Path, capsys: Any) -> None:
    status, found = scaffold(model_type, tmp_path, capsys)
    assert status == 0 and found["error"] < 1e-5 and found["lines"] < 60


@pytest.mark.slow
def test_model_without_window_is_described(tmp_path: Path, capsys: Any) -> None:
    """EXAONE 4's small models have no window, and then all their layers have positions."""
    _, found = scaffold("exaone4", tmp_path, capsys)
    full = tiny("Exaone4", sliding_window=None, layer_types=["full_attention"] * 2)
    by_hand = registry.describe(full)
    with registry.using(Path(found["model_file"])):
        written = registry.describe(full)
    assert by_hand.layers[0].attention.rope is not None
    assert samples.equal(samples.normal(written), samples.normal(by_hand))


@pytest.mark.slow
def test_engine_runs_a_written_file(tmp_path: Path, capsys: Any, greedy: Any, monkeypatch: Any) -> None:
    from fastkernels import LLM, SamplingParams

    monkeypatch.setitem(KINDS, "helium", ("Helium", {}))
    folder = make_tiny(tmp_path / "checkpoint", "helium", "float32")
    _, found = scaffold(folder, tmp_path / "out", capsys)
    prompts = [[7], list(range(10, 73))]
    with registry.using(Path(found["model_file"])):
        llm = LLM(str(folder), device="cpu", max_model_len=256, num_blocks=100)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [greedy(folder, prompt, 8) for prompt in prompts]


def test_wrong_file_is_found(tmp_path: Path) -> None:
    """Logits and the effect of fields are compared, not only loading."""
    found = samples.collect(tiny("Granite", num_hidden_layers=1, residual_multiplier=0.4))
    file = tmp_path / "llm/granite.py"
    text, verified = command.write(file, found)
    assert verified.ok and verified.error < 1e-4
    file.write_text(text.replace("multiplier=config.residual_multiplier", "multiplier=0.4"))
    constant = verification.verify(file, found)
    assert constant.error < 1e-4 and constant.wrong == {"residual_multiplier"} and not constant.ok
    file.write_text(text.replace("config.residual_multiplier", "2 * config.residual_multiplier"))
    assert verification.verify(file, found).error > verification.TOLERANCE
    ours, theirs, none = verification.parameters(file, found.config)
    file.write_text(text.replace("config.intermediate_size", "64"))
    fewer, _, differ = verification.parameters(file, found.config)
    assert ours == theirs and not none and fewer == ours - 3 * 64 * (80 - 64)
    assert list(differ) == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"]


def test_size_without_a_formula_is_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LFM2 rounds the MLP's size up to a multiple, which no formula but its own gives."""
    monkeypatch.setattr(model_file, "MLP_SIZES", ("config.intermediate_size",))
    status, found = scaffold("lfm2", tmp_path, capsys)
    reasons = {entry["path"]: entry["reason"] for entry in found["unmatched"]}
    assert status == 1 and found["model_file"] is None and not list((tmp_path / "llm").glob("*.py"))
    what = "has no formula over the config's fields and depends on block_multiple_of, intermediate_size"
    assert reasons == {"": f"mlp.intermediate {what}"}


def test_other_size_than_that_of_the_config_is_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A formula that holds for small sizes only: the file is removed."""
    monkeypatch.setattr(
        verification, "parameters", lambda *given: (8, 9, {"model.layers.0.mlp": "has 8 parameters, not 9"})
    )
    tiny("Qwen2").save_pretrained(tmp_path / "config")
    status, found = scaffold(tmp_path / "config", tmp_path / "out", capsys)
    assert status == 1 and found["model_file"] is None and not list((tmp_path / "out" / "llm").glob("*.py"))
    assert [(e["path"], e["reason"]) for e in found["unmatched"]] == [
        ("model.layers.0.mlp", "has 8 parameters, not 9")
    ]


# -- what is not matched, and bad input


def tiny(prefix: str, **fields: Any) -> Any:
    import transformers

    cls = getattr(transformers, f"{prefix}Config")
    given = {**SIZES, **fields}
    config = cls(**{k: v for k, v in given.items() if not isinstance(getattr(cls, k, None), property)})
    config.architectures = [f"{prefix}ForCausalLM"]
    return config


def test_unmatched_modules_are_listed(tmp_path: Path, capsys: Any) -> None:
    tiny("Apertus").save_pretrained(tmp_path / "config")
    status, found = scaffold(tmp_path / "config", tmp_path / "out", capsys)
    (missing,) = json.loads((tmp_path / "out/unmatched.json").read_text())
    assert status == 1 and not found["ok"] and found["unmatched"] == [missing]
    assert missing["path"] == "model.layers.0.mlp.act_fn" and missing["class"].endswith("XIELUActivation")
    assert missing["source"].startswith("transformers/activations.py:") and missing["count"] == 2
    assert missing["shapes"] == {"alpha_p": [1], "alpha_n": [1]} and not (tmp_path / "out/llm").exists()


def test_matched_kernels_of_an_unmatched_model_get_tasks(tmp_path: Path, capsys: Any) -> None:
    """Each task runs alone, at the sizes of the config and with a weight for each module that makes the call."""
    tiny("Apertus").save_pretrained(tmp_path / "config")
    status, found = scaffold(tmp_path / "config", tmp_path / "out", capsys, no_tasks=False)
    assert status == 1 and not found["without_task"]
    tasks = {file.stem: runpy.run_path(str(file)) for file in (tmp_path / "out/tasks").iterdir()}
    assert set(tasks) == set(found["tasks"]) == {
        "attention_decode", "attention_prefill", "embedding", "linear", "logits_processor", "rms_norm",
        "rotary_emb", "sampling", "store_kvcache",
    }  # fmt: skip
    for op in ("linear", "rms_norm", "attention_decode", "rotary_emb"):
        assert tasks[op]["task_main"]() == 0
    case = next(c for c in tasks["linear"]["TASK"]["cases"] if c["name"] == "down_proj_decode_32")
    assert case["weight"] == SIZES["num_hidden_layers"]
    shapes = {name: case["arguments"][name]["shape"] for name in ("x", "weight")}
    inner, hidden = SIZES["intermediate_size"], SIZES["hidden_size"]
    assert shapes == {"x": (32, inner), "weight": (hidden, inner)}
    (queries,) = {c["dims"]["heads"] for c in tasks["attention_decode"]["TASK"]["cases"]}
    assert queries == SIZES["num_attention_heads"]


def test_hybrid_model_gets_a_list_and_tasks(tmp_path: Path, capsys: Any) -> None:
    """Nemotron-H has layers of state spaces, experts and attention."""
    status, found = scaffold("nemotron_h", tmp_path, capsys, no_tasks=False)
    reasons = {entry["class"].rpartition(".")[2]: entry["reason"] for entry in found["unmatched"]}
    assert status == 1 and "recurrence" in reasons["NemotronHMamba2Mixer"]
    made = {"attention_decode", "convolution", "grouped_topk", "linear", "rms_norm", "rms_norm_gated"}
    assert made <= set(found["tasks"]) and "relu2" in found["without_task"]
    assert (tmp_path / "tasks/rms_norm_gated.py").exists()


def test_copy_that_does_not_run_is_no_crash(tmp_path: Path, capsys: Any) -> None:
    tiny("xLSTM", num_heads=4, num_blocks=2).save_pretrained(tmp_path / "config")
    status, found = scaffold(tmp_path / "config", tmp_path / "out", capsys)
    assert status == 1 and "recurrence" in found["unmatched"][0]["reason"]


NAMED = {  # {prefix: (fields, module, reason)}
    "HunYuanDenseV1": (
        {"head_dim": 16},
        "model.layers.0.self_attn.query_layernorm",
        "a norm of heads after the rotary embedding",
    ),
    "BitNet": ({}, "model.layers.0.self_attn.attn_sub_norm", "between attention and its output projection"),
    "Olmo": ({}, "model.layers.0.input_layernorm", "it has no weight"),
    "GPT2": ({"n_layer": 1}, "transformer.h.0.attn.c_attn", "its weight is [in, out]"),
    "Afmoe": (
        {"head_dim": 16, "num_dense_layers": 2},
        "model.layers.0.self_attn.gate_proj",
        "multiplied by the sigmoid of this module's output before model.layers.0.self_attn.o_proj",
    ),
}


@pytest.mark.parametrize("prefix", NAMED)
def test_unmatched_part_of_attention_is_named(prefix: str, tmp_path: Path, capsys: Any) -> None:
    fields, path, reason = NAMED[prefix]
    config = tiny(prefix, num_hidden_layers=2, **fields)
    config.architectures = ["GPT2LMHeadModel"] if prefix == "GPT2" else config.architectures
    config.save_pretrained(tmp_path / "config")
    status, found = scaffold(tmp_path / "config", tmp_path / "out", capsys)
    reasons = {entry["path"]: entry["reason"] for entry in found["unmatched"]}
    assert status == 1 and reason in reasons[path]
    assert len({entry["reason"] for entry in found["unmatched"]}) == len(found["unmatched"]) - (
        prefix == "GPT2"
    )


@pytest.mark.slow
def test_sizes_that_a_default_config_leaves_open(tmp_path: Path, capsys: Any) -> None:
    """Ministral's default config has no head_dim, so that transformers cannot build its model."""
    status, found = scaffold("ministral", tmp_path, capsys)
    assert status == 0 and found["parameters"] > 7e9


@pytest.mark.slow
def test_list_of_lists_in_a_config_is_no_crash(tmp_path: Path, capsys: Any) -> None:
    status, found = scaffold("gpt_neo", tmp_path, capsys)
    assert status == 1 and found["unmatched"][0]["class"].endswith("GPTNeoForCausalLM")


def test_type_without_a_default_config_is_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        scaffold("gemma4_assistant", tmp_path, capsys)
    assert "gemma4_assistant: the config cannot be used" in capsys.readouterr().err


def test_existing_file_is_kept(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "llm/qwen2.py"
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(SystemExit):
        scaffold("qwen2", tmp_path, capsys)
    assert "--force" in capsys.readouterr().err and file.read_text() == "mine"


BAD = {
    "no_file": (None, "neither a folder with config.json"),
    "remote_code": (
        {"model_type": "strange", "auto_map": {"AutoConfig": "x.Config"}, "architectures": ["StrangeForCausalLM"]},
        "needs remote code",
    ),
    "unknown_type": ({"model_type": "strange", "architectures": ["S"]}, "no model type 'strange'"),
    "no_language_model": ({"model_type": "vit", "architectures": ["ViTModel"]}, "not a causal language model"),
    "no_layers": ({"model_type": "qwen2", "num_hidden_layers": 0}, "num_hidden_layers=0"),
    "large_part": (  # the sizes of its language model stay: it would take 35 GiB
        {"model_type": "fuyu", "architectures": ["FuyuForCausalLM"]}, "its language model is 'persimmon'",
    ),
    "heads": (
        {
            "model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 4, "hidden_size": 96,
            "num_hidden_layers": 1,
        },
        "num_attention_heads=6",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_config_is_refused(case: str, tmp_path: Path, capsys: Any) -> None:
    fields, message = BAD[case]
    if fields is not None:
        (tmp_path / "config.json").write_text(json.dumps(fields))
    where = tmp_path if fields is not None else tmp_path / "missing"
    with pytest.raises(SystemExit):
        scaffold(where, tmp_path / "out", capsys)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_field_without_formula_is_refused(tmp_path: Path) -> None:
    """StableLM's norms of heads have a weight for each head, which no description expresses."""
    found = samples.collect(tiny("StableLm", num_hidden_layers=1))
    assert found.refused == {"qk_layernorm": False}
    text, verified = command.write(tmp_path / "llm/stablelm.py", found)
    assert "d.refuse(config, qk_layernorm=False)" in text and verified.ok
    other = tiny_models.changed(found.config, qk_layernorm=True)
    with registry.using(tmp_path / "llm/stablelm.py"), pytest.raises(ValueError, match="qk_layernorm=True"):
        registry.describe(other)
