"""SGLang's own method and runner of unquantized experts, swapped as in a model. Its CPU platform runs neither: a layer
of the same attributes calls them here, as SGLang's on a GPU does, and the host's Triton kernel is not called.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from fk_integrations.sglang import experts
from fk_integrations.sglang.scheduler import SglangAdapter
from sglang.srt.layers.moe import MoeRunnerBackend, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from torch import nn

from fastkernels.core import registry, tuning
from fastkernels.overrides.moe import fused_experts, fused_experts_fp8
from fastkernels.overrides.moe.sglang import SGLangMoeRunner
from fastkernels.patch import PatchError, Request
from fastkernels.verify import cache, measure

E, K, H, INNER, T = 4, 2, 128, 96, 9


@pytest.fixture(autouse=True)
def server_args():
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="none", device="cpu"))


def randn(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    """The parts of a FusedMoE that its method and ours read."""

    def __init__(self, **options):
        super().__init__()
        self.moe_runner_config = MoeRunnerConfig(
            num_experts=E, num_local_experts=E, top_k=K, params_dtype=torch.float32, **options
        )
        self.w13_weight = nn.Parameter(randn(E, 2 * INNER, H) / 10, requires_grad=False)
        self.w2_weight = nn.Parameter(randn(E, H, INNER, seed=1) / 10, requires_grad=False)
        self.quant_method = UnquantizedFusedMoEMethod()
        self.quant_method._forward_method = self.quant_method.forward_cuda  # as a GPU's platform chooses
        self.quant_method.moe_runner_config = self.moe_runner_config
        self.quant_method.runner = MoeRunner(MoeRunnerBackend.TRITON, self.moe_runner_config)

    @property
    def runner(self):
        return self.quant_method.runner

    def forward(self, x, weights, ids, **more):
        topk = StandardTopKOutput(weights, ids, None)
        dispatched = StandardDispatchOutput(x, None, topk, **more)
        return self.quant_method.apply(self, dispatched)


def arguments():
    x, logits = randn(T, H, seed=2), randn(T, E, seed=3)
    weights, ids = logits.softmax(-1).topk(K)
    return x, weights, ids.int()


def patch(layer, ops=("fused_experts",), **more):
    from fk_integrations.patching.apply import apply

    arguments = SimpleNamespace(pp_size=1, enable_deterministic_inference=False)
    runner = SimpleNamespace(server_args=arguments, device="cpu")
    return apply(SglangAdapter(runner), nn.ModuleList([layer]), Request("patch", ops=ops, **more))


@pytest.mark.parametrize("options", [{}, {"inplace": False}, {"routed_scaling_factor": 2.5}], ids=str)
def test_the_hosts_method_runs_ours_on_its_own_weights(options):
    layer, (x, weights, ids) = Layer(**options), arguments()
    before, runner = x.clone(), layer.runner
    patched = patch(layer, strict=True)
    out = layer(x, weights, ids)
    want = fused_experts.reference(x, layer.w13_weight, layer.w2_weight, weights, ids)
    torch.testing.assert_close(out.hidden_states, want * options.get("routed_scaling_factor", 1))
    assert type(out) is StandardCombineInput and torch.equal(x, before)
    assert layer.runner is runner and isinstance(runner, MoeRunner) and type(runner) is not MoeRunner
    (row,) = patched.report()
    assert (row["state"], row["modules"], row["calls"], row["fallbacks"]) == ("active", 1, 1, {})
    patched.undo()
    assert type(runner) is MoeRunner and "run" not in vars(runner)


HOST = "sglang.srt.layers.moe.moe_runner.triton:fused_experts_none_to_triton"


@pytest.fixture
def host_in_torch(monkeypatch):
    """SGLang's function of its runner, computed in PyTorch: its kernels need a GPU."""
    calls = []

    def fused(dispatched, info, config):
        x, topk = dispatched.hidden_states, dispatched.topk_output
        calls.append(len(x))
        w13, w2 = info.w13_weight, info.w2_weight
        if info.use_fp8_w8a8:
            quant = (info.w13_scale, info.w2_scale)
            out = fused_experts_fp8.reference(
                x, w13, w2, *quant, topk.topk_weights, topk.topk_ids, info.a13_scale, info.a2_scale,
                info.per_channel_quant, info.block_shape,
            )  # fmt: skip
        else:
            out = fused_experts.reference(x, w13, w2, topk.topk_weights, topk.topk_ids)
        return StandardCombineInput(x.copy_(out) if config.inplace else out)

    module, _, name = HOST.partition(":")
    fused.__module__, fused.__qualname__ = module, name
    monkeypatch.setattr(MoeRunner, "__init__", with_function(MoeRunner.__init__, fused))
    return calls


def with_function(init, fused):
    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.fused_func = fused

    return made


def measured_faster(monkeypatch, tmp_path, op, tokens):
    """A clock by which ours wins at these numbers of tokens only; what it ran."""
    seen = []

    def interleaved(subjects, calls, device, rounds, first=0):
        size = len(calls[0][0])
        seen.append((size, [c[0] for c in calls]))
        for subject in subjects:
            subject(*calls[0])
        return [[1.0] * rounds] + [[0.8 if size in tokens else 1.2] * rounds for _ in subjects[1:]]

    monkeypatch.setattr(SglangAdapter, "ranks", lambda self: None)
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "interleaved", interleaved)
    found = registry.get(op).op
    key = dataclasses.replace(found.key, propose=lambda *_: [("reference", {})], points=((1,), (8,), (32,)))
    monkeypatch.setattr(found, "key", key)
    found.reset()
    cache.compile_cache.folder.cache_clear()
    return seen


@pytest.fixture(autouse=True)
def no_choices_afterwards():
    yield
    tuning.set_verified("cpu", ())
    for name in ("fused_experts", "fused_experts_fp8"):
        registry.get(name).op.reset()
    cache.compile_cache.folder.cache_clear()


def test_ours_only_where_it_was_measured_faster_than_sglangs(monkeypatch, tmp_path, host_in_torch):
    seen = measured_faster(monkeypatch, tmp_path, "fused_experts", (8,))
    layer = Layer()
    before = layer.w13_weight.clone()
    patched = patch(layer, ops=None)
    assert [size for size, _ in seen] == [1, 8, 32] and torch.equal(layer.w13_weight, before)
    assert all(torch.isfinite(x).all() and x.abs().max() < 10 for _, several in seen for x in several)
    (row,) = [r for r in patched.rows if r.op == "fused_experts"]
    assert (row.state, row.modules) == ("active", 1)
    assert "tokens=8: reference (reference: 1.25" in "\n".join(row.measured)
    assert "tokens=1: sglang, the host's (reference: 0.83" in "\n".join(row.measured)
    host_in_torch.clear()
    x, weights, ids = arguments()
    want = fused_experts.reference(x, layer.w13_weight, layer.w2_weight, weights, ids)
    few = layer(x[:5].clone(), weights[:5], ids[:5]).hidden_states
    assert host_in_torch == []
    torch.testing.assert_close(few, want[:5])
    many = layer(x.clone(), weights, ids).hidden_states  # 9 tokens: the entry of 32, which the host won
    assert host_in_torch == [9]
    torch.testing.assert_close(many, want)
    assert next(r for r in patched.report() if r["op"] == "fused_experts")["left"] == {experts.NOT_FASTER: 1}
    patched.undo()
    assert type(layer.runner) is MoeRunner and "run" not in vars(layer.runner)


def test_experts_that_win_nowhere_stay_sglangs(monkeypatch, tmp_path, host_in_torch):
    measured_faster(monkeypatch, tmp_path, "fused_experts", ())
    patched = patch(layer := Layer(), ops=None)
    (row,) = [r for r in patched.rows if r.op == "fused_experts"]
    assert row.state == "off" and "no kernel of ours is faster at experts=4" in row.reason
    assert type(layer.runner) is MoeRunner


def test_vllms_tables_decide_nothing_here(monkeypatch, tmp_path, host_in_torch):
    shape = {"experts": E, "here": E, "topk": K, "hidden": H, "intermediate": INNER, "dtype": "float32"}
    won = {"speedup": 1.3, "ci95": (1.2, 1.4)}
    entry = tuning.Entry("fused_experts", shape, {"tokens": 8}, "reference", "vllm", "r1", **won)
    (tmp_path / "own.json").write_text(tuning.Table("cpu", {"r1": {}}, (entry,)).to_json())
    monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path / "own.json"))
    tuning._by_op.cache_clear()
    patched = patch(layer := Layer(), ops=None)
    row = next(r for r in patched.rows if r.op == "fused_experts")
    assert (row.state, row.reason) == ("off", f"1 left to the host: {experts.NOT_MEASURED}")
    assert type(layer.runner) is MoeRunner
    seen = measured_faster(monkeypatch, tmp_path, "fused_experts", (8,))
    patch(Layer(), ops=None)
    assert [size for size, _ in seen] == [1, 8, 32]
    tuning._by_op.cache_clear()


def test_a_factor_of_the_experts_stays_sglangs(monkeypatch, tmp_path, host_in_torch):
    seen = measured_faster(monkeypatch, tmp_path, "fused_experts", (8,))
    layer = Layer(routed_scaling_factor=2.5)
    row = next(r for r in patch(layer, ops=None).rows if r.op == "fused_experts")
    assert not seen and row.state == "off" and type(layer.runner) is MoeRunner
    assert experts.shape(registry.get("fused_experts").op, layer).text == experts.FACTOR


@pytest.mark.parametrize("says", ["no memory", ""])
def test_a_method_that_cannot_be_called_stays_sglangs(monkeypatch, host_in_torch, says):
    layer = Layer()

    def apply(layer, dispatched):
        if says:
            raise RuntimeError(says)
        return StandardCombineInput(dispatched.hidden_states)

    monkeypatch.setattr(layer.quant_method, "apply", apply)
    found = experts.shape(registry.get("fused_experts").op, layer)
    assert found.text.endswith(f"a measurement: RuntimeError: {says or 'it called no runner'}")
    assert "run" not in vars(layer.runner)


def test_unsupported_call_stays_the_hosts(monkeypatch):
    layer, args = Layer(), arguments()
    patched = patch(layer)
    monkeypatch.setattr(layer.runner, "fused_func", lambda dispatched, quant, config: "the host's")
    assert layer(*args, hidden_states_pre_quant=(args[0], args[0])) == "the host's"
    layer.w13_weight_bias = torch.zeros(E, 2 * INNER)
    assert layer(*args) == "the host's"
    (row,) = patched.report()
    assert row["calls"] == 0 and sum(row["fallbacks"].values()) == 2
    assert "quantized already" in str(row["fallbacks"]) and "quant_info.b13" in str(row["fallbacks"])


@pytest.mark.parametrize("block", [None, [128, 128]], ids=str)
def test_float8(block):
    layer, (x, weights, ids) = Layer(), arguments()
    w13, w2 = randn(E, 256, H), randn(E, H, 128, seed=1)
    layer.w13_weight.data, layer.w2_weight.data = (w.to(torch.float8_e4m3fn) for w in (w13, w2))
    shapes = [(E, 2, 1), (E, 1, 1)] if block else [(E,), (E,)]
    scales = [torch.rand(s, generator=torch.Generator().manual_seed(4)) / 10 + 0.01 for s in shapes]
    patched = patch(layer, ops=("fused_experts_fp8",), strict=True)
    quant = TritonMoeQuantInfo(
        layer.w13_weight, layer.w2_weight, use_fp8_w8a8=True, w13_scale=scales[0], w2_scale=scales[1],
        block_shape=block,
    )  # fmt: skip
    dispatched = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, None))
    found = layer.runner.run(dispatched, quant).hidden_states
    want = fused_experts_fp8.reference(
        x, layer.w13_weight, layer.w2_weight, *scales, weights, ids, block_shape=block
    )
    torch.testing.assert_close(found, want)
    assert patched.report()[0]["calls"] == 1
    with pytest.raises(PatchError, match="the model has no such module"):  # it is of the other op
        patch(Layer(), ops=("fused_experts_fp8",))


@pytest.mark.parametrize(
    ("options", "change", "why"),
    [
        ({"activation": "gelu"}, None, "moe_runner_config.activation='gelu'"),
        ({"swiglu_limit": 7.0}, None, "moe_runner_config.swiglu_limit=7.0"),
        ({"apply_router_weight_on_input": True}, None, "router's weights on the input"),
        ({}, lambda m: setattr(m.moe_runner_config, "num_experts", 8), "only 4 of 8 experts are here"),
        ({}, lambda m: setattr(m.runner, "lora_enabled", True), "LoRA"),
        ({}, lambda m: setattr(m.runner, "fused_func", None), "TritonRunnerCore, whose weights may be"),
        ({}, lambda m: setattr(m.runner, "fused_func", print), "run by builtins:print"),
        ({}, lambda m: setattr(m.quant_method, "runner", None), "unquant:UnquantizedFusedMoEMethod"),
        ({}, lambda m: setattr(m.quant_method, "w13_swiglu_interleaved", True), "interleaved"),
        ({}, lambda m: setattr(m.runner, "run", print), "replaced by other code"),
        ({}, lambda m: setattr(m.w2_weight, "data", m.w2_weight.data[..., :5]), "not .E, 2 I, H."),
        (
            {},
            lambda m: setattr(m.quant_method, "_forward_method", m.quant_method.forward_cpu),
            "runs forward_cpu, which calls no runner",
        ),
        ({}, lambda m: m.bfloat16(), "weights are torch.bfloat16 for torch.float32"),
    ],
)  # fmt: skip
def test_unsupported_experts_stay_with_a_reason(options, change, why):
    layer = Layer(**options)
    if change is not None:
        change(layer)
    with pytest.raises(PatchError, match=rf"fused_experts \(MoeRunner\): 1 unsupported: .*{why}"):
        patch(layer)


def test_signature_of_the_host():
    import inspect

    theirs, ours = (list(inspect.signature(c.run).parameters) for c in (MoeRunner, SGLangMoeRunner))
    assert theirs == ours
