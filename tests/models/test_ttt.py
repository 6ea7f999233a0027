"""TTT-E2E: the reference's checkpoints and its own numbers, and configs and checkpoints that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.engine.cache.state_cache import state_bytes, state_layers
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan

LAYERS, SUFFIX, HIDDEN, INNER, VOCAB, HEAD = 3, 2, 16, 24, 32, 8
CONFIG: dict[str, Any] = {
    "architectures": ["TTTE2EForCausalLM"],
    "model_type": "ttt_e2e",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "model": {
        "mini_batch_size": 8, "sliding_window_size": 12, "seq_len": 64, "rope_theta": 500.0,
        "seq_modeling_block": "SWA", "suffix_len": SUFFIX, "prime": True,
    },
    "training": {
        "train_mode": "meta", "spec_inner": ["language_model.**.suffix_blocks.feed_forward_prime.**"],
        "optimizer_inner": {"optimizer_type": "sgd", "lr": 1.0, "clip_gradient": 1.0},
    },
}  # fmt: skip
IDS = [(i * i * 7 + 3 * i) % VOCAB for i in range(33)]
# Log-probabilities of IDS[1:] by test-time-training/e2e at commit a4fc478 (JAX 0.5.3, CPU, float32) for `arrays()`
RECORDED = [
    -3.44008, -4.81789, -4.65868, -5.15451, -4.37211, -2.89464, -2.79434, -3.46644, -3.83662, -4.53508, -4.15183,
    -2.95969, -3.16648, -4.10389, -3.30042, -4.40687, -2.60181, -3.86276, -3.82866, -3.32321, -6.45498, -3.7504,
    -3.36778, -4.53965, -4.10218, -3.67635, -3.57944, -3.05954, -5.62474, -5.51207, -4.87954, -4.43205,
]  # fmt: skip


def arrays() -> dict[str, np.ndarray]:
    """Random weights by the reference's names, drawn in their order."""
    mlp = {"w1": (HIDDEN, INNER), "w2": (INNER, HIDDEN), "w3": (HIDDEN, INNER)}
    shapes: dict[str, tuple[int, ...]] = {"lm_head": (HIDDEN, VOCAB), "model.ln_f": (HIDDEN,)}
    shapes["model.wte"] = (VOCAB, HIDDEN)
    blocks, prime = "model.h.blocks", "model.h.prime_storage"
    for name, shape in mlp.items():
        shapes[f"{blocks}.feed_forward.{name}"] = (LAYERS, *shape)
        shapes[f"{prime}.feed_forward_prime.{name}"] = (SUFFIX, *shape)
    for name in ("wq", "wk", "wv", "wo"):
        shapes[f"{blocks}.seq_modeling_block.{name}"] = (LAYERS, HIDDEN, HIDDEN)
    for name in ("q_norm", "k_norm"):
        shapes[f"{blocks}.seq_modeling_block.{name}"] = (LAYERS, HEAD)
    for name in ("norm", "post_norm"):
        shapes |= {f"{blocks}.{part}_{name}": (LAYERS, HIDDEN) for part in ("seq", "ffn")}
        shapes[f"{prime}.ffn_prime_{name}"] = (SUFFIX, HIDDEN)
    random, made = np.random.RandomState(0), {}
    for name in sorted(f"language_model.{name}.weight" for name in shapes):
        norm = "norm" in name or "ln_f" in name
        values = random.standard_normal(shapes[name.removeprefix("language_model.").removesuffix(".weight")])
        made[name] = (values * (0.2 if norm else 0.25) + norm).astype(np.float32)
    return made


def folder_of(folder: Path, weights: dict[str, np.ndarray], **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "model.npz", **weights)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return folder


def logprobs(folder: Path) -> list[float]:
    llm = LLM(str(folder), device="cpu", block_size=4, max_num_seqs=2, skip_tokenizer_init=True)
    output = llm.generate([IDS], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    rows = zip(output.prompt_logprobs[1:], IDS[1:], strict=True)
    return [row[token].logprob for row, token in rows]


def test_checkpoint_of_arrays_has_the_references_numbers(tmp_path: Path) -> None:
    """Through three inner steps, with configs in the reference's own tables."""
    found = logprobs(folder_of(tmp_path, arrays()))
    np.testing.assert_allclose(found, RECORDED, atol=1e-4)


def test_reference_names_in_safetensors_are_the_same(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, arrays())
    (folder / "model.npz").unlink()
    save_file({name: torch.from_numpy(a) for name, a in arrays().items()}, folder / "model.safetensors")
    np.testing.assert_allclose(logprobs(folder), RECORDED, atol=1e-4)


def test_checkpoint_without_meta_parameters_names_them(tmp_path: Path) -> None:
    plain = {name: a for name, a in arrays().items() if "prime" not in name}
    with pytest.raises(CheckpointError) as caught:
        logprobs(folder_of(tmp_path, plain))
    first = "model.h.1.feed_forward_prime.w1.weight, model.h.1.feed_forward_prime.w2.weight"
    assert f"it lacks the meta-parameters with which each sequence begins: {first}" in str(caught.value)
    assert "it lacks the norms of the meta-parameters: model.h.1.ffn_prime_norm.weight" in str(caught.value)


def test_wrong_number_of_layers_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"blocks.feed_forward.w1.weight of shape \(3, 16, 24\) .* 4 layers first"
    ):
        logprobs(folder_of(tmp_path, arrays(), num_hidden_layers=4))


@pytest.mark.parametrize("content", [b"not a file of arrays", b"PK\x03\x04 truncated"])
def test_damaged_file_of_arrays_is_named(tmp_path: Path, content: bytes) -> None:
    folder = folder_of(tmp_path, {})
    (folder / "model.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.npz is not a file of arrays"):
        logprobs(folder)


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    weights: dict[str, Any] = {**arrays(), "language_model.model.ln_f.weight": np.array([{}], dtype=object)}
    with pytest.raises(CheckpointError, match=r"ln_f\.weight cannot be read"):
        logprobs(folder_of(tmp_path, weights))


def test_bfloat16_arrays_are_read(tmp_path: Path) -> None:
    """NumPy stores them without a name for their dtype."""
    halves = {name: torch.from_numpy(a).bfloat16() for name, a in arrays().items()}
    raw = {name: t.view(torch.int16).numpy().view("V2") for name, t in halves.items()}
    found = logprobs(folder_of(tmp_path / "half", raw))
    same = logprobs(folder_of(tmp_path / "wide", {name: t.float().numpy() for name, t in halves.items()}))
    assert found == same


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prime": False}, "config.prime=False is not supported, only True"),
        ({"suffix_len": 0}, "config.suffix_len=0 is not supported, only integers above 0"),
        ({"mini_batch_size": 0}, "config.mini_batch_size=0 is not supported, only integers above 0"),
        ({"seq_modeling_block": "self_attention"}, "config.seq_modeling_block='self_attention' is not"),
        ({"train_mode": "pretrain"}, "config.train_mode='pretrain' is not supported, only 'meta'"),
        ({"spec_inner": ["**"]}, "config.spec_inner=['**'] is not supported"),
        ({"output_size": 64}, "config.output_size=64 is not supported, only 32"),
        ({"optimizer_inner": {"optimizer_type": "adamw"}}, "only optimizer_type 'sgd'"),
        ({"optimizer_inner": {"lr": -1}}, "only optimizer_type 'sgd' with numbers lr and clip_gradient"),
        ({"optimizer_inner": 3}, "config.optimizer_inner=3 is not supported, only a table"),
        ({"num_attention_heads": 3}, "config.num_attention_heads=3 is not supported, only divisors of hidden_size=16"),
        ({"sliding_window_size": "8"}, "config.sliding_window"),
        ({"num_hidden_layers": None}, "config.num_hidden_layers=None is not supported, only integers above 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 is too large, at most 10000 layers"),
        ({"rms_norm_eps": "x"}, "config.rms_norm_eps='x' is not supported, only numbers above 0"),
        ({"rope_theta": None}, "config.rope_theta=None is not supported, only numbers above 0"),
        ({"seq_len": None}, "config.seq_len=None is not supported, only integers above 0"),
    ],
)  # fmt: skip
def test_unsupported_field_is_refused_by_name(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((Unsupported, CheckpointError)) as caught:
        plan(folder_of(tmp_path, {}, **fields))
    assert said in str(caught.value)


def test_float16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported, match=r"config\.dtype='float16' is not supported for weights that change"
    ):
        LLM(str(folder_of(tmp_path, arrays())), device="cpu", dtype="float16", skip_tokenizer_init=True)


def test_memory_for_too_few_states_gives_the_number_that_fits(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, arrays())
    with pytest.raises(ValueError, match="hold 7 sequences; reduce max_num_seqs to at most 7"):
        LLM(str(folder), device="cpu", kv_cache_memory=85_000, max_num_seqs=8, skip_tokenizer_init=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_has_the_bytes_of_the_states(dtype: str, tmp_path: Path) -> None:
    config = build.load_config(folder_of(tmp_path, {}))
    kind = getattr(torch, dtype)
    layers = state_layers([*build.skeleton(tmp_path, config, kind).modules()])
    assert plan(config, dtype).state_bytes == state_bytes(layers, kind)
    assert registry.describe(config).layers[0].inner is None


def test_bfloat16_learns_with_the_rest_of_its_weights(tmp_path: Path) -> None:
    """The steps are smaller than a bit of bfloat16: without rests, most of them would be lost."""
    folder = make_tiny(tmp_path, "ttt_e2e", "bfloat16", mini_batch_size=8, vocab_size=512)
    llm = LLM(str(folder), device="cpu", block_size=4, max_num_seqs=2, num_blocks=60)
    llm.generate([[(i * 37) % 500 for i in range(30)]], SamplingParams(temperature=0, max_tokens=2))
    layer = llm.llm_engine.runner.model.model.layers[-1].feed_forward_prime
    weight, rest = layer.states["gate_up"], layer.states["gate_up_rest"]
    assert rest[1].count_nonzero() > rest[1].numel() // 2 and not rest[0].count_nonzero()
    assert (rest[1].abs().float() <= weight[1].abs().float() * 2**-8).all()
    names = load_file(folder / "model.safetensors")
    start = torch.cat([names[f"model.h.2.feed_forward_prime.{n}.weight"] for n in ("w1", "w3")])
    assert torch.equal(weight[0], start) and not torch.equal(weight[1], start)
