"""The phases of a start, and the warm-up steps."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastkernels import LLM, SamplingParams
from fastkernels.engine.execution.forward.startup import Phases, process_age
from fastkernels.engine.execution.runners.generate import Generate
from fastkernels.engine.execution.runners.warm_up import DECODES, PROMPTS, warm_up, warm_up_steps
from fastkernels.engine.http import process as serving
from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.plans.build import load_config

SMALL: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_blocks": 40, "block_size": 4, "max_model_len": 64, "max_num_seqs": 6,
    "max_num_batched_tokens": 100,
}  # fmt: skip


def test_phases_are_in_order_and_sum_up(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    with caplog.at_level(logging.INFO, "fastkernels"), LLM(str(tiny), **SMALL) as llm:
        took = time.monotonic() - start
        phases = llm.llm_engine.phases
        assert list(phases.seconds) == [
            "config", "tokenizer", "device", "weights", "KV cache", "graphs", "rest",
        ]  # fmt: skip
        assert min(phases.seconds.values()) >= 0
        assert sum(phases.seconds.values()) == pytest.approx(phases.total)
        assert 0.5 * took < phases.total <= took
        (line,) = [r.getMessage() for r in caplog.records if "ready" in r.getMessage()]
        assert "\n" not in line and "weights" in line and "none compiled" in line


def test_repeated_phase_is_summed() -> None:
    phases = Phases()
    for name in ("a", "b", "a"):
        time.sleep(0.02)
        phases.mark(name)
    assert phases.seconds["a"] > 0.035 and phases.seconds["b"] > 0.015
    assert sum(phases.seconds.values()) == pytest.approx(phases.total)


def test_kernels_are_counted_and_listeners_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    from fastkernels.core import cuda_rtc

    heard: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **rest: heard.append(cache_hit))
    monkeypatch.setattr(cuda_rtc, "counts", {"cached": 5, "compiled": 1, "compile_s": 2.0})
    before, phases = knobs.compilation.listener, Phases()

    class Times:
        total = 1_500_000  # microseconds

    with phases.counting():
        for hit in (True, False, True):
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=Times(), cache_hit=hit)
        cuda_rtc.counts["compiled"] += 1
        cuda_rtc.counts["compile_s"] += 0.25
    assert phases.kernels == {"cached": 2, "compiled": 2, "compile_s": 1.75}
    assert heard == [True, False, True] and knobs.compilation.listener is before
    assert "2 kernels from the cache, 2 compiled in 1.8 s" in phases.line()


def test_process_age_of_a_real_process() -> None:
    code = (
        "import time; time.sleep(0.5); from fastkernels.engine.execution.forward.startup import process_age;"
        "print(process_age(time.monotonic()))"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert 0.5 <= float(done.stdout) <= time.monotonic() - start + 0.02
    now = time.monotonic()
    assert process_age(now - 1.0) == pytest.approx(process_age(now) - 1.0, abs=0.1)


@pytest.mark.parametrize(
    ("seqs", "tokens", "length", "logprobs"),
    [
        (256, 8192, 131072, 20), (256, 8192, 60, -1), (6, 100, 64, 20), (1, 1, 16, 0), (33, 33, 2000, 20),
        (2, 99, 9, 1), (9, 20, 1, 2),
    ],
)  # fmt: skip
def test_warm_up_steps_respect_limits(seqs: int, tokens: int, length: int, logprobs: int) -> None:
    steps = list(warm_up_steps(seqs, tokens, length, logprobs))
    rows = [len(s.slots) for s in steps]
    assert max(rows) == seqs and max(len(s.input_ids) for s in steps) == min(tokens, seqs * length)
    for step in steps:
        assert step.query_lens.sum() == len(step.input_ids) > 0
        assert np.all(step.query_lens >= 1) and np.all(step.seq_lens >= step.query_lens)
        assert step.seq_lens.max() <= length
        assert list(step.slots) == list(range(len(step.slots))) == [r.slot for r in step.new_rows]
        assert np.all(step.query_lens[: step.num_decodes] == 1) and np.all(
            step.query_lens[step.num_decodes :] > 1
        )


def test_warm_up_covers_all_kinds_with_few_steps() -> None:
    steps = list(warm_up_steps(256, 8192, 131072, 20))
    decodes = [s for s in steps if s.num_decodes == len(s.slots)]
    assert {len(s.slots) for s in decodes} == {n for n in DECODES if n <= 256}
    assert {len(s.input_ids) for s in steps} > {n for n in PROMPTS if n <= 8192} | {8192}
    assert any(0 < s.num_decodes < len(s.slots) for s in steps)
    mixed = [s for s in steps if s.num_decodes < len(s.slots)]
    for group in (decodes, mixed):
        assert {s.new_rows[0].params.temperature for s in group} == {0, 1.0}
        assert {s.new_rows[0].params.needs_penalties for s in group} == {False, True}
        assert {int(s.seq_lens.max() > 2000) for s in group} == {0, 1}
    assert sum(len(s.input_ids) for s in mixed) < 3 * 8192 and len(steps) < 90  # the cost


def test_server_freezes_objects_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    made, frozen = [], []

    def start(*_: Any) -> Any:
        made.append([object() for _ in range(10)])
        config = SimpleNamespace(api_key="key", timeout_keep_alive=5, header_timeout=30.0)
        return SimpleNamespace(config=config, app=None, model_name="m", llm=SimpleNamespace(dead=None))

    monkeypatch.setattr(serving, "Server", start)
    monkeypatch.setattr(
        serving.Process, "run", lambda *_, **__: frozen.append(gc.get_freeze_count() if made else 0)
    )
    with serving.bind("127.0.0.1", 0) as sock:
        try:
            assert serving.serve(EngineConfig("m"), sock) == 0
            assert frozen[0] > 1000
        finally:
            gc.unfreeze()


def test_warm_up_does_not_change_answers(tiny: Path) -> None:
    """Warm-up leaves nothing in slots or blocks that a request could see, and does not count as replays."""
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    prompts = [[5, 17, 300, 4, 4, 90, 211], [9, 8, 7], list(range(40, 80))]

    def answers(llm: LLM) -> list[Any]:
        found = [o.outputs[0] for o in llm.generate(prompts, params)]
        return [(o.token_ids, o.cumulative_logprob) for o in found]

    with LLM(str(tiny), **SMALL) as llm:
        before = answers(llm)
    with LLM(str(tiny), **SMALL) as llm:
        runner = llm.llm_engine.runner
        launched: list[int] = []
        launch = runner.launch
        runner.launch = lambda step: launched.append(len(step.input_ids)) or launch(step)  # type: ignore[func-returns-value]
        warm_up(runner)
        del runner.launch
        assert len(launched) == len(list(warm_up_steps(6, 100, 64, 20))) and max(launched) == 100
        assert not runner.batch.block_table.any()
        assert answers(llm) == before


def test_warm_up_ends_at_a_step_that_does_not_fit(
    tiny: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny), **SMALL) as llm:
        runner, forward = llm.llm_engine.runner, llm.llm_engine.runner._forward
        seen: list[int] = []

        def small(ids: torch.Tensor, *args: Any, **rows: Any) -> torch.Tensor:
            seen.append(len(ids))
            if seen[-1] > 30:
                raise torch.OutOfMemoryError("tried to allocate")
            return forward(ids, *args, **rows)

        monkeypatch.setattr(runner, "_forward", small)
        with caplog.at_level(logging.WARNING, "fastkernels"):
            warm_up(runner)
        (record,) = caplog.records
        assert "32 tokens in 2 rows" in record.getMessage() and "num_blocks" in record.getMessage()
        assert seen[-1] == 32
        monkeypatch.undo()
        assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3


@pytest.mark.gpu
def test_no_kernel_is_compiled_after_warm_up(tiny: Path) -> None:
    """Steps of other sizes than the warm-up's load and compile no Triton kernel."""
    config = EngineConfig(
        str(tiny), device="cuda", num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=2048
    )
    runner = Generate(config, tiny, load_config(tiny))
    phases, params = Phases(), SamplingParams(temperature=0.7, top_p=0.9, seed=1)
    from fastkernels.engine.execution.forward.memory_profile import made_up_step
    from fastkernels.engine.steps.step import even

    with phases.counting():
        for rows, tokens in ((1, 1), (7, 7), (30, 30), (48, 48), (1, 211), (3, 900), (5, 1300), (9, 2001)):
            lens = even(rows, tokens, 2048)
            runner.launch(made_up_step(lens, lens, params)).result()
    assert phases.kernels["cached"] == phases.kernels["compiled"] == 0
