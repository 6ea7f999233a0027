"""Variants of a tiny checkpoint: a LoRA adapter for it, and the checkpoint quantized."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from experiments.checkpoints.make_checkpoint import FP8_DYNAMIC, quantized

GROUP = 32  # inputs that share a scale, in 4 bits
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns, of eight, of an int32's nibbles
CONFIGS = {
    "fp8": FP8_DYNAMIC,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}  # fmt: skip


def make_lora(folder: Path, model: Path, rank: int = 8, seed: int = 0) -> Path:
    """A random adapter for every linear layer of `model`, large enough (std 0.1) to change its outputs."""
    generator, tensors, targets = torch.Generator().manual_seed(seed), {}, set()
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix(".weight")
            targets.add(stem.rpartition(".")[2])
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                values = 0.1 * torch.randn(*shape, generator=generator)
                tensors[f"base_model.model.{stem}.lora_{part}.weight"] = values.to(weight.dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "lora_dropout": 0.0}))
    return folder


def make_quantized(folder: Path, model: Path, kind: str) -> Path:
    """`model` with its linear layers quantized to a kind of CONFIGS: fp8 (a scale per row and token), or 4 bits."""
    shutil.copytree(model, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= _KINDS[kind](name.removesuffix("weight"), weight.float())
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[kind]}))
    return folder


def _fp8(stem: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    values, scale = quantized(weight)
    return {f"{stem}weight": values, f"{stem}weight_scale": scale}


def _gptq(stem: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    values, zeros, scales = _four_bits(weight)
    groups = (torch.arange(len(values)) // GROUP).int()
    tensors = {"qweight": _packed(values.t()).t(), "qzeros": _packed(zeros - 1), "g_idx": groups}
    return {f"{stem}{name}": t.contiguous() for name, t in (tensors | {"scales": scales}).items()}


def _awq(stem: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    values, zeros, scales = _four_bits(weight)
    values, zeros = (t.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1) for t in (values, zeros))
    return {f"{stem}qweight": _packed(values), f"{stem}qzeros": _packed(zeros), f"{stem}scales": scales}


_KINDS: dict[str, Callable[[str, torch.Tensor], dict[str, torch.Tensor]]] = {
    "fp8": _fp8, "gptq": _gptq, "awq": _awq,
}  # fmt: skip


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values 0 to 15 [K, N], zero points (all 8) and scales [K / GROUP, N] of weight [N, K]."""
    groups = weight.t().unflatten(0, (-1, GROUP))
    scales = groups.abs().amax(1) / 7
    values = (groups / scales[:, None]).round().clamp(-8, 7) + 8
    return values.flatten(0, 1).long(), torch.full_like(scales, 8).long(), scales.half()


def _packed(values: torch.Tensor) -> torch.Tensor:
    """[R, C] of 0 to 15 to int32 [R, C / 8], the first column in the lowest bits."""
    words = (values.unflatten(1, (-1, 8)) << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Inverse of `_packed`: int32 [..., C] to [..., 8 C] of 0 to 15."""
    return ((words.unsqueeze(-1) >> (4 * torch.arange(8, dtype=torch.int32))) & 15).flatten(-2)
