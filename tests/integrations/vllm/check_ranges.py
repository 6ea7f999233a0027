"""A vLLM engine compiled in ranges, as on a GPU: our ops run in small batches, vLLM's own code in larger ones."""

import os

import pytest
import torch
from fk_integrations.vllm import compiled, fusions
from support.hosts.vllm_engine import first_logprobs, generate, make_llm

import fastkernels
from fastkernels.core import tuning
from fastkernels.core.dispatch import OPS
from fastkernels.core.tuning import Entry, Table

MOST = 2  # tokens of the largest batch that the table below lists ours as faster for
OPTIONS = {"enforce_eager": False, "dtype": "float32"}
# Ops of CUDA builds that vLLM's last pass names when it meets an op which changes its arguments.
ABSENT = (
    "fused_add_rms_norm_static_fp8_quant", "rms_norm_dynamic_per_token_quant", "rms_norm_static_fp8_quant",
    "silu_and_mul_quant", "fused_qk_norm_rope",
)  # fmt: skip
OURS = ("linear", "rms_norm", "silu_and_mul", "rotary_emb", "embedding")
GATED, APART = (
    "linear_silu_and_mul",
    64,
)  # and tokens up to which the tables below keep gate and up apart from SwiGLU


@pytest.fixture(scope="module")
def llm():
    from fk_integrations.vllm.host import VllmAdapter
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def compile_in_pieces(cls, config):
        stock(cls, config)  # it compiles a model as a whole, without ranges
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        config.compilation_config.compile_sizes = []

    library = torch.library.Library("_C", "FRAGMENT")
    for name in ABSENT:
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}(Tensor x) -> ()")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(compile_in_pieces))
        patch.setattr(VllmAdapter, "faster_on_cpu", False)
        # As on torch 2.11: a saved graph is split again, and its pieces are loaded one by one.
        patch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", "0")
        llm = make_llm(os.environ["TINY_LLAMA"], **OPTIONS)
        yield llm


@pytest.fixture
def table(llm, tmp_path, monkeypatch):
    """A CPU's table: ours is faster for up to MOST tokens, for all layers of the model."""
    yield from used(entries_of(llm, "linear", ((MOST, True), (64, False))), tmp_path, monkeypatch)


@pytest.fixture
def of_prompts(llm, tmp_path, monkeypatch):
    """The same, and products of gate and up with their activation are faster from APART tokens on."""
    entries = entries_of(llm, "linear", ((MOST, True), (64, False)))
    entries += entries_of(llm, GATED, ((APART, False), (4 * APART, True)))
    yield from used(entries, tmp_path, monkeypatch)


PRODUCTS = ((MOST, False), (APART, False), (4 * APART, True))


@pytest.fixture
def of_products_alone(llm, tmp_path, monkeypatch):
    """Products are faster from APART tokens on, and in no decode."""
    yield from used(entries_of(llm, "linear", PRODUCTS), tmp_path, monkeypatch)


@pytest.fixture
def of_products(llm, tmp_path, monkeypatch):
    """The same, and decodes of one shape of layers are faster, too."""
    entries = entries_of(llm, "linear", PRODUCTS)
    first = entries[0].shape
    won = entries_of(llm, "linear", ((MOST, True),))
    entries = [e for e in entries if e.shape != first or e.sizes["M"] != MOST]
    yield from used(entries + [e for e in won if e.shape == first], tmp_path, monkeypatch)


@pytest.fixture
def of_prompts_alone(llm, tmp_path, monkeypatch):
    yield from used(entries_of(llm, GATED, ((APART, False), (4 * APART, True))), tmp_path, monkeypatch)


def entries_of(llm, op, sizes):
    """An op's entries for all shapes of layers, at these numbers of tokens: whether ours is faster."""
    (shapes,) = llm.collective_rpc(shapes_of_layers)
    return [
        Entry(
            op, {"N": n, "K": k, "dtype": "float32"}, {"M": m}, "reference" if faster else "onednn", "onednn", "r",
            speedup=1.5 if faster else 1.0, ci95=(1.5, 1.5) if faster else (1.0, 1.0),
        )
        for n, k in shapes for m, faster in sizes
    ]  # fmt: skip


def used(entries, folder, monkeypatch):
    path = folder / "own.json"
    path.write_text(Table("cpu", {"r": {}}, tuple(entries)).to_json())
    monkeypatch.setenv("FASTKERNELS_TUNED", str(path))
    tuning._by_op.cache_clear()
    yield path
    tuning._by_op.cache_clear()


def shapes_of_layers(worker):
    from vllm.model_executor.layers.linear import LinearBase

    return {tuple(m.weight.shape) for m in worker.get_model().modules() if isinstance(m, LinearBase)}


def calls(llm, tokens):
    """{op: calls of ours in a step of so many tokens}."""
    for op in OPS.values():
        op.calls = 0
    llm.collective_rpc(lambda worker: worker.model_runner._dummy_run(tokens) and None)
    return {name: OPS[name].calls for name in (*OURS, GATED) if name in OPS and OPS[name].calls}


def of_a_long_prompt(llm):
    """Log probabilities of the tokens of a prompt with more than APART, and of the most likely next one."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=0)
    ids = [1 + i % 90 for i in range(3 * APART)]
    (found,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    steps = [*found.prompt_logprobs[1:], found.outputs[0].logprobs[0]]
    return [next(iter(step.values())).logprob for step in steps]


def compiled_code(llm):
    return llm.collective_rpc(lambda worker: worker.get_model().model.aot_compiled_fn)[0]


def endpoints(llm):
    return llm.llm_engine.vllm_config.compilation_config.compile_ranges_endpoints


def test_ours_runs_in_small_batches_only(llm, table):
    stock, before, code = generate(llm), endpoints(llm), compiled_code(llm)
    report = fastkernels.patch(llm)
    assert {row.op for row in report.rows if row.state == "active"} >= {*OURS}
    assert max(report.seconds, key=report.seconds.__getitem__) == "compile model"
    assert endpoints(llm) == [MOST, *before]
    assert set(calls(llm, MOST)) == {*OURS}
    assert calls(llm, MOST + 1) == calls(llm, 64) == {}
    assert first_logprobs(generate(llm)) == pytest.approx(first_logprobs(stock), abs=1e-3)
    report.refresh()
    assert report.verified and f"in batches of up to {MOST} tokens" in str(report)
    report.undo()
    assert endpoints(llm) == before and calls(llm, MOST) == {}
    assert compiled_code(llm) is code is not None  # nothing was compiled again
    assert generate(llm) == stock


def test_prompts_compute_gate_up_and_activation_at_once(llm, of_prompts):
    stock, before = generate(llm), endpoints(llm)
    report = fastkernels.patch(llm)
    assert endpoints(llm) == [MOST, *before]  # no range is added
    row = next(row for row in report.rows if row.op == GATED)
    assert (row.state, row.host_class, row.modules, row.more_than) == ("active", "LlamaMLP", 2, MOST)
    assert set(calls(llm, MOST)) == {*OURS}
    assert calls(llm, APART) == {GATED: 2, "silu_and_mul": 2}  # the op runs the usual kernels
    assert calls(llm, APART + 1) == calls(llm, 200) == {GATED: 2}
    assert first_logprobs(generate(llm)) == pytest.approx(first_logprobs(stock), abs=1e-3)
    found = of_a_long_prompt(llm)
    report.refresh()
    assert report.verified and f"in batches of more than {MOST} tokens" in str(report)
    report.undo()
    assert endpoints(llm) == before and calls(llm, 200) == {}
    assert found == pytest.approx(of_a_long_prompt(llm), abs=1e-3)
    assert generate(llm) == stock


def test_prompts_alone_are_ours(llm, of_prompts_alone):
    """Without a kernel that wins in decodes, only prompts run an op of ours."""
    stock, before = generate(llm), endpoints(llm)
    report = fastkernels.patch(llm)
    rows = {row.op: row for row in report.rows if row.state == "active"}
    assert set(rows) == {GATED, "silu_and_mul"} and endpoints(llm) == sorted({APART, *before})
    assert calls(llm, 1) == calls(llm, APART) == {} and calls(llm, 200) == {GATED: 2}
    report.undo()
    assert endpoints(llm) == before and generate(llm) == stock


def test_products_of_prompts_alone_are_ours(llm, of_products_alone):
    """The modules stay vLLM's: our pass puts the op into the graphs of prompts."""
    stock, before = generate(llm), endpoints(llm)
    expected = of_a_long_prompt(llm)
    report = fastkernels.patch(llm)
    rows = [row for row in report.rows if row.state == "active"]
    assert {row.op for row in rows} == {"linear"} and endpoints(llm) == sorted({APART, *before})
    assert sum(row.in_prompts for row in rows) == sum(row.modules for row in rows) == 8
    assert calls(llm, 1) == calls(llm, APART) == {} and calls(llm, 200) == {"linear": 8}
    assert of_a_long_prompt(llm) == pytest.approx(expected, abs=1e-3)
    report.refresh()
    assert report.verified and f"in batches of more than {APART} tokens" in str(report)
    report.undo()
    assert endpoints(llm) == before and calls(llm, 200) == {} and generate(llm) == stock


def test_layers_that_win_in_prompts_alone_stay_in_decodes(llm, of_products):
    stock, before = generate(llm), endpoints(llm)
    report = fastkernels.patch(llm)
    rows = [row for row in report.rows if row.state == "active" and row.op == "linear"]
    assert endpoints(llm) == [MOST, *before] and sum(row.in_prompts for row in rows) == 8
    assert 0 < calls(llm, MOST)["linear"] < 8 and calls(llm, 200) == {"linear": 8}
    assert "in larger batches, too" in str(report)
    report.undo()
    assert endpoints(llm) == before and calls(llm, 200) == {} and generate(llm) == stock


def test_disabled_products_stay_the_hosts_in_prompts(llm, of_products_alone, monkeypatch):
    monkeypatch.setenv("FASTKERNELS_DISABLE", "linear")
    report = fastkernels.patch(llm)
    assert not report.active and calls(llm, 200) == {}
    report.undo()


def test_disabled_parts_leave_prompts_to_the_host(llm, of_prompts, monkeypatch):
    monkeypatch.setenv("FASTKERNELS_DISABLE", "silu_and_mul")
    report = fastkernels.patch(llm)
    row = next(row for row in report.rows if row.op == GATED)
    assert row.state == "off" and "FASTKERNELS_DISABLE=silu_and_mul" in row.reason
    assert calls(llm, 200) == {}
    report.undo()


def test_saved_code_is_loaded_again(llm, table):
    """The second patch of an engine loads what the first has compiled."""
    stock = generate(llm)
    for _ in range(2):
        report = fastkernels.patch(llm)
        loaded = llm.collective_rpc(lambda w: w.get_model().model.was_aot_compile_fn_loaded_from_disk)[0]
        found = generate(llm)
        report.undo()
        assert first_logprobs(found) == pytest.approx(first_logprobs(stock), abs=1e-3)
    assert loaded and generate(llm) == stock


class Fakes:
    """A holder of CUDA graphs, and a count of the warm-ups, each of which captures graphs of its own."""

    def __init__(self, monkeypatch):
        self.warmed, self.graphs = 0, {"stock": 1}
        monkeypatch.setattr(compiled.Compiled, "rewarm", self.rewarm(compiled.Compiled.rewarm))
        monkeypatch.setattr(compiled.Compiled, "__init__", self.init(compiled.Compiled.__init__))

    def init(self, stock):
        def __init__(of, worker):
            stock(of, worker)
            of.graphs = [*of.graphs, (self, "graphs", self.graphs)]

        return __init__

    def rewarm(self, stock):
        def rewarm(of):
            self.warmed += 1
            self.graphs = {"captured": self.warmed}
            stock(of)

        return rewarm


def test_undo_uses_the_graphs_from_before(llm, table, monkeypatch):
    stock, fakes = generate(llm), Fakes(monkeypatch)
    of_stock = fakes.graphs
    report = fastkernels.patch(llm)
    assert fakes.warmed == 1 and fakes.graphs is not of_stock
    report.undo()
    assert fakes.warmed == 1 and fakes.graphs is of_stock
    assert generate(llm) == stock


def test_undo_captures_again_where_a_tensor_has_moved(llm, table, monkeypatch, caplog):
    stock, fakes = generate(llm), Fakes(monkeypatch)
    report = fastkernels.patch(llm)
    llm.collective_rpc(move_a_weight)
    with caplog.at_level("INFO", "fastkernels"):
        report.undo()
    assert fakes.warmed == 2 and "CUDA graphs are captured again: 1 tensors have moved" in caplog.text
    assert generate(llm) == stock


def test_graphs_are_not_kept_without_memory(llm, table, monkeypatch):
    stock, fakes = generate(llm), Fakes(monkeypatch)
    monkeypatch.setattr(compiled, "refusal", lambda worker: "1 MiB is free, and 2 MiB are needed")
    report = fastkernels.patch(llm)
    code = llm.collective_rpc(lambda worker: worker._fastkernels_before)[0]
    assert code.graphs == () and code.code is not None
    report.undo()
    assert fakes.warmed == 2 and generate(llm) == stock


def move_a_weight(worker):
    weight = worker.get_model().model.embed_tokens.weight
    weight.data = weight.data.clone()


def test_where_nothing_of_ours_wins_the_engine_keeps_its_code(llm, monkeypatch):
    def rewarm(_):
        raise AssertionError("compiled and captured again")

    monkeypatch.setattr(compiled.Compiled, "rewarm", rewarm)
    stock, code = generate(llm), compiled_code(llm)
    report = fastkernels.patch(llm)
    rows = {row.op: row for row in report.rows}
    assert rows["rms_norm"].state == "off" and "compiler fuses it" in rows["rms_norm"].reason
    assert not report.active and compiled_code(llm) is code
    report.undo()
    assert compiled_code(llm) is code and generate(llm) == stock


def test_requested_ops_run_in_batches_of_every_size(llm, table):
    report = fastkernels.patch(llm, ops=["rms_norm"])
    assert set(calls(llm, 1)) == set(calls(llm, 64)) == {"rms_norm"}
    report.undo()


def test_engine_built_patched_has_the_same_ranges(llm, table):
    report = fastkernels.patch("vllm")
    try:
        built = make_llm(os.environ["TINY_LLAMA"], **OPTIONS)
        assert endpoints(built)[0] == MOST
        assert set(calls(built, MOST)) == {*OURS} and calls(built, MOST + 1) == {}
    finally:
        report.undo()


@pytest.mark.parametrize("in_tree", [True, False])
def test_transformers_backend(llm, table, in_tree, monkeypatch):
    """Linear layers are ours in small batches; additions outside of the norms leave those to Inductor."""
    from vllm.model_executor.models.transformers.base import Base

    create = Base._create_attention_instances

    def outside_of_the_tree(self, *args):
        """As vLLM 0.26 has its attention layers."""
        create(self, *args)
        parts = [layer.self_attn for layer in self.model.layers]
        self.attention_instances = {i: part._modules.pop("attn") for i, part in enumerate(parts)}
        for part, layer in zip(parts, self.attention_instances.values(), strict=True):
            vars(part)["attn"] = layer

    if not in_tree:
        monkeypatch.setattr(Base, "_create_attention_instances", outside_of_the_tree)
    built = make_llm(os.environ["TINY_LLAMA"], model_impl="transformers", **OPTIONS)
    stock, before = generate(built), endpoints(built)
    report = fastkernels.patch(built)
    rows = {row.op: row for row in report.rows}
    assert len(rows) == len(report.rows)
    assert rows["attention"].reason.startswith("2 left to the host: no tuned table")
    assert rows["rms_norm"].reason == f"5 left to the host: {fusions.ADDED}"
    assert "LlamaRotaryEmbedding, a class of transformers" in rows["rotary_emb"].reason
    assert endpoints(built) == [MOST, *before]
    assert calls(built, MOST) == {"linear": 8, "silu_and_mul": 2, "embedding": 1}
    assert calls(built, MOST + 1) == {}
    assert first_logprobs(generate(built)) == pytest.approx(first_logprobs(stock), abs=1e-3)
    report.undo()
    assert endpoints(built) == before and generate(built) == stock
