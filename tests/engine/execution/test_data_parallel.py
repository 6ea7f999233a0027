"""Data-parallel ranks (gloo) that share experts: tokens equal those of one process, and a dead rank ends all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from support.live import live_server, wait_for
from support.serving.rank_forks import Fork
from support.tiny import MODELS, make_tiny, make_tiny_bert

from fastkernels import LLM, SamplingParams, StructuredOutputsParams
from fastkernels.engine.cache.blocks import BlockManager
from fastkernels.engine.execution import ranks
from fastkernels.engine.execution.executor import WorkerDied
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.scheduling.data_parallel import DataParallelCore, Schedulers
from fastkernels.engine.scheduling.request import Request
from fastkernels.engine.scheduling.scheduler import QueueFull, Scheduler
from fastkernels.engine.steps.step import StepInput, StepOutput
from fastkernels.models.common.layers.decoder import EXPERTS

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7], list(range(10, 73)), [300, 4, 4, 4, 90], list(range(200, 331)), [5, 6, 7]]
SETTINGS: dict[str, Any] = {
    "device": "cpu", "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 64, "num_blocks": 40,
}  # fmt: skip


def forks(folder: Path, **settings: Any) -> LLM:
    """Two ranks, of which the second starts as a fork, in a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Fork}))
        return LLM(str(folder), **SETTINGS, data_parallel_size=2, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("ranks") / "qwen3_moe", "qwen3_moe", "float32")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LLM]:
    """Two ranks with two steps in flight, shared by the tests."""
    with forks(folder, async_scheduling=True) as llm:
        yield llm


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def experts_of(runner: Any) -> tuple[int, int]:
    """(experts of this rank, rows of its first attention projection)"""
    layers = runner.model.model.layers
    return len(layers[1].mlp.experts.w13_weight), len(layers[0].self_attn.qkv_proj.weight)


@pytest.mark.parametrize("count", [5, 1, 2])
def test_answers_equal_transformers(two: LLM, folder: Path, greedy: Any, count: int) -> None:
    """Prompts in chunks, decodes and both together; one request leaves a rank without any."""
    outputs = two.generate(PROMPTS[:count], GREEDY, use_tqdm=False)
    assert tokens(outputs) == [greedy(folder, prompt, 12) for prompt in PROMPTS[:count]]


def test_ranks_have_half_of_the_experts_and_all_else(two: LLM) -> None:
    (experts, rows), second = two.llm_engine.executor.call(experts_of)
    assert (experts, rows) == second and experts == 3 and rows == (4 + 2 + 2) * 32


def test_sequences_of_a_request_share_a_rank(two: LLM, folder: Path) -> None:
    """Samples with a seed do not depend on the rank; prefixes are found in each rank's cache."""
    scheduler, params = two.llm_engine.scheduler, SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    hits = scheduler.prefix_hits
    got = [[c.token_ids for c in o.outputs] for o in two.generate([PROMPTS[1]] * 2, params, use_tqdm=False)]
    assert got[0] == got[1] and len({tuple(t) for t in got[0]}) > 1
    assert scheduler.prefix_hits - hits >= 4 * 56


def test_masks_reach_the_rank_of_their_request(two: LLM) -> None:
    digits = StructuredOutputsParams(regex="[0-9]{3}-[0-9]{5}")
    constrained = SamplingParams(temperature=0, max_tokens=20, structured_outputs=digits)
    params = [GREEDY, constrained, constrained, GREEDY]
    found = two.generate(PROMPTS[:4], params, use_tqdm=False)
    assert all(re.fullmatch("[0-9]{3}-[0-9]{5}", found[i].outputs[0].text) for i in (1, 2))
    assert tokens(found)[::3] == tokens(two.generate([PROMPTS[0], PROMPTS[3]], GREEDY, use_tqdm=False))


def test_aborted_request_leaves_the_others(two: LLM, folder: Path, greedy: Any) -> None:
    engine, found = two.llm_engine, dict[str, list[int]]()
    for name, prompt in zip("abc", PROMPTS, strict=False):
        engine.add_request(name, prompt, GREEDY)
    for _ in range(4):
        engine.step()
    assert [len(rank.running) for rank in engine.scheduler.ranks] == [2, 1]
    engine.abort_request("b")
    while engine.has_unfinished_requests():
        found |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    engine.take_stats()
    assert found == {name: greedy(folder, PROMPTS[i], 12) for i, name in ((0, "a"), (2, "c"))}
    assert all(rank.groups[0].num_free == rank.groups[0].num_usable for rank in engine.scheduler.ranks)


def test_abort_of_all_drops_the_steps_in_flight(two: LLM, folder: Path, greedy: Any) -> None:
    engine = two.llm_engine
    for name in "ab":
        engine.add_request(name, PROMPTS[3], GREEDY)
    engine.step()
    engine.abort_all()
    assert not engine.has_unfinished_requests()
    one = SamplingParams(temperature=0, max_tokens=1)  # whose rounds push no older one out
    found = two.generate(PROMPTS[:2], one, use_tqdm=False)
    assert tokens(found) == [greedy(folder, prompt, 1) for prompt in PROMPTS[:2]]


def test_dead_rank_ends_the_engine(two: LLM) -> None:
    """The last test of this engine."""
    (worker,) = two.llm_engine.executor._ranks.workers
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"^rank 1 \(pid {worker.process.pid}\) was killed by SIGKILL$"):
        two.generate(PROMPTS * 4, GREEDY, use_tqdm=False)


@pytest.mark.slow
def test_server_divides_requests_and_names_a_dead_rank(folder: Path, greedy: Any) -> None:
    same = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with live_server(folder, **SETTINGS, max_model_len=256, data_parallel_size=2) as (url, server):

        def ask(prompt: list[int]) -> Any:
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, **same}, timeout=120)
            return answer.json()["choices"][0]["token_ids"]

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(ask, PROMPTS[:3])) == [greedy(folder, p, 12) for p in PROMPTS[:3]]
        metrics = httpx.get(f"{url}/metrics").text
        assert re.search(r'vllm:request_success_total.*reason="length".* 3.0', metrics)
        server.llm.engine.executor._ranks.workers[0].process.kill()
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        wait_for(lambda: server.llm.dead is not None)
        assert re.search(r"rank 1 .* was killed by SIGKILL", server.llm.dead)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gemma4_experts", "gpt_oss", "llama"])
def test_other_models_equal_one_process(tmp_path: Path, kind: str) -> None:
    """Also experts next to an MLP or with biases, and a dense model, whose ranks do not wait for each other."""
    base, fields = MODELS[kind]
    made = make_tiny(tmp_path / kind, base, "float32", **fields)
    with forks(made) as llm:
        assert llm.llm_engine.executor.shares_experts is (kind != "llama")
        got = [tokens(llm.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (3, 1)]
    with LLM(str(made), **SETTINGS) as one:
        assert got == [tokens(one.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (3, 1)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size 0 is less than 1"),
        ({"tensor_parallel_size": 2}, "data_parallel_size 2 is not supported with tensor_parallel_size 2"),
        ({"expert_parallel_size": 3}, "expert_parallel_size 3 is not possible .* must be 2 or left out"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config is not supported with data_parallel_size 2",
        ),
    ],
)  # fmt: skip
def test_options_of_other_ranks_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        EngineConfig("x", **{"data_parallel_size": 2, **options})


def test_models_that_ranks_cannot_share_are_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {name: 5 for name in EXPERTS if name in config})
    )
    with pytest.raises(ValueError, match=r"data_parallel_size 2 does not suit .*experts 5 cannot be divided"):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, **SETTINGS, data_parallel_size=2)
    bert = make_tiny_bert(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"data_parallel_size 2 is not supported for .*bert, only 1"):
        LLM(str(bert), device="cpu", data_parallel_size=2)


# -- the lockstep, without an engine


class Echo:
    """Ranks whose next token is the number of the round."""

    def __init__(self) -> None:
        self.launched: list[list[int | None]] = []  # rows of each rank
        self.collected = 0

    def launch_each(self, steps: Sequence[StepInput | None]) -> Any:
        self.launched.append([None if step is None else len(step.slots) for step in steps])
        number = len(self.launched)

        def results() -> dict[int, StepOutput]:
            self.collected += 1
            assert self.collected == number
            return {
                rank: StepOutput(torch.full((len(step.slots),), number).numpy())
                for rank, step in enumerate(steps)
                if step is not None
            }

        return SimpleNamespace(results=results)

    def forget(self) -> None:
        self.collected = len(self.launched)


def schedulers(count: int, max_waiting: int = 8) -> Schedulers:
    made = [Scheduler([BlockManager(20, 4, True, None)], 4, 16, max_waiting) for _ in range(count)]
    return Schedulers(made, max_waiting)


def request(name: str, length: int, index: int = 0, most: int = 3) -> Request:
    return Request(name, list(range(length)), SamplingParams(), most, index=index)


def test_requests_go_to_the_rank_with_the_fewest() -> None:
    made = schedulers(3, max_waiting=6)
    for name, indices in (("a", 2), ("b", 1), ("c", 1), ("d", 1)):
        for index in range(indices):
            made.add(request(name, 4, index))
    assert [[r.request_id for _, r in rank._waiting] for rank in made.ranks] == [
        ["a", "a"], ["b", "d"], ["c"],
    ]  # fmt: skip
    assert len(made) == made.num_waiting == 5
    with pytest.raises(QueueFull, match="5 requests are waiting; the limit is 6"):
        made.check_room(2)
    made.remove([r for rank in made.ranks for _, r in rank._waiting])
    assert len(made) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_step_together(depth: int) -> None:
    made, echo = schedulers(2), Echo()
    core = DataParallelCore(made, echo, depth)
    requests = [request("long", 20, most=4), request("short", 3, most=1)]
    for r in requests:
        made.add(r)
    while core.busy:
        core.results()
    assert echo.collected == len(echo.launched) == 5 and echo.launched[:2] == [[1, 1], [1, None]]
    assert [r.output_token_ids for r in requests] == [[2, 3, 4, 5], [1]]
    assert all(rank.groups[0].num_free == rank.groups[0].num_usable for rank in made.ranks)


GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


@pytest.mark.gpu
@GPUS
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_two_gpus_with_graphs_equal_one(tmp_path: Path, kind: str) -> None:
    made = make_tiny(tmp_path / kind, kind, "float32")
    settings = {**SETTINGS, "device": "cuda", "dtype": "float32", "max_model_len": 512, "num_blocks": 200}
    with LLM(str(made), **settings, enforce_eager=True) as one:
        want = [tokens(one.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (1, 2, 5)]
    with LLM(str(made), **settings, data_parallel_size=2) as two:
        got = [tokens(two.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (1, 2, 5)]
        replays = two.llm_engine.executor.call(replays_of)
        os.kill(two.llm_engine.executor._ranks.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"rank 1 .* was killed by SIGKILL"):
            two.generate(PROMPTS * 20, GREEDY, use_tqdm=False)
    assert got == want
    assert replays[0] == replays[1] and replays[0]["decode"] > 20


def replays_of(runner: Any) -> dict[str, int]:
    return dict(runner.graphs.replays)
