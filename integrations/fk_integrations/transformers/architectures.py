"""The architectures of the installed transformers: one modeling file each, and the model that stands for it."""

from __future__ import annotations

import ast
import copy
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

# A file is judged by the first class that one of these mappings lists; see docs/coverage.md.
ORDER = (
    "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "RNNT",
    "TDT", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "MASKED_LM", "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "SEMANTIC_SEGMENTATION", "IMAGE_SEGMENTATION",
    "MASK_GENERATION", "DEPTH_ESTIMATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION",
    "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "IMAGE_TO_IMAGE", "TIME_SERIES_PREDICTION", "PRETRAINING", "",
    "BACKBONE",
)  # fmt: skip
LIBRARIES = ("torch", "transformers", "timm")  # whose modules are read

# Values for fields that are None in a default config, which then builds no model
_FILLED: dict[str, Any] = {
    "vocab_size": 32, "vocabulary_map": {"<image>": 1}, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64,
    "n_shared_experts": 1, "prediction_length": 8,
    "context_length": 8, "deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2",
}  # fmt: skip
# Values for fields that the parts of a default config lack altogether; callable: of the part
_ABSENT: dict[str, Any] = {
    "vocab_size": 32, "rope_theta": 1e4, "num_key_value_heads": lambda part: getattr(part, "num_attention_heads", 1),
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
}  # fmt: skip
_LAYERS = {
    "layer_types": "full_attention",
    "mlp_layer_types": "sparse",
}  # None in a default config: the kind of all


class External(Exception):
    """The architecture needs code outside transformers. The message says which."""


def files() -> list[str]:
    """All modeling files, as "folder/modeling_name.py", without the one of the auto classes."""
    root = _root()
    found = (file.relative_to(root).as_posix() for file in root.glob("*/modeling_*.py"))
    return sorted(file for file in found if not file.startswith("auto/"))


def _root() -> Path:
    import transformers

    return Path(transformers.__file__).parent / "models"


@cache
def _listed() -> tuple[str, ...]:
    """The class names of the mappings, in ORDER."""
    from transformers.models.auto import modeling_auto

    found: list[str] = []
    for name in ORDER:
        mapping = getattr(
            modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES" if name else "MODEL_MAPPING_NAMES", None
        )
        mapping = mapping or getattr(
            modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES".replace("_FOR_", "_"), {}
        )
        for value in mapping.values():
            found += [value] if isinstance(value, str) else list(value)
    return tuple(dict.fromkeys(found))


def classes(file: str) -> dict[str, type]:
    """{name: class} of the models that a file defines, in the file's order. Raises External."""
    from transformers import PreTrainedModel

    folder, _, stem = file.removesuffix(".py").partition("/")
    try:
        module: Any = importlib.import_module(f"transformers.models.{folder}.{stem}")
    except ImportError as error:
        raise External(str(error)) from error
    return {
        name: cls for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
    }  # fmt: skip


def candidates(file: str) -> list[type]:
    """The model classes that can stand for a file, the preferred one first. Raises External, LookupError."""
    found = classes(file)
    if not found:
        raise LookupError(f"{file} defines no model")
    return [found[name] for name in _listed() if name in found] or [list(found.values())[-1]]


def representative(file: str) -> tuple[type, Any]:
    """(class, model on the meta device) that a file is judged by: the first candidate that its config builds.

    The config is the default one or, if no class can be built from that, the one in the example of its docstring.
    Raises External, LookupError, and the first candidate's error if none builds.
    """
    failure: Exception | None = None
    for config_of in (default_config, documented_config):
        for cls in candidates(file):
            try:
                return cls, build(cls, config_of(cls))
            except External as error:
                failure = failure or error
                break
            except Exception as error:  # a config that does not fit its model
                failure = failure or error
    assert failure is not None
    raise failure


def build(cls: Any, config: Any = None) -> Any:
    """The model on the meta device, by default from its default config. Raises External."""
    if config is None:
        config = default_config(cls)
    try:
        try:
            model = _on_meta(cls, config)
        except (AttributeError, TypeError, ValueError):
            model = _with_fields(cls, _completed(config))
    except (OSError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and "huggingface.co" in str(error):
            raise External("its config names a model on the hub") from error
        raise
    except (ImportError, ModuleNotFoundError) as error:
        raise External(str(error).strip().splitlines()[0]) from error
    for module in model.modules():
        library = type(module).__module__.partition(".")[0]
        if library not in LIBRARIES:
            raise External(f"{type(module).__name__} of {library}")
    return model


def default_config(cls: Any) -> Any:
    """A new default config of a model class. Raises External."""
    kind = cls.config_class
    if kind is None or getattr(kind, "has_no_defaults_at_init", False):
        raise External("its config names the models that it wraps")
    try:
        with _timm_by_name():
            return kind()
    except ImportError as error:
        raise External(str(error).strip().splitlines()[0]) from error
    except OSError as error:
        raise External("its config names a model on the hub") from error


def documented_config(cls: Any) -> Any:
    """The config that the example in the docstring of a model's config class makes. Raises LookupError without one."""
    import torch

    kind = cls.config_class
    lines = (line.strip() for line in (getattr(kind, "__doc__", None) or "").splitlines())
    example = ast.parse("\n".join(line[4:] for line in lines if line.startswith((">>>", "..."))))
    space: dict[str, Any] = {}
    for statement in _Named(kind).visit(example).body:
        if "from_pretrained" in ast.unparse(statement):
            break
        code = ast.fix_missing_locations(ast.Module([statement], []))
        with torch.device("meta"):
            exec(compile(code, kind.__name__, "exec"), space)
        found = [value for value in space.values() if type(value) is kind]
        if found:
            return found[0]
    raise LookupError(f"the docstring of {kind.__name__} makes no config")


class _Named(ast.NodeTransformer):
    """Give the positional arguments of a config class the names of its own fields, which examples mean."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if ast.unparse(node.func) == self.kind.__name__:
            given = zip(vars(self.kind).get("__annotations__", {}), node.args, strict=False)
            node.keywords += [ast.keyword(name, value) for name, value in given]
            node.args = []
        return node


@contextmanager
def _timm_by_name() -> Iterator[None]:
    """Configs of timm's checkpoints on the hub from their names, which are those of timm's architectures."""
    from transformers import AutoConfig, TimmWrapperConfig

    before = AutoConfig.from_pretrained

    def made(name: Any, *args: Any, **more: Any) -> Any:
        timm = str(name).startswith("timm/")
        return TimmWrapperConfig(architecture=name[5:], **more) if timm else before(name, *args, **more)

    AutoConfig.from_pretrained = staticmethod(made)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        AutoConfig.from_pretrained = before  # type: ignore[method-assign]


def variants(model: Any) -> Iterator[Any]:
    """The model with two layers of one type, for each type of layer that its config can name and that builds."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    for kind in ALLOWED_LAYER_TYPES:
        config = copy.deepcopy(model.config)
        if not any(getattr(part, "layer_types", None) for part in parts(config)):
            config = _completed(config)
        typed = [part for part in parts(config) if getattr(part, "layer_types", None)]
        if not typed:
            return
        try:
            for part in typed:
                layers = min(2, len(part.layer_types))
                part.layer_types = [kind] * layers
                if isinstance(getattr(part, "num_hidden_layers", None), int):
                    part.num_hidden_layers = layers
            yield build(type(model), config)
        except Exception:  # a type of layer that the model does not have
            continue


@contextmanager
def _losses_need_no_library(cls: Any) -> Iterator[None]:
    """Let losses and matchers, which inference does not run, be built without scipy."""
    space = vars(sys.modules[cls.__module__])
    before = space.get("requires_backends")
    if before is None:
        yield
        return

    def check(owner: Any, backends: Any) -> None:
        if not type(owner).__name__.endswith(("Loss", "Matcher")):
            before(owner, backends)

    space["requires_backends"] = check
    try:
        yield
    finally:
        space["requires_backends"] = before


def _on_meta(cls: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"), torch.no_grad(), _losses_need_no_library(cls):
        return cls._from_config(config)


def needs(config: Any, architecture: str) -> dict[str, list[str]] | None:
    """{primitive or difference: classes} of the modules that no op is known to compute; None if it cannot be built."""
    import transformers

    from fk_integrations.transformers.matching import match  # imports torch

    cls = getattr(transformers, architecture, None)
    if cls is None:
        return None
    try:
        model = build(cls, copy.deepcopy(config))
    except Exception:  # of a config that transformers cannot use: the caller reports the architecture alone
        return None
    found: dict[str, list[str]] = {}
    for module in model.modules():
        matched, name = match(module), type(module).__name__
        if not matched.strict and name not in found.setdefault(matched.needs or matched.op, []):
            found[matched.needs or matched.op].append(name)
    return dict(sorted(found.items()))


def _with_fields(cls: Any, config: Any) -> Any:
    """The model on the meta device, with values for known fields that its config lacks."""
    for _ in range(len(_ABSENT)):
        try:
            return _on_meta(cls, config)
        except AttributeError as error:
            name = str(error).rpartition("has no attribute ")[2].strip("'")
            lacking = [part for part in parts(config) if name in _ABSENT and not hasattr(part, name)]
            if not lacking:
                raise
            value = _ABSENT[name]
            for part in lacking:
                setattr(part, name, value(part) if callable(value) else value)
    return _on_meta(cls, config)


def parts(config: Any) -> list[Any]:
    """A config and the configs in its fields."""
    return [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]


def _completed(config: Any) -> Any:
    """The config with what some defaults lack: a vocabulary, and heads that divide the hidden size."""
    for part in parts(config):
        hidden, heads = getattr(part, "hidden_size", None), getattr(part, "num_attention_heads", None)
        for name, kind in _LAYERS.items():
            if getattr(part, name, 0) is None and isinstance(getattr(part, "num_hidden_layers", None), int):
                setattr(part, name, [kind] * part.num_hidden_layers)
        for name, value in list(vars(part).items()):
            if isinstance(value, tuple) and not name.startswith("_"):
                setattr(part, name, list(value))
        if isinstance(hidden, int) and isinstance(heads, int):
            if hidden % heads:
                heads = part.num_attention_heads = next(n for n in (16, 12, 8, 4, 2, 1) if hidden % n == 0)
            if vars(part).get("head_dim", 0) is None:
                part.head_dim = hidden // heads
        for name, value in _FILLED.items():
            if getattr(part, name, 0) is None:
                setattr(part, name, value)
        for name, kind in part.sub_configs.items():
            if getattr(part, name, 0) is None and hasattr(kind, "to_dict"):
                setattr(part, name, kind())
    return config
