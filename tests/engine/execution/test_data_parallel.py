"""Data-parallel ranks that share experts: tokens equal those of one process, and a dead rank ends all.

`-m gpu -s` runs the tests of two and four GPUs. One that hangs prints where each of its processes is.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.drafts import ALWAYS, SMALL, counts, params, prompts, propose, results
from support.eagle import make_tiny_eagle3
from support.mtp import make_mtp
from support.rerun import install
from support.serving.rank_forks import Fork
from support.tiny import KINDS, MODELS, SIZES, make_tiny, make_tiny_bert, model_class

from fastkernels import LLM, SamplingParams, StructuredOutputsParams
from fastkernels.core import parallel
from fastkernels.engine.cache.blocks import BlockManager
from fastkernels.engine.execution import ranks
from fastkernels.engine.execution.executor import WorkerDied
from fastkernels.engine.http.answers.metrics import Metrics
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.scheduling.data_parallel import DataParallelCore, Schedulers
from fastkernels.engine.scheduling.request import Request
from fastkernels.engine.scheduling.scheduler import QueueFull, Scheduler
from fastkernels.engine.steps.step import NextDrafts, StepInput, StepOutput, Together
from fastkernels.engine.steps.together import idle_step, step_together
from fastkernels.models.common.layers.decoder import EXPERTS
from fastkernels.overrides.moe.sparse_moe import own_experts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7], list(range(10, 73)), [300, 4, 4, 4, 90], list(range(200, 331)), [5, 6, 7]]
SETTINGS: dict[str, Any] = {
    "device": "cpu", "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 64, "num_blocks": 40,
}  # fmt: skip


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Fork}))


def forks(folder: Path, **settings: Any) -> LLM:
    """Two ranks, whose other processes start as forks, in a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Fork}))
        return LLM(str(folder), **{**SETTINGS, **settings}, data_parallel_size=2)


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


def test_blocks_of_all_ranks_are_reported(two: LLM) -> None:
    page = Metrics("model", two.llm_engine).text().decode()
    assert re.search(r'cache_config_info{.*num_gpu_blocks="80"', page)


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
    import httpx
    from support.live import live_server, wait_for

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
        ({"expert_parallel_size": 3}, "expert_parallel_size 3 is not possible .* must be 2, or left out"),
        (
            {"expert_parallel_size": 3, "tensor_parallel_size": 4},
            "with data_parallel_size 2 and tensor_parallel_size 4: it must be 2 or 4 or 8, or left out",
        ),
    ],
)
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


def test_ranks_of_two_processes_equal_transformers(folder: Path, greedy: Any) -> None:
    """Four processes: each rank shares its layers and its experts between two. One of them dies."""
    with forks(folder, tensor_parallel_size=2) as llm:
        outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
        assert tokens(outputs) == [greedy(folder, prompt, 12) for prompt in PROMPTS[:3]]
        assert llm.llm_engine.executor.call(experts_of) == [(3, (2 + 1 + 1) * 32)] * 4
        os.kill(llm.llm_engine.executor._ranks.workers[2].process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"^rank 3 \(pid \d+\) was killed by SIGKILL$"):
            llm.generate(PROMPTS * 4, GREEDY, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "gemma4_experts", "deepseek_v3", "llama"])
@pytest.mark.parametrize("groups", [2, 4])
def test_groups_of_experts_equal_one_process(tmp_path: Path, kind: str, groups: int) -> None:
    """With two groups, the processes of a rank have different experts."""
    base, fields = MODELS.get(kind, (kind, {}))
    eight = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}
    if groups == 4 and kind not in eight:
        pytest.skip("its experts cannot be divided by four, or it has none")
    made = make_tiny(
        tmp_path / kind, base, "float32", **{**fields, **({eight[kind]: 8} if kind in eight else {})}
    )
    more = {} if kind == "llama" else {"expert_parallel_size": groups}
    with forks(made, tensor_parallel_size=2, **more) as llm:
        got = [tokens(llm.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (5, 1)]
    with LLM(str(made), **SETTINGS) as one:
        assert got == [tokens(one.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (5, 1)]


# Mixtures with six experts, which four ranks cannot share evenly, and sizes that suit three and four ranks.
SIX: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6},
    "mixtral": {"num_local_experts": 6},
    "deepseek_v3": {"n_routed_experts": 6, "n_group": 2, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "glm4_moe": {"n_routed_experts": 6, "n_group": 2, "topk_group": 1},
}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("kind", SIX)
@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 4, "expert_parallel_size": 2}, {"data_parallel_size": 3}],
    ids=["two_groups_of_two", "three_ranks"],
)
def test_six_experts_on_several_ranks_equal_one_process(
    tmp_path: Path, kind: str, layout: dict[str, int]
) -> None:
    made = make_tiny(tmp_path / kind, kind, "float32", **SIX[kind])
    with LLM(str(made), **SETTINGS, **layout) as llm:
        got = [tokens(llm.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (5, 1)]
    with LLM(str(made), **SETTINGS) as one:
        assert got == [tokens(one.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (5, 1)]


@pytest.mark.parametrize("kind", SIX)
def test_six_experts_on_four_ranks_are_refused(tmp_path: Path, kind: str) -> None:
    """Before any process starts, with the numbers that are possible."""
    prefix, fields = KINDS[kind]
    cls = model_class(prefix)
    given = {**SIZES, **fields, **SIX[kind]}
    computed = {name for name in given if isinstance(getattr(cls.config_class, name, None), property)}
    config = cls.config_class(**{name: value for name, value in given.items() if name not in computed})
    config.architectures = [cls.__name__]
    config.save_pretrained(tmp_path)
    settings = {**SETTINGS, "load_format": "dummy", "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match=r"6 experts cannot be divided by 4; supported: 1, 2"):
        LLM(str(tmp_path), **settings, tensor_parallel_size=4, expert_parallel_size=4)
    with pytest.raises(ValueError, match=r"data_parallel_size 4 .*experts 6 cannot be divided over 4 ranks"):
        LLM(str(tmp_path), **settings, data_parallel_size=4)


@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_and_groups_divide_experts(groups: int) -> None:
    """Each expert is on one rank, of one group."""
    found = []
    for data in range(2):
        for place in range(2):
            with parallel.build_as(place, 2, groups, (data, 2)):
                shared_by, _, first, count, numbers = own_experts(8, 2)
            assert numbers is None and shared_by == 2 // groups
            found += range(first, first + count)
    assert sorted(found) == sorted([*range(8)] * (2 // groups))


def drafting(method: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """(a checkpoint with experts, a speculative_config for it)"""
    given: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, **ALWAYS}
    if method == "mtp":  # the head has experts, too
        return make_mtp(folder / "mtp", "deepseek_v3"), given
    made = make_tiny(folder / "target", "qwen3_moe", "float32")
    if method == "draft_model":
        given["model"] = str(made)
    elif method in ("eagle3", "tree"):
        given |= {"method": "eagle3", "model": str(make_tiny_eagle3(folder / "draft"))}
    if method == "tree":
        given["speculative_token_tree"] = "[(0,), (1,), (0, 0)]"
    return made, given


def replays_of(runner: Any) -> dict[str, int]:
    return dict(runner.graphs.replays)


def agree(
    method: str, folder: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool = False, **more: Any
) -> list[dict[str, int]]:
    """Drafts of two ranks leave the tokens of one process. Returns the replays of each process's graphs."""
    made, config = drafting(method, folder)
    each = [params(i, max_tokens=12) for i in range(3)]
    given, sizes = prompts(3), (3, 1)
    with LLM(str(made), **SMALL) as one:
        want = [results(one, given[:n], each[:n]) for n in sizes]
    texts = [prompt + found[0][0] for prompt, found in zip(given, want[0], strict=True)]
    if config["method"] != "ngram":
        propose(monkeypatch, texts)
    with forks(made, **{**SMALL, "num_blocks": 100}, **more, speculative_config=config) as llm:
        assert llm.llm_engine.executor.shares_experts
        if graphs:
            llm.llm_engine.executor.call(install)
        assert [results(llm, given[:n], each[:n]) for n in sizes] == want
        found = counts(llm)
        assert found.accepted > (0 if method == "ngram" else 5)
        return llm.llm_engine.executor.call(replays_of) if graphs else []


def test_drafts_with_experts_leave_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's passes exchange tokens, too, in all ranks: also in one without requests. Graphs without CUDA."""
    first, second = agree("mtp", tmp_path, monkeypatch, graphs=True)
    assert first["verify"] == second["verify"] > 3 and first == second


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "mtp", "eagle3", "tree", "draft_model"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("more", [{}, {"tensor_parallel_size": 2}, {"async_scheduling": True}])
def test_drafts_leave_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, graphs: bool, more: dict[str, Any]
) -> None:
    if (method == "tree" and graphs) or (method in ("ngram", "tree", "mtp") and "async_scheduling" in more):
        pytest.skip("the host makes these drafts, reads them, or reads the lengths of sequences")
    agree(method, tmp_path, monkeypatch, graphs, **more)


@pytest.mark.slow
def test_rank_without_the_graph_of_drafts_keeps_step(tmp_path: Path) -> None:
    """A penalty is outside of the graph, which goes on to drafts also if the ranks have too many requests for these."""
    made, config = drafting("mtp", tmp_path)
    given = dict(zip("abcd", prompts(4), strict=True))
    each = {name: replace(GREEDY, repetition_penalty=1.3 if name == "d" else 1.0) for name in given}

    def run(llm: LLM) -> dict[str, list[int]]:
        engine, found = llm.llm_engine, dict[str, list[int]]()
        for name, prompt in given.items():
            engine.add_request(name, prompt[:9], each[name])
        for step in range(100):
            found |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
            if step == 2:  # a third request of each rank, whose prompt is one token
                engine.add_request("e", [7], GREEDY)
                engine.add_request("f", [9], GREEDY)
        return found

    with LLM(str(made), **SMALL) as one:
        want = run(one)
    config["disable_by_batch_size"] = 2
    with forks(made, **{**SMALL, "num_blocks": 100}, speculative_config=config) as llm:
        llm.llm_engine.executor.call(install)
        assert len(want) == 6 and run(llm) == want
        first, second = llm.llm_engine.executor.call(replays_of)
        assert first["verify"] > second.get("verify", 0)


@pytest.mark.slow
def test_measured_drafts_and_masks_of_ranks(tmp_path: Path) -> None:
    """Drafts are measured over all ranks at the start; masks of a constrained request wait for its drafts."""
    made, config = drafting("mtp", tmp_path)
    digits = StructuredOutputsParams(regex="[0-9]{3}-[0-9]{5}")
    each = [GREEDY, SamplingParams(temperature=0, max_tokens=20, structured_outputs=digits), GREEDY]
    with LLM(str(made), **SETTINGS) as one:
        want = tokens(one.generate(PROMPTS[:3], each, use_tqdm=False))
    config.pop("disable_by_batch_size")
    with forks(made, num_blocks=100, speculative_config=config) as llm:
        assert llm.llm_engine.scheduler.payoff.ratios
        assert tokens(llm.generate(PROMPTS[:3], each, use_tqdm=False)) == want


# -- the lockstep, without an engine


def step_of(lens: list[int], drafts: list[int] | None = None, count: int = 0) -> StepInput:
    rows, query_lens = len(lens), np.array(lens, np.int32)
    nexts = NextDrafts(count, np.zeros(rows, np.int64), query_lens)
    return replace(
        idle_step(9), slots=np.arange(rows), query_lens=query_lens, offsets=np.zeros(rows, np.int64),
        input_ids=np.zeros(sum(lens), np.int64), drafts=None if drafts is None else np.array(drafts, np.int32),
        next_drafts=nexts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        ([step_of([1, 1, 1]), None], Together(3, 3, True)),
        ([step_of([1, 1]), step_of([5], count=2)], Together(5, 2, False, proposes=True)),
        ([step_of([1, 1]), step_of([3, 2], [2, 1], 2)], Together(5, 2, False, True, True)),
        ([step_of([1, 1]), step_of([3, 2], [2, 1])], Together(5, 2, False, True, True)),  # as the graph does
        ([step_of([4, 1]), step_of([3, 2], [2, 1])], Together(5, 2, False)),
        ([replace(step_of([1]), masked=True), step_of([2], [1])], Together(2, 1, False)),
        ([replace(step_of([1]), offsets=np.array([-1])), step_of([2], [1])], Together(2, 1, False)),
    ],
)
def test_ranks_know_what_they_have_in_common(steps: list[StepInput | None], want: Together) -> None:
    made = step_together(steps, idle_step(9))
    assert [step.together for step in made] == [want] * 2
    assert [len(s.slots) for s in made] == [1 if step is None else len(step.slots) for step in steps]
    assert len({s.masked for s in made}) == 1  # a draft model's passes follow the sampling


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


# -- GPUs

TWO, FOUR = (
    pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"needs {n} NVIDIA GPUs") for n in (2, 4)
)
ON_GPU: dict[str, Any] = {
    **SETTINGS, "device": "cuda", "dtype": "float32", "max_model_len": 512, "num_blocks": 200,
}  # fmt: skip
SECONDS = 110.0  # for each of these tests, which compile kernels first


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that takes longer prints where its processes are, and ends its workers. It fails, or ends itself."""
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # of workers, which get SIGABRT

    def end() -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(entry.read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue  # it has ended
            if parent == os.getpid():
                os.kill(int(entry.parent.name), signal.SIGABRT)

    timers = [threading.Timer(SECONDS, end), threading.Timer(SECONDS + 15, os._exit, [1])]
    for timer in timers:
        timer.daemon = True
        timer.start()
    yield
    for timer in timers:
        timer.cancel()


@pytest.mark.gpu
@TWO
def test_two_gpus_with_graphs_equal_one(tmp_path: Path, short: None) -> None:
    made = make_tiny(tmp_path / "moe", "qwen3_moe", "float32")
    with LLM(str(made), **ON_GPU, enforce_eager=True) as one:
        want = [tokens(one.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (1, 2, 5)]
    with LLM(str(made), **ON_GPU, data_parallel_size=2) as two:
        got = [tokens(two.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (1, 2, 5)]
        replays = two.llm_engine.executor.call(replays_of)
        os.kill(two.llm_engine.executor._ranks.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"rank 1 .* was killed by SIGKILL"):
            two.generate(PROMPTS * 20, GREEDY, use_tqdm=False)
    assert got == want
    assert replays[0] == replays[1] and replays[0]["decode"] > 20


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_drafts_of_two_gpus_leave_the_tokens(tmp_path: Path, short: None, method: str) -> None:
    made, config = drafting(method, tmp_path)
    each = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    given, more = prompts(4), {**ON_GPU, "max_model_len": 96}
    with LLM(str(made), **more, enforce_eager=True) as one:
        want = [tokens(one.generate(given[:n], each, use_tqdm=False)) for n in (4, 1)]
    with LLM(str(made), **more, data_parallel_size=2, speculative_config=config) as two:
        got = [tokens(two.generate(given[:n], each, use_tqdm=False)) for n in (4, 1)]
        replays = two.llm_engine.executor.call(replays_of)
    assert got == want
    if method == "mtp":
        assert replays[0]["verify"] == replays[1]["verify"] > 5


@pytest.mark.gpu
@FOUR
def test_two_ranks_of_two_gpus_equal_one(tmp_path: Path, short: None) -> None:
    made = make_tiny(tmp_path / "moe", "qwen3_moe", "float32")
    with LLM(str(made), **ON_GPU, enforce_eager=True) as one:
        want = [tokens(one.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (1, 5)]
    with LLM(str(made), **ON_GPU, data_parallel_size=2, tensor_parallel_size=2) as four:
        assert [tokens(four.generate(PROMPTS[:n], GREEDY, use_tqdm=False)) for n in (1, 5)] == want
        os.kill(four.llm_engine.executor._ranks.workers[2].process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"rank 3 .* was killed by SIGKILL"):
            four.generate(PROMPTS * 20, GREEDY, use_tqdm=False)
