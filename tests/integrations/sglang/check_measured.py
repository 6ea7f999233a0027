"""A patch measures attention, linear layers and the LM head of a real engine, once, and the head can be ours."""

import pytest
from support.hosts.sglang_engine import generate, ids, make_engine

import fastkernels

POINTS = [(batch, 2048) for batch in (1, 4, 8, 16, 32, 64)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTKERNELS_VERIFY", "1")
        patch.setenv("FASTKERNELS_CACHE", str(tmp_path_factory.mktemp("cache")))
        engine = make_engine(dtype="float32")
        yield engine
        engine.shutdown()


@pytest.fixture(scope="module")
def stock(engine):
    return generate(engine)


def test_points_are_the_models_and_kept(engine, stock):
    with fastkernels.patch(engine) as report:
        lines = [line for row in report.rows for line in row.measured]
        shape = "heads=4 kv_heads=2 head_size=32 block_size=1 window=0 dtype=float32"
        found = [line.partition(":")[0] for line in lines if line.startswith("attention_decode")]
        assert found == [f"attention_decode {shape} batch={b} context={c}" for b, c in POINTS]
        linears = {line.partition(" M=")[0] for line in lines if line.startswith("linear ")}
        shapes = ((128, 128), (128, 256), (256, 128), (512, 128))  # the last one is gate and up, and the head
        assert linears == {f"linear N={n} K={k} dtype=float32" for n, k in shapes}
        assert ids(generate(engine)) == ids(stock)
    with fastkernels.patch(engine) as report:
        assert [line for row in report.rows for line in row.measured] == lines
        assert "time proposals" not in report.seconds
    assert generate(engine) == stock


def test_the_heads_product_is_ours_on_request(engine, stock):
    with fastkernels.patch(engine, ops=["linear", "logits_processor"]) as report:
        assert ids(generate(engine)) == ids(stock)
        rows = {row.op: row for row in report.refresh().rows}
        head = rows["logits_processor"]
        assert (head.state, head.modules, head.host_class) == ("active", 1, "LogitsProcessor")
        assert head.calls > 0 and not head.fallbacks and rows["linear"].calls == 8 * head.calls
    assert generate(engine) == stock
