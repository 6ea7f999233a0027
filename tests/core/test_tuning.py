"""Tuned tables: validation, look-up by shape and size, and their place in the order of providers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastkernels.core import registry
from fastkernels.core import tuning as tuned
from fastkernels.core.dispatch import Key, Op, Provider, define, observe
from fastkernels.core.tuning import REACH, Entry, Lookup, Table, TableError

RUNS = {"r1": {"date": "2026-11-21", "commit": "0123456789ab", "versions": {"torch": "2.11.0"}}}


def _scaled(x: torch.Tensor, by: float = 3.0) -> torch.Tensor:
    return by * x


def _even_only(x: torch.Tensor) -> str | None:
    return None if x.shape[-1] % 2 == 0 else f"{x.shape[-1]} columns are odd"


# Each provider has another factor, which says who ran.
SCALE = define(
    "test_scale(Tensor x) -> Tensor",
    fake=lambda x: torch.empty_like(x),
    providers=(
        Provider("first", lambda x: 1 * x, devices=("cpu",)),
        Provider("sized", _scaled, devices=("cpu",), params=({"by": 4.0}, {"by": 5.0})),
        Provider("even", lambda x: 6 * x, devices=("cpu",), supports=_even_only),
        Provider("gpu_only", lambda x: 0 * x),
        Provider("reference", lambda x: 2 * x, devices=("cuda", "cpu")),
    ),
    key=Key(
        shape=("N", "dtype"),
        sizes=("M",),
        of=lambda x: ((x.shape[1], x.dtype), (x.shape[0],)),
        dims=lambda N, dtype, M: {"rows": M, "columns": N},
    ),
)


@pytest.fixture(autouse=True)
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    for variable in ("FASTKERNELS_PROVIDER", "FASTKERNELS_STRICT", "FASTKERNELS_TUNED", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    tuned._by_op.cache_clear()
    SCALE.reset()
    yield SCALE
    SCALE.set_candidate(None)
    SCALE.reset()
    tuned._by_op.cache_clear()


def entry(m: int, provider: str | None, n: int = 4, **more: Any) -> Entry:
    won = {"speedup": 1.2, "ci95": (1.1, 1.3)} if provider not in (None, "first") else {}
    shape = {"N": n, "dtype": "float32"}
    more = {"shape": shape, "baseline": "first", "run": "r1", **won, **more}
    return Entry("test_scale", sizes={"M": m}, provider=provider, **more)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: Op) -> Callable[..., Path]:
    """Write a table of these entries for this chip, and use it."""

    def put(*entries: Entry, chip: str = "cpu", name: str = "own.json") -> Path:
        path = tmp_path / name
        path.write_text(Table(chip, RUNS, entries).to_json())
        monkeypatch.setenv("FASTKERNELS_TUNED", str(path))
        tuned._by_op.cache_clear()
        op.reset()
        return path

    return put


def factor(rows: int, columns: int = 4, dtype: torch.dtype = torch.float32) -> float:
    x = torch.full((rows, columns), 1.0, dtype=dtype)
    y = torch.ops.fastkernels.test_scale(x)
    assert torch.equal(y, y[0, 0] * x)
    return y[0, 0].item()


# -- dispatch


def test_smallest_tuned_size_not_below_the_call_applies(use: Callable[..., Path]) -> None:
    use(entry(4, "sized", params={"by": 5.0}), entry(8, "sized"), entry(32, None), entry(64, "reference"))
    found = {m: factor(m) for m in (1, 3, 4, 5, 8, 9, 32, 33, 64, 65)}
    assert found == {1: 5, 3: 5, 4: 5, 5: 3, 8: 3, 9: 1, 32: 1, 33: 2, 64: 2, 65: 1}
    assert factor(4, columns=6) == 1 and factor(4, dtype=torch.float64) == 1


def test_entry_does_not_reach_far_smaller_sizes(use: Callable[..., Path]) -> None:
    use(entry(1024, "sized"))
    assert factor(1024 // REACH) == 3 and factor(1024 // REACH - 1) == 1


def test_order_is_candidate_environment_table_spec(
    use: Callable[..., Path], op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert factor(4) == 1
    use(entry(4, "sized", params={"by": 4.0}), entry(4, "sized", n=5, params={"by": 4.0}))
    assert factor(4) == 4
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "test_scale:even")
    op.reset()
    assert factor(4) == 6 and op.fallbacks == {}
    assert factor(4, columns=5) == 4 and op.fallbacks == {"even: 5 columns are odd": 1}
    op.set_candidate(lambda x: 7 * x, supports=lambda x: "one row" if x.shape[0] == 1 else None)
    assert factor(4) == 7 and factor(1, columns=5) == 4
    monkeypatch.delenv("FASTKERNELS_PROVIDER")
    op.set_candidate(None)
    assert factor(4) == 4


def test_requested_provider_without_supports_skips_the_table(use: Callable[..., Path], op: Op) -> None:
    use(entry(4, "sized"))
    op.set_candidate(lambda x: 7 * x)
    assert factor(4) == 7 and not op._tuned


def test_case_unsupported_by_tuned_provider_falls_back(use: Callable[..., Path], op: Op) -> None:
    use(entry(4, "even", n=5))
    assert factor(4, columns=5) == 1
    assert op.fallbacks == {"even: 5 columns are odd": 1}


def test_unavailable_tuned_provider_is_logged_and_skipped(
    use: Callable[..., Path], op: Op, caplog: pytest.LogCaptureFixture
) -> None:
    use(entry(4, "gpu_only"), entry(8, "sized"))
    with caplog.at_level(logging.WARNING, "fastkernels"):
        assert factor(3) == 1 and factor(8) == 3 and factor(4) == 1
    assert [r.getMessage() for r in caplog.records] == [
        "test_scale: a tuned table names an unavailable provider: gpu_only runs on cuda, not on cpu"
    ]
    assert op.fallbacks == {}


def test_twin_replaces_an_unavailable_tuned_provider(
    use: Callable[..., Path], op: Op, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twins = [replace(p, twin={"even": "gpu_only", "reference": "sized"}.get(p.name)) for p in op.providers]
    monkeypatch.setattr(op, "providers", tuple(twins))
    use(entry(4, "gpu_only"), entry(8, "sized"))
    with caplog.at_level(logging.WARNING, "fastkernels"):
        assert factor(4) == 6 and factor(8) == 3
    assert not caplog.records and op.fallbacks == {}


def test_faster_counts_no_call(use: Callable[..., Path], op: Op) -> None:
    assert not op.faster(torch.ones(4, 4))
    use(
        entry(4, "sized"), entry(8, "first"), entry(16, None), entry(32, "gpu_only"),
        entry(4, "even", n=5), entry(4, "even", n=6),
    )  # fmt: skip
    found = {rows: op.faster(torch.ones(rows, 4)) for rows in (3, 4, 8, 16, 32, 64)}
    assert found == {3: True, 4: True, 8: False, 16: False, 32: False, 64: False}
    # A provider that does not support the call is not faster.
    assert not op.faster(torch.ones(4, 5)) and op.faster(torch.ones(4, 6))
    assert op.calls == 0 and op.fallbacks == {}


def test_observer_sees_the_tuned_provider(use: Callable[..., Path]) -> None:
    use(entry(4, "sized", params={"by": 4.0}))
    seen: list[str] = []

    def around(op: Op, provider: Provider) -> Provider:
        def fn(*args: Any) -> Any:
            seen.append(provider.name)
            return provider.fn(*args)

        return Provider(provider.name, fn, provider.devices, supports=provider.supports)

    observe(around)
    try:
        assert factor(4) == 4 and factor(5) == 1
    finally:
        observe(None)
    assert seen == ["sized", "first"]


def test_tuned_provider_runs_in_compiled_code(use: Callable[..., Path]) -> None:
    use(entry(4, "sized", params={"by": 4.0}))
    op = torch.ops.fastkernels.test_scale
    compiled = torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, by in ((4, 4.0), (5, 1.0)):
        assert torch.equal(compiled(torch.ones(rows, 4)), torch.full((rows, 4), by))


def test_op_without_table_does_no_lookup(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookup, "find", lambda *args: pytest.fail("looked up"))
    assert factor(4) == 1 and not op._tuned
    assert [p.name for p in op._order["cpu"]] == ["first", "sized", "even", "reference"]


def test_call_cost_is_independent_of_table_size(use: Callable[..., Path], op: Op) -> None:
    """Counted in calls of functions, Python's and C's, since wall clocks of busy machines say nothing."""
    x = torch.ones(4, 4)
    body = op.body("cpu")

    def work() -> int:
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        body(x)
        sys.setprofile(profile)
        try:
            body(x)
        finally:
            sys.setprofile(None)
        return count

    bare = work()
    use(entry(4, "first"))
    small = work()
    use(*(entry(m, "first", n=n) for n in range(1, 300) for m in range(1, 20)))
    assert small == work() and small - bare <= 10


# -- look-up


@given(
    tuned_sizes=st.sets(st.tuples(st.integers(0, 40), st.integers(0, 5000)), min_size=1, max_size=12),
    size=st.tuples(st.integers(0, 50), st.integers(0, 6000)),
)
def test_two_sizes_are_looked_up_in_turn(tuned_sizes: set[tuple[int, int]], size: tuple[int, int]) -> None:
    key = Key(("H",), ("B", "L"), of=lambda: ((), ()), dims=lambda **k: k)
    several = [Entry("op", {"H": 8}, {"B": b, "L": n}, None, baseline="x", run="r1") for b, n in tuned_sizes]
    found = tuned.lookup(key, several).find((8,), size)
    expected: Any = None
    if (batches := [b for b, _ in tuned_sizes if b >= size[0]]) and min(batches) <= REACH * size[0]:
        lengths = [n for b, n in tuned_sizes if b == min(batches) and n >= size[1]]
        if lengths and min(lengths) <= REACH * size[1]:
            expected = {"B": min(batches), "L": min(lengths)}
    assert (found and found.sizes) == expected
    assert tuned.lookup(key, several).find((9,), size) is None


# -- files


def test_table_round_trip(tmp_path: Path) -> None:
    table = Table("NVIDIA H200", RUNS, (entry(4, "sized", params={"by": 5.0}), entry(8, None)))
    (tmp_path / "t.json").write_text(table.to_json())
    assert tuned.read(tmp_path / "t.json") == table
    assert sum(line.startswith('    {"op"') for line in table.to_json().splitlines()) == 2


def test_longer_times_are_read_and_written_if_any(use: Callable[..., Path]) -> None:
    path = use(entry(4, "sized"), entry(8, "sized", longer=1.05))
    without, timed = json.loads(path.read_text())["entries"]
    assert "longer" not in without and timed["longer"] == 1.05 and "shipped" not in timed
    assert [found.longer for found in tuned.read(path).entries] == [None, 1.05]


@pytest.mark.parametrize(
    ("entries", "sizes", "missing"),
    [
        ((entry(64, "sized"),), [(1,), (64,)], True),
        ((entry(64, "sized"),), [(16,)], False),  # whose calls are the longest
        ((entry(64, "sized", longer=0.99),), [(64,)], False),
        ((entry(64, "first"),), [(64,)], False),
        ((entry(32, "sized"),), [(64,)], False),
        ((entry(64, "sized", n=5),), [(64,)], False),
    ],
)
def test_shipped_entries_without_longer_times_are_known(
    entries: tuple[Entry, ...], sizes: list[tuple[int]], missing: bool, op: Op
) -> None:
    assert op.key is not None
    key = replace(op.key, longer=lambda N, dtype, M: {"rows": 8 * M} if M > 16 else None)
    shape = (4, torch.float32)
    shipped = [replace(each, shipped=True) for each in entries]
    assert tuned.untimed(key, shipped, shape, sizes) == missing
    assert not tuned.untimed(key, entries, shape, sizes)  # a user's table decides
    assert not tuned.untimed(op.key, shipped, shape, sizes)


def test_merging_replaces_points() -> None:
    old = Table("cpu", RUNS, (entry(4, "sized"), entry(8, None), entry(4, "even", n=6)))
    again = entry(4, "even", shape={"dtype": "float32", "N": 4}, run="r2")
    merged = old.merged(Table("cpu", {"r2": RUNS["r1"]}, (again,)))
    found = [(e.shape["N"], e.sizes["M"], e.run) for e in merged.entries]
    assert found == [(4, 8, "r1"), (6, 4, "r1"), (4, 4, "r2")] and list(merged.runs) == ["r1", "r2"]
    only = Table("cpu", RUNS, (entry(4, "sized"),)).merged(Table("cpu", {"r2": RUNS["r1"]}, (again,)))
    assert list(only.runs) == ["r2"]
    with pytest.raises(TableError, match="a table of NVIDIA H200 does not go into one of cpu"):
        old.merged(Table("NVIDIA H200", RUNS, ()))


def test_user_shapes_take_precedence(
    use: Callable[..., Path], op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    table = Table("cpu", RUNS, (entry(4, "sized"), entry(8, "sized"), entry(4, "reference", n=6)))
    (shipped / "cpu.json").write_text(table.to_json())
    monkeypatch.setattr(tuned, "SHIPPED", shipped)
    op.reset()
    assert (factor(4), factor(8), factor(4, columns=6)) == (3, 3, 2)
    use(entry(4, "even"))
    assert (factor(4), factor(8), factor(4, columns=6)) == (6, 1, 2)
    assert {e.provider: e.shipped for e in tuned.entries("test_scale", "cpu")} == {
        "even": False,
        "reference": True,
    }


def test_tables_of_decodes_leave_prompts_to_others(
    use: Callable[..., Path], op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "_VERIFIED", {"cpu": (entry(128, "reference"), entry(8, "even"))})
    use(entry(4, "sized"))
    assert (factor(4), factor(8), factor(64), factor(128)) == (3, 1, 2, 2)
    found, shape = tuned.entries("test_scale", "cpu"), (4, torch.float32)
    assert sorted((e.sizes["M"], e.of_prompts) for e in found) == [(4, False), (128, True)]
    assert tuned.not_faster("test_scale", op.key, shape, "cpu", decodes=True) is None
    use(entry(4, "first"))
    assert tuned.not_faster("test_scale", op.key, shape, "cpu") is None
    text = tuned.not_faster("test_scale", op.key, shape, "cpu", decodes=True)
    assert text is not None and text.startswith("no kernel of ours is faster at N=4")


def test_folder_has_one_file_per_chip(
    use: Callable[..., Path], op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use(entry(4, "sized"), name="cpu.json").parent
    (folder / "nvidia-h200.json").write_text("damaged, and of another chip")
    monkeypatch.setenv("FASTKERNELS_TUNED", str(folder))
    op.reset()
    assert factor(4) == 3
    assert tuned.slug("NVIDIA GeForce RTX 4090 (x)") == "nvidia-geforce-rtx-4090-x"


def test_table_of_another_chip_is_skipped_with_a_warning(
    use: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = use(entry(4, "sized"), chip="NVIDIA H200")
    with caplog.at_level(logging.WARNING, "fastkernels"):
        assert factor(4) == 1 and factor(4) == 1
    assert [r.getMessage() for r in caplog.records] == [
        f"tuned table {path} is for NVIDIA H200 and is not used on cpu"
    ]


def test_zero_switches_the_shipped_tables_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTKERNELS_TUNED", raising=False)
    assert tuned.entries("linear", "NVIDIA H200")
    monkeypatch.setenv("FASTKERNELS_TUNED", "0")
    assert not tuned.entries("linear", "NVIDIA H200")


def test_missing_table_is_an_error(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_TUNED", "/no/such/file")
    op.reset()
    with pytest.raises(ValueError, match=r"FASTKERNELS_TUNED: there is no file or folder /no/such/file"):
        factor(4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(schema="other/1"), r"its schema is not fastkernels.tuned/1"),
        (lambda t: t.pop("runs"), r"it needs `chip`"),
        (lambda t: t["runs"].update(r9=[]), r"the run 'r9' is \[\], not an object"),
        (lambda t: t["entries"][0]["shape"].update(N=[4]), r"entry 0 .* N is \[4\], not a value of a shape"),
        (lambda t: t["entries"].append(3), r"entry 2 is 3, not an object"),
        (lambda t: t["entries"][1].pop("sizes"), r"entry 1 \(test_scale .*\) has no 'sizes'"),
        (lambda t: t["entries"][1].update(speed=2), r"entry 1 .* has 'speed'; it may have op, shape"),
        (lambda t: t["entries"][1].update(provider=3), r"entry 1 .* provider is 3, not str or NoneType"),
        (lambda t: t["entries"][1].update(speedup=True), r"entry 1 .* speedup is True, not int or float"),
        (lambda t: t["entries"][1]["sizes"].update(M=-1), r"entry 1 .* M is -1, not a size"),
        (lambda t: t["entries"][1]["sizes"].update(M=4), r"entries 0 and 1 are both for test_scale N=4"),
        (lambda t: t["entries"][1].update(run="r9"), r"entry 1 .* run 'r9' is not among `runs`"),
        (lambda t: t["entries"][0].update(ci95=[1]), r"entry 0 .* ci95 is \[1\], not \[low, high\]"),
        (lambda t: t["entries"][0].update(ci95=[0.9, 2]), r"entry 0 .* a table has only what is faster"),
        (lambda t: t["entries"][0].update(provider="none"), r"entry 0: test_scale N=4 .* is not one of first, sized"),
        (lambda t: t["entries"][0].update(params={"to": 1}), r"entry 0: .* sized takes by"),
        (lambda t: t["entries"][0]["shape"].pop("N"), r"entry 0: .* the key of test_scale is N, dtype, M"),
        (lambda t: t["entries"][0]["shape"].update(dtype="float7"), r"entry 0: .* dtype 'float7' is not a torch dtype"),
    ],
)  # fmt: skip
def test_invalid_table_error_names_the_entry(
    use: Callable[..., Path], op: Op, change: Callable[[Any], Any], said: str
) -> None:
    path = use(entry(4, "sized"), entry(8, None))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(TableError, match=f"tuned table {path}.*{said}"):
        factor(4)


def test_truncated_table_error_names_the_file(use: Callable[..., Path]) -> None:
    path = use(entry(4, "sized"))
    path.write_text(path.read_text()[:-40])
    with pytest.raises(TableError, match=f"tuned table {path}: "):
        factor(4)


# -- what is in the package


@pytest.mark.parametrize("path", sorted(tuned.SHIPPED.glob("*.json")), ids=lambda p: p.name)
def test_shipped_tables_are_valid(path: Path) -> None:
    table = tuned.read(path)
    assert path.stem == tuned.slug(table.chip) and table.chip != "cpu"
    for name in {e.op for e in table.entries}:
        op = registry.get(name).op
        found = [e for e in table.entries if e.op == name]
        assert op.key is not None and tuned.lookup(op.key, found).shapes
        for e in found:
            op._provider_of(e)
    for run in table.runs.values():
        assert run["date"] and run["commit"] and run["versions"]["torch"]


KEYED = [name for name in registry.op_names() if getattr(registry.get(name).op, "key", None) is not None]


@pytest.mark.parametrize("name", KEYED)
def test_key_agrees_with_its_dims(name: str) -> None:
    """For every case, the dims made from the key of a call are the dims of that call."""
    spec = registry.get(name)
    key = spec.op.key
    for case in spec.cases:
        tokens = case.dims.get("tokens", ())
        if spec.bytes_moved(case) > 1 << 20 or 0 in (tokens if isinstance(tokens, tuple) else (tokens,)):
            continue
        shape, sizes = key.of(*spec.inputs(case, "cpu", torch.Generator()))
        assert len(shape) == len(key.shape) and len(sizes) == len(key.sizes)
        named = dict(zip((*key.shape, *key.sizes), (*shape, *sizes), strict=True))
        again = type(case)("again", key.dims(**named), case.dtype)
        assert key.of(*spec.inputs(again, "cpu", torch.Generator())) == (shape, sizes)
