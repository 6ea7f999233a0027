"""Small copies of a language model of transformers: the same classes and options with random weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from fk_integrations.transformers import architectures

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "sliding_window": 5, "rotary_dim": 8, "ffn_hidden_size": 80, "ffn_dim": 80,
    "word_embed_proj_dim": 64, "num_kv_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "state_size": 12, "time_step_rank": 6, "mamba_d_state": 12, "mamba_dt_rank": 6, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "block_multiple_of": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 12,
    "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
LAYERS = 6  # enough for the patterns of layers that models have
POSITIONS = 4096
MOST_PARAMETERS = 1 << 26  # of a small copy: 256 MiB in float32
LAYER_TYPES = ("full_attention", "sliding_attention")


class NoReference(ValueError):
    """transformers has no language model for a config; the message says why."""


def quiet() -> None:
    """Keep transformers' warnings about small configs, and its progress bars, out of a command's output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def read(source: str | Path) -> Any:
    """The config of a folder with config.json, of such a file, of a model type ('qwen2'), or of a hub id.

    Raises NoReference, also for a config that needs remote code: such code is never run.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    path = Path(source).expanduser()
    path = path.parent if path.is_file() else path
    if path.is_dir() and not (path / "config.json").is_file():
        raise NoReference(f"{path} has no config.json")
    where = path if path.is_dir() else str(source)
    is_type = not path.is_dir() and str(source) in CONFIG_MAPPING
    if not (path.is_dir() or is_type) and str(source).count("/") != 1:
        raise NoReference(
            f"{source!r} is neither a folder with config.json, nor a hub id OWNER/NAME, nor a model type that"
            f" transformers knows"
        )
    try:
        if is_type:
            return _named(AutoConfig.for_model(str(source)))
        from transformers import PreTrainedConfig

        raw, _ = PreTrainedConfig.get_config_dict(where, local_files_only=path.is_dir())
        if raw.get("model_type") not in CONFIG_MAPPING:
            needs = "needs remote code (auto_map), which is not run" if raw.get("auto_map") else ""
            raise NoReference(
                f"{source}: transformers has no model type {raw.get('model_type')!r}"
                + (f"; the checkpoint {needs}" if needs else "")
            )
        return _named(AutoConfig.from_pretrained(where, local_files_only=path.is_dir()))
    except (
        OSError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, StrictDataclassError,
    ) as error:  # fmt: skip
        if isinstance(error, NoReference):
            raise
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise NoReference(f"{source}: the config cannot be used: {' '.join(lines[:2])}") from error


def _named(config: Any) -> Any:
    """The config with its architecture; without one, that of the model type's causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not getattr(config, "architectures", None):
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if name is None:
            raise NoReference(
                f"model type {config.model_type!r} has no causal language model in transformers: the scaffold"
                f" writes decoder-only language models"
            )
        config.architectures = [name]
    return config


def reference_class(config: Any) -> Any:
    """The class of transformers for the config's first architecture. Raises NoReference."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = config.architectures[0]
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise NoReference(
            f"architecture {name!r} is not a causal language model of transformers"
            f" {transformers.__version__}: the scaffold writes decoder-only language models"
        )
    return getattr(transformers, name)


def fields(config: Any) -> dict[str, Any]:
    """The fields that describe the model, without those that every config has."""
    general = _general()
    return {name: value for name, value in config.to_dict().items() if name not in general}


@cache
def _general() -> frozenset[str]:
    from transformers import PreTrainedConfig

    return frozenset(PreTrainedConfig().to_dict()) | {"auto_map", "use_cache", "is_decoder"}


def declared(config: Any) -> set[str]:
    """The names of the fields that every config of this class has, without those that this config has in addition."""
    try:
        return set(fields(type(config)()))
    except Exception:  # each config class checks in its own way
        return set(fields(config))


def changed(config: Any, **values: Any) -> Any:
    """A copy of the config with other values. Raises what the config's class raises for values that do not fit."""
    made = type(config)(**{**fields(config), **values})
    made.architectures = config.architectures
    return made


def shrunk(config: Any) -> Any:
    """The config with small sizes; options, per-layer patterns and multipliers stay. Raises NoReference."""
    found, names = fields(config), getattr(config, "attribute_map", {})
    layers_name = names.get("num_hidden_layers", "num_hidden_layers")
    total = found.get(layers_name, getattr(config, layers_name, None))
    if not isinstance(total, int) or total < 1:
        raise NoReference(
            f"config.num_hidden_layers={total!r}: the number of layers must be at least 1{_part(config)}"
        )
    layers = min(total, LAYERS)
    small: dict[str, Any] = {}
    for name, size in SIZES.items():
        if isinstance(found.get(names.get(name, name)), int):
            small[names.get(name, name)] = size
    small[layers_name] = layers
    positions = names.get("max_position_embeddings", "max_position_embeddings")
    if isinstance(found.get(positions), int):
        small[positions] = min(found[positions], POSITIONS)
    for name, value in found.items():
        if isinstance(value, (list, tuple)) and len(value) == total:
            small[name] = list(value)[:layers]
    if isinstance(found.get("rope_parameters"), dict):
        small["rope_parameters"] = _shorter(found["rope_parameters"])
    try:
        return changed(config, **small)
    except Exception as error:  # each config class checks in its own way
        for other in _fitting(config, small):
            return other
        raise NoReference(f"the config cannot be made small: {' '.join(str(error).split())[:300]}") from error


def _fitting(config: Any, small: dict[str, Any]) -> Iterator[Any]:
    """Configs with these sizes and one more that the class then accepts, such as Mamba-2's number of heads."""
    for name, value in fields(config).items():
        if name in small or type(value) is not int or value < 2:
            continue
        for other in range(1, min(value, SIZES["hidden_size"]) + 1):
            with suppress(Exception):  # each config class checks in its own way
                yield changed(config, **small, **{name: other})


def _part(config: Any) -> str:
    """Where the language model of a config of several models is, for a message."""
    text = config.get_text_config(decoder=True)
    kind = getattr(text, "model_type", "")
    return "" if text is config else f"; its language model is {kind!r}, which the scaffold takes on its own"


def check_size(config: Any) -> None:
    """Raise NoReference if the model of a small config is not small: `shrunk` keeps the configs of its parts."""
    made = copy.deepcopy(config)
    parameters = sum(p.numel() for p in architectures.build(reference_class(made), made).parameters())
    if parameters > MOST_PARAMETERS:
        raise NoReference(
            f"the config cannot be made small: with small sizes {config.architectures[0]} still has {parameters:,}"
            f" parameters{_part(config)}"
        )


def completed(config: Any) -> Any:
    """The small config with sizes that it leaves to its class, for classes that then cannot build their own default."""
    open_sizes = [n for n in ("head_dim", "num_key_value_heads") if fields(config).get(n, 0) is None]
    return changed(config, **{name: SIZES[name] for name in open_sizes})


def _shorter(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose factors for each frequency fit the small head."""
    rotated = int(SIZES["head_dim"] * (rope.get("partial_rotary_factor") or 1.0)) // 2
    return {
        k: v[:rotated] if isinstance(v, list) else _shorter(v) if isinstance(v, dict) else v
        for k, v in rope.items()
    }


def build(config: Any, seed: int = 0) -> Any:
    """The reference model of a config with random float32 weights of a known spread, in eval mode."""
    model = reference_class(config)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = parameter.dim() > 1 or name.endswith("bias")
            parameter.normal_(0.0 if plain else 1.0, 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of routers; others are tables
                buffer.normal_(0.0, 0.2, generator=generator)
    return model.eval().requires_grad_(False)


TRAINING = ("aux_loss", "z_loss", "jitter", "initializer", "pretraining_tp", "output_", "loss_coef")
# How a recurrence is computed, its first weights, and the dtype of the residual stream of a float32 model
RECURRENCES = (
    "chunk_size",
    "mambapy",
    "associative_scan",
    "mamba_kernels",
    "time_step_",
    "prenorm",
    "residual_in_fp32",
)


def fields_read(config: Any) -> set[str]:
    """The fields that the reference model of a small config reads when it is built and run, but for those that never
    change a result: of training, and of how a recurrence is computed."""
    made, read = copy.deepcopy(config), set[str]()
    own = type(made)

    class Recorded(own):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    made.__class__ = Recorded
    try:
        model = build(made)
        with torch.inference_mode():
            model(input_ids=torch.arange(1, 9)[None], use_cache=False)
    except (
        Exception
    ):  # a class that does not accept the recorder, or needs other inputs: no field is known to be read
        return set()
    names = getattr(config, "attribute_map", {})
    return {
        names.get(name, name) for name in read if not any(part in name for part in (*TRAINING, *RECURRENCES))
    }


def checkpoint_names(model: Any) -> dict[str, str]:
    """{tensor: its key in a checkpoint} of a random model, for parameters and buffers that are stored as they are.

    Stacks of experts that are stored as matrices have entries of the first: STACK.0, or STACK.0.gate and STACK.0.up.
    Convolutions that are stored in pieces have entries CONV.0, CONV.1 and so on.
    """
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    found = {}
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        equal = (k for k, t in stored.items() if t.shape == parameter.shape and torch.equal(t, parameter))
        key = name if name in stored else next(equal, "")
        if key:
            found[name] = key
        elif parameter.dim() == 3 and parameter.shape[1] == 1:
            found |= {f"{name}.{i}": key for i, key in enumerate(_pieces(parameter, stored))}
        elif parameter.dim() == 3:  # of all experts, where the checkpoint has matrices of each
            first = parameter[0]
            gate, up = first.chunk(2)
            for part, one in (("", first), (".gate", gate), (".up", up)):
                same = (k for k, t in stored.items() if t.shape == one.shape and torch.equal(t, one))
                if key := next(same, ""):
                    found[f"{name}.0{part}"] = key
    return found


def _pieces(tensor: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> list[str]:
    """The keys of the tensors whose rows are those of this one, one after the other; [] if there are none."""
    keys: list[str] = []
    rest = tensor
    while len(rest):
        fits = (
            k for k, t in stored.items() if t.shape[1:] == rest.shape[1:] and torch.equal(t, rest[: len(t)])
        )
        key = next(fits, "")
        if not key:
            return []
        keys.append(key)
        rest = rest[len(stored[key]) :]
    return keys


def perturbations(config: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(field, changes to try in turn) for each field of a small config that could change what is computed."""
    for name, value in fields(config).items():
        if name.endswith("token_id") or "dropout" in name or name in ("initializer_range", "rope_parameters"):
            continue
        if isinstance(value, float):
            yield name, [{name: None}]
        if name == "sliding_window" and value is not None:
            types = fields(config).get("layer_types")
            yield name, [{name: None, **({"layer_types": ["full_attention"] * len(types)} if types else {})}]
        changes = [{name: other} for other in _others(value)]
        used = name.removeprefix("use_")
        if value is False and used != name and fields(config).get(used, 0) is None:
            changes.insert(0, {name: True, used: 3})  # neither field alone changes anything
        if name == "topk_group" and "n_group" in fields(config):
            changes.insert(0, {name: 2, "n_group": 3})  # two of one group are no choice
        adapted = (_with_head, with_all_keys, _with_another)
        more = (change for c in changes for of in adapted for change in of(config, c))
        yield name, [*changes, *more]


def _others(value: Any) -> Iterator[Any]:
    """Other values that a field with this one may have."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (other for other in (2 * value, value // 2, value + 1, value - 1) if other != value)
    elif isinstance(value, float):
        yield from (value * 0.5 or 0.25, value * 1.5 or 1.0, 1.0)
    elif value is None:
        yield from (3, 0.5, True)
    elif isinstance(value, (list, tuple)):
        yield from _flipped(list(value)) if value else [[0]]
    elif value in _activations():
        yield from (a for a in _activations() if a != value)


def _with_head(config: Any, change: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The change together with the head's size that then divides the hidden size."""
    names = getattr(config, "attribute_map", {})
    hidden, heads = (names.get(n, n) for n in ("hidden_size", "num_attention_heads"))
    made = {**fields(config), **change}
    if set(change) & {hidden, heads} and isinstance(made.get("head_dim"), int) and made.get(heads):
        yield {**change, "head_dim": made[hidden] // made[heads]}


def with_all_keys(config: Any, change: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The change of a flag together with as many key heads as query heads, which some layouts need."""
    names = getattr(config, "attribute_map", {})
    heads, found = names.get("num_attention_heads", "num_attention_heads"), fields(config)
    keys = [names.get(name, name) for name in ("num_key_value_heads", "num_kv_heads")]
    more = {name: found[heads] for name in keys if name in found and name not in change}
    if more and all(isinstance(v, bool) for v in change.values()):
        yield {**change, **more}


def _with_another(config: Any, change: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The change of a size that the config's class refuses alone, with another size twice or half as large."""
    if not all(type(value) is int for value in change.values()) or _accepted(config, change):
        return
    for name, value in fields(config).items():
        if name in change or type(value) is not int or name.endswith("token_id"):
            continue
        for other in (2 * value, value // 2):
            if other not in (0, value) and _accepted(config, made := {**change, name: other}):
                yield made


def _accepted(config: Any, change: dict[str, Any]) -> bool:
    try:
        changed(config, **change)
    except Exception:  # each config class checks in its own way
        return False
    return True


def _activations() -> tuple[str, ...]:
    from fastkernels.models.common.descriptions.activations import NAMES

    return tuple(NAMES)


def _flipped(values: list[Any]) -> Iterator[list[Any]]:
    """The list with another first, and another last entry."""
    if all(isinstance(v, float) for v in values):
        yield from _other_numbers(values)
        return
    known: tuple[Any, ...] = (0, 1) if all(v in (0, 1) for v in values) else ()
    if all(isinstance(v, str) for v in values):
        known = tuple(dict.fromkeys((*(LAYER_TYPES if values[0] in LAYER_TYPES else ()), *values)))
    for at in (0, -1):
        others = [v for v in known if v != values[at]]
        if others:
            made = list(values)
            made[at] = others[0]
            yield made


def _other_numbers(values: list[float]) -> Iterator[list[float]]:
    """The list with each number changed in turn; limits of a range stay in order."""
    for at, value in enumerate(values):
        made = list(values)
        made[at] = (
            0.75 * value + 0.25
            if isfinite(value)
            else max((v for v in values if isfinite(v)), default=0.0) + 1.0
        )
        yield made
