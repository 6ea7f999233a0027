"""A live sglang.Engine, one for all tests: patch, proof in the scheduler's process, exact undo, refusals."""

import contextlib
import os

import pytest
from support.checks import (
    IMPORT_EXIT,
    LEAVES,
    PROMPTS,
    RMS_NORM_BUG,
    RMS_NORM_ENDLESS,
    RMS_NORM_EXIT,
    RMS_NORM_NAN,
    RMS_NORM_TWICE,
    check_all_left,
    check_folder,
    interrupted,
)
from support.hosts.sglang_engine import forced, generate, ids, make_engine

import fastkernels
from fastkernels.core.registry import UnknownName
from fastkernels.patch import PatchError, Request, find_host


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FASTKERNELS_TRIAL_S", "3")  # of the scheduler
        engine = make_engine()
    yield engine
    engine.shutdown()
    with pytest.raises(PatchError, match="the engine has ended"):
        fastkernels.patch(engine)


@pytest.fixture(scope="module")
def stock(engine):
    """The engine's outputs without a patch: asleep, the plugin has patched nothing."""
    (reply,) = find_host(engine).call(engine, Request("report"))
    assert reply["rows"] == [] and reply["error"] is None and reply["pid"] != os.getpid()
    return generate(engine)


def test_default_patch_on_a_cpu_leaves_all_to_sglang(engine, stock):
    with fastkernels.patch(engine, strict=True) as report:
        check_all_left(report, "sglang 0.5.23")
        assert generate(engine) == stock


def test_patch_runs_in_the_scheduler_and_undo_is_exact(engine, stock):
    report = fastkernels.patch(engine, ops=LEAVES)
    assert report.verified  # by the trial step
    assert report.seconds["swap modules"] > 0 and "\n  the patch took " in str(report)
    report.reset()
    patched = generate(engine)
    rows = {(r.op, r.host_class): r for r in report.refresh().rows}
    steps = 8 * len(PROMPTS)
    assert list(report.pids) == [0] and report.pids[0] != os.getpid()
    assert report.verified and report.version == "0.5.23"
    assert rows["rms_norm", "RMSNorm"].modules == 5 and rows["rms_norm", "RMSNorm"].calls == 5 * steps
    assert rows["silu_and_mul", "SiluAndMul"].calls == 2 * steps
    assert rows["rotary_emb", "Llama3RotaryEmbedding"].calls == 2 * steps
    assert ids(patched) == ids(stock)
    for (_, ours), (_, theirs) in zip(patched, stock, strict=True):
        assert ours == pytest.approx(theirs, abs=0.05)
    report.undo()
    assert list(report.seconds) == ["capture graphs"]
    assert generate(engine) == stock
    (reply,) = find_host(engine).call(engine, Request("report"))
    assert reply["rows"] == []


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.1, 0.3, 0.6])
def test_interrupted_patch_is_undone(engine, stock, seconds):
    if not interrupted(lambda: fastkernels.patch(engine, ops=["rms_norm"]), seconds):
        fastkernels.unpatch(engine)
    assert generate(engine) == stock
    report = fastkernels.patch(engine, ops=["rms_norm"])
    interrupted(report.undo, seconds / 10)
    report.undo()
    assert generate(engine) == stock
    fastkernels.patch(engine, ops=["rms_norm"])  # without its report
    fastkernels.unpatch(engine)
    (reply,) = find_host(engine).call(engine, Request("report"))
    assert reply["rows"] == [] and generate(engine) == stock


def test_a_context_manager_and_a_list_of_ops(engine, stock):
    with fastkernels.patch(engine, ops=["silu_and_mul"]) as report:
        generate(engine)
        assert {r.op for r in report.refresh().active} == {"silu_and_mul"} and report.verified
    assert generate(engine) == stock


def test_prompts_compute_swiglu_in_the_product(engine, stock):
    def of_prompts():
        sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        ids = [[1 + i % 90 for i in range(n)] for n in (200, 30)]
        engine.flush_cache()
        found = [
            engine.generate(input_ids=some, sampling_params=sampling, return_logprob=True) for some in ids
        ]
        return [step[0] for one in found for step in one["meta_info"]["output_token_logprobs"]]

    want = of_prompts()
    with fastkernels.patch(engine, ops=["linear_silu_and_mul"]) as report:
        report.reset()
        assert of_prompts() == pytest.approx(want, abs=2e-2)
        (row,) = report.refresh().rows
        assert (row.host_class, row.modules, row.calls) == ("LlamaMLP", 2, 2)
    assert of_prompts() == want


def test_linear_layers_through_their_method_objects(engine, stock):
    with fastkernels.patch(engine, ops=["linear"]) as report:
        assert ids(generate(engine)) == ids(stock)
        (row,) = report.refresh().active
        assert row.modules == 8 and row.calls > 0  # qkv, o, gate_up and down of two layers
    assert generate(engine) == stock


def test_attention_through_the_backend(engine, stock):
    """Teacher-forced log probabilities in bfloat16; check_tensor_parallel compares greedy tokens in float32."""
    texts = ["The quick brown fox " * 9 + end for end in ("jumps", "sleeps")]
    before = [forced(engine, text) for text in ["ab", *texts]]
    with fastkernels.patch(engine, ops=["attention"]) as report:
        after = [forced(engine, text) for text in ["ab", *texts]]
        for ours, theirs in zip(after, before, strict=True):
            assert ours == pytest.approx(theirs, abs=0.1)
        generate(engine)
        engine.generate(
            ["ab", *texts, texts[0]], {"max_new_tokens": 4, "ignore_eos": True}
        )  # prefixes are cached
        (row,) = report.refresh().active
        steps = 3 + 8 * len(PROMPTS) + 4
        assert row.modules == 2 and row.calls >= 2 * 2 * steps  # store and attend, in two layers
        assert row.proof == "calls" and not row.fallbacks
    assert generate(engine) == stock


def test_the_prefix_cache_holds_nothing_of_the_other_kernels(engine, stock, candidate):
    """A norm that is twice too large changes the output at once, and undo removes its cached results."""
    with fastkernels.patch(
        engine, ops=["rms_norm"], candidates={"rms_norm": candidate(RMS_NORM_TWICE)}
    ) as report:
        assert [p for _, p in generate(engine)] != [p for _, p in stock]
        assert report.refresh().verified
    assert generate(engine) == stock


def test_a_folder_of_candidates(engine, stock, folder):
    with fastkernels.patch(engine, ops=["rms_norm", "silu_and_mul"], candidates=folder) as report:
        assert [p for _, p in generate(engine)] != [p for _, p in stock]
        check_folder(report, folder)
    assert generate(engine) == stock


BROKEN = {
    "raises": (RMS_NORM_BUG, "the trial step failed: ValueError: a bug in the candidate"),
    "exits": (RMS_NORM_EXIT, "the trial step failed: SystemExit: 3"),
    "exits at import": (IMPORT_EXIT, r"calls sys.exit\(3\) while it is imported"),
    "is endless": (RMS_NORM_ENDLESS, "the trial step did not end within 3 s"),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_candidate_is_refused(source, message, engine, stock, candidate):
    with pytest.raises(PatchError, match=message):
        fastkernels.patch(engine, ops=["rms_norm"], candidates={"rms_norm": candidate(source)})
    (reply,) = find_host(engine).call(engine, Request("report"))
    assert reply["rows"] == []
    assert generate(engine) == stock


def test_undo_after_nan_is_exact(engine, stock, candidate):
    with fastkernels.patch(
        engine, ops=["rms_norm"], candidates={"rms_norm": candidate(RMS_NORM_NAN)}
    ) as report:
        with contextlib.suppress(ValueError):  # NaN is no JSON
            generate(engine)
        assert report.refresh().verified
    assert generate(engine) == stock


def test_refusals_change_nothing(engine, stock, candidate):
    with (
        fastkernels.patch(engine, ops=["rms_norm"]),
        pytest.raises(PatchError, match="undo that patch first"),
    ):
        fastkernels.patch(engine)
    with pytest.raises(UnknownName, match="rms_nrom"):
        fastkernels.patch(engine, ops=["rms_nrom"])
    broken = {"rms_norm": candidate("import nothing_of_that_name\n")}
    with pytest.raises(PatchError, match="nothing_of_that_name"):
        fastkernels.patch(engine, candidates=broken)
    assert generate(engine) == stock


def test_a_busy_engine_is_not_changed(engine, stock):
    import threading

    sampling = {"temperature": 0, "max_new_tokens": 250, "ignore_eos": True}
    begun = threading.Event()
    running = threading.Thread(
        target=lambda: [begun.set() for _ in engine.generate("ab", sampling, stream=True)]
    )
    from fk_integrations.sglang import host

    wait, host.IDLE_WAIT_S = host.IDLE_WAIT_S, 0.2
    try:
        running.start()
        assert begun.wait(60)
        with pytest.raises(PatchError, match="unfinished requests"):
            fastkernels.patch(engine)
    finally:
        host.IDLE_WAIT_S = wait
        running.join(timeout=60)
    fastkernels.patch(engine).undo()
    assert generate(engine) == stock


def test_a_trace_shows_our_operators(engine, stock):
    host = find_host(engine)
    with fastkernels.patch(engine, ops=["rms_norm"]) as report:
        host.call(engine, Request("trace_start"))
        generate(engine, tokens=2)
        (reply,) = host.call(engine, Request("trace_stop"))
        assert any("rms_norm" in name for name in reply["kernels"])
        assert report.refresh().active[0].proof == "trace"


def test_calls_are_recorded(engine, stock, tmp_path):
    from fk_bench.capture import captures, replay

    host = find_host(engine)

    with fastkernels.patch(engine, ops=["rms_norm", "rotary_emb", "attention"]):
        host.call(engine, Request("record_start", options={"values": 4}))
        generate(engine, tokens=3)
        options = {"folder": str(tmp_path / "made"), "meta": {"model": "tiny"}}
        (reply,) = host.call(engine, Request("record_stop", options=options))
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
    stored = replay.captured_cases("store_kvcache", tmp_path)
    assert stored and all(c.case.dims["block_size"] == 1 for c in stored)
    assert max(len(c.case.dims["seq_lens"]) for c in replay.captured_cases("attention_decode", tmp_path)) == 1
