"""Tests of decode_attention.py: the sets that are compiled, checked and timed, and lost check processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.attention import decode_attention
from experiments.attention import decode_attention_check as checks
from experiments.attention.decode_attention_check import LAYOUTS, OTHERS, USUAL, Layout, label
from experiments.common import graph_clock

from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.attention import attention_decode_split as split

SMALL = checks.Batch([0, 3, 17], 0, Layout(2, 1, 64)).case(Layout())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[graph_clock.Run]:
    """A Run on this CPU, where cuda-split supports the calls that it supports on a Hopper GPU."""

    def supports(*args: Any) -> str | None:
        return cuda.refused(*args[:5])

    hopper = replace(checks.PROVIDERS["cuda-split"], supports=supports)
    monkeypatch.setitem(checks.PROVIDERS, "cuda-split", hopper)
    options = argparse.Namespace(device="cpu", quick=False, out=tmp_path / "rows.jsonl", seconds=60.0)
    with torch.inference_mode():
        yield graph_clock.Run("decode_attention", "attention_decode", options)


def rows(run: graph_clock.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.out.read_text().splitlines()] if run.out.exists() else []


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, fn: Callable[..., Any]) -> None:
    monkeypatch.setitem(checks.PROVIDERS, name, replace(checks.PROVIDERS[name], fn=fn))


def children(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace each check process by this script."""
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command: real([sys.executable, "-c", script, *command]))


def test_shares_compile_each_kernel_once(run: graph_clock.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel that is checked or timed is in exactly one share."""
    seen: Counter[tuple[Any, ...]] = Counter()
    share = [0]

    def compiled(name: str) -> Callable[..., None]:
        def call(q: torch.Tensor, k: torch.Tensor, *rest: Any, **p: int) -> None:
            window = rest[5]
            seen[name, label(p), q.dtype, k.dtype, q.shape[1:], k.shape[1:], window, share[0]] += 1

        return call

    monkeypatch.setattr(decode_attention.split, "decode_split", compiled("triton-split"))
    monkeypatch.setattr(decode_attention, "compile_cuda", compiled("cuda-split"))
    for name in ("_decode_split_kernel", "_decode_even_kernel"):  # put back afterwards
        monkeypatch.setattr(split, name, getattr(split, name))
    todo = [decode_attention.Timed(name, LAYOUTS[name], 4, 2048) for name in ("llama-8b", "smollm2")]
    for share[0] in range(3):
        decode_attention.compile_share(run, todo, share[0], 3)
    kinds = Counter(key[:-1] for key in seen)
    assert set(kinds.values()) == {1}, "a set of a layout is one process's"
    assert len({key[-1] for key in seen}) == 3
    for timed in todo:
        at = timed.layout
        mine = {(k[0], k[1]) for k in kinds if k[4] == (at.heads, at.head_size) and k[5][0] == at.block_size}
        args = checks.SPEC.inputs(
            checks.Batch([1], 0, at).case(Layout()), "cpu", torch.Generator()
        )  # fmt: skip
        assert mine >= {(name, label(p)) for name, p in checks.sets_of(run, args)}


def test_batches_use_both_kernels(run: graph_clock.Run) -> None:
    for batch in (*USUAL, *OTHERS):
        case = batch._replace(lens=[1] * len(batch.lens)).case(Layout())
        args = checks.SPEC.inputs(case, "cpu", torch.Generator())
        takes = Counter(name for name, _ in checks.sets_of(run, args, checks.few_of(case, [Layout()])))
        assert takes["cuda-split"], batch
        unusual = "float8" in batch.dtype or batch.more
        assert takes["triton-split"] == (
            6 if batch in USUAL or (batch.layout == Layout() and not unusual) else 3
        )


def test_wrong_set_is_reported_and_left_out(run: graph_clock.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def right(*args: Any, **p: int) -> torch.Tensor:
        return checks.SPEC.reference(*args)

    def wrong(*args: Any, **p: int) -> torch.Tensor:
        return right(*args) + (0.1 if label(p) == bad else 0)

    bad = label(cuda.PARAMS[1])
    stand_in(monkeypatch, "triton-split", right)
    stand_in(monkeypatch, "cuda-split", wrong)
    checks.check_batch(run, SMALL, few=False)
    assert run.bad == {("cuda-split", bad)} and run.wrong == 1
    (row,) = [r for r in rows(run) if r["status"] == "wrong"]
    assert row["case"]["params"] == bad and "largest error" in row["reason"]
    args = checks.SPEC.inputs(SMALL, "cpu", torch.Generator())
    left = [(name, label(p)) for name, p in checks.sets_of(run, args)]
    run.bad.clear()
    assert ("cuda-split", bad) not in left and len(left) == len(list(checks.sets_of(run, args))) - 1


def test_lost_context_ends_the_process(run: graph_clock.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **p: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    stand_in(monkeypatch, "triton-split", lost)
    with pytest.raises(SystemExit, match=f"triton-split {label(split.PARAMS[0])}: the GPU's context is lost"):
        checks.check_batch(run, SMALL, few=False)
    assert [r["status"] for r in rows(run)] == ["wrong"]


def test_sets_that_failed_in_a_child_are_not_timed(
    run: graph_clock.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.row("check", "cuda-split", {"params": "of another run"}, "before this one")
    run.wrong = 0
    row = json.dumps({"status": "wrong", "subject": {"provider": "cuda-split"}, "case": {"params": "1/2"}})
    write = f"import sys\nif sys.argv[-1] == '0/4': open({str(run.out)!r}, 'a').write({row!r} + chr(10))"
    children(monkeypatch, write)
    checks.check_all(run, ["checks"])
    assert run.bad == {("cuda-split", "1/2")} and run.wrong == 1


@pytest.mark.parametrize(
    ("script", "said"), [("import os; os.abort()", "-6"), ("raise SystemExit('lost')", "1")]
)
def test_nothing_is_timed_after_a_lost_check(
    run: graph_clock.Run, script: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    children(monkeypatch, f"import sys\nif sys.argv[-1] == '2/4':\n {script}")
    with pytest.raises(SystemExit, match=f"nothing was timed.*process 2 ended with {said}$"):
        checks.check_all(run, ["checks"])


def test_hanging_check_is_killed_and_reported(run: graph_clock.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECK_S", 2)
    children(monkeypatch, "import sys, time\nif sys.argv[-1] == '1/4': time.sleep(600)")
    with pytest.raises(SystemExit, match=r"process 1 did not end in 2 s$"):
        checks.check_all(run, ["checks"])


def test_sets_are_parsed_by_kernel() -> None:
    found = checks.parsed_sets(
        "triton-split:2/64/4/4/128/0,cuda-split:8/16/3/1/128/2/1,cuda-split:4/16/3/2/64/2"
    )
    assert found["triton-split"] == [split._set(2, 64, 4, 4, 128, 0)]
    assert found["cuda-split"] == [cuda._set(8, 16, 3, 1, 128, 2), cuda._set(4, 16, 3, 2, 64, 2)]
    assert checks.parsed_sets("cuda-split:4/16/3/2/64/2")["triton-split"] == []
    for wrong, why in (("2/64/4/4/128/0", "begins with triton-split:"), ("cuda-split:4/16", "warps/keys/stages"),
                       ("triton-split:a/b/c/d", "per_sm/block_n")):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            checks.parsed_sets(wrong)


def test_parts_cover_every_case_once_within_memory() -> None:
    every = decode_attention.cases(
        ["llama-8b"], 16, [1, 8, 32, 64, 128, 256], [512, 1024, 2048, 8192, 32768], [2048, 131072]
    )
    assert len(set(every)) == len(every)
    assert {(c.batch, c.context) for c in every if c.capacity == 2048 and c.model == "llama-8b"} == {
        (b, c) for b in (1, 8, 32, 64, 128, 256) for c in (512, 1024, 2048)
    }
    assert (256, 32768) in {(c.batch, c.context) for c in every}
    assert sorted(c for i in range(4) for c in every[i::4]) == sorted(every)
    for case in every:
        assert max(case.lens) <= case.most and len(case.lens) == case.batch and min(case.lens) >= 1
        used = case.calls * case.blocks * 16 * case.layout.token_bytes
        assert case.calls >= 1 and used <= decode_attention.POOL
        assert case.calls * case.bytes >= decode_attention.COLD, "what a pass reads does not stay in L2"
    mixed = [c for c in every if c.model in decode_attention.MIXED]
    assert all(0.8 < sum(c.lens) / c.batch / c.context < 1.1 for c in mixed if c.capacity == 131072)
    assert max(mixed[-1].lens) > 4 * mixed[-1].context
