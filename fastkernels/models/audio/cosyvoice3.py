"""CosyVoice3 (arXiv 2505.17589): a Qwen2 that writes speech tokens behind a text, flow matching, and a vocoder.

Speech tokens come first in one vocabulary of ids, and those of the text behind them: a prompt is a list of ids, and the
head covers the first ones alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.configs.checks import MOST
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions import towers
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers.decoder import Decoder
from fastkernels.models.common.speech.flow import TIMES, FlowConfig, SpeechFlow
from fastkernels.models.common.speech.vocoder import Vocoder, VocoderConfig

SPECIALS = 200  # ids behind the speech tokens: the start, the end, the task, and others that end speech, too
START, TASK = 0, 2  # among these
ROLE, END_OF_PROMPT = "You are a helpful assistant.", "<|endofprompt|>"
MAY_BE_ZERO = ("lookahead", "ahead", "pitch_ahead", "harmonics")
SILENT = frozenset((1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323))  # tokens of silence and breath
# Fields of a config.json with the defaults of the public checkpoint
DEFAULTS: dict[str, Any] = {
    "speech_token_size": 6561, "text_vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e6, "rope_parameters": None, "flow": {}, "vocoder": {},
    "sampling": {"top_p": 0.8, "top_k": 25, "window": 10, "share": 0.1},
}  # fmt: skip


def fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json. Raises Unsupported for sizes of the flow or the vocoder that are not known."""
    made = {**DEFAULTS, **raw}
    size = made["speech_token_size"]
    if type(size) is not int or size < 1:
        raise d.Unsupported(f"config.speech_token_size={size!r} is not supported, only integers above 0")
    for name, kind in (("flow", FlowConfig), ("vocoder", VocoderConfig)):
        unknown = set(made[name]) - {f.name for f in fields_of(kind)}
        if unknown:
            raise d.Unsupported(f"config.{name} has {', '.join(sorted(unknown))}, which is not supported")
        for field in fields_of(kind):
            _check(f"config.{name}.{field.name}", made[name].get(field.name, field.default), field)
    rope = made.pop("rope_theta")
    return {
        **made, "vocab_size": size + SPECIALS, "more_token_ids": made["text_vocab_size"],
        "tie_word_embeddings": False, "eos_token_id": list(range(size, size + SPECIALS)),
        "rope_parameters": made["rope_parameters"] or {"rope_type": "default", "rope_theta": rope},
    }  # fmt: skip


def _check(name: str, value: Any, field: Any) -> None:
    """Raise Unsupported for a value that is not of the kind of the field's default."""
    if isinstance(field.default, float):
        right, kind = type(value) in (int, float) and math.isfinite(value), "numbers"
    else:
        least = 0 if field.name in MAY_BE_ZERO else 1
        many = isinstance(field.default, tuple)
        sizes = value if many and isinstance(value, (list, tuple)) else [value]
        most = MOST if field.name == "depth" else 2**31
        right = many == isinstance(value, (list, tuple)) and bool(sizes)
        right = right and all(type(size) is int and least <= size <= most for size in sizes)
        kind = f"{'lists of ' if many else ''}integers from {least} to {most}"
    if not right:
        raise d.Unsupported(f"{name}={value!r:.80} is not supported, only {kind}")


def flow_config(config: Any) -> FlowConfig:
    return FlowConfig(**config.flow)


def vocoder_config(config: Any) -> VocoderConfig:
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.vocoder.items()}
    return VocoderConfig(**given)


def describe(config: Any) -> d.Decoder:
    made = d.llama(config, bias=True)
    return replace(made, more_ids=config.more_token_ids, tower=tuple(tower(config)))


def tower(config: Any) -> Iterator[towers.Part]:
    """The modules of the flow. Those of the vocoder are convolutions."""
    c = flow_config(config)
    inner, at = c.heads * c.head_size, "flow.decoder.estimator"
    yield towers.Part("flow.input_embedding", "embedding", {"weight": (c.vocab, c.mel)})
    yield towers.linear("flow.spk_embed_affine_layer", c.mel, c.speaker)
    for i, (rows, columns) in enumerate(((c.width, TIMES), (c.width, c.width))):
        yield towers.linear(f"{at}.time_embed.time_mlp.{2 * i}", rows, columns)
    yield towers.linear(f"{at}.input_embed.proj", c.width, 4 * c.mel)
    for i in range(c.depth):
        block, sizes = f"{at}.transformer_blocks.{i}", {"num_heads": c.heads, "head_size": c.head_size}
        yield towers.linear(f"{block}.attn_norm.linear", 6 * c.width, c.width)
        yield towers.Part(f"{block}.attn_norm", "ada_layer_norm")
        for name in ("to_q", "to_k", "to_v"):
            yield towers.linear(f"{block}.attn.{name}", inner, c.width)
        rotary = {"head_size": c.head_size, "is_neox_style": False}
        yield towers.Part(f"{block}.attn", "rotary_emb", arguments=rotary)
        yield towers.Part(f"{block}.attn", "attention_dense", layout="heads", arguments=sizes)
        yield towers.linear(f"{block}.attn.to_out.0", c.width, inner)
        yield towers.Part(f"{block}.ff_norm", "gated_residual")
        yield towers.linear(f"{block}.ff.ff.0.0", c.expansion * c.width, c.width)
        yield towers.activation(f"{block}.ff.ff.0.1", "gelu_pytorch_tanh")
        yield towers.linear(f"{block}.ff.ff.2", c.width, c.expansion * c.width)
    yield towers.linear(f"{at}.norm_out.linear", 2 * c.width, c.width)
    yield towers.linear(f"{at}.proj_out", c.mel, c.width)


class CosyVoice3Model(Decoder):
    """config: the fields of `fields`. The flow has the dtype of the language model, and the vocoder float32.

    silent_tokens: speech tokens of silence, of which the vocoder gets a few in a row
    """

    silent_tokens = SILENT

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.speech_tokens: int = config.speech_token_size
        weight: Any = self.model.embed_tokens.weight
        weight.weight_loader = self._load_embedding
        self.flow = SpeechFlow(flow_config(config))
        self.vocoder = Vocoder(vocoder_config(config)).float()

    def _load_embedding(self, param: nn.Parameter, loaded: torch.Tensor, shard: int | None = None) -> None:
        """Copy one of the checkpoint's two tables: of speech tokens (0), or of the text (1)."""
        speech, text = self.config.vocab_size, self.config.more_token_ids
        start, rows = (0, speech + text) if shard is None else ((0, speech), (speech, text))[shard]
        if loaded.shape != (rows, param.shape[1]):
            raise ValueError(f"expected shape ({rows}, {param.shape[1]})")
        param.data[start : start + rows].copy_(loaded)
        param.data[speech + text :].zero_()  # padding

    def opening(self, instructions: str | None) -> str:
        """The text in front of what the voice says."""
        return f"{ROLE}{f' {instructions}' if instructions else ''}{END_OF_PROMPT}"

    def prompt(self, before: Sequence[int], text: Sequence[int], voice: Sequence[int]) -> list[int]:
        """The ids of a prompt.

        before: of an instruction and what the voice says, in the ids of the text's tokenizer; text: to speak, in the
        same; voice: the speech tokens of what the voice says
        """
        first, shift = self.speech_tokens, self.config.vocab_size
        return [first + START, *(shift + i for i in (*before, *text)), first + TASK, *voice]


ARCH = Architecture(
    names=("CosyVoice3Model",),
    category="audio",
    model="CosyVoice3Model",
    runner="Speak",
    inputs="text",
    model_type="cosyvoice3",
    files={"llm": "", "flow": "flow.", "hift": "vocoder."},
    packed={
        "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
        "embed_tokens": ("speech_embedding", "text_embedding"),
    },
    renamed={
        "llm.model.model.embed_tokens.": "model.text_embedding.", "speech_embedding.": "model.speech_embedding.",
        "llm.model.model.": "model.", "llm_decoder.": "lm_head.", "vocoder.generator.": "vocoder.",
    },
    unused=("llm.model.lm_head.weight", "*.inv_freq"),
    own_config="fastkernels.models.audio.cosyvoice3:fields",
    public={
        "FunAudioLLM/Fun-CosyVoice3-0.5B-2512": {"speech_token_size": 6561, "text_vocab_size": 151936},
    },
)  # fmt: skip
