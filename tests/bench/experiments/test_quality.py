"""Tests of quality.py: divergences of known distributions, forced steps, splitting of a text, SmolLM2 in vLLM."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fk_bench.core.rows import read

from fastkernels.core import dispatch, registry
from fastkernels.core import tuning as tuned

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from experiments.quality import quality_plan as plans
from experiments.quality import quality_record as record
from experiments.quality import quality_summary as summary

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "bench/experiments/quality"
VOCABULARY = 37
WRONG = """
import torch.nn.functional as F

def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up * 1.05
"""


def small_plan() -> plans.Plan:
    rng = random.Random(3)
    tokens = [rng.randrange(VOCABULARY) for _ in range(400)]
    return plans.plan(tokens, {4: 30, 1: 12}, [3, 8], 6, (2, 45), 16)


def served(folder: Path, plan: plans.Plan, run: str, logits: Any) -> None:
    """Serve every batch of a run step by step; logits(sequence, step) -> [VOCABULARY]."""
    for batch in plan.batches("decode", run):
        requests = []
        for i in batch:
            sequence = plan.decode[i]
            task = {"folder": str(folder), "run": run, "sequence": i, "at": sequence.at, "total": plan.total}
            requests.append(record.Progress({**task, "tokens": sequence.tokens}))
        for step in range(6):
            rows = torch.stack([logits(i, step) for i in batch])
            record.step(rows, list(enumerate(requests)))
            assert rows.argmax(-1).tolist() == [plan.decode[i].tokens[step] for i in batch]
            assert (rows > -math.inf).sum() == len(batch)


def true_logits(number: int, step: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(100 * number + step))


def test_divergence_equals_torchs_with_masked_tokens() -> None:
    torch.manual_seed(0)
    a, b, tokens = torch.randn(5, 63), torch.randn(5, 63), torch.randint(63, (5,))
    kl, logprob, same = record.compare(a, b, tokens)
    q, p = torch.log_softmax(a.double(), -1), torch.log_softmax(b.double(), -1)
    torch.testing.assert_close(kl, F.kl_div(q, p, reduction="none", log_target=True).sum(-1))
    torch.testing.assert_close(logprob, -F.cross_entropy(a.double(), tokens, reduction="none"))
    assert same.tolist() == (a.argmax(-1) == b.argmax(-1)).double().tolist()
    assert record.compare(b, b, tokens)[0].tolist() == [0.0] * 5
    a[:, 7] = b[:, 7] = -math.inf
    assert record.compare(a, b, tokens)[0].isfinite().all()


def test_partial_divergence_is_a_lower_bound() -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(1, 41).double() + 0.2 * torch.randn(2, 41)
    p, q = torch.log_softmax(logits, -1)
    exact = float((p.exp() * (p - q)).sum())
    tops = [{int(t): float(side[t]) for t in side.topk(41).indices} for side in (p, q)]
    assert summary.partial_kl(*tops) == pytest.approx(exact, abs=1e-12)
    bounds = []
    for n in (1, 5, 20):
        bounds.append(summary.partial_kl(*({t: d[t] for t in list(d)[:n]} for d in tops)))
    assert min(bounds) >= 0.0 and max(bounds) <= exact and bounds[-1] > 0.5 * exact
    assert summary.partial_kl(tops[0], tops[0]) == 0.0


def test_forced_steps_match_sequences_in_any_order(tmp_path: Path) -> None:
    plan = small_plan()
    served(tmp_path, plan, record.HOST, true_logits)
    served(tmp_path, plan, "other", true_logits)

    def changed(number: int, step: int) -> torch.Tensor:
        shift = 0.3 if number == 2 else 0.0
        return true_logits(number, step) + shift * torch.arange(VOCABULARY) / VOCABULARY

    served(tmp_path, plan, "patched", changed)
    runs = {run: summary.read(tmp_path / f"{run}.jsonl") for run in (record.HOST, "other", "patched")}
    numbers = range(len(plan.decode))
    assert {len(found) for found in runs.values()} == {len(plan.decode)}
    assert summary.all_of(runs["other"], numbers, "kl") == [0.0] * plan.total
    for i in numbers:
        steps = [(true_logits(i, s).double(), changed(i, s).double()) for s in range(6)]
        wanted = [
            float(F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="sum", log_target=True))
            for p, q in steps
        ]
        assert runs["patched"][i]["kl"] == pytest.approx(wanted, abs=1e-6)
        assert (sum(wanted) > 1e-3) == (i == 2)
        own = [float(p.log_softmax(-1)[t]) for (p, _), t in zip(steps, plan.decode[i].tokens, strict=True)]
        assert runs[record.HOST][i]["logprob"] == pytest.approx(own, abs=1e-6)


class Greedy:
    """A sampler of the kind that vLLM's second model runner has."""

    def __init__(self) -> None:
        self.added: list[int] = []

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.added.append(req_idx)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> torch.Tensor:
        return logits.argmax(-1)


def test_sampler_forces_requests_with_a_task(tmp_path: Path) -> None:
    sampler = Greedy()
    record.force_in(sampler)
    for req_idx, tokens in ((5, [1, 2, 3]), (2, None), (7, [30, 31, 32])):
        task = {"folder": str(tmp_path), "run": record.HOST, "sequence": req_idx, "at": req_idx, "total": 10}
        extra = None if tokens is None else {"task": {**task, "tokens": tokens}}
        sampler.add_request(req_idx, 4, SimpleNamespace(extra_args=extra))
    assert sampler.added == [5, 2, 7]
    for step, order in enumerate(([5, 2, 7], [7, 5, 2], [2, 7, 5], [2, 5, 7])):
        logits = torch.stack([true_logits(i, step) for i in order]).bfloat16()
        before = logits.clone()
        found = sampler(logits, SimpleNamespace(idx_mapping_np=np.array(order)))
        free = {i: int(t) for i, t in zip(order, before.argmax(-1), strict=True)}
        wanted = {5: [1, 2, 3, free[5]], 2: [free[2]] * 4, 7: [30, 31, 32, free[7]]}
        assert found.tolist() == [wanted[i][step] for i in order] and torch.equal(logits, before)
    lines = summary.read(tmp_path / f"{record.HOST}.jsonl")
    for i in (5, 7):
        own = [
            float(true_logits(i, s).bfloat16().double().log_softmax(-1)[t])
            for s, t in enumerate(wanted[i][:3])
        ]
        assert lines[i]["logprob"] == pytest.approx(own, abs=1e-6)
    sampler.add_request(7, 4, SimpleNamespace(extra_args=None))  # another request now has this place
    assert (
        sampler(logits, SimpleNamespace(idx_mapping_np=np.array(order))).tolist()
        == before.argmax(-1).tolist()
    )


def test_text_is_cut_without_overlap_and_ordered_by_run() -> None:
    tokens = list(range(400))
    plan = plans.plan(tokens, {4: 30, 1: 12}, [3, 8], 6, (2, 45), 16)
    assert [t for s in plan.decode for t in (*s.prompt, *s.tokens)] == tokens[: 7 * 6 + 4 * 3 + 3 * 8]
    assert [s.at for s in plan.decode] == [6 * i for i in range(7)] and plan.total == 42
    assert [t for s in plan.prefill for t in s.tokens] == tokens[: 3 * 16]
    for run in ("host", "again", "patched"):
        assert plan.batches("decode", run) == [[0, 1, 2, 3], [4], [5], [6]]
    order, other = plan.batches("decode", "order"), plan.batches("decode", "other")
    assert [len(b) for b in order] == [4, 1, 1, 1] and all(len(b) < 4 for b in other[:-1])
    assert len(other[-1]) > 1  # the batch of one is a larger one
    assert sorted(i for b in other for i in b) == sorted(i for b in order for i in b) == list(range(7))
    assert order != plan.batches("decode", "host")
    with pytest.raises(ValueError, match="the text has 60 tokens"):
        plans.plan(tokens[:60], {4: 30, 1: 12}, [3, 8], 6, (2, 45), 16)
    assert len(plans.english()) > 400_000


CONFIG = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip


def test_table_sends_every_decode_to_our_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = "NVIDIA Test"
    (tmp_path / "table.json").write_text(plans.table(CONFIG, chip, 1024))
    monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path / "table.json"))
    monkeypatch.setattr(tuned, "chip_of", lambda device: chip)
    calls = {
        "linear": [((n, k, torch.bfloat16), (m,)) for n, k in ((960, 576), (576, 576), (3072, 576), (576, 1536))
                   for m in range(1, 33)],
        "attention_decode": [((9, 3, 64, block, 0, torch.bfloat16), (batch, context)) for block in (16, 1)
                             for batch in range(1, 33) for context in (64, 256, 257, 1024)],
    }  # fmt: skip
    for name, points in calls.items():
        registry.op_module(name)
        op = dispatch.OPS[name]
        assert op.key is not None
        found = tuned.lookup(op.key, tuned.entries(name, chip))
        for shape, sizes in points:
            assert tuned.not_faster(name, op.key, shape, "cuda") is None  # so that a patch puts it in
            entry = found.find(shape, sizes)
            assert entry is not None and entry.faster, (shape, sizes)
            provider = op._provider_of(entry)
            assert provider is not None and provider.name in ("cuda-skinny", "cuda-wgmma", "triton-split")
            if name == "linear":
                assert (provider.name == "cuda-skinny") == (sizes[0] <= 8)
    assert found.find((9, 3, 64, 16, 0, torch.bfloat16), (64, 1024)) is None


def test_table_of_fp8_model_has_its_linears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip, config = "NVIDIA Test", {**CONFIG, "quantization_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "table.json").write_text(plans.table(config, chip, 1024))
    monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path / "table.json"))
    monkeypatch.setattr(tuned, "chip_of", lambda device: chip)
    assert not tuned.entries("linear", chip)
    registry.op_module("linear_fp8")
    op = dispatch.OPS["linear_fp8"]
    assert op.key is not None
    found = tuned.lookup(op.key, tuned.entries("linear_fp8", chip))
    for m in range(1, 33):
        entry = found.find((3072, 576, 1, torch.bfloat16), (m,))
        assert entry is not None and entry.faster and op._provider_of(entry).name == "cuda-wgmma-fp8"


def keep_exact(folder: Path, plan: plans.Plan, logits: Any) -> None:
    exact = record.kept(str(folder), plan.total, VOCABULARY, record.EXACT_LOGITS)
    for i, sequence in enumerate(plan.decode):
        exact[sequence.at : sequence.at + 6] = torch.stack([logits(i, step) for step in range(6)])


def test_goals_are_met_missed_or_not_measured(tmp_path: Path) -> None:
    plan = small_plan()
    keep_exact(tmp_path, plan, lambda i, s: true_logits(i, s) * 0.95)
    for run, shift in ((record.HOST, 0.0), ("other", 0.10), ("patched", 0.05)):
        served(tmp_path, plan, run, lambda i, s, shift=shift: true_logits(i, s) * (1 + shift))
    groups = summary.groups(plan, tmp_path)
    assert [(g["phase"], g["batch"]) for g in groups] == [
        ("decode", "all"), ("prefill", "all"), ("decode", "4"), ("decode", "1")
    ]  # fmt: skip
    metrics, interval = groups[0]["metrics"], groups[0]["ci95"]["kl_ratio"]
    # KL grows with the square of the shift
    assert metrics["tokens"] == plan.total and 0.2 < metrics["kl_ratio"] < 0.3
    assert interval[0] < metrics["kl_ratio"] < interval[1]
    assert metrics["perplexity_rel_patched"] == pytest.approx(
        metrics["perplexity_patched"] / metrics["perplexity_host"] - 1
    )
    low, high = groups[0]["ci95"]["exact_ratio"]  # 5% and 10% from the exact ones: four times the divergence
    assert 3 < low < metrics["exact_ratio"] < high < 5
    assert metrics["exact_ratio"] == pytest.approx(metrics["kl_exact_patched"] / metrics["kl_exact_host"])
    assert metrics["kl_exact_other"] > metrics["kl_exact_patched"]
    assert summary.problem(metrics, 5.0, 0.5) == ""
    assert "KL from float32 is" in summary.problem(metrics, 1.2, 0.5)
    assert "perplexity differs" in summary.problem(metrics, 5.0, 1e-6)
    assert groups[1]["metrics"] == {} and "not measured: kl_exact_host" in summary.problem({}, 5.0, 0.5)


def test_kernel_that_did_not_run_is_reported() -> None:
    from experiments.quality.quality import idle

    def row(op: str, calls: int, reason: str = "", state: str = "active") -> dict[str, Any]:
        return {
            "op": op,
            "state": state,
            "calls": calls,
            "reason": reason,
            "left": {"why": 3} if not reason else {},
        }

    assert idle([row("rms_norm", 5)], every=False) == [] and idle([], every=False) == ["nothing of ours ran"]
    assert idle([row("linear", 5), row("attention", 1)], every=True) == []
    assert idle([row("linear_fp8", 5), row("attention", 1)], every=True, linear="linear_fp8") == []
    (missing,) = idle([row("linear", 5), row("attention", 1)], every=True, linear="linear_fp8")
    assert missing == "linear_fp8 did not run: not in the report"
    linear, attention = idle([row("linear", 0, "no such shape", "off"), row("attention", 0)], every=True)[1:]
    assert linear == "linear did not run: no such shape" and '{"why": 3}' in attention


def test_sequence_missing_in_one_run_is_ignored(tmp_path: Path) -> None:
    plan = small_plan()
    for run in (record.HOST, "other", "patched"):
        served(tmp_path, plan, run, true_logits)
    lines = (tmp_path / "patched.jsonl").read_text().splitlines()
    # Killed while it wrote
    (tmp_path / "patched.jsonl").write_text("\n".join(lines[:-2]) + "\n" + lines[-1][:40])
    assert summary.groups(plan, tmp_path)[0]["metrics"]["tokens"] == plan.total - 2 * 6


def test_our_engine_decodes_like_its_prefill(tmp_path: Path) -> None:
    from experiments.quality.quality_fastkernels import Engine
    from support.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "llama", dtype="float32")
    plan = small_plan()
    engine = Engine(str(model), {"dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 64}, 5)
    for run in (record.HOST, "other"):
        for batch in plan.batches("decode", run):
            tasks = [
                {"folder": str(tmp_path), "run": run, "sequence": i, "at": plan.decode[i].at, "total": plan.total,
                 "tokens": plan.decode[i].tokens} for i in batch
            ]  # fmt: skip
            made = engine.decode([plan.decode[i].prompt for i in batch], tasks)
            assert made == [plan.decode[i].tokens for i in batch]
    texts = [s.prompt + s.tokens for s in plan.decode]
    prefilled = engine.prefill(texts)
    host, other = (summary.read(tmp_path / f"{run}.jsonl") for run in (record.HOST, "other"))
    for i in range(len(texts)):
        forced = [own for own, _ in prefilled[i]][-6:]
        assert host[i]["logprob"] == pytest.approx(forced, abs=1e-4)
        assert other[i]["logprob"] == pytest.approx(forced, abs=1e-4) and max(other[i]["kl"]) < 1e-8
        for own, top in prefilled[i]:
            assert len(top) == 5 and sum(map(math.exp, top.values())) < 1 and own <= max(top.values())
    assert {"linear", "attention_decode"} <= {row["op"] for row in engine.rows()}
    engine.close()


def quality(folder: Path, *more: str) -> tuple[int, str, list[Any]]:
    from support.smollm2 import smollm2_path

    foreign = ("FASTKERNELS", "VLLM_", "PYTEST")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign) or k == "FASTKERNELS_CACHE"}
    command = [
        str(ROOT / ".venv-vllm/bin/python"), str(SCRIPTS / "quality.py"), "--host", "vllm", "--model",
        str(smollm2_path()), "--out", str(folder / "rows.jsonl"), "--prompts", "8,24", "--new", "8", "--length", "32",
        "--others", "other", "--work", str(folder), *more,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300,
        env={**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    rows, _ = read(folder / "rows.jsonl")
    return done.returncode, done.stdout[-3000:] + done.stderr[-3000:], rows


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not (ROOT / ".venv-vllm").exists(), reason="no .venv-vllm: run `make setup`")
def test_patched_vllm_equals_vllm_and_transformers(tmp_path: Path) -> None:
    from support.smollm2 import smollm2_path
    from transformers import AutoModelForCausalLM

    status, said, rows = quality(
        tmp_path, "--decode", "4:160,1:8", "--prefill", "2:60", "--perplexity", "0.01",
        "--ops", "rms_norm,silu_and_mul,rotary_emb,embedding",
    )  # fmt: skip
    assert status == 0, said
    decode, prefill, *batches, live = rows
    assert decode.metrics["tokens"] == 168 and prefill.metrics["tokens"] == 62 and len(batches) == 2
    for row in (decode, prefill):
        assert 3 < row.metrics["perplexity_host"] < 100 and row.metrics["kl_patched"] < 0.01
        assert row.metrics["same_best_patched"] > 0.95 and 0 < row.metrics["kl_exact_host"] < 0.01
    ran = {r["op"]: r["calls"] for r in live.case["rows"] if r["state"] == "active"}
    assert {"rms_norm", "silu_and_mul", "rotary_emb", "embedding"} <= ran.keys() and min(ran.values()) > 0
    assert live.case["kernels"]["fastkernels::rms_norm"] > 0

    folder = smollm2_path()
    plan = plans.plan(plans.tokens_of(folder, plans.english()), {4: 160, 1: 8}, [8, 24], 8, (2, 60), 32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for sequence in plan.decode:
            ids = torch.tensor([sequence.prompt + sequence.tokens])
            logprobs = model(ids).logits[0].log_softmax(-1)
            found += [float(logprobs[len(sequence.prompt) + i - 1, t]) for i, t in enumerate(sequence.tokens)]
    assert decode.metrics["perplexity_host"] == pytest.approx(summary.perplexity(found), rel=0.02)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not (ROOT / ".venv-vllm").exists(), reason="no .venv-vllm: run `make setup`")
def test_candidate_off_by_five_percent_misses_goals(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    candidates = json.dumps({"silu_and_mul": str(tmp_path / "wrong.py")})
    status, said, rows = quality(tmp_path, "--decode", "4:32", "--prefill", "", "--candidates", candidates)
    assert status == 1, said
    decode = rows[0]
    assert decode.status == "wrong" and "KL from float32" in decode.reason
    assert decode.metrics["kl_patched"] > 1e-3 and decode.metrics["kl_other"] < 1e-3
