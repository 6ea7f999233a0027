"""TTT-E2E (arXiv 2512.23675): sliding-window attention, and MLPs that each sequence trains while it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastkernels.models.common.configs import fla
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture

# Fields of the reference's ModelConfig with their defaults, and of the inner optimizer in its TrainingConfig
FIELDS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "mini_batch_size": 1024, "sliding_window_size": 1024, "seq_len": 131072,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "seq_modeling_block": "SWA", "rope_theta": 10000.0, "output_size": None, "suffix_len": None, "prime": True,
    "qk_norm": True, "pre_norm": True, "post_norm": True, "feed_forward_prime": "swiglu", "train_mode": "meta",
    "optimizer_inner": None,
}  # fmt: skip
INNER = {"optimizer_type": "sgd", "lr": 0.01, "clip_gradient": 0.0}
SPEC = ["language_model.**.suffix_blocks.feed_forward_prime.**"]  # the weights that the inner step changes
NAMES = {
    "self_attn": "seq_modeling_block", "before_attention": "seq_norm", "after_attention": "seq_post_norm",
    "mlp": "feed_forward", "before_mlp": "ffn_norm", "after_mlp": "ffn_post_norm", "inner": "feed_forward_prime",
    "before_inner": "ffn_prime_norm", "after_inner": "ffn_prime_post_norm",
}  # fmt: skip


def fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json: those of the reference's `model`, and of its `training` that the inner step needs.

    They are at the top, or in tables `model` and `training` as the reference's own files have them.
    """
    tables = [raw[name] for name in ("model", "training") if isinstance(raw.get(name), Mapping)]
    made = {**FIELDS, **{k: v for table in tables for k, v in table.items()}, **raw}
    given = made["optimizer_inner"]
    if isinstance(given, Mapping | None):
        made["optimizer_inner"] = {**INNER, **(given or {})}
    if made["suffix_len"] is None and type(made["num_hidden_layers"]) is int:
        made["suffix_len"] = max(1, made["num_hidden_layers"] // 4)  # as in the paper
    made["max_position_embeddings"], made["sliding_window"] = made["seq_len"], made["sliding_window_size"]
    made["num_key_value_heads"] = made["num_attention_heads"]
    return made


def describe(config: Any) -> d.Decoder:
    d.refuse(
        config, seq_modeling_block="SWA", train_mode="meta", feed_forward_prime="swiglu", prime=True,
        spec_inner=SPEC, output_size=config.vocab_size,
    )  # fmt: skip
    count = config.num_hidden_layers
    fla.positive(config, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fla.positive(config, "mini_batch_size", "sliding_window_size", "suffix_len", "seq_len", "vocab_size")
    fla.numbers(config, "rms_norm_eps", "rope_theta")
    hidden, heads, suffix, chunk = (
        config.hidden_size, config.num_attention_heads, config.suffix_len, config.mini_batch_size,
    )  # fmt: skip
    if hidden % heads or hidden // heads % 2:
        raise d.Unsupported(
            f"config.num_attention_heads={heads!r} is not supported, only divisors of hidden_size={hidden} with an even"
            " size of heads"
        )
    rate, clip = _optimizer(config)
    norm = d.Norm(eps=config.rms_norm_eps)
    before, after = (norm if on else None for on in (config.pre_norm, config.post_norm))
    attention = d.Attention(
        heads, heads, hidden // heads, window=config.sliding_window_size, max_positions=config.seq_len,
        rope={"rope_type": "default", "rope_theta": config.rope_theta}, interleaved=True,
        head_norm=norm if config.qk_norm else None,
    )  # fmt: skip
    inner = d.InnerMlp(config.intermediate_size, chunk, rate, clip, before, after)
    layers = tuple(
        d.Layer(
            attention, d.Mlp(config.intermediate_size), before, after, before, after, names=NAMES,
            inner=inner if i >= count - suffix else None,
        )
        for i in range(count)
    )  # fmt: skip
    return d.Decoder(config.vocab_size, hidden, layers, norm, bool(config.tie_word_embeddings))


def _optimizer(config: Any) -> tuple[float, float]:
    """The rate of the inner step and the largest norm of its gradient; 0: any."""
    given = config.optimizer_inner
    if not isinstance(given, Mapping):
        raise d.Unsupported(f"config.optimizer_inner={given!r} is not supported, only a table")
    rate, clip = given["lr"], given["clip_gradient"]
    numbers = all(type(n) in (int, float) and n >= 0 for n in (rate, clip))
    if given["optimizer_type"] != "sgd" or not numbers:
        raise d.Unsupported(
            f"config.optimizer_inner={given!r} is not supported, only optimizer_type 'sgd' with numbers lr and"
            " clip_gradient that are not negative"
        )
    return float(rate), float(clip)


def from_reference(key: str, config: Any) -> Iterator[tuple[str, int | None, bool]]:
    """The tensors that one of the reference's makes: (our key, its index in the first dimension, whether transposed).

    The reference stacks all layers, has the inner MLPs apart from them, and weights [in, out]. Other keys make none.
    """
    body = key.removeprefix("language_model.")
    if body == key:
        return
    if body == "lm_head.weight":
        yield body, None, True
    elif body == "model.wte.weight":
        yield "model.wte.weight", None, False
    elif body == "model.ln_f.weight":
        yield "model.ln_f.weight", None, False
    count = config.num_hidden_layers
    suffix = min(config.suffix_len, count)
    for group, first, number in (
        ("model.h.blocks.", 0, count), ("model.h.prime_storage.", count - suffix, suffix),
    ):  # fmt: skip
        if body.startswith(group):
            rest = body.removeprefix(group)
            for i in range(number):
                yield f"model.h.{first + i}.{rest}", i, "norm" not in rest


def unneeded(config: Any) -> list[str]:
    """The keys of norms that the config leaves out; the reference makes their weights nevertheless."""
    norms = {
        "qk_norm": ("q_norm", "k_norm"), "pre_norm": ("seq_norm", "ffn_norm", "ffn_prime_norm"),
        "post_norm": ("seq_post_norm", "ffn_post_norm", "ffn_prime_post_norm"),
    }  # fmt: skip
    return [
        f"*.{name}.weight" for field, names in norms.items() if not getattr(config, field) for name in names
    ]


ARCH = Architecture(
    names=("TTTE2EForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="ttt_e2e",
    renamed={"model.h.": "model.layers.", "model.wte.": "model.embed_tokens.", "model.ln_f.": "model.norm."},
    parts={
        "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "w1": "gate_proj", "w3": "up_proj",
        "w2": "down_proj",
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    stacked="fastkernels.models.llm.ttt_e2e:from_reference",
    needed={
        "*.feed_forward_prime.*": "the meta-parameters with which each sequence begins",
        "*.ffn_prime_*": "the norms of the meta-parameters",
    },
    unneeded="fastkernels.models.llm.ttt_e2e:unneeded",
    sizes={"num_key_value_heads": ""},
    own_config="fastkernels.models.llm.ttt_e2e:fields",
    fast_tokenizer=True,
    public={
        "test-time-training/ttt-e2e-3b": {
            "vocab_size": 128256, "hidden_size": 2560, "intermediate_size": 5632, "num_hidden_layers": 32,
            "num_attention_heads": 32, "suffix_len": 8, "sliding_window_size": 8192, "rope_theta": 500000.0,
            "tie_word_embeddings": True, "optimizer_inner": {"lr": 1.0, "clip_gradient": 1.0},
        },
        "test-time-training/ttt-e2e-125m": {
            "vocab_size": 128256, "hidden_size": 768, "intermediate_size": 1664, "num_hidden_layers": 12,
            "num_attention_heads": 12, "suffix_len": 3, "sliding_window_size": 8192, "rope_theta": 500000.0,
            "tie_word_embeddings": True, "optimizer_inner": {"lr": 1.0, "clip_gradient": 1.0},
        },
    },
)  # fmt: skip
