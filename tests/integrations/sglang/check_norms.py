"""Every norm of SGLang and torch against the host's own, without an engine."""

import copy
import pickle

import pytest
import torch
from fk_integrations.patching.apply import apply
from fk_integrations.sglang.scheduler import NO_GRAPHS, SglangAdapter
from sglang.srt.runtime_context import get_parallel
from torch import nn

from fastkernels.core.dispatch import observe
from fastkernels.core.reasons import Kind, Reason
from fastkernels.patch import Request

OPS = ("rms_norm", "gemma_rms_norm", "layer_norm", "rms_norm_gated")


class Alone(SglangAdapter):
    """Without a model runner."""

    def batch_invariant(self) -> None:
        return None


def test_norms_equal_the_hosts(monkeypatch):
    """Patched, as close as the dtype allows, and undone exactly."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.srt.layers import layernorm
    from sglang.srt.layers.attention.mamba import mixer2_rms_norm_gated as mixer2
    from sglang.srt.models import cohere2_moe, commandr

    torch.compiler.set_stance("force_eager")  # Cohere's functions are compiled
    monkeypatch.setattr(mixer2, "is_dp_attention_enabled", lambda: False)
    with get_parallel().override(tp_size=1, tp_rank=0):
        mixers = {"mixer": mixer2.Mixer2RMSNormGated(64, 1), "mixer_groups": mixer2.Mixer2RMSNormGated(64, 4)}
    made = {
        "gemma4": layernorm.Gemma4RMSNorm(64), "gemma4_bare": layernorm.Gemma4RMSNorm(64, with_scale=False),
        "bare": layernorm.RMSNormWithoutScale(64), "cohere": commandr.LayerNorm(64),
        "cohere_moe": cohere2_moe.Cohere2MoeLayerNorm(64), "torch": nn.LayerNorm(64), "torch_rms": nn.RMSNorm(64, 1e-5),
        **mixers,
    }  # fmt: skip
    if layernorm_gated._use_cpu:  # SGLang's own runs on CPUs with AMX only
        made["gated"] = layernorm_gated.RMSNorm(64)
    gated = ("mixer", "mixer_groups", "gated")
    model = nn.ModuleDict(made).bfloat16()
    x, gate = torch.randn(5, 64).bfloat16() + 1, torch.randn(5, 64).bfloat16()

    def run():
        return {n: norm(x, gate) if n in gated else norm(x) for n, norm in model.items()}

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
        classes, expected = [type(m) for m in model.modules()], run()
        patched = apply(Alone(), model, Request("patch", ops=OPS), 0)
        assert [n for n, m in model.items() if type(m) in classes] == []
        found = run()
        for name, theirs in expected.items():
            torch.testing.assert_close(found[name], theirs, msg=lambda text, name=name: f"{name}: {text}")
        patched.undo()
        assert [type(m) for m in model.modules()] == classes
        torch.testing.assert_close(run(), expected, rtol=0, atol=0)


def test_a_part_that_never_runs_shows_no_calls():
    """Rows of one op in one model count the calls of their own modules."""
    from sglang.srt.layers import layernorm

    tower = nn.Sequential(nn.RMSNorm(64, 1e-5), nn.RMSNorm(64, 1e-5))
    model = nn.ModuleDict(
        {"norms": nn.Sequential(*(layernorm.RMSNorm(64) for _ in range(3))), "tower": tower}
    )
    classes = [type(m) for m in model.modules()]
    patched = apply(Alone(), model, Request("patch", ops=("rms_norm",)), 0)
    x = torch.randn(5, 64)

    def rows():
        return [
            (row["modules"], row["calls"], row["proof"])
            for row in patched.report()
            if row["state"] == "active"
        ]

    with torch.no_grad():
        model["norms"](x)
        assert sorted(rows()) == [(2, 0, "uncalled"), (3, 3, "calls")]
        model["tower"](x)
        assert sorted(rows()) == [(2, 2, "calls"), (3, 3, "calls")]
        patched.reset()
        model["tower"](x)
        assert [calls for _, calls, _ in sorted(rows())] == [2, 0]
    patched.undo()
    assert [type(m) for m in model.modules()] == classes


def test_a_named_backend_runs_the_hosts_code():
    """BaseFusedOp.forward(..., backend=) is accepted by ours, and answers as SGLang does."""
    from sglang.kernels.spec import KernelBackend
    from sglang.srt.layers import activation, layernorm

    model = nn.ModuleDict({"norm": layernorm.RMSNorm(64), "act": activation.SiluAndMul()})
    x = torch.randn(5, 64)
    expected = {name: module(x, backend=KernelBackend.TORCH) for name, module in model.items()}
    patched = apply(Alone(), model, Request("patch", ops=("rms_norm", "silu_and_mul")), 0)
    for name, module in model.items():
        assert torch.equal(module(x, backend=KernelBackend.TORCH), expected[name])
        with pytest.raises(NotImplementedError, match="helion"):
            module(x, backend=KernelBackend.HELION)
    assert [row["calls"] for row in patched.report()] == [0, 0]
    assert all(torch.allclose(module(x, backend=None), expected[name]) for name, module in model.items())
    assert [row["calls"] for row in patched.report()] == [1, 1]
    patched.undo()


class Serving(Alone):
    """Of an engine with CUDA graphs, `capturing` or not; None: of one without."""

    faster_on_cpu = False
    capturing: bool | None = False

    def captures(self):
        if self.capturing is None:
            return Reason(Kind.LEFT_TO_HOST, NO_GRAPHS)
        return is_capturing


def is_capturing():
    return Serving.capturing


def test_eager_steps_run_the_hosts_code_and_graphs_ours(monkeypatch):
    """Of modules that no user named: a call of ours takes the CPU longer, and an eager step is bound by it."""
    from sglang.srt.layers import activation, layernorm

    model = nn.ModuleDict({"norm": layernorm.RMSNorm(64), "act": activation.SiluAndMul()}).bfloat16()
    x = torch.randn(5, 64).bfloat16()

    def run():
        residual = x.clone()
        return [model["act"](model["norm"](x)), *model["norm"](x.clone(), residual)]

    def rows(patched):
        return {row["op"]: row for row in patched.report() if row["modules"]}

    def attributes():
        return [{name: id(value) for name, value in vars(m).items()} for m in model.modules()]

    with torch.no_grad():
        expected, before = run(), attributes()
        patched = apply(Serving(), model, Request("patch"), 0)
        torch.testing.assert_close(run(), expected, rtol=0, atol=0)
        found = rows(patched)
        assert set(found) == {"rms_norm", "silu_and_mul"}
        for made in (copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
            again = nn.ModuleDict({name: made(module) for name, module in model.items()})
            assert torch.equal(again["act"](again["norm"](x)), expected[0])
        assert all(row["captured"] and row["calls"] == 0 for row in found.values())
        monkeypatch.setattr(Serving, "capturing", True)
        torch.testing.assert_close(run(), expected, rtol=0.02, atol=0.02)
        assert [row["calls"] for row in rows(patched).values()] == [2, 1]
        monkeypatch.setattr(Serving, "capturing", False)
        observe(lambda op, provider: provider)  # as a recording of an eager engine's calls
        try:
            run()
        finally:
            observe(None)
        assert [row["calls"] for row in rows(patched).values()] == [4, 2]
        patched.undo()
        assert attributes() == before
        named = apply(Serving(), model, Request("patch", ops=("rms_norm",)), 0)
        run()
        assert rows(named)["rms_norm"]["calls"] == 2 and not rows(named)["rms_norm"]["captured"]
        named.undo()
        monkeypatch.setattr(Serving, "capturing", None)
        left = apply(Serving(), model, Request("patch"), 0)
        assert not rows(left)
        (row,) = [row for row in left.report() if row["op"] == "rms_norm" and row["host_class"] == "RMSNorm"]
        assert NO_GRAPHS in row["reason"]
        left.undo()
