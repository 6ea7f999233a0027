"""The Generate runner on hand-made steps against transformers: chunked prompts, mixed batches, reused slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.step_driver import BLOCK, OTHER, PROMPT, Driver, make_runner

from fastkernels.engine.execution.runners.generate import Generate
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.steps.step import SAMPLED, PromptTargets, StepInput, StepOutput
from fastkernels.models.common.plans.build import load_config


@pytest.fixture(scope="module")
def runner(tiny: Path) -> Generate:
    return make_runner(tiny)


@pytest.fixture(scope="module")
def full(tiny: Path) -> Callable[[list[int]], torch.Tensor]:
    """Logits [T, V] of a full forward pass of transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    return logits


@pytest.fixture(scope="module")
def logits_of(runner: Generate) -> Callable[[StepInput], torch.Tensor]:
    """Launch a step and return the logits [B, V] that it sampled from."""
    seen: list[torch.Tensor] = []
    compute = runner.model.compute_logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    def launch(step: StepInput) -> torch.Tensor:
        seen.clear()
        runner.model.compute_logits = record
        try:
            runner.launch(step).result()
        finally:
            del runner.model.compute_logits
        return seen[0]

    return launch


def splits(n: int) -> list[list[int]]:
    """All ways to split n tokens into chunks."""
    found = []
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [n]
        found.append([b - a for a, b in zip([0, *ends], ends, strict=False)])
    return found


@pytest.mark.parametrize("chunks", splits(len(PROMPT)), ids=lambda c: "-".join(map(str, c)))
def test_every_chunking_of_a_prompt(runner, full, logits_of, chunks) -> None:
    driver = Driver(runner, seed=len(chunks))
    driver.enter(1)
    at = 0
    want = full(PROMPT)
    for n in chunks:
        got = logits_of(driver.step([(1, PROMPT[at : at + n])]))
        at += n
        torch.testing.assert_close(got[0], want[at - 1], atol=2e-4, rtol=1e-4)


def test_mixed_batch_equals_single_rows(runner, full, logits_of) -> None:
    """One step with a decode, a whole prompt and a chunk of another prompt."""
    driver = Driver(runner)
    for slot in (0, 2, 3):
        driver.enter(slot)
    first = driver.run((2, PROMPT))[2]
    assert first == int(full(PROMPT)[-1].argmax())
    got = logits_of(driver.step([(0, OTHER), (2, [SAMPLED]), (3, PROMPT[:3])]))
    want = [full([*PROMPT, first])[-1], full(OTHER)[-1], full(PROMPT[:3])[-1]]
    torch.testing.assert_close(got, torch.stack(want), atol=2e-4, rtol=1e-4)


def test_sampled_ids_are_known_to_the_slot_only(runner, greedy, tiny) -> None:
    """Steps are launched before the previous tokens are read, with rows in any order."""
    driver = Driver(runner)
    driver.enter(3)
    driver.enter(0)
    pending = [(0, 1, runner.launch(driver.step([(3, PROMPT), (0, OTHER)])))]
    got: dict[int, list[int]] = {0: [], 3: []}
    rows = [(3, 0)]
    for i in range(9):
        order = [(3, [SAMPLED]), (0, [SAMPLED])][:: 1 if i % 2 else -1]
        step = driver.step(order)
        rows.append(tuple(step.slots.tolist()))
        pending.append((0, 1, runner.launch(step)))
        out = pending.pop(0)[2].result()
        for slot, token in zip(rows.pop(0), out.token_ids.tolist(), strict=True):
            got[slot].append(token)
    assert got == {3: greedy(tiny, PROMPT, 9), 0: greedy(tiny, OTHER, 9)}


def test_slot_is_reused(runner, greedy, tiny) -> None:
    driver = Driver(runner)
    for prompt in (PROMPT, OTHER, PROMPT[::-1]):
        driver.enter(1)
        out = [driver.run((1, prompt))[1]]
        for _ in range(5):
            out.append(driver.run((1, [SAMPLED]))[1])
        assert out == greedy(tiny, prompt, 6)


def test_shared_prefix_is_not_recomputed(runner, full, logits_of) -> None:
    """With another request's blocks in the table, only the rest of the prompt is computed."""
    driver = Driver(runner)
    driver.enter(0)
    driver.run((0, PROMPT))
    driver.enter(1)
    step = driver.step([(1, PROMPT)])
    shared = driver.tables[0][0][0]
    updates = step.block_updates.copy()
    updates[0, 2] = shared
    rest = PROMPT[BLOCK:]
    step = StepInput(
        step.slots,
        np.array([len(rest)], dtype=np.int32),
        step.seq_lens,
        step.offsets,
        np.array(rest),
        0,
        updates,
    )
    torch.testing.assert_close(logits_of(step)[0], full(PROMPT)[-1], atol=2e-4, rtol=1e-4)


def test_duplicate_block_update_keeps_the_last(runner) -> None:
    runner.batch.update(np.array([[2, 1, 7], [2, 1, 9], [2, 0, 3]], dtype=np.int32))
    assert runner.batch.block_table[2, :2].tolist() == [3, 9]


def test_prompt_logprobs_by_row(runner, full) -> None:
    driver = Driver(runner)
    driver.enter(0)
    driver.enter(1)
    wanted = PromptTargets(1, 3, np.array(OTHER[1:]))
    step = driver.step([(0, PROMPT), (1, OTHER)], [wanted])
    out: StepOutput = runner.launch(step).result()
    assert list(out.prompt_logprobs) == [1]
    found, logprobs = out.prompt_logprobs[1], full(OTHER)[:-1].log_softmax(-1)
    assert found.token_ids.shape == found.logprobs.shape == (len(OTHER) - 1, 4)
    assert found.token_ids[:, 0].tolist() == OTHER[1:]
    want = logprobs.gather(1, torch.from_numpy(found.token_ids))
    torch.testing.assert_close(torch.from_numpy(found.logprobs), want, atol=2e-4, rtol=1e-4)
    assert found.ranks.tolist() == ((logprobs > want[:, :1]).sum(1) + 1).tolist()


def test_last_layer_computes_the_last_tokens_alone(runner, full, logits_of) -> None:
    """Its MLP runs for the last tokens; with logprobs of the prompt, for all."""
    seen: list[int] = []
    mlp = runner.model.model.layers[-1].mlp
    hook = mlp.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    driver = Driver(runner)
    try:
        for slot in range(3):
            driver.enter(slot)
        found = logits_of(driver.step([(0, PROMPT), (1, OTHER)]))
        wanted = [PromptTargets(0, 2, np.array(PROMPT[1:]))]
        runner.launch(driver.step([(2, PROMPT)], wanted)).result()
    finally:
        hook.remove()
    assert seen == [2, len(PROMPT)]
    want = torch.stack([full(PROMPT)[-1], full(OTHER)[-1]])
    torch.testing.assert_close(found, want, atol=2e-4, rtol=1e-4)


def test_prompt_logprobs_in_slices(runner, monkeypatch) -> None:
    driver = Driver(runner)
    driver.enter(0)
    wanted = [PromptTargets(0, 2, np.array(PROMPT[1:]))]
    whole = runner.launch(driver.step([(0, PROMPT)], wanted)).result().prompt_logprobs[0]
    monkeypatch.setattr("fastkernels.engine.execution.runners.generate.PROMPT_LOGITS", 2 * 512)
    driver.enter(0)
    sliced = runner.launch(driver.step([(0, PROMPT)], wanted)).result().prompt_logprobs[0]
    assert (whole.token_ids == sliced.token_ids).all() and (whole.ranks == sliced.ranks).all()
    np.testing.assert_allclose(whole.logprobs, sliced.logprobs, rtol=1e-5, atol=1e-6)


def test_fp8_cache_is_close_and_half_as_large(tiny, runner, full, greedy) -> None:
    small = make_runner(tiny, kv_cache_dtype="fp8")
    assert small.layers[0].kv_cache[0].dtype == torch.float8_e4m3fn
    assert small.block_bytes() * 4 == runner.block_bytes()  # relative to float32
    driver = Driver(small)
    driver.enter(0)
    got = [driver.run((0, PROMPT))[0]]
    for _ in range(7):
        got.append(driver.run((0, [SAMPLED]))[0])
    regret = []  # difference in logit between the choices of the exact and the fp8 cache
    logits = full([*PROMPT, *got])[len(PROMPT) - 1 : -1].log_softmax(-1)
    for row, token in zip(logits, got, strict=True):
        regret.append(float(row.max() - row[token]))
    assert max(regret) < 0.7 and sum(r == 0 for r in regret) >= 6


def test_layers_use_their_scales(tiny, full) -> None:
    """Scales that store values near zero, where e4m3 is coarse, lose precision; others do not."""
    runner = make_runner(tiny, kv_cache_dtype="fp8")
    want, errors = full(PROMPT)[-1], []
    compute = runner.model.compute_logits
    for scale in (1.0, 2.0**-5, 2.0**9):
        for layer in runner.layers:
            layer.k_scale = layer.v_scale = scale
        runner.model.compute_logits = lambda hidden: (
            errors.append((compute(hidden) - want).abs().max()) or compute(hidden)
        )
        driver = Driver(runner)
        driver.enter(0)
        driver.run((0, PROMPT))
    assert errors[1] < 1.5 * errors[0] and errors[2] > 4 * errors[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 4096}, "4096 is more than the model's 2048"),
        ({"num_blocks": 5, "max_model_len": 64}, "max_model_len 64 does not fit: the KV cache has 5 blocks"),
        ({"num_blocks": None, "kv_cache_memory": 1}, "the KV cache has 0 blocks.*holds 0 tokens"),
        ({"attention_backend": "flashinfer"}, "flashinfer.*needs cuda, not cpu"),
        ({"attention_backend": "fa3"}, "'fa3' is not supported: fa3 runs on cuda"),
    ],
)
def test_unsupported_options_are_refused(tiny, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_runner(tiny, **settings)


def test_chosen_provider_runs_and_is_counted(tiny) -> None:
    from fastkernels.overrides.attention.attention_decode import attention_decode

    driver = Driver(make_runner(tiny, attention_backend="reference"))
    driver.enter(0)
    driver.run((0, PROMPT))
    before = attention_decode.calls
    driver.run((0, [SAMPLED]))
    assert attention_decode.calls == before + len(driver.runner.layers)


def test_ranks_agree_on_the_number_of_blocks(tiny) -> None:
    config = EngineConfig(model=str(tiny), device="cpu", max_model_len=64, kv_cache_memory=1 << 22)
    runner = Generate(config, tiny, load_config(tiny), bind_cache=False)
    fits = runner.num_fitting_blocks()
    assert fits == (1 << 22) // runner.block_bytes()
    runner.bind(fits - 3)
    assert runner.limits.num_blocks == runner.layers[0].kv_cache[0].shape[0] == fits - 3
