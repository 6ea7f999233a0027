"""One eager vLLM engine in this process: asleep, live patch, undo, and refusals."""

import functools
import gc
import json
import os

import pytest
import torch
from fk_integrations.vllm import compiled, prompt_sizes
from support.checks import (
    IMPORT_EXIT,
    LEAVES,
    PROMPTS,
    RMS_NORM_BUG,
    RMS_NORM_ENDLESS,
    RMS_NORM_EXIT,
    RMS_NORM_LATE_BUG,
    RMS_NORM_NAN,
    RMS_NORM_PREPARED,
    RMS_NORM_TWICE,
    check_all_left,
    check_folder,
    check_own_kernels,
    interrupted,
)
from support.hosts.step_calls import STEPS, step_calls
from support.hosts.vllm_engine import first_logprobs, generate, make_llm

import fastkernels
from fastkernels.core.candidate import CandidateError
from fastkernels.core.registry import UnknownName
from fastkernels.patch import PatchError


def unfrozen_llm():
    """A patch collects a frozen heap before it is frozen again, which takes longer than all else that it does."""
    llm = make_llm(os.environ["TINY_LLAMA"])
    gc.unfreeze()
    return llm


@pytest.fixture(scope="module")
def llm():
    return unfrozen_llm()


@pytest.fixture(scope="module")
def other(llm):
    """A second engine. It stays to the end: its shutdown ends the process groups of both."""
    return unfrozen_llm()


@pytest.fixture(scope="module")
def stock(llm):
    return generate(llm)


@pytest.fixture(autouse=True)
def unpatched_afterwards(llm, stock):
    yield
    assert generate(llm) == stock  # tokens and log probabilities, exactly


def worker(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def modules(llm):
    return [
        (name, type(m), vars(m).get("_forward_method")) for name, m in worker(llm).get_model().named_modules()
    ]


def test_a_warm_up_runs_each_size_of_prompts(llm):
    found = []
    model = worker(llm).get_model()
    hook = model.register_forward_pre_hook(
        lambda m, a, k: found.append(len(k["input_ids"])), with_kwargs=True
    )
    compiled.Compiled(worker(llm)).run_prompts()
    hook.remove()
    assert found == prompt_sizes.of(llm.llm_engine.vllm_config) and {1, 513, 528} <= {*found}


def test_patch_runs_prompts_without_the_jit_monitor(llm, stock, monkeypatch):
    """On a GPU kernels compile there, and vLLM's monitor would report them as compiled during inference."""
    from triton import knobs
    from vllm.utils import jit_monitor

    heard, run = [], []

    def compile_a_kernel(worker):
        run.append(1)
        if knobs.runtime.jit_post_compile_hook is not None:
            knobs.runtime.jit_post_compile_hook()

    monkeypatch.setattr(jit_monitor, "_active", True)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **_: heard.append(1))
    hook = knobs.runtime.jit_post_compile_hook
    monkeypatch.setattr(prompt_sizes, "compiles_kernels", lambda worker: True)
    monkeypatch.setattr(prompt_sizes, "run", compile_a_kernel)
    report = fastkernels.patch(llm, ops=["rms_norm"])
    assert (run, heard) == ([1], []) and report.seconds["run prompts"] > 0
    assert knobs.runtime.jit_post_compile_hook is hook
    report.undo()
    assert (run, heard) == ([1], []) and knobs.runtime.jit_post_compile_hook is hook
    compile_a_kernel(None)
    assert heard == [1]


def test_prompts_compute_swiglu_in_the_product(llm, stock):
    def of_prompts():
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True)
        ids = [[1 + i % 90 for i in range(n)] for n in (200, 30)]
        found = [
            llm.generate([{"prompt_token_ids": some}], params, use_tqdm=False)[0].outputs[0] for some in ids
        ]
        return [next(iter(step.values())).logprob for one in found for step in one.logprobs]

    from vllm import SamplingParams

    llm.reset_prefix_cache()
    want, before = of_prompts(), modules(llm)
    report = fastkernels.patch(llm, ops=["linear_silu_and_mul"])
    report.reset()
    assert of_prompts() == pytest.approx(want, abs=2e-2)
    (row,) = report.refresh().rows
    # Two layers of the long prompt, whose 200 tokens are more than a decode's; bfloat16
    assert (row.host_class, row.modules, row.calls) == ("LlamaMLP", 2, 2) and report.verified
    report.undo()
    assert modules(llm) == before


def test_asleep_the_plugin_adds_one_method(llm, stock):
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerBase

    assert VllmConfig.compute_hash.__module__ == "vllm.config.vllm"
    assert WorkerBase.__init__.__module__ == "vllm.v1.worker.worker_base"
    assert WorkerBase.fastkernels_rpc.__module__ == "fk_integrations.vllm.host"
    assert not any(hasattr(kind, "fastkernels") for _, kind, _ in modules(llm))


def test_live_patch_runs_ours_and_undo_is_exact(llm, stock):
    before = modules(llm)
    generate(llm)
    assert worker(llm).model_runner.requests  # vLLM's worker has not yet heard that they are finished
    report = fastkernels.patch(llm, ops=LEAVES)
    assert not worker(llm).model_runner.requests
    assert report.verified and report.version == "0.32.0"
    phases = {"swap modules", "trial step", "rest"}
    assert phases < set(report.seconds) and all(s > 0 for s in report.seconds.values())
    assert "\n  the patch took " in str(report) and report.to_dict()["seconds"] == report.seconds
    calls = report.patched_calls
    patched = generate(llm)
    rows = {(r.op, r.host_class): r for r in report.refresh().active}
    assert rows["rms_norm", "RMSNorm"].modules == 5
    assert rows["silu_and_mul", "SiluAndMul"].modules == 2
    assert rows["rotary_emb", "Llama3RotaryEmbedding"].modules == 1  # the two layers share it
    assert report.patched_calls >= calls + 3 * 8 * (5 + 2 + 2)
    assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
    assert not any(r.fallbacks for r in report.rows)
    report.undo()
    report.undo()
    assert {"trial step", "rest"} < set(report.seconds) and "\n  the undo took " in str(report)
    after = modules(llm)
    assert after == before


def test_patched_decode_steps_make_fewer_dispatches(llm):
    """Nothing here is timed: a step of a small model on a GPU waits for the CPU, whose work these numbers are."""
    before, dispatched = step_calls(llm, "stock")
    report = fastkernels.patch(llm, ops=LEAVES)
    report.reset()
    after, ours = step_calls(llm, "patched")
    runs = sum(row.calls for row in report.refresh().active)
    report.undo()
    assert ours < dispatched
    assert after["fk_integrations"] <= 6 * STEPS  # wrappers of the worker's methods; none for a call of an op
    steps = runs * STEPS // len(range(2 * STEPS + 4))  # of all calls, those in the counted steps
    assert after["fastkernels"] <= 8 * steps + 10 * STEPS
    assert sum(after.values()) <= 1.05 * sum(before.values())


def test_default_patch_on_a_cpu_leaves_all_to_vllm(llm, stock):
    before = modules(llm)
    with fastkernels.patch(llm, strict=True) as report:
        check_all_left(report, "vllm 0.32.0")
        assert generate(llm) == stock and modules(llm) == before
    with pytest.raises(PatchError, match="nothing to patch: gemma_rms_norm"):
        fastkernels.patch(llm, ops=["gemma_rms_norm"])


def test_shapes_of_the_model_are_measured_and_reported(llm, stock, tmp_path, monkeypatch):
    """On a CPU no proposal can run, so that every shape stays with the host."""
    if not worker(llm).get_model().model.layers[0].mlp.down_proj.weight.numel():
        pytest.skip("vLLM packs the weights of linear layers on this CPU (AMX), and frees them")
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    report = fastkernels.patch(llm)
    (row,) = (r for r in report.rows if r.op == "linear")
    assert row.state == "off" and "no kernel of ours is faster at N=" in row.reason
    # Seven sizes of decodes for each shape. One of prompts, but not of the projection whose activation is fused.
    assert len(row.measured) == 4 * 7 + 3 and "onednn, the host's (no proposal)" in row.measured[0]
    verified = ["find shapes", "read choices", "compile kernels", "time proposals", "swap modules"]
    assert [*report.seconds] == [*verified, "rest"]
    report.undo()
    assert len(list((tmp_path / "verified").glob("*.json"))) == 1
    assert generate(llm) == stock


def test_vllms_own_kernels_prove_the_swap(llm, stock, monkeypatch):
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "rms_norm:vllm,silu_and_mul:vllm")
    with fastkernels.patch(llm) as report:
        report.reset()
        assert first_logprobs(generate(llm)) == pytest.approx(first_logprobs(stock), abs=0.1)
        check_own_kernels(report.refresh(), "vllm", calls={"rms_norm": 3 * 8 * 5, "silu_and_mul": 3 * 8 * 2})
    monkeypatch.delenv("FASTKERNELS_PROVIDER")
    with fastkernels.patch(llm, ops=["rms_norm"]) as report:
        assert [r.provider for r in report.rows] == [""]


def test_linear_with_freed_weight_is_unsupported(llm, monkeypatch):
    layer = worker(llm).get_model().model.layers[0].mlp.down_proj
    monkeypatch.setattr(layer.weight, "data", torch.empty(0, dtype=torch.bfloat16))  # like vLLM after packing
    with pytest.raises(PatchError, match=r"strict: linear .*\d+ unsupported: weight has shape \(0,\)"):
        fastkernels.patch(llm, ops=["linear"], strict=True)


def test_default_patch_reports_freed_weights(llm, monkeypatch):
    """Without a tuned table, as on a CPU, the report lists each linear layer with the reason."""
    layers = [m for m in worker(llm).get_model().modules() if type(m).__name__.endswith("ParallelLinear")]
    for layer in layers[1:]:
        monkeypatch.setattr(layer.weight, "data", torch.empty(0, dtype=torch.bfloat16))
    monkeypatch.setattr(layers[0].weight, "data", torch.ones(1, 1, dtype=torch.bfloat16))
    with fastkernels.patch(llm, strict=True) as report:
        (row,) = (r for r in report.rows if r.op == "linear")
    reasons = {r["text"]: (r["kind"], r["modules"]) for r in row.reasons}
    freed = reasons.pop("weight has shape (0,): the host packed or freed it after loading")
    assert row.state == "off" and freed == ("left_to_host", len(layers) - 1)
    assert reasons == {"no tuned table of this device (cpu) lists a kernel of ours": ("left_to_host", 1)}
    monkeypatch.setenv("FASTKERNELS_DISABLE", "linear")
    with fastkernels.patch(llm) as report:
        assert [r.reason for r in report.rows if r.op == "linear"] == ["FASTKERNELS_DISABLE"]


def test_quant_methods_are_replaced_and_given_back(llm, stock):
    methods = [id(getattr(m, "quant_method", None)) for m in worker(llm).get_model().modules()]
    report = fastkernels.patch(llm, ops=["linear", "embedding"])
    assert first_logprobs(generate(llm)) == pytest.approx(first_logprobs(stock), abs=0.1)
    assert {r.op for r in report.refresh().active if r.calls} >= {"embedding"}
    report.undo()
    assert [id(getattr(m, "quant_method", None)) for m in worker(llm).get_model().modules()] == methods


def test_attention_on_a_packed_cpu_cache_is_unsupported(llm):
    with fastkernels.patch(llm, ops=["attention", "rms_norm"]) as report:
        row = next(r for r in report.rows if r.op == "attention")
        assert row.state == "off" and "cpu_attn" in row.reason and "packed" in row.reason


def test_context_manager_and_candidate(llm, stock, candidate):
    with fastkernels.patch(
        llm, ops=["rms_norm"], candidates={"rms_norm": candidate(RMS_NORM_TWICE)}
    ) as report:
        assert first_logprobs(generate(llm)) != pytest.approx(first_logprobs(stock), abs=0.1)
        assert report.refresh().verified


def test_candidate_class_prepares_from_loaded_weights(llm, candidate):
    with fastkernels.patch(llm, ops=["rms_norm"], candidates={"rms_norm": candidate(RMS_NORM_TWICE)}):
        expected = first_logprobs(generate(llm))
    parts = list(worker(llm).get_model().modules())
    names = [set(vars(m)) for m in parts]
    source = candidate(RMS_NORM_PREPARED)
    with fastkernels.patch(llm, ops=["rms_norm"], candidates={"rms_norm": source}) as report:
        assert first_logprobs(generate(llm)) == pytest.approx(expected, abs=0.1)
        assert sum(hasattr(m, "doubled") for m in parts) == sum(row.modules for row in report.active) == 5
    assert [set(vars(m)) for m in parts] == names


def test_a_folder_of_candidates(llm, stock, folder):
    with fastkernels.patch(llm, ops=["rms_norm", "silu_and_mul"], candidates=folder) as report:
        assert first_logprobs(generate(llm)) != pytest.approx(first_logprobs(stock), abs=0.1)
        check_folder(report, folder)
    assert first_logprobs(generate(llm)) == first_logprobs(stock)


def test_reset_sets_the_counters_to_zero(llm):
    with fastkernels.patch(llm, ops=["rms_norm"]) as report:
        assert report.reset().patched_calls == 0 and not report.verified
        generate(llm, tokens=1)
        assert report.refresh().patched_calls == 3 * 5


def test_calls_of_another_engine_prove_nothing(llm, other):
    from fastkernels.core.dispatch import OPS

    with fastkernels.patch(llm, ops=LEAVES) as a, fastkernels.patch(other, ops=LEAVES) as b:
        a.reset()
        b.reset()
        generate(other, tokens=1)
        OPS["rms_norm"](torch.randn(2, 8), torch.ones(8), 1e-6, None, None, False)  # of no engine
        assert not any(row.calls for row in a.refresh().active) and not a.verified
        assert {row.op: row.calls for row in b.refresh().active}["rms_norm"] == 3 * 5 and b.verified
        a.reset()
        generate(llm, tokens=1)
        calls = {(row.op, row.host_class): row.calls for row in a.refresh().active}
        assert a.verified and b.refresh().patched_calls == 3 * (5 + 2)  # vLLM shares rotary embeddings
        assert calls.pop(("rotary_emb", "ApplyRotaryEmb")) == 0  # it is inside the other, which computes all
        assert list(calls.values()) == [3 * 5, 3 * 2, 3 * 2] and a.patched_calls == 3 * (5 + 2 + 2)


def test_a_part_that_never_runs_shows_no_calls(llm):
    """Norms of another class, in a tower like that of a model with images."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models.commandr import RMSNorm

    model = worker(llm).get_model()
    with set_current_vllm_config(llm.llm_engine.vllm_config):
        model.tower = torch.nn.Sequential(RMSNorm(16), RMSNorm(16))
    try:
        with fastkernels.patch(llm, ops="rms_norm") as report:
            generate(llm, tokens=1)
            report.reset()
            generate(llm, tokens=1)
            rows = {row.modules: (row.calls, row.proof) for row in report.refresh().active}
            assert rows == {5: (3 * 5, "calls"), 2: (0, "uncalled")}
            llm.apply_model(lambda model: model.tower[0](torch.randn(3, 16)) and None)
            rows = {row.modules: (row.calls, row.proof) for row in report.refresh().active}
            assert rows == {5: (3 * 5, "calls"), 2: (1, "calls")}
        assert {type(part) for part in model.tower} == {RMSNorm}
    finally:
        del model.tower


def test_disable(llm, monkeypatch):
    monkeypatch.setenv("FASTKERNELS_DISABLE", "silu_and_mul")
    with fastkernels.patch(llm, ops=LEAVES) as report:
        assert {r.op: (r.state, r.reason) for r in report.rows}["silu_and_mul"] == (
            "off",
            "FASTKERNELS_DISABLE",
        )
        assert {r.op for r in report.active} == {"rms_norm", "rotary_emb"}


def test_unknown_source_turns_the_op_off_or_fails_when_strict(llm, monkeypatch):
    from fk_integrations.core import versions

    path = "vllm.model_executor.layers.layernorm:RMSNorm"
    recorded = {"0.32.0": {"classes": {path: {"fingerprint": "0" * 16}}}}
    known = versions.recorded("vllm")
    classes = {k: v for k, v in known["0.32.0"]["classes"].items() if k != path}
    recorded["0.32.0"]["classes"].update(classes)
    monkeypatch.setattr(versions, "recorded", lambda host: recorded)
    with fastkernels.patch(llm, ops=["rms_norm", "silu_and_mul"]) as report:
        row = next(r for r in report.rows if r.op == "rms_norm")
        assert row.state == "off" and path in row.reason and "0.32.0" in row.reason
        assert [r.op for r in report.active] == ["silu_and_mul"]
    with pytest.raises(PatchError, match=r"strict.*which we do not know"):
        fastkernels.patch(llm, ops=["rms_norm", "silu_and_mul"], strict=True)


def test_second_patch_is_refused_until_undo(llm):
    with fastkernels.patch(llm, ops=["rms_norm"]) as report:
        with pytest.raises(PatchError, match="patched already"):
            fastkernels.patch(llm, ops=["silu_and_mul"])
        generate(llm)
        assert [r.op for r in report.refresh().active] == ["rms_norm"]
    fastkernels.patch(llm, ops=["silu_and_mul"]).undo()


def test_instance_patched_by_other_code_is_refused(llm):
    norm = worker(llm).get_model().model.norm
    norm.forward = functools.partial(norm.forward)
    try:
        with fastkernels.patch(llm, ops=["rms_norm"]) as report:
            assert report.rows[0].modules == 4 and "other code" in report.rows[0].reason
    finally:
        del norm.forward


def test_class_patched_by_other_code_is_refused(llm, monkeypatch):
    from vllm.model_executor.layers.layernorm import RMSNorm

    stock = RMSNorm.forward_native
    monkeypatch.setattr(RMSNorm, "forward_native", lambda self, x, residual=None: stock(self, x, residual))
    with fastkernels.patch(llm, ops=["rms_norm", "silu_and_mul"]) as report:
        rows = {r.op: r for r in report.rows}
        assert (
            rows["rms_norm"].state == "off"
            and "RMSNorm.forward_native was replaced" in rows["rms_norm"].reason
        )
        assert rows["silu_and_mul"].modules == 2


def test_batch_invariant_mode_keeps_out_what_is_not(llm, monkeypatch):
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    with fastkernels.patch(llm, ops=["rms_norm", "linear", "attention"]) as report:
        rows = {r.op: r for r in report.rows}
        assert rows["rms_norm"].modules == 5
        assert all("VLLM_BATCH_INVARIANT" in rows[op].reason for op in ("linear", "attention"))


def test_failing_candidate_leaves_everything_as_it_was(llm, candidate):
    before = modules(llm)
    with pytest.raises(PatchError, match="a bug in the candidate"):
        fastkernels.patch(
            llm, ops=["rms_norm", "silu_and_mul"], candidates={"rms_norm": candidate(RMS_NORM_BUG)}
        )
    assert modules(llm) == before
    for source, message in (
        (IMPORT_EXIT, r"calls sys.exit\(3\) while it is imported"),
        (RMS_NORM_EXIT, "SystemExit: 3"),
    ):
        with pytest.raises(PatchError, match=message):
            fastkernels.patch(llm, candidates={"rms_norm": candidate(source)})
    assert modules(llm) == before
    with pytest.raises(CandidateError, match="there is no file"):
        fastkernels.patch(llm, candidates={"rms_norm": "/nowhere.py"})
    with pytest.raises(UnknownName, match="Did you mean 'rms_norm'"):
        fastkernels.patch(llm, ops=["rms_nrom"])


def test_endless_candidate_is_ended(llm, candidate, monkeypatch):
    before, file = modules(llm), candidate(RMS_NORM_ENDLESS)
    monkeypatch.setenv("FASTKERNELS_TRIAL_S", "2")
    with pytest.raises(PatchError, match=r"the trial step did not end within 2 s \(FASTKERNELS_TRIAL_S\)"):
        fastkernels.patch(llm, ops=["rms_norm"], candidates={"rms_norm": file})
    assert modules(llm) == before


def test_undo_after_nan_is_exact(llm, candidate):
    with fastkernels.patch(llm, ops=["rms_norm"], candidates={"rms_norm": candidate(RMS_NORM_NAN)}):
        generate(llm)
        caches = worker(llm).model_runner.kv_caches
        assert any(cache.isnan().any() for cache in caches)
    assert not any(cache.any() for cache in caches)


def test_undo_after_a_candidate_raised(llm, candidate):
    before = modules(llm)
    report = fastkernels.patch(llm, ops=["rms_norm"], candidates={"rms_norm": candidate(RMS_NORM_LATE_BUG)})
    with pytest.raises(ValueError, match="a bug in the candidate"):
        generate(llm)
    assert llm.llm_engine.has_unfinished_requests()
    report.undo()
    assert not llm.llm_engine.has_unfinished_requests() and modules(llm) == before
    assert "execute_model" not in vars(worker(llm))


def test_every_requested_op_has_a_row(llm, caplog):
    requested = ["rms_norm", "sampling", "logits_processor", "store_kvcache"]
    with caplog.at_level("INFO", "fastkernels"), fastkernels.patch(llm, ops=requested) as report:
        rows = {row.op: row for row in report.rows}
        assert list(rows) == requested and [row.op for row in report.active] == ["rms_norm"]
        assert "not in a live host: in a live host the host's sampler stays" in rows["sampling"].reason
        assert "it runs inside attention" in rows["store_kvcache"].reason
    (block,) = [r.getMessage() for r in caplog.records if "patched" in r.getMessage()]
    first, patched, *off = block.splitlines()
    assert first == "vllm 0.32.0, rank 0: 5 modules patched" and patched == "  patched: rms_norm (5 RMSNorm)"
    assert len(off) == 3 and all(line.startswith("  unsupported: ") for line in off)
    with fastkernels.patch(llm, ops="rms_norm") as report:
        assert [row.op for row in report.rows] == ["rms_norm"]
    with pytest.raises(PatchError, match=r"nothing to patch: sampling .*not in a live host"):
        fastkernels.patch(llm, ops="sampling")
    with pytest.raises(PatchError, match=r"strict: .*sampling .*not in a live host"):
        fastkernels.patch(llm, ops=requested, strict=True)


def test_unfinished_requests_are_refused(llm):
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request("0", "abc", SamplingParams(max_tokens=2, ignore_eos=True))
    with pytest.raises(PatchError, match="unfinished"):
        fastkernels.patch(llm, ops=["rms_norm"])
    while engine.has_unfinished_requests():
        engine.step()
    report = fastkernels.patch(llm, ops=["rms_norm"])
    engine.add_request("1", "abc", SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    with pytest.raises(PatchError, match="unfinished"):
        report.undo()  # no step has failed: the request is not aborted
    while engine.has_unfinished_requests():
        engine.step()
    report.undo()


def test_strict_accepts_an_untied_head(llm):
    assert not worker(llm).get_model().config.tie_word_embeddings
    with fastkernels.patch(llm, ops=["embedding"], strict=True) as report:
        assert [(row.op, row.modules, row.reason) for row in report.rows] == [("embedding", 1, "")]


def test_report_file_has_the_counters(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTKERNELS_REPORT", str(tmp_path))
    with fastkernels.patch(llm, ops=["rms_norm"]):
        file = tmp_path / f"vllm-0-{os.getpid()}.json"
        reply = json.loads(file.read_text())
        assert reply["host"] == "vllm" and reply["rows"][0]["calls"] > 0
    assert json.loads(file.read_text())["rows"] == []


def test_trace_proves_what_runs(llm):
    from fk_integrations.vllm.host import HOST

    from fastkernels.patch import Request

    with fastkernels.patch(llm, ops=["rms_norm"]) as report:
        HOST.call(llm, Request("trace_start"))
        generate(llm, tokens=1)
        (reply,) = HOST.call(llm, Request("trace_stop"))
        assert reply["kernels"]["fastkernels::rms_norm"] == 3 * 5
        assert set(reply["us"]) == set(reply["kernels"]) and reply["us"]["fastkernels::rms_norm"] > 0
        assert reply["busy_us"] == 0  # on a CPU
        assert report.refresh().rows[0].proof == "trace"


def test_compile_key_differs_while_patched(llm):
    from vllm.config import VllmConfig

    stock, config = VllmConfig.compute_hash, llm.llm_engine.vllm_config
    asleep, keys = config.compute_hash(), set()
    for ops in (["rms_norm"], ["silu_and_mul"], ["rms_norm"]):
        with fastkernels.patch(llm, ops=ops):
            keys.add(config.compute_hash())
        assert VllmConfig.compute_hash is stock and config.compute_hash() == asleep
    assert len(keys) == 2 and asleep not in keys


def test_compile_key_follows_the_swapped_modules(llm, monkeypatch):
    """A tuned table, or what a layer supports, decides without a change of the request."""
    from fastkernels.core import registry

    config, keys = llm.llm_engine.vllm_config, set()
    norms = {id(m) for m in worker(llm).get_model().modules() if type(m).__name__ == "RMSNorm"}
    for left in (0, 1):
        skipped = sorted(norms)[:left]
        ours = registry.op_class("rms_norm", "VllmRMSNorm")
        stays = staticmethod(lambda m, s=skipped: "not this one" if id(m) in s else None)
        monkeypatch.setattr(ours, "supports", stays, raising=False)
        with fastkernels.patch(llm, ops=["rms_norm"]) as report:
            assert report.patched_modules == 5 - left
            keys.add(config.compute_hash())
    assert len(keys) == 2


def test_calls_are_recorded(llm, stock, tmp_path):
    from fk_bench.capture import captures, replay
    from fk_integrations.vllm.host import HOST

    from fastkernels.patch import Request

    with fastkernels.patch(llm, ops=LEAVES):
        HOST.call(llm, Request("record_start", options={"values": 4}))
        generate(llm, tokens=3)
        options = {"folder": str(tmp_path / "made"), "meta": {"model": "tiny"}}
        (reply,) = HOST.call(llm, Request("record_stop", options=options))
    found = captures.load(tmp_path / "made")
    assert found.problems == [] and reply["recorded"] == found.calls
    steps = 3 * len(PROMPTS)
    assert found.ops["rms_norm"].count == 5 * steps and found.ops["rotary_emb"].count == 2 * steps
    decodes = [c for c in replay.captured_cases("rotary_emb", tmp_path) if c.case.dims["tokens"] == 1]
    positions = sorted(int(c.values["positions"]) for c in decodes)
    lengths = sorted(c.case.dims["tokens"] for c in replay.captured_cases("rotary_emb", tmp_path))
    assert positions and positions[0] in lengths  # the first decoded token follows its prompt
    (norm,) = [m for m in found.modules if m.cls.endswith(".layernorm:RMSNorm")]
    assert norm.count == 5 and norm.args["hidden_size"] == 128


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.1, 0.3])
def test_interrupted_patch_leaves_everything_as_it_was(llm, seconds):
    before = modules(llm)
    if not interrupted(lambda: fastkernels.patch(llm, ops=LEAVES), seconds):
        fastkernels.unpatch(llm)
    assert modules(llm) == before and "execute_model" not in vars(worker(llm))


@pytest.mark.parametrize("step", ["execute_dummy_batch", "_clear_kv_cache"])
def test_interrupted_change_is_undone_or_ended_by_the_next(llm, step, monkeypatch):
    """Ctrl-C in a step of a patch, and in the same step of an undo."""
    from fk_integrations.vllm import host

    before = modules(llm)
    owner = host if step == "_clear_kv_cache" else worker(llm)
    report = fastkernels.patch(llm, ops=LEAVES)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, step, stop, raising=False)
        with pytest.raises(KeyboardInterrupt):
            report.undo()
    report.undo()
    assert modules(llm) == before
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, stop, raising=False)
        if step == "execute_dummy_batch":
            with pytest.raises(KeyboardInterrupt):
                fastkernels.patch(llm, ops=LEAVES)
    fastkernels.unpatch(llm)
    assert modules(llm) == before and fastkernels.patch(llm, ops=LEAVES).undo() is None
