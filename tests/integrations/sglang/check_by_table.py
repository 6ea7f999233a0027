"""Attention by default: ours where the chip's table lists it as faster, live and before construction."""

import pytest
from support.checks import PROMPTS
from support.hosts.sglang_engine import generate, ids, make_engine

import fastkernels
from fastkernels.core.tuning import Entry, Table

CONTEXTS = (8, 16, 64)


def write(path, **shape):
    """Write a CPU's table where decodes of one sequence of the tiny model's shape, changed by `shape`, are faster."""
    shape = {
        "heads": 4,
        "kv_heads": 2,
        "head_size": 32,
        "block_size": 1,
        "window": 0,
        "dtype": "float32",
        **shape,
    }
    how = {"provider": "reference", "baseline": "host", "run": "r1", "speedup": 1.3, "ci95": (1.2, 1.4)}
    entries = [Entry("attention_decode", shape, {"batch": 1, "context": n}, **how) for n in CONTEXTS]
    path.write_text(Table("cpu", {"r1": {}}, tuple(entries)).to_json())


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """engine(**shape): an engine on a machine that has the table of `write`."""
    made = []

    def make(**shape):
        write(tmp_path / "cpu.json", **shape)
        monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path))
        made.append(make_engine(dtype="float32"))
        return made[0]

    yield make
    for one in made:
        one.shutdown()


def attention(report):
    (row,) = [r for r in report.refresh().rows if r.op == "attention"]
    return row


def test_decodes_are_ours_and_prefills_the_hosts(engine, monkeypatch):
    engine = engine()
    stock = generate(engine)
    with fastkernels.patch(engine) as report:
        report.reset()
        assert ids(generate(engine)) == ids(stock)
        row = attention(report)
        decodes = 7 * len(PROMPTS)  # the first of eight tokens is of the prefill
        assert (row.state, row.modules, row.reason) == ("active", 2, "")
        assert row.calls == 2 * 2 * decodes and not row.fallbacks  # store and attend, in two layers
        assert row.left == {"a batch with more than one token of a sequence": 2 * len(PROMPTS)}
        assert f"left to the host {2 * len(PROMPTS)}x: a batch with more than one token" in str(report)
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        engine.generate(PROMPTS, sampling)  # two or three at once: not in the table
        assert any("no table lists as faster" in why for why in attention(report).left)
    assert generate(engine) == stock
    with fastkernels.patch(engine, ops=["attention"]) as report:
        report.reset()
        assert ids(generate(engine)) == ids(stock)
        assert attention(report).calls == 2 * 2 * 8 * len(PROMPTS) and not attention(report).left
    monkeypatch.setenv("FASTKERNELS_DISABLE", "attention_decode")
    with fastkernels.patch(engine) as report:
        assert (attention(report).state, attention(report).reason) == ("off", "FASTKERNELS_DISABLE")
    assert generate(engine) == stock


def test_a_table_without_the_shape_leaves_it(engine):
    report = fastkernels.patch("sglang")
    try:
        generate(engine(head_size=64))
        row = attention(report)
        assert (row.state, row.modules) == ("off", 0) and not report.active
        assert row.reason == (
            "2 left to the host: heads=4 kv_heads=2 head_size=32 block_size=1 window=0 dtype=float32 is not tuned"
            " on cpu: `fk-bench tune attention_decode --shape"
            " heads=4,kv_heads=2,head_size=32,block_size=1,window=0,dtype=float32` would measure it"
        )
    finally:
        report.undo()
