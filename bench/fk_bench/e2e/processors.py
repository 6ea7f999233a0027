"""Processors and tokenizers of models with random weights: files that a folder with a config.json alone lacks.

An image has at least and at most as many tokens as with the public checkpoints. The tokenizer knows bytes and the
tokens of media, at the ids that the config has: prompts are token ids, and the hosts only look the names of these up.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

CLIP = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5] * 3, [0.5] * 3
WHISPER = "whisper"
RATE, HOP = 16000, 160  # of Whisper's audio: samples a second, and of a frame
MOST = 16384  # tokens of an image: 3584 x 3584 pixels for tokens of 28 x 28, 4096 x 4096 for those of 32 x 32
# {model type: (class of the processor, least tokens of an image, mean and deviation of a channel)}
VISION: dict[str, tuple[str, int, tuple[list[float], list[float]]]] = {
    "qwen2_vl": ("Qwen2VL", 4, CLIP),
    "qwen2_5_vl": ("Qwen2_5_VL", 4, CLIP),
    "qwen3_vl": ("Qwen3VL", 64, HALF),
    "qwen3_vl_moe": ("Qwen3VL", 64, HALF),
}
NAMES = {  # {field of a config: its token}
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
FILE = "preprocessor_config.json"
OF_MEDIA, OF_TEXT = (FILE, "processor_config.json"), ("tokenizer.json", "tokenizer_config.json")


def completed(model: str, path: str, folder: Path, media: bool, random: bool) -> str:
    """The folder of a model that has what hosts need: `path`, or one in `folder` with generated files.

    media   a processor is needed; else a tokenizer is enough
    random  the weights are random: files may be generated

    Raises ValueError for a folder that lacks a processor of a kind that is not known here.
    """
    own = Path(path)
    if not own.is_dir() or any((own / name).is_file() for name in (OF_MEDIA if media else OF_TEXT)):
        return path
    kind = json.loads((own / "config.json").read_text()).get("model_type")
    if not random or (media and kind not in VISION and kind != WHISPER):
        missing = FILE if media else OF_TEXT[0]
        raise ValueError(
            f"{model} has no {missing}, which the host needs: give a whole checkpoint's folder, or --load-format dummy"
            f" and for media a model of type {', '.join((*VISION, WHISPER))}"
        )
    other = sha256(str(own.resolve()).encode()).hexdigest()[:8]  # two models may have folders of one name
    made = folder / "completed" / other / own.name
    made.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(own / "config.json", made / "config.json")
    if not media:
        _tokenizer(made, {})
        return str(made)
    try:
        _write_processor(made)
    except KeyError as error:
        raise ValueError(
            f"{model}: its config.json has no {error.args[0]}, which its processor needs"
        ) from error
    return str(made)


def _write_processor(folder: Path) -> None:
    """Write the processor's files next to config.json."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind == WHISPER:
        _json(folder / FILE, _extractor(config))
        _tokenizer(folder, {})
        return
    name, least, (mean, deviation) = VISION[kind]
    vision = config["vision_config"]
    token = (vision["patch_size"] * vision["spatial_merge_size"]) ** 2  # pixels
    fields = {
        "patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"], "image_mean": mean, "image_std": deviation,
        "size": {"shortest_edge": least * token, "longest_edge": MOST * token},
        "processor_class": f"{name}Processor",
    }  # fmt: skip
    _json(folder / FILE, {**fields, "image_processor_type": "Qwen2VLImageProcessor"})
    videos = "Qwen3VLVideoProcessor" if name == "Qwen3VL" else "Qwen2VLVideoProcessor"
    _json(folder / "video_preprocessor_config.json", {**fields, "video_processor_type": videos})
    _tokenizer(folder, {token: config[field] for field, token in NAMES.items()})


def _extractor(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
        "feature_size": config["num_mel_bins"], "sampling_rate": RATE, "hop_length": HOP, "n_fft": 400,
        "chunk_length": 2 * config["max_source_positions"] * HOP // RATE, "padding_value": 0.0, "padding_side": "right",
        "return_attention_mask": False,
    }  # fmt: skip


def _tokenizer(folder: Path, tokens: Mapping[str, int]) -> None:
    """A tokenizer of bytes, with special tokens at these ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab, taken = dict(tokens), set(tokens.values())
    for symbol in ("<unk>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocab[symbol] = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(vocab[symbol])
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<pad>", *tokens)])
    made.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<pad>"}
    _json(folder / "tokenizer_config.json", {**fields, "model_max_length": 1 << 20})


def _json(file: Path, fields: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(fields))
