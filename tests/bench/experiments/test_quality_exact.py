"""Tests of quality_exact.py: the float32 reference of all runs."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from experiments.quality import quality_exact
from experiments.quality import quality_plan as plans
from experiments.quality import quality_record as record
from experiments.quality import quality_summary as summary


def test_exact_model_is_transformers_in_float32(
    tmp_path: Path,
) -> None:
    from experiments.checkpoints.make_checkpoint import FP8_DYNAMIC, quantize_model
    from support.tiny import make_tiny_llama
    from transformers import AutoModelForCausalLM

    plain = make_tiny_llama(tmp_path / "llama", dtype="bfloat16")
    quantize_model(plain, tmp_path / "fp8", "fp8")
    assert json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"] == FP8_DYNAMIC
    tokens = random.Random(3).choices(range(37), k=400)
    plan = plans.plan(tokens, {4: 30, 1: 12}, [3, 8], 6, (2, 45), 16)
    wanted = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for name, model, near in (("a", plain, 1e-4), ("b", tmp_path / "fp8", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        quality_exact.run(folder, model, plan, 5)
        vocabulary = wanted.config.vocab_size
        kept = record.kept(str(folder), plan.total, vocabulary, record.EXACT_LOGITS)
        with torch.no_grad():
            for s in plan.decode:
                logits = wanted(torch.tensor([s.prompt + s.tokens])).logits[0][len(s.prompt) - 1 : -1]
                error = (kept[s.at : s.at + len(s.tokens)] - logits).abs().max()
                assert error < near and (error > 0.001) == (name == "b")
            lines = summary.read(folder / f"{record.EXACT}-prefill.jsonl")
            for i, s in enumerate(plan.prefill):
                logprobs = wanted(torch.tensor([s.tokens])).logits[0][:-1].log_softmax(-1)
                own = logprobs.gather(-1, torch.tensor(s.tokens[1:])[:, None])[:, 0].tolist()
                assert lines[i]["logprob"] == pytest.approx(own, abs=2 * near)
                best = [[t for t, _ in place] for place in lines[i]["top"]]
                assert name == "b" or best == logprobs.topk(5).indices.tolist()


def test_prefills_are_compared_with_exact_ones(tmp_path: Path) -> None:
    near, far = ({"logprob": [-0.5], "top": [[(3, math.log(p)), (5, math.log(1 - p))]]} for p in (0.6, 0.7))
    runs = {record.EXACT: {0: near}, record.HOST: {0: near}, "patched": {0: far}}
    made = summary.prefills(runs)
    assert record.EXACT not in made and made[record.HOST][0]["kl_exact"] == [0.0]
    wanted = 0.6 * math.log(0.6 / 0.7) + 0.4 * math.log(0.4 / 0.3)
    assert made["patched"][0]["kl_exact"] == made["patched"][0]["kl"] == [pytest.approx(wanted)]
