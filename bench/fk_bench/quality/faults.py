"""Planted faults: what a wrong kernel does to a model, made in its weights, so that it is the same in every host.

    residual   the middle layer's MLP is not added to the residual stream: its output projection is 0. In a model
               without MLPs it is the layer's mixer, and without attention, too, the middle matrix or kernel
    head       every attention takes heads 0 and 1 for each other: their columns of the output projection are swapped
    scale      every norm's output is 1% too large; in a model without norms, every matrix and kernel

A fault of a kernel occurs wherever the kernel runs, so the last two are in every layer. `reorder` is no fault: the
inner channels of every MLP are permuted, so that the model is the same and sums are taken in another order. Two correct
kernels differ by as much, also where a host gives the same bits in every run and batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

FAULTS = ("residual", "head", "scale")
REORDER = "reorder"
SCALE = 1.01
ONE_PLUS = (  # model types whose norms multiply by weight + 1
    "gemma", "gemma2", "gemma3", "gemma3_text", "nemotron", "qwen3_next", "recurrent_gemma",
)  # fmt: skip
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ATTENTION = re.compile(
    r"(o_proj|out_proj|wo|attn\.proj(\.conv)?|attention\.proj|attention\.output\.dense|attention\.dense|attn\.c_proj|to_out\.0|attn_out|attn\.o"
    r"|self_attention\.dense|linear_o)\.weight$"
)
_MLP = re.compile(
    r"(down_proj|fc2|w2|fc_out|dense_4h_to_h|mlp\.c_proj|ff\.net\.2|(?<!attention\.)output\.dense|mlp\.wo"
    r"|down_projs?|linear_2|output_linear|ff_out|ffn\.value|ffn\.1\.conv|transition(_\w+)?(\.\d+)?\.linear_out)\.weight$|experts\.(down_proj|w2_weight)$"
)
_MIXER = re.compile(r"mixer\.out_proj\.weight$")
_NORM = re.compile(r"(norm\w*|ln_?\w*|layernorm\w*)(\.\d+)?\.(weight|bias)$", re.IGNORECASE)
# Makes the shift, scale and gate of a norm, and then of a second one.
_MODULATION = re.compile(r"attn_norm\.linear\.bias$")
# An MLP's last projection, and those before it.
_INNER = (
    ("down_proj", ("gate_proj", "up_proj")), ("fc2", ("fc1",)), ("w2", ("w1", "w3")), ("c_proj", ("c_fc",)),
    ("dense_4h_to_h", ("dense_h_to_4h",)), ("output.dense", ("intermediate.dense",)),
    ("net.2", ("net.0.proj",)), ("down_proj", ("gate_up_proj",)), ("ff_out", ("ff_proj", "up_proj")),
    ("ff.2", ("ff.0.0",)), ("linear_out", ("swiglu.linear_a", "swiglu.linear_b")),
)  # fmt: skip
# Vectors over an MLP's inner channels: ConvNeXt V2's response norm, and a norm before the last projection.
_WITHIN = re.compile(r"(\bgrn|\b(mlp|ffn|feed_forward)\.\w*norm)\.(weight|bias|gamma|beta)$")
_LAYER = re.compile(r"\.(\d+)\.")


class CannotPlant(ValueError):
    """The model has no weights in which a fault can be made."""


class NoHeads(CannotPlant):
    """The model has no attention heads to confuse, so that the fault does not concern it."""


def planted(
    fault: str,
    names: Iterable[str],
    tensor: Callable[[str], torch.Tensor],
    heads: int,
    plus_one: bool = False,
    own: Mapping[str, int] | None = None,
) -> dict[str, torch.Tensor]:
    """The changed weights of a model with a fault, or with REORDER.

    heads     of an attention layer; 0: the model has none
    plus_one  norms multiply by weight + 1
    own       {name: heads of its attention layer}, of those that have other ones

    Raises CannotPlant.
    """
    names = sorted(names)
    if fault == "scale":
        norms = {n: tensor(n) for n in names if _NORM.search(n)}
        shift = {n: float(plus_one and n.endswith("weight")) for n in norms}
        found = {
            n: ((t.double() + shift[n]) * SCALE - shift[n]).to(t.dtype)
            for n, t in norms.items()
            if t.dim() == 1
        } or {n: (tensor(n).double() * SCALE).to(tensor(n).dtype) for n in _matrices(names, tensor)}
        found |= {n: _modulated(_floating(n, tensor(n))) for n in names if _MODULATION.search(n)}
    elif fault == "head":
        if heads < 2:
            raise NoHeads(f"head: the model has {heads} attention heads, at least 2 are needed")
        found = {n: _swapped(n, tensor(n), (own or {}).get(n, heads)) for n in names if _ATTENTION.search(n)}
    elif fault == REORDER:
        found = _reordered(names, tensor)
    else:
        by_layer: dict[int, list[str]] = {}
        last = _MLP if any(map(_MLP.search, names)) else _MIXER
        for name in names:
            if last.search(name) and (layer := _LAYER.search(name)):
                by_layer.setdefault(int(layer[1]), []).append(name)
        layers = sorted(by_layer)
        chosen = by_layer[layers[len(layers) // 2]] if layers else []
        if not any(map(last.search, names)) and not any(map(_ATTENTION.search, names)):
            matrices = _matrices(names, tensor)
            chosen = matrices[len(matrices) // 2 :][:1]
        found = {n: _floating(n, tensor(n)) * 0 for n in chosen}
    if not found:
        raise CannotPlant(f"{fault}: no weights of the kind were found among {', '.join(names[:5])}, ...")
    return found


def _matrices(names: Iterable[str], tensor: Callable[[str], torch.Tensor]) -> list[str]:
    """The matrices and kernels of a model, layers by number."""
    found = [n for n in names if tensor(n).dim() > 1 and tensor(n).dtype in _FLOATS]
    return sorted(found, key=lambda n: [int(p) if p.isdigit() else -1 for p in n.split(".")])


def _reordered(names: list[str], tensor: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    there, found = set(names), dict[str, torch.Tensor]()
    for name in names:
        for last, before in _INNER:
            prefix = name.removesuffix(f"{last}.weight")
            firsts = [n for b in before for n in (f"{prefix}{b}.weight", f"{prefix}{b}.bias") if n in there]
            if prefix == name or not firsts or not prefix.endswith("."):
                continue
            weight = _floating(name, tensor(name))
            own = {n: _floating(n, tensor(n)) for n in firsts}
            if any(len(t) != weight.shape[-1] for t in own.values()):  # gated, packed
                continue
            order = torch.randperm(weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(
                weight.device
            )
            within = {n: tensor(n) for n in names if n.startswith(prefix) and _WITHIN.search(n)}
            vectors = {n: t[..., order] for n, t in within.items() if t.numel() == t.shape[-1] == len(order)}
            found |= {name: weight[..., order], **{n: t[order] for n, t in own.items()}, **vectors}
    return found


def _floating(name: str, weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype not in _FLOATS:
        raise CannotPlant(f"{name} has {weight.dtype}: faults are planted in unquantized weights")
    return weight


def _modulated(bias: torch.Tensor) -> torch.Tensor:
    """Scales that are larger by those of a norm without weights: [6 * C]."""
    found = bias.clone().unflatten(0, (6, -1))
    found[[1, 4]] += SCALE - 1
    return found.flatten()


def _swapped(name: str, weight: torch.Tensor, heads: int) -> torch.Tensor:
    axis = 1 if _floating(name, weight).dim() > 2 else -1  # a convolution's weight is [out, in, ...]
    size, rest = divmod(weight.shape[axis], heads)
    if rest:
        raise CannotPlant(f"{name} has {weight.shape[axis]} columns, no multiple of {heads} heads")
    found = weight.clone().movedim(axis, -1)
    own = weight.movedim(axis, -1)
    found[..., :size], found[..., size : 2 * size] = own[..., size : 2 * size], own[..., :size]
    return found.movedim(-1, axis)


def one_plus(config: Mapping[str, Any]) -> bool:
    """Whether the norms of a model with this config.json multiply by weight + 1."""
    return config.get("model_type") in ONE_PLUS


def heads_of(config: Mapping[str, Any]) -> int:
    """The attention heads of a config.json."""
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
    return int(next((config[n] for n in names if isinstance(config.get(n), int)), 0))


def faulty_checkpoint(model: Path, fault: str, folder: Path) -> Path:
    """Write a checkpoint with a fault into a new folder; files without a change are links. Raises CannotPlant."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    where: dict[str, Path] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)

    def tensor(name: str) -> torch.Tensor:
        with safe_open(where[name], "pt") as opened:
            return opened.get_tensor(name)

    config = json.loads((model / "config.json").read_text())
    changed = planted(fault, where, tensor, heads_of(config), one_plus(config))
    folder.mkdir()
    edited = {where[name] for name in changed}
    for file in model.iterdir():  # folders, too: an embedder has one that names its pooling
        if file in edited:
            weights = load_file(file)
            save_file(
                {n: changed.get(n, t).contiguous() for n, t in weights.items()},
                folder / file.name,
                {"format": "pt"},
            )
        else:
            (folder / file.name).symlink_to(file.resolve())
    return folder
