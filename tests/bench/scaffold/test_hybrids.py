"""Hybrids of transformers: the file that `fk-bench scaffold` writes is served, and computes what transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fk_bench.scaffold.command import scaffold_command
from support.splits import IDS, check_logits
from support.tiny import KINDS, make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.plans import build

MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 24, "linear_value_head_dim": 16,
}  # fmt: skip
# kind: (prefix of transformers' classes, fields, the kinds of mixers, a part of the file)
HYBRIDS: dict[str, tuple[str, dict[str, Any], set[type], str]] = {
    "bamba": (
        "Bamba", {**MAMBA2, "mamba_expand": 1, "attn_layer_indices": [1]}, {d.Mamba2, d.Attention},
        "recurrent if i not in config.attn_layer_indices else attention,",
    ),
    "falcon_mamba": (
        "FalconMamba", {"state_size": 12, "time_step_rank": 10}, {d.Mamba},
        'part_norm=d.Norm("unit", config.mixer_rms_eps)',
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA2, "mamba_expand": 1, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 48, "residual_multiplier": 0.4,
        },
        {d.Mamba2, d.Attention}, "multiplier=config.residual_multiplier",
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, "conv_bias": True},
        {d.ShortConv, d.Attention}, "d.gated_size(config)",
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1, **EXPERTS},
        {d.ShortConv, d.Attention}, "d.ShortConv(config.conv_L_cache, channels=config.hidden_size,",
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mamba_num_heads": 8,
            "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "chunk_size": 8,
        },
        {d.Mamba2, d.NoMixer, d.Attention}, "d.NoMixer()",
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {**DELTA, "linear_value_head_dim": 12, "linear_allow_neg_eigval": True},
        {d.GatedDelta, d.Attention},
        "rate_scale=2.0 if config.linear_allow_neg_eigval else 1.0,",
    ),
    "qwen3_5_text": ("Qwen3_5", DELTA, {d.GatedDelta, d.Attention}, "projections=(3, 1, 1, 1),"),
    "qwen3_5_moe_text": (
        "Qwen3_5Moe", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 80}, {d.GatedDelta, d.Attention},
        "shared_gate=True",
    ),
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SPLITS = [[n, len(IDS)] for n in (1, 2, 3, 8, 22)] + [list(range(1, len(IDS) + 1))]


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, (prefix, fields, _, _) in HYBRIDS.items():
        monkeypatch.setitem(KINDS, name, (prefix, fields))
    yield


def scaffold(folder: Path, out: Path, capsys: Any) -> tuple[int, dict[str, Any]]:
    status = scaffold_command(str(folder), out, True, False)
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_is_written_and_served(
    name: str, tmp_path: Path, capsys: Any, oracle: Any, greedy: Any, kinds: None
) -> None:
    """Logits of any split within 1e-4; greedy tokens with a snapshot's prefix, and after preemption."""
    _, _, mixers, part = HYBRIDS[name]
    folder = make_tiny(tmp_path / "checkpoint", name, "float32")
    status, found = scaffold(folder, tmp_path / "out", capsys)
    assert status == 0 and found["ok"] and not found["unmatched"] and found["error"] < 1e-4
    text = Path(found["model_file"]).read_text()
    assert part in " ".join(text.split()) and len(text.splitlines()) <= 80
    assert all(len(line) <= 110 for line in text.splitlines())
    with registry.using(Path(found["model_file"])):
        check_logits(folder, oracle, SPLITS)
        llm = LLM(
            str(folder),
            device="cpu",
            block_size=4,
            max_num_seqs=4,
            max_model_len=64,
            num_blocks=60,
            num_snapshots=4,
        )
        described = registry.describe(build.load_config(folder))
        assert {type(x.attention) for x in described.layers} == mixers
        stem = [(i * 17) % 500 for i in range(20)]
        cached = []
        for prompt in ([*stem, 3, 4], [*stem, 5], [*stem, 6, 7]):
            output = llm.generate([prompt], GREEDY)[0]
            cached.append(output.num_cached_tokens)
            assert output.outputs[0].token_ids == greedy(folder, prompt, 12)
        assert cached == [0, 0, 20]
        scheduler = llm.llm_engine.scheduler
        prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
        for i, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(i), prompt, GREEDY)
        sequences = [llm.llm_engine.requests[str(i)].sequences[0] for i in range(2)]
        for step in range(60):
            if not llm.llm_engine.has_unfinished_requests():
                break
            llm.llm_engine.step()
            if step == 4:
                scheduler._preempt(scheduler.running.pop())
        assert scheduler.num_preemptions == 1
        assert [s.output_token_ids for s in sequences] == [greedy(folder, p, 12) for p in prompts]


def test_kind_of_layer_that_a_model_lacks_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = make_tiny(tmp_path, "qwen2", "float32", layer_types=["full_attention", "full_attention"])
    for kind in ("conv", "mlp"):
        config = AutoConfig.from_pretrained(folder)
        config.layer_types = [kind, "full_attention"]
        with pytest.raises(
            Unsupported, match=f"layer_types has {kind}, which Qwen2ForCausalLM does not have"
        ):
            registry.describe(config)
