"""The small models of `fk-bench routing`: training, checkpoints for other engines, captures, the shipped ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.capture.replay import captured_cases
from fk_bench.core.rows import read
from fk_bench.kernels.judge.correctness.cases import trials
from fk_bench.routing import stats, study

from fastkernels.core import registry

ROOT = Path(__file__).parents[3]
EXPERIMENTS = ROOT / "bench/experiments/routing"
sys.path.insert(0, str(ROOT / "bench"))


# Training


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of random weights, written by the training script's `save`."""
    from experiments.routing.moe_model import PRESETS, Model, loop_experts, save

    torch.manual_seed(0)
    model = Model(PRESETS["tiny"], torch.float32, loop_experts)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("untrained") / "tiny"
    save(model, folder, 0.02)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model trained for 3 seconds on this repository's own text, and its capture in captures/."""
    folder = tmp_path_factory.mktemp("moe")
    text = [ROOT / name for name in ("fastkernels", "docs", "bench/fk_bench")]
    _run(
        "train_moe.py", "--out", folder, "--presets", "tiny", "--seconds", 3, "--device", "cpu", "--rows", 8,
        "--length", 64, "--megabytes", 2, "--vocab", 400, "--workers", 1, "--text", *text,
    )  # fmt: skip
    _run(
        "capture_routing.py", "--models", folder, "--out", folder / "captures", "--presets", "tiny", "--device", "cpu",
        "--kib", 24,
    )  # fmt: skip
    return folder


def _run(script: str, *args: object) -> str:
    command = [sys.executable, str(EXPERIMENTS / script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_training_lowers_the_loss(trained: Path) -> None:
    rows, warnings = read(trained / "rows.jsonl")
    losses = [r.metrics["loss"] for r in rows if r.kind == "step"]
    held_out = {r.case["text"]: r.metrics["loss"] for r in rows if r.kind == "held_out"}
    assert not warnings and losses[0] > 5.9 and losses[-1] < losses[0] - 0.5  # log 400 is 5.99
    assert held_out.keys() == {"prose", "code", "mixed"} and max(held_out.values()) < losses[0] - 0.3
    loads = [r for r in rows if r.kind == "load"]
    assert {r.case["layer"] for r in loads} == {0, 1}
    for row in loads:
        assert row.metrics == pytest.approx(stats.load_stats(row.case["counts"]))


def test_checkpoint_agrees_in_engine_and_transformers(untrained: Path) -> None:
    from experiments.routing.moe_model import Model, Sizes, grouped_experts, loop_experts
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from fastkernels.engine.sampling.sampling_params import SamplingParams

    folder = untrained
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.randint(2, 400, (1, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = theirs(ids).logits[0].log_softmax(-1)
    there = want[:-1].gather(1, ids[0, 1:, None])[:, 0]

    weights = load_file(folder / "model.safetensors")
    sizes = Sizes(**json.loads((folder / "sizes.json").read_text()))
    for experts in (loop_experts, grouped_experts):
        model = Model(sizes, torch.float32, experts)
        _fill(model, weights)
        loss, _, routed = model.loss(ids)
        assert loss.item() == pytest.approx(-there.mean().item(), abs=1e-4)
        assert len(routed) == sizes.layers and routed[0].shape == (64, sizes.top_k)

    with _engine(folder) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        (out,) = llm.generate([ids[0].tolist()], params)
    ours = [p[int(ids[0, i])].logprob for i, p in enumerate(out.prompt_logprobs) if p]
    assert ours == pytest.approx(there.tolist(), abs=1e-3)


def _engine(folder: Path) -> Any:
    from fastkernels.engine.llm import LLM

    return LLM(
        str(folder), device="cpu", dtype="float32", max_model_len=128, num_blocks=20, skip_tokenizer_init=True,
        enable_prefix_caching=False, async_scheduling=False,
    )  # fmt: skip


def _fill(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Load the weights of a checkpoint into the training script's model."""
    with torch.no_grad():
        model.embed.copy_(weights["model.embed_tokens.weight"])
        model.norm.copy_(weights["model.norm.weight"])
        for i, layer in enumerate(model.layers):
            at = f"model.layers.{i}."
            for name in "qkvo":
                getattr(layer, name).copy_(weights[f"{at}self_attn.{name}_proj.weight"])
            layer.norm1.copy_(weights[f"{at}input_layernorm.weight"])
            layer.norm2.copy_(weights[f"{at}post_attention_layernorm.weight"])
            layer.gate.copy_(weights[f"{at}block_sparse_moe.gate.weight"])
            for e in range(model.s.experts):
                w1, w2, w3 = (weights[f"{at}block_sparse_moe.experts.{e}.w{n}.weight"] for n in (1, 2, 3))
                layer.w13[e].copy_(torch.cat((w1, w3)))
                layer.w2[e].copy_(w2)


def test_grouped_products_match_loop() -> None:
    from experiments.routing.moe_model import grouped_works

    for dtype in (torch.float32, torch.bfloat16):
        assert grouped_works(torch.device("cpu"), dtype) == ""


def test_file_is_split_into_prose_and_code() -> None:
    from experiments.routing.moe_text import parts

    long = "What it does, in words. " * 12
    source = (
        f'"""{long}"""\n\ndef f():\n    """short"""\n    x = """{long}"""\n    return 1\n' + "y = 2\n" * 60
    )
    found = parts("a.py", source)
    assert [p.strip() for p in found["prose"]] == [long.strip()]
    # The value of x is not a docstring
    assert found["code"][0].count(long) == 1 and '"""short"""' in found["code"][0]
    assert parts("a.md", "words") == {"prose": ["words"], "code": []}
    assert parts("a.py", "def (") == {"prose": [], "code": []}


# The capture


def _is_a_routing(routing: study.Routing) -> None:
    assert {c.phase for c in routing.calls} == {"prefill", "decode"}
    assert {len(c.ids) for c in routing.calls if c.phase == "decode"} == {1, 8, 32, 128}
    for call in routing.calls:
        assert call.ids.min() >= 0 and call.ids.max() < routing.experts
        ranked = np.sort(call.ids, axis=1)
        assert ranked.shape[1] == routing.top_k and (ranked[:, 1:] != ranked[:, :-1]).all()
        assert call.weights.sum(axis=1) == pytest.approx(1.0, abs=0.016)  # kept with six significant bits
        assert (call.weights[:, :-1] >= call.weights[:, 1:]).all()


@pytest.mark.slow
def test_capture_of_trained_model(trained: Path) -> None:
    (routing,) = study.routings(str(trained / "captures"))
    assert (routing.experts, routing.top_k, routing.layers) == (16, 2, 2)
    _is_a_routing(routing)
    size = sum(f.stat().st_size for f in (trained / "captures" / routing.name).iterdir())
    assert size < 80 << 10


def test_capture_matches_the_router(untrained: Path, tmp_path: Path) -> None:
    """A prompt's routing in our engine, saved and read again, equals the training model's."""
    from experiments.routing.capture_routing import recorded, save_both
    from experiments.routing.moe_model import Model, Sizes, loop_experts
    from safetensors.torch import load_file

    from fastkernels.engine.sampling.sampling_params import SamplingParams

    ids = torch.randint(2, 400, (40,), generator=torch.Generator().manual_seed(1))
    with _engine(untrained) as llm, recorded(llm.llm_engine.runner.model) as steps:
        llm.generate([ids.tolist()], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
        prompt, decoded = steps.taken()
    place = {"text": "prose", "prompt": 0, "step": 0}
    kept = [{**c, **place, "phase": "prefill"} for c in prompt] + [
        {**c, **place, "phase": "decode"} for c in decoded
    ]
    save_both(kept, tmp_path, {"model": "tiny", "host": "fastkernels"}, 16, 2)
    (routing,) = study.routings(str(tmp_path))
    assert (routing.experts, routing.top_k, routing.layers, len(routing.calls)) == (16, 2, 2, 4)

    model = Model(Sizes(**json.loads((untrained / "sizes.json").read_text())), torch.float32, loop_experts)
    _fill(model, load_file(untrained / "model.safetensors"))
    _, _, routed = model.loss(torch.cat((ids, ids[:1]))[None])
    for layer, want in enumerate(routed):
        assert np.array_equal(np.sort(routing.tokens(layer)), np.sort(want.numpy()))

    experts, aligned = (captured_cases(op, tmp_path) for op in ("fused_experts", "moe_align"))
    assert len(experts) == len(aligned) == 4 and sum(c.case.weight for c in aligned) == 4
    assert {c.case.dims["tokens"] for c in aligned} == {40, 1}


def test_timing_uses_sizes_of_known_model() -> None:
    """ids and weights are replayed; all sizes are those of the known model."""
    from experiments.routing.capture_routing import ops_of

    signature = [
        {"name": n, "shape": shape, "dtype": dtype, "strides": [1] * len(shape)}
        for n, shape, dtype in (
            ("hidden_states", [3, 64], "bfloat16"), ("w1", [8, 96, 64], "bfloat16"), ("w2", [8, 64, 48], "bfloat16"),
            ("topk_weights", [3, 2], "float32"), ("topk_ids", [3, 2], "int32"),
        )
    ]  # fmt: skip
    call = {"signature": signature, "ids": torch.zeros(3, 2).char(), "weights": torch.zeros(3, 2).half()}
    found = ops_of([call, call], (4096, 14336))
    assert found.keys() == {"fused_experts"}
    (made,) = found["fused_experts"]["calls"]
    by_name = {a["name"]: (a["shape"], a["strides"]) for a in made["args"]}
    assert by_name["hidden_states"] == ([3, 4096], [4096, 1])
    assert by_name["w1"] == ([8, 28672, 4096], [28672 * 4096, 4096, 1])
    assert by_name["w2"] == ([8, 4096, 14336], [4096 * 14336, 14336, 1])
    assert made["args"][3:] == signature[3:] and made["count"] == 2 and len(made["values"]) == 1


# Shipped captures


@pytest.mark.parametrize(("name", "experts", "top_k", "layers"), [("e8k2", 8, 2, 6), ("e128k8", 128, 8, 4)])
def test_shipped_routing(name: str, experts: int, top_k: int, layers: int) -> None:
    found = {r.name: r for r in study.routings()}
    assert set(found) == {"small-moe-trained-e8k2", "small-moe-trained-e128k8"}
    routing = found[f"small-moe-trained-{name}"]
    assert (routing.experts, routing.top_k, routing.layers) == (experts, top_k, layers)
    _is_a_routing(routing)
    assert routing.capture.problems == []
    assert {c.text for c in routing.calls if c.phase == "prefill"} == {"prose", "code", "mixed"}
    (named,) = study.routings(routing.name)
    assert named.name == routing.name


@pytest.mark.parametrize("name", ["e8k2-at-mixtral-8x7b", "e128k8-at-qwen3-30b-a3b"])
def test_shipped_routing_at_the_sizes_of_production(name: str) -> None:
    small = {r.name: r for r in study.routings()}[f"small-moe-trained-{name.split('-at-')[0]}"]
    shape = study.shape_of(small.experts, small.top_k)
    cases = [c for c in captured_cases("fused_experts") if c.capture == f"small-moe-trained-{name}"]
    assert {c.case.dims["tokens"] for c in cases} == {len(c.ids) for c in small.calls}
    for case in cases:
        assert case.case.dims["hidden"] == shape["hidden"]
        assert case.case.dims["intermediate"] == shape["intermediate"]
        assert any(np.array_equal(case.values["topk_ids"].numpy(), c.ids) for c in small.calls)


def test_judge_replays_shipped_routing() -> None:
    small = {r.name: r for r in study.routings()}
    for op, at in (("fused_experts", 4), ("moe_align", 0)):
        here = [t for t in trials(registry.get(op), ("captured",), "cpu") if not t.gpu_only(registry.get(op))]
        assert {t.case.name.partition("/")[0] for t in here} == small.keys()
        for trial in here:
            args = trial.make("cpu", torch.Generator().manual_seed(0))
            assert args[at].dtype == torch.int32 and "ids" not in trial.case.dims
            routing = small[trial.case.name.partition("/")[0]]
            ids = args[at].numpy()
            like = [c.ids for c in routing.calls if c.ids.shape == ids.shape]
            active = {len(np.unique(c)) for c in like}
            assert (
                like
                and len(np.unique(ids)) in active
                and (ids.size < 9 or not any(np.array_equal(ids, c) for c in like))
            )
