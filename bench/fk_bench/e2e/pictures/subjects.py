"""The models that are measured, and one call of each: images in, features out, or noise in, images out."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from fk_bench.e2e.pictures.graphs import Graphed, compile_blocks
from fk_bench.e2e.pictures.named import NAMED, build

PROMPTS = (
    "a red bicycle against a brick wall",
    "a lighthouse at night, oil painting",
    "a bowl of ripe cherries",
)


class SubjectError(ValueError):
    """A model cannot be measured: the message names it and the reason."""


class Subject(ABC):
    """A model of one host. `copy` gives each lane modules of its own, so that a patch of one leaves the others."""

    kind: str  # of a call's result: 'features' or 'images'
    latents: torch.Tensor | None = None  # before the decoder, in float32, of the last `result` of a pipeline

    def __init__(self, target: Any, image_size: int, steps: int):
        self.target, self.image_size, self.steps = target, image_size, steps

    @abstractmethod
    def parts(self) -> dict[str, torch.nn.Module]:
        """The modules that a call runs, by name."""

    @abstractmethod
    def compile(self, mode: str | None, blocks: bool = False) -> None:
        """Compile the parts that take the time; with `blocks`, their repeated blocks only."""

    @abstractmethod
    def capture(self) -> None:
        """Run that part in CUDA graphs from now on."""

    @abstractmethod
    def inputs(self, batch: int, seed: int) -> dict[str, Any]:
        """The arguments of one call, on the device; their values depend on `seed` only."""

    @abstractmethod
    def run(self, inputs: dict[str, Any]) -> torch.Tensor:
        """One call: features [batch, ...], images [batch, 3, H, W] in [0, 1], or videos [batch, frames, 3, H, W]."""

    def result(self, batch: int, seed: int) -> torch.Tensor:
        """One call in float32 and in memory of its own: CUDA graphs reuse their outputs."""
        return self.run(self.inputs(batch, seed)).float().clone()

    @abstractmethod
    def copy(self, wide: bool = False) -> Subject:
        """A copy that shares the weights; with `wide`, one in float32."""

    def channels_last(self) -> None:
        """Store the weights of convolutions with the channels last, as convolutions on GPUs prefer it."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        for part in self.parts().values():
            for weight in part.parameters():
                if weight.dim() in formats:
                    weight.data = weight.data.contiguous(memory_format=formats[weight.dim()])

    def _like(self, target: Any) -> Subject:
        made = copy.copy(self)
        made.target = target
        return made


class Encoder(Subject):
    """A timm model, or a transformers model whose main input are images or a video."""

    kind = "features"
    graphed: Graphed | None = None

    def __init__(self, target: Any, image_size: int, steps: int):
        super().__init__(target, image_size, steps)
        self._drawn: dict[tuple[int, int], torch.Tensor] = {}  # of one batch size, shared by all copies

    def parts(self) -> dict[str, torch.nn.Module]:
        return {"model": self.target}

    def compile(self, mode: str | None, blocks: bool = False) -> None:
        if blocks:
            compile_blocks(self.target, mode)
        else:
            self.target = torch.compile(self.target, mode=mode)

    def capture(self) -> None:
        self.graphed = Graphed(self.target)

    def copy(self, wide: bool = False) -> Subject:
        return self._like(_copied(self.target, wide))

    def inputs(self, batch: int, seed: int) -> dict[str, Any]:
        first, size = next(self.target.parameters()), self.image_size
        config: Any = getattr(self.target, "config", None)
        frames = (config.frames_per_clip,) if hasattr(config, "frames_per_clip") else ()
        channels: int = getattr(config, "num_channels", getattr(config, "in_chans", 3))
        if (batch, seed) not in self._drawn:  # videos of 32 requests take a CPU a second
            for old in [key for key in self._drawn if key[0] != batch]:
                del self._drawn[old]
            draw = torch.Generator().manual_seed(seed)
            self._drawn[batch, seed] = torch.randn(batch, *frames, channels, size, size, generator=draw)
        images = self._drawn[batch, seed].to(first.device, first.dtype)
        return {"x": images} if config is None else _inputs(self.target, images)

    def run(self, inputs: dict[str, Any]) -> torch.Tensor:
        model = self.graphed or self.target
        if "x" in inputs:
            return model(inputs["x"])
        out = model(**inputs)
        for name in ("logits", "pred_masks", "pooler_output", "last_hidden_state"):
            if getattr(out, name, None) is not None:
                return getattr(out, name)
        raise SubjectError(f"{type(self.target).__name__} returns neither logits, masks nor hidden states")


def _inputs(model: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of a transformers model; SigLIP 2's takes patches, V-JEPA 2's encoder a video."""
    if model.main_input_name == "pixel_values_videos":
        return {"pixel_values_videos": images, "skip_predictor": True}  # type: ignore[dict-item]
    known = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    if "input_boxes" in known:  # a segmenter, with a text of random tokens for each image
        config = model.config.text_config
        draw = torch.Generator().manual_seed(len(images))
        shape = (len(images), config.max_position_embeddings)
        ids = torch.randint(0, config.vocab_size, shape, generator=draw).to(images.device)
        return {"pixel_values": images, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "spatial_shapes" not in known:
        return {"pixel_values": images}
    p = model.config.patch_size
    rows, columns = images.shape[2] // p, images.shape[3] // p
    patches = images.unflatten(3, (columns, p)).unflatten(2, (rows, p)).permute(0, 2, 4, 3, 5, 1)
    ones = torch.ones(len(images), rows * columns, dtype=torch.int32, device=images.device)
    shapes = torch.tensor([[rows, columns]] * len(images))
    return {
        "pixel_values": patches.flatten(1, 2).flatten(2),
        "pixel_attention_mask": ones,
        "spatial_shapes": shapes,
    }


class Pipeline(Subject):
    """A diffusers pipeline that makes images or videos of prompts; without a tokenizer, of random embeddings.

    frames  of a video; 0: the pipeline's own number, or images
    """

    kind = "images"
    frames = 0

    def parts(self) -> dict[str, torch.nn.Module]:
        return {n: m for n, m in self.target.components.items() if isinstance(m, torch.nn.Module)}

    def compile(self, mode: str | None, blocks: bool = False) -> None:
        decoder = self.target.vae.decoder if getattr(self.target, "vae", None) is not None else None
        for model in (self._denoiser(), decoder):
            if model is not None and blocks:
                compile_blocks(model, mode)
            elif model is not None:
                model.compile(mode=mode)

    def capture(self) -> None:
        model = self._denoiser()
        model.forward = Graphed(model.forward)

    def copy(self, wide: bool = False) -> Subject:
        own = {
            name: _copied(part, wide) if isinstance(part, torch.nn.Module) else copy.deepcopy(part)
            for name, part in self.target.components.items()
        }
        made = type(self.target)(**own)
        made.set_progress_bar_config(disable=True)
        if wide and hasattr(getattr(made, "vae", None), "enable_slicing"):
            made.vae.enable_slicing()  # an image at a time: FLUX.1 in float32 leaves little of 80 GB for the decoder
        return self._like(made)

    def inputs(self, batch: int, seed: int) -> dict[str, Any]:
        return {"seed": seed, **self._prompts(batch, seed)}

    def result(self, batch: int, seed: int) -> torch.Tensor:
        return self.with_latents(self.inputs(batch, seed))[0].float().clone()

    def with_latents(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Images, and the latents before the decoder; the images again if the pipeline does not show them."""

        def keep(pipe: Any, step: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
            self.latents = state["latents"].float().clone()
            return {}

        shows = "callback_on_step_end" in inspect.signature(self.target.__call__).parameters
        more = {"callback_on_step_end": keep} if shows else {}
        made = self.run({**inputs, **more})
        return made, made if self.latents is None else self.latents

    def run(self, inputs: dict[str, Any]) -> torch.Tensor:
        given, seed = {name: value for name, value in inputs.items() if name != "seed"}, inputs["seed"]
        noise: Any = [torch.Generator().manual_seed(s) for s in (seed if isinstance(seed, list) else [seed])]
        noise = noise if isinstance(seed, list) else noise[0]  # a generator an image, or one for the batch
        size = {"height": self.image_size, "width": self.image_size} if self.image_size else {}
        size |= {"num_frames": self.frames} if self.frames else {}
        made = self.target(
            **given, num_inference_steps=self.steps, output_type="pt", generator=noise, **size
        )  # fmt: skip
        return made.frames if hasattr(made, "frames") else made.images

    def _denoiser(self) -> Any:
        found = getattr(self.target, "transformer", None) or getattr(self.target, "unet", None)
        if found is None:
            raise SubjectError(f"{type(self.target).__name__} has neither a transformer nor a UNet")
        return found

    def _prompts(self, batch: int, seed: int) -> dict[str, Any]:
        if getattr(self.target, "tokenizer", None) is not None:
            return {"prompt": [PROMPTS[(seed + i) % len(PROMPTS)] for i in range(batch)]}
        model = self._denoiser()
        first, config = next(model.parameters()), model.config
        draw = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(batch, *shape, generator=draw).to(first.device, first.dtype)

        if hasattr(config, "joint_attention_dim"):
            width, pooled = config.joint_attention_dim, config.pooled_projection_dim
            tokens = 512 if type(model).__name__ == "FluxTransformer2DModel" else 77
            return {"prompt_embeds": random(tokens, width), "pooled_prompt_embeds": random(pooled)}
        if hasattr(config, "text_embed_2_dim"):
            return {
                f"{sign}{name}": value
                for sign in ("", "negative_")
                for i, width, tokens in (
                    ("", config.text_embed_dim, 128),
                    ("_2", config.text_embed_2_dim, 32),
                )
                for name, value in (
                    (f"prompt_embeds{i}", random(tokens, width)),
                    (
                        f"prompt_embeds_mask{i}",
                        torch.ones(batch, tokens, dtype=torch.int64, device=first.device),
                    ),
                )
            }
        if config.addition_embed_type != "text_time":
            return {"prompt_embeds": random(77, config.cross_attention_dim)} | {
                "negative_prompt_embeds": random(77, config.cross_attention_dim)
            }
        width = config.cross_attention_dim
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        return {
            "prompt_embeds": random(77, width), "pooled_prompt_embeds": random(pooled),
            "negative_prompt_embeds": random(77, width), "negative_pooled_prompt_embeds": random(pooled),
        }  # fmt: skip


def _copied(model: torch.nn.Module, wide: bool) -> torch.nn.Module:
    """A deep copy of the modules with the same parameters and buffers; with `wide`, with float32 copies of these."""
    if wide:
        return copy.deepcopy(model).float()
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def open_subject(
    host: str, model: str, dtype: torch.dtype, device: str, load_format: str, image_size: int, steps: int,
    arguments: dict[str, Any],
) -> Subject:  # fmt: skip
    """Build a model.

    model        a timm name; a folder or hub id of transformers or of a pipeline; a name of NAMED
    load_format  'auto', or 'dummy': random weights, also of a folder that has only configurations
    image_size   pixels of a side; 0: the model's own
    arguments    more arguments of the host's constructor

    Raises SubjectError.
    """
    torch.manual_seed(0)
    try:
        if model in NAMED:
            target = build(model, dtype, device, image_size)
        else:
            target = _OPEN[host](model, load_format, arguments)
    except (OSError, ValueError, RuntimeError, ImportError, TypeError) as error:
        raise SubjectError(f"{host} cannot open {model!r}: {error}") from error
    if host == "diffusers":
        target.set_progress_bar_config(disable=True)
        target.to(device, dtype)
        made = Pipeline(target, image_size, steps)
        for part in made.parts().values():
            part.eval()  # like models of from_pretrained; in training mode, residual blocks copy images
        return made
    if load_format == "dummy" or model in NAMED:
        _randomize(target)
    target = target.to(device, dtype).eval().requires_grad_(False)
    return Encoder(target, image_size or _own_size(host, target), steps)


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    """Weights with which every layer counts: hosts initialize layer scales to 1e-5 and heads to 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, (parameter.numel() / len(parameter)) ** -0.5)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.02)
        else:
            parameter.normal_(1.0, 0.1)


def _timm(model: str, load_format: str, arguments: dict[str, Any]) -> Any:
    import timm

    return timm.create_model(model, pretrained=load_format != "dummy", **arguments)


def _transformers(model: str, load_format: str, arguments: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(model, **arguments)
    made = (
        AutoModel.from_config(config)
        if load_format == "dummy"
        else AutoModel.from_pretrained(model, config=config)
    )
    if made.main_input_name not in ("pixel_values", "pixel_values_videos"):
        raise SubjectError(f"{type(made).__name__} reads {made.main_input_name}, neither images nor videos")
    return made


def _diffusers(model: str, load_format: str, arguments: dict[str, Any]) -> Any:
    from diffusers import DiffusionPipeline

    if load_format != "dummy":
        return DiffusionPipeline.from_pretrained(model, **arguments)
    from fk_bench.e2e.pictures import random_pipeline

    return random_pipeline.build(Path(model), arguments)


_OPEN = {"timm": _timm, "transformers": _transformers, "diffusers": _diffusers}


def _own_size(host: str, model: Any) -> int:
    """Pixels of a side of the images that the model was made for."""
    if host == "timm":
        return (
            int(model.default_cfg["input_size"][-1]) if not hasattr(model, "patch_embed") else _patched(model)
        )
    size = getattr(model.config, "image_size", None) or getattr(model.config, "crop_size", None)
    if size is None and getattr(model.config, "num_patches", None):
        size = int(model.config.num_patches**0.5) * model.config.patch_size
    if not isinstance(size, int):
        raise SubjectError(f"{type(model).__name__} declares no image size: set --image-size")
    return size


def _patched(model: Any) -> int:
    size = getattr(model.patch_embed, "img_size", None)
    return int(size[-1]) if size else int(model.default_cfg["input_size"][-1])
