"""Models of flash-linear-attention: each one unpatched, patched and after undo, in Triton's interpreter.

The library's kernels for chunks do not run in the interpreter: ours are compared with its recurrent kernels, or with
its functions in plain PyTorch.
"""

import itertools

import fla.models
import pytest
import torch
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.kda.gate import naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.retention.naive import naive_retention

import fastkernels
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recurrence import fla as ours

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "fuse_cross_entropy": False,
}  # fmt: skip
_HEADS = {"num_heads": 2, "fuse_swiglu": False}
_RANKS = {f"{name}_low_rank_dim": 16 for name in ("decay", "gate", "a", "v")}
# kind: (config, the op of its recurrence, the end of the names of its functions)
MODELS = {
    "GLA": (_HEADS, "gated_linear_attention", "gla"),
    "RetNet": (_HEADS, "gated_linear_attention", "retention"),
    "DeltaNet": (_HEADS, "gated_delta_rule", "delta_rule"),
    "GatedDeltaNet": ({**_HEADS, "head_dim": 16}, "gated_delta_rule", "gated_delta_rule"),
    "KDA": ({**_HEADS, "head_dim": 16}, "kda", "kda"),
    "RWKV7": ({"head_dim": 16, "fuse_norm": False, **_RANKS}, "rwkv7", "rwkv7"),
}


# Models without an op of ours for their recurrence. kind: config
OTHERS = {"HGRN": {"fuse_swiglu": False}}


def model_of(kind):
    fields = OTHERS[kind] if kind in OTHERS else MODELS[kind][0]
    config = getattr(fla.models, f"{kind}Config")(**SIZES, **fields)
    model = getattr(fla.models, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
    return model


@torch.no_grad()
def outputs(model, length=5):
    """Logits of two prompts, and of one token after each."""
    ids = torch.arange(2 * length).view(2, length) % 97
    first = model(ids, use_cache=True)
    second = model(torch.tensor([[7], [8]]), past_key_values=first.past_key_values, use_cache=True)
    return [first.logits, second.logits]


@pytest.mark.parametrize("kind", MODELS)
def test_model_is_patched_and_undone(kind):
    _, op, end = MODELS[kind]
    model = model_of(kind)
    before, classes = outputs(model), [type(m) for m in model.modules()]
    convolved = any(type(m).__name__ == "ShortConvolution" for m in model.modules())
    ops = [op, "layer_norm" if kind == "RWKV7" else "rms_norm", *(["causal_conv1d"] if convolved else [])]
    report = fastkernels.patch(model, ops=ops)
    assert report.host.name == "fla"
    for found, theirs in zip(outputs(model), before, strict=True):
        torch.testing.assert_close(found, theirs, atol=2e-5, rtol=2e-5)
    rows = {r.host_class: r for r in report.refresh().rows if r.modules}
    recurrent = next(r for name, r in rows.items() if "recurrent" in name)
    assert recurrent.host_class.endswith(f"recurrent_{end}")
    assert (recurrent.modules, recurrent.calls, recurrent.proof, recurrent.fallbacks) == (2, 4, "calls", {})
    assert rows[f"chunk_{end}"].modules == 2 and not rows[f"chunk_{end}"].calls  # for 64 tokens and more
    if convolved:
        convolutions = [rows["causal_conv1d"], rows["causal_conv1d_update"]]
        assert all(row.calls >= 6 and row.proof == "calls" and not row.fallbacks for row in convolutions)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), before, strict=True))


@pytest.mark.parametrize("kind", OTHERS)
def test_norms_of_others_are_patched_and_undone(kind):
    """Nothing else of these models is ours, and nothing of it changes."""
    model = model_of(kind)
    before, classes = outputs(model), [type(m) for m in model.modules()]
    report = fastkernels.patch(model)
    for found, theirs in zip(outputs(model), before, strict=True):
        torch.testing.assert_close(found, theirs, atol=2e-5, rtol=2e-5)
    rows = [r for r in report.refresh().rows if r.modules]
    assert rows and {r.op for r in rows} <= {"rms_norm", "rms_norm_gated"}
    assert all(r.calls and r.proof == "calls" and not r.fallbacks for r in rows)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), before, strict=True))


@pytest.mark.parametrize("kind", ["GLA", "RetNet"])
def test_long_prompts_equal_the_library_in_two_parts(kind):
    """One part runs our function for chunks, two of 35 tokens the library's recurrent kernels."""
    model = model_of(kind)
    ids = torch.arange(70)[None] % 97
    with torch.no_grad():
        first = model(ids[:, :35], use_cache=True)
        second = model(ids[:, 35:], past_key_values=first.past_key_values, use_cache=True)
        with fastkernels.patch(model, ops=MODELS[kind][1]) as report:
            found = model(ids, use_cache=True).logits
            row = next(r for r in report.refresh().rows if r.host_class == f"chunk_{MODELS[kind][2]}")
            assert (row.calls, row.proof) == (2, "calls")
    torch.testing.assert_close(found, torch.cat([first.logits, second.logits], 1), atol=2e-5, rtol=2e-5)


def test_without_names_norms_are_ours():
    with fastkernels.patch(model_of("GLA")) as report:
        found = {r.op: r.modules for r in report.rows if r.modules}
        assert found == {"rms_norm": 5, "rms_norm_gated": 2}
        left = next(r for r in report.rows if r.op == "gated_linear_attention")
        assert "fused_recurrent_gla, on request" in left.reason


def test_every_model_that_is_built_is_patched():
    with fastkernels.patch("fla", ops=["gated_linear_attention", "rms_norm"]) as report:
        built = model_of("GLA")
        before = outputs(built)
        assert sum(r.calls for r in report.refresh().rows) > 0
    check_undone({built: before})


def test_every_model_that_is_loaded_is_patched(tmp_path):
    with fastkernels.patch("fla", ops=["gated_linear_attention", "rms_norm"]) as report:
        built = model_of("GLA")
        before = outputs(built)
        built.save_pretrained(tmp_path / "gla")
        loaded = fla.models.GLAForCausalLM.from_pretrained(tmp_path / "gla").eval()
        assert sum(r.modules for r in report.refresh().rows if r.op == "rms_norm") == 10
    check_undone({built: before, loaded: before})


def check_undone(models):
    """Each model has its classes and outputs {model: outputs} of before the patch."""
    for model, before in models.items():
        for ours_, theirs in zip(outputs(model), before, strict=True):
            torch.testing.assert_close(ours_, theirs, atol=2e-5, rtol=2e-5)
        assert not any(hasattr(type(m), "fastkernels") for m in model.modules())
    assert "fastkernels" not in fla.models.GLAForCausalLM.__init__.__module__


def test_training_runs_the_library():
    model = model_of("GLA").train()
    with fastkernels.patch(model, ops="gated_linear_attention") as report:
        model(torch.arange(6)[None]).logits.sum().backward()
        row = next(r for r in report.refresh().rows if r.host_class == "fused_recurrent_gla")
        assert "needs gradients" in next(iter(row.fallbacks)) and not row.calls
    assert model.model.layers[0].attn.q_proj.weight.grad.abs().sum() > 0


def drawn(*shapes):
    torch.manual_seed(0)
    return [torch.randn(2, 70, *shape) for shape in shapes]


def test_functions_equal_the_librarys_plain_ones():
    """Over 70 tokens, from states, with both layouts of states."""
    q, k, v, g = drawn((3, 16), (3, 16), (3, 8), (3, 16))
    g, state, beta = torch.nn.functional.logsigmoid(g), torch.randn(2, 3, 16, 8), torch.rand(2, 70, 3)
    k = k / k.norm(dim=-1, keepdim=True)
    more = {"initial_state": state, "output_final_state": True}
    want = naive_recurrent_gla(q, k, v, g, **more)
    check(ours.fla_chunk_gla(q, k, v, g, **more), want)
    out, last = ours.fla_chunk_gla(
        q, k, v, g, None, state.transpose(2, 3).contiguous(), True, state_v_first=True
    )
    check((out, last.transpose(2, 3)), want)
    heads_first = naive_retention(*(x.transpose(1, 2) for x in (q, k, v)))
    check((ours.fla_chunk_retention(q, k, v)[0].transpose(1, 2),), (heads_first,))
    by_token = g.mean(-1)
    args = (q, k, v, by_token, beta)
    want = naive_recurrent_gated_delta_rule(q, k, v, beta, by_token, **more)
    check(ours.fla_chunk_gated_delta_rule(*args, **more), want)
    want = naive_recurrent_gated_delta_rule(q, k, v, beta, torch.zeros_like(by_token), **more)
    check(ours.fla_chunk_delta_rule(q, k, v, beta, **more), want)
    check(ours.fla_chunk_kda(q, k, v, g, beta, **more), naive_recurrent_kda(q, k, v, g, beta, **more))


def check(found, want):
    for ours_, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours_, theirs.to(ours_.dtype), atol=5e-5, rtol=5e-5)


def test_packed_sequences_equal_each_alone():
    q, k, v, g = (x[:1] for x in drawn((3, 16), (3, 16), (3, 8), (3, 16)))
    g, borders = torch.nn.functional.logsigmoid(g), [0, 9, 70]
    packed, last = ours.fla_chunk_gla(q, k, v, g, None, None, True, cu_seqlens=torch.tensor(borders))
    for i, (a, b) in enumerate(itertools.pairwise(borders)):
        out, state = ours.fla_fused_recurrent_gla(*(x[:, a:b] for x in (q, k, v, g)), output_final_state=True)
        check((packed[:, a:b], last[i : i + 1]), (out, state))


def test_unsupported_arguments_are_named():
    q, k, v = drawn((3, 16), (3, 16), (3, 8))
    with pytest.raises(UnsupportedArgument, match="reverse=True"):
        ours.fla_fused_recurrent_retention(q, k, v, reverse=True)
    with pytest.raises(UnsupportedArgument, match="return_intermediate_states=True"):
        ours.fla_chunk_kda(q, k, v, q, q[..., 0], return_intermediate_states=True)


def test_bounded_gates_equal_the_librarys():
    q, k, v, g, beta = drawn((3, 16), (3, 16), (3, 8), (3, 16), (3,))
    k, rate, bias = k / k.norm(dim=-1, keepdim=True), torch.rand(3), torch.randn(48)
    decays = naive_kda_lowerbound_gate(g, rate, bias, -5.0)
    more = {"output_final_state": True}
    found = ours.fla_chunk_kda(
        q,
        k,
        v,
        g,
        beta.sigmoid(),
        use_gate_in_kernel=True,
        lower_bound=-5.0,
        A_log=rate,
        dt_bias=bias,
        **more,
    )
    check(found, naive_recurrent_kda(q, k, v, decays, beta.sigmoid(), **more))
