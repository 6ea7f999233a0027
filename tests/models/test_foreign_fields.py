"""Fields of other architectures in a config: ignored as in transformers' model of that name, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.modules import metadata
from support.tiny import IMAGE, KINDS, MODELS, make_tiny, make_tiny_vlm
from support.vlm_oracle import VlmOracle, image, prompt

from fastkernels import LLM, SamplingParams
from fastkernels.core.forward_context import forward_context
from fastkernels.core.layer_state import StateSpec
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Decoder, Unsupported
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan
from fastkernels.overrides.attention.attention import PagedAttention

IDS = torch.tensor([(i * 37) % 500 for i in range(30)])
# Values with which a field is not neutral. A name with a dot is inside rope_parameters or one of its layer types.
FIELDS: dict[str, list[Any]] = {
    "layer_types": ["sliding", "full"],  # all but the first layer, or all layers
    "sliding_window": [5],
    "use_sliding_window": [False, True],
    "max_window_layers": [0],
    "attention_chunk_size": [4],
    "partial_rotary_factor": [0.5],
    "rope.partial_rotary_factor": [0.5],
    "rotary_pct": [0.5],
    "rotary_dim": [8],
    "rope_interleave": [False],
    "indexer_rope_interleave": [False, True],
    "rope.factor": [3.0],
    "rope.mscale": [0.5],
    "rope.mscale_all_dim": [0.5],
    "rope.attention_factor": [2.0],
    "rope.truncate": [False],
    "rope_theta": [77.0],
    "original_max_position_embeddings": [16],
    "rope_scaling": [{"rope_type": "linear", "factor": 3.0}],
    "no_rope_layers": [[0] * 9],
    "no_rope_layer_interval": [2],
    "head_dim": [16],
    "global_head_dim": [16],
    "num_key_value_heads": [1],
    "num_kv_shared_layers": [1],
    "query_pre_attn_scalar": [7],
    "attention_multiplier": [0.3],
    "attn_logit_softcapping": [0.5],
    "final_logit_softcapping": [0.5],
    "logit_scale": [0.3],
    "logits_scaling": [3.0],
    "embedding_multiplier": [2.0],
    "residual_multiplier": [0.5],
    "attention_bias": [True],
    "attention_out_bias": [True],
    "mlp_bias": [True],
    "bias": [True],
    "qkv_bias": [True],
    "use_bias": [True],
    "use_qkv_bias": [True],
    "use_qk_norm": [True],
    "qk_layernorm": [True],
    "attention_k_eq_v": [True],
    "clip_qkv": [0.05],
    "attention_sinks": [True],
    "is_causal": [False],
    "use_bidirectional_attention": [True, "all"],
    "dual_chunk_attention_config": [{"chunk_size": 8, "local_size": 4}],
    "hidden_act": ["relu", "swish"],
    "hidden_activation": ["relu"],
    "use_parallel_residual": [True, False],
    "rms_norm_eps": [0.1],
    "layer_norm_eps": [0.1],
    "norm_eps": [0.1],
    "norm_epsilon": [0.1],
    "norm_topk_prob": [True, False],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "noaux_tc"],
    "expert_selection_fn": ["sigmoid"],
    "n_group": [2],
    "topk_group": [2],
    "routed_scaling_factor": [2.5],
    "num_experts_per_tok": [1],
    "n_shared_experts": [1],
    "shared_intermediate_size": [64],
    "enable_moe_block": [True],
    "hidden_size_per_layer_input": [16],
    "mlp_only_layers": [[0]],
    "decoder_sparse_step": [2],
    "first_k_dense_replace": [0],
    "moe_layer_freq": [2],
    "swiglu_alpha": [0.5],
    "swiglu_limit": [0.5],
    "use_routing_bias": [False],
    "index_topk": [3],
    "layer_norm_epsilon": [0.1],
    "clamp_min": [-0.01],
    "use_gk": [False],
    "gate_logit_normalizer": [8],
    "attnres_block_size": [2],
    "elementwise_affine": [False],
    "value_dim": [256],
    "time_step_limit": [[0.5, 0.9]],
}  # fmt: skip
FAST = (
    "llama",
    "qwen3",
    "mixtral",
    "mistral",
    "gemma4_unified_text",
    "smollm3",
    "granitemoe",
    "deepseek_v2",
    "gpt_oss",
)
BY_KIND = {kind: MODELS.get(kind, (kind, {}))[1] for kind, _ in MODELS.values()}


def with_field(raw: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The config with one field set."""
    if name == "layer_types":
        rest = ["sliding_attention" if value == "sliding" else "full_attention"] * (
            (raw["n_layers"] if "n_layers" in raw else raw["num_hidden_layers"]) - 1
        )
        return {
            **raw,
            "layer_types": ["full_attention", *rest],
            "sliding_window": raw.get("sliding_window") or 5,
        }
    if not name.startswith("rope."):
        window = {"sliding_window": raw.get("sliding_window") or 5} if name == "use_sliding_window" else {}
        return {**raw, **window, name: value}
    own = name.removeprefix("rope.")
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}  # none in the model
    if "rope_type" in rope:
        return {**raw, "rope_parameters": {**rope, own: value}}
    return {**raw, "rope_parameters": {kind: {**p, own: value} for kind, p in rope.items()}}


class Checkpoint:
    """A tiny checkpoint, whose config.json may get other fields, in transformers and here."""

    def __init__(self, folder: Path, work: Path):
        from transformers import AutoModelForCausalLM

        self.raw = json.loads((folder / "config.json").read_text())
        self.work = work
        shutil.copytree(folder, work)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.state = model.state_dict()
        self.expected = self._run(model)
        self.described = self.describe(self.raw)

    def write(self, raw: dict[str, Any]) -> None:
        (self.work / "config.json").write_text(json.dumps(raw))

    def describe(self, raw: dict[str, Any]) -> Decoder:
        """Our description. Raises Unsupported, CheckpointError."""
        self.write(raw)
        config = build.load_config(self.work)
        plan(config)
        return registry.describe(config)

    @torch.inference_mode()
    def ours(self, raw: dict[str, Any]) -> torch.Tensor:
        self.write(raw)
        config = build.load_config(self.work)
        model = build.build(self.work, config, torch.device("cpu"), torch.float32)
        for layer in model.modules():
            if isinstance(layer, PagedAttention):
                layer.kv_cache = tuple(torch.zeros(shape) for shape in layer.cache_shapes(4, 16))
            if isinstance(kept := getattr(layer, "keeps", None), StateSpec):
                layer.states = kept.new(2, torch.float32, "cpu")
                if hasattr(layer, "begin"):
                    layer.begin()
        step = metadata([len(IDS)], [len(IDS)], 16)
        step = replace(step, state_slots=torch.ones(1, dtype=torch.int32), fresh=torch.tensor([True]))
        with forward_context(step):
            return model.compute_logits(model(IDS, torch.arange(len(IDS))))

    def theirs(self, raw: dict[str, Any]) -> torch.Tensor | None:
        """transformers' logits; None if it does not build this, or with other parameters."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self.write(raw)
        try:
            config = AutoConfig.from_pretrained(self.work)
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            loaded = model.load_state_dict(self.state, strict=False)
            return None if loaded.missing_keys or loaded.unexpected_keys else self._run(model)
        except Exception:  # of any kind: transformers has no common one
            return None

    @torch.inference_mode()
    def _run(self, model: Any) -> torch.Tensor:
        return model(IDS[None], use_cache=False).logits[0]


@pytest.fixture(
    scope="module", params=[pytest.param(k, marks=() if k in FAST else pytest.mark.slow) for k in BY_KIND]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("fields")
    return Checkpoint(
        make_tiny(root / "own", request.param, "float32", **BY_KIND[request.param]), root / "work"
    )


def cases(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name=value, the config with it)."""
    for name, values in FIELDS.items():
        for value in values:
            made = with_field(raw, name, value)
            if made != raw:
                yield f"{name}={value!r}", made


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.allclose(a, b, atol=3e-4, rtol=3e-4))


def test_fields_mean_what_they_mean_in_transformers(checkpoint: Checkpoint) -> None:
    wrong, ignored, compared = [], {}, 0
    for case, raw in cases(checkpoint.raw):
        names = {
            case.partition("=")[0].rpartition(".")[2],
            *(k for k in raw if raw[k] != checkpoint.raw.get(k)),
        }
        try:
            described = checkpoint.describe(raw)
        except (Unsupported, CheckpointError) as error:
            if not any(name in str(error) for name in names) and checkpoint.theirs(raw) is not None:
                wrong.append(f"{case}: refused without its name: {error}")
            continue
        if described == checkpoint.described:
            ignored[case] = raw
            continue
        expected = checkpoint.theirs(raw)
        if expected is None:
            continue
        compared += 1
        if not close(checkpoint.ours(raw), expected):
            wrong.append(f"{case}: other logits than transformers")
    everything = dict(checkpoint.raw)
    for raw in ignored.values():
        everything |= {k: v for k, v in raw.items() if v != checkpoint.raw.get(k)}
    found = checkpoint.theirs(everything)
    if found is None or not close(found, checkpoint.expected):
        for case, raw in ignored.items():
            alone = checkpoint.theirs(raw)
            if alone is not None and not close(alone, checkpoint.expected):
                wrong.append(f"{case}: ignored, and transformers applies it")
    assert wrong == []
    # Most fields are those of attention.
    own = 1 if checkpoint.raw["model_type"] in ("mamba", "mpt", "retnet", "rwkv7") else 2
    assert compared >= own and len(ignored) >= 20
    assert close(checkpoint.ours(checkpoint.raw), checkpoint.expected)


VISION: dict[str, Any] = {
    "hidden_act": "relu", "layer_norm_eps": 0.1, "rms_norm_eps": 0.1, "rope_theta": 50.0, "fullatt_block_indexes": [0],
    "window_size": 56, "attention_bias": True, "mlp_ratio": 2, "deepstack_visual_indexes": [0], "qkv_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "tokens_per_second": 9, "vision_use_head": True,
    "use_bidirectional_attention": True, "num_key_value_heads": 1,
}  # fmt: skip


class Pictured:
    """A tiny checkpoint of a model with images, and the log-probabilities of a prompt in transformers and here."""

    given = (f"One {IMAGE} seen", image(0, 40, 24))

    def __init__(self, folder: Path):
        self.folder, self.raw = folder, json.loads((folder / "config.json").read_text())
        self.state = VlmOracle(folder).model.state_dict()

    def cases(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for case, made in cases(self.raw["text_config"]):
            yield case, {**self.raw, "text_config": made}
        for name, value in VISION.items():
            yield (
                f"{name}={value!r}",
                {
                    **self.raw,
                    "vision_config": {**self.raw["vision_config"], name: value},
                },
            )

    def ours(self) -> torch.Tensor:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        with LLM(str(self.folder), device="cpu", dtype="float32") as llm:
            (output,) = llm.generate([prompt(*self.given)], params, use_tqdm=False)
        found = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([of[token].logprob for token, of in found])

    def theirs(self) -> torch.Tensor | None:
        """None if transformers does not build or run this, or with other parameters."""
        from transformers import AutoConfig, AutoModelForImageTextToText

        oracle = VlmOracle(self.folder)
        try:
            config = AutoConfig.from_pretrained(self.folder)
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
            loaded = model.load_state_dict(self.state, strict=False)
            if loaded.missing_keys or loaded.unexpected_keys:
                return None
            oracle.model = model
            ids = oracle.inputs(self.given[0], self.given[1:])["input_ids"][0, 1:, None]
            return oracle.logprobs(*self.given)[:-1].gather(1, ids)[:, 0]
        except Exception:  # of any kind: transformers has no common one
            return None


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_axes_that_a_scaled_rotary_embedding_lacks_are_named(kind: str, tmp_path: Path) -> None:
    """Positions of three axes reached a kernel for one."""
    folder = make_tiny_vlm(tmp_path, kind)
    raw = json.loads((folder / "config.json").read_text())
    text = with_field(raw["text_config"], "rope_scaling", {"rope_type": "linear", "factor": 3.0})
    (folder / "config.json").write_text(json.dumps({**raw, "text_config": text}))
    with pytest.raises(Unsupported, match="has no mrope_section, the pairs of a head"):
        LLM(str(folder), device="cpu")


def test_windows_of_models_without_them_are_ignored(tmp_path: Path) -> None:
    """transformers' class of the config drops them, from which vLLM reads them as well."""
    folder = make_tiny_vlm(tmp_path, "qwen3_vl_moe")
    raw = json.loads((folder / "config.json").read_text())
    text = raw["text_config"] | {"use_sliding_window": True, "sliding_window": 5}
    (folder / "config.json").write_text(json.dumps({**raw, "text_config": text}))
    described = registry.describe(build.load_config(folder))
    assert all(layer.attention.window is None for layer in described.layers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_fields_of_models_with_images(kind: str, tmp_path: Path) -> None:
    """Each has transformers' meaning, or is refused by a name that the config has for it."""
    model = Pictured(make_tiny_vlm(tmp_path, kind))
    assert torch.allclose(model.ours(), model.theirs(), atol=1e-3)
    wrong, compared = [], 0
    for case, raw in model.cases():
        (model.folder / "config.json").write_text(json.dumps(raw))
        try:
            found = model.ours()
        except (Unsupported, CheckpointError):
            continue
        except ValueError as error:
            wrong += [f"{case}: {error}"] if model.theirs() is not None else []
            continue
        expected = model.theirs()
        if expected is not None:
            compared += 1
            wrong += [] if torch.allclose(found, expected, atol=1e-3) else [case]
    assert wrong == [] and compared > 40


def test_every_language_model_is_covered() -> None:
    assert {f"{KINDS[kind][0]}ForCausalLM" for kind in BY_KIND} == {
        name
        for m in registry.models().values()
        if m.arch.runner == "Generate" and not m.arch.media
        for name in m.arch.names
    }
