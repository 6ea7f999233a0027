"""After a change of weights and a reset of the prefix cache, new answers equal those of a fresh engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_tiny

import fastkernels
from fastkernels import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
STEM = [(i * 37) % 500 for i in range(44)]
KINDS = ("llama", "gemma3_text", "mistral", "deepseek_v2", "mixtral")  # all, some or no layers with a window


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("changed") / request.param, request.param, "float32")


def engine(folder: Path, **settings: Any) -> LLM:
    made = {
        "num_blocks": 60, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 48, "max_model_len": 128,
        **settings,
    }  # fmt: skip
    return LLM(str(folder), device="cpu", **made)


def change(llm: LLM) -> None:
    """Give the model other weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in llm.llm_engine.runner.model.named_parameters():
            if p.dim() > 1 and "embed_tokens" not in name:
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.05)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    """The tokens and log-probabilities of each prompt's answer."""
    made = []
    for output in llm.generate(prompts, GREEDY):
        steps = output.outputs[0].logprobs
        assert steps is not None
        made.append([(i, p.logprob) for step in steps for i, p in sorted(step.items())])
    return made


def expect_fresh(folder: Path, llm: LLM, prompts: list[list[int]]) -> None:
    fresh = engine(folder)
    change(fresh)
    for got, expected in zip(answers(llm, prompts), answers(fresh, prompts), strict=True):
        assert [i for i, _ in got] == [i for i, _ in expected]
        assert [p for _, p in got] == pytest.approx([p for _, p in expected], abs=1e-4)


def running(llm: LLM) -> None:
    """A sequence that has part of its answer."""
    llm.llm_engine.add_request("first", STEM, LONG)
    for _ in range(6):
        llm.llm_engine.step()
    assert len(llm.llm_engine.scheduler.running) == 1


def in_prompt(llm: LLM) -> None:
    """A sequence with half of its prompt."""
    llm.llm_engine.add_request("first", [*STEM, *STEM], LONG)
    llm.llm_engine.step()
    assert 0 < llm.llm_engine.scheduler.running[0].num_computed_tokens < 2 * len(STEM)


def waiting(llm: LLM) -> None:
    """A sequence that waits behind another one with the same prefix."""
    running(llm)
    llm.llm_engine.add_request("second", [*STEM, 8], LONG)
    llm.llm_engine.step()
    assert llm.llm_engine.scheduler.num_waiting == 1


def preempted(llm: LLM) -> None:
    """A sequence that has lost its blocks."""
    running(llm)
    scheduler = llm.llm_engine.scheduler
    scheduler._preempt(scheduler.running.pop())
    assert scheduler.num_waiting == 1


def finish(llm: LLM) -> dict[str, list[int]]:
    """All tokens of each request once it has ended."""
    ended = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            ended[output.request_id] = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return ended


STATES = (running, in_prompt, waiting, preempted)
# Llama and Gemma 3 in every state; the other caches in a state and a mode of their own
FAST = {("mistral", running, True), ("deepseek_v2", waiting, False), ("mixtral", preempted, True)}


@pytest.mark.parametrize(
    ("folder", "state", "overlap"),
    [
        pytest.param(kind, state, overlap, marks=[] if fast else [pytest.mark.slow])
        for kind, state, overlap in itertools.product(KINDS, STATES, (False, True))
        for fast in (kind in KINDS[:2] or (kind, state, overlap) in FAST,)
    ],
    indirect=["folder"],
)
def test_reset_leaves_no_older_keys(folder: Path, state: Callable[[LLM], None], overlap: bool) -> None:
    llm = engine(folder, async_scheduling=overlap)
    state(llm)
    change(llm)
    llm.llm_engine.reset_prefix_cache()
    prompts = []
    for tokens in finish(
        llm
    ).values():  # the shorter prompt's blocks lead to those that follow in the longer one
        prompts += [[*tokens[:-16], 7], [*tokens, 9]]
    expect_fresh(folder, llm, prompts)
    groups = llm.llm_engine.scheduler.groups
    assert all(group.num_free == group.num_usable for group in groups)


def test_preempted_sequence_is_named_again(tiny: Path) -> None:
    """Computed anew, its blocks have only keys of the new weights."""
    llm = engine(tiny)
    preempted(llm)
    llm.llm_engine.reset_prefix_cache()
    finish(llm)
    assert llm.generate([[*STEM, 1]], GREEDY)[0].num_cached_tokens == len(STEM)


def test_patch_and_undo_leave_no_older_keys(tiny: Path, tmp_path: Path) -> None:
    """A candidate that computes something else stands for other weights."""
    file = tmp_path / "silu_and_mul.py"
    file.write_text(
        "import torch\n"
        "def silu_and_mul(x, *rest):\n"
        "    gate, up = x.chunk(2, dim=-1)\n"
        "    return 0.5 * torch.nn.functional.silu(gate) * up\n"
    )
    prompts = [[*STEM, 5], [*STEM[:32], 6]]
    llm = engine(tiny)
    stock = answers(llm, prompts)
    report = fastkernels.patch(llm, candidates={"silu_and_mul": str(file)})
    patched = answers(llm, prompts)
    report.undo()
    assert answers(llm, prompts) == stock
    with fastkernels.patch(fresh := engine(tiny), candidates={"silu_and_mul": str(file)}):
        assert answers(fresh, prompts) == patched != stock
