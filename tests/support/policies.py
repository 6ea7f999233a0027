"""Tiny checkpoints of robot policies with random weights: Pi0 as transformers saves it, DP3 under its own key names."""

from __future__ import annotations

import base64
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

GEMMA = {
    "model_type": "gemma", "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 120,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "patch_size": 8, "image_size": 16, "vision_use_head": False,
}  # fmt: skip
IMAGE_TOKEN, IMAGE_TOKENS = 119, 4
PI0 = {
    "vlm_config": {
        "model_type": "paligemma", "text_config": GEMMA, "vision_config": SIGLIP, "projection_dim": 64,
        "image_token_id": IMAGE_TOKEN,
    },
    "dit_config": {**GEMMA, "hidden_size": 32, "intermediate_size": 72},
    "chunk_size": 5, "max_state_dim": 9, "max_action_dim": 6, "num_inference_steps": 4,
}  # fmt: skip
DP3 = {
    "architectures": ["SimpleDP3"], "model_type": "simple_dp3", "dtype": "float32",
    "shape_meta": {
        "obs": {"point_cloud": {"shape": [40, 3]}, "agent_pos": {"shape": [7]}}, "action": {"shape": [4]},
    },
    "horizon": 8, "n_obs_steps": 2, "n_action_steps": 4, "num_inference_steps": 4, "diffusion_step_embed_dim": 16,
    "down_dims": [16, 24, 32], "kernel_size": 3, "encoder_output_dim": 12,
    "noise_scheduler": {"num_train_timesteps": 20},
}  # fmt: skip


def pi0_reference(**changes: Any) -> Any:
    """transformers' model with random weights."""
    from transformers import PI0Config, PI0ForConditionalGeneration

    torch.manual_seed(0)
    model = PI0ForConditionalGeneration(PI0Config(**{**PI0, **changes})).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        std = 0.3 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
        parameter.data.normal_(0, std, generator=generator)
    return model


def pi0(folder: Path, **changes: Any) -> Any:
    """Save a checkpoint. Returns transformers' model."""
    model = pi0_reference(**changes)
    model.save_pretrained(folder)
    return model


def dp3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """{key: shape} of the state dict of the repository's SimpleDP3."""
    meta, made = config["shape_meta"], dict[str, tuple[int, ...]]()
    colored = config.get("use_pc_color", False)
    points, state, action = (
        6 if colored else 3,
        meta["obs"]["agent_pos"]["shape"][0],
        meta["action"]["shape"][0],
    )
    out, step, k = config["encoder_output_dim"], config["diffusion_step_embed_dim"], config["kernel_size"]

    def layer(name: str, a: int, b: int, *window: int, turned: bool = False) -> None:
        made[f"{name}.weight"] = (a, b, *window) if turned else (b, a, *window)
        made[f"{name}.bias"] = (b,)

    def norm(name: str, size: int) -> None:
        made[f"{name}.weight"] = made[f"{name}.bias"] = (size,)

    widths = [points, 64, 128, 256, *([512] if colored else [])]
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layer(f"obs_encoder.extractor.mlp.{3 * i}", a, b)
        if b != 512:
            norm(f"obs_encoder.extractor.mlp.{3 * i + 1}", b)
    layer("obs_encoder.extractor.final_projection.0", widths[-1], out)
    norm("obs_encoder.extractor.final_projection.1", out)
    layer("obs_encoder.state_mlp.0", state, 64)
    layer("obs_encoder.state_mlp.2", 64, 64)
    conditions = step + config["n_obs_steps"] * (out + 64)
    layer("model.diffusion_step_encoder.1", step, 4 * step)
    layer("model.diffusion_step_encoder.3", 4 * step, step)

    def block(name: str, a: int, b: int) -> None:
        for i, c in enumerate((a, b)):
            layer(f"{name}.blocks.{i}.block.0", c, b, k)
            norm(f"{name}.blocks.{i}.block.1", b)
        layer(f"{name}.cond_encoder.1", conditions, 2 * b)
        if a != b:
            layer(f"{name}.residual_conv", a, b, 1)

    dims = config["down_dims"]
    pairs = list(zip([action, *dims], dims, strict=False))
    for i, (a, b) in enumerate(pairs):
        block(f"model.down_modules.{i}.0", a, b)
        if i + 1 < len(pairs):
            layer(f"model.down_modules.{i}.1.conv", b, b, 3)
    block("model.mid_modules.0", dims[-1], dims[-1])
    for i, (a, b) in enumerate(reversed(pairs[1:])):
        block(f"model.up_modules.{i}.0", 2 * b, a)
        layer(f"model.up_modules.{i}.1.conv", a, a, 4, turned=True)
    layer("model.final_conv.0.block.0", dims[0], dims[0], k)
    norm("model.final_conv.0.block.1", dims[0])
    layer("model.final_conv.1", dims[0], action, 1)
    for field, size in (("point_cloud", points), ("agent_pos", state), ("action", action)):
        for name in ("scale", "offset", *(f"input_stats.{n}" for n in ("min", "max", "mean", "std"))):
            made[f"normalizer.params_dict.{field}.{name}"] = (size,)
    made["_dummy_variable"] = made["mask_generator._dummy_variable"] = (0,)
    return made


def dp3(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a checkpoint. Returns the state dict."""
    config = {**DP3, **changes}
    generator = torch.Generator().manual_seed(0)
    state = {}
    for key, shape in dp3_shapes(config).items():
        fan_in = max(int(np.prod(shape[1:])), 1)
        values = torch.randn(shape, generator=generator) * (0.3 if len(shape) < 2 else fan_in**-0.5)
        state[key] = values.abs() + 0.5 if key.endswith("scale") else values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return state


def images(count: int, seed: int = 0) -> list[Any]:
    """PIL images of several sizes."""
    from PIL import Image

    random = np.random.default_rng(seed)
    sizes = [(20, 28), (16, 16), (31, 9)]
    return [
        Image.fromarray(random.integers(0, 256, (*sizes[(i + seed) % 3], 3), dtype=np.uint8))
        for i in range(count)
    ]


def as_url(image: Any) -> str:
    """A data URL."""
    file = io.BytesIO()
    image.save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def observations(name: str, count: int) -> list[dict[str, Any]]:
    """Observations of Pi0 (one camera or two, prompts of several lengths) or of DP3 (clouds of several sizes)."""
    random, made = np.random.default_rng(0), []
    for i in range(count):
        if name == "pi0":
            prompt = [2, 5, 6, 9, 30][: 2 + i % 4]
            made.append(
                {
                    "images": images(1 + i % 2, i),
                    "state": random.normal(size=7 + i % 3).tolist(),
                    "prompt": prompt,
                }
            )
        else:
            cloud, state = random.normal(size=(2, 40 - 7 * (i % 3), 3)), random.normal(size=(2, 7))
            made.append({"point_cloud": cloud.tolist(), "state": state.tolist()})
    return made


def as_json(observation: dict[str, Any]) -> dict[str, Any]:
    """An observation as the body of a request has it."""
    if "images" not in observation:
        return observation
    return {**observation, "images": [as_url(image) for image in observation["images"]]}
