"""Mixtures of experts in one eager vLLM engine in this process: only the object that runs the experts is swapped.

vLLM's kernels for the CPU pack the weights: there ours stay out, and say so. The other tests have vLLM's experts keep
the weights as a checkpoint has them, as its Triton kernels on a GPU do, and compute in PyTorch; layer, router, method
and kernel object are the host's own.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fk_integrations.patching.apply import apply
from fk_integrations.vllm import experts
from fk_integrations.vllm.host import VllmAdapter
from support.hosts import plain_experts
from support.hosts.vllm_engine import first_logprobs, generate, make_llm
from support.tiny import make_tiny

import fastkernels
from fastkernels.core import tuning
from fastkernels.core.tuning import Entry, Table
from fastkernels.overrides.moe import fused_experts_fp8
from fastkernels.overrides.moe.fused_experts import fused_experts
from fastkernels.patch import PatchError, Request
from fastkernels.verify import cache, measure

OP = ["fused_experts"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "mixtral", "mixtral"))


@pytest.fixture(scope="module")
def llm(model):
    with pytest.MonkeyPatch.context() as patch:
        plain_experts.install(patch.setattr)
        yield make_llm(model)


@pytest.fixture(scope="module")
def stock(llm):
    return generate(llm)


@pytest.fixture(autouse=True)
def unpatched_afterwards(llm, stock):
    before = [(type(experts.experts(m)), m.w13_weight.data_ptr()) for m in layers(llm)]
    yield
    assert [(type(experts.experts(m)), m.w13_weight.data_ptr()) for m in layers(llm)] == before
    assert generate(llm) == stock


def layers(llm):
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    found = [m for m in worker.get_model().modules() if type(m).__name__ == "RoutedExperts"]
    assert len(found) == 2
    return found


def row_of(report, op="fused_experts"):
    return next(r for r in report.refresh().rows if r.op == op)


def test_requested_experts_run_ours_and_undo_is_exact(llm, stock):
    kernels = [experts.experts(m) for m in layers(llm)]
    with fastkernels.patch(llm, ops=OP, strict=True) as report:
        assert first_logprobs(generate(llm)) == pytest.approx(first_logprobs(stock), abs=0.05)
        row = row_of(report)
        assert (row.state, row.modules, row.reason) == ("active", 2, "")
        assert row.calls >= 3 * 8 * 2 and not row.fallbacks and not row.left
        assert [experts.experts(m) for m in layers(llm)] == kernels  # the same objects
        assert all(isinstance(k, type(k).__mro__[1]) and k.fastkernels for k in kernels)


def test_a_candidate_runs_inside(llm, stock, candidate):
    source = (
        "import torch\n"
        "def fused_experts(x, w1, w2, weights, ids, expert_map=None, on_input=False):\n"
        "    return torch.zeros_like(x)\n"
    )
    with fastkernels.patch(llm, ops=OP, candidates={"fused_experts": candidate(source)}) as report:
        assert first_logprobs(generate(llm)) != pytest.approx(first_logprobs(stock), abs=0.05)
        assert report.refresh().verified


@pytest.fixture
def table(llm, tmp_path, monkeypatch):
    """table(tokens): a CPU's table in which ours is faster up to `tokens` tokens of this model's shape."""

    def put(tokens):
        shape = {"experts": 4, "here": 4, "topk": 2, "hidden": 128, "intermediate": 96, "dtype": "bfloat16"}
        won = {"speedup": 1.3, "ci95": (1.2, 1.4)}
        entry = Entry("fused_experts", shape, {"tokens": tokens}, "torch", "vllm", "r1", **won)
        (tmp_path / "own.json").write_text(Table("cpu", {"r1": {}}, (entry,)).to_json())
        monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path / "own.json"))
        tuning._by_op.cache_clear()
        fused_experts.reset()

    yield put
    tuning._by_op.cache_clear()


def test_by_table_only_calls_of_those_sizes(llm, stock, table):
    table(1)
    with fastkernels.patch(llm) as report:
        assert first_logprobs(generate(llm)) == pytest.approx(first_logprobs(stock), abs=0.1)
        row = row_of(report)
        assert (row.state, row.modules, row.reason) == ("active", 2, "")
        assert row.calls == 2 + 3 * 7 * 2  # the patch's own step and decodes; prompts are the host's
        assert row.left == {experts.NOT_FASTER: 3 * 2} and not row.fallbacks


def test_a_shape_of_no_table_is_left_to_the_host(llm, table):
    table(1)
    for layer in layers(llm):
        layer.top_k += 1
    try:
        with fastkernels.patch(llm) as report:
            row = row_of(report)
            assert row.state == "off" and row.calls == 0
            assert row.reason.startswith("2 left to the host: experts=4 here=4 topk=3 hidden=128")
    finally:
        for layer in layers(llm):
            layer.top_k -= 1


def test_measured_next_to_the_layers_own_kernel(llm, stock, monkeypatch, tmp_path):
    sizes = []

    def interleaved(subjects, calls, device, rounds, first=0):
        assert len({c[1].data_ptr() for c in calls}) == 2  # both layers, with their own weights
        assert {c[1].data_ptr() for c in calls} == {m.w13_weight.data_ptr() for m in layers(llm)}
        sizes.append(len(calls[0][0]))
        for subject in subjects:
            for call in calls:
                assert subject(*call).isfinite().all()
        return [[1.0] * rounds] + [[0.8 if sizes[-1] == 1 else 1.2] * rounds for _ in subjects[1:]]

    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "interleaved", interleaved)
    key = replace(fused_experts.key, propose=lambda *_: [("reference", {})])
    monkeypatch.setattr(fused_experts, "key", key)
    cache.compile_cache.folder.cache_clear()
    fused_experts.reset()
    with fastkernels.patch(llm) as report:
        assert sizes[:4] == [1, 8, 32, 64] and max(sizes) <= 2048
        assert first_logprobs(generate(llm)) == pytest.approx(first_logprobs(stock), abs=0.1)
        row = row_of(report)
        assert (row.state, row.modules) == ("active", 2)
        assert row.calls == 2 + 3 * 7 * 2 and row.left == {experts.NOT_FASTER: 3 * 2}
        assert "tokens=1: reference (reference: 1.25" in "\n".join(row.measured)
        assert "tokens=8: vllm, the host's (reference: 0.83" in "\n".join(row.measured)
    assert not tuning.verified("cpu")
    cache.compile_cache.folder.cache_clear()
    fused_experts.reset()


def put(owner, name, value):
    """change(layer) -> its undo."""

    def change(layer):
        thing = owner(layer)
        old = getattr(thing, name)
        setattr(thing, name, value(old) if callable(value) else value)
        return lambda: setattr(thing, name, old)

    return change


def kernel(layer):
    return experts.experts(layer)


def config(layer):
    return kernel(layer).fused_experts.quant_config


class Other:
    """Any other class."""

    moe_kernel = None


REFUSED = {
    "exchange": (put(kernel, "prepare_finalize", Other()), "tokens are exchanged by Other"),
    "experts": (put(kernel, "fused_experts", Other()), "Other, whose weights are in an order of its own"),
    "method": (put(lambda m: m.quant_method, "moe_kernel", None), "which takes no choice of a router"),
    "activation": (put(lambda m: m, "activation", "gelu"), "activation='gelu' is not supported"),
    "input": (put(lambda m: m, "apply_router_weight_on_input", True), "the router's weights on the input"),
    "lora": (put(lambda m: m.moe_config, "is_lora_enabled", True), r"adapters \(LoRA\) of experts"),
    "clamp": (put(config, "gemm1_clamp_limit", 7.0), "quant_config.gemm1_clamp_limit=7.0 is not supported"),
    "dtype": (put(lambda m: m.moe_config, "in_dtype", torch.float16), "weights are torch.bfloat16 for"),
    "shape": (put(lambda m: m.w2_weight, "data", lambda w: w[..., :32]), r"not \[E, 2 I, H\] and \[E, H, I\]"),
    "patched": (
        lambda m: vars(kernel(m)).update(apply=print) or (lambda: vars(kernel(m)).pop("apply")),
        "replaced by other code",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_experts_stay_with_a_reason(llm, name):
    change, why = REFUSED[name]
    undo = [change(layer) for layer in layers(llm)]
    try:
        with pytest.raises(
            PatchError, match=rf"fused_experts \(FusedMoEKernelModularImpl\): 2 unsupported: .*{why}"
        ):
            fastkernels.patch(llm, ops=OP)
    finally:
        for back in undo:
            back()


@pytest.mark.parametrize("block", [None, [128, 128]], ids=str)
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_float8_in_vllms_own_kernel(monkeypatch, block, powers_of_two):
    """A layer's attributes around vLLM's own kernel, exchange, experts' class and configuration of scales."""
    from vllm.model_executor.layers.fused_moe import activation, modular_kernel
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep
    from vllm.utils import deep_gemm

    def randn(*size, seed):
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed))

    monkeypatch.setattr(deep_gemm, "is_deep_gemm_e8m0_used", lambda: powers_of_two)
    x, logits = randn(9, 128, seed=0), randn(9, 4, seed=1)
    weights, ids = logits.softmax(-1).topk(2)
    w1, w2 = (randn(4, n, 128, seed=n).to(torch.float8_e4m3fn) for n in (256, 128))
    shapes = [(4, 2, 1), (4, 1, 1)] if block else [(4, 1, 1), (4, 1, 1)]
    scales = [randn(*s, seed=2).abs() / 10 + 0.01 for s in shapes]
    given = (
        [None, None] if block else [torch.tensor(0.02), torch.tensor(0.03)]
    )  # no dimensions, as vLLM's are
    quant = fp8_w8a8_moe_quant_config(*scales, *given, block_shape=block)
    inside = object.__new__(TritonExperts)
    inside.quant_config = quant
    kernel = object.__new__(modular_kernel.FusedMoEKernelModularImpl)
    kernel.prepare_finalize, kernel.fused_experts = no_dp_ep.MoEPrepareAndFinalizeNoDPEPModular(), inside
    layer = torch.nn.Module()
    layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(w, requires_grad=False) for w in (w1, w2))
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(impl=kernel))
    layer.moe_config = SimpleNamespace(is_lora_enabled=False, in_dtype=torch.float32)
    layer.activation, layer.apply_router_weight_on_input = activation.MoEActivation.SILU, False
    layer.expert_map, layer.top_k = None, 2
    patched = apply(VllmAdapter(), torch.nn.ModuleList([layer]), Request("patch", ops=("fused_experts_fp8",)))
    found = kernel.apply(x, w1, w2, ids, weights, layer.activation, 4)
    want = fused_experts_fp8.reference(
        x, w1, w2, *scales, weights, ids, *given, False, block, powers_of_two and block is not None
    )
    torch.testing.assert_close(found, want)
    assert patched.report()[0]["calls"] == 1
    kind = (128, 128) if block else (0, 0)
    assert experts.shape(fused_experts_fp8.fused_experts_fp8, layer) == (
        4,
        4,
        2,
        128,
        128,
        *kind,
        torch.float32,
    )
    patched.undo()
    assert type(kernel) is modular_kernel.FusedMoEKernelModularImpl


def test_packed_weights_are_left_to_the_cpus_own_kernel(llm, monkeypatch):
    monkeypatch.setattr(experts, "PLAIN", {p for p in experts.PLAIN if "cpu_moe" not in p})
    with fastkernels.patch(llm, ops=[*OP, "rms_norm"]) as report:
        assert "CPUUnquantizedExperts, whose weights are in an order of its own" in row_of(report).reason
        assert row_of(report).state == "off"
