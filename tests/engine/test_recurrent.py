"""Layers that keep a state: equal to transformers however a sequence is computed, and limits with their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.kernels.decode_launches import Recorded
from support.splits import IDS, check_logits
from support.tiny import RECURRENT, make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.engine.steps.input_batch import InputBatch, packed_words
from fastkernels.engine.steps.step import StepInput
from fastkernels.models.common.checkpoints.weights import CheckpointError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SMALL: dict[str, Any] = {"device": "cpu", "block_size": 4, "max_num_seqs": 4, "max_model_len": 96}


@pytest.fixture(scope="module", params=RECURRENT)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("recurrent") / request.param, request.param, "float32")


def tiny(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / f"recurrent_{kind}", kind, "float32")


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory, "mamba2")


@pytest.fixture(scope="module")
def jamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory, "jamba")


def tokens(outputs: Any) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def test_every_split_has_transformers_logits(folder: Path, oracle: Any) -> None:
    """Two steps of many lengths, and one token at a time, next to another sequence in the same step."""
    total = len(IDS)
    check_logits(folder, oracle, [[n, total] for n in (1, 2, 3, 4, 8, 15, 22)] + [list(range(1, total + 1))])


def test_time_step_limits_bound_every_step(oracle: Any, tmp_path: Path) -> None:
    """As in one pass of transformers, whose decoding from its own cache ignores the limits."""
    folder = make_tiny(tmp_path, "mamba2", "float32", time_step_limit=[0.5, 0.9])
    check_logits(folder, oracle, [[len(IDS)], list(range(1, len(IDS) + 1))])


def test_prefix_is_served_from_the_last_snapshot(folder: Path, greedy: Any) -> None:
    """The third prompt with a common prefix starts from its snapshot; a shared part of a block is computed."""
    llm = LLM(str(folder), num_blocks=100, num_snapshots=4, **SMALL)
    stem = [(i * 17) % 500 for i in range(30)]
    prompts = [[*stem, 3, 4], [*stem, 5], [*stem, 6, 7, 8]]
    cached = []
    for prompt in prompts:
        output = llm.generate([prompt], GREEDY)[0]
        cached.append(output.num_cached_tokens)
        assert output.outputs[0].token_ids == greedy(folder, prompt, 12)
    assert cached == [0, 0, 28]
    llm.llm_engine.reset_prefix_cache()
    assert llm.generate([prompts[0]], GREEDY)[0].num_cached_tokens == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_conversation_continues_from_its_answer(mamba2: Path, greedy: Any, overlap: bool) -> None:
    llm = LLM(str(mamba2), num_snapshots=4, async_scheduling=overlap, **SMALL)
    states = llm.llm_engine.scheduler.states
    assert states is not None
    states.interval = 16
    prompt = [(i * 29) % 500 for i in range(10)]
    answer = tokens(llm.generate([prompt], LONG))[0]
    assert answer == greedy(mamba2, prompt, 40)
    assert states.num_cached == 1  # of the generated tokens, the last one only
    following = [*prompt, *answer, 9]
    output = llm.generate([following], GREEDY)[0]
    assert output.num_cached_tokens == 48
    assert output.outputs[0].token_ids == greedy(mamba2, following, 12)


def test_chunks_of_prompts_end_at_blocks(jamba: Path, greedy: Any) -> None:
    llm = LLM(str(jamba), num_blocks=100, num_snapshots=4, max_num_batched_tokens=10, **SMALL)
    prompt = [(i * 13) % 500 for i in range(41)]
    llm.llm_engine.add_request("0", prompt, GREEDY)
    (request,) = llm.llm_engine.requests["0"].sequences
    computed = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        computed.append(request.num_computed_tokens)
    assert computed[:5] == [8, 16, 24, 32, 41]
    assert request.output_token_ids == greedy(jamba, prompt, 12)


@pytest.mark.parametrize("kind", ["mamba2", "jamba", "rwkv7"])
def test_preempted_sequences_keep_their_tokens(
    kind: str, greedy: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny(tmp_path_factory, kind)
    llm = LLM(str(folder), num_blocks=12, num_snapshots=2, **{**SMALL, "max_model_len": 40})
    scheduler = llm.llm_engine.scheduler
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9]]
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), prompt, GREEDY)
    sequences = [llm.llm_engine.requests[str(i)].sequences[0] for i in range(4)]
    for step in range(200):
        if not llm.llm_engine.has_unfinished_requests():
            break
        llm.llm_engine.step()
        if kind != "jamba" and step in (3, 6) and scheduler.running:  # it never runs out of blocks
            scheduler._preempt(scheduler.running.pop())
    assert scheduler.num_preemptions > 0
    assert [s.output_token_ids for s in sequences] == [greedy(folder, p, 12) for p in prompts]


def test_slots_of_states_come_with_the_inputs(jamba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation runs for them between the copy of a step's inputs and the first layer."""
    runner = LLM(str(jamba), num_blocks=100, **SMALL).llm_engine.runner
    forward, before = runner._forward, list[list[str]]()

    def recorded(ids: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        with Recorded() as ops:
            entered = runner.model.register_forward_pre_hook(lambda *_: before.append([*ops.names]))
            hidden = forward(ids, *args, **more)
        entered.remove()
        assert len(ops.names) > 20
        return hidden

    monkeypatch.setattr(runner, "_forward", recorded)
    step = StepInput(
        np.array([2, 0]), np.array([1, 3], np.int32), np.array([1, 3], np.int32), np.zeros(2, np.int64),
        np.arange(4), 1, np.array([[2, 0, 1], [0, 0, 2]], np.int32),
    )  # fmt: skip
    runner.batch.update(step.block_updates)
    runner._run(step)
    assert before == [[]]


def test_slots_of_states_have_static_addresses() -> None:
    """Each step that a graph's buffer gets has its own slots; padding, and the dummy slot 4, has slot 0."""
    batch, steps = InputBatch(torch.device("cpu"), 4, 64, 4, groups=2), []
    for slots, lens, seqs in (
        ([4] * 5, [1] * 5, [1] * 5),
        ([2, 0, 3], [1, 1, 2], [9, 1, 2]),
        ([1], [4], [30]),
    ):
        ids = np.zeros(sum(lens), np.int64)
        steps.append(StepInput(
            np.array(slots), np.array(lens, np.int32), np.array(seqs, np.int32), np.zeros(len(slots), np.int64), ids,
            lens.count(1), np.empty((0, 3), np.int32),
        ))  # fmt: skip
    buffer = torch.zeros(packed_words(6, 5, 2), dtype=torch.int64)
    views = batch.load(steps[0], 6, 5, buffer)
    found = []
    for step in steps:
        inputs = batch.load(step, 6, 5, buffer, views)
        assert inputs.state_slots.data_ptr() == views.state_slots.data_ptr()
        assert inputs.fresh.data_ptr() == views.fresh.data_ptr()
        assert (inputs.state_slots.dtype, inputs.fresh.dtype) == (torch.int32, torch.bool)
        rows = len(step.slots)
        computed = inputs.cu_seqlens_q.diff() == inputs.seq_lens
        assert torch.equal(inputs.fresh[:rows], computed[:rows])
        assert inputs.slot_mapping.shape == inputs.more_slot_mappings[0].shape == (6,)
        found.append(inputs.state_slots.tolist())
    assert found == [[0] * 5, [3, 1, 4, 0, 0], [2, 0, 0, 0, 0]]


def test_too_many_sequences_name_the_number_that_fits(mamba2: Path) -> None:
    settings = {**SMALL, "max_num_seqs": 64, "kv_cache_memory": 200_000}
    with pytest.raises(ValueError, match=r"max_num_seqs 64 does not fit.*to at most") as e:
        LLM(str(mamba2), **settings)
    most = int(str(e.value).partition("at most ")[2].partition(",")[0])
    llm = LLM(str(mamba2), **{**settings, "max_num_seqs": most})
    assert llm.llm_engine.executor.runner.states.slots == most + 1
    with pytest.raises(ValueError, match="does not fit"):
        LLM(str(mamba2), **{**settings, "max_num_seqs": most + 1})


@pytest.mark.parametrize(
    ("kind", "model", "wanted", "named", "state"),
    [
        ("mamba2", "bfloat16", "auto", None, "bfloat16"),
        ("mamba2", "float32", "auto", None, "float32"),
        ("mamba2", "bfloat16", "auto", "float32", "float32"),
        ("mamba2", "bfloat16", "float32", "bfloat16", "float32"),
        ("rwkv7", "bfloat16", "auto", None, "float32"),
        ("rwkv7", "bfloat16", "bfloat16", None, "bfloat16"),
    ],
)
def test_states_have_the_dtype_of_the_option(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, kind: str, model: str, wanted: str, named: str | None,
    state: str,
) -> None:  # fmt: skip
    """Or of the checkpoint, or as in vLLM; the tokens of a state in bfloat16 are right at first."""
    made = tiny(tmp_path_factory, kind)
    for file in made.iterdir():
        (tmp_path / file.name).symlink_to(file)
    if named is not None:
        config = json.loads((made / "config.json").read_text())
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps({**config, "mamba_ssm_dtype": named}))
    llm = LLM(str(tmp_path), dtype=model, mamba_ssm_cache_dtype=wanted, **SMALL)
    layers = [m for m in llm.llm_engine.runner.model.modules() if hasattr(m, "states")]
    found = {m.states["recurrent"].dtype for m in layers if "recurrent" in m.states}
    assert found == {getattr(torch, state)}
    assert len(tokens(llm.generate([[5, 6, 7, 8]] * 2, GREEDY))[0]) == 12


def test_wrong_dtypes_of_states_are_refused(mamba2: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mamba_ssm_cache_dtype 'fp8' is not one of 'auto', 'float32'"):
        LLM(str(mamba2), mamba_ssm_cache_dtype="fp8", **SMALL)
    for file in mamba2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((mamba2 / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "mamba_ssm_dtype": "int8"}))
    with pytest.raises(ValueError, match="recurrent states in 'int8', which is not one of float32, bfloat16"):
        LLM(str(tmp_path), **SMALL)


def test_state_sizes_that_contradict_the_config_are_named(mamba2: Path, tmp_path: Path) -> None:
    raw = json.loads((mamba2 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "state_size": 25}))
    tensors = load_file(mamba2 / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mixer.*of shape \(.*expected"):
        LLM(str(tmp_path), skip_tokenizer_init=True, **SMALL)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    name = "backbone.layers.1.mixer.A_log"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"{name} of shape \(7,\) does not fit: expected \[8\]: 8 heads"
    ):
        LLM(str(tmp_path), skip_tokenizer_init=True, **SMALL)
