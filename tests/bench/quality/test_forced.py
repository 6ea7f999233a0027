"""Forced decodes: cutting and ordering of the text, stored logits, and engines that agree with a plain forward."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.quality import families, faults, forced, structured, text
from fk_bench.quality.calibration import correctness
from fk_bench.quality.metrics.metric import metrics
from fk_bench.quality.worker import Worker
from support.llada import Llada, make_tiny_llada
from support.tiny import make_tiny_llama

EXTENT = text.Extent(sequences=5, batch=3, prompts=(5, 9), new=4)


def test_text_is_cut_without_overlap_and_ordered() -> None:
    found = text.cut(range(400), EXTENT)
    assert [t for s in found for t in (*s.prompt, *s.tokens)] == [*range(5 * 4 + 3 * 5 + 2 * 9)]
    assert [s.at for s in found] == [0, 4, 8, 12, 16] and EXTENT.total == 20
    assert text.batches(7, 3) == [[0, 1, 2], [3, 4, 5], [6]]
    order = text.batches(7, 3, order=True)
    assert sorted(i for b in order for i in b) == [*range(7)] and all(len(b) < 3 for b in order)
    assert order != [[i] for i in range(7)] and order == text.batches(7, 3, order=True)
    assert text.batches(2, 1, order=True) and len(text.english()) > 400_000
    with pytest.raises(ValueError, match="the text has 30 tokens, 53 are needed"):
        text.cut(range(30), EXTENT)
    with pytest.raises(ValueError, match="at least 1"):
        text.Extent(sequences=0)


class Greedy:
    """A sampler of the kind that vLLM's second model runner has."""

    def __init__(self) -> None:
        self.added: list[int] = []

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.added.append(req_idx)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> torch.Tensor:
        return logits.argmax(-1)


def test_sampler_forces_requests_with_a_task(tmp_path: Path) -> None:
    sampler, file = Greedy(), tmp_path / "run.f32"
    forced.force_in(sampler)
    for req_idx, tokens in ((5, [1, 2, 3]), (2, None), (7, [30, 31, 32])):
        task = {"file": str(file), "total": 8, "at": 4 * (req_idx == 7)}
        extra = None if tokens is None else {"task": {**task, "tokens": tokens}}
        sampler.add_request(req_idx, 4, SimpleNamespace(extra_args=extra))
    assert sampler.added == [5, 2, 7]
    draw = torch.Generator().manual_seed(0)
    steps = [torch.randn(10, 37, generator=draw).bfloat16() for _ in range(4)]
    for step, order in enumerate(([5, 2, 7], [7, 5, 2], [2, 7, 5], [2, 5, 7])):
        logits = steps[step][order]
        before = logits.clone()
        found = sampler(logits, SimpleNamespace(idx_mapping_np=np.array(order)))
        free = {i: int(steps[step][i].argmax()) for i in order}
        wanted = {5: [1, 2, 3, free[5]], 2: [free[2]] * 4, 7: [30, 31, 32, free[7]]}
        assert found.tolist() == [wanted[i][step] for i in order] and torch.equal(logits, before)
    rows = forced.read_rows(file, 8, 37)
    for at, i in ((0, 5), (4, 7)):
        assert torch.equal(rows[at : at + 3], torch.stack([steps[step][i] for step in range(3)]).float())
    with pytest.raises(ValueError, match="rows of 38 were expected"):
        forced.read_rows(file, 8, 38)


def options(model: Path, folder: Path, host: str) -> dict[str, Any]:
    return {
        "host": host, "family": "text", "model": str(model), "folder": str(folder), "engine_args": {}, "batch": 3,
        "dtype": "float32", "longest": EXTENT.longest, "tokens": 64, "requests": False,
    }  # fmt: skip


def random_text(folder: Path, vocabulary: int) -> list[text.Forced]:
    rng = random.Random(0)
    found = text.cut([rng.randrange(vocabulary) for _ in range(100)], EXTENT)
    (folder / "inputs.json").write_text(json.dumps([s.__dict__ for s in found]))
    return found


@pytest.mark.parametrize("host", ["fastkernels", "transformers"])
def test_forced_decode_equals_one_forward(host: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_tiny_llama(tmp_path / "llama", dtype="float32")
    sequences = random_text(tmp_path, 512)
    worker = Worker(options(model, tmp_path, host))
    for run, order in (("one", False), ("two", True)):
        worker.answer({"run": run, "batches": text.batches(5, 3, order)})
    runs = ["one", "two"]
    if host == "fastkernels":  # prompts and decodes in one step
        worker.answer({"run": "mixed", "batches": text.batches(5, 3), "staggered": True})
        runs.append("mixed")
    found = [families.outputs("text", str(model), EXTENT, tmp_path, run) for run in runs]
    worker.engine.close()
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        for s in sequences:
            wanted = plain(torch.tensor([s.prompt + s.tokens])).logits[0, len(s.prompt) - 1 : -1]
            for run in found:
                torch.testing.assert_close(run.logits[s.at : s.at + 4], wanted, atol=1e-4, rtol=1e-4)
    assert found[0].targets.tolist() == [t for s in sequences for t in s.tokens]


def test_forced_masks_equal_the_equations(tmp_path: Path) -> None:
    """Logits at a mask, given the tokens before it and masks behind it; later steps read the block cache."""
    model = make_tiny_llada(tmp_path / "llada")
    oracle, mask = Llada(model), 500
    sequences = random_text(tmp_path, mask)
    assert families.family_of(str(model), "fastkernels") == "text"
    worker = Worker(options(model, tmp_path, "fastkernels") | {"tokens": 256})
    worker.answer({"run": "one", "batches": text.batches(5, 3)})
    worker.answer({"run": "mixed", "batches": text.batches(5, 3), "staggered": True})
    found = [families.outputs("text", str(model), EXTENT, tmp_path, run) for run in ("one", "mixed")]
    worker.engine.close()
    for s in sequences:
        caches: list[list[torch.Tensor]] = []
        for i in range(4):
            ids, first = [*s.prompt, *s.tokens[:i], *[mask] * (4 - i)], len(s.prompt) if i else 0
            wanted = oracle.logits(ids[first:], first, caches)[len(s.prompt) + i - first]
            for run in found:
                torch.testing.assert_close(run.logits[s.at + i].double(), wanted, atol=1e-4, rtol=1e-4)


def test_random_weights_with_structure_show_every_fault(tmp_path: Path) -> None:
    """A freshly initialized model hides faults of 1%; the multiplied norm makes them visible."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    (tmp_path / "config").mkdir()
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "config")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    drawn = structured.checkpoint(tmp_path / "config", tmp_path / "drawn")
    random_text(tmp_path, 512)
    family = families.FAMILIES["text"]
    found: dict[tuple[str, str], float] = {}
    for name, model in (("plain", tmp_path / "plain"), ("drawn", drawn)):
        runs = {}
        for fault in ("", faults.REORDER, *faults.FAULTS):
            path = faults.faulty_checkpoint(model, fault, tmp_path / f"{name}-{fault}") if fault else model
            worker = Worker(options(path, tmp_path, "transformers"))
            worker.answer({"run": f"{name}{fault}", "batches": [[0, 2, 4], [1, 3]]})
            runs[fault] = families.outputs("text", str(model), EXTENT, tmp_path, f"{name}{fault}")
            found[name, fault] = metrics()[family.metric].measure(runs[fault], runs[""]).discrepancy
    noise = found["drawn", faults.REORDER]
    assert noise < 1e-4
    c = {fault: correctness(found["drawn", fault], noise, family.bound) for fault in faults.FAULTS}
    assert max(c.values()) < 0.9, c
    assert correctness(found["plain", "scale"], noise, family.bound) > 0.9
