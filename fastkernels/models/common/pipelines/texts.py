"""Text encoders of pipelines: transformers' models and tokenizers, in the folders that diffusers gives them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastkernels.models.common.checkpoints.checkpoint import CheckpointError, some
from fastkernels.models.common.descriptions.description import Unsupported

CLASSES = ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel", "Qwen2_5_VLTextModel")
UNLIMITED = 1 << 31  # transformers gives a tokenizer without a length 10^30


@dataclass(frozen=True)
class Encoder:
    """A text encoder with its tokenizer. max_length: the tokens that every text is padded to.

    counter: a tokenizer for other threads, since a fast one keeps its padding between calls
    """

    model: Any
    tokenizer: Any
    max_length: int
    counter: Any

    def token_count(self, text: str) -> int:
        """Tokens of a text, the special ones included."""
        return len(self.counter(text, truncation=False, verbose=False).input_ids)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str], hidden_states: bool = False) -> Any:
        """transformers' output for texts that are cut and padded to max_length."""
        made = self.tokenizer(
            list(texts),
            padding="max_length",
            max_length=self.max_length,
            truncation=True,
            return_tensors="pt",
        )
        return self.model(made.input_ids.to(self.model.device), output_hidden_states=hidden_states)


def load(
    folder: Path, config: Any, suffix: str, device: torch.device, dtype: torch.dtype, max_length: int | None = None,
    random_seed: int | None = None,
) -> Encoder:  # fmt: skip
    """The encoder in the folders text_encoder and tokenizer with a suffix, '' or '_2'.

    max_length: the tokenizer's by default. random_seed: of random weights; None: the checkpoint's.
    Raises CheckpointError, and Unsupported for another class than CLASSES.
    """
    part = f"text_encoder{suffix}"
    if (name := config.classes.get(part)) not in CLASSES:
        raise Unsupported(f"{part}: the class {name!r} is not supported, only {', '.join(CLASSES)}")
    for needed in (part, f"tokenizer{suffix}"):
        if not (folder / needed).is_dir():
            raise CheckpointError(f"{folder} lacks the folder {needed}")
    import transformers
    from safetensors import SafetensorError

    cls = getattr(transformers, str(name))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder / f"tokenizer{suffix}", local_files_only=True, trust_remote_code=False
        )
        if random_seed is None:
            model, found = cls.from_pretrained(
                folder / part, dtype=dtype, local_files_only=True, output_loading_info=True
            )
            if missing := sorted(found["missing_keys"]):  # which would be random
                raise CheckpointError(
                    f"{folder / part} does not fit {name}: keys missing from it: {some(missing)}"
                )
        else:
            model = _random(cls, folder / part, dtype, device, random_seed)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        why = " ".join(str(error).split())
        raise CheckpointError(f"{folder / part} or its tokenizer cannot be used: {why}") from error
    if tokenizer.pad_token_id is None:
        raise CheckpointError(f"{folder / f'tokenizer{suffix}'} has no pad_token, and texts are padded")
    positions = getattr(model.config, "max_position_embeddings", None) or UNLIMITED
    longest = min(max_length or tokenizer.model_max_length, positions)
    if longest >= UNLIMITED:
        raise CheckpointError(
            f"{folder / f'tokenizer{suffix}'} has no model_max_length, and texts are padded to it"
        )
    model = model.to(device).eval().requires_grad_(False)
    if wrong := [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]:
        raise CheckpointError(f"{folder / part} is damaged: NaN or infinity in {some(wrong)}")
    return Encoder(model, tokenizer, longest, deepcopy(tokenizer))


def _random(cls: Any, folder: Path, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    made = cls.config_class.from_pretrained(folder, local_files_only=True)
    with torch.random.fork_rng(), device:
        torch.manual_seed(seed)
        return cls._from_config(made, dtype=dtype)
