"""The cost model: the calls of a step are those of our engine, and their bytes are the model's."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.core.hub import ModelError
from fk_bench.e2e.model_configs import load_config
from fk_bench.explain import cost_model
from fk_bench.explain.cost_model import Call, Step, group_sums, step
from fk_bench.kernels.judge.clock import roofline
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.core import dispatch, parallel, registry
from fastkernels.core.dispatch import Op, Provider
from fastkernels.models.common.plans import build

H200 = roofline.peaks("NVIDIA H200")
BATCH, PROMPT = 3, 21
# Dims that depend on the values of a request, or on the size of the engine's cache.
VALUES = ("distinct", "experts_hit", "offset", "blocks", "max_blocks")
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": {"sliding_window": 9, "num_hidden_layers": 3},
}


def described(op: str, case: Any) -> tuple[str, str, str]:
    dims = {k: v for k, v in case.dims.items() if k not in VALUES}
    return op, case.dtype, repr(sorted(dims.items()))


class Observer:
    """Counts the calls of providers, except those made inside other ops."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self._inside = False

    def around(self, op: Op, provider: Provider) -> Provider:
        arguments = op.overload._schema.arguments

        def run(*args: Any) -> Any:
            if self._inside:
                return provider.fn(*args)
            given = [*args, *(a.default_value for a in arguments[len(args) :])]
            self.calls[described(op.name, registry.get(op.name).case_of(given, op.name))] += 1
            self._inside = True
            try:
                return provider.fn(*args)
            finally:
                self._inside = False

        return dataclasses.replace(provider, fn=run)


def counted(found: Step) -> Counter[tuple[str, str, str]]:
    total: Counter[tuple[str, str, str]] = Counter()
    for call in found.calls:
        total[described(call.op, call.case)] += call.count
    return total


@pytest.mark.parametrize("kind", CHANGES)
def test_step_matches_calls_of_engine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's step and one decode of three sequences: every op, its sizes, and its count."""
    folder = make_tiny(tmp_path / kind, kind, **CHANGES[kind])
    prompts = [{"prompt_token_ids": [10 + 50 * i + j for j in range(PROMPT)]} for i in range(BATCH)]
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    observer = Observer()
    with LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, num_blocks=64) as llm:
        # The step describes the hosts, too, whose last layer computes all tokens.
        monkeypatch.setattr(type(llm.llm_engine.runner.model), "selects_rows", False)
        dispatch.observe(observer.around)
        try:
            llm.generate(prompts, greedy)
        finally:
            dispatch.observe(None)
    name, config = load_config(str(folder))
    prefill = step(name, config, "prefill", BATCH, PROMPT, dtype=torch.float32)
    decode = step(name, config, "decode", BATCH, PROMPT + 1, dtype=torch.float32)
    assert counted(prefill) + counted(decode) == observer.calls
    assert (prefill.tokens, decode.tokens, decode.sampled) == (BATCH * PROMPT, BATCH, BATCH)


def size_of(linear: Call) -> int:
    """Elements of a linear's weight, from its case."""
    assert linear.case is not None
    d = linear.case.dims
    return d["in"] * d["out"] if linear.op == "linear" else d["hidden"] * d["vocab"]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-0.6b", "mixtral-8x7b"])
def test_all_linears_read_the_models_matrices_once(model: str) -> None:
    name, config = load_config(model)
    found = step(name, config)
    skeleton = build.skeleton(Path(), config, torch.bfloat16)
    matrices = {
        n: p.numel() for n, p in skeleton.named_parameters() if p.dim() == 2 and "embed_tokens" not in n
    }
    linears = [c for c in found.calls if c.group == "linears"]
    elements = sum(c.count * size_of(c) for c in linears)
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    assert elements == sum(matrices.values()) + tied
    assert sum(c.count * c.weights for c in linears) == 2 * elements
    # Each weight is read once; the remaining traffic is activations of one token.
    moved = sum(c.count * c.bytes for c in linears)
    assert 0 < moved - 2 * elements < 0.01 * moved
    assert found.weights == build.weight_bytes(skeleton)


def test_llama_8b_reads_15_gb_per_step() -> None:
    """15.01 GB of linears per step (the embedding is not read): the published size of Llama-3.1-8B in bf16."""
    found = step(*load_config("meta-llama/Llama-3.1-8B-Instruct"))
    linears = [c for c in found.calls if c.group == "linears"]
    assert sum(c.count * c.weights for c in linears) == pytest.approx(15.01e9, rel=1e-3)
    labels = {c.label: c.count for c in found.calls}
    assert {k: labels[k] for k in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "norm")} == {
        "qkv_proj": 32, "o_proj": 32, "gate_up_proj": 32, "down_proj": 32, "lm_head": 1, "norm": 1,
    }  # fmt: skip
    assert labels["post_attention_layernorm"] == 32 and labels["embed_tokens"] == labels["sampler"] == 1


def test_floors_match_roofline() -> None:
    assert H200 is not None
    found = step(*load_config("qwen3-0.6b"), batch=4)
    for call in found.calls:
        assert call.case is not None
        spec = registry.get(call.op)
        by_hand = max(
            spec.bytes_moved(call.case) / 4.8e12, spec.flops(call.case) / H200.flops_per_s(call.dtype)
        )  # type: ignore[operator]
        assert call.floor_us(H200) == pytest.approx(1e6 * by_hand)
        assert call.floor_us(None) is None
    total = sum(c.count * c.floor_us(H200) for c in found.calls)  # type: ignore[operator,misc]
    assert found.floor_ms(H200) == pytest.approx(total / 1e3)
    assert found.floor_ms(None) is None
    groups = group_sums(found.calls, lambda c: c.floor_us(H200))
    assert sum(groups.values()) == pytest.approx(total)  # type: ignore[arg-type]
    assert list(groups) == ["rest", "linears", "attention"]
    assert group_sums(found.calls, lambda c: None if c.op == "rms_norm" else 1.0)["rest"] is None


def test_step_grows_with_batch_and_context() -> None:
    """Linears hardly grow with the batch while they are memory-bound; keys and values grow with batch x context."""
    name, config = load_config("llama-3.1-8b")

    def groups(**how: Any) -> dict[str, float]:
        return group_sums(step(name, config, **how).calls, lambda c: c.bytes)  # type: ignore[return-value]

    one, many, long = groups(batch=1), groups(batch=32), groups(batch=32, context=4096)
    assert many["linears"] < 1.03 * one["linears"] and many["linears"] == long["linears"]
    assert many["attention"] == pytest.approx(32 * one["attention"])
    assert long["attention"] == pytest.approx(4 * many["attention"], rel=0.02)
    per_token = 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, channels, bytes
    assert many["attention"] == pytest.approx(32 * 1024 * per_token, rel=0.02)
    assert math.isclose(many["rest"] / one["rest"], 32, rel_tol=0.2)


def test_ranks_share_a_step() -> None:
    name, config = load_config("llama-3.1-8b")
    whole, half = step(name, config, batch=8), step(name, config, batch=8, tensor_parallel=2)
    assert parallel.get_tp_size() == 1
    assert half.weights == pytest.approx(whole.weights / 2, rel=3e-3)  # both have all of the rope table
    sums = [group_sums(s.calls, lambda c: c.weights) for s in (whole, half)]
    assert sums[0]["linears"] == 2 * sums[1]["linears"]  # type: ignore[operator]
    collectives = {c.label: (c.op, c.count) for c in half.calls if c.group == "collectives"}
    assert collectives == {
        "embed_tokens": ("all_reduce", 1), "o_proj": ("all_reduce", 32), "down_proj": ("all_reduce", 32),
        "logits_processor": ("all_gather", 1),
    }  # fmt: skip
    sampler = next(c for c in half.calls if c.op == "sampling")
    assert sampler.case is not None and sampler.case.dims["vocab"] == config.vocab_size


def test_only_hit_experts_are_read() -> None:
    name, config = load_config("mixtral-8x7b")
    read = {}
    for batch in (1, 32):
        calls = step(name, config, batch=batch).calls
        (experts,) = [c for c in calls if c.op == "fused_experts"]
        assert experts.count == 32 and experts.group == "experts" and experts.case is not None
        read[batch] = experts.case.dims["experts_hit"]
        assert experts.case.dims["pairs"] == 2 * batch
        assert experts.weights == 8 * 3 * 4096 * 14336 * 2
        assert [(c.op, c.count) for c in calls if c.label == "gate"] == [("linear", 32)]
        assert next(c for c in calls if c.op == "topk_softmax").count == 32
    assert read == {1: 2, 32: 8}


def test_trace_leaves_no_state() -> None:
    before = {name: (op.calls, dict(op.fallbacks)) for name, op in dispatch.OPS.items()}
    step(*load_config("mixtral"), batch=2, context=5, tensor_parallel=2)
    assert {
        name: (op.calls, dict(op.fallbacks)) for name, op in dispatch.OPS.items() if name in before
    } == before
    assert parallel.get_tp_size() == 1


def wrong(call: Callable[[], Any], error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def test_bad_input_says_what_to_do(tmp_path: Path) -> None:
    wrong(lambda: load_config("lama-3.1-8b"), ModelError, "'lama-3.1-8b'", "Did you mean 'llama-3.1-8b'")
    wrong(lambda: load_config("no/such-model"), ModelError, "no/such-model", "OWNER/NAME")
    wrong(lambda: load_config(str(tmp_path)), ModelError, "no config.json")
    wrong(lambda: load_config("bert"), ModelError, "bert has the runner 'Encode'")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    wrong(lambda: load_config(str(tmp_path)), ModelError, "GPT2LMHeadModel", "LlamaForCausalLM")
    (tmp_path / "config.json").write_text("{")
    wrong(lambda: load_config(str(tmp_path)), ModelError, "config.json cannot be used")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **kind, "quantization_config": {"bits": 4}}))
    wrong(lambda: load_config(str(tmp_path)), ModelError, "quantized")
    name, config = load_config("llama-3.1-8b")
    wrong(lambda: step(name, config, "train"), ValueError, "'train'", "decode or prefill")
    wrong(lambda: step(name, config, batch=0), ValueError, "batch 0")
    wrong(lambda: step(name, config, context=200000), ValueError, "200000", "131072")
    wrong(lambda: step(name, config, tensor_parallel=3), ValueError, "3 ranks")
    wrong(lambda: step(name, config, tensor_parallel=0), ValueError, "0")
    assert parallel.get_tp_size() == 1
    assert set(cost_model.GROUPS) - {"all_reduce", "all_gather"} <= set(registry.op_names())


def test_sparse_attention_begins_behind_its_number_of_keys() -> None:
    name, config = load_config("deepseek-v3.2")
    config.num_hidden_layers, config.mlp_layer_types = 1, ["dense"]
    short, long = (step(name, config, context=n).calls for n in (2048, 4096))
    assert "mla_decode" in {c.op for c in short} and not {c.op for c in short} & {
        "mla_sparse",
        "top_k_per_row",
    }
    sparse = next(c for c in long if c.op == "mla_sparse")
    assert sparse.flops == 2 * 2048 * 128 * (2 * 512 + 64)
    assert next(c for c in long if c.op == "paged_mqa_logits").flops == 4096 * 64 * (2 * 128 + 2)


def test_models_without_modelled_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="whisper attends to an encoder's states: only steps of decoders alone"
    ):
        step(*load_config("whisper"), context=64)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ModelError, match="is a pipeline of diffusers: only steps of models that generate"):
        load_config(str(tmp_path))
    scene = tmp_path / "scene"
    scene.mkdir()
    (scene / "point_cloud.ply").touch()
    with pytest.raises(ModelError, match="is a scene: only steps of models that generate"):
        load_config(str(scene))
