"""A tiny random CosyVoice3 in the layout of its checkpoint, whose weights are a function of their names, and voices."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from support.tiny import byte_tokenizer

from fastkernels.engine.speech.voices import Voice

RECORDED = np.load(Path(__file__).parents[1] / "models" / "cosyvoice3.npz")
SPEECH_TOKENS, SPECIALS, TEXT_VOCAB = 50, 200, 800
CHUNK = 5  # tokens
TEXT = "Hi you."
QWEN2 = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": TEXT_VOCAB, "max_position_embeddings": 2048, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
}  # fmt: skip
YAML = """
sample_rate: 24000
chunk_size: 5
token_mel_ratio: 2
llm: !new:cosyvoice.llm.llm.CosyVoice3LM
    speech_token_size: 50
    sampling: !name:cosyvoice.utils.common.ras_sampling
        top_p: 0.8
        top_k: 25
        win_size: 10
        tau_r: 0.1
flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithDiT
    output_size: 80
    spk_embed_dim: 12
    vocab_size: 50
    token_mel_ratio: !ref <token_mel_ratio>
    pre_lookahead_len: 3
    pre_lookahead_layer: !new:cosyvoice.transformer.upsample_encoder.PreLookaheadLayer
        channels: 32
    decoder: !new:cosyvoice.flow.flow_matching.CausalConditionalCFM
        cfm_params: !new:omegaconf.DictConfig
            content:
                inference_cfg_rate: 0.7
        estimator: !new:cosyvoice.flow.DiT.dit.DiT
            dim: 64
            depth: 2
            heads: 4
            dim_head: 16
            ff_mult: 2
            static_chunk_size: !ref <chunk_size> * <token_mel_ratio>
hift: !new:cosyvoice.hifigan.generator.CausalHiFTGenerator
    in_channels: 80
    base_channels: 32
    nb_harmonics: 8
    sampling_rate: !ref <sample_rate>
    upsample_rates: [8, 5, 3]
    upsample_kernel_sizes: [16, 11, 7]
    istft_params:
        n_fft: 16
        hop_len: 4
    resblock_kernel_sizes: [3, 7, 11]
    resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    source_resblock_kernel_sizes: [7, 7, 11]
    conv_pre_look_right: 4
    f0_predictor: !new:cosyvoice.hifigan.f0_predictor.CausalConvRNNF0Predictor
        cond_channels: 32
"""


def value(name: str, shape: Any) -> torch.Tensor:
    """A random weight, a function of its name."""
    x = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 1, shape).astype(np.float32)
    if name.endswith("original0"):
        x = np.abs(x) * 0.3 + 0.4
    elif name.endswith("alpha"):
        x = np.abs(x) + 0.5
    else:
        x = x / np.sqrt(max(int(np.prod(shape[1:])), 1)) if len(shape) > 1 else 0.1 * x
    return torch.from_numpy(np.asarray(x, np.float32))


def weights(kind: str) -> dict[str, torch.Tensor]:
    """The weights of the flow ('flow') or the vocoder ('sound')."""
    shapes = json.loads(str(RECORDED[f"{kind}_shapes"]))
    made = {name: value(name, shape) for name, shape in shapes.items()}
    if kind == "sound":
        made["f0_predictor.classifier.weight"] *= 400  # voiced and unvoiced
    return made


def language_model() -> dict[str, torch.Tensor]:
    """The weights of the language model. Ends are less likely than speech."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        own = Qwen2ForCausalLM(Qwen2Config(**QWEN2)).state_dict()
    rows = SPEECH_TOKENS + SPECIALS
    shapes = {f"llm.model.{name}": tuple(t.shape) for name, t in own.items()}
    shapes |= {"llm_decoder.weight": (rows, 64), "speech_embedding.weight": (rows, 64)}
    made = {name: value(name, shape) for name, shape in shapes.items()}
    for name in made:
        if name.endswith("norm.weight"):
            made[name] = made[name].abs() + 0.5
        elif name.endswith(("embed_tokens.weight", "speech_embedding.weight")):
            made[name] *= 4
    made["llm_decoder.weight"] *= 3
    made["llm_decoder.weight"][SPEECH_TOKENS:] *= 0.6
    made["llm.model.lm_head.weight"] = made["llm.model.model.embed_tokens.weight"]
    return made


def make_tiny_cosyvoice(folder: Path, layout: str = "pt", voices: bool = True) -> Path:
    """layout: 'pt' or 'safetensors', of the weights."""
    text = folder / "CosyVoice-BlankEN"
    text.mkdir(parents=True)
    byte_tokenizer().save_pretrained(text)
    (text / "config.json").write_text(json.dumps(QWEN2))
    (folder / "cosyvoice3.yaml").write_text(YAML)
    parts = {"llm": language_model(), "flow": weights("flow"), "hift": weights("sound")}
    rates = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    parts["flow"]["decoder.estimator.rotary_embed.inv_freq"] = rates  # which the checkpoint has, too
    for name, tensors in parts.items():
        if layout == "pt":
            torch.save(tensors, folder / f"{name}.pt")
        else:
            save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / f"{name}.safetensors")
    if voices:
        (folder / "voices").mkdir()
        for name in ("anna", "ben"):
            voice(name).save(folder / "voices" / f"{name}.safetensors")
    return folder


def voice(name: str = "anna", text: str = "Hello there.") -> Voice:
    """A random voice of 6 tokens, a function of its name."""
    g = np.random.default_rng(zlib.crc32(name.encode()))
    tokens, frames, speaker = g.integers(0, SPEECH_TOKENS, 6), g.normal(0, 1, (12, 80)), g.normal(0, 1, 12)
    return Voice.of(name, text, tokens, frames.astype(np.float32), speaker.astype(np.float32))
