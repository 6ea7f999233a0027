"""`fk-bench routing` and the small trained models: known loads, a checkpoint that others read, the study."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench import cli, routing_study, routing_tables
from fk_bench import routing_stats as stats
from fk_bench.captures import CaptureError
from fk_bench.judge.cases import trials
from fk_bench.replay import captured_cases
from fk_bench.rows import Row, Subject, read

from fastkernels import registry

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "bench" / "scenarios"
sys.path.insert(0, str(SCENARIOS))  # moe_model, moe_text


# Statistics


def test_known_loads() -> None:
    even = stats.load_stats([5] * 8)
    assert (even["max_over_mean"], even["cv"], even["hit"]) == (1.0, 0.0, 8.0)
    assert even["gini"] == pytest.approx(0.0) and even["entropy"] == pytest.approx(1.0)
    assert even["hot_share"] == pytest.approx(1 / 8)
    one = stats.load_stats([0, 0, 0, 12])
    assert one["max_over_mean"] == 4.0 and one["gini"] == pytest.approx(3 / 4) and one["hit"] == 1.0
    assert one["entropy"] == 0.0 and one["hot_share"] == 1.0 and one["cv"] == pytest.approx(3**0.5)
    # 1, 2, 3, 4: half the mean absolute difference (20 / 16) over the mean (2.5)
    assert stats.gini([3, 1, 4, 2]) == pytest.approx(0.25)
    assert stats.load_stats([1, 2, 3, 4])["entropy"] == pytest.approx(
        -sum(p * np.log(p) for p in (0.1, 0.2, 0.3, 0.4)) / np.log(4)
    )
    with pytest.raises(ValueError, match="no expert has a token"):
        stats.load_stats([0, 0])


def test_uniform_routing_is_as_in_theory() -> None:
    rng = np.random.default_rng(1)
    experts, top_k = 24, 3
    ids = stats.uniform_ids(60_000, experts, top_k, rng)
    # A token's experts are different
    assert (np.sort(ids, axis=1)[:, 1:] != np.sort(ids, axis=1)[:, :-1]).all()
    share = stats.counts_of(ids, experts) / len(ids)
    p = top_k / experts
    assert np.abs(share - p).max() < 5 * (p * (1 - p) / len(ids)) ** 0.5
    for batch in (1, 8, 32):
        hits = [len(np.unique(stats.uniform_ids(batch, experts, top_k, rng))) for _ in range(2000)]
        expected = stats.expected_hit(batch, experts, top_k)
        assert abs(np.mean(hits) - expected) <= 5 * np.std(hits) / 2000**0.5 + 1e-12
    assert stats.expected_hit(1, experts, top_k) == pytest.approx(top_k)


def test_agreement_of_hot_experts() -> None:
    assert stats.hottest(np.array([3, 9, 9, 1]), 2) == {1, 2} and stats.hottest(np.array([2, 2, 2]), 1) == {0}
    assert stats.jaccard({1, 2}, {2, 3}) == pytest.approx(1 / 3) and stats.jaccard({1}, {1}) == 1.0
    up, down = np.array([1, 5, 7, 40]), np.array([4, 3, 2, 1])
    assert stats.spearman(up, up**2) == pytest.approx(1.0) and stats.spearman(up, down) == pytest.approx(-1.0)
    # with ties: ranks 1.5 1.5 3 against 1 2 3
    assert stats.spearman(np.array([4, 4, 6]), np.array([1, 2, 3])) == pytest.approx(0.5 * 3**0.5)
    assert stats.spearman(np.ones(4), up) == 0.0


# Training


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of random weights, written by the training script's `save`."""
    from moe_model import PRESETS, Model, loop_experts, save

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
    _scenario(
        "train_moe.py", "--out", folder, "--presets", "tiny", "--seconds", 3, "--device", "cpu", "--rows", 8,
        "--length", 64, "--megabytes", 2, "--vocab", 400, "--workers", 1, "--text", *text,
    )  # fmt: skip
    _scenario(
        "capture_routing.py", "--models", folder, "--out", folder / "captures", "--presets", "tiny", "--device", "cpu",
        "--kib", 24,
    )  # fmt: skip
    return folder


def _scenario(script: str, *args: object) -> str:
    command = [sys.executable, str(SCENARIOS / script), *map(str, args)]
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


def test_checkpoint_in_our_engine_in_transformers_and_in_training_agree(untrained: Path) -> None:
    from moe_model import Model, Sizes, grouped_experts, loop_experts
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from fastkernels.engine.sampling_params import SamplingParams

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
    """The weights of a checkpoint back in the model of the training script."""
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


def test_grouped_products_are_those_of_the_loop() -> None:
    from moe_model import grouped_works

    for dtype in (torch.float32, torch.bfloat16):
        assert grouped_works(torch.device("cpu"), dtype) == ""


def test_a_file_is_split_into_prose_and_code() -> None:
    from moe_text import parts

    long = "What it does, in words. " * 12
    source = (
        f'"""{long}"""\n\ndef f():\n    """short"""\n    x = """{long}"""\n    return 1\n' + "y = 2\n" * 60
    )
    found = parts("a.py", source)
    assert [p.strip() for p in found["prose"]] == [long.strip()]
    # The value of x is no docstring
    assert found["code"][0].count(long) == 1 and '"""short"""' in found["code"][0]
    assert parts("a.md", "words") == {"prose": ["words"], "code": []}
    assert parts("a.py", "def (") == {"prose": [], "code": []}


# The capture and the study


def _is_a_routing(routing: routing_study.Routing) -> None:
    assert {c.phase for c in routing.calls} == {"prefill", "decode"}
    assert {len(c.ids) for c in routing.calls if c.phase == "decode"} == {1, 8, 32, 128}
    for call in routing.calls:
        assert call.ids.min() >= 0 and call.ids.max() < routing.experts
        ranked = np.sort(call.ids, axis=1)
        assert ranked.shape[1] == routing.top_k and (ranked[:, 1:] != ranked[:, :-1]).all()
        assert call.weights.sum(axis=1) == pytest.approx(1.0, abs=3e-3)  # they were kept in float16
        assert (call.weights[:, :-1] >= call.weights[:, 1:]).all()


@pytest.mark.slow
def test_a_capture_of_a_model_that_was_just_trained(trained: Path) -> None:
    (routing,) = routing_study.routings(str(trained / "captures"))
    assert (routing.experts, routing.top_k, routing.layers) == (16, 2, 2)
    _is_a_routing(routing)
    size = sum(f.stat().st_size for f in (trained / "captures" / routing.name).iterdir())
    assert size < 80 << 10


def test_the_capture_is_what_the_router_chose(untrained: Path, tmp_path: Path) -> None:
    """A prompt's routing in our engine, saved and read again, is the training model's own."""
    from capture_routing import recorded, save_both
    from moe_model import Model, Sizes, loop_experts
    from safetensors.torch import load_file

    from fastkernels.engine.sampling_params import SamplingParams

    ids = torch.randint(2, 400, (40,), generator=torch.Generator().manual_seed(1))
    with _engine(untrained) as llm, recorded(llm.llm_engine.runner.model) as steps:
        llm.generate([ids.tolist()], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
        prompt, decoded = steps.taken()
    place = {"text": "prose", "prompt": 0, "step": 0}
    kept = [{**c, **place, "phase": "prefill"} for c in prompt] + [
        {**c, **place, "phase": "decode"} for c in decoded
    ]
    save_both(kept, tmp_path, {"model": "tiny", "host": "fastkernels"}, 16, 2)
    (routing,) = routing_study.routings(str(tmp_path))
    assert (routing.experts, routing.top_k, routing.layers, len(routing.calls)) == (16, 2, 2, 4)

    model = Model(Sizes(**json.loads((untrained / "sizes.json").read_text())), torch.float32, loop_experts)
    _fill(model, load_file(untrained / "model.safetensors"))
    _, _, routed = model.loss(torch.cat((ids, ids[:1]))[None])
    for layer, want in enumerate(routed):
        assert np.array_equal(np.sort(routing.tokens(layer)), np.sort(want.numpy()))

    experts, aligned = (captured_cases(op, tmp_path) for op in ("fused_experts", "moe_align"))
    assert len(experts) == len(aligned) == 4 and sum(c.case.weight for c in aligned) == 4
    assert {c.case.dims["tokens"] for c in aligned} == {40, 1}


def test_at_the_sizes_of_a_known_model() -> None:
    """ids and weights stay as they are, and nothing else is of the small model's sizes."""
    from capture_routing import ops_of

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


# What is shipped


@pytest.mark.parametrize(("name", "experts", "top_k", "layers"), [("e8k2", 8, 2, 6), ("e128k8", 128, 8, 4)])
def test_shipped_routing(name: str, experts: int, top_k: int, layers: int) -> None:
    found = {r.name: r for r in routing_study.routings()}
    assert set(found) == {"small-moe-trained-e8k2", "small-moe-trained-e128k8"}
    routing = found[f"small-moe-trained-{name}"]
    assert (routing.experts, routing.top_k, routing.layers) == (experts, top_k, layers)
    _is_a_routing(routing)
    assert routing.capture.problems == []
    assert {c.text for c in routing.calls if c.phase == "prefill"} == {"prose", "code", "mixed"}
    (named,) = routing_study.routings(routing.name)
    assert named.name == routing.name


@pytest.mark.parametrize("name", ["e8k2-at-mixtral-8x7b", "e128k8-at-qwen3-30b-a3b"])
def test_shipped_routing_at_the_sizes_of_production(name: str) -> None:
    small = {r.name: r for r in routing_study.routings()}[f"small-moe-trained-{name.split('-at-')[0]}"]
    shape = routing_study.shape_of(small.experts, small.top_k)
    cases = [c for c in captured_cases("fused_experts") if c.capture == f"small-moe-trained-{name}"]
    assert {c.case.dims["tokens"] for c in cases} == {len(c.ids) for c in small.calls}
    for case in cases:
        assert case.case.dims["hidden"] == shape["hidden"]
        assert case.case.dims["intermediate"] == shape["intermediate"]
        assert any(np.array_equal(case.values["topk_ids"].numpy(), c.ids) for c in small.calls)


def test_the_judge_replays_shipped_routing_on_a_cpu() -> None:
    small = {r.name: r for r in routing_study.routings()}
    for op, at in (("fused_experts", 4), ("moe_align", 0)):
        here = [t for t in trials(registry.get(op), ("captured",), "cpu") if not t.gpu_only(registry.get(op))]
        assert {t.case.name.partition("/")[0] for t in here} == small.keys()
        for trial in here:
            args = trial.make("cpu", torch.Generator().manual_seed(0))
            assert args[at].dtype == torch.int32 and "ids" not in trial.case.dims
            routing = small[trial.case.name.partition("/")[0]]
            assert any(np.array_equal(args[at].numpy(), c.ids) for c in routing.calls)


def command(capsys: Any, *args: object) -> tuple[int, str, str]:
    """fk-bench in this process: exit status, standard output and error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["routing", *map(str, args)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_study_on_the_cpu(tmp_path: Path, capsys: Any) -> None:
    """Of what is shipped, unless told otherwise."""
    status, out, _ = command(capsys, "--device", "cpu", "--out", tmp_path / "run")
    result = json.loads(out.splitlines()[-1])
    assert status == 0 and result["ok"] and result["timed"] == 0
    assert "was not timed" in result["note"] and out.count("was not timed") == 2
    assert result["captures"] == ["small-moe-trained-e128k8", "small-moe-trained-e8k2"]
    rows, warnings = read(tmp_path / "run" / "rows.jsonl")
    assert not warnings and {r.kind for r in rows} == {"load", "batch", "identity"}
    found = {r.name: r for r in routing_study.routings()}
    for row in rows:
        routing = found[row.case["capture"]]
        if row.kind == "load" and row.case["routing"] == "captured":
            counts = stats.counts_of(routing.tokens(row.case["layer"]), routing.experts)
            assert row.metrics == pytest.approx(stats.load_stats(counts))
        if row.kind == "batch" and row.case["routing"] == "uniform":
            assert row.metrics["hit"] == pytest.approx(row.metrics["hit_expected"], rel=0.1)
    status, out, _ = command(capsys, "--rows", result["rows"], "--markdown")
    assert status == 0 and "| layer | routing |" in out
    result.pop("note")
    assert json.loads(out.splitlines()[-1]) == result


def test_the_page_has_the_tables_of_the_rows_in_the_repository(capsys: Any) -> None:
    file = ROOT / "bench/results/2026-11-21-h200-routing.jsonl"
    status, out, _ = command(capsys, "--rows", file, "--markdown")
    page = (ROOT / "docs/routing.md").read_text()
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert status == 0 and len(lines) > 60 and [line for line in lines if line not in page] == []
    result = json.loads(out.splitlines()[-1])
    assert (result["timed"], result["compared"], result["winner_changes"]) == (108, 36, 0)


def test_batches_for_the_clock() -> None:
    (routing,) = routing_study.routings("small-moe-trained-e8k2")
    rng = np.random.default_rng(0)
    for tokens in (1, 100, 5000):
        for turn in range(4):
            for source in ("captured", "uniform", "same"):
                ids, weights = routing_study.batch_of(routing, source, tokens, turn, rng)
                assert ids.shape == weights.shape == (tokens, 2) and ids.dtype == np.int32
                assert (ids[:, 0] != ids[:, 1]).all() and ids.min() >= 0 and ids.max() < 8
                if source == "same":
                    assert len(np.unique(ids)) == 2
    whole = routing.tokens(1)
    ids, _ = routing_study.batch_of(routing, "captured", 3 * len(whole), 1, rng)
    assert np.array_equal(stats.counts_of(ids, 8), 3 * stats.counts_of(whole, 8))


def test_the_kernels_output_is_checked() -> None:
    from fk_bench.routing_time import _check

    from fastkernels.overrides.l2.fused_experts import SPEC, fused_experts
    from fastkernels.spec import Case

    dims = {"tokens": 40, "experts": 6, "topk": 2, "hidden": 64, "intermediate": 48}
    args = SPEC.inputs(Case("c", dims, "float32"), "cpu", torch.Generator().manual_seed(0))[:5]
    assert _check(fused_experts, args) == ""
    assert "relative error" in _check(lambda *a: 1.05 * fused_experts(*a), args)


def test_who_wins_is_told_from_rows() -> None:
    def row(kernel: str, source: str, us: float, spread: float = 0.01) -> Row:
        times = [us * (1 - spread), us, us * (1 + spread)]
        case = {"kind": "time", "capture": "c", "experts": 8, "topk": 2, "tokens": 32, "routing": source}
        case |= {"model": "M", "experts_hit": 5.0, "kernel": "k"}
        subject = Subject(op="fused_experts", provider=kernel)
        return Row(
            run_id="t",
            command="routing",
            subject=subject,
            case=case,
            metrics=routing_tables.percentiles(times),
        )

    made = [
        row("a", "captured", 100),
        row("b", "captured", 120),
        row("a", "uniform", 130),
        row("b", "uniform", 110),
    ]
    (found,) = routing_tables.changes(made)
    assert found["changed"] and found["ratios"] == pytest.approx(
        {"captured": 100 / 120, "uniform": 130 / 110}
    )
    made[2] = row("a", "uniform", 109)  # within the noise of b's 110
    (found,) = routing_tables.changes(made)
    assert not found["changed"] and found["differs"]
    (title, columns, cells) = next(iter(routing_tables.tables(made)))
    assert "M's sizes" in title and columns[3:6] == ["captured", "uniform", "same experts"]
    assert cells[0][3:5] == ["100.0", "109.0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capture", "no/such"], "not a folder"),
        (["--tokens", "0"], "at least 1"),
        (["--device", "tpu"], "not auto, cuda or cpu"),
        (["--rows", "no-such-file"], "no such file"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: list[str], message: str, capsys: Any) -> None:
    status, _, error = command(capsys, *arguments, "--out", tmp_path / "run")
    assert status == 2 and message in error and not (tmp_path / "run").exists()


def test_a_capture_without_routing_says_so(tmp_path: Path) -> None:
    data = {"schema": "fastkernels.capture/1", "ops": {}, "modules": []}
    (tmp_path / "capture.json").write_text(json.dumps(data))
    with pytest.raises(CaptureError, match="has no routing in it"):
        routing_study.routings(str(tmp_path))


def test_the_model_whose_sizes_are_timed() -> None:
    shape = routing_study.shape_of
    assert shape(8, 2) == {"model": "Mixtral-8x7B", "hidden": 4096, "intermediate": 14336, "known": True}
    assert shape(128, 8) == {"model": "Qwen3-30B-A3B", "hidden": 2048, "intermediate": 768, "known": True}
    assert shape(16, 2)["model"] == "16 experts" and not shape(16, 2)["known"]
