"""SGLang's features with the patch (docs/what-works.md): the same tokens, and a report that matches the page."""

import os
from pathlib import Path

import pytest
from fk_integrations.sglang import host
from support.hosts.sglang_engine import PROMPTS, generate, ids, make_engine, with_stand_ins
from support.tiny import make_tiny
from support.variants import make_lora

import fastkernels
from fastkernels.patch import PatchError

LEAVES = ("rms_norm", "silu_and_mul", "rotary_emb", "embedding")
BASE = Path(os.environ["TINY_LLAMA"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    adapter = make_lora(tmp_path_factory.mktemp("adapter") / "lora", BASE)
    with with_stand_ins():
        engine = make_engine(
            enable_lora=True, lora_paths={"a": str(adapter)}, max_lora_rank=8, lora_backend="torch_native"
        )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def stock(engine):
    return generate(engine)


def check_leaves(report):
    """The norms, activations, ropes and embedding of the two layers are ours and have run, without a fallback."""
    rows = {r.op: r for r in report.refresh().active}
    assert set(LEAVES) <= set(rows) and report.verified and not any(r.fallbacks for r in report.rows)
    assert (rows["rms_norm"].modules, rows["silu_and_mul"].modules, rows["embedding"].modules) == (5, 2, 1)
    return rows


def test_lora(engine, stock):
    def adapted():
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        return [engine.generate(p, sampling, lora_path="a")["output_ids"] for p in PROMPTS]

    theirs = adapted()
    assert theirs != ids(stock)
    with fastkernels.patch(engine, ops=[*LEAVES, "linear", "gated_mlp"]) as report:
        assert adapted() == theirs and ids(generate(engine)) == ids(stock)
        rows = check_leaves(report)
        assert rows["linear"].modules == 8 and rows["linear"].calls == 8 * rows["embedding"].calls
        assert rows["gated_mlp"].modules == 2
    assert generate(engine) == stock and adapted() == theirs


def test_prefix_cache(engine, stock):
    text, sampling = "The quick brown fox " * 5, {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}

    def cached(end):
        found = engine.generate(text + end, sampling)
        return found["meta_info"]["cached_tokens"], found["output_ids"]

    engine.flush_cache()
    (first, _), (second, tokens) = cached("jumps"), cached("sleeps")
    assert first < 2 and second >= len(text) - 1
    with fastkernels.patch(engine, ops=LEAVES) as report:
        (first, _), (again, patched) = cached("jumps"), cached("sleeps")
        assert first < 2 and (again, patched) == (second, tokens)  # nothing cached by other kernels
        check_leaves(report)
    first, undone = cached("sleeps")
    assert first < 2 and undone == tokens


def test_ours_reads_reloaded_weights(engine, stock, tmp_path):
    other = make_tiny(tmp_path / "other", seed=1)

    def load(path):
        done, message, *_ = engine.update_weights_from_disk(str(path))
        assert done, message

    load(other)
    changed = generate(engine)
    load(BASE)
    assert generate(engine) == stock and changed != stock
    with fastkernels.patch(engine, ops=[*LEAVES, "linear"]) as report:
        load(other)
        report.reset()
        assert ids(generate(engine)) == ids(changed)
        check_leaves(report)
        load(BASE)
    assert generate(engine) == stock


def test_an_engine_whose_memory_is_released_is_not_changed(engine, stock, monkeypatch):
    """No step is run either: it would read released memory, which ends the scheduler on a GPU."""
    report = fastkernels.patch(engine, ops=LEAVES)
    send = host._send

    def with_graphs(*args):  # a CPU has no graphs to capture again
        return [{**reply, "graphs": True} for reply in send(*args)]

    with monkeypatch.context() as patched:
        patched.setattr(host, "_send", with_graphs)
        patched.setattr(engine, "generate", lambda **_: pytest.fail("a step while memory is released"))
        engine.release_memory_occupation()
        with pytest.raises(PatchError, match=r"memory of the engine is released \(.*weights.*\)"):
            report.undo()
    engine.resume_memory_occupation()
    assert ids(generate(engine)) == ids(stock)
    check_leaves(report)
    report.undo()
    assert generate(engine) == stock
