"""The scheduler and its step loop on the simulated cache of cache_model."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_model import CacheModel, continuation

from fastkernels.engine.cache.blocks import BlockManager
from fastkernels.engine.engines.llm_engine import _least_tokens
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.scheduling.engine_core import EngineCore
from fastkernels.engine.scheduling.request import Request, Status
from fastkernels.engine.scheduling.scheduler import AGING, LEAST_TOKENS, QueueFull, Scheduler
from fastkernels.engine.scheduling.step_input import make_step


def make_core(
    num_blocks: int = 64, block_size: int = 4, seqs: int = 8, budget: int = 32, waiting: int = 100, depth: int = 1,
    caching: bool = True,
) -> EngineCore:  # fmt: skip
    scheduler = Scheduler([BlockManager(num_blocks, block_size, caching)], seqs, budget, waiting)
    return EngineCore(scheduler, CacheModel(num_blocks, block_size, seqs, budget), depth)


def make_request(name: str, prompt: list[int], max_tokens: int = 5, **fields: object) -> Request:
    fields.setdefault("arrival", float(int(name)) if name.isdigit() else 0.0)
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), max_tokens, **fields)  # type: ignore[arg-type]


def finish_all(core: EngineCore, requests: list[Request], most: int = 10_000) -> None:
    for _ in range(most):
        if not core.busy:
            break
        core.step()
    assert not core.busy, "the requests did not end"
    for request in requests:
        assert request.output_token_ids == continuation(request.prompt_token_ids, request.max_tokens)
        assert request.finish_reason == "length" and request.status is Status.FINISHED
    assert core.scheduler.blocks.num_free == core.scheduler.blocks.num_usable
    assert sorted(core.scheduler._slots) == list(range(core.scheduler.max_num_seqs))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [8, 9, 13, 64])
def test_every_chunking_gives_the_same_tokens(depth: int, budget: int) -> None:
    core = make_core(budget=budget, depth=depth)
    requests = [make_request(str(i), list(range(i, i + 3 + 5 * i)), 1 + i) for i in range(8)]
    for request in requests:
        core.scheduler.add(request)
    finish_all(core, requests)


def test_long_prompt_sends_each_block_once() -> None:
    """A prompt of 300 blocks of which 260 are known: one array of updates, and later the next blocks alone."""
    core = make_core(num_blocks=900, budget=64)
    first, second = make_request("1", list(range(1200))), make_request("2", [*range(1040), *range(160)])
    core.scheduler.add(first)
    batch = core.scheduler.schedule()
    assert batch is not None
    updates = make_step(batch, 9, 4).block_updates
    want = [(first.slot, i, block) for i, block in enumerate(first.block_tables[0].blocks)]
    assert updates.dtype == np.int32 and list(map(tuple, updates.tolist())) == want and len(want) == 300
    assert len(make_step(batch, 9, 4).block_updates) == 0
    core = make_core(num_blocks=900, budget=64)
    for request in (first := make_request("1", list(range(1200))), second):
        core.scheduler.add(request)
        finish_all(core, [request])
    assert second.num_cached_tokens == 1040
    core.scheduler.remove_all()


@pytest.mark.parametrize("depth", [1, 2])
def test_decodes_and_a_chunk_share_a_step(depth: int) -> None:
    core = make_core(budget=8, depth=depth)
    short, long = make_request("1", [1, 2, 3], 20), make_request("2", list(range(40)), 3)
    core.scheduler.add(short)
    for _ in range(4):
        core.step()
    core.scheduler.add(long)
    batch = core.scheduler.schedule()
    assert batch is not None
    assert [(r.request_id, n) for r, n in zip(batch.requests, batch.counts, strict=True)] == [
        ("1", 1),
        ("2", 7),
    ]
    assert batch.num_decodes == 1 and batch.offsets == [4, -1]


def steps_of(
    prompts: list[int], budget: int = 8192, decodes: int = 0, least: int = LEAST_TOKENS
) -> list[list[tuple[str, int]]]:
    """The (name, tokens) that prompts of these lengths compute in each step."""
    core = make_core(num_blocks=20_000, seqs=2000, budget=budget, waiting=2000, caching=False)
    core.scheduler.least_tokens = least
    for i in range(decodes):
        core.scheduler.add(make_request(f"-{i}", [1, 2], 1000))
    while core.scheduler.num_waiting:
        core.step()
    for i, tokens in enumerate(prompts):
        core.scheduler.add(make_request(str(i), [i] * tokens, 1))
    found = []
    while any(not r.request_id.startswith("-") for r in core.scheduler.running) or core.scheduler.num_waiting:
        result = core.step()
        assert result is not None
        batch = result.batch
        named = zip(batch.requests, batch.counts, strict=True)
        found.append([(r.request_id, n) for r, n in named if not r.request_id.startswith("-")])
    return found


def test_few_prompts_finish_one_after_the_other() -> None:
    """32 prompts of 512 tokens take 6 steps instead of 2; half of them have their token after 2."""
    steps = steps_of([512] * 32)
    sums = [sum(n for _, n in step) for step in steps]
    assert sums == [4096, 4096, 2048, 2048, 2048, 2048]
    assert [name for name, _ in steps[0]] == [str(i) for i in range(8)]
    assert [sum(n for _, n in step) for step in steps_of([300, 200])] == [500]
    # A step with decodes has the same total.
    decoding = steps_of([512] * 32, decodes=100)
    assert [sum(n for _, n in step) for step in decoding][:3] == [3996, 3996, 1948]


@pytest.mark.parametrize(
    ("prompts", "budget", "decodes", "want"),
    [
        ([16384], 8192, 0, [8192, 8192]),  # alone: no gain
        (
            [1024] * 21,
            8192,
            0,
            [8192, 4096, 2048, 2048, 2048, 2048, 1024],
        ),  # long steps until few prompts remain
        ([1024] * 8, 3000, 0, [3000, 3000, 2192]),  # a small budget
        ([1024] * 8, 8192, 1025, [7167, 1025]),  # the decodes would fill most of a short step
    ],
)
def test_steps_are_shortened_only_if_useful(
    prompts: list[int], budget: int, decodes: int, want: list[int]
) -> None:
    assert [sum(n for _, n in step) for step in steps_of(prompts, budget, decodes)] == want


def test_mixture_of_experts_has_long_steps() -> None:
    """Each step reads all experts, so that shortened ones take as long: DeepSeek-V2-Lite reads a sixth for a token."""
    from fk_bench.e2e.model_configs import load_config

    assert _least_tokens(load_config("deepseek-v2-lite")[1]) == 6 * LEAST_TOKENS
    assert _least_tokens(load_config("llama-3.1-8b")[1]) == LEAST_TOKENS
    assert [sum(n for _, n in step) for step in steps_of([512] * 32, least=6 * LEAST_TOKENS)] == [8192, 8192]


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_keeps_all_tokens(depth: int) -> None:
    core = make_core(num_blocks=9, depth=depth, caching=False)
    requests = [make_request(str(i), [i + 1] * 5, 12) for i in range(4)]
    for request in requests:
        core.scheduler.add(request)
    finish_all(core, requests)
    assert core.scheduler.num_preemptions > 0


def test_latest_request_is_preempted_and_keeps_its_place() -> None:
    core = make_core(num_blocks=6, caching=False)  # 5 blocks of 4
    first, second = make_request("1", [1] * 6, 6), make_request("2", [2] * 6, 6)
    core.scheduler.add(first)
    core.scheduler.add(second)
    for _ in range(20):
        if not core.scheduler.num_preemptions:
            core.step()
    assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)
    assert second.output_token_ids and second.block_tables[0].blocks == [] and second.slot == -1
    finish_all(core, [first, second])


@pytest.mark.parametrize("depth", [1, 2])
def test_shared_prefix_is_computed_once(depth: int) -> None:
    core = make_core(depth=depth)
    prefix = list(range(20))
    first = make_request("1", [*prefix, 1], 4)
    core.scheduler.add(first)
    finish_all(core, [first])
    before = core.executor.computed_tokens  # type: ignore[attr-defined]
    second = make_request("2", [*prefix, 2], 1)
    core.scheduler.add(second)
    finish_all(core, [second])
    assert core.executor.computed_tokens - before == 1  # type: ignore[attr-defined]
    assert second.num_cached_tokens == 20
    assert (core.scheduler.prefix_queries, core.scheduler.prefix_hits) == (42, 20)


def test_fully_cached_prompt_computes_one_token() -> None:
    core = make_core()
    requests = [make_request(str(i), list(range(16)), 3) for i in range(2)]
    for request in requests:
        core.scheduler.add(request)
        finish_all(core, [request])
    assert requests[1].num_cached_tokens == 12


def test_sequences_of_one_step_share_their_prompt() -> None:
    core = make_core(budget=64)
    requests = [make_request(str(i), [*range(16), 40 + i], 3) for i in range(3)]
    for request in requests:
        core.scheduler.add(request)
    batch = core.scheduler.schedule()
    assert batch is not None and sorted(batch.counts) == [1, 1, 17]
    assert len({tuple(r.block_tables[0].blocks[:4]) for r in requests[:3]}) == 1


def test_the_oldest_free_prefix_is_evicted_first() -> None:
    core = make_core(num_blocks=9)  # 8 blocks
    for name, token in (("1", 1), ("2", 2)):
        request = make_request(name, [token] * 13, 1)
        core.scheduler.add(request)
        finish_all(core, [request])  # each request leaves 3 named blocks
    big = make_request("3", [3] * 13, 1)
    core.scheduler.add(big)
    finish_all(core, [big])  # takes the 2 unnamed blocks, then the last ones of the first request
    found = {}
    for name, token in (("4", 2), ("5", 1)):
        request = make_request(name, [token] * 13, 1)
        core.scheduler.add(request)
        finish_all(core, [request])
        found[token] = request.num_cached_tokens
    assert found[2] == 12 and found[1] < 12


def test_priority_order_without_starvation() -> None:
    core = make_core(seqs=1)
    late = make_request("5", [1, 2], 1, arrival=5.0)
    urgent = make_request("6", [3], 1, arrival=6.0, priority=-1)
    patient = make_request("0", [4], 1, arrival=5.0 - 2 * AGING, priority=1)
    for request in (late, urgent, patient):
        core.scheduler.add(request)
    order = []
    while core.busy:
        done = core.step()
        assert done is not None
        order += [r.request_id for _, r in done.news]
    assert order == ["0", "6", "5"]


def test_limits() -> None:
    core = make_core(num_blocks=4, waiting=1)
    with pytest.raises(
        ValueError, match=r"prompt of 10 tokens with 4 to generate does not fit .* holds 12 tokens"
    ):
        core.scheduler.add(make_request("1", [1] * 10, 4))
    core.scheduler.add(make_request("2", [1] * 10, 3))
    with pytest.raises(QueueFull, match="1 requests are waiting; the limit is 1"):
        core.scheduler.add(make_request("3", [1], 1))


def test_removal_while_a_step_is_in_flight() -> None:
    core = make_core(depth=2, num_blocks=9)
    gone, stays = make_request("1", [1, 2, 3], 30), make_request("2", [4, 5, 6], 9)
    for request in (gone, stays):
        core.scheduler.add(request)
    for _ in range(3):
        core.step()
    core.end([gone])
    known = list(gone.output_token_ids)
    new = make_request("3", [7, 8, 9], 9)
    core.scheduler.add(new)
    finish_all(core, [stays, new])
    assert gone.output_token_ids == known
