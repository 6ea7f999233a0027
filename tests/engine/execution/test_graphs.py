"""CUDA graphs give the tokens and log-probabilities of eager steps.

On the CPU, replaying a graph runs the captured function again over the same static tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels import warm
from support.kernels.step_kernel_cases import problems
from support.rerun import Rerun
from support.step_driver import OTHER, PROMPT, Driver, make_runner
from support.tiny import make_tiny, make_tiny_llama

from fastkernels.engine.execution.attention import mla
from fastkernels.engine.execution.attention.base import metadata_of
from fastkernels.engine.execution.runners.generate import Generate
from fastkernels.engine.sampling.rows import TokenMasks
from fastkernels.engine.sampling.sampler_state import SamplePlan
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.steps.step import SAMPLED, PromptTargets, StepInput, StepOutput, Together

SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "step_kernel_cases.py"
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "max_num_seqs": 8}
WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Sampling parameters of each slot; rows 0 to 2 and 7 sample from the logits as they are.
REQUESTED: list[tuple[SamplingParams, list[int]]] = [
    (SamplingParams(temperature=0), []),
    (SamplingParams(temperature=0.8, seed=11), []),
    (SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, seed=12), []),
    (SamplingParams(temperature=0, repetition_penalty=1.8, presence_penalty=1.0, frequency_penalty=0.5), []),
    (SamplingParams(temperature=1.0, seed=13, frequency_penalty=2.0), []),
    (SamplingParams(temperature=0, logit_bias={7: 100.0}), []),
    (SamplingParams(temperature=0.5, seed=14, min_tokens=12, max_tokens=20), list(range(0, 512, 2))),
    (SamplingParams(temperature=1.0, seed=15, logprobs=3), []),
]


def runner_of(folder: Path, device: str, graphs: bool, max_tokens: int = 32, **more: Any) -> Generate:
    settings = {"max_num_seqs": 8, "num_blocks": 200, "enforce_eager": not graphs, **more}
    runner = make_runner(folder, device=device, **settings)
    if device == "cpu" and graphs:
        backend: Any = runner.backend
        backend.plan_capture = lambda inputs, table: metadata_of(backend, inputs, table)
        limits = runner.limits
        with torch.inference_mode():
            runner.graphs = Rerun(
                runner._captured, backend, runner.batch, runner.device, 8, limits.max_model_len, max_tokens
            )
    return runner


def scenario(driver: Driver) -> list[StepInput]:
    """Decode and mixed steps with plain and special rows, with as many rows as a graph and with fewer."""
    steps = []

    def add(*rows: tuple[int, list[int]], targets: tuple[PromptTargets, ...] = ()) -> None:
        steps.append(driver.step(rows, targets))

    def decode(*slots: int) -> None:
        add(*((slot, [SAMPLED]) for slot in slots))

    for slot in (0, 1, 2, 3):
        driver.enter(slot, REQUESTED[slot][0], PROMPT, REQUESTED[slot][1])
    add(*((slot, PROMPT) for slot in (0, 1, 2, 3)))
    for slots in ((0, 1, 2), (2, 0, 1), (0,), (0, 1, 2, 3), (1, 3), (3,), (0, 1, 2)):
        decode(*slots)
    for slot in (4, 5, 6, 7):
        driver.enter(slot, REQUESTED[slot][0], OTHER, REQUESTED[slot][1])
    add((0, [SAMPLED]), (2, [SAMPLED]), *((slot, OTHER) for slot in (4, 5, 6, 7)))
    for slots in (range(8), (4, 5), (7, 0), (7,), (6, 5, 1), range(7, -1, -1), range(8), (0, 1, 2), (7, 3)):
        decode(*slots)
    driver.enter(1, REQUESTED[2][0])  # a new request in the slot, with its prompt token by token
    add((1, [5]), (0, [SAMPLED]), targets=(PromptTargets(0, 2, np.array([17])),))
    add((1, [17]), (2, [SAMPLED]), (0, [SAMPLED]))
    for _ in range(8):
        decode(*range(8))
    return steps


def play(runner: Generate, masks: Iterator[TokenMasks] | None = None) -> list[StepOutput]:
    """Run the steps with two in flight; with masks, every other step is masked and sampled after the step before."""
    found, pending = [], None
    for i, step in enumerate(scenario(Driver(runner))):
        masked = masks is not None and i % 2 == 0
        following = runner.launch(replace(step, masked=masked))
        if pending is not None:
            found.append(pending.result())
        if masks is not None and masked:
            following.sample(next(masks))
        pending = following
    assert pending is not None
    return [*found, pending.result()]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("kind", ["mamba2", "jamba", "rwkv7", "ttt_e2e"])
def test_graphs_of_recurrent_models_equal_eager_steps(kind: str, device: str, tmp_path: Path) -> None:
    """Padding rows use slot 0, and a state in a slot is the last step's, in graphs of every size."""
    folder = make_tiny(tmp_path, kind, "float32")
    eager, runner = (runner_of(folder, device, graphs=graphs) for graphs in (False, True))
    want, got = play(eager), play(runner)
    assert runner.graphs is not None and runner.graphs.replays["decode"] == 26
    assert [out.token_ids.tolist() for out in got] == [out.token_ids.tolist() for out in want]
    assert eager.states is not None and runner.states is not None
    for a, b in zip(eager.states._tensors, runner.states._tensors, strict=True):
        torch.testing.assert_close(a[:, 1:], b[:, 1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", WHERE)
def test_graphs_equal_eager_steps(tiny: Path, device: str) -> None:
    eager, runner = runner_of(tiny, device, graphs=False), runner_of(tiny, device, graphs=True)
    want, got = play(eager), play(runner)
    assert runner.graphs is not None and runner.graphs.replays["decode"] == 26
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a.token_ids.tolist() == b.token_ids.tolist(), f"step {i}"
        assert (a.logprobs is None) is (b.logprobs is None)
        assert list(a.prompt_logprobs) == list(b.prompt_logprobs)
        pairs = [(a.prompt_logprobs[r], b.prompt_logprobs[r]) for r in a.prompt_logprobs]
        if a.logprobs is not None and b.logprobs is not None:
            pairs.append((a.logprobs, b.logprobs))
        for x, y in pairs:
            assert (x.token_ids == y.token_ids).all() and (x.ranks == y.ranks).all()
            np.testing.assert_allclose(x.logprobs, y.logprobs, rtol=1e-4, atol=1e-4)
    assert len({t for out in got for t in out.token_ids.tolist()}) > 30  # otherwise the test proves little
    assert torch.equal(eager.batch.last_tokens[:8], runner.batch.last_tokens[:8])


def test_graph_has_room_for_the_largest_rank(tiny: Path) -> None:
    """A data-parallel rank runs decodes in the graph of another rank's decodes, or of its prompts."""
    eager, runner = runner_of(tiny, "cpu", graphs=False), runner_of(tiny, "cpu", graphs=True)
    driver, found, want = Driver(runner), [], [out.token_ids.tolist() for out in play(eager)]
    used: list[str] = []
    for i, step in enumerate(scenario(driver)):
        tokens, decode = len(step.input_ids), len(step.input_ids) == len(step.slots)
        largest = Together(8, 8, True) if decode and i % 2 else Together(tokens + 5, 8, False)
        found.append(runner.launch(replace(step, together=largest)).result().token_ids.tolist())
        size = runner.graphs.size_of(largest.tokens, largest.decode)
        used += ["decode" if largest.decode else "mixed"] * (size is not None)
    assert found == want and runner.graphs.replays == {kind: used.count(kind) for kind in ("decode", "mixed")}
    assert min(runner.graphs.replays.values()) > 10


def masks_of(steps: list[StepInput]) -> list[TokenMasks]:
    """Masks with few tokens for some rows of every other step."""
    draw, found = np.random.default_rng(0), []
    for step in steps[::2]:
        rows = np.flatnonzero(draw.random(len(step.slots)) < 0.6)
        bits = draw.random((len(rows), 512)) < 0.02
        bits[:, 7] = True
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        found.append(TokenMasks(rows.astype(np.int64), words))
    return found


@pytest.mark.parametrize("device", WHERE)
def test_masked_steps_with_graphs_equal_eager_ones(tiny: Path, device: str) -> None:
    eager, runner = runner_of(tiny, device, graphs=False), runner_of(tiny, device, graphs=True)
    masks = masks_of(scenario(Driver(eager)))
    want, got = play(eager, iter(masks)), play(runner, iter(masks))
    assert runner.graphs is not None and runner.graphs.replays["decode"] == 26
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a.token_ids.tolist() == b.token_ids.tolist(), f"step {i}"
    for output, mask in zip(got[::2], masks, strict=True):
        tokens = output.token_ids[mask.rows]
        assert (mask.words[np.arange(len(tokens)), tokens // 32] >> (tokens % 32) & 1).all()
    free = play(runner_of(tiny, device, graphs=True))
    assert [o.token_ids.tolist() for o in free] != [o.token_ids.tolist() for o in got]
    assert torch.equal(eager.batch.last_tokens[:8], runner.batch.last_tokens[:8])


@pytest.mark.parametrize("device", WHERE)
def test_graph_samples_its_own_logits(tiny: Path, device: str) -> None:
    """The graph's tokens equal those of eager launches on its hidden states, for each row's parameters."""
    runner = runner_of(tiny, device, graphs=True)
    driver, plain = Driver(runner), (0, 1, 2, 7)
    for slot in plain:
        driver.enter(slot, REQUESTED[slot][0])
    driver.run(*((slot, PROMPT) for slot in plain))
    with torch.inference_mode():
        for slots in (plain, (2, 7), (1,), (7, 1, 0), plain):
            step = driver.step([(slot, [SAMPLED]) for slot in slots])
            runner.batch.update(step.block_updates)
            assert runner.graphs is not None
            found = runner.graphs.run(step)
            assert found is not None
            inputs, outputs = found
            rows = inputs.num_rows
            assert outputs.logits is not None and outputs.tokens is not None
            assert len(outputs.logits) == len(outputs.tokens) == max(rows, 4 if rows == 3 else 1)
            assert torch.equal(outputs.logits, runner.model.compute_logits(outputs.hidden))
            tokens, _ = runner.sampler(outputs.logits, inputs.sample_slots, inputs.offsets, SamplePlan(False))
            assert torch.equal(tokens, outputs.tokens)
            assert runner.batch.last_tokens[list(slots)].tolist() == tokens[:rows].tolist()
            assert runner.batch.sampled[inputs.host_turn, :rows].tolist() == tokens[:rows].tolist()


@pytest.mark.parametrize("device", WHERE)
def test_recapture_keeps_the_step_in_flight(tiny: Path, device: str) -> None:
    runner = runner_of(tiny, device, graphs=True)
    driver = Driver(runner)
    for slot in (0, 1):
        driver.enter(slot)
    first = driver.run((0, PROMPT), (1, OTHER))
    pending = runner.launch(driver.step([(0, [SAMPLED]), (1, [SAMPLED])]))
    if device == "cuda":
        runner.capture()
    else:
        assert runner.graphs is not None
        with torch.inference_mode():
            runner.graphs._capture_all([1, 2, 4, 8], decode=True)
    second = pending.result().token_ids.tolist()
    want = runner_of(tiny, device, graphs=False)
    again = Driver(want)
    for slot in (0, 1):
        again.enter(slot)
    assert again.run((0, PROMPT), (1, OTHER)) == first
    assert list(again.run((0, [SAMPLED]), (1, [SAMPLED])).values()) == second
    assert driver.run((0, [SAMPLED]), (1, [SAMPLED])) == again.run((0, [SAMPLED]), (1, [SAMPLED]))


def test_step_kernels_interpreted() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run([SCRIPT], env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.gpu
def test_step_kernels_on_the_gpu() -> None:
    assert problems("cuda") == []


def decode_steps(driver: Driver, n: int) -> list[StepInput]:
    return [driver.step([(slot, [SAMPLED]) for slot in sorted(driver.tables)]) for _ in range(n)]


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
def test_steady_decode_does_not_synchronize(tiny, eager) -> None:
    """Launching steps makes no synchronizing call, and a trace shows none."""
    driver = Driver(make_runner(tiny, **ON_GPU, enforce_eager=eager))
    for slot in range(5):
        driver.enter(slot)
    driver.run(*[(slot, PROMPT) for slot in range(5)])
    steps = decode_steps(driver, 24)
    for step in steps[:8]:
        driver.runner.launch(step).result()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as trace:
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = driver.runner.launch(steps[8])
            for step in steps[9:]:
                following = driver.runner.launch(step)
                pending.result()
                pending = following
        finally:
            torch.cuda.set_sync_debug_mode("default")
    pending.result()
    names = {e.name for e in trace.events()}
    assert "cudaMemcpyAsync" in names
    # Not cudaDeviceSynchronize: the profiler itself ends with one.
    assert not names & {"cudaStreamSynchronize", "cudaMemcpy", "aten::item", "aten::nonzero"}


@pytest.mark.parametrize("device", WHERE)
def test_many_decodes_in_mixed_batch_run_separately(
    tiny: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FA3 on Hopper, a few decodes join the prompt's call; many get their own, and those of a long context."""
    found, calls = [], list[tuple[int, int]]()
    for least, long in ((4, 99), (3, 99), (4, 7)):  # the longest decode sees 7 keys
        monkeypatch.setattr("fastkernels.engine.execution.attention.ops.DECODES_APART", least)
        monkeypatch.setattr("fastkernels.engine.execution.attention.ops.LONG_DECODE", long)
        settings = ON_GPU if device == "cuda" else {"max_num_seqs": 8}
        runner = make_runner(tiny, **settings, enforce_eager=True)
        backend: Any = runner.backend
        if device == "cpu":
            backend._in_one = lambda op, provider: True
        elif backend.name != "fa3":
            pytest.skip(f"{backend.name} attends here")
        decode, prefill = backend._run_decode, backend._run_prefill

        def spied(layer: Any, q: torch.Tensor, *rest: Any, decode: Any = decode) -> torch.Tensor:
            calls.append((0, len(q)))
            return decode(layer, q, *rest)

        def watched(layer: Any, q: torch.Tensor, m: Any, first: int, prefill: Any = prefill) -> torch.Tensor:
            calls.append((first, len(m.seq_lens) - first))
            return prefill(layer, q, m, first)

        driver = Driver(runner)
        for slot in range(5):
            driver.enter(slot, SamplingParams(temperature=0, logprobs=-1))
        driver.run(*((slot, PROMPT[: 4 + slot]) for slot in range(3)))
        backend._run_decode, backend._run_prefill = spied, watched
        calls.clear()
        rows = [*((slot, [20 + slot]) for slot in range(3)), (3, PROMPT), (4, OTHER)]
        out = runner.launch(driver.step(rows)).result()
        assert out.logprobs is not None
        order = out.logprobs.token_ids[:, 1:].argsort(axis=1)
        found.append(np.take_along_axis(out.logprobs.logprobs[:, 1:], order, axis=1))
        assert set(calls) == ({(0, 5)} if (least, long) == (4, 99) else {(3, 2), (0, 3)})
    limit = 1e-4 if device == "cpu" else 0.05
    for apart in found[1:]:
        assert np.abs(found[0] - apart).max() < limit * np.abs(found[0]).max()


def test_graph_holds_more_tokens_than_a_sequence(tiny: Path) -> None:
    """The largest graph holds several prompts; a single row of that length would not fit into a block table."""
    found = []
    for graphs in (False, True):
        runner = runner_of(tiny, "cpu", graphs, max_tokens=96, max_model_len=24, max_num_batched_tokens=96)
        driver = Driver(runner)
        for slot in range(5):
            driver.enter(slot)
        rows = [(slot, [slot + i for i in range(17)]) for slot in range(5)]
        found.append(runner.launch(driver.step(rows)).result().token_ids.tolist())
    assert runner.graphs is not None and runner.graphs.replays["mixed"] == 1
    assert found[0] == found[1]


def test_long_step_with_many_decodes_runs_eagerly(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches are hidden, and outside the graph its decodes run separately; a short step is replayed."""
    monkeypatch.setattr("fastkernels.engine.execution.attention.ops.DECODES_APART", 3)
    runner = runner_of(tiny, "cpu", graphs=True)
    backend: Any = runner.backend
    driver, replayed = Driver(runner), []
    for slot in range(8):
        driver.enter(slot)
    driver.run(*((slot, OTHER) for slot in range(4)))
    for hidden, in_one, decodes in ((8, True, 3), (8, True, 2), (8, False, 3), (10, True, 3)):
        monkeypatch.setattr("fastkernels.engine.execution.forward.graphs.HIDDEN_TOKENS", hidden)
        assert runner.graphs is not None
        before = runner.graphs.replays["mixed"]
        monkeypatch.setattr(backend, "_in_one", lambda op, provider, said=in_one: said)
        driver.enter(7)
        driver.run(*((slot, [20 + slot]) for slot in range(decodes)), (7, PROMPT[: 10 - decodes]))
        replayed.append(runner.graphs.replays["mixed"] - before)
    assert replayed == [0, 1, 1, 1]


def test_latent_attention_has_graphs_of_mixed_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows attend to latents in the kernel of prompts; a step with too long a decode or prompt runs eagerly."""
    folder = make_tiny(tmp_path / "latent", "deepseek_v2", "float32")
    found, replays = [], []
    for graphs, decode, work in (
        (False, 64, 1 << 34),
        (True, 64, 1 << 34),
        (True, 10, 1 << 34),
        (True, 64, 1),
    ):
        monkeypatch.setattr(mla, "LONGEST_DECODE", decode)
        monkeypatch.setattr(mla, "MOST_ABSORBED", work)
        runner = runner_of(folder, "cpu", graphs)
        found.append([out.token_ids.tolist() for out in play(runner)])
        replays.append(0 if runner.graphs is None else runner.graphs.replays["mixed"])
    assert all(tokens == found[0] for tokens in found)
    assert replays[1] > replays[2] > replays[3] == replays[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "triton", "fa3", "flashinfer"])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_graphs_and_backends_on_the_gpu(tmp_path_factory, backend, dtype) -> None:
    """Teacher-forced decode and mixed steps with and without graphs, against the reference."""
    tiny = make_tiny_llama(tmp_path_factory.getbasetemp() / "head_64", dtype="float32", head_dim=64)
    outs, everything = [], SamplingParams(temperature=0, logprobs=-1)
    for settings in (
        {"attention_backend": "reference", "enforce_eager": True},
        {"attention_backend": backend, "enforce_eager": True},
        {"attention_backend": backend, "enforce_eager": False},
    ):
        try:
            runner = make_runner(tiny, **{**ON_GPU, **settings}, kv_cache_dtype=dtype)
        except ValueError as error:
            pytest.skip(str(error))
        driver, seen = Driver(runner), []
        for slot in range(4):
            driver.enter(slot, everything)
        for rows in (
            [(0, PROMPT), (1, OTHER)],
            [(0, [5]), (1, [6]), (2, PROMPT[:3])],
            [(0, [9]), (1, [8]), (2, [7])],
            [(0, [9]), (2, PROMPT[3:]), (3, OTHER)],
            [(slot, [11 + slot]) for slot in range(4)],
        ):
            found = runner.launch(driver.step(rows)).result().logprobs
            order = found.token_ids[:, 1:].argsort(axis=1)
            seen.append(np.take_along_axis(found.logprobs[:, 1:], order, axis=1))
        outs.append(np.concatenate(seen))
    for other in outs[1:]:
        assert np.abs(other - outs[0]).max() < 0.05 * np.abs(outs[0]).max()
