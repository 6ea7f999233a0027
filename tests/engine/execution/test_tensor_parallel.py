"""Two ranks (gloo): tokens equal those of one rank, patches reach both, and any failure ends the engine."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import fields

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny

import fastkernels
from fastkernels import LLM, SamplingParams, StructuredOutputsParams
from fastkernels.core import registry
from fastkernels.engine.async_llm import AsyncLLM
from fastkernels.engine.execution.executor import WorkerDied
from fastkernels.engine.execution.worker import pack, unpack
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.steps.step import PromptTargets, StepInput
from fastkernels.patch import PatchError

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[7], list(range(10, 73)), [300, 4, 4, 4, 90], list(range(200, 331))]
SETTINGS = {"device": "cpu", "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 64}


def tokens(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def make(folder, **settings):
    return LLM(str(folder), **{**SETTINGS, "num_blocks": 40, "tensor_parallel_size": 2, **settings})


def pids(llm):
    return [worker.process.pid for worker in llm.llm_engine.executor._ranks.workers]


def gone(pid, seconds=60.0):
    """Whether the process ends in time. A zombie counts as ended."""
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize("updates", [[], [[0, 1, 7], [2, 0, 9]]])
def test_packed_step_round_trips(updates):
    step = StepInput(
        np.array([4, 2]), np.array([1, 3], np.int32), np.array([9, 3], np.int32), np.array([5, -1]),
        np.array([-1, 3, 4, 5]), 1, np.array(updates, np.int32).reshape(-1, 3),
        [NewRow(2, SamplingParams(logit_bias={3: 1.0}), 7, frozenset({1}), (3, 4))],
        [PromptTargets(1, 2, np.array([4, 5]))], True,
    )  # fmt: skip
    got = unpack(pickle.loads(pack(step)))
    for field in fields(StepInput):
        sent, found = getattr(step, field.name), getattr(got, field.name)
        if isinstance(sent, np.ndarray):
            assert np.array_equal(sent, found) and (sent.dtype, sent.shape) == (found.dtype, found.shape)
    assert (got.num_decodes, got.new_rows, got.masked) == (1, step.new_rows, True)
    assert got.prompt_targets[0].targets.tolist() == [4, 5]


@pytest.fixture(scope="module")
def two(tiny):
    """An engine of two ranks with two steps in flight, shared by the tests; the last one ends it."""
    llm = make(tiny, async_scheduling=True)
    yield llm
    llm.llm_engine.shutdown()


def test_greedy_equals_transformers(two, tiny, greedy):
    assert tokens(two.generate(PROMPTS, GREEDY)) == [greedy(tiny, p, 16) for p in PROMPTS]
    shapes = two.llm_engine.executor.call(shape_of, "model.layers.0.self_attn.qkv_proj.weight")
    assert shapes == [((2 + 1 + 1) * 32, 128)] * 2


def shape_of(runner, name):
    return tuple(runner.model.get_parameter(name).shape)


def test_all_kinds_of_requests_equal_transformers(two, tiny, oracle):
    oracle.check_requests(tiny, two)


def test_structured_outputs_on_two_ranks(two, tiny):
    digits = StructuredOutputsParams(regex="[0-9]{3}-[0-9]{5}")
    params = [
        SamplingParams(seed=3, max_tokens=20, structured_outputs=digits),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=digits),
    ]
    with LLM(str(tiny), **SETTINGS, num_blocks=40) as one:
        want = one.generate(PROMPTS[:3], params)
    got = two.generate(PROMPTS[:3], params)
    assert tokens(got) == tokens(want)
    assert all(re.fullmatch("[0-9]{3}-[0-9]{5}", got[i].outputs[0].text) for i in (0, 2))


def test_prefix_hits_and_preemption(two, tiny, greedy):
    scheduler = two.llm_engine.scheduler
    stem = [(i * 17) % 500 for i in range(40)]
    prompts = [stem, [*stem, 3], stem[:24], [*stem[:16], 8, 8, 8]]
    before = scheduler.prefix_hits
    for _ in range(2):
        assert tokens(two.generate(prompts, GREEDY)) == [greedy(tiny, p, 16) for p in prompts]
    assert scheduler.prefix_hits > before
    preempted = scheduler.num_preemptions
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[i + 3, 1, 4, i] * (1 + i) for i in range(6)]
    assert tokens(two.generate(prompts, long)) == [greedy(tiny, p, 60) for p in prompts]
    assert scheduler.num_preemptions > preempted


CANDIDATE = """
import torch
from fastkernels.core import parallel
def silu_and_mul(x, *rest):
    gate, up = x.chunk(2, dim=-1)
    return (1 + {more} * parallel.get_tp_rank()) * torch.nn.functional.silu(gate) * up
"""


def test_candidate_runs_on_every_rank(two, tmp_path):
    before = tokens(two.generate(PROMPTS, GREEDY))
    for more in (0, 5):
        (tmp_path / f"{more}.py").write_text(CANDIDATE.format(more=more))
    with fastkernels.patch(two, candidates={"silu_and_mul": str(tmp_path / "0.py")}) as report:
        assert tokens(two.generate(PROMPTS, GREEDY)) == before
        rows = [(r.rank, r.calls > 0, r.reason) for r in report.refresh().rows if r.op == "silu_and_mul"]
        assert rows == [(0, True, "candidate"), (1, True, "candidate")]
        assert sorted(report.pids) == [0, 1] and list(report.pids.values()) == [os.getpid(), *pids(two)]
    with fastkernels.patch(two, candidates={"silu_and_mul": str(tmp_path / "5.py")}):
        assert tokens(two.generate(PROMPTS, GREEDY)) != before
    assert tokens(two.generate(PROMPTS, GREEDY)) == before


COLLECTIVE = """
import torch.distributed as dist
from fastkernels.core import parallel


def all_reduce(x, group="tp"):
    out = x.clone()
    dist.all_reduce(out, group=parallel.communicator(group).process_group)
    return {result}
"""


def test_candidate_for_a_collective_runs_on_every_rank(two, tmp_path):
    before = tokens(two.generate(PROMPTS, GREEDY))
    for name, result in (("right", "out"), ("wrong", "out + 5")):
        (tmp_path / f"{name}.py").write_text(COLLECTIVE.format(result=result))
    with fastkernels.patch(two, candidates={"all_reduce": str(tmp_path / "right.py")}) as report:
        assert tokens(two.generate(PROMPTS, GREEDY)) == before
        rows = [(r.rank, r.calls > 0, r.reason) for r in report.refresh().rows if r.op == "all_reduce"]
        assert rows == [(0, True, "candidate"), (1, True, "candidate")]
    with fastkernels.patch(two, candidates={"all_reduce": str(tmp_path / "wrong.py")}):
        assert tokens(two.generate(PROMPTS, GREEDY)) != before
    assert tokens(two.generate(PROMPTS, GREEDY)) == before


def test_norms_sum_what_row_parallel_layers_leave(two, tiny):
    before = tokens(two.generate(PROMPTS, GREEDY))
    ranks = two.llm_engine.executor
    rows, norms = ranks.call(sums_of)[0]
    assert not any(rows) and norms == [False] + [True] * len(rows)
    calls = ranks.call(fused, "named")
    assert tokens(two.generate(PROMPTS, GREEDY)) == before
    assert [after > n for after, n in zip(ranks.call(fused, None), calls, strict=True)] == [True, True]


LAYER = """
import torch
from torch import nn


def normed(norm, x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


class VllmLlamaDecoderLayer(nn.Module):
    def forward(self, positions, hidden_states, residual):
        residual = hidden_states if residual is None else hidden_states + residual
        out = self.self_attn(positions=positions, hidden_states=normed(self.input_layernorm, residual))
        residual = residual + out
        return self.mlp(normed(self.post_attention_layernorm, residual)), residual
"""


@pytest.mark.parametrize("name", ["llama_decoder_layer", "llama.decoder_layer"])
def test_candidate_for_a_layer_gets_sums(two, tmp_path, name):
    before = tokens(two.generate(PROMPTS, GREEDY))
    (tmp_path / f"{name}.py").write_text(LAYER)
    with fastkernels.patch(two, candidates={name: str(tmp_path / f"{name}.py")}) as report:
        assert tokens(two.generate(PROMPTS, GREEDY)) == before
        assert all(row.calls for row in report.refresh().rows if row.op == name)
        rows, norms = two.llm_engine.executor.call(sums_of)[0]
        assert all(rows) and not any(norms)
    assert tokens(two.generate(PROMPTS, GREEDY)) == before
    rows, norms = two.llm_engine.executor.call(sums_of)[0]
    assert not any(rows) and norms == [False] + [True] * len(rows)


NORM = """
import torch


class VllmRMSNorm(torch.nn.Module):
    def forward(self, x, residual=None):
        if residual is not None:
            residual.add_(x)
            x = residual
        out = torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon) {more}
        return out if residual is None else (out, residual)
"""


def test_class_of_a_candidate_runs_in_norms_that_sum(two, tmp_path):
    """Of a Llama model, that is the final norm."""
    before = tokens(two.generate(PROMPTS, GREEDY))
    for more, same in (("", True), ("* torch.arange(x.shape[-1])", False)):
        (tmp_path / "norm.py").write_text(NORM.format(more=more))
        with fastkernels.patch(two, candidates={"rms_norm": str(tmp_path / "norm.py")}):
            assert (tokens(two.generate(PROMPTS, GREEDY)) == before) is same
    assert tokens(two.generate(PROMPTS, GREEDY)) == before


def sums_of(runner):
    layers = runner.model.model.layers
    rows = [row.reduce_results for x in layers for row in (x.self_attn.o_proj, x.mlp.down_proj)]
    norms = [n for x in layers for n in (x.input_layernorm, x.post_attention_layernorm)]
    return rows, [getattr(n, "sums_ranks", False) for n in (*norms, runner.model.model.norm)]


def fused(runner, request):
    op = registry.get("all_reduce_rms_norm").op
    op._requested = request
    return op.calls


def test_candidate_failing_on_one_rank_changes_nothing(two, tmp_path):
    before = tokens(two.generate(PROMPTS, GREEDY))
    file = tmp_path / "kernel.py"
    file.write_text(
        CANDIDATE.format(more=5) + "if parallel.get_tp_rank() == 1:\n    raise OSError('no such kernel')\n"
    )
    with pytest.raises(PatchError, match=r"rank 1 .*no such kernel"):
        fastkernels.patch(two, candidates={"silu_and_mul": str(file)})
    assert tokens(two.generate(PROMPTS, GREEDY)) == before


def test_second_tensor_parallel_engine_is_refused(two, tiny):
    with pytest.raises(ValueError, match="shut down the other engine first"):
        make(tiny)


def raise_in_steps(runner):
    def forward(*args, **rows):
        raise ArithmeticError("a bug in one rank's step")

    if runner.rank == 1:
        runner.model.forward = forward


def test_exception_in_a_worker_ends_the_engine(two):
    """The last test that uses `two`."""
    executor, (pid,) = two.llm_engine.executor, pids(two)
    executor.call(raise_in_steps)
    start = time.monotonic()
    with pytest.raises(
        WorkerDied, match="rank 1 failed: ArithmeticError: a bug in one rank's step"
    ) as caught:
        two.generate(PROMPTS, GREEDY)
    assert time.monotonic() - start < 60
    assert caught.value.fatal and caught.value.rank == 1 and "\n" not in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert "in raise_in_steps" not in shown and caught.value.traceback in shown
    assert "in launch" in caught.value.traceback and "in forward" in caught.value.traceback
    assert gone(pid)
    with pytest.raises(WorkerDied, match="a bug in one rank"):  # still the first error
        two.generate([5], GREEDY)
    two.llm_engine.shutdown()
    assert not fastkernels.core.parallel.get_tp_rank() and fastkernels.core.parallel.get_tp_size() == 1


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("qwen3", {"num_key_value_heads": 1}), pytest.param("mixtral", {}, marks=pytest.mark.slow)],
)
def test_other_architectures_equal_transformers(tmp_path, oracle, kind, fields):
    """Includes a Qwen3 model with one KV head, which both ranks hold."""
    folder = make_tiny(tmp_path / kind, kind, "float32", **fields)
    with make(folder) as llm:
        oracle.check_requests(folder, llm)
        (pid,) = pids(llm)
    assert gone(pid)
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("where", [pytest.param("between steps", marks=pytest.mark.slow), "in a collective"])
def test_killed_worker_ends_the_engine(tiny, where):
    llm = make(tiny)
    engine, (pid,) = llm.llm_engine, pids(llm)
    engine.add_request("r", [5, 6], SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    for _ in range(5):
        engine.step()
    if where == "between steps":
        os.kill(pid, signal.SIGKILL)
    else:  # rank 0 waits for a stopped rank
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"rank 1 \(pid {pid}\) was killed by SIGKILL"):
        while engine.has_unfinished_requests():
            engine.step()
    assert time.monotonic() - start < 60 and gone(pid)


def test_rank_that_fails_to_load_is_named(tiny, tmp_path):
    """Only the second rank's rows contain NaN."""
    folder = shutil.copytree(tiny, tmp_path / "copy")
    file = folder / "model.safetensors"
    weights = load_file(file)
    key = "model.layers.1.mlp.gate_proj.weight"
    weights[key][200, 5] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    children = set(psutil.Process().children())
    with pytest.raises(WorkerDied, match=f"rank 1 failed: .*NaN or infinity in {key}") as caught:
        make(folder)
    assert caught.value.rank == 1 and "CheckpointError" in caught.value.traceback
    assert set(psutil.Process().children()) <= children


def test_error_of_all_ranks_is_raised_unchanged(tiny, tmp_path):
    children = set(psutil.Process().children())
    with pytest.raises(ValueError, match="max_model_len 512 does not fit"):
        make(tiny, max_model_len=512, num_blocks=9)
    assert set(psutil.Process().children()) <= children
    used = os.times()
    with pytest.raises(
        ValueError,
        match=r"tensor_parallel_size 8 does not suit.*num_attention_heads=4 cannot be shared .* supported: 1, 2, 4$",
    ):
        make(tiny, tensor_parallel_size=8)
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 255}))
    with pytest.raises(ValueError, match=r"intermediate_size=255 cannot be shared by 2 ranks; supported: 1$"):
        make(tmp_path, load_format="dummy", skip_tokenizer_init=True)
    assert (
        os.times().children_user - used.children_user < 0.5
    )  # no process was started: its imports take more


@pytest.mark.slow
def test_worker_killed_while_idle(tiny, greedy):
    died = threading.Event()
    llm = AsyncLLM(
        EngineConfig(str(tiny), tensor_parallel_size=2, num_blocks=40, device="cpu"), on_death=died.set
    )
    worker = llm.engine.executor._ranks.workers[0].process

    async def last() -> list[int]:
        return [o async for o in llm.generate([7], GREEDY, "r")][-1].outputs[0].token_ids

    assert asyncio.run(last()) == greedy(tiny, [7], 16)
    worker.kill()
    assert died.wait(60) and not llm.healthy
    assert llm.dead == f"WorkerDied: rank 1 (pid {worker.pid}) was killed by SIGKILL"
    assert gone(worker.pid) and llm.shutdown()


GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


@pytest.mark.gpu
@GPUS
def test_two_gpus_equal_one_and_notice_a_death(tiny):
    settings = {"device": "cuda", "dtype": "float32", "max_model_len": 512, "num_blocks": 200}
    eager = make(tiny, tensor_parallel_size=1, enforce_eager=True, **settings)
    graphs = make(tiny, **settings)
    for n in (1, 3, 4):
        assert tokens(graphs.generate(PROMPTS[:n], GREEDY)) == tokens(eager.generate(PROMPTS[:n], GREEDY))
    (pid,) = pids(graphs)
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
        while time.monotonic() - start < 60:
            graphs.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    assert time.monotonic() - start < 60 and gone(pid)


PARENT = """
import sys
from fastkernels import LLM, SamplingParams
llm = LLM(sys.argv[1], device=sys.argv[3], tensor_parallel_size=2, num_blocks=200)
print(llm.llm_engine.executor._ranks.workers[0].process.pid, flush=True)
if sys.argv[2] == "kill":
    while True:
        llm.generate([[5, 6]] * 4, SamplingParams(max_tokens=64, ignore_eos=True))
llm.generate([[5, 6]], SamplingParams(max_tokens=4))  # no shutdown
"""


@pytest.mark.parametrize(
    ("end", "device"),
    [
        ("kill", "cpu"),
        pytest.param("forget", "cpu", marks=pytest.mark.slow),
        pytest.param("forget", "cuda", marks=[pytest.mark.gpu, GPUS]),  # its graphs hold NCCL's communicator
    ],
)
def test_workers_end_with_their_parent(tiny, end, device):
    command = [sys.executable, "-c", PARENT, str(tiny), end, device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        if end == "kill":
            time.sleep(0.5)
            parent.kill()
        assert (parent.wait(120) == 0) is (end == "forget")
        assert gone(pid)
