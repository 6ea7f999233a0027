"""Real transformers models, patched in this process: tiny and random, float32 and bfloat16."""

from __future__ import annotations

import functools
import sys
from types import FunctionType
from typing import Any

import pytest
import torch
from fk_integrations.patching.apply import apply
from fk_integrations.transformers.host import TransformersAdapter

import fastkernels
from fastkernels import capture
from fastkernels.core import registry
from fastkernels.patch import PatchError, Request

transformers = pytest.importorskip("transformers")
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm  # noqa: E402

SIZES = {
    "vocab_size": 97, "hidden_size": 72, "intermediate_size": 130, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 18, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def tiny(kind: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(1, 40).reshape(3, 13)
    with torch.no_grad():
        return model(ids).logits


# rms_norm: two per layer and the last; Qwen3 has two more per layer, on queries and keys
@pytest.mark.parametrize(("kind", "norms"), [("Llama", 5), ("Mistral", 5), ("Qwen2", 5), ("Qwen3", 9)])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_patch_and_undo(kind: str, norms: int, dtype: torch.dtype, atol: float) -> None:
    model = tiny(kind, dtype)
    before, classes = logits(model), [type(m) for m in model.modules()]
    report = fastkernels.patch(model)
    after = logits(model)
    rows = {r.op: r for r in report.refresh().rows}
    assert rows["rms_norm"].modules == norms and rows["rms_norm"].calls == norms
    assert rows["gated_mlp"].modules == 2 and report.version == transformers.__version__
    assert rows["rms_norm"].proof == "calls"
    torch.testing.assert_close(after, before, atol=atol, rtol=atol)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(logits(model), before)
    assert all("_fastkernels_patched" not in vars(m) for m in model.modules())


class OddRMSNorm(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    """A norm that computes what no op does."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).abs()


def test_norms_of_an_unknown_forward_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OddRMSNorm, "__module__", "transformers.models.odd.modeling_odd")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.__class__ = OddRMSNorm
    found = r"5 unsupported: .*OddRMSNorm, whose forward is not one that rms_norm replaces"
    with pytest.raises(PatchError, match=found):
        fastkernels.patch(model, ops="rms_norm")


_T5 = {
    "vocab_size": 97, "d_model": 72, "d_kv": 18, "d_ff": 130, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip
_GPT2 = {"vocab_size": 97, "n_embd": 72, "n_layer": 2, "n_head": 4, "n_positions": 64}
_BERT = {
    "vocab_size": 97, "hidden_size": 72, "intermediate_size": 130, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_CLIP = {**_BERT, "projection_dim": 24, "max_position_embeddings": 64}
_NEMOTRON = {**SIZES, "hidden_act": "relu2"}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 36, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2}
_BAMBA = {**SIZES, **_MAMBA, "attn_layer_indices": [1]}
_ZAMBA2 = {
    **SIZES, "mamba_d_state": 8, "mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 4, "mamba_headdim": 36,
    "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "use_mem_rope": False,
}  # fmt: skip
_QWEN3_NEXT = {
    **SIZES, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip


# T5: two norms per encoder layer, three per decoder layer, one last norm in each; v1.1's MLPs are gated by gelu_new
@pytest.mark.parametrize(
    ("cls", "config", "expected"),
    [
        ("T5ForConditionalGeneration", _T5, {"t5_layer_norm": 12}),
        (
            "T5ForConditionalGeneration",
            {**_T5, "feed_forward_proj": "gated-gelu"},
            {"t5_layer_norm": 12, "gelu": 4},
        ),
        (
            "UMT5ForConditionalGeneration",
            {**_T5, "feed_forward_proj": "quick_gelu"},
            {"t5_layer_norm": 12, "quick_gelu": 4},
        ),
        ("GPT2LMHeadModel", _GPT2, {"gelu": 2, "layer_norm": 5}),
        ("BertModel", _BERT, {"gelu": 2, "layer_norm": 5}),
        ("CLIPTextModelWithProjection", _CLIP, {"quick_gelu": 2, "layer_norm": 5}),
        ("NemotronForCausalLM", _NEMOTRON, {"relu2": 2, "layer_norm": 5, "rotary_emb": 2}),
        ("Gemma2ForCausalLM", SIZES, {"gemma_rms_norm": 9, "gated_gelu_mlp": 2, "rotary_emb": 2}),
        ("Gemma3ForCausalLM", SIZES, {"gemma_rms_norm": 13, "gated_gelu_mlp": 2, "rotary_emb": 2}),
        ("Olmo2ForCausalLM", SIZES, {"rms_norm": 9, "gated_mlp": 2, "rotary_emb": 2}),
        ("OlmoForCausalLM", SIZES, {"layer_norm": 5, "gated_mlp": 2, "rotary_emb": 2}),
        ("CohereForCausalLM", SIZES, {"layer_norm": 3, "gated_mlp": 2, "rotary_emb": 2}),
        ("Phi3ForCausalLM", SIZES, {"rms_norm": 5, "gated_mlp": 2, "rotary_emb": 2}),
        ("HeliumForCausalLM", SIZES, {"rms_norm": 5, "gated_mlp": 2}),
        ("Zamba2ForCausalLM", _ZAMBA2, {"gelu": 1, "rms_norm": 5, "rms_norm_gated": 2}),
        ("BambaForCausalLM", _BAMBA, {"gated_mlp": 2, "rms_norm": 5, "rms_norm_gated": 1, "rotary_emb": 1}),
        (
            "Qwen3NextForCausalLM", _QWEN3_NEXT,
            {"gated_mlp": 2, "gemma_rms_norm": 7, "rms_norm_gated": 1, "rotary_emb": 1},
        ),
    ],
    ids=[
        "t5", "t5-v1.1", "umt5", "gpt2", "bert", "clip", "nemotron", "gemma2", "gemma3", "olmo2", "olmo", "cohere",
        "phi3", "helium", "zamba2", "bamba", "qwen3-next",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_norms_and_activations_of_other_models(
    cls: str, config: dict, expected: dict[str, int], dtype: torch.dtype, atol: float
) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, cls)
    model = kind(kind.config_class(**config)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    ids = torch.arange(1, 40).reshape(3, 13)
    more = {"decoder_input_ids": ids.flip(0)} if "T5" in cls else {}

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, **more)[0]

    before, classes = run(), [type(m) for m in model.modules()]
    report = fastkernels.patch(model)
    assert {r.op: r.modules for r in report.active} == expected
    after = run()
    calls = {r.op: r.calls for r in report.refresh().active}
    assert calls == expected and report.verified
    assert after.dtype == before.dtype
    torch.testing.assert_close(after, before, atol=atol, rtol=atol)
    report.undo()
    assert [type(m) for m in model.modules()] == classes and torch.equal(run(), before)


def test_patch_of_requested_ops_as_a_context_manager() -> None:
    model = tiny("Llama")
    with fastkernels.patch(model, ops=["rms_norm"]) as report:
        assert {r.op for r in report.active} == {"rms_norm"}
        assert type(model.model.norm) is not LlamaRMSNorm and isinstance(model.model.norm, LlamaRMSNorm)
        assert type(model.model.layers[0].mlp) is LlamaMLP
    assert type(model.model.norm) is LlamaRMSNorm


def test_a_weight_of_another_dtype_keeps_the_hosts_result_dtype() -> None:
    model = tiny("Llama")
    norm, x = model.model.norm, torch.randn(5, 72).bfloat16()
    expected = norm(x)
    with fastkernels.patch(model, ops=["rms_norm"]):
        found = norm(x)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1.6e-2, rtol=1.6e-2)


def test_mlps_with_other_activations_are_left_alone() -> None:
    config = transformers.LlamaConfig(**{**SIZES, "hidden_act": "relu2"})
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(PatchError, match="act_fn is ReLUSquaredActivation, not SiLU"):
        fastkernels.patch(model, ops=["gated_mlp"])
    assert type(model.model.layers[0].mlp) is LlamaMLP


def test_gelu_inside_a_patched_mlp_is_left_to_it() -> None:
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES)).eval()
    with fastkernels.patch(model) as report:
        (row,) = [r for r in report.rows if r.op == "gelu"]
        assert row.state == "off" and "our gated_gelu_mlp computes it" in row.reason
        assert type(model.model.norm) is not GemmaRMSNorm and isinstance(model.model.norm, GemmaRMSNorm)


def test_classes_are_recognized_by_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters' names and comments do not matter; helper methods do."""

    class Renamed(GemmaRMSNorm):
        def _norm(self, y):
            return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)

        def forward(self, y):
            output = self._norm(y.float())  # as Gemma's
            output = output * (1.0 + self.weight.float())
            return output.type_as(y)

    class Centered(Renamed):
        def _norm(self, y):
            return (y - y.mean(-1, keepdim=True)) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)

        forward = Renamed.forward

    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES)).eval()
    for cls, there in ((Renamed, True), (Centered, False)):
        cls.__module__, cls.__qualname__ = GemmaRMSNorm.__module__, cls.__name__
        monkeypatch.setattr(sys.modules[cls.__module__], cls.__name__, cls, raising=False)
        model.model.norm.__class__ = cls
        with fastkernels.patch(model, ops=["gemma_rms_norm"]) as report:
            assert (cls.__name__ in {r.host_class for r in report.active}) == there
        assert type(model.model.norm) is cls


def test_module_patched_by_other_code_stays() -> None:
    model = tiny("Llama")
    model.model.norm.forward = lambda x: x
    report = fastkernels.patch(model, ops=["rms_norm"])
    (row,) = report.rows
    assert row.modules == 4 and "replaced by other code" in row.reason
    report.undo()


def test_class_wrapped_by_other_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    fastkernels.patch(model, ops=["rms_norm"]).undo()  # the class was recognized once, before the change
    stock = LlamaRMSNorm.forward

    @functools.wraps(stock)
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return stock(self, x)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    with pytest.raises(PatchError, match="nothing to patch"):
        fastkernels.patch(model, ops=["rms_norm"])


def test_batch_invariant_host_gets_only_invariant_ops() -> None:
    class Invariant(TransformersAdapter):
        def batch_invariant(self) -> str:
            return "--enable-deterministic-inference"

    rows = {r.op: r for r in apply(Invariant(), tiny("Llama"), Request("patch")).rows}
    assert rows["rms_norm"].modules == 5
    assert rows["gated_mlp"].state == "off" and "depend on the batch" in rows["gated_mlp"].reason
    invariant = [name for name in registry.op_names() if registry.get(name).batch_invariant]
    assert not {"linear", "attention", "attention_decode", "attention_prefill"} & set(invariant)


def test_a_second_patch_is_refused_until_undo() -> None:
    model = tiny("Llama")
    with fastkernels.patch(model), pytest.raises(PatchError, match="undo that patch first"):
        fastkernels.patch(model)
    fastkernels.patch(model).undo()


def test_a_failing_candidate_leaves_everything_as_it_was(tmp_path) -> None:
    model = tiny("Llama")
    before, classes = logits(model), [type(m) for m in model.modules()]
    path = tmp_path / "candidate.py"
    path.write_text("import nothing_of_that_name\n")
    with pytest.raises((PatchError, ValueError), match="nothing_of_that_name"):
        fastkernels.patch(model, candidates={"rms_norm": str(path)})
    assert [type(m) for m in model.modules()] == classes and torch.equal(logits(model), before)


def test_patched_rotation_leaves_other_models_alone() -> None:
    one, other = tiny("Llama"), tiny("Llama")
    before = logits(one)
    attention = [layer.self_attn for layer in one.model.layers]
    stock, function = type(attention[0]), modeling_llama.apply_rotary_pos_emb
    with fastkernels.patch(one, ops=["rotary_emb"]) as report:
        (row,) = report.active
        assert (row.modules, row.host_class) == (2, "apply_rotary_pos_emb")
        assert all(type(m) is not stock and isinstance(m, stock) for m in attention)
        torch.testing.assert_close(logits(one), before, atol=2e-5, rtol=2e-5)
        logits(other)
        assert report.refresh().active[0].calls == 2
        torch.compiler.reset()
        compiled = torch.compile(one, backend="aot_eager")
        torch.testing.assert_close(logits(compiled), before, atol=2e-5, rtol=2e-5)
        assert report.refresh().active[0].calls > 2
    assert {type(m) for m in attention} == {stock} and torch.equal(logits(one), before)
    assert modeling_llama.apply_rotary_pos_emb is function


def test_a_patched_norm_compiles_by_default() -> None:
    """With Inductor, and without a residual, which is what the op would change."""
    model = tiny("Llama")
    norm = model.model.norm
    x = torch.randn(2, 5, norm.weight.numel())
    before = norm(x)
    with fastkernels.patch(model, ops=["rms_norm"]) as report, torch.no_grad():
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(norm, fullgraph=True)(x), before)
        assert report.refresh().active[0].calls == 1
    torch.compiler.reset()
    assert torch.equal(norm(x), before)


def test_rotation_by_other_tables_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies that do not repeat in both halves, and a function that was replaced."""
    model = tiny("Llama")

    class LlamaRotaryEmbedding(type(model.model.rotary_emb)):  # type: ignore[misc]
        """Of the file of Llama's model, without its text."""

    LlamaRotaryEmbedding.__module__ = modeling_llama.__name__
    model.model.rotary_emb.__class__ = LlamaRotaryEmbedding
    with pytest.raises(PatchError, match="nothing to patch"):
        fastkernels.patch(model, ops=["rotary_emb"])
    stock = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", functools.partial(stock))
    with pytest.raises(PatchError, match="nothing to patch"):
        fastkernels.patch(tiny("Llama"), ops=["rotary_emb"])


def renames_an_argument(forward: Any) -> Any:
    """A decorator as those of transformers, which change keyword arguments."""

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "older" in kwargs:
            kwargs["past_key_values"] = kwargs.pop("older")
        return forward(*args, **kwargs)

    return renamed


def decorated(file: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Llama's attention class, whose forward has a decorator of that file."""
    cls = modeling_llama.LlamaAttention
    decorate = FunctionType(
        renames_an_argument.__code__, {"functools": functools, "__name__": file, "Any": Any}
    )
    monkeypatch.setattr(cls, "forward", decorate(cls.forward))
    return cls


def test_rotation_under_a_decorator_of_the_host_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = decorated("transformers.utils.deprecation", monkeypatch)
    model = tiny("Llama")
    before, stock = logits(model), cls.forward
    with fastkernels.patch(model, ops=["rotary_emb"], strict=True) as report:
        assert type(model.model.layers[0].self_attn).forward is not stock
        torch.testing.assert_close(logits(model), before, atol=2e-5, rtol=2e-5)
        attention = model.model.layers[0].self_attn
        tables = tuple(torch.ones(1, 3, 18) for _ in range(2))
        with torch.no_grad():
            attention(torch.ones(1, 3, 72), tables, None, older=None)  # the decorator still runs
        assert report.refresh().active[0].calls == 3
    assert cls.forward is stock and torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", ["decorator", "function", "tables"])
def test_unrecognized_rotation_is_an_error_if_strict(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a decorator of other code, of a function that other code replaced, or under an unknown name."""
    if kind == "decorator":
        decorated("tracer", monkeypatch)
    elif kind == "function":
        stock = functools.partial(modeling_llama.apply_rotary_pos_emb)
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", stock)
    else:
        cls, stock = modeling_llama.LlamaAttention, modeling_llama.LlamaAttention.forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return stock(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", forward)
    ops = ["rms_norm", "rotary_emb"] if kind != "tables" else ["rotary_emb"]
    found = (
        "LlamaRotaryEmbedding, whose tables"
        if kind == "tables"
        else "LlamaAttention, whose apply_rotary_pos_emb"
    )
    with pytest.raises(PatchError, match=found):
        fastkernels.patch(tiny("Llama"), ops=ops, strict=True)
    if kind != "tables":
        with fastkernels.patch(tiny("Llama")) as report:
            (row,) = [row for row in report.rows if row.op == "rotary_emb"]
            assert row.state == "off" and found in row.reason and "2 unsupported" in row.reason


def test_function_replaced_after_a_patch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny("Llama"), []
    stock = modeling_llama.apply_rotary_pos_emb

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return stock(*args, **kwargs)

    before = logits(model)
    with fastkernels.patch(model, ops=["rotary_emb"]) as report:
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", replaced)
        assert torch.equal(logits(model), before) and len(calls) == 2
        (row,) = report.refresh().active
        assert row.calls == 0 and list(row.fallbacks.values()) == [2]


def test_a_module_around_a_model_and_a_name() -> None:
    model = tiny("Llama")
    wrapped = torch.nn.Sequential(model)
    with fastkernels.patch(wrapped, ops=["rms_norm"]) as report:
        assert report.patched_modules == 5
    with pytest.raises(PatchError, match="pass the model"):
        fastkernels.patch("transformers")


def test_calls_are_recorded_with_how_modules_were_made() -> None:
    with capture.record_modules() as modules:
        model = tiny("Qwen3")
    before = logits(model)
    with fastkernels.patch(model, ops=["rms_norm"]), capture.record() as recording:
        torch.testing.assert_close(logits(model), before, atol=2e-5, rtol=2e-5)
    calls = recording.to_dict()[0]["ops"]["rms_norm"]["calls"]
    shapes = {tuple(c["args"][0]["shape"]): c["count"] for c in calls}
    assert shapes == {
        (3, 13, 72): 5,
        (3, 13, 4, 18): 2,
        (3, 13, 2, 18): 2,
    }  # queries and keys have a norm of their own
    norms = {
        m["args"]["hidden_size"]: m["count"]
        for m in modules.rows(model)
        if m["cls"].endswith(":Qwen3RMSNorm")
    }
    assert norms == {72: 5, 18: 4}
