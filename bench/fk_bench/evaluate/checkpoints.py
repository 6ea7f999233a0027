"""Folders of a suite's models: a configuration, and random weights that are the same in every host."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fk_bench.evaluate.suites import Model

FORMAT = 2  # of the folders; another number makes all of them again


def folder(model: Model, kind: str) -> Path:
    """The folder of a model's configuration and, unless each host draws them, weights. Made once, in the cache.

    A checkpoint of a user is its own folder, unless only its first layers are wanted.
    """
    from fastkernels.core.env import Environment

    if model.path and not model.layers:
        return Path(model.path)
    config = config_of(model)
    saved = model.weights == "saved" and kind == "text"
    content = [FORMAT, saved, config, *filter(None, (dict(model.files), dict(model.tokenizers)))]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(Environment.read().cache) / "models" / f"suite-{key}"
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / "model"
            if saved:
                _save(config, made)
            else:
                made.mkdir()
                for name, table in {**({"config.json": config} if config else {}), **model.files}.items():
                    (made / name).parent.mkdir(exist_ok=True)
                    (made / name).write_text(json.dumps(table))
            for name, given in model.tokenizers.items():
                _tokenizer(**({"longest": given} if type(given) is int else given)).save_pretrained(
                    made / name
                )
            made.chmod(0o755)  # the user of a cage reads it, too
            for file in made.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)
            os.replace(made, path)
    return path


def _tokenizer(
    longest: int, tokens: Mapping[str, int] | None = None, roles: Mapping[str, str] | None = None
) -> Any:
    """One token for each byte, without merges.

    tokens  {special token: its id}, such as placeholders of images
    roles   {name that a processor has for one: the special token}
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    symbols = [*named.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    special = dict(sorted((tokens or {}).items(), key=lambda pair: pair[1]))
    taken = {*special.values()}
    last = max(taken, default=0)
    vocabulary |= {f"<{i}>": i for i in range(len(symbols), last) if i not in taken} | special
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=named["unk_token"]))
    made.add_special_tokens(list(special))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=longest, **named, **(roles or {}))
    fast.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return fast


def config_of(model: Model) -> dict[str, Any]:
    if model.path:
        found = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        if isinstance(text := found.get("text_config"), dict):
            return {**found, "text_config": _cut(text, text, model.layers)}
        return _cut(found, found, model.layers)
    if not model.public:
        return dict(model.config)
    from fk_bench.e2e.model_configs import load_config

    _, config = load_config(model.public)
    known = config.to_dict()
    found = {**known, **model.config}
    if isinstance(text := found.get("text_config"), dict):
        return {**found, "text_config": _cut(text, text, model.layers)}
    return _cut(found, known, model.layers)


def _cut(found: dict[str, Any], known: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The fields of a config with at most so many layers; 0: all."""
    layers, before = found.get("num_hidden_layers"), known.get("num_hidden_layers")
    if most and layers:
        layers = min(layers, most)
        found = {**found, "num_hidden_layers": layers}
    if layers and before and layers < before:
        found = {k: _of_first(v, layers, before) for k, v in found.items()}
    return found


def _of_first(value: Any, layers: int, before: int) -> Any:
    """The entries of the first layers, of a list with one for each layer or a table by the layer's number."""
    if isinstance(value, list) and len(value) == before:
        return value[:layers]
    if isinstance(value, dict) and all(str(k).isdecimal() for k in value):
        return {k: v for k, v in value.items() if int(k) < layers}
    return value


def _save(config: dict[str, Any], path: Path) -> None:
    """Write a causal model. Matrices keep the scale of their inputs, so that every layer counts in the logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                std = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
                weight.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                weight.normal_(1.0, 0.1, generator=generator)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
