"""Read the folder of a CosyVoice3 checkpoint: cosyvoice3.yaml, and the config of the Qwen2 folder in it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastkernels.models.common.checkpoints.checkpoint import SPEECH, CheckpointError
from fastkernels.models.common.configs.config import PlainConfig, plain

TEXT = "CosyVoice-BlankEN"  # the folder of the Qwen2 model: its config and its tokenizer
QWEN2 = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta", "rope_parameters", "head_dim",
)  # fmt: skip
# {our field: place in the yaml}
FLOW = {
    "vocab": "vocab_size", "ratio": "token_mel_ratio", "mel": "output_size", "speaker": "spk_embed_dim",
    "lookahead": "pre_lookahead_len", "lookahead_width": "pre_lookahead_layer.channels",
    "width": "decoder.estimator.dim", "depth": "decoder.estimator.depth", "heads": "decoder.estimator.heads",
    "head_size": "decoder.estimator.dim_head", "expansion": "decoder.estimator.ff_mult",
    "chunk": "decoder.estimator.static_chunk_size", "guidance": "decoder.cfm_params.content.inference_cfg_rate",
}  # fmt: skip
VOCODER = {
    "mel": "in_channels", "width": "base_channels", "pitch_width": "f0_predictor.cond_channels",
    "harmonics": "nb_harmonics", "rate": "sampling_rate", "rates": "upsample_rates", "kernels": "upsample_kernel_sizes",
    "hop": "istft_params.hop_len", "size": "istft_params.n_fft", "block_kernels": "resblock_kernel_sizes",
    "source_kernels": "source_resblock_kernel_sizes", "ahead": "conv_pre_look_right",
}  # fmt: skip
SAMPLING = {"top_p": "top_p", "top_k": "top_k", "window": "win_size", "share": "tau_r"}


def read(folder: Path) -> PlainConfig | None:
    """The config of a folder with cosyvoice3.yaml, else None. No code that the yaml names is run.

    Raises CheckpointError.
    """
    file = folder / SPEECH
    if not file.is_file():
        return None
    whole = _table(file)
    try:
        made = {
            "model_type": "cosyvoice3", "architectures": ["CosyVoice3Model"], "dtype": "float32",
            "speech_token_size": _at(whole, "llm.speech_token_size"),
            "sampling": {ours: _at(whole, f"llm.sampling.{theirs}") for ours, theirs in SAMPLING.items()},
            "flow": {ours: _at(whole, f"flow.{theirs}") for ours, theirs in FLOW.items()},
            "vocoder": {ours: _at(whole, f"hift.{theirs}") for ours, theirs in VOCODER.items()},
        }  # fmt: skip
        made["vocoder"]["dilations"] = _at(whole, "hift.resblock_dilation_sizes")[0]
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file} has no usable {error}, which CosyVoice3 needs") from error
    text = folder / TEXT / "config.json"
    try:
        own = json.loads(text.read_text(encoding="utf-8"))
        made |= {name: own[name] for name in QWEN2 if own.get(name) is not None}
        made["text_vocab_size"] = own["vocab_size"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{text} cannot be read: {error!r}") from error
    try:
        return plain(made)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _table(file: Path) -> dict[str, Any]:
    """The tables of HyperPyYAML, whose tags name code: they are left out, and references are filled in."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads a tagged node as the node without its tag."""

    def untagged(loader: Any, tag: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)

    Loader.add_multi_constructor("!", untagged)
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Loader=Loader)
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a table, got {found!r:.80}")
    return found


def _at(whole: Mapping[str, Any], path: str) -> Any:
    """The value at a path of names with dots. Raises KeyError with the path."""
    value: Any = whole
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(path)
        value = value[name]
    return _resolved(whole, value, path)


def _resolved(whole: Mapping[str, Any], value: Any, path: str) -> Any:
    """The value of a reference such as '<chunk_size> * <token_mel_ratio>'."""
    if not isinstance(value, str) or "<" not in value:
        return value
    parts = [part.strip() for part in value.split("*")]
    found = [whole.get(part[1:-1]) if part[:1] == "<" and part[-1:] == ">" else None for part in parts]
    if any(type(number) not in (int, float) for number in found):
        raise KeyError(path)
    return math.prod(found)
