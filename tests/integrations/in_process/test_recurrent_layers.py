"""Recurrent layers of transformers: the functions that their forwards call are ours, in models on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastkernels
from fastkernels.core import registry
from fastkernels.overrides.kit.arguments import UnsupportedArgument

transformers = pytest.importorskip("transformers", "5.24")

_TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA = {
    **_TEXT, **_LINEAR, **_EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2}
# kind: (config, the op of its recurrence, its layers with one). Bamba and Qwen 3.5 have no target of their own.
MODELS: dict[str, tuple[dict[str, Any], str, int]] = {
    "Mamba": ({**_TEXT, "num_hidden_layers": 2, "state_size": 12}, "mamba_scan", 2),
    "Mamba2": (
        {**_TEXT, "num_hidden_layers": 2, "state_size": 12, "num_heads": 8, "head_dim": 16, "n_groups": 2,
         "chunk_size": 4},
        "ssd", 2,
    ),
    "Jamba": (
        {**_TEXT, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_experts": 2, "mamba_d_state": 12,
         "mamba_dt_rank": 10, "attn_layer_period": 2, "attn_layer_offset": 1},
        "mamba_scan", 1,
    ),
    "Bamba": (
        {**_TEXT, **_MAMBA2, "num_hidden_layers": 2, "num_key_value_heads": 2, "attn_layer_indices": [1]}, "ssd", 1,
    ),
    "Qwen3Next": (_DELTA, "gated_delta_rule", 1),
    "Qwen3_5Text": (_DELTA, "gated_delta_rule", 1),
    "KimiLinear": (
        {**_TEXT, **_LINEAR, **_EXPERTS, "mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4,
         "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "linear_head_dim": 24,
         "linear_num_heads": 4, "num_experts_per_token": 2, "bos_token_id": 1, "eos_token_id": 2},
        "kda", 1,
    ),
}  # fmt: skip


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind][0])
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()


@torch.no_grad()
def outputs(model: Any) -> list[torch.Tensor]:
    """Logits of a batch of prompts, of a padded one, and of a prompt with four tokens after it."""
    ids = torch.arange(1, 40).reshape(3, 13)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    found = model.generate(
        ids[:2], attention_mask=torch.ones_like(ids[:2]), max_new_tokens=4, do_sample=False,
        return_dict_in_generate=True, output_logits=True, eos_token_id=96,
    )  # fmt: skip
    padded = model(ids, attention_mask=mask).logits[mask.bool()]
    return [model(ids).logits, padded, *found.logits]


@pytest.mark.parametrize("kind", MODELS)
def test_recurrent_layers_are_ours_and_undone(kind: str) -> None:
    model, (_, op, layers) = model_of(kind), MODELS[kind]
    before, classes = outputs(model), [type(m) for m in model.modules()]
    report = fastkernels.patch(model, ops=["causal_conv1d", op])
    after = outputs(model)
    rows = {(r.op, "update" in r.host_class or "recurrent" in r.host_class): r for r in report.refresh().rows}
    assert set(rows) == {(o, one) for o in ("causal_conv1d", op) for one in (False, True)}
    for row in rows.values():
        assert row.modules == layers and row.proof == "calls", row
        assert row.calls == layers * 3  # two prompts and the first step; three more steps
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), before, strict=True))


def test_recurrences_stay_with_the_host_unless_requested() -> None:
    with fastkernels.patch(model_of("Mamba2")) as report:
        found = {r.op: str(r) for r in report.rows if r.op in ("ssd", "causal_conv1d")}
    assert set(found) == {"ssd", "causal_conv1d"} and all("on request" in line for line in found.values())


def test_another_model_of_the_same_file_stays_the_hosts() -> None:
    patched, other = model_of("Mamba2"), model_of("Mamba2")
    with fastkernels.patch(patched, ops="ssd") as report:
        outputs(other)
        assert all(row.calls == 0 for row in report.refresh().rows)
        outputs(patched)
        assert all(row.calls for row in report.refresh().rows)


def test_training_runs_the_hosts_recurrence() -> None:
    model = model_of("Qwen3Next")
    with fastkernels.patch(model, ops="gated_delta_rule") as report:
        model(torch.arange(1, 14)[None]).logits.sum().backward()
        row = next(r for r in report.refresh().rows if "chunk" in r.host_class)
        assert any("needs gradients" in reason for reason in row.fallbacks)
    assert model.model.layers[0].linear_attn.A_log.grad is not None


def test_refused_arguments_run_the_hosts_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Mamba2")
    for mixer in (m for m in model.modules() if type(m).__name__ == "Mamba2Mixer"):
        mixer.activation = "gelu"
    before = outputs(model)
    with fastkernels.patch(model, ops="causal_conv1d") as report:
        assert all(torch.equal(a, b) for a, b in zip(outputs(model), before, strict=True))
        rows = report.refresh().rows
        assert all(not r.calls and "activation='gelu' is not silu" in next(iter(r.fallbacks)) for r in rows)


@pytest.mark.parametrize(
    ("op", "function", "given", "line"),
    [
        ("ssd", "transformers_mamba2_chunk_scan", {"dt_softplus": False}, "dt_softplus=False"),
        ("mamba_scan", "transformers_mamba_selective_scan", {"seq_idx": 3}, "seq_idx=3"),
        ("gated_delta_rule", "transformers_chunk_gated_delta_rule", {"cu_seqlens": torch.ones(2)}, "cu_seqlens is"),
    ],
)  # fmt: skip
def test_unsupported_arguments_are_named(op: str, function: str, given: dict[str, Any], line: str) -> None:
    x = [torch.randn(1, 2, 4, 8)] * (6 if op == "ssd" else 5)
    with pytest.raises(UnsupportedArgument, match=line):
        registry.op_class(op, function)(*x, **given)
