"""Pi0 (Black et al., arXiv 2410.24164): actions from images, a prompt and the robot's state, by flow matching.

The interface is that of interfaces/policy.py. Images and prompt pass PaliGemma once, and each of its layers keeps their
keys and values. The state's token attends to these and to itself only, and reads no noise: it passes the action expert
once, too. A denoising step then computes the tokens of the actions alone, which attend to everything: no mask.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.activations import NAMES
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.policy import Observation, check_fields, numbers
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers.encoder import size_of
from fastkernels.models.vision.siglip_vision import SiglipVisionModel
from fastkernels.overrides.dense_attention.attention_dense import attention_dense
from fastkernels.overrides.embedding.vllm import VllmVocabParallelEmbedding
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.vllm import (
    VllmMergedColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmReplicatedLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.vllm import VllmGemmaRMSNorm
from fastkernels.overrides.rope.rope_tables import cos_sin_table, inverse_frequencies
from fastkernels.overrides.rope.rotary_emb import rotary_emb

FIELDS = ("images", "state", "prompt")
STATISTICS = ("state_mean", "state_std", "actions_mean", "actions_std")


class GemmaAttention(nn.Module):
    """The products of Gemma's attention. Keys and values are kept by the caller, in one tensor."""

    ops = ("rotary_emb", "attention_dense")

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.heads, self.kv_heads = (
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
        )  # fmt: skip
        self.head_dim, bias = config.head_dim, config.attention_bias
        self.qkv_proj = VllmQKVParallelLinear(
            hidden, self.head_dim, self.heads, self.kv_heads, bias=bias, return_bias=False
        )
        self.o_proj = VllmRowParallelLinear(self.heads * self.head_dim, hidden, bias=bias, return_bias=False)

    def project(
        self, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] to queries [T, heads, D], and keys and values [T, 2 * kv_heads, D]."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        q, kv = qkv[:, : self.heads], qkv[:, self.heads :]
        rotary_emb(positions, q, kv[:, : self.kv_heads], self.head_dim, table, True)
        return q, kv

    def attend(self, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """q [B * T, heads, D]; kv [B, S, 2 * kv_heads, D]; mask [B, 1, 1, S] or None. Returns [B * T, hidden]."""
        k, v = kv[:, :, : self.kv_heads], kv[:, :, self.kv_heads :]
        if mask is not None and self.kv_heads == 1:
            # Heads become rows, for which the mask is the same: PyTorch's fast kernels take no mask with grouped heads.
            q = q.reshape(len(kv), -1, 1, self.head_dim)
        else:
            q = q.unflatten(0, (len(kv), -1))
        found = attention_dense(q, k, v, self.head_dim**-0.5, mask)
        return self.o_proj(found.view(-1, self.heads * self.head_dim))


class GemmaMLP(nn.Module):
    """Gated projections: x [T, hidden] to the same."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.hidden_act not in NAMES:
            raise Unsupported(f"config.hidden_act={config.hidden_act!r} is not one of {', '.join(NAMES)}")
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = VllmMergedColumnParallelLinear(hidden, [inner] * 2, bias=False, return_bias=False)
        self.act_fn = activation_modules.make(NAMES[config.hidden_act], gated=True)
        self.down_proj = VllmRowParallelLinear(inner, hidden, bias=False, return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class GemmaLayer(nn.Module):
    """One layer. The residual stream is overwritten; `branch` is what the layer before adds to it, or None."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = VllmGemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GemmaAttention(config)
        self.post_attention_layernorm = VllmGemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GemmaMLP(config)

    def project(
        self,
        branch: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and keys and values, of residual + branch; see GemmaAttention."""
        x = added(self.input_layernorm, branch, residual)
        return self.self_attn.project(x, positions, table)

    def finish(
        self, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """The branch that the next layer adds to the stream, to which this one's attention has been added."""
        branch = self.self_attn.attend(q, kv, mask)
        return self.mlp(added(self.post_attention_layernorm, branch, residual))


def added(norm: nn.Module, branch: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """The norm of residual + branch, which the residual becomes."""
    return norm(residual) if branch is None else norm(branch, residual)[0]


class GemmaModel(nn.Module):
    """Layers of Gemma. embeds: whether it has an embedding of tokens; normed: whether its last norm is used."""

    def __init__(self, config: Any, embeds: bool, normed: bool) -> None:
        super().__init__()
        if embeds:
            self.embed_tokens = VllmVocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers: Any = nn.ModuleList(GemmaLayer(config) for _ in range(config.num_hidden_layers))
        if normed:
            self.norm = VllmGemmaRMSNorm(config.hidden_size, config.rms_norm_eps)


class PaliGemmaModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower = SiglipVisionModel(_headless(config.vision_config))
        self.multi_modal_projector: Any = nn.Module()
        self.multi_modal_projector.linear = VllmReplicatedLinear(
            config.vision_config.hidden_size, config.projection_dim, return_bias=False
        )
        self.language_model = GemmaModel(config.text_config, embeds=True, normed=False)


def _headless(config: Any) -> Any:
    """The fields of a vision config without the pooling head, which policies do not use."""
    return SimpleNamespace(**{**config.to_dict(), "vision_use_head": False})


class PI0ForConditionalGeneration(nn.Module):
    """config: transformers.PI0Config. Raises Unsupported."""

    keeps_dtype = False
    most_images = 16  # of an observation

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check(config)
        self.config = config
        text, expert = config.vlm_config.text_config, config.dit_config
        self.vlm = PaliGemmaModel(config.vlm_config)
        self.dit = GemmaModel(expert, embeds=False, normed=True)
        size = expert.hidden_size
        self.state_proj = VllmReplicatedLinear(config.max_state_dim, size, return_bias=False)
        self.action_in_proj = VllmReplicatedLinear(config.max_action_dim, size, return_bias=False)
        self.action_time_mlp_in = VllmReplicatedLinear(2 * size, size, return_bias=False)
        self.action_time_mlp_out = VllmReplicatedLinear(size, size, return_bias=False)
        self.action_out_proj = VllmReplicatedLinear(size, config.max_action_dim, return_bias=False)
        self.chunk = (config.chunk_size, config.max_action_dim)
        self.num_actions, self.num_steps = config.chunk_size, config.num_inference_steps
        vision = config.vlm_config.vision_config
        self.patch, self.side = size_of(vision, "patch_size"), size_of(vision, "image_size")
        self.image_tokens = (self.side // self.patch) ** 2
        self.longest = text.max_position_embeddings - 1 - config.chunk_size
        self.embed_scale = text.hidden_size**0.5
        self.statistics: dict[str, np.ndarray] = {}

    def ready(self, folder: Path, dummy: bool) -> None:
        """See policy.py. The statistics of states and actions are in processor_config.json, where there are any."""
        self._folder = folder
        self.statistics = {} if dummy else _statistics(folder)
        if self.statistics:
            self._check_statistics(folder)
            self.chunk = (self.chunk[0], len(self.statistics["actions_mean"]))
        device = self.action_in_proj.weight.device
        self._units = [
            torch.from_numpy(self.statistics[name]).to(device) for name in STATISTICS[2:] if self.statistics
        ]
        self.refresh()

    def _check_statistics(self, folder: Path) -> None:
        config = self.config
        sizes = {name: len(self.statistics[name]) for name in STATISTICS}
        for name, most in (("state", config.max_state_dim), ("actions", config.max_action_dim)):
            if sizes[f"{name}_mean"] != sizes[f"{name}_std"] or not 0 < sizes[f"{name}_mean"] <= most:
                raise CheckpointError(
                    f"{folder}: {name}_mean and {name}_std of the processor must have one length up to {most}, got"
                    f" {sizes[f'{name}_mean']} and {sizes[f'{name}_std']}"
                )

    def refresh(self) -> None:
        """See policy.py: tables of rotations, and the parts of a weight that is multiplied in two parts."""
        size, weight = self.config.dit_config.hidden_size, self.action_time_mlp_in.weight
        self._of_action, self._of_time = (part.contiguous() for part in weight.split(size, dim=1))
        self.tables, self._waves = [], dict[Any, torch.Tensor]()
        for config in (self.config.vlm_config.text_config, self.config.dit_config):
            inverse = inverse_frequencies(config.rope_parameters["rope_theta"], config.head_dim)
            table = cos_sin_table(inverse, config.max_position_embeddings)
            self.tables.append(table.to(weight.device))

    @cached_property
    def image_processor(self) -> Any:
        """The checkpoint's image processor, transformers' default for Pi0 if it has none. Raises CheckpointError."""
        try:
            from transformers import AutoImageProcessor
            from transformers.models.pi0.image_processing_pi0 import PI0ImageProcessor

            if (self._folder / "preprocessor_config.json").is_file() or _processor_of(self._folder).get(
                "image_processor"
            ):
                return AutoImageProcessor.from_pretrained(
                    self._folder, local_files_only=True, trust_remote_code=False
                )
            sides = {"height": self.side, "width": self.side}
            return PI0ImageProcessor(size={"max_height": self.side, "max_width": self.side}, pad_size=sides)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointError(
                f"the image processor of {self._folder} (preprocessor_config.json) cannot be used; it may need the"
                f" packages pillow and torchvision (pip install 'fastkernels[images]'): {' '.join(str(error).split())}"
            ) from error

    def prompt_text(self, prompt: str, bos: str) -> str:
        """The text whose tokens, without special ones, follow the images."""
        return f"{bos}{prompt}\n"

    def read(self, given: Any) -> Observation:
        """See policy.py. given: {"images": RGB PIL images, "state": [numbers], "prompt": token ids}."""
        check_fields(given, FIELDS)
        images = given.get("images")
        if not isinstance(images, (list, tuple)) or not images:
            raise ValueError(f"the input needs `images`, at least one of them, got {reprlib.repr(images)}")
        ids = given.get("prompt") or []
        vocabulary = self.config.vlm_config.text_config.vocab_size
        wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
        if wrong is not None:
            raise ValueError(
                f"the input has the token id {reprlib.repr(wrong)} in `prompt`: ids are from 0 to {vocabulary - 1}"
            )
        size = len(images) * self.image_tokens + len(ids)
        if size > self.longest:
            raise ValueError(
                f"the input has {size} tokens, {self.image_tokens} for each image, and at most {self.longest} are"
                " allowed by the model"
            )
        arrays = {
            "pixels": self._pixels(images),
            "ids": np.array(ids, np.int64),
            "state": self._state(given.get("state")),
        }
        return Observation(arrays, size, (len(images),))

    def _state(self, given: Any) -> np.ndarray:
        most = self.config.max_state_dim
        own = len(self.statistics["state_mean"]) if self.statistics else None
        if given is None:
            raise ValueError(f"the input needs `state`, a list of {own or f'up to {most}'} numbers")
        state = numbers(given, "state", (own,), f"a list of {own or f'up to {most}'} numbers")
        if len(state) > most:
            raise ValueError(
                f"the input has {len(state)} numbers in `state`, and the model takes up to {most}"
            )
        if self.statistics:
            mean, std = self.statistics["state_mean"], self.statistics["state_std"]
            with np.errstate(over="ignore"):
                state = (state - mean) / (std + np.float32(1e-8))
            if not np.isfinite(state).all():
                raise ValueError(
                    "the input has numbers in `state` that are too far from the model's statistics"
                )
        return np.pad(state, (0, most - len(state)))

    def _pixels(self, images: Sequence[Any]) -> np.ndarray:
        """[images, 3, side, side] float32."""
        try:
            found = self.image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise ValueError(
                f"the input has images of {sizes} pixels that cannot be processed: {error}"
            ) from error
        if tuple(found.shape[1:]) != (3, self.side, self.side):
            raise ValueError(
                f"the input has images that the checkpoint's processor makes {list(found.shape[1:])} of: this model"
                f" takes {[3, self.side, self.side]}; set `size` and `pad_size` in preprocessor_config.json"
            )
        return found.float().numpy()

    def check_steps(self, steps: int) -> None:
        """See policy.py: any number is possible."""

    def noise(self, seed: int, steps: int) -> np.ndarray:
        """See policy.py."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.config.chunk_size, self.config.max_action_dim, generator=generator).numpy()

    def stack(self, observations: Sequence[Observation]) -> dict[str, np.ndarray]:
        """See policy.py. Prompts are padded only where lengths differ; `lengths` says so, as it is there."""
        rows = [o.arrays for o in observations]
        lengths = np.array([len(row["ids"]) for row in rows])
        made = {name: np.stack([row[name] for row in rows]) for name in ("pixels", "state")}
        padded = int(lengths.max())
        if lengths.min() != padded:
            padded = -(-padded // 16) * 16  # fewer shapes, so fewer graphs
            made["lengths"] = lengths + len(rows[0]["pixels"]) * self.image_tokens
        made["ids"] = np.stack([np.pad(row["ids"], (0, padded - len(row["ids"]))) for row in rows])
        return made

    def forward(
        self, steps: int, noise: torch.Tensor, pixels: torch.Tensor, state: torch.Tensor, ids: torch.Tensor,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """noise [B, chunk, actions]; pixels [B, cameras, 3, side, side]; state [B, max_state_dim]; ids [B, tokens].

        lengths: [B], valid tokens of each row with those of its images; None: all. Returns [B, *self.chunk] in float32.
        """
        dtype = self.action_in_proj.weight.dtype
        prefix = self.embed_prefix(pixels.to(dtype), ids)
        cache = self.fill_cache(prefix, lengths)
        self.add_state(cache, state.to(dtype), prefix.shape[1], lengths)
        x = noise.float()
        times = self.time_vectors(steps, dtype)
        for step in range(steps):
            velocity = self.velocity(cache, x.to(dtype), times[step], prefix.shape[1], lengths)
            x = x.add(velocity, alpha=-1.0 / steps)
        return self._own_units(x)

    def embed_prefix(self, pixels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[B, cameras * image_tokens + tokens, hidden]: images, then the prompt."""
        batch, cameras, side, p = *pixels.shape[:2], self.side // self.patch, self.patch
        count, tokens = batch * cameras, self.image_tokens
        patches = (
            pixels.reshape(count, 3, side, p, side, p).permute(0, 2, 4, 1, 3, 5).reshape(count * tokens, -1)
        )
        starts = torch.arange(0, (count + 1) * tokens, tokens, dtype=torch.int32, device=pixels.device)
        metadata = AttentionMetadata(
            slot_mapping=starts.new_empty(0), cu_seqlens_q=starts, seq_lens=starts.diff(),
            block_table=starts.new_empty(count, 0), max_seqlen_q=tokens, max_seqlen_k=tokens, padded=False,
        )  # fmt: skip
        with forward_context(metadata):
            seen = self.vlm.vision_tower(patches, [(side, side)] * count)
        images = self.vlm.multi_modal_projector.linear(seen).view(batch, cameras * tokens, -1)
        scale = torch.tensor(self.embed_scale, dtype=images.dtype).item()  # rounded, as transformers' buffer
        return torch.cat((images, self.vlm.language_model.embed_tokens(ids) * scale), dim=1)

    def fill_cache(self, prefix: torch.Tensor, lengths: torch.Tensor | None) -> list[torch.Tensor]:
        """Keys and values of each layer [B, prefix + 1 + chunk, 2 * kv_heads, D], filled for the prefix."""
        batch, length, _ = prefix.shape
        config, layers = self.config.vlm_config.text_config, self.vlm.language_model.layers
        total = length + 1 + self.config.chunk_size
        positions = torch.arange(length, device=prefix.device).repeat(batch)
        mask = None if lengths is None else _seen(length, length, lengths)
        residual, branch, cache = prefix.flatten(0, 1), None, []
        for i, layer in enumerate(layers):
            q, kv = layer.project(branch, residual, positions, self.tables[0])
            kept = prefix.new_empty(batch, total, 2 * config.num_key_value_heads, config.head_dim)
            kept[:, :length] = kv.unflatten(0, (batch, length))
            cache.append(kept)
            if i + 1 < len(layers):  # nothing reads what the last layer adds
                branch = layer.finish(q, kept[:, :length], mask, residual)
        return cache

    def add_state(
        self, cache: Sequence[torch.Tensor], state: torch.Tensor, length: int, lengths: torch.Tensor | None
    ) -> None:
        """Write keys and values of the state's token, which attends to the prefix and to itself."""
        mask = None if lengths is None else _seen(length + 1, length, lengths)
        positions = torch.full_like(state[:, 0], length, dtype=torch.int64) if lengths is None else lengths
        residual, branch = self.state_proj(state), None
        for i, (layer, kept) in enumerate(zip(self.dit.layers, cache, strict=True)):
            q, kv = layer.project(branch, residual, positions, self.tables[1])
            kept[:, length] = kv
            if i + 1 < len(cache):
                branch = layer.finish(q, kept[:, : length + 1], mask, residual)

    def time_vectors(self, steps: int, dtype: torch.dtype) -> torch.Tensor:
        """[steps, hidden]: what the time of each step adds within the first layer of the action-time MLP."""
        if (steps, dtype) not in self._waves:  # once, outside of graphs
            self._waves[steps, dtype] = self._embed_times(steps).to(self._of_time.device, dtype)
        return linear(self._waves[steps, dtype], self._of_time, self.action_time_mlp_in.bias)

    def _embed_times(self, steps: int) -> torch.Tensor:
        config = self.config
        times = torch.tensor([1.0 - step / steps for step in range(steps)], dtype=torch.float32)
        fraction = torch.linspace(0.0, 1.0, config.dit_config.hidden_size // 2)
        period = config.min_period * (config.max_period / config.min_period) ** fraction
        angles = times[:, None] * (1.0 / period * 2 * torch.pi)
        return torch.cat((angles.sin(), angles.cos()), dim=1)

    def velocity(
        self, cache: Sequence[torch.Tensor], x: torch.Tensor, time: torch.Tensor, length: int,
        lengths: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """The velocity [B, chunk, actions] of noisy actions x; writes their keys and values behind the state's."""
        batch, chunk, _ = x.shape
        mask = None if lengths is None else _seen(cache[0].shape[1], length, lengths)
        own = torch.arange(1, chunk + 1, device=x.device)
        positions = (own + length).repeat(batch) if lengths is None else (lengths[:, None] + own).flatten()
        inner = linear(self.action_in_proj(x.flatten(0, 1)), self._of_action, time)
        residual, branch = self.action_time_mlp_out(nn.functional.silu(inner)), None
        for layer, kept in zip(self.dit.layers, cache, strict=True):
            q, kv = layer.project(branch, residual, positions, self.tables[1])
            kept[:, length + 1 :] = kv.unflatten(0, (batch, chunk))
            branch = layer.finish(q, kept, mask, residual)
        return self.action_out_proj(added(self.dit.norm, branch, residual)).view(batch, chunk, -1)

    def _own_units(self, x: torch.Tensor) -> torch.Tensor:
        if not self._units:
            return x
        mean, std = self._units
        return x[:, :, : len(mean)] * (std + 1e-8) + mean


def _seen(total: int, length: int, lengths: torch.Tensor) -> torch.Tensor:
    """[B, 1, 1, total] bool: all keys but those of the prefix's padding."""
    keys = torch.arange(total, device=lengths.device)
    return ((keys >= length) | (keys < lengths[:, None]))[:, None, None]


def _check(config: Any) -> None:
    text, expert = config.vlm_config.text_config, config.dit_config
    for name, one in (("vlm_config.text_config", text), ("dit_config", expert)):
        if one.model_type != "gemma":
            raise Unsupported(f"config.{name}.model_type={one.model_type!r} is not supported, only 'gemma'")
        if one.rope_parameters.get("rope_type", "default") != "default":
            raise Unsupported(
                f"config.{name}.rope_parameters={one.rope_parameters!r}: rope_type must be 'default'"
            )
    for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
        if getattr(text, name) != getattr(expert, name):
            raise Unsupported(
                f"config.dit_config.{name}={getattr(expert, name)} must be {getattr(text, name)}, as in"
                " vlm_config.text_config: the expert attends to its keys"
            )
    if config.vlm_config.projection_dim != text.hidden_size:
        raise Unsupported(
            f"config.vlm_config.projection_dim={config.vlm_config.projection_dim} must be the text model's"
            f" hidden_size {text.hidden_size}"
        )
    if expert.hidden_size % 2:
        raise Unsupported(f"config.dit_config.hidden_size={expert.hidden_size} must be even")
    for name in ("chunk_size", "max_state_dim", "max_action_dim", "num_inference_steps"):
        if type(getattr(config, name)) is not int or getattr(config, name) < 1:
            raise Unsupported(
                f"config.{name}={getattr(config, name)!r} is not supported, only integers above 0"
            )


def _processor_of(folder: Path) -> Mapping[str, Any]:
    file = folder / "processor_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _statistics(folder: Path) -> dict[str, np.ndarray]:
    """The statistics of the processor; empty if it has none. Raises CheckpointError."""
    raw = _processor_of(folder)
    given = {name: raw[name] for name in STATISTICS if raw.get(name) is not None}
    if not given:
        return {}
    if missing := [name for name in STATISTICS if name not in given]:
        raise CheckpointError(
            f"{folder / 'processor_config.json'} has {', '.join(given)}, and no {missing[0]}"
        )
    try:
        return {name: numbers(value, name, (None,), "a list of numbers") for name, value in given.items()}
    except ValueError as error:
        raise CheckpointError(f"{folder / 'processor_config.json'}: {error}") from error


ARCH = Architecture(
    names=("PI0ForConditionalGeneration",),
    category="robotics",
    model="PI0ForConditionalGeneration",
    runner="Act",
    model_type="pi0",
    inputs="cameras",
    prefixes={
        "model.paligemma_with_expert.": "paligemma_with_expert.",
        "model.action_": "action_",
        "model.state_proj.": "state_proj.",
        "embed_action_time.": "",
    },
    renamed={
        "paligemma_with_expert.paligemma.lm_head.": "vlm.language_model.embed_tokens.",
        "paligemma_with_expert.paligemma.model.language_model.model.": "vlm.language_model.",
        "paligemma_with_expert.paligemma.model.vision_tower.vision_model.": "vlm.vision_tower.",
        "paligemma_with_expert.paligemma.model.": "vlm.",
        "paligemma_with_expert.gemma_expert.model.": "dit.",
        "paligemma_with_expert.gemma_expert.lm_head.": "dit.embed_tokens.",
        "model.vlm.": "vlm.",
        "model.dit.": "dit.",
    },
    unused=(
        "*rotary_emb.inv_freq",
        "dit.embed_tokens.*",
        "vlm.language_model.norm.*",
        "vlm.vision_tower.head.*",
    ),
)
