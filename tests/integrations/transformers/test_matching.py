"""Modules of transformers matched with ops: by class, signature and probe."""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest
import torch
from fk_integrations.transformers import attention_graph, matching, probes
from fk_integrations.transformers.forward_code import calls
from fk_integrations.transformers.matching import Kind, match
from torch import nn

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8,
}  # fmt: skip


def modules(model_type: str, cls: str, **changes: Any) -> dict[str, nn.Module]:
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    with torch.device("meta"):
        model = getattr(transformers, cls)._from_config(config)
    return {type(m).__name__: m for m in model.modules()}


def ops(found: dict[str, nn.Module]) -> dict[str, str]:
    """{class: op} of the strict matches with an op."""
    matches = {name: match(module) for name, module in found.items()}
    return {name: m.op for name, m in matches.items() if m.strict and m.kind is Kind.OP}


def test_llama_is_matched_in_all_three_ways() -> None:
    found = modules("llama", "LlamaForCausalLM")
    assert all(match(module).strict for module in found.values())
    assert ops(found) == {
        "Embedding": "embedding", "Linear": "linear", "LlamaAttention": "attention", "LlamaMLP": "gated_mlp",
        "LlamaRMSNorm": "rms_norm", "LlamaRotaryEmbedding": "rotary_emb",
    }  # fmt: skip


def test_router_arguments_come_from_the_probe() -> None:
    found = modules(
        "qwen3_moe", "Qwen3MoeForCausalLM", num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )
    router = match(found["Qwen3MoeTopKRouter"])
    assert (router.op, router.arguments) == ("topk_softmax", {"topk": 2, "renormalize": True})
    assert match(found["Qwen3MoeExperts"]).op == "fused_experts"
    sigmoid = match(
        modules("minimax_m2", "MiniMaxM2ForCausalLM", num_local_experts=8, num_experts_per_tok=2)[
            "MiniMaxM2TopKRouter"
        ]
    )
    assert sigmoid.op == "grouped_topk" and sigmoid.arguments["scoring_func"] == "sigmoid"


@pytest.mark.parametrize(
    "model_type, cls, module, needs",
    [
        ("gpt_oss", "GptOssForCausalLM", "GptOssAttention", "attention with s_aux"),
        ("gpt_oss", "GptOssForCausalLM", "GptOssExperts", "experts called in another way"),
    ],
)
def test_other_kind_is_matched_by_class_only(model_type: str, cls: str, module: str, needs: str) -> None:
    found = match(modules(model_type, cls)[module])
    assert found.loose and not found.strict and found.needs == needs


@pytest.mark.parametrize(
    ("model_type", "cls", "module", "needs"),
    [
        ("rwkv", "RwkvForCausalLM", "RwkvSelfAttention", "recurrence"),
        ("mra", "MraModel", "MraSelfAttention", "kernel of a library"),
    ],
)
def test_primitive_without_an_op_is_missing(model_type: str, cls: str, module: str, needs: str) -> None:
    found = match(modules(model_type, cls)[module])
    assert found.kind is Kind.MISSING and found.needs == needs and not found.loose


@pytest.mark.parametrize(
    ("model_type", "cls", "module", "op", "function"),
    [
        ("mamba", "MambaForCausalLM", "MambaMixer", "mamba_scan", "mamba_selective_scan"),
        (
            "recurrent_gemma", "RecurrentGemmaForCausalLM", "RecurrentGemmaRglru", "gated_linear_attention",
            "RecurrentGemmaRglru._rnn_scan",
        ),
        ("xlstm", "xLSTMForCausalLM", "xLSTMBackend", "gated_linear_attention", "mlstm_recurrent_sequence_native"),
        (
            "minimax", "MiniMaxForCausalLM", "MiniMaxLightningAttention", "gated_linear_attention",
            "MiniMaxLightningAttention.decay_factors",
        ),
    ],
)  # fmt: skip
def test_recurrence_is_matched_until_its_code_changes(
    model_type: str, cls: str, module: str, op: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = modules(model_type, cls)[module]
    found = match(made)
    assert (found.op, found.loose, found.strict) == (op, True, False)
    path = f"transformers.models.{model_type}.modeling_{model_type}.{function}"
    theirs = pkgutil.resolve_name(path)
    monkeypatch.setattr(path, lambda *x, **named: [2 * out for out in theirs(*x, **named)])
    assert matching._match(made).needs == "recurrence"


def test_recurrences_are_matched_by_their_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    delta = qwen3_next.Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**SMALL), 0)
    mixer = modeling_mamba2.Mamba2Mixer(
        transformers.Mamba2Config(hidden_size=32, num_heads=4, head_dim=16, n_groups=2, state_size=8), 0
    )
    from transformers.models.bamba.modeling_bamba import BambaMixer

    unnamed = BambaMixer(
        transformers.BambaConfig(**SMALL, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2), 0
    )
    for module, op in ((delta, "gated_delta_rule"), (mixer, "ssd"), (unnamed, "ssd")):
        found = match(module)
        assert (found.op, found.loose, found.strict) == (op, True, False)
    scan, rule = modeling_mamba2.mamba2_chunk_scan, qwen3_next.torch_recurrent_gated_delta_rule
    monkeypatch.setattr(
        modeling_mamba2, "mamba2_chunk_scan", lambda *x, **named: [2 * out for out in scan(*x, **named)]
    )
    monkeypatch.setattr(
        qwen3_next,
        "torch_recurrent_gated_delta_rule",
        lambda q, k, v, g, *x, **named: rule(q, k, v, 2 * g, *x, **named),
    )
    for module in (delta, mixer):
        assert matching._match(module).needs == "recurrence"


def test_length_regulator_is_no_recurrence() -> None:
    with torch.device("meta"):
        model = transformers.VitsModel(transformers.VitsConfig())
    assert match(model).op == "batched_matmul"


def test_lstm_is_its_op_unless_it_projects_its_outputs() -> None:
    two = nn.LSTM(4, 4, 2, bidirectional=True, bias=False, device="meta")
    assert (match(two).op, match(two).strict) == ("lstm", True)
    assert match(nn.LSTM(4, 4, proj_size=2, device="meta")).needs == "recurrence"


def test_cells_of_recurrences_are_missing() -> None:
    assert match(nn.GRUCell(4, 4, device="meta")).needs == "recurrence"


def test_patch_convolution_is_linear() -> None:
    assert match(nn.Conv2d(3, 32, 4, stride=4, device="meta")).op == "linear"
    assert match(nn.Conv2d(3, 32, 4, stride=2, device="meta")).op == "convolution"


def test_probe_rejects_a_norm_with_other_numbers() -> None:
    class DoubledRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * torch.rsqrt(2 * x.square().mean(-1, keepdim=True) + self.eps)

    class PlainRMSNorm(DoubledRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    assert match(PlainRMSNorm()).op == "rms_norm" and match(PlainRMSNorm()).strict
    assert match(DoubledRMSNorm()).loose and not match(DoubledRMSNorm()).strict


def test_attention_probe_tells_causal_from_other_scores() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks
    from transformers.models.llama.modeling_llama import eager_attention_forward

    assert probes.safely(probes.attention_probe, eager_attention_forward, None, None)
    assert probes.safely(probes.dense_attention_probe, eager_attention_forward)
    assert not probes.safely(probes.attention_probe, with_sinks, None, None)
    assert not probes.safely(probes.dense_attention_probe, with_sinks)


@pytest.mark.parametrize(
    ("model_type", "cls", "module"),
    [("bert", "BertModel", "BertSelfAttention"), ("siglip_vision_model", "SiglipVisionModel", "SiglipAttention"),
     ("bart", "BartModel", "BartAttention"), ("t5", "T5Model", "T5Attention")],
)  # fmt: skip
def test_attention_without_a_cache_is_dense(model_type: str, cls: str, module: str) -> None:
    found = match(modules(model_type, cls)[module])
    assert found.strict and found.op in ("attention_dense", "attention")


def test_skipped_branches_are_not_read() -> None:
    made = modules("timesfm", "TimesFmModelForPrediction", num_attention_heads=4)
    assert "conv1d" not in calls(made["TimesFmModelForPrediction"])


def test_results_are_kept_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    found = modules("llama", "LlamaForCausalLM")["LlamaRMSNorm"]
    first = match(found)
    monkeypatch.setattr(matching, "_match", lambda module: pytest.fail("matched again"))
    assert match(found) is first


class Written(nn.Module):
    """Attention whose scores `score` changes before the softmax."""

    def __init__(self, score: Any) -> None:
        super().__init__()
        self.score, self.head_dim = score, 8
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (f(hidden_states).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = self.score(q @ k.transpose(-1, -2))
        scores = scores if attention_mask is None else scores + attention_mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("score", "same"),
    [
        (lambda s: s / 8**0.5, True),
        (lambda s: s * torch.tensor([0.5, 2.0]).view(2, 1, 1), True),  # a scale for each head
        (lambda s: s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -1e9), True),
        (lambda s: torch.tanh(s / 2) * 2, False),
        (lambda s: s.square(), False),
    ],
)
def test_written_attention_is_found_in_its_graph(score: Any, same: bool) -> None:
    torch.manual_seed(0)
    assert attention_graph.computes_attention(Written(score))[0] is same


def test_attention_that_needs_its_scores_again_is_not_dense() -> None:
    class Gated(Written):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                f(hidden_states).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)
            )
            scores = q @ k.transpose(-1, -2)
            gate = scores.logsumexp(-1, keepdim=True).sigmoid()
            return ((scores.softmax(-1) @ v) * gate).transpose(1, 2).flatten(2)

    assert not attention_graph.computes_attention(Gated(None))[0]


@pytest.mark.parametrize(
    "made",
    [
        nn.Conv1d(8, 8, 5, stride=2, padding=2, dilation=3, groups=4),
        nn.Conv2d(6, 4, 3, padding="same", padding_mode="zeros"),
        nn.ConvTranspose2d(8, 6, (4, 3), stride=2, padding=1, output_padding=1, groups=2),
        nn.BatchNorm2d(8),
        nn.InstanceNorm1d(8),
        nn.GroupNorm(4, 8),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool1d(4, 3, 1, count_include_pad=False),
        nn.Upsample(scale_factor=1.7, mode="bilinear", align_corners=True),
        nn.MultiheadAttention(16, 2, batch_first=True),
    ],
    ids=lambda made: type(made).__name__,
)
def test_modules_of_torch_are_matched_by_probe(made: nn.Module) -> None:
    assert match(made).strict and match(made).kind is Kind.OP


@pytest.mark.parametrize(
    "made", [nn.MaxPool2d(2, dilation=2), nn.AdaptiveAvgPool2d(3), nn.Upsample(size=4, mode="nearest-exact")]
)
def test_settings_that_no_op_has_are_no_match(made: nn.Module) -> None:
    assert match(made).loose and not match(made).strict


def test_rotation_probe_rejects_another_rotation() -> None:
    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return tuple(t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))

    def mirror(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return tuple(t * cos.unsqueeze(1) + t.flip(-1) * sin.unsqueeze(1) for t in (q, k))

    assert probes.safely(probes.rotation_probe, rotate)
    assert not probes.safely(probes.rotation_probe, mirror)
